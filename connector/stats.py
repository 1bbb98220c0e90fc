"""Metrics of both sides, in the one form vLLM carries from engines and workers to /metrics and its log line: flat sums.

Counters are sums by nature. A gauge travels as its changes. A histogram travels as two sums for each bucket, the number
of observations and their total. So two reports fold by adding, whatever they hold. Knows neither vLLM nor Prometheus.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

SEPARATOR = "|"
BUCKET_LABEL = "le"
COUNT_SUFFIX, TOTAL_SUFFIX = "/count", "/total"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of all histograms' buckets: from one control round trip to the default of `wait_timeout_s`."""


class Kind(enum.Enum):
    """How Prometheus shows a metric; the value follows the metric's name there."""

    COUNTER = "_total"
    GAUGE = ""
    HISTOGRAM = "_bucket"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: /metrics shows it as vllm:kvweave_<name><kind's ending>."""

    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()


def _counter(documentation: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, documentation, labels)


METRICS: dict[str, Metric] = {
    "loads": _counter("Requests that came with a lease, by how they ended and why.", "outcome", "cause"),
    "open_repeats": _counter("Times a prefill node was asked again because it was silent or busy.", "cause"),
    "handshakes": _counter("Manifests taken from prefill nodes: one for each life of each."),
    "tokens_local": _counter("Prompt tokens this node already had when a load started."),
    "tokens_loaded": _counter("Prompt tokens whose KV was fetched from a prefill node."),
    "blocks_listed": _counter("Blocks the loads listed, summed over ranks (a virtual block is one on every shard)."),
    "blocks_real": _counter("Listed blocks that hold at least one fetched token on their rank."),
    "blocks_empty": _counter("Listed blocks that hold none and were skipped."),
    "reads": _counter("Reads of one rank from one rank, by how their bytes travelled.", "path", "transport"),
    "bytes_moved": _counter("Bytes read from prefill nodes, summed over ranks.", "path", "transport"),
    "bytes_payload": _counter("Bytes the fetched tokens occupy on this node, summed over ranks."),
    "segments": _counter("Contiguous pieces the reads consisted of, summed over ranks."),
    "transfer_seconds": _counter("Time from the dispatch of a load to the report of its last rank."),
    "read_failures": _counter("Reads of one rank that did not count, by cause.", "cause"),
    "leases_granted": _counter("Prefills offered to decode nodes."),
    "leases_ended": _counter("Leases that ended, by cause.", "cause"),
    "open_leases": Metric(Kind.GAUGE, "Prefills whose blocks are held for a decode node now."),
    "open_loads": Metric(Kind.GAUGE, "Requests with a lease that have not ended yet."),
    "peers": Metric(Kind.GAUGE, "Prefill nodes this decode node has dealt with, by what is known of them.", ("state",)),
    "handshake_seconds": Metric(Kind.HISTOGRAM, "Time from a request's arrival to the prefill node's Yes."),
    "queue_seconds": Metric(Kind.HISTOGRAM, "Time from the prefill node's Yes to the dispatch of the load."),
    "read_seconds": Metric(Kind.HISTOGRAM, "Time from a rank's receipt of a load to the arrival of its bytes."),
    "validate_seconds": Metric(Kind.HISTOGRAM, "Time from a rank's first Done to the prefill node's Ok."),
}


@dataclass(frozen=True, slots=True)
class Sum:
    """What one key stands for: a metric, or one side ("/count", "/total") of a histogram's bucket, and its labels."""

    name: str
    side: str
    labels: dict[str, str]

    @property
    def metric(self) -> Metric:
        return METRICS[self.name]


def encode_key(name: str, labels: dict[str, str]) -> str:
    """One flat string for a sum and its label values, in the order of `METRICS`. `name` may end in a histogram's side.

    Labels left out are empty; KeyError for a metric or label that does not exist.
    """
    allowed = _labels_of(name)
    if unknown := labels.keys() - set(allowed):
        raise KeyError(f"metric {name} has the labels {allowed}, not {sorted(unknown)}")
    return SEPARATOR.join((name, *(labels.get(label, "") for label in allowed)))


def decode_key(key: str) -> tuple[str, dict[str, str]]:
    """The inverse of `encode_key`."""
    name, *values = key.split(SEPARATOR)
    return name, dict(zip(_labels_of(name), values, strict=True))


def parse_key(key: str) -> Sum:
    """What a key stands for."""
    name, labels = decode_key(key)
    family, slash, side = name.partition("/")
    return Sum(family, slash + side, labels)


def _labels_of(name: str) -> tuple[str, ...]:
    family, slash, _ = name.partition("/")
    labels = METRICS[family].labels
    return (*labels, BUCKET_LABEL) if slash else labels


class Counters:
    """Thread-safe sums since the last `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Count, or change a gauge by `value`."""
        key = encode_key(name, labels)
        with self._lock:
            self._sums[key] += value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Enter one value (seconds) into a histogram."""
        index = bisect_left(SECONDS, value)
        labels[BUCKET_LABEL] = str(SECONDS[index]) if index < len(SECONDS) else "+Inf"
        count, total = (encode_key(name + side, labels) for side in (COUNT_SUFFIX, TOTAL_SUFFIX))
        with self._lock:
            self._sums[count] += 1
            self._sums[total] += value

    def take(self) -> dict[str, float]:
        """The sums since the last call, without those that came to nothing."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return {key: value for key, value in sums.items() if value}
