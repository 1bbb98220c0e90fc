"""Two engines without vLLM: real memory, real control channel, real transport; only the model is missing.

Their caches hold one recognisable value per (position, head, layer, byte), so that every moved byte can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from connector.config import WeaveConfig
from connector.consumer import Consumer
from connector.jobs import StepWork
from connector.lease import Offer
from connector.pace import Pace
from connector.producer import Producer
from connector.prompt import digest
from connector.signing import SharedSecret
from connector.stats import Counters, decode_key
from connector.worker import Worker
from layouts import ParallelLayout
from transport import Region, create_transport, memory_of, region_of
from transport.control.client import ControlClient
from transport.control.keys import NodeKeys
from transport.control.messages import CacheFormat, Manifest, PlacementInfo
from transport.data_plane import DataPlane, ReadOptions

CONTENT_BYTES = 24
CONFIG = WeaveConfig()


def cache_format(layout: ParallelLayout, **changes: Any) -> CacheFormat:
    fields: dict[str, Any] = {
        "model": "tiny",
        "dtype": "torch.float32",
        "kv_dtype": "torch.uint8",
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_bytes": CONTENT_BYTES,
        "mla": layout.mla,
        "page": "plain",
    }
    return CacheFormat(**(fields | changes))


def content(seed: int, num_tokens: int, layout: ParallelLayout) -> np.ndarray:
    """The KV of one request: [layer, head, position, byte]."""
    shape = (layout.num_layers, layout.num_kv_heads, num_tokens, CONTENT_BYTES)
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


class Caches:
    """The caches of all ranks of one engine: uint8 tensors [num_blocks, heads, block_tokens, CONTENT_BYTES]."""

    def __init__(self, layout: ParallelLayout, num_blocks: int) -> None:
        self.layout = layout
        self.ranks: list[dict[int, torch.Tensor]] = [
            {
                layer: torch.zeros(
                    (num_blocks, holding.heads.size, layout.block_tokens, CONTENT_BYTES), dtype=torch.uint8
                )
                for layer in range(*holding.layers)
            }
            for holding in layout.placement.holdings
        ]

    def regions(self, rank: int) -> dict[int, Region]:
        heads = self.layout.placement.holdings[rank].heads
        return {layer: region_of(cache, layer=layer, heads=heads) for layer, cache in self.ranks[rank].items()}

    def slots(self, block_ids: Sequence[int], positions: range) -> Iterator[tuple[torch.Tensor, int, int, int, int]]:
        """(cache, layer, position, block, slot) of every place that holds one of the positions."""
        interleave, table = self.layout.interleave, np.asarray(block_ids)
        for rank, holding in enumerate(self.layout.placement.holdings):
            flat = interleave.slot_mapping(np.arange(positions.start, positions.stop), table, holding.shard)
            for layer, cache in self.ranks[rank].items():
                for position, slot in zip(positions, flat.tolist(), strict=True):
                    if slot >= 0:
                        yield cache, layer, position, *divmod(slot, self.layout.block_tokens)

    def write(self, block_ids: Sequence[int], kv: np.ndarray) -> None:
        for cache, layer, position, block, slot in self.slots(block_ids, range(kv.shape[2])):
            heads = self._heads(cache)
            cache[block, :, slot] = torch.from_numpy(kv[layer, heads, position])

    def holds(self, block_ids: Sequence[int], kv: np.ndarray, start: int, stop: int) -> bool:
        return all(
            np.array_equal(cache[block, :, slot].numpy(), kv[layer, self._heads(cache), position])
            for cache, layer, position, block, slot in self.slots(block_ids, range(start, stop))
        )

    def num_written_bytes(self) -> int:
        """Bytes that are not 0, and content never is."""
        return sum(int((cache != 0).sum()) for rank in self.ranks for cache in rank.values())

    def _heads(self, cache: torch.Tensor) -> slice:
        for rank, caches in enumerate(self.ranks):
            if any(cache is other for other in caches.values()):
                return slice(*self.layout.placement.holdings[rank].heads)
        raise AssertionError("a cache of another engine")


@dataclass
class Node:
    """One engine: scheduler sides and the workers of all ranks, stepped by hand."""

    layout: ParallelLayout
    caches: Caches
    workers: list[Worker]
    counters: Counters
    producer: Producer | None = None
    consumer: Consumer | None = None
    sent: list[str] = field(default_factory=list)
    received: dict[str, bool] = field(default_factory=dict)
    _sent_by: dict[str, int] = field(default_factory=dict)
    _received_by: dict[str, list[bool]] = field(default_factory=dict)

    def step(self, aborted: Sequence[str] = ()) -> None:
        """One engine step: metadata to all ranks, results of all ranks aggregated as vLLM does."""
        work = self.consumer.take_work() if self.consumer else StepWork()
        if self.producer:
            work.released.extend(self.producer.take_ended())
        finished, failed = set(), set()
        for worker in self.workers:
            worker.begin(work)
            sent, received, bad = worker.take_results(aborted)
            for request_id in sent:
                self._sent_by[request_id] = self._sent_by.get(request_id, 0) + 1
                if self._sent_by[request_id] == len(self.workers):
                    self.sent.append(request_id)
            for request_id in received:
                votes = self._received_by.setdefault(request_id, [])
                votes.append(request_id not in bad)
                if len(votes) == len(self.workers):
                    self.received[request_id] = all(votes)
                    finished.add(request_id)
                    if not all(votes):
                        failed.add(request_id)
        if self.consumer:
            self.consumer.update_connector_output(finished, failed)
        for worker in self.workers:
            for key, value in worker.counters.take().items():
                name, labels = decode_key(key)
                self.counters.add(name, value, **labels)

    def close(self) -> None:
        for part in (*self.workers, self.producer, self.consumer):
            if part is not None:
                part.close()


def prefill_node(
    layout: ParallelLayout, transport: str, lease_s: float = 30, num_blocks: int = 64, keys: NodeKeys | None = None
) -> Node:
    node = _node(layout, transport, num_blocks, keys)
    counters = node.counters
    node.producer = Producer("127.0.0.1", 0, lease_s, counters, Pace(), keys=keys)
    infos = [worker.serve() for worker in node.workers]
    placement = PlacementInfo.from_placement(layout.placement)
    node.producer.start(Manifest(node.producer.incarnation, cache_format(layout), placement, infos))
    return node


def decode_node(
    layout: ParallelLayout,
    transport: str,
    num_blocks: int = 64,
    config: WeaveConfig = CONFIG,
    keys: NodeKeys | None = None,
    secret: SharedSecret | None = None,
    **format_changes: Any,
) -> Node:
    node = _node(layout, transport, num_blocks, keys)
    for worker in node.workers:
        worker.start_reading(read_timeout_s=20)
    placement = PlacementInfo.from_placement(layout.placement)
    node.consumer = Consumer(
        *(ControlClient(keys), cache_format(layout, **format_changes), placement, config, node.counters, Pace()),
        secret=secret,
    )
    node.consumer.start()
    return node


def offer(
    node: Node,
    request_id: str,
    block_ids: Sequence[int],
    tokens: Sequence[int],
    secret: SharedSecret | None = None,
) -> dict[str, Any]:
    """Grant a lease as a finished prefill does; the params as the client gets them."""
    assert node.producer is not None
    blocks = (np.asarray(block_ids, dtype=np.int64),)
    return node.producer.offer(Offer(request_id, len(tokens), blocks, lambda n: digest(tokens, n))).to_dict(secret)


def wait_for(condition: Callable[[], bool], *nodes: Node, timeout_s: float = 30) -> None:
    """Step the nodes until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        for node in nodes:
            node.step()
        time.sleep(0.001)


def _node(layout: ParallelLayout, transport: str, num_blocks: int, keys: NodeKeys | None) -> Node:
    """`transport` names one, or a transport and a read path: "nixl/pack"."""
    kind, _, path = transport.partition("/")
    options = ReadOptions(path=path or "auto", staging_bytes=4 << 20)
    caches = Caches(layout, num_blocks)
    workers = []
    for rank in range(layout.num_ranks):
        plane = DataPlane([[create_transport(kind)]], options, keys=keys)
        worker = Worker(rank, layout.placement, plane, ControlClient(keys), Counters())
        worker.register(caches.regions(rank), memory_of(list(caches.ranks[rank].values())))
        workers.append(worker)
    return Node(layout, caches, workers, Counters())
