"""What a vLLM configuration asks of this package, and what of that cannot work. Reads settings, changes none."""

from typing import Any

from layouts import ConfigError, ParallelLayout
from layouts.errors import config_error

CONNECTOR = "WeaveConnector"
"""Name of the KV connector that can only cut pages at tokens when they are plain."""


def uses_context_parallel(vllm_config: Any) -> bool:
    """Whether prefill or decode context parallelism is asked for."""
    parallel = vllm_config.parallel_config
    return bool(parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1)


def uses_plain_pages(vllm_config: Any) -> bool:
    """Whether the attention backend of this package replaces CPU_ATTN."""
    return uses_context_parallel(vllm_config) or pages_wanted(vllm_config.kv_transfer_config) == "plain"


def pages_wanted(transfer_config: Any) -> str:
    """What the connector's key `pages` asks for: "plain", its default, which fits any layout on the other side, or
    "native", vLLM's own; empty without that connector."""
    if transfer_config is None or not transfer_config.has_connector(CONNECTOR):
        return ""
    extra = transfer_config.kv_connector_extra_config
    if transfer_config.kv_connector != CONNECTOR:  # one of several, inside a MultiConnector
        child = next(child for child in extra["connectors"] if child.get("kv_connector") == CONNECTOR)
        extra = child.get("kv_connector_extra_config", {})
    return str(extra.get("pages", "plain"))


def shards_over_pcp_only(parallel_config: Any) -> bool:
    """Whether the KV shards are the PCP ranks, so that a shard needs no more KV heads than its TP rank has."""
    pcp = parallel_config.prefill_context_parallel_size
    return bool(pcp > 1 and parallel_config.decode_context_parallel_size == pcp)


def parallel_layout(vllm_config: Any) -> ParallelLayout:
    """The layout the flags describe.

    Raises:
        ConfigError: sizes that cannot work together.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return ParallelLayout(
        tp=parallel.tensor_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        pp=parallel.pipeline_parallel_size,
        num_kv_heads=model.get_total_num_kv_heads(),
        mla=model.use_mla,
        interleave_tokens=parallel.cp_kv_cache_interleave_size,
        block_tokens=vllm_config.cache_config.block_size,
        num_layers=parallel.pipeline_parallel_size,
    )


def check_context_parallel(vllm_config: Any) -> None:
    """Refuses what cannot run with context parallelism on CPU.

    Raises:
        ConfigError: with the numbers and a remedy.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    parallel_layout(vllm_config)
    if pages_wanted(vllm_config.kv_transfer_config) == "native":
        raise _unsupported('"pages": "native" in kv_connector_extra_config', '"pages": "plain", which is the default')
    if model.use_mla or model.is_hybrid or model.is_encoder_decoder:
        raise _unsupported(model.architecture, "decoder models with grouped-query attention")
    if vllm_config.cache_config.cache_dtype != "auto":
        raise _unsupported(f"--kv-cache-dtype {vllm_config.cache_config.cache_dtype}", "--kv-cache-dtype auto")
    if parallel.prefill_context_parallel_size > 1:
        _check_prefill_context_parallel(vllm_config)


def _check_prefill_context_parallel(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if dcp not in (1, pcp):
        raise config_error(
            f"--decode-context-parallel-size with --prefill-context-parallel-size {pcp} and "
            f"--tensor-parallel-size {parallel.tensor_parallel_size} on CPU",
            got=dcp,
            allowed=f"1 or {pcp}",
            remedy=f"Shard the KV cache over the PCP ranks alone (--decode-context-parallel-size {pcp}).",
        )
    model = vllm_config.model_config
    used = {  # each of these counts on every rank having all rows of the step
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        f"{model.architecture} (mixture of experts)": model.is_moe,
        f"{model.architecture} (multimodal)": model.is_multimodal_model or model.uses_mrope,
    }
    for got, is_used in used.items():
        if is_used:
            raise _unsupported(got, "dense text models on one pipeline stage with --prefill-context-parallel-size > 1")


def _unsupported(got: str, allowed: str) -> ConfigError:
    return config_error(
        "context parallelism on CPU",
        got=got,
        allowed=allowed,
        remedy="Change that, or set --prefill-context-parallel-size and --decode-context-parallel-size to 1.",
    )


def unsupported_layer(selector: Any) -> list[str]:
    """What of an attention layer (vLLM's AttentionSelectorConfig) the backend of this package cannot do."""
    found = {
        "MLA": selector.use_mla,
        "sparse attention": selector.use_sparse,
        "attention sinks": selector.has_sink,
        "a sliding window": selector.has_sliding_window,
        "multimodal prefixes": selector.use_mm_prefix,
        f"{selector.attn_type} attention": selector.attn_type != "decoder",
        f"cache type {selector.kv_cache_dtype}": selector.kv_cache_dtype not in (None, "auto"),
        "non-causal attention": selector.use_non_causal,
    }
    return [name for name, is_used in found.items() if is_used]
