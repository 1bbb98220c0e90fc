"""The laws of layouts and plans: over the whole small domain (partly behind `exhaustive`), and at random beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import Interleave, ParallelLayout, Placement, TransferPlan, plan_transfer
from layouts.reference import deal, execute, fill, find_fault, moved_entries
from tests.layouts.domain import (
    NUM_KV_HEADS,
    boundaries,
    interleaved_layouts,
    parallel_layouts,
    ranges,
    sharded,
    transfers,
)

Count = Callable[[str], None]
Layout = ParallelLayout | Placement


# --- the laws ------------------------------------------------------------------------------------------


def assert_bijection(interleave: Interleave) -> None:
    """`position` inverts `locate`, and the slots of a shard are its tokens, packed in order."""
    positions = np.arange(3 * interleave.virtual_block_tokens)
    places = interleave.locate(positions)
    dealt = deal(interleave, len(positions))
    for ours, theirs in zip(places, (dealt.shard, dealt.block, dealt.slot), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(interleave.position(*places), positions)
    assert np.array_equal(interleave.owner(positions), places[0])
    for shard in range(interleave.num_shards):
        mine = places[0] == shard
        local = places[1][mine] * interleave.block_tokens + places[2][mine]
        assert np.array_equal(local, np.arange(3 * interleave.block_tokens))


def assert_counts(interleave: Interleave, num_tokens: int) -> None:
    """Local tokens are those that were dealt, so that they sum to all; blocks are those with any."""
    dealt = deal(interleave, num_tokens)
    for shard in range(interleave.num_shards):
        mine = dealt.shard == shard
        assert interleave.num_local_tokens(num_tokens, shard) == mine.sum()
        assert interleave.num_local_blocks(num_tokens, shard) == len(set(dealt.block[mine]))
    assert interleave.num_virtual_blocks(num_tokens) == len(set(dealt.block))


def assert_right(source: Layout, target: Layout, start: int, stop: int, salt: int = 0) -> TransferPlan:
    """What is needed moves once, evenly, in few runs, reader counts hold, and it ends up where it belongs."""
    plan = plan_transfer(source, target, start, stop, salt)
    assert find_fault(plan) is None
    moved = execute(plan, fill(plan.source, 0, stop))
    for ours, theirs in zip(moved, fill(plan.target, start, stop), strict=True):
        assert np.array_equal(ours, theirs)
    return plan


def assert_back_again(plan: TransferPlan) -> None:
    """Moving from P to D and back changes nothing."""
    there = execute(plan, fill(plan.source, plan.start, plan.stop))
    back = execute(plan_transfer(plan.target, plan.source, plan.start, plan.stop), there)
    for ours, theirs in zip(back, fill(plan.source, plan.start, plan.stop), strict=True):
        assert np.array_equal(ours, theirs)


def assert_parts_make_the_whole(plan: TransferPlan, middle: int) -> None:
    """Moving a..b and b..c moves the same as moving a..c."""
    parts = [
        moved_entries(plan_transfer(plan.source, plan.target, start, stop))
        for start, stop in ((plan.start, middle), (middle, plan.stop))
    ]
    joined = np.concatenate(parts)
    assert np.array_equal(joined[np.lexsort(joined.T[::-1])], moved_entries(plan))


# --- the small domain ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", interleaved_layouts(), ids=lambda layout: str(layout.interleave))
def test_every_small_interleave(layout: ParallelLayout, count: Count) -> None:
    interleave = layout.interleave
    assert_bijection(interleave)
    for num_tokens in range(2 * interleave.virtual_block_tokens + 2):
        assert_counts(interleave, num_tokens)
        count("interleaves with a prompt")


def check_pairs(sources: list[ParallelLayout], targets: list[ParallelLayout], few: bool, count: Count) -> None:
    for source, target in product(sources, targets):
        tried = list(ranges(source.interleave, target.interleave))
        for number, (start, stop) in enumerate(tried[len(tried) % 5 :: 5] if few else tried):
            plan = assert_right(source, target, start, stop, salt=number)
            count("plans")
        assert_back_again(plan)
        assert_parts_make_the_whole(plan, (start + stop) // 2)
        count("pairs there and back, in parts")


@pytest.mark.parametrize("source", interleaved_layouts((4,)), ids=lambda layout: str(layout.interleave))
def test_pairs_of_interleaves(source: ParallelLayout, count: Count) -> None:
    check_pairs([source], interleaved_layouts((4,))[::2], few=True, count=count)


@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
def test_pairs_of_parallel_sizes(num_kv_heads: int, count: Count) -> None:
    layouts = parallel_layouts(num_kv_heads, (1, 2, 4))
    for number, source in enumerate(layouts):
        target = layouts[(7 * number + 3) % len(layouts)]
        check_pairs([source], [target], few=True, count=count)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", interleaved_layouts(), ids=lambda layout: str(layout.interleave))
def test_every_pair_of_interleaves(source: ParallelLayout, count: Count) -> None:
    check_pairs([source], interleaved_layouts(), few=False, count=count)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
@pytest.mark.parametrize("part", range(8))
def test_every_pair_of_parallel_sizes(num_kv_heads: int, part: int, count: Count) -> None:
    layouts = parallel_layouts(num_kv_heads)
    for number, (source, target) in enumerate(product(layouts[part::8], layouts)):
        tried = list(ranges(source.interleave, target.interleave))
        for start, stop in tried[number % 12 :: 12]:
            assert_right(source, target, start, stop, salt=number)
            count("plans")


def odd_interleaves() -> list[ParallelLayout]:
    """Sizes beside the powers of two, down to blocks of one token."""
    sizes = product((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 6, 7))
    return [
        sharded(shards, tokens, block)
        for shards, tokens, block in sizes
        if block % tokens == 0 and (shards > 1 or tokens == 1)
    ]


@pytest.mark.parametrize("source", odd_interleaves(), ids=lambda layout: str(layout.interleave))
def test_pairs_of_odd_interleaves(source: ParallelLayout, count: Count) -> None:
    assert_bijection(source.interleave)
    for target in odd_interleaves():
        for start, stop in ((0, 43), (5, 23)):
            assert_right(source, target, start, stop)
            count("plans")


# --- beyond it -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(transfers(), st.integers(-5, 5), st.data())
def test_larger_layouts(
    transfer: tuple[ParallelLayout, ParallelLayout, int, int], salt: int, data: st.DataObject
) -> None:
    source, target, start, stop = transfer
    plan = assert_right(source, target, start, stop, salt)
    assert_back_again(plan)
    assert_parts_make_the_whole(plan, data.draw(st.integers(start, stop)))


@settings(deadline=None, max_examples=40)
@given(transfers(), st.randoms(use_true_random=False))
def test_tables_in_any_order_of_ranks(transfer: tuple[ParallelLayout, ParallelLayout, int, int], random: Any) -> None:
    source, target, start, stop = transfer
    shuffled = list(source.placement.holdings)
    random.shuffle(shuffled)
    assert_right(replace(source.placement, holdings=tuple(shuffled)), target.placement, start, stop)


def test_the_domain_is_the_stated_one() -> None:
    assert len(interleaved_layouts()) == 48
    assert [len(parallel_layouts(heads)) for heads in NUM_KV_HEADS] == [120, 105, 95, 90]
    assert boundaries(sharded(2, 2, 4).interleave) == [0, 1, 2, 3, 4, 5, 7, 8, 9]
