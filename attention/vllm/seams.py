"""The four functions of vLLM 0.32 that this package wraps, each after a check that it still looks as expected.

To be installed on the CPU platform only. All four run while the engine is configured; what runs in a worker is reached
from there by name (`worker_cls` and the path of the attention backend), so nothing heavy is imported here.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention.vllm import settings
from layouts.errors import config_error

BACKEND = "attention.vllm.backend.PlainPageBackend"
WORKER = "attention.vllm.worker.ContextParallelWorker"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"

Function = Callable[..., Any]


class SeamError(RuntimeError):
    """The installed vLLM is not one this package knows how to extend."""


def require_parameters(function: Function, *expected: str) -> None:
    """Checks that a function of vLLM still takes these parameters, in this order.

    Raises:
        SeamError: naming the function and the vLLM version.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        raise _seam_error(
            f"{function.__module__}.{function.__qualname__}",
            f"parameters {', '.join(found)}",
            f"parameters {', '.join(expected)}",
        )


def _seam_error(thing: str, got: str, expected: str) -> SeamError:
    from vllm.version import __version__

    return SeamError(
        f"{thing} of vLLM {__version__}: got {got}; expected {expected}. Install vLLM 0.32, or leave kvweave_attention "
        "out of VLLM_PLUGINS."
    )


@dataclass(frozen=True, slots=True)
class Seam:
    """A method of vLLM to wrap: `wrapper` gets the stock function first, then its arguments."""

    owner: type
    name: str
    parameters: tuple[str, ...]
    wrapper: Function

    @property
    def stock(self) -> Function:
        """The function in place now."""
        attribute = vars(self.owner)[self.name]
        function: Function = attribute.__func__ if self.is_class_method else attribute
        return function

    @property
    def is_class_method(self) -> bool:
        return isinstance(vars(self.owner)[self.name], classmethod)

    @property
    def is_wrapped(self) -> bool:
        return getattr(self.stock, "_wrapped_by", None) is self.wrapper

    def check(self) -> None:
        """Raises SeamError when vLLM's method is not there or takes other parameters."""
        if self.name not in vars(self.owner):
            raise _seam_error(f"{self.owner.__module__}.{self.owner.__qualname__}", f"no method {self.name}", "one")
        require_parameters(self.stock, *self.parameters)

    def wrap(self) -> None:
        """Replaces the method; a class method stays one."""
        stock = self.stock

        @functools.wraps(stock)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self.wrapper(stock, *args, **kwargs)

        wrapped._wrapped_by = self.wrapper  # type: ignore[attr-defined]
        setattr(self.owner, self.name, classmethod(wrapped) if self.is_class_method else wrapped)


def install() -> None:
    """Wraps the four functions in this process; again is harmless.

    Raises:
        SeamError: one of them has changed; then none is wrapped.
    """
    from vllm.config import ModelConfig, VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    install_all(
        Seam(ModelConfig, "verify_with_parallel_config", ("self", "parallel_config"), _verify_heads),
        Seam(VllmConfig, "_get_v1_model_runner_unsupported_features", ("self",), _list_unsupported),
        Seam(CpuPlatform, "check_and_update_config", ("cls", "vllm_config"), _update_config),
        Seam(
            CpuPlatform,
            "get_attn_backend_cls",
            ("cls", "selected_backend", "attn_selector_config", "num_heads"),
            _select_backend,
        ),
    )


def install_all(*seams: Seam) -> None:
    """Checks all seams, then wraps those that are not wrapped yet."""
    for seam in seams:
        seam.check()
    for seam in seams:
        if not seam.is_wrapped:
            seam.wrap()


def _verify_heads(stock: Function, model_config: Any, parallel_config: Any) -> None:
    """vLLM wants TP > KV heads for DCP. With the KV sharded over the PCP ranks that rule has no reason."""
    if settings.shards_over_pcp_only(parallel_config):
        parallel_config = copy.copy(parallel_config)
        parallel_config.decode_context_parallel_size = 1
    stock(model_config, parallel_config)


def _list_unsupported(stock: Function, vllm_config: Any) -> list[str]:
    """The worker of this package adds prefill context parallelism to the V1 model runner."""
    return [feature for feature in stock(vllm_config) if feature != "prefill context parallel"]


def _update_config(stock: Function, platform: Any, vllm_config: Any) -> None:
    """With context parallelism: checks the sizes and selects the worker."""
    stock(platform, vllm_config)
    if vllm_config.model_config is None or not settings.uses_context_parallel(vllm_config):
        return
    settings.check_context_parallel(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in (STOCK_WORKER, WORKER):
        raise config_error(
            "--worker-cls with context parallelism on CPU",
            got=parallel.worker_cls,
            allowed=STOCK_WORKER,
            remedy=f"Leave --worker-cls out, or derive the worker from {WORKER}.",
        )
    parallel.worker_cls = WORKER


def _select_backend(
    stock: Function,
    platform: Any,
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    """Plain pages where they are needed and the layer is one the backend can do, else the stock backend."""
    from vllm.config import get_current_vllm_config

    path: str = stock(platform, selected_backend, attn_selector_config, num_heads)
    if not settings.uses_plain_pages(get_current_vllm_config()):
        return path
    reasons = settings.unsupported_layer(attn_selector_config)
    if not reasons:
        return BACKEND
    if not settings.uses_context_parallel(get_current_vllm_config()):
        return path
    raise config_error(
        "attention layer with context parallelism on CPU",
        got=", ".join(reasons),
        allowed="causal grouped-query attention over all tokens, with an unquantized cache",
        remedy="Choose another model, or set --prefill-context-parallel-size and --decode-context-parallel-size to 1.",
    )
