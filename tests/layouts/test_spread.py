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


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40, 100, 1000])
def test_requests_that_are_numbered_through_spread_over_all(num_tokens: int) -> None:
    """After each round over the replicas all have given the same, and meanwhile never two blocks more than another."""
    given = np.zeros(8, dtype=np.int64)
    for salt in range(24):
        given += given_entries(plan_transfer(latent(8), latent(1), 0, num_tokens, salt))
        assert given.max() - given.min() <= 2 * 16
        if salt % 8 == 7:
            assert given.max() == given.min()


def test_many_equal_short_prompts_stay_within_a_block() -> None:
    given = np.zeros(4, dtype=np.int64)
    for salt in range(100):
        given += given_entries(plan_transfer(latent(4), latent(1), 0, 16, salt))
        assert given.max() - given.min() <= 16


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
