"""The PCP split of a batch: published vectors, and laws over every small batch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ChunkSwap, ConfigError, chunk_swap


def positions(swap: ChunkSwap) -> list[list[list[int]]]:
    return [[array.tolist() for array in swap.rank_positions(rank)] for rank in range(swap.pcp)]


def test_two_ranks_eight_tokens() -> None:
    swap = chunk_swap([8], 2)
    assert positions(swap) == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert swap.num_padding == (0,)


def test_four_ranks_ten_tokens() -> None:
    swap = chunk_swap([10], 4)
    assert positions(swap) == [[[0, 1, 14, 15]], [[2, 3, 12, 13]], [[4, 5, 10, 11]], [[6, 7, 8, 9]]]
    assert swap.num_padding == (6,)


def test_a_decode_and_two_prefills() -> None:
    swap = chunk_swap([1, 5, 8], 2)
    assert swap.local_lens == (1, 4, 4)
    assert swap.restore_index.tolist() == [0, 9, 1, 2, 10, 11, 12, 13, 3, 4, 5, 6, 14, 15, 16, 17, 7, 8]
    assert swap.num_padding == (1, 3, 0)
    assert swap.padded_lens == (2, 8, 8)
    assert positions(swap) == [[[0], [0, 1, 6, 7], [0, 1, 6, 7]], [[0], [2, 3, 4, 5], [2, 3, 4, 5]]]
    assert swap.rank_indices(0).tolist() == [0, 1, 2, -1, -1, 6, 7, 12, 13]
    assert swap.rank_indices(1).tolist() == [0, 3, 4, 5, -1, 8, 9, 10, 11]


def assert_laws(swap: ChunkSwap) -> None:
    lengths, pcp = swap.query_lens, swap.pcp
    flat = np.arange(sum(lengths))
    on_ranks = [swap.rank_indices(rank) for rank in range(pcp)]
    gathered = np.concatenate(on_ranks)
    assert np.array_equal(gathered[swap.restore_index][~swap.padding_mask], flat)
    assert np.array_equal(np.sort(swap.restore_index), np.arange(pcp * sum(swap.local_lens)))
    assert swap.padding_mask.sum() == sum(swap.num_padding)
    starts = np.cumsum((0, *lengths))
    for rank, indices in enumerate(on_ranks):
        of_requests = swap.rank_positions(rank)
        assert tuple(len(own) for own in of_requests) == swap.local_lens
        expected = [
            np.where(own < length, start + own, -1)
            for own, length, start in zip(of_requests, lengths, starts, strict=False)
        ]
        assert np.array_equal(indices, np.concatenate(expected)) if lengths else len(indices) == 0
        for own, length, whole in zip(of_requests, lengths, swap.replicated, strict=True):
            if whole:
                assert own.tolist() == list(range(length))
            else:
                half = len(own) // 2
                assert own.tolist() == [
                    *range(rank * half, (rank + 1) * half),
                    *range((2 * pcp - 1 - rank) * half, (2 * pcp - rank) * half),
                ]


def test_laws_over_every_small_batch() -> None:
    for pcp in (1, 2, 3):
        for lengths in (*product(range(15)), *product(range(8), repeat=2), (), (0, 5, 0)):
            assert_laws(chunk_swap(lengths, pcp))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=6), st.integers(1, 8))
def test_laws_with_decodes(requests: list[tuple[int, bool]], pcp: int) -> None:
    lengths, decodes = [length for length, _ in requests], [decode for _, decode in requests]
    swap = chunk_swap(lengths, pcp, decodes)
    assert_laws(swap)
    for length, decode, whole in zip(lengths, decodes, swap.replicated, strict=True):
        assert whole == (decode or length < 2 * pcp or pcp == 1)


def test_one_rank_pads_nothing() -> None:
    swap = chunk_swap([5, 2], 1)
    assert swap.num_padding == (0, 0)
    assert swap.restore_index.tolist() == list(range(7))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="pcp: got 0"):
        chunk_swap([1], 0)
    with pytest.raises(ConfigError, match="query_lens: got -1"):
        chunk_swap([3, -1], 2)
    with pytest.raises(ConfigError, match="decodes: got 1"):
        chunk_swap([3, 4], 2, [True])
    with pytest.raises(ConfigError, match="0 to 1"):
        chunk_swap([3, 4], 2).rank_indices(2)
