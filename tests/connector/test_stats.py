"""Metrics keep their sums through every fold, and are those of the dashboard and of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
    for target in [target for panel in board["panels"] for target in panel.get("targets", [])]:
        allowed = {"le", "job"}
        for name, selector in re.findall(r"vllm:kvweave_(\w+?)(?:_total|_bucket)?\{([^}]*)\}", target["expr"]):
            assert set(re.findall(r"(\w+)=", selector)) <= {*METRICS[name].labels, "job"}, target["expr"]
            allowed |= set(METRICS[name].labels)
        groups = re.findall(r"by \(([^)]*)\)", target["expr"])
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*shown, *(word for group in groups for word in group.split(", "))} <= allowed, target["expr"]


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
