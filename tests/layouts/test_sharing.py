"""Sharing one copy between target replicas: what is read, what is exchanged, and that it ends up where it belongs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ParallelLayout, Placement, SharedPlan, plan_transfer, predict_shared_volume, share_replicas
from layouts.reference import EMPTY, execute_shared, fill
from tests.layouts.domain import NUM_KV_HEADS, parallel_layouts, ranges, sharded, transfers

Count = Callable[[str], None]


def latent(tp: int, dcp: int = 1, block_tokens: int = 16) -> ParallelLayout:
    return ParallelLayout(tp=tp, dcp=dcp, mla=True, interleave_tokens=block_tokens, block_tokens=block_tokens)


# --- the laws ------------------------------------------------------------------------------------------


def assert_shared(source: ParallelLayout, target: ParallelLayout, start: int, stop: int, salt: int = 0) -> SharedPlan:
    """Each entry crosses once, arrives once at each replica, evenly on both sides, and ends up where it belongs."""
    plan = plan_transfer(source, target, start, stop, salt)
    shared = share_replicas(plan)
    read, whole = execute_shared(shared, fill(plan.source, 0, stop))
    for ours, theirs in zip(whole, fill(plan.target, start, stop), strict=True):
        assert np.array_equal(ours, theirs)
    assert shared.num_read_entries == sum(int((cache != EMPTY).sum()) for cache in read)
    assert shared.num_read_entries + shared.num_exchanged_entries == sum(route.num_entries for route in plan.routes)
    assert shared.num_read_entries == predict_shared_volume(source, target, start, stop).num_entries
    pairs = [(route.target_rank, route.source_rank) for route in shared.reads]
    assert pairs == sorted(set(pairs))
    assert_even(shared, plan.source, [route.source_rank for route in shared.reads])
    assert_even(shared, plan.target, [route.target_rank for route in shared.reads])
    assert_no_more_exchanges_than_needed(shared)
    return shared


def assert_even(shared: SharedPlan, placement: Placement, ranks: list[int]) -> None:
    """Ranks with one holding, which are the ends of the reads, move the same to within a block of one reader."""
    moved, largest = Counter[int](), defaultdict[object, int](int)
    for rank, route in zip(ranks, shared.reads, strict=True):
        moved[rank] += route.num_entries
        holding = placement.holdings[rank]
        largest[holding] = max(largest[holding], route.heads.size * route.layers.size)
    block_tokens = min(side.interleave.block_tokens for side in (shared.plan.source, shared.plan.target))
    for holding, token_entries in largest.items():
        amounts = [moved[rank] for rank, other in enumerate(placement.holdings) if other == holding]
        assert max(amounts) - min(amounts) <= block_tokens * token_entries


def assert_no_more_exchanges_than_needed(shared: SharedPlan) -> None:
    """One route for each (giver, taker, heads, layers), in which no two runs could be one."""
    ends = [(route.target_rank, route.source_rank, route.heads, route.layers) for route in shared.exchanges]
    assert ends == sorted(set(ends))
    for runs in {id(route.runs): route.runs for route in shared.exchanges}.values():
        follows = runs["position"][:-1] + runs["num_tokens"][:-1] == runs["position"][1:]
        follows &= runs["target_block"][:-1] == runs["target_block"][1:]
        follows &= runs["target_slot"][:-1] + runs["num_tokens"][:-1] == runs["target_slot"][1:]
        assert not follows.any()


@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
def test_pairs_of_parallel_sizes(num_kv_heads: int, count: Count) -> None:
    layouts = parallel_layouts(num_kv_heads, (1, 2, 4))
    for number, source in enumerate(layouts):
        target = layouts[(5 * number + 1) % len(layouts)]
        tried = list(ranges(source.interleave, target.interleave))
        for start, stop in tried[number % 12 :: 12]:
            assert_shared(source, target, start, stop, salt=number)
            count("shared plans")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
def test_every_pair_of_parallel_sizes(num_kv_heads: int, count: Count) -> None:
    layouts = parallel_layouts(num_kv_heads)
    for number, (source, target) in enumerate(product(layouts, layouts)):
        tried = list(ranges(source.interleave, target.interleave))
        assert_shared(source, target, *tried[number % len(tried)], salt=number)
        count("shared plans")


@settings(deadline=None, max_examples=60)
@given(transfers(), st.integers(-5, 50))
def test_larger_layouts(transfer: tuple[ParallelLayout, ParallelLayout, int, int], salt: int) -> None:
    assert_shared(*transfer, salt)


@settings(deadline=None, max_examples=40)
@given(transfers())
def test_without_replicas_the_reads_are_the_plan(
    transfer: tuple[ParallelLayout, ParallelLayout, int, int],
) -> None:
    source, target, start, stop = transfer
    held = tuple(dict.fromkeys(target.placement.holdings))
    distinct = Placement(target.interleave, held, target.num_kv_heads, target.num_layers)
    plan = plan_transfer(source, distinct, start, stop)
    shared = share_replicas(plan)
    assert [route.terms for route in shared.reads] == [route.terms for route in plan.routes]
    assert shared.exchanges == ()


# --- what it looks like --------------------------------------------------------------------------------


def test_eight_latent_replicas_read_an_eighth_each_from_an_eighth_each() -> None:
    shared = assert_shared(latent(8), latent(8), 0, 1024)
    assert [(route.source_rank, route.target_rank) for route in shared.reads] == [(rank, rank) for rank in range(8)]
    assert {route.num_entries for route in shared.reads} == {128}
    assert len(shared.exchanges) == 8 * 7 and {route.num_entries for route in shared.exchanges} == {128}
    assert (shared.num_read_entries, shared.num_exchanged_entries) == (1024, 7 * 1024)


def test_all_links_work_whichever_side_has_more() -> None:
    for source_tp, target_tp in ((2, 8), (8, 2), (3, 4), (1, 4)):
        shared = assert_shared(latent(source_tp), latent(target_tp), 0, 960)
        assert {route.source_rank for route in shared.reads} == set(range(source_tp))
        assert {route.target_rank for route in shared.reads} == set(range(target_tp))


def test_replicated_heads_are_exchanged_per_head() -> None:
    source, target = ParallelLayout(tp=2, num_kv_heads=2), ParallelLayout(tp=8, num_kv_heads=2)
    shared = assert_shared(source, target, 0, 64)
    assert [(route.source_rank, route.target_rank) for route in shared.reads] == [
        (rank // 4, rank) for rank in range(8)
    ]
    assert {(route.source_rank // 4, route.heads.start) for route in shared.exchanges} == {(0, 0), (1, 1)}


def test_what_came_from_several_shards_is_one_run_per_block() -> None:
    shared = assert_shared(sharded(4, 1, 4), latent(2, block_tokens=32), 0, 64)
    assert [len(route.runs) for route in shared.reads] == [16, 16, 16, 16]
    assert [route.num_tokens for route in shared.exchanges] == [32, 32]
    plain = assert_shared(latent(1), latent(2), 0, 64)
    assert [route.runs.tolist() for route in plain.exchanges] == [
        [(32, 16, 2, 0, 2, 0), (48, 16, 3, 0, 3, 0)],
        [(0, 16, 0, 0, 0, 0), (16, 16, 1, 0, 1, 0)],
    ]


def test_a_short_prompt_is_read_by_one_and_salts_take_turns() -> None:
    readers = [
        [route.target_rank for route in assert_shared(latent(1), latent(4), 0, 16, salt).reads] for salt in range(4)
    ]
    assert sorted(readers) == [[0], [1], [2], [3]]


def test_nothing_to_move() -> None:
    shared = assert_shared(latent(4), latent(4), 16, 16)
    assert shared.reads == shared.exchanges == ()


def test_both_ends_make_the_same() -> None:
    source, target = latent(4, dcp=2), latent(8, dcp=4, block_tokens=32)
    here = share_replicas(plan_transfer(source, target, 5, 333, salt=3))
    there = share_replicas(plan_transfer(source.placement, target.placement, 5, 333, salt=3))
    for ours, theirs in zip(here.reads + here.exchanges, there.reads + there.exchanges, strict=True):
        assert ours.terms == theirs.terms and np.array_equal(ours.runs, theirs.runs)


def test_runs_that_are_given_to_all_are_shared_and_read_only() -> None:
    shared = share_replicas(plan_transfer(latent(3), latent(8), 0, 1000))
    assert len({id(route.runs) for route in shared.exchanges}) == 8
    assert not any(route.runs.flags.writeable for route in (*shared.reads, *shared.exchanges))
