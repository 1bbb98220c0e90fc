"""One rank's KV cache as vLLM registers it: which layer and heads each tensor holds, and how its pages are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layouts import ConfigError, Holding
from transport.regions import Memory, Region, memory_of, region_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class RankCache:
    """The regions of one rank by global layer index, and what all of them have in common."""

    regions: dict[int, Region]
    memory: list[Memory]
    dtype: str
    head_bytes: int
    page: str


def rank_cache(
    kv_caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig, holding: Holding, block_tokens: int
) -> RankCache:
    """Read the tensors given to `register_kv_caches` (logical [num_blocks, heads, tokens, content], any strides).

    Raises ConfigError when the layers are not those this rank should hold, or are not all alike.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    page = page_format(vllm_config)
    regions = {
        extract_layer_index(name): region_of(
            tensor, layer=extract_layer_index(name), heads=holding.heads, page=page, block_tokens=block_tokens
        )
        for name, tensor in kv_caches.items()
    }
    expected = list(range(*holding.layers))
    if sorted(regions) != expected or len(regions) != len(kv_caches):
        raise ConfigError(
            f"this rank registers the layers {sorted(kv_caches)}, expected one cache for each of the layers "
            f"{expected[0]}..{expected[-1]}: models with several caches in a layer are not supported"
        )
    kinds = {(str(tensor.dtype), regions[extract_layer_index(name)].token_bytes) for name, tensor in kv_caches.items()}
    if len(kinds) != 1:
        raise ConfigError(f"the layers' caches differ in dtype or content size: {sorted(kinds)}; all must be alike")
    dtype, head_bytes = kinds.pop()
    return RankCache(regions, memory_of(list(kv_caches.values())), dtype, head_bytes, page)


def page_format(vllm_config: VllmConfig) -> str:
    """ "plain" when a page is token-sliceable, else the name of the opaque format (stock CPU pages transpose K)."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    backends = {layer.get_attn_backend() for layer in layers.values()}
    formats = {
        getattr(backend, "kv_page_format", "cpu_attn" if backend.get_name() == "CPU_ATTN" else "plain")
        for backend in backends
    }
    if len(formats) != 1:
        raise ConfigError(f"the layers' attention backends use the page formats {sorted(formats)}; one is supported")
    return str(formats.pop())
