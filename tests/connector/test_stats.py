"""Metrics keep their sums through every fold, reach Prometheus as what they are, and are those of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stats import METRICS, SECONDS, Counters, Kind, decode_key, encode_key, parse_key

DOCS = Path(__file__).parents[2] / "docs"
PREFIX = "vllm:kvweave_"


def test_keys_have_an_inverse_and_refuse_what_does_not_exist() -> None:
    for name, metric in METRICS.items():
        labels = {label: f"{label} value" for label in metric.labels}
        assert decode_key(encode_key(name, labels)) == (name, labels)
        assert decode_key(encode_key(name, {})) == (name, dict.fromkeys(metric.labels, ""))
    with pytest.raises(KeyError, match=r"loads has the labels \('outcome', 'cause'\), not \['couse'\]"):
        encode_key("loads", {"couse": "x"})
    with pytest.raises(KeyError):
        encode_key("laods", {})


@given(st.lists(st.floats(0, 1000), min_size=1), st.integers(0, 5))
def test_a_histogram_folds_by_adding(values: list[float], num_nodes: int) -> None:
    nodes = [Counters() for _ in range(num_nodes + 1)]
    for number, value in enumerate(values):
        nodes[number % len(nodes)].observe("read_seconds", value)
    folded: dict[str, float] = {}
    for node in nodes:
        for key, value in node.take().items():
            folded[key] = folded.get(key, 0) + value
    for bucket in (*map(str, SECONDS), "+Inf"):
        bounds = [0.0, *SECONDS, float("inf")]
        upper = float(bucket)
        lower = bounds[bounds.index(upper) - 1] if upper > SECONDS[0] else -1.0
        inside = [value for value in values if lower < value <= upper]
        assert folded.get(f"read_seconds/count|{bucket}", 0) == len(inside)
        assert folded.get(f"read_seconds/total|{bucket}", 0) == pytest.approx(sum(inside))


def test_what_comes_to_nothing_is_not_sent() -> None:
    counters = Counters()
    counters.add("open_leases")
    counters.add("open_leases", -1)
    counters.add("bytes_moved", 0, path="direct", transport="nixl")
    assert counters.take() == {}


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
    client = pytest.importorskip("prometheus_client")
    metrics = pytest.importorskip("connector.metrics", reason="vLLM is not installed")
    made: dict[str, Family] = {}
    kind = type("Fresh", (Family,), {"made": made})
    classes = {client.Gauge: kind, client.Counter: kind, client.Histogram: kind}
    config = SimpleNamespace(kv_transfer_config=None)
    return metrics.WeavePromMetrics(config, classes, ["engine"], {0: ["0"], 1: ["1"]}), made


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
    metrics = pytest.importorskip("connector.metrics", reason="vLLM is not installed")
    counters = Counters()
    counters.add("loads", 2, outcome="failed", cause="read")
    counters.add("open_loads", 1)
    counters.observe("read_seconds", 0.02)
    counters.observe("read_seconds", 0.2)
    first, second = metrics.WeaveStats(counters.take()), metrics.WeaveStats({"loads|failed|read": 1.0})
    assert first.aggregate(second).reduce() == {"loads/failed/read": 3, "read_seconds/mean": 0.11}


def dashboard_names() -> set[str]:
    """Every metric the dashboard asks for, as /metrics spells it."""
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert all(PREFIX in expression for expression in expressions)
    return set(re.findall(r"vllm:kvweave_\w+", " ".join(expressions)))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert dashboard_names() == {PREFIX + name + metric.kind.value for name, metric in METRICS.items()}


def test_the_dashboard_asks_for_labels_that_exist() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            for name in re.findall(r"vllm:kvweave_(\w+?)(?:_total|_bucket)?\{", target["expr"]):
                labels = {*METRICS[name].labels, "le", "job"}
                groups = re.findall(r"by \(([^)]*)\)", target["expr"])
                grouped = {word for group in groups for word in group.split(", ")}
                chosen = set(re.findall(r"(\w+)=~?\"", target["expr"]))
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert grouped | chosen | shown <= labels, (panel["title"], target["expr"])


def test_operations_explains_every_metric_and_cause() -> None:
    text = (DOCS / "operations.md").read_text()
    assert [name for name in METRICS if f"`{name}" not in text] == []
    causes = ["unknown", "expired", "incompatible", "malformed", "version", "busy", "silent", "timeout", "internal"]
    assert [cause for cause in causes if f"`{cause}`" not in text] == []


def test_parsed_keys_know_their_metric() -> None:
    counters = Counters()
    counters.observe("read_seconds", 400.0)
    parts = [parse_key(key) for key in counters.take()]
    assert {(part.name, part.side, part.labels["le"]) for part in parts} == {
        ("read_seconds", "/count", "+Inf"),
        ("read_seconds", "/total", "+Inf"),
    }
    assert all(part.metric.kind is Kind.HISTOGRAM for part in parts)
