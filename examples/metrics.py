"""What a decode node counts about its loads, read from its Prometheus page as differences per request.

Valid for requests sent one after another: whatever moved between two readings belongs to the request between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:kvweave_"
LOADS = f"{PREFIX}loads_total"
POLL_S = 0.1
SETTLE_S = 3.0

Readings = dict[tuple[str, str], float]  # (counter name, outcome and cause or "") -> value


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """One load. `tokens_local` is what D already had, `outcomes` how the load ended (none: not seen)."""

    outcomes: tuple[str, ...]
    tokens_local: int
    tokens_loaded: int
    blocks_listed: int
    blocks_real: int
    blocks_empty: int
    bytes_moved: int
    bytes_payload: int
    transfer_s: float


class LoadMeter:
    """Reads one node's page before and after requests."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = f"{url}/metrics"
        self._before: Readings = {}

    def begin(self) -> None:
        """Remember the counters as they are now."""
        self._before = self._read()

    def finish(self) -> LoadNumbers:
        """What moved since `begin`. Loads are counted a step or two later, ranks and scheduler not in the same one:
        waits until a load is counted and two readings agree, at most SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        last: Readings = {}
        while True:
            moved = {key: value - self._before.get(key, 0.0) for key, value in self._read().items()}
            is_counted = any(value for key, value in moved.items() if key[0] == LOADS)
            if (is_counted and moved == last) or time.monotonic() > deadline:
                return load_numbers(moved)
            last = moved
            time.sleep(POLL_S)

    def _read(self) -> Readings:
        return read_counters(self._client.get(self._url).raise_for_status().text)


def read_counters(page: str) -> Readings:
    """kvweave's counters of a page, summed over engines and all other labels."""
    counters: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                ending = [sample.labels[label] for label in ("outcome", "cause") if sample.labels.get(label)]
                counters[sample.name, "/".join(ending)] += sample.value
    return dict(counters)


def load_numbers(moved: Readings) -> LoadNumbers:
    """Typed numbers from counter differences; a counter that does not exist counts as zero."""

    def seconds(name: str) -> float:
        return sum(value for key, value in moved.items() if key[0] == f"{PREFIX}{name}_total")

    def of(name: str) -> int:
        return round(seconds(name))

    return LoadNumbers(
        outcomes=tuple(sorted(key[1] for key, value in moved.items() if key[0] == LOADS and value)),
        tokens_local=of("tokens_local"),
        tokens_loaded=of("tokens_loaded"),
        blocks_listed=of("blocks_listed"),
        blocks_real=of("blocks_real"),
        blocks_empty=of("blocks_empty"),
        bytes_moved=of("bytes_moved"),
        bytes_payload=of("bytes_payload"),
        transfer_s=seconds("transfer_seconds"),
    )
