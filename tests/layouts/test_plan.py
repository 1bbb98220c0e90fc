"""`plan_transfer`: the published vectors, cache groups and refusals. Its laws are in `test_laws.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layouts import RUN_DTYPE, ConfigError, ParallelLayout, Span, TransferPlan, plan_transfer
from tests.layouts.domain import sharded


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


# --- both ends, and what is shared ---------------------------------------------------------------------


def test_routes_that_move_the_same_tokens_share_their_runs() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, mla=True), ParallelLayout(tp=8, mla=True), 0, 1000)
    assert len({id(route.runs) for route in plan.routes}) == 1
    assert not plan.routes[0].runs.flags.writeable


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


def test_each_cache_group_has_its_own_plan() -> None:
    """Full attention is sharded by 2 and by 4; sliding window layers are not, so every rank has all positions."""
    full = ParallelLayout(tp=8, dcp=4, num_kv_heads=2, num_layers=10, interleave_tokens=16)
    sliding = replace(full, dcp_sharded=False, num_layers=50)
    source, target = [replace(group, tp=4, dcp=2) for group in (full, sliding)], [full, sliding]
    plans = [plan_transfer(p, d, 0, 256) for p, d in zip(source, target, strict=True)]
    assert plans[0].num_tokens_to == (64,) * 8 and plans[1].num_tokens_to == (256,) * 8
    assert plans[0].num_readers_of == (2,) * 4 and plans[1].num_readers_of == (2,) * 4


# --- refusals ------------------------------------------------------------------------------------------


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
