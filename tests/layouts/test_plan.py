"""`plan_transfer`: the published vectors, and a token-by-token reference over the small domain and beyond."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import (
    RUN_DTYPE,
    ConfigError,
    Holding,
    Interleave,
    ParallelLayout,
    Placement,
    PlanError,
    Route,
    Span,
    TransferPlan,
    plan_transfer,
)
from tests.layouts.reference import assert_spread, moved, needed, num_runs


def sharded(num_shards: int, interleave_tokens: int, block_tokens: int) -> ParallelLayout:
    """One rank per shard, one head, one layer: a layout of the vectors, written W, I, B."""
    return ParallelLayout(
        tp=num_shards,
        dcp=num_shards,
        mla=True,
        interleave_tokens=interleave_tokens,
        block_tokens=block_tokens,
    )


def all_runs(plan: TransferPlan) -> list[tuple[int, ...]]:
    """(position, num_tokens, source rank, block, slot, target rank, block, slot) of each run, by position."""
    runs = [
        (position, num_tokens, route.source_rank, *source, route.target_rank, *target)
        for route in plan.routes
        for position, num_tokens, *ends in route.runs.tolist()
        for source, target in [(ends[:2], ends[2:])]
    ]
    return sorted(runs)


def sources_of(plan: TransferPlan) -> dict[int, list[int]]:
    return {rank: [route.source_rank for route in plan.routes_to(rank)] for rank in plan.readers}


# --- vectors -------------------------------------------------------------------------------------------


def test_v1_all_blocks_that_hold_tokens_move() -> None:
    plan = plan_transfer(sharded(4, 4, 4), sharded(4, 4, 4), 0, 50)
    assert plan.num_tokens_to == (14, 12, 12, 12)
    assert sources_of(plan) == {0: [0], 1: [1], 2: [2], 3: [3]}
    assert [len(route.runs) for route in plan.routes] == [4, 3, 3, 3]


def test_v2_token_interleave_to_plain_blocks() -> None:
    runs = all_runs(plan_transfer(sharded(2, 1, 4), sharded(1, 1, 4), 0, 10))
    assert len(runs) == 10 and {run[1] for run in runs} == {1}
    assert [run[2:5] for run in runs[:4]] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert [run[5:] for run in runs[:4]] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)]


def test_v3_one_target_reads_four_shards() -> None:
    plan = plan_transfer(sharded(4, 4, 4), sharded(1, 1, 8), 0, 50)
    runs = all_runs(plan)
    assert len(runs) == 13
    assert sources_of(plan) == {0: [0, 1, 2, 3]}
    assert runs[-1] == (48, 2, 0, 3, 0, 0, 6, 0)


def test_v3b_start_inside_a_source_virtual_block() -> None:
    plan = plan_transfer(sharded(4, 4, 4), sharded(1, 1, 8), 24, 50)
    runs = all_runs(plan)
    assert [run[0] for run in runs] == [24, 28, 32, 36, 40, 44, 48]
    assert runs[0] == (24, 4, 2, 1, 0, 0, 3, 0)
    assert [len(route.runs) for route in plan.routes] == [2, 1, 2, 2]


def test_v4_all_pairs_talk_although_the_shard_counts_divide() -> None:
    plan = plan_transfer(sharded(4, 4, 4), sharded(2, 2, 8), 0, 40)
    runs = all_runs(plan)
    assert len(runs) == 20 and {run[1] for run in runs} == {2}
    assert sources_of(plan) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_v5_shard_counts_that_do_not_divide() -> None:
    plan = plan_transfer(sharded(6, 4, 4), sharded(4, 4, 4), 0, 48)
    assert sources_of(plan) == {0: [0, 2, 4], 1: [1, 3, 5], 2: [0, 2, 4], 3: [1, 3, 5]}
    assert plan.num_readers_of == (2,) * 6
    assert len(all_runs(plan)) == 12


def test_v6_fine_interleaves_move_token_by_token() -> None:
    plan = plan_transfer(sharded(4, 1, 16), sharded(2, 1, 16), 0, 37)
    assert {(route.source_rank, route.target_rank) for route in plan.routes} == {
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 1),
    }
    assert [run[1] for run in all_runs(plan)] == [1] * 37


def test_v7_a_source_that_nobody_reads_is_in_the_plan() -> None:
    plan = plan_transfer(sharded(4, 16, 16), sharded(2, 16, 16), 0, 37)
    assert [run[1] for run in all_runs(plan)] == [16, 16, 5]
    assert plan.num_readers_of == (1, 1, 1, 0)
    assert plan.routes_from(3) == ()


def test_v8_empty_shards_on_both_sides() -> None:
    plan = plan_transfer(sharded(4, 4, 4), sharded(4, 4, 4), 0, 5)
    assert plan.readers == (0, 1)
    assert plan.num_tokens_to == (4, 1, 0, 0)
    assert plan.num_readers_of == (1, 1, 0, 0)
    assert [run[:2] for run in all_runs(plan)] == [(0, 4), (4, 1)]


def test_v9_eight_sources_of_one_target() -> None:
    plan = plan_transfer(sharded(8, 1, 16), sharded(1, 1, 16), 0, 100)
    assert len(all_runs(plan)) == 100
    assert sources_of(plan) == {0: list(range(8))}


def test_v10_start_inside_the_first_source_block() -> None:
    runs = all_runs(plan_transfer(sharded(2, 32, 32), sharded(1, 1, 16), 16, 150))
    assert [run[0] for run in runs] == list(range(16, 150, 16))
    assert runs[0] == (16, 16, 0, 0, 16, 0, 1, 0)
    assert runs[1] == (32, 16, 1, 0, 0, 0, 2, 0)
    assert runs[-1][1] == 6


def test_a_prompt_that_grew_pairs_blocks_by_position() -> None:
    plain = sharded(1, 1, 64)
    assert all_runs(plan_transfer(plain, plain, 31 * 64, 2048)) == [(1984, 64, 0, 31, 0, 0, 31, 0)]
    runs = all_runs(plan_transfer(plain, plain, 31 * 64, 2049))
    assert [(run[3], run[6]) for run in runs] == [(31, 31), (32, 32)]


def test_all_heads_arrive_once_when_eight_ranks_hold_four() -> None:
    source = ParallelLayout(tp=8, num_kv_heads=4, num_layers=2)
    plan = plan_transfer(source, replace(source, tp=1), 0, 16)
    assert [(route.source_rank, route.heads) for route in plan.routes] == [
        (2 * head, Span(head, head + 1)) for head in range(4)
    ]


def test_two_heads_of_one_rank_go_to_four() -> None:
    source = ParallelLayout(tp=1, num_kv_heads=2)
    plan = plan_transfer(source, replace(source, tp=4), 0, 16)
    assert [route.heads.start for route in plan.routes] == [0, 0, 1, 1]
    assert plan.num_readers_of == (4,)


def test_mla_replicas_each_read_another_replica() -> None:
    source = ParallelLayout(tp=8, dcp=4, mla=True, interleave_tokens=4)
    plan = plan_transfer(source, replace(source, dcp=2), 0, 64)
    assert plan.num_readers_of == (2,) * 8


# --- replicas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "readers"),
    [(8, 8, (1,) * 8), (8, 2, (1, 1, 0, 0, 0, 0, 0, 0)), (2, 8, (4, 4)), (3, 4, (2, 1, 1))],
)
def test_readers_go_round_the_replicas(source_tp: int, target_tp: int, readers: tuple[int, ...]) -> None:
    plan = plan_transfer(
        ParallelLayout(tp=source_tp, mla=True), ParallelLayout(tp=target_tp, mla=True), 0, 40
    )
    assert plan.num_readers_of == readers
    assert plan.readers == tuple(range(target_tp))


def test_routes_that_move_the_same_tokens_share_their_runs() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, mla=True), ParallelLayout(tp=8, mla=True), 0, 1000)
    assert len({id(route.runs) for route in plan.routes}) == 1
    assert not plan.routes[0].runs.flags.writeable


# --- the whole small domain ----------------------------------------------------------------------------


def assert_exact(source: Placement, target: Placement, start: int, stop: int) -> TransferPlan:
    plan = plan_transfer(source, target, start, stop)
    assert moved(plan) == needed(source, target, start, stop)
    assert_spread(plan)
    assert plan.readers == tuple(rank for rank, tokens in enumerate(plan.num_tokens_to) if tokens)
    return plan


def small_interleaves() -> list[ParallelLayout]:
    sizes = product((1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 4, 6))
    return [
        sharded(shards, tokens, block)
        for shards, tokens, block in sizes
        if block % tokens == 0 and (shards > 1 or tokens == 1)
    ]


@pytest.mark.parametrize("source", small_interleaves(), ids=lambda layout: str(layout.interleave))
def test_every_small_pair_of_interleaves(source: ParallelLayout) -> None:
    for target in small_interleaves():
        for start, stop in ((0, 29), (5, 23), (0, 1)):
            plan = assert_exact(source.placement, target.placement, start, stop)
            least = num_runs(source.interleave, target.interleave, start, stop)
            assert sum(len(route.runs) for route in plan.routes) == least


def small_layouts(num_kv_heads: int) -> Iterator[Placement]:
    for tp, pcp, dcp, pp, older in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2), (False, True)):
        try:
            layout = ParallelLayout(
                tp=tp,
                pcp=pcp,
                dcp=dcp,
                pp=pp,
                num_kv_heads=num_kv_heads,
                interleave_tokens=1 + tp % 2,
                block_tokens=2 * pp,
                num_layers=2,
                pcp_shards_kv=older,
            )
        except ConfigError:
            continue
        if pcp > 1 or not older:
            yield layout.placement


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_every_small_pair_of_parallel_sizes(num_kv_heads: int) -> None:
    placements = list(small_layouts(num_kv_heads))
    assert len(placements) >= 12
    for source, target in product(placements, repeat=2):
        assert_exact(source, target, 1, 10)


# --- beyond it -----------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, num_kv_heads: int, num_layers: int) -> ParallelLayout:
    interleave_tokens = draw(st.integers(1, 8))
    sizes: dict[str, Any] = {
        "tp": num_kv_heads * draw(st.sampled_from((1, 2, 3, 4, 6))),
        "pcp": draw(st.sampled_from((1, 1, 2, 3))),
        "pp": draw(st.integers(1, min(3, num_layers))),
        "num_kv_heads": num_kv_heads,
        "num_layers": num_layers,
        "interleave_tokens": interleave_tokens,
        "block_tokens": interleave_tokens * draw(st.integers(1, 5)),
        "pcp_shards_kv": draw(st.booleans()),
    }
    candidates = []
    for dcp in sorted({1, 2, 3, 4, 6, sizes["pcp"], sizes["tp"] * sizes["pcp"]}):
        try:
            candidates.append(ParallelLayout(dcp=dcp, **sizes))
        except ConfigError:
            continue
    return draw(st.sampled_from(candidates))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[ParallelLayout, ParallelLayout, int, int]:
    heads, num_layers = draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 4))
    stop = draw(st.integers(0, 120))
    source, target = draw(layouts(heads, num_layers)), draw(layouts(heads, num_layers))
    return source, target, draw(st.integers(0, stop)), stop


@settings(deadline=None, max_examples=80)
@given(transfers())
def test_larger_layouts(transfer: tuple[ParallelLayout, ParallelLayout, int, int]) -> None:
    source, target, start, stop = transfer
    assert_exact(source.placement, target.placement, start, stop)


@settings(deadline=None, max_examples=40)
@given(transfers(), st.randoms(use_true_random=False))
def test_tables_in_any_order_of_ranks(
    transfer: tuple[ParallelLayout, ParallelLayout, int, int], random: Any
) -> None:
    source, target, start, stop = transfer
    shuffled = list(source.placement.holdings)
    random.shuffle(shuffled)
    assert_exact(replace(source.placement, holdings=tuple(shuffled)), target.placement, start, stop)


def test_plans_are_equal_on_both_ends() -> None:
    source, target = (
        sharded(6, 2, 4),
        ParallelLayout(tp=4, dcp=2, mla=True, interleave_tokens=3, block_tokens=6),
    )
    here = plan_transfer(source, target, 3, 99)
    there = plan_transfer(source.placement, target.placement, 3, 99)
    for ours, theirs in zip(here.routes, there.routes, strict=True):
        assert ours.runs.dtype == RUN_DTYPE
        assert np.array_equal(ours.runs, theirs.runs)
        assert (ours.source_rank, ours.target_rank) == (theirs.source_rank, theirs.target_rank)


def test_unequal_pipeline_stages() -> None:
    source = ParallelLayout(pp=3, num_layers=10, layers_per_stage=(2, 5, 3))
    plan = plan_transfer(source, ParallelLayout(pp=2, num_layers=10), 0, 20)
    assert [(route.source_rank, route.target_rank, route.layers) for route in plan.routes] == [
        (0, 0, Span(0, 2)),
        (1, 0, Span(2, 5)),
        (1, 1, Span(5, 7)),
        (2, 1, Span(7, 10)),
    ]


def test_nothing_to_move() -> None:
    plan = plan_transfer(sharded(4, 1, 4), sharded(2, 1, 4), 12, 12)
    assert plan.routes == () and plan.readers == ()
    assert plan.num_readers_of == (0,) * 4 and plan.num_tokens_to == (0, 0)


# --- refusals and proof --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "start", "stop", "words"),
    [
        (ParallelLayout(num_kv_heads=2), 0, 1, "num_kv_heads: got 1 at the source, 2 at the target"),
        (ParallelLayout(num_layers=3), 0, 1, "num_layers: got 1 at the source, 3 at the target"),
        (ParallelLayout(), 2, 1, "start, stop: got 2, 1"),
        (ParallelLayout(), -1, 1, "start, stop: got -1, 1"),
    ],
)
def test_refusals(target: ParallelLayout, start: int, stop: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_transfer(ParallelLayout(), target, start, stop)


def broken(route: Route, **fields: int) -> Route:
    """The route with other values in its first run."""
    runs = route.runs.copy()
    for name, value in fields.items():
        runs[name][0] = value
    return replace(route, runs=runs)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda routes: routes[1:],
        lambda routes: [*routes, routes[0]],
        lambda routes: [replace(routes[0], source_rank=-1), *routes[1:]],
        lambda routes: [replace(routes[0], target_rank=9), *routes[1:]],
        lambda routes: [replace(routes[0], source_rank=1), *routes[1:]],
        lambda routes: [replace(routes[0], heads=Span(0, 2)), *routes[1:]],
        lambda routes: [replace(routes[0], heads=Span(0, 0)), *routes[1:]],
        lambda routes: [replace(routes[0], layers=Span(0, 1)), *routes[1:]],
        lambda routes: [replace(routes[0], runs=routes[0].runs[:0]), *routes[1:]],
        lambda routes: [replace(routes[0], runs=routes[0].runs[:-1]), *routes[1:]],
        lambda routes: [replace(routes[0], runs=routes[0].runs[::-1]), *routes[1:]],
        lambda routes: [broken(routes[0], num_tokens=1), *routes[1:]],
        lambda routes: [broken(routes[0], num_tokens=0), *routes[1:]],
        lambda routes: [broken(routes[0], num_tokens=3), *routes[1:]],
        lambda routes: [broken(routes[0], source_slot=1), *routes[1:]],
        lambda routes: [broken(routes[0], target_slot=1), *routes[1:]],
        lambda routes: [broken(routes[0], source_block=1), *routes[1:]],
        lambda routes: [broken(routes[0], target_block=-1), *routes[1:]],
        lambda routes: [broken(routes[0], position=2), *routes[1:]],
        lambda routes: [broken(routes[0], position=16, source_block=2, target_block=2), *routes[1:]],
    ],
)
def test_a_plan_that_is_wrong_does_not_construct(spoil: Any) -> None:
    interleave = Interleave(2, 2, 4)
    holdings = tuple(Holding(shard, Span(0, 1), Span(0, 2)) for shard in (0, 1))
    placement = Placement(interleave, holdings, num_kv_heads=1, num_layers=2)
    plan = plan_transfer(placement, placement, 0, 16)
    with pytest.raises(PlanError):
        replace(plan, routes=tuple(spoil(list(plan.routes))))


def test_cost_grows_with_runs_and_not_with_tokens_or_ranks() -> None:
    """1,048,576 tokens, 61 layers, 8 to 4 shards: milliseconds, with room for a busy machine."""
    source = ParallelLayout(tp=8, dcp=8, mla=True, interleave_tokens=64, block_tokens=64, num_layers=61)
    target = replace(source, tp=64, dcp=4)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        plan = plan_transfer(source, target, 0, 1 << 20)
        seconds.append(time.perf_counter() - began)
    assert len({id(route.runs) for route in plan.routes}) == 8
    assert min(seconds) < 0.15
