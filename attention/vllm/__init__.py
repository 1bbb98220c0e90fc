"""Makes vLLM 0.32 run prefill and decode context parallelism with grouped-query attention on CPU."""
