"""Who holds what, and the sizes that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layouts import ConfigError, Holding, Interleave, ParallelLayout, Placement, Span, split_layers


def shards(**sizes: Any) -> list[int]:
    return [holding.shard for holding in ParallelLayout(**sizes).placement.holdings]


def heads(**sizes: Any) -> list[tuple[int, int]]:
    return [tuple(holding.heads) for holding in ParallelLayout(**sizes).placement.holdings]


def test_shards_of_vllm_ranks() -> None:
    assert shards(tp=4, dcp=2, mla=True) == [0, 1, 0, 1]
    assert shards(tp=2, pcp=2, mla=True) == [0, 0, 0, 0]
    assert shards(tp=2, pcp=2, dcp=2, mla=True) == [0, 0, 1, 1]
    assert shards(tp=2, pcp=2, dcp=4, mla=True) == [0, 2, 1, 3]
    assert shards(tp=1, pcp=4, dcp=4, mla=True) == [0, 1, 2, 3]
    assert shards(tp=2, dcp=2, pp=2, mla=True, num_layers=2) == [0, 1, 0, 1]


def test_shards_of_the_older_meaning_of_pcp() -> None:
    assert shards(tp=4, pcp=2, dcp=2, mla=True, pcp_shards_kv=True) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert shards(tp=2, pcp=3, mla=True, pcp_shards_kv=True) == [0, 0, 1, 1, 2, 2]
    assert ParallelLayout(tp=4, pcp=2, dcp=2, mla=True, pcp_shards_kv=True).num_shards == 4
    assert shards(tp=4, dcp=2, mla=True, pcp_shards_kv=True) == shards(tp=4, dcp=2, mla=True)


def test_cache_groups_that_are_not_sharded() -> None:
    """Sliding-window and state layers: one shard, the same heads, replicas where others have shards."""
    for sizes in ({"tp": 8, "dcp": 4}, {"tp": 4, "pcp": 2, "dcp": 4, "pcp_shards_kv": True}):
        full = ParallelLayout(num_kv_heads=1, interleave_tokens=8, **sizes)
        group = replace(full, dcp_sharded=False)
        assert group.num_shards == 1 and group.placement.interleave == Interleave(1, 8, 16)
        assert [replace(held, shard=0) for held in full.placement.holdings] == list(group.placement.holdings)
    assert shards(tp=4, dcp=4, num_kv_heads=4, dcp_sharded=False) == [0] * 4  # the rule DCP x heads <= TP is not theirs


def test_heads_below_at_and_above_the_number_of_kv_heads() -> None:
    assert heads(tp=1, num_kv_heads=4) == [(0, 4)]
    assert heads(tp=2, num_kv_heads=4) == [(0, 2), (2, 4)]
    assert heads(tp=4, num_kv_heads=4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert heads(tp=8, num_kv_heads=4) == [(head, head + 1) for head in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert heads(tp=4, num_kv_heads=128, mla=True) == [(0, 1)] * 4
    assert ParallelLayout(num_kv_heads=128, mla=True) == ParallelLayout(num_kv_heads=1, mla=True)


def test_rank_numbers_are_pp_then_pcp_then_tp() -> None:
    layout = ParallelLayout(tp=2, pcp=2, dcp=2, pp=2, num_kv_heads=2, num_layers=3)
    assert layout.num_ranks == 8
    assert layout.placement.holdings[5] == Holding(0, Span(1, 2), Span(2, 3))
    assert layout.placement.holdings[6] == Holding(1, Span(0, 1), Span(2, 3))


@pytest.mark.parametrize(
    ("num_layers", "stages", "split"),
    [
        (61, 1, (61,)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (64, 4, (16, 16, 16, 16)),
        (3, 3, (1, 1, 1)),
    ],
)
def test_layers_split_as_in_vllm(num_layers: int, stages: int, split: tuple[int, ...]) -> None:
    assert split_layers(num_layers, stages) == split


def test_layers_split_as_configured() -> None:
    layout = ParallelLayout(pp=3, num_layers=10, layers_per_stage=(2, 5, 3))
    assert [holding.layers for holding in layout.placement.holdings] == [Span(0, 2), Span(2, 7), Span(7, 10)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 8, "dcp": 2, "num_kv_heads": 4},
        {"tp": 8, "dcp": 8, "num_kv_heads": 1},
        {"tp": 12, "dcp": 3, "num_kv_heads": 4},
        {"tp": 1, "pcp": 2, "dcp": 2, "num_kv_heads": 4},
        {"tp": 4, "pcp": 2, "dcp": 2, "num_kv_heads": 4},
        {"tp": 2, "pcp": 2, "dcp": 4, "num_kv_heads": 1},
        {"tp": 4, "pcp": 2, "num_kv_heads": 2},
        {"tp": 4, "pcp": 3, "num_kv_heads": 8, "pcp_shards_kv": True},
        {"tp": 4, "pcp": 3, "dcp": 2, "num_kv_heads": 2, "pcp_shards_kv": True},
        {"tp": 8, "pcp": 2, "dcp": 16, "mla": True},
        {"tp": 8, "pcp": 2, "dcp": 8, "mla": True},
        {"tp": 8, "pcp": 2, "dcp": 4, "num_kv_heads": 4},
        {"tp": 2, "pcp": 4, "dcp": 2, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_accepts_groups_that_share_their_heads(sizes: dict[str, Any]) -> None:
    layout = ParallelLayout(**sizes)
    holders: dict[int, set[Span]] = {}
    for holding in layout.placement.holdings:
        holders.setdefault(holding.shard, set()).add(holding.heads)
    assert len(holders) == layout.num_shards
    assert len({frozenset(spans) for spans in holders.values()}) == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 0}, ["tp: got 0", "at least 1"]),
        ({"pp": -1}, ["pp: got -1"]),
        ({"num_layers": 0}, ["num_layers: got 0"]),
        ({"tp": 4, "dcp": 3, "mla": True, "dcp_sharded": False}, ["tp=4", "got 3", "1, 2, 4"]),
        ({"tp": 4, "dcp": 3, "mla": True}, ["tp=4", "got 3", "1, 2, 4"]),
        ({"tp": 4, "pcp": 2, "dcp": 3, "mla": True}, ["tp=4", "pcp=2", "got 3", "1, 2, 4, 8"]),
        ({"tp": 3, "num_kv_heads": 8}, ["num_kv_heads=8", "got 3", "1, 2, 4, 8"]),
        ({"tp": 12, "num_kv_heads": 8}, ["got 12", "multiple of 8"]),
        (
            {"tp": 8, "dcp": 4, "num_kv_heads": 4},
            ["DCP x KV heads <= TP", "4 x 4 > 8", "dcp to one of 1, 2", "multiple of 16"],
        ),
        ({"tp": 4, "dcp": 2, "num_kv_heads": 8}, ["2 x 8 > 4", "dcp to one of 1,", "multiple of 16"]),
        ({"tp": 4, "dcp": 2, "num_kv_heads": 4}, ["2 x 4 > 4"]),
        ({"tp": 12, "dcp": 2, "num_kv_heads": 4}, ["12 / 4 = 3", "straddles", "1, 3", "multiple of 8"]),
        ({"tp": 2, "pcp": 2, "dcp": 4, "num_kv_heads": 2}, ["2 x 2 > 2", "dcp to one of 1, 2."]),
        (
            {"tp": 4, "pcp": 2, "dcp": 2, "num_kv_heads": 4, "pcp_shards_kv": True},
            ["2 x 4 > 4", "multiple of 8"],
        ),
        ({"dcp": 2, "tp": 2, "mla": True, "interleave_tokens": 3}, ["got 3", "block_tokens=16"]),
        ({"pp": 3, "num_layers": 2}, ["pp with num_layers=2", "got 3"]),
        ({"pp": 2, "num_layers": 5, "layers_per_stage": (3, 3)}, ["(3, 3)", "2 numbers with sum 5"]),
        ({"pp": 3, "num_layers": 5, "layers_per_stage": (2, 3)}, ["3 numbers with sum 5"]),
        ({"pp": 2, "num_layers": 5, "layers_per_stage": (5, 0)}, ["layers_per_stage: got 0"]),
    ],
    ids=str,
)
def test_refusals_say_numbers_and_remedy(sizes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ParallelLayout(**sizes)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("holdings", "words"),
    [
        ([], "num_ranks"),
        ([Holding(0, Span(0, 2), Span(0, 3))], "layers held of shard 1: got none"),
        ([Holding(2, Span(0, 2), Span(0, 3))], "shard of rank 0: got 2"),
        ([Holding(s, Span(0, 1), Span(0, 3)) for s in (0, 1)], "KV heads held of shard 0, layers 0..3"),
        ([Holding(s, h, Span(0, 3)) for s in (0, 1) for h in (Span(0, 2), Span(1, 2))], "cover 0..2 once"),
        ([Holding(s, Span(0, 2), h) for s in (0, 1) for h in (Span(0, 2), Span(1, 3))], "cover 0..3 once"),
        ([Holding(s, Span(0, 3), Span(0, 3)) for s in (0, 1)], "cover 0..2 once"),
        ([Holding(s, h, Span(0, 3)) for s in (0, 1) for h in (Span(0, 2), Span(2, 2))], "cover 0..2 once"),
    ],
)
def test_tables_with_gaps_or_overlaps_are_refused(holdings: list[Holding], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Placement(Interleave(2, 1, 4), tuple(holdings), num_kv_heads=2, num_layers=3)
