"""Counters as vLLM's connector stats and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.stats import DOCUMENTATION, METRICS, decode_key


class WeaveStats(KVConnectorStats):
    """Flat sums; folding two adds them."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> WeaveStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One entry per counter for vLLM's periodic log line; labelled counters show their label values."""
        return {
            "/".join((name, *(value for value in labels.values() if value))): round(total, 6)
            for key, total in sorted(self.data.items())
            for name, labels in [decode_key(key)]
        }

    def is_empty(self) -> bool:
        return not self.data


class WeavePromMetrics(KVConnectorPromMetrics):
    """vllm:kvweave_* counters, labelled like vLLM's own plus the labels of `METRICS`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvweave_{name}",
                documentation=DOCUMENTATION[name],
                labelnames=[*self._labelnames, *labels],
            )
            for name, labels in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, total in transfer_stats_data.items():
            name, labels = decode_key(key)
            counter: Counter = self._counters[name]
            counter.labels(*self.per_engine_labelvalues[engine_idx], *labels.values()).inc(total)
