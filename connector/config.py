"""Everything the connector takes from a vLLM configuration, read once and checked: options, layout, cache format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any

from layouts import ConfigError, ParallelLayout
from transport.control.messages import CacheFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig


@dataclass(frozen=True, slots=True)
class WeaveConfig:
    """The keys of `kv_connector_extra_config`, with their defaults."""

    host: str = "127.0.0.1"
    """Address of this machine at which decode nodes reach the control port of a prefill node; no wildcard."""
    port: int = 0
    """Control port of a prefill node; 0 takes a free one (it is advertised in every response)."""
    lease_s: float = 30.0
    """How long a finished prefill stays readable without a sign of life from its decode node."""
    open_timeout_s: float = 6.0
    """How long a decode node waits for a prefill node's answer before it prefills locally."""
    wait_timeout_s: float = 300.0
    """How long a decode node keeps a lease while its request waits for blocks, before it prefills locally."""
    read_timeout_s: float = 60.0
    """How long one rank's reads may take before the load fails."""
    transport: str = "nixl"
    """Name of the transport that moves the bytes."""
    nixl_backend: str = "UCX"
    """NIXL backend, where the transport is nixl."""
    allowed_peers: str = ""
    """Addresses or networks (10.0.0.0/8) of the prefill nodes, comma-separated; empty allows any. Set it where clients
    can reach a decode node directly: they could name a host of their own in `kv_transfer_params`."""
    model_id: str = ""
    """What has to be equal on both nodes for their caches to be of one model; default: the value of --model."""

    def __post_init__(self) -> None:
        _check("port", self.port, 0 <= self.port < 65536, "0..65535")
        for name in ("lease_s", "open_timeout_s", "wait_timeout_s", "read_timeout_s"):
            _check(name, getattr(self, name), 1 <= getattr(self, name) <= 86400, "1 to 86400 seconds")
        try:
            self.peer_networks()
        except ValueError as error:
            _check("allowed_peers", self.allowed_peers, False, f"addresses or networks, comma-separated ({error})")

    def peer_networks(self) -> list[IPv4Network | IPv6Network]:
        """`allowed_peers`, read."""
        return [ip_network(part.strip()) for part in self.allowed_peers.split(",") if part.strip()]

    def allows_peer(self, host: str) -> bool:
        """Whether a prefill node at this numeric address may be contacted."""
        networks = self.peer_networks()
        return not networks or any(ip_address(host) in network for network in networks)

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> WeaveConfig:
        """Raises ConfigError for an unknown key, a wrong type or a value out of range."""
        kinds: dict[str, type] = {field.name: type(field.default) for field in fields(cls)}
        for key, value in extra.items():
            _check(key, value, key in kinds, f"the keys {', '.join(kinds)}")
            kind = kinds[key]
            number = kind is float and isinstance(value, int) and not isinstance(value, bool)
            _check(key, value, type(value) is kind or number, f"a value of type {kind.__name__}")
        return cls(**{key: kinds[key](value) for key, value in extra.items()})


def single_group_spec(kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The KV cache spec of a model whose layers all share one full-attention group; anything else is refused."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, (FullAttentionSpec, MLAAttentionSpec)):
        raise ConfigError(
            f"the model has the KV cache groups {kinds}; WeaveConnector moves models with one full-attention group. "
            "Use another connector for hybrid, sliding-window or state-space models."
        )
    return groups[0].kv_cache_spec


def layout_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ParallelLayout:
    """Who holds what on this engine. In a worker it is exact; a scheduler's copy of the interleave can be stale."""
    from vllm.distributed.utils import get_pp_indices

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers, pp = model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
    stages = [get_pp_indices(num_layers, stage, pp) for stage in range(pp)]
    return ParallelLayout(
        tp=parallel.tensor_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        pp=pp,
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        mla=model.use_mla,
        interleave_tokens=parallel.cp_kv_cache_interleave_size,
        block_tokens=single_group_spec(kv_cache_config).block_size,
        num_layers=num_layers,
        layers_per_stage=tuple(stop - start for start, stop in stages),
    )


def cache_format_of(
    vllm_config: VllmConfig,
    layout: ParallelLayout,
    config: WeaveConfig,
    kv_dtype: str,
    head_bytes: int,
    page: str,
) -> CacheFormat:
    """What a peer's cache must equal for its bytes to mean the same here."""
    model = vllm_config.model_config
    return CacheFormat(
        model=config.model_id or model.model,
        dtype=str(model.dtype),
        kv_dtype=kv_dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_bytes=head_bytes,
        mla=layout.mla,
        page=page,
    )


def _check(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ConfigError(f"kv_connector_extra_config {name}={value!r}; allowed: {allowed}")
