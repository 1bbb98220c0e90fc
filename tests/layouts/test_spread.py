"""Replicas give equal amounts, to within a block, in one request and over many."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import Holding, ParallelLayout, Span, plan_transfer
from layouts.reference import find_fault, given_entries
from tests.layouts.domain import transfers


def latent(tp: int, dcp: int = 1) -> ParallelLayout:
    return ParallelLayout(tp=tp, dcp=dcp, mla=True, interleave_tokens=16)


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "readers"),
    [(8, 8, (1,) * 8), (2, 8, (4, 4)), (3, 4, (2, 2, 2)), (4, 2, (1, 1, 1, 1)), (4, 1, (1, 0, 1, 1))],
)
def test_readers_share_the_replicas(source_tp: int, target_tp: int, readers: tuple[int, ...]) -> None:
    plan = plan_transfer(latent(source_tp), latent(target_tp), 0, 40)
    assert plan.num_readers_of == readers
    assert plan.readers == tuple(range(target_tp))


def test_all_links_work_for_one_long_prompt() -> None:
    plan = plan_transfer(latent(8), latent(1), 0, 1 << 20)
    assert set(given_entries(plan)) == {1 << 17}
    assert [(route.source_rank, int(route.runs["position"][0])) for route in plan.routes] == [
        (rank, rank << 17) for rank in range(8)
    ]


def test_a_range_is_split_at_block_borders() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, mla=True, block_tokens=48), ParallelLayout(block_tokens=32), 0, 300)
    border = int(plan.routes[1].runs["position"][0])
    assert border % 48 == 0 or border % 32 == 0
    assert abs(border - 150) <= 16


def most_apart(num_replicas: int, start: int, stop: int) -> int:
    """By how many tokens replicas are apart at most, over a round of equal requests with salts that count up."""
    given, most = np.zeros(num_replicas, dtype=np.int64), 0
    for salt in range(num_replicas):
        given += given_entries(plan_transfer(latent(num_replicas), latent(1), start, stop, salt))
        most = max(most, int(given.max() - given.min()))
    assert given.max() == given.min()
    return most


@pytest.mark.parametrize("num_replicas", range(2, 10))
def test_equal_requests_stay_within_half_the_replicas_in_blocks(num_replicas: int) -> None:
    """After each round all replicas have given the same; within one they are k // 2 blocks apart at most."""
    ranges = [(start, stop) for start in (0, 7) for stop in (8, 16, 17, 40, 63, 100, 129, 1000)]
    assert max(most_apart(num_replicas, *each) for each in ranges) <= num_replicas // 2 * 16


def test_the_bound_over_requests_is_reached() -> None:
    assert most_apart(2, 0, 16) == most_apart(3, 0, 16) == 16
    assert most_apart(4, 1, 32) == 2 * 16 - 1  # 15 + 16 tokens next to each other, two empty parts after them


def test_requests_of_whole_blocks_stay_within_a_block() -> None:
    for num_replicas in range(2, 9):
        assert max(most_apart(num_replicas, 0, 16 * blocks) for blocks in range(1, 12)) == 16


@settings(deadline=None, max_examples=100)
@given(transfers(), st.integers(-100, 100))
def test_spread_and_number_of_routes(transfer: tuple[ParallelLayout, ParallelLayout, int, int], salt: int) -> None:
    """Replicas are equal to within a block, and each cut costs one route at most."""
    source, target, start, stop = transfer
    plan = plan_transfer(source, target, start, stop, salt)
    assert find_fault(plan) is None
    holdings = plan.source.holdings
    needs = {(route.target_rank, holdings[route.source_rank]) for route in plan.routes}
    num_readers = Counter(holding for _, holding in needs)
    num_routes = Counter(holdings[route.source_rank] for route in plan.routes)
    for holding, number in num_routes.items():
        assert number < num_readers[holding] + holdings.count(holding)


def test_replicas_of_other_holdings_do_not_matter() -> None:
    plan = plan_transfer(latent(4, dcp=2), latent(1), 0, 64)
    assert [holding.shard for holding in plan.source.holdings] == [0, 1, 0, 1]
    assert plan.source.holdings[0] == Holding(0, Span(0, 1), Span(0, 1))
    assert given_entries(plan).tolist() == [16] * 4
