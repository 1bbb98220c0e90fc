"""What a transfer moves and leaves out: counted against the entries that move, predicted against counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ConfigError, ParallelLayout, Volume, plan_transfer, plan_volume, predict_volume
from tests.layouts.reference import deal, moved

SHARDINGS = [(1, 1, 4), (2, 1, 4), (3, 2, 4), (4, 4, 4), (2, 3, 6), (1, 1, 8), (6, 2, 2)]
"""(W, I, B)"""


def sharded(sharding: tuple[int, int, int], **sizes: int) -> ParallelLayout:
    w, i, b = sharding
    return ParallelLayout(tp=w, dcp=w, mla=True, interleave_tokens=i, block_tokens=b, **sizes)


def without_messages(volume: Volume) -> list[object]:
    return [replace(rank, num_messages=0) for rank in volume.ranks]


def test_v1_counts() -> None:
    layout = ParallelLayout(tp=4, dcp=4, mla=True, interleave_tokens=4, block_tokens=4)
    volume = plan_volume(plan_transfer(layout, layout, 0, 50))
    assert [rank.num_listed_blocks for rank in volume.ranks] == [4, 4, 4, 4]
    assert [rank.num_real_blocks for rank in volume.ranks] == [4, 3, 3, 3]
    assert (volume.num_listed_blocks, volume.num_real_blocks, volume.num_empty_blocks) == (16, 13, 3)
    assert [rank.num_tokens for rank in volume.ranks] == [14, 12, 12, 12]
    assert (volume.num_runs, volume.num_segments, volume.num_messages) == (13, 13, 4)
    assert (volume.num_source_blocks, volume.num_padding_entries) == (13, 2)


def test_interleave_one_touches_four_blocks_for_one_full_block_of_tokens() -> None:
    """The known result at B=16, W=4, 16 tokens: 4 blocks at 25 % against 1 full one."""
    fine, coarse = (predict_volume(layout, layout, 0, 16) for layout in (sharded((4, 1, 16)), sharded((4, 16, 16))))
    assert (fine.num_source_blocks, fine.num_entries / fine.num_whole_block_entries) == (4, 0.25)
    assert (coarse.num_source_blocks, coarse.num_padding_entries, coarse.num_empty_blocks) == (1, 0, 3)
    assert fine.num_entries == coarse.num_entries == 16


def test_consecutive_slots_are_one_segment_even_when_positions_jump() -> None:
    fine = sharded((4, 1, 16))
    volume = predict_volume(fine, fine, 0, 64)
    assert (volume.num_runs, volume.num_segments) == (64, 4)
    assert predict_volume(fine, sharded((2, 1, 16)), 0, 64).num_segments == 64


def test_four_heads_of_eight_ranks_move_once() -> None:
    """The 262,144 bytes of the report, here as 16 tokens of 4 heads in 8 layers of 512 bytes."""
    source = ParallelLayout(tp=8, num_kv_heads=4, num_layers=8)
    volume = plan_volume(plan_transfer(source, ParallelLayout(num_kv_heads=4, num_layers=8), 0, 16))
    assert volume.num_entries * 512 == 262_144
    assert volume.num_segments == 4 * 8


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SHARDINGS), st.sampled_from(SHARDINGS), st.integers(0, 60), st.integers(0, 60))
def test_counts_match_what_moves(
    source: tuple[int, int, int], target: tuple[int, int, int], start: int, more: int
) -> None:
    giver, taker = sharded(source, num_layers=2), sharded(target, num_layers=2)
    plan = plan_transfer(giver, taker, start, start + more)
    volume, entries = plan_volume(plan), moved(plan)
    listed = {block for _, block, _ in deal(taker.interleave, start + more)[start:]}
    shard_of = [shard for shard, _, _ in deal(giver.interleave, start + more)]
    assert volume.num_entries == len(entries)
    for rank in volume.ranks:
        ends = {entry[1]: ends for entry, ends in entries.items() if entry[0] == rank.rank}
        blocks = {target_end[0] for _, target_end in ends.values()}
        assert (rank.num_listed_blocks, rank.num_real_blocks) == (len(listed), len(blocks))
        assert rank.num_empty_blocks == len(listed - blocks)
        assert rank.num_tokens * 2 == rank.num_entries
        assert rank.num_runs == sum(len(route.runs) for route in plan.routes_to(rank.rank))
        assert rank.num_messages == len(plan.routes_to(rank.rank))
        source_blocks = {(shard_of[position], source_end[0]) for position, (source_end, _) in ends.items()}
        assert rank.num_source_blocks == len(source_blocks)
        assert rank.num_whole_block_entries == len(source_blocks) * giver.block_tokens * 2
        assert rank.num_segments == 2 * num_stretches({shard_of[p]: {} for p in ends}, shard_of, ends)


def num_stretches(
    places: dict[int, dict[tuple[int, int], tuple[int, int]]],
    shard_of: list[int],
    ends: dict[int, tuple[tuple[int, int], tuple[int, int]]],
) -> int:
    """Tokens that do not follow another one at both ends in the same pair of blocks."""
    for position, (source_end, target_end) in ends.items():
        places[shard_of[position]][source_end] = target_end
    return sum(
        table.get((block, slot - 1)) != (target_end[0], target_end[1] - 1)
        for table in places.values()
        for (block, slot), target_end in table.items()
    )


LAYOUTS = st.one_of(
    st.sampled_from(SHARDINGS).map(lambda sharding: sharded(sharding, num_layers=3)),
    st.builds(
        ParallelLayout,
        tp=st.sampled_from([2, 4, 8]),
        pcp=st.sampled_from([1, 3]),
        pp=st.sampled_from([1, 2]),
        mla=st.just(True),
        block_tokens=st.sampled_from([2, 5, 16]),
        num_layers=st.just(3),
    ),
)


@settings(deadline=None, max_examples=200)
@given(LAYOUTS, LAYOUTS, st.integers(0, 300), st.integers(0, 2000))
def test_formula_is_what_a_plan_counts(source: ParallelLayout, target: ParallelLayout, start: int, more: int) -> None:
    predicted = predict_volume(source, target, start, start + more)
    counted = plan_volume(plan_transfer(source, target, start, start + more))
    assert without_messages(predicted) == without_messages(counted)
    assert predicted.num_messages <= counted.num_messages
    if len(set(source.placement.holdings)) == source.num_ranks:
        assert predicted == counted


@pytest.mark.parametrize(("heads", "source_tp", "target_tp"), [(8, 2, 16), (4, 8, 1), (2, 1, 4), (8, 8, 8)])
def test_formula_with_heads(heads: int, source_tp: int, target_tp: int) -> None:
    source = ParallelLayout(tp=source_tp, pcp=2, num_kv_heads=heads, block_tokens=16, num_layers=4)
    target = ParallelLayout(tp=target_tp, num_kv_heads=heads, block_tokens=24, num_layers=4, pp=2)
    counted = plan_volume(plan_transfer(source, target, 7, 1000))
    assert without_messages(predict_volume(source, target, 7, 1000)) == without_messages(counted)


def test_formula_refuses_what_a_plan_refuses() -> None:
    with pytest.raises(ConfigError, match="got 5, 4; allowed: 0 <= start <= stop"):
        predict_volume(ParallelLayout(), ParallelLayout(), 5, 4)
    with pytest.raises(ConfigError, match="num_layers: got 1 at the source, 2 at the target"):
        predict_volume(ParallelLayout(), ParallelLayout(num_layers=2), 0, 4)
