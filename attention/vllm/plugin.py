"""Entry point of the `vllm.general_plugins` group: loaded in every vLLM process, on every platform."""


def register() -> None:
    """Teaches vLLM's CPU platform context parallelism. Does nothing on other platforms; may be called repeatedly."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from attention.vllm import seams

        seams.install()
