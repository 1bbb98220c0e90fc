"""The flat sums of `stats` as vLLM's connector stats and as Prometheus metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.stats import BUCKET_LABEL, COUNT_SUFFIX, METRICS, SECONDS, TOTAL_SUFFIX, Kind, Metric, parse_key


class WeaveStats(KVConnectorStats):
    """Flat sums; folding two adds them."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> WeaveStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line: one entry per counter with its label values, and each histogram's mean. Gauges
        are left out, as their changes say little."""
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for key, value in sorted(self.data.items()):
            part = parse_key(key)
            words = [word for label, word in part.labels.items() if word and label != BUCKET_LABEL]
            if part.metric.kind is Kind.COUNTER:
                totals["/".join((part.name, *words))] += value
            elif part.metric.kind is Kind.HISTOGRAM:
                (counts if part.side == COUNT_SUFFIX else totals)["/".join((part.name, *words, "mean"))] += value
        return {name: round(total / counts.get(name, 1), 6) for name, total in totals.items()}

    def is_empty(self) -> bool:
        return not self.data


class WeavePromMetrics(KVConnectorPromMetrics):
    """vllm:kvweave_* metrics, labelled like vLLM's own plus the labels of `METRICS`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._families = {name: self._family(name, metric) for name, metric in METRICS.items()}
        self._levels: defaultdict[tuple[int, str], float] = defaultdict(float)

    def _family(self, name: str, metric: Metric) -> Any:
        kinds: dict[Kind, tuple[Any, dict[str, Any]]] = {
            Kind.COUNTER: (self._counter_cls, {}),
            # Each front end gets a part of an engine's reports, so the levels of several add up.
            Kind.GAUGE: (self._gauge_cls, {"multiprocess_mode": "sum"}),
            Kind.HISTOGRAM: (self._histogram_cls, {"buckets": list(SECONDS)}),
        }
        family, options = kinds[metric.kind]
        return family(
            name=f"vllm:kvweave_{name}",
            documentation=metric.documentation,
            labelnames=[*self._labelnames, *metric.labels],
            **options,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            part = parse_key(key)
            bucket = part.labels.pop(BUCKET_LABEL, "")
            labels = (*self.per_engine_labelvalues[engine_idx], *part.labels.values())
            child = self._families[part.name].labels(*labels)
            if part.metric.kind is Kind.COUNTER:
                child.inc(value)
            elif part.metric.kind is Kind.GAUGE:
                self._levels[engine_idx, key] += value
                child.set(self._levels[engine_idx, key])
            elif part.side == COUNT_SUFFIX:
                total = transfer_stats_data.get(_total_key(key), 0.0)
                for _ in range(round(value)):
                    child.observe(_within(bucket, total / value))


def _total_key(count_key: str) -> str:
    return count_key.replace(COUNT_SUFFIX, TOTAL_SUFFIX, 1)


def _within(bucket: str, mean: float) -> float:
    """The mean of a bucket's values stands for each of them; rounding must not carry it over the bucket's bounds."""
    upper = float(bucket)
    lower = max((bound for bound in SECONDS if bound < upper), default=-math.inf)
    return min(max(mean, math.nextafter(lower, math.inf)), upper)
