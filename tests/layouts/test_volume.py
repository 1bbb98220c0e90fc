"""What a plan moves and what it leaves out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ParallelLayout, plan_transfer, plan_volume
from tests.layouts.reference import deal, moved


def test_v1_counts() -> None:
    layout = ParallelLayout(tp=4, dcp=4, mla=True, interleave_tokens=4, block_tokens=4)
    volume = plan_volume(plan_transfer(layout, layout, 0, 50))
    assert [rank.num_listed_blocks for rank in volume.ranks] == [4, 4, 4, 4]
    assert [rank.num_real_blocks for rank in volume.ranks] == [4, 3, 3, 3]
    assert (volume.num_real_blocks, volume.num_empty_blocks) == (13, 3)
    assert [rank.num_tokens for rank in volume.ranks] == [14, 12, 12, 12]
    assert volume.num_runs == 13


def test_four_heads_of_eight_ranks_move_once() -> None:
    """The 262,144 bytes of the report, here as 16 tokens of 4 heads in 8 layers of 512 bytes."""
    source = ParallelLayout(tp=8, num_kv_heads=4, num_layers=8)
    volume = plan_volume(plan_transfer(source, ParallelLayout(num_kv_heads=4, num_layers=8), 0, 16))
    assert volume.num_entries * 512 == 262_144


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([(1, 1, 4), (2, 1, 4), (3, 2, 4), (4, 4, 4), (2, 3, 6)]),
    st.sampled_from([(1, 1, 4), (2, 2, 4), (4, 1, 2), (3, 6, 6)]),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_counts_match_what_moves(
    source: tuple[int, int, int], target: tuple[int, int, int], start: int, more: int
) -> None:
    giver, taker = (
        ParallelLayout(tp=w, dcp=w, mla=True, interleave_tokens=i, block_tokens=b, num_layers=2)
        for w, i, b in (source, target)
    )
    plan = plan_transfer(giver, taker, start, start + more)
    volume, entries = plan_volume(plan), moved(plan)
    listed = {block for _, block, _ in deal(taker.interleave, start + more)[start:]}
    assert volume.num_entries == len(entries)
    for rank in volume.ranks:
        blocks = {ends[1][0] for entry, ends in entries.items() if entry[0] == rank.rank}
        assert (rank.num_listed_blocks, rank.num_real_blocks) == (len(listed), len(blocks))
        assert rank.num_empty_blocks == len(listed - blocks)
        assert rank.num_tokens * 2 == rank.num_entries
        assert rank.num_runs == sum(len(route.runs) for route in plan.routes_to(rank.rank))
