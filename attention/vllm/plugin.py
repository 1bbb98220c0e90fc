"""Entry point of the `vllm.general_plugins` group: loaded in every vLLM process, on every platform."""

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Teaches vLLM's CPU platform context parallelism. Does nothing on other platforms; may be called repeatedly.

    On a vLLM that has changed too much it says so and leaves everything as it is, so that vLLM itself still starts.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from attention.vllm import seams

    try:
        seams.install()
    except seams.SeamError as error:
        logger.error("%s Context parallelism on CPU stays off.", error)
