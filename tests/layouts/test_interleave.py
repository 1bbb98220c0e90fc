"""Laws of `Interleave` at random, and the published vectors. The small domain is in `test_laws.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ConfigError, Interleave


@st.composite
def interleaves(draw: st.DrawFn, most: int = 128) -> Interleave:
    tokens = draw(st.integers(1, most))
    return Interleave(draw(st.integers(1, most)), tokens, tokens * draw(st.integers(1, most)))


@settings(deadline=None)
@given(interleaves(), st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_position_inverts_locate(interleave: Interleave, positions: list[int]) -> None:
    array = np.array(positions, dtype=np.int64)
    places = interleave.locate(array)
    assert np.array_equal(interleave.position(*places), array)
    assert np.array_equal(interleave.owner(array), places[0])
    assert list(zip(*(part.tolist() for part in places), strict=True)) == [
        interleave.locate(position) for position in positions
    ]


@settings(deadline=None)
@given(interleaves(), st.integers(0, 10**9))
def test_counts_sum_to_the_tokens(interleave: Interleave, num_tokens: int) -> None:
    counts = [interleave.num_local_tokens(num_tokens, shard) for shard in range(interleave.num_shards)]
    assert sum(counts) == num_tokens
    arrays = [interleave.num_local_tokens(np.array([num_tokens]), shard) for shard in range(interleave.num_shards)]
    assert np.concatenate(arrays).tolist() == counts


@settings(deadline=None)
@given(interleaves(most=6), st.data())
def test_slot_mappings_of_the_shards_partition_the_positions(interleave: Interleave, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 3))
    table = data.draw(st.lists(st.integers(0, 10**6), min_size=num_blocks, max_size=num_blocks, unique=True))
    positions = np.arange(num_blocks * interleave.virtual_block_tokens)
    slots = np.stack([interleave.slot_mapping(positions, table, shard) for shard in range(interleave.num_shards)])
    assert slots.dtype == np.int64
    assert ((slots >= 0).sum(axis=0) == 1).all()
    every_slot = np.sort(
        (np.array(table)[:, None] * interleave.block_tokens + np.arange(interleave.block_tokens)).ravel()
    )
    for of_shard in slots:
        assert np.array_equal(np.sort(of_shard[of_shard >= 0]), every_slot)


def test_slot_mapping_of_one_position_and_of_int32_tables() -> None:
    interleave = Interleave(2, 1, 4)
    table = np.array([7, 2**30], dtype=np.int32)
    assert interleave.slot_mapping(3, table, 1).tolist() == 29
    assert interleave.slot_mapping(3, table, 0).tolist() == -1
    assert interleave.slot_mapping([8, 9], table, 0).tolist() == [2**32, -1]
    assert interleave.slot_mapping([], [], 0).tolist() == []


@pytest.mark.parametrize("positions", [[8], [-1], [0, 8]])
def test_slot_mapping_refuses_positions_outside_the_table(positions: list[int]) -> None:
    with pytest.raises(IndexError, match="8 positions of 1 block ids of 8 tokens"):
        Interleave(2, 2, 4).slot_mapping(positions, [0], 0)


def test_v1_tokens_and_blocks_per_shard() -> None:
    interleave = Interleave(4, 4, 4)
    assert [interleave.num_local_tokens(50, shard) for shard in range(4)] == [14, 12, 12, 12]
    assert [interleave.num_local_blocks(50, shard) for shard in range(4)] == [4, 3, 3, 3]
    assert interleave.num_virtual_blocks(50) == 4


@pytest.mark.parametrize(
    ("num_tokens", "counts"), [(1, [1, 0]), (16, [16, 0]), (17, [16, 1]), (31, [16, 15]), (33, [17, 16])]
)
def test_block_cyclic_counts(num_tokens: int, counts: list[int]) -> None:
    interleave = Interleave(2, 16, 16)
    assert [interleave.num_local_tokens(num_tokens, shard) for shard in range(2)] == counts


def test_published_counts_and_owners() -> None:
    assert Interleave(2, 16, 16).num_virtual_blocks(33) == 2
    assert [Interleave(2, 1, 16).num_local_tokens(17, shard) for shard in range(2)] == [9, 8]
    assert (Interleave(4, 4, 4).owner(20), Interleave(4, 4, 4).owner(27)) == (1, 2)
    assert Interleave(2, 16, 16).num_virtual_blocks(32) == 1
    touched = [sum(Interleave(4, tokens, 16).num_local_blocks(16, shard) for shard in range(4)) for tokens in (1, 16)]
    assert touched == [4, 1]


@pytest.mark.parametrize("interleave_tokens", [1, 3, 16, 64])
def test_one_shard_is_plain_blocks(interleave_tokens: int) -> None:
    interleave = Interleave(1, interleave_tokens, 16)
    assert interleave.locate(37) == (0, 2, 5)
    assert interleave.position(0, 2, 5) == 37
    assert interleave.run_tokens == 16


def test_refuses_an_interleave_that_does_not_divide_the_block() -> None:
    with pytest.raises(ConfigError) as refusal:
        Interleave(2, 3, 4)
    message = str(refusal.value)
    assert "got 3" in message and "1, 2, 4" in message and "block_tokens=4" in message
    assert "position 6 lands in slot 4 of a 4-slot block" in message


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, -1, 4), (1, 1, 2.0), (True, 1, 1)])
def test_refuses_sizes_that_are_no_positive_integers(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="an integer of at least 1"):
        Interleave(*sizes)


@pytest.mark.parametrize("shard", [-1, 4])
def test_refuses_shards_that_do_not_exist(shard: int) -> None:
    for use in (
        lambda: Interleave(4, 4, 4).num_local_tokens(1, shard),
        lambda: Interleave(4, 4, 4).num_local_blocks(1, shard),
        lambda: Interleave(4, 4, 4).slot_mapping(0, [0], shard),
    ):
        with pytest.raises(ConfigError, match="0 to 3"):
            use()
