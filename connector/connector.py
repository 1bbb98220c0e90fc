"""`WeaveConnector`: vLLM's hooks, each a few lines that hand over to a scheduler side or to the worker side.

Every rank reports every parked or pinned request exactly once; no hook waits for a peer. What the hooks must respect
is written at vllm.distributed.kv_transfer.kv_connector.v1.base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from connector.caches import RankCache, rank_cache
from connector.config import WeaveConfig, cache_format_of, layout_of
from connector.consumer import Consumer
from connector.jobs import StepWork
from connector.lease import Offer
from connector.metrics import WeavePromMetrics, WeaveStats
from connector.pace import Pace, favour_short_threads, sleep_instead_of_spinning
from connector.params import wants_remote_decode
from connector.producer import Producer
from connector.prompt import consists_of_tokens, digest_of
from connector.reception import Reception
from connector.signing import SharedSecret
from connector.stats import Counters
from connector.worker import Worker
from layouts import ConfigError, ParallelLayout
from transport.control.client import ControlClient
from transport.control.keys import load_keys
from transport.control.messages import CacheFormat, Manifest, PlacementInfo, RankInfo
from transport.data_plane import DataPlane

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

PREFILLED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class WeaveMetadata(KVConnectorMetadata):
    """The scheduler's word to the workers, each step."""

    work: StepWork


@dataclass
class WeaveHandshake(KVConnectorHandshakeMetadata):
    """The workers' word to the scheduler, once: what only they know. Holds all ranks of one PCP group, because
    vLLM keys this by (pp, tp) alone."""

    ranks: dict[int, RankInfo]
    layout: ParallelLayout
    cache: CacheFormat
    transports: list[str]


class WeaveConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between engines that shard it differently. See README.md for its configuration."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = WeaveConfig.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._layout = layout_of(vllm_config, kv_cache_config)
        self._counters = Counters()
        self._pace = Pace()
        favour_short_threads()
        sleep_instead_of_spinning()
        self._worker: Worker | None = None
        self._handshake: WeaveHandshake | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._reception: Reception | None = None
        self._keys = load_keys(self._config.keys_dir)
        if role is KVConnectorRole.SCHEDULER:
            self._secret = SharedSecret.from_environment()
            self._open_port()

    def _open_port(self) -> None:
        host, port, lease_s = self._config.host, self._config.port, self._config.lease_s
        if self._kv_transfer_config.is_kv_producer:
            self._producer = Producer(host, port, lease_s, self._counters, self._pace, keys=self._keys)
        elif port:
            self._reception = Reception(host, port, self._keys)

    # Both sides

    def shutdown(self) -> None:
        for part in (self._worker, self._producer, self._consumer, self._reception):
            if part is not None:
                part.close()

    def get_kv_connector_stats(self) -> WeaveStats | None:
        sums = self._counters.take()
        return WeaveStats(sums) if sums else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> WeaveStats:
        return WeaveStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any) -> WeavePromMetrics:
        return WeavePromMetrics(vllm_config, *args)

    @classmethod
    def supports_sleep_mode(cls) -> bool:
        """vLLM 0.33: peers hold addresses of this cache, so it must not move or vanish under them."""
        return False

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, sleep mode only."""
        raise ConfigError("WeaveConnector does not support sleep mode: start vLLM without --enable-sleep-mode")

    def restore_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM 0.33, sleep mode only."""
        self.unregister_kv_caches()

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = _rank_of_this_worker(self._layout)
        placement = self._layout.placement
        cache = rank_cache(kv_caches, self._vllm_config, placement.holdings[rank], self._layout.block_tokens)
        plane = DataPlane(self._config.transports(), self._config.read_options(), self._config.host, self._keys)
        self._worker = Worker(rank, placement, plane, ControlClient(self._keys), self._counters)
        self._worker.register(cache.regions, cache.memory)
        info = RankInfo(rank, b"", [])
        if self._kv_transfer_config.is_kv_producer:
            info = self._worker.serve()
        if self._kv_transfer_config.is_kv_consumer:
            self._worker.start_reading(self._config.read_timeout_s)
        self._handshake = WeaveHandshake({rank: info}, self._layout, self._format(cache), plane.kinds)

    def _format(self, cache: RankCache) -> CacheFormat:
        return cache_format_of(
            *(self._vllm_config, self._layout, self._config, cache.dtype, cache.head_bytes, cache.page)
        )

    def get_handshake_metadata(self) -> WeaveHandshake | None:
        """Called on all workers at once, which the exchange within the PCP group needs."""
        assert self._handshake is not None, "register_kv_caches comes first"
        self._handshake.ranks.update(_gather_over_pcp(self._handshake.ranks))
        return self._handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker is not None and isinstance(self._connector_metadata, WeaveMetadata)
        self._worker.begin(self._connector_metadata.work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after all its layers are here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Decode nodes read from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return KVConnectorTransferResults(*self._worker.take_results(finished_req_ids))

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every worker has registered its memory: open for business."""
        handshakes = [entry for entry in metadata.values() if isinstance(entry, WeaveHandshake)]
        ranks = {rank: info for handshake in handshakes for rank, info in handshake.ranks.items()}
        layout, cache = handshakes[0].layout, handshakes[0].cache
        if sorted(ranks) != list(range(layout.num_ranks)):
            raise ConfigError(
                f"ranks {sorted(ranks)} registered their caches, expected all of 0..{layout.num_ranks - 1}"
            )
        placement = PlacementInfo.from_placement(layout.placement)
        if self._producer is not None:
            ordered = [ranks[rank] for rank in sorted(ranks)]
            manifest = Manifest(self._producer.incarnation, cache, placement, ordered)
            self._producer.start(manifest, handshakes[0].transports)
        if self._reception is not None:
            self._reception.start(cache, placement, handshakes[0].transports)
        if self._kv_transfer_config.is_kv_consumer:
            self._consumer = Consumer(
                *(ControlClient(self._keys), cache, placement, self._config, self._counters, self._pace),
                secret=self._secret,
                transports=handshakes[0].transports,
            )
            self._consumer.start()

    def on_new_request(self, request: Request) -> None:
        if self._consumer is not None and consists_of_tokens(request):
            self._consumer.on_new_request(
                request.request_id, request.kv_transfer_params, request.num_tokens, digest_of(request)
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._consumer is None:
            return 0, False
        return self._consumer.get_num_new_matched_tokens(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._consumer is not None:
            self._consumer.update_state_after_alloc(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> WeaveMetadata:
        self._pace.step(is_idle=scheduler_output.total_num_scheduled_tokens == 0)
        work = self._consumer.take_work() if self._consumer is not None else StepWork()
        if self._producer is not None:
            work.released.extend(self._producer.take_ended())
        return WeaveMetadata(work)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._consumer is not None:
            self._consumer.update_connector_output(
                connector_output.finished_recving or set(), connector_output.failed_recving or set()
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._consumer is not None:
            by_error = request.status is RequestStatus.FINISHED_ERROR
            self._consumer.request_finished(request.request_id, by_error=by_error)
        # The last sampled token has no KV; what ran ahead of it (asynchronous scheduling) does not count.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if (
            self._producer is None
            or not wants_remote_decode(request.kv_transfer_params)
            or request.status not in PREFILLED
            or not consists_of_tokens(request)
            or num_tokens < 1
        ):
            return False, None
        num_blocks = self._layout.interleave.num_virtual_blocks(num_tokens)
        held = tuple(np.asarray(ids[:num_blocks], dtype=np.int64) for ids in block_ids)
        params = self._producer.offer(Offer(request.request_id, num_tokens, held, digest_of(request)))
        return True, params.to_dict(self._secret)

    def has_pending_block_frees(self) -> bool:
        """Blocks under a lease come back soon: wait for them rather than preempt."""
        return self._producer is not None and self._producer.num_open_leases > 0


def _rank_of_this_worker(layout: ParallelLayout) -> int:
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    pp, pcp, tp = (group.rank_in_group for group in (get_pp_group(), get_pcp_group(), get_tp_group()))
    return int((pp * layout.pcp + pcp) * layout.tp + tp)


def _gather_over_pcp(ranks: dict[int, RankInfo]) -> dict[int, RankInfo]:
    import torch.distributed
    from vllm.distributed.parallel_state import get_pcp_group

    group = get_pcp_group()
    gathered: list[dict[int, RankInfo]] = [{} for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, ranks, group=group.cpu_group)
    return {rank: info for part in gathered for rank, info in part.items()}
