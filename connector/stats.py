"""Counters of both sides, in the one form vLLM carries from engines and workers to /metrics and its log line."""

from __future__ import annotations

import threading
from collections import defaultdict

SEPARATOR = "|"

METRICS: dict[str, tuple[str, ...]] = {
    "loads": ("outcome", "cause"),
    "tokens_local": (),
    "tokens_loaded": (),
    "blocks_listed": (),
    "blocks_real": (),
    "blocks_empty": (),
    "bytes_moved": (),
    "bytes_payload": (),
    "segments": (),
    "transfer_seconds": (),
    "read_failures": ("cause",),
    "leases_granted": (),
    "leases_ended": ("cause",),
}
"""Every counter with its labels; /metrics shows them as vllm:kvweave_<name>_total."""

DOCUMENTATION: dict[str, str] = {
    "loads": "Requests that came with a lease, by how they ended and why.",
    "tokens_local": "Prompt tokens this node already had when a load started.",
    "tokens_loaded": "Prompt tokens whose KV was fetched from a prefill node.",
    "blocks_listed": "Blocks that the loads listed, summed over ranks (a virtual block is one on every shard).",
    "blocks_real": "Listed blocks that hold at least one fetched token on their rank.",
    "blocks_empty": "Listed blocks that hold none and were skipped.",
    "bytes_moved": "Bytes read from prefill nodes, summed over ranks.",
    "bytes_payload": "Bytes the fetched tokens occupy on this node, summed over ranks.",
    "segments": "Contiguous pieces the reads consisted of, summed over ranks.",
    "transfer_seconds": "Time from the dispatch of a load to the report of its last rank.",
    "read_failures": "Reads of one rank that did not count, by cause.",
    "leases_granted": "Prefills offered to decode nodes.",
    "leases_ended": "Leases that ended, by cause.",
}


def encode_key(name: str, labels: dict[str, str]) -> str:
    """One flat string for a counter and its label values, in the order of `METRICS`."""
    return SEPARATOR.join((name, *(labels.get(label, "") for label in METRICS[name])))


def decode_key(key: str) -> tuple[str, dict[str, str]]:
    name, *values = key.split(SEPARATOR)
    return name, dict(zip(METRICS[name], values, strict=True))


class Counters:
    """Thread-safe sums since the last `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        with self._lock:
            self._sums[encode_key(name, labels)] += value

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return dict(sums)
