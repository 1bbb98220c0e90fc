"""Metrics reach Prometheus and vLLM's log line as what they are: counters, levels and histograms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.metrics", reason="vLLM is not installed")

from prometheus_client import Counter, Gauge, Histogram

from connector.metrics import WeavePromMetrics, WeaveStats
from connector.stats import METRICS, SECONDS, Counters, Kind

PREFIX = "vllm:kvweave_"


class Child:
    """One labelled Prometheus metric."""

    def __init__(self) -> None:
        self.value, self.seen = 0.0, list[float]()

    def inc(self, amount: float) -> None:
        assert amount >= 0
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.seen.append(value)


class Family:
    """Stands for prometheus_client's classes, and for Ray's that vLLM uses instead."""

    made: dict[str, Family]

    def __init__(self, name: str, documentation: str, labelnames: list[str], **options: object) -> None:
        self.children: dict[tuple[object, ...], Child] = {}
        self.labelnames, self.options = labelnames, options
        self.made[name] = self
        assert documentation.endswith(".")

    def labels(self, *values: object) -> Child:
        assert len(values) == len(self.labelnames)
        return self.children.setdefault(values, Child())


def prometheus() -> tuple[Any, dict[str, Family]]:
    """Our metrics over stand-ins, and the families they made."""
    made: dict[str, Family] = {}
    kind = type("Fresh", (Family,), {"made": made})
    classes = {Gauge: kind, Counter: kind, Histogram: kind}
    config = SimpleNamespace(kv_transfer_config=None)
    return WeavePromMetrics(config, classes, ["engine"], {0: ["0"], 1: ["1"]}), made


@given(values=st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_prometheus_gets_the_same_buckets_and_sum(values: list[float]) -> None:
    metrics, made = prometheus()
    counters = Counters()
    for value in values:
        counters.observe("queue_seconds", value)
    metrics.observe(counters.take(), 1)
    (child,) = made[f"{PREFIX}queue_seconds"].children.values()
    for bound in SECONDS:
        assert sum(seen <= bound for seen in child.seen) == sum(value <= bound for value in values)
    assert sum(child.seen) == pytest.approx(sum(values)) and len(child.seen) == len(values)


def test_gauges_are_levels_of_each_engine() -> None:
    metrics, made = prometheus()
    for engine, change in [(0, 3.0), (1, 1.0), (0, -2.0)]:
        metrics.observe({"open_leases": change}, engine)
    levels = {values: child.value for values, child in made[f"{PREFIX}open_leases"].children.items()}
    assert levels == {("0",): 1.0, ("1",): 1.0}


def test_every_metric_has_a_family_of_its_kind() -> None:
    _, made = prometheus()
    assert made.keys() == {PREFIX + name for name in METRICS}
    for name, metric in METRICS.items():
        assert ("buckets" in made[PREFIX + name].options) == (metric.kind is Kind.HISTOGRAM)


def test_the_log_line_shows_counters_and_means() -> None:
    counters = Counters()
    counters.add("loads", 2, outcome="failed", cause="read")
    counters.add("open_loads", 1)
    counters.observe("read_seconds", 0.02)
    counters.observe("read_seconds", 0.2)
    first, second = WeaveStats(counters.take()), WeaveStats({"loads|failed|read": 1.0})
    assert first.aggregate(second).reduce() == {"loads/failed/read": 3, "read_seconds/mean": 0.11}
