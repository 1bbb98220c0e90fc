"""Everything the connector takes from a vLLM configuration, read once and checked: options, layout, cache format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from connector.allowed import PRIVATE, AllowedPeers
from layouts import ConfigError, ParallelLayout
from transport import TRANSPORTS, Transport, create_transport
from transport.control.messages import CacheFormat
from transport.cost import PATHS
from transport.data_plane import AUTO, ReadOptions, ReadPath

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig


@dataclass(frozen=True, slots=True)
class WeaveConfig:
    """The keys of `kv_connector_extra_config`, with their defaults."""

    host: str = "127.0.0.1"
    """Address of this machine at which decode nodes reach the control port of a prefill node; no wildcard."""
    port: int = 0
    """Control port of a prefill node; 0 takes a free one (it is advertised in every response). A node that only decodes
    opens one if this is set, for `python -m kvweave doctor`."""
    lease_s: float = 30.0
    """How long a finished prefill stays readable without a sign of life from its decode node."""
    open_timeout_s: float = 6.0
    """How long a decode node waits for a prefill node's answer before it prefills locally."""
    wait_timeout_s: float = 300.0
    """How long a decode node keeps a lease while its request waits for blocks, before it prefills locally."""
    read_timeout_s: float = 60.0
    """How long one rank's reads may take before the load fails."""
    transport: str = "auto"
    """What moves the bytes: nixl, cma (one host), or auto: cma where both ends share a host, else nixl."""
    nixl_backend: str = "UCX"
    """NIXL backend, where the transport is nixl."""
    read_path: str = "auto"
    """How many small pieces move: direct, gather, scatter, pack, or auto, the cheapest each time."""
    staging_mib: int = 64
    """Bound of a rank's staging memory for packed moves, in each direction that the rank serves."""
    segment_us: float = 0.0
    """Cost of one more piece in a read, in microseconds; 0: measured at start."""
    copy_gb_per_s: float = 0.0
    """Speed of copies into and out of staging memory; 0: measured at start."""
    pages: str = "plain"
    """Pages of the KV cache on the CPU platform: "plain" fits any layout on the other side; "native" are vLLM's own,
    which move between equal layouts only but have the faster kernels. GPU backends have pages of one kind."""
    keys_dir: str = ""
    """Key directory of this node (python -m kvweave keys) to encrypt the control channel with; empty: not encrypted."""
    allowed_peers: str = PRIVATE
    """Whom a decode node may ask: addresses, networks, names, `private` or `any`, comma-separated."""
    model_id: str = ""
    """What has to be equal on both nodes for their caches to be of one model; default: the value of --model."""

    def __post_init__(self) -> None:
        _check("port", self.port, 0 <= self.port < 65536, "0..65535")
        names = ("auto", *TRANSPORTS)
        _check("transport", self.transport, self.transport in names, ", ".join(names))
        _check("read_path", self.read_path, self.read_path in ("auto", *PATHS), ", ".join(("auto", *PATHS)))
        _check("staging_mib", self.staging_mib, 4 <= self.staging_mib <= 1 << 16, "4 to 65536 MiB")
        _check("segment_us", self.segment_us, 0 <= self.segment_us <= 1e5, "0 to 100000")
        _check("copy_gb_per_s", self.copy_gb_per_s, 0 <= self.copy_gb_per_s <= 1e4, "0 to 10000")
        for name in ("lease_s", "open_timeout_s", "wait_timeout_s", "read_timeout_s"):
            _check(name, getattr(self, name), 1 <= getattr(self, name) <= 86400, "1 to 86400 seconds")
        _check("pages", self.pages, self.pages in ("plain", "native"), "plain, native")
        AllowedPeers.parse(self.allowed_peers)

    def transports(self) -> list[list[Transport]]:
        """What `DataPlane` takes: groups of alternatives, not started."""
        options: dict[str, dict[str, Any]] = {
            "nixl": {"backend": self.nixl_backend},
        }
        groups = AUTO if self.transport == "auto" else ((self.transport,),)
        return [[create_transport(name, **options.get(name, {})) for name in group] for group in groups]

    def read_options(self) -> ReadOptions:
        """How the data plane reads."""
        return ReadOptions(
            path=cast("ReadPath", self.read_path),
            staging_bytes=self.staging_mib << 20,
            segment_s=1e-6 * self.segment_us,
            copy_s=1e-9 / self.copy_gb_per_s if self.copy_gb_per_s else 0.0,
        )

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
