"""Attention over the pages of one rank; shards merged by hand must give the whole."""

import numpy as np
import pytest
import torch

from attention.local import PADDING, attend_local, plan_local, write_tokens
from attention.merge import merge_all
from layouts import Interleave
from tests.attention.workload import SCALE, Request, make_workload


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("interleave_tokens", [1, 2, 8])
def test_merged_shards_equal_one_rank(num_shards: int, interleave_tokens: int, num_kv_heads: int) -> None:
    workload = make_workload(num_kv_heads=num_kv_heads)
    interleave = Interleave(num_shards, interleave_tokens, 8)
    parts = []
    for shard in range(num_shards):
        pages, table = workload.cache(interleave, shard)
        batch = plan_local(workload.positions, interleave, shard)
        parts.append(attend_local(workload.query, pages, table, batch, SCALE))
    torch.testing.assert_close(merge_all(parts).out, workload.answer(), rtol=1e-5, atol=1e-5)


def test_shard_without_tokens_gives_minus_infinity() -> None:
    workload = make_workload((Request(3, 1), Request(0, 4)))
    interleave = Interleave(2, 8, 8)
    pages, table = workload.cache(interleave, 1)
    part = attend_local(workload.query, pages, table, plan_local(workload.positions, interleave, 1), SCALE)
    assert torch.equal(part.lse, torch.full_like(part.lse, -torch.inf))
    assert torch.equal(part.out, torch.zeros_like(part.out))


def test_draft_rows_see_no_later_draft() -> None:
    """W=2, I=128, history 126, 4 query tokens: rows 0 and 1 see no key of shard 1, rows 2 and 3 one and two."""
    batch = plan_local([np.arange(126, 130)], Interleave(2, 128, 128), 1)
    assert batch.segments[0].visible.tolist() == [0, 0, 1, 2]


def test_rows_without_token_give_the_empty_part() -> None:
    workload = make_workload((Request(0, 4),))
    interleave = Interleave(1, 1, 4)
    pages, table = workload.cache(interleave, 0)
    batch = plan_local([np.array([0, 1, PADDING, PADDING])], interleave, 0)
    part = attend_local(workload.query, pages, table, batch, SCALE)
    torch.testing.assert_close(part.out[:2], workload.answer()[:2])
    assert torch.equal(part.lse[2:], torch.full_like(part.lse[2:], -torch.inf))


def test_empty_batch() -> None:
    batch = plan_local([np.arange(0)], Interleave(1, 1, 4), 0)
    part = attend_local(torch.empty(0, 8, 16), torch.empty(3, 1, 4, 32), torch.zeros(1, 2), batch, SCALE)
    assert part.out.shape == (0, 8, 16)


def test_tokens_of_other_ranks_are_not_written() -> None:
    pages = torch.zeros(3, 2, 4, 8)
    key, value = torch.ones(3, 2, 4), torch.full((3, 2, 4), 2.0)
    write_tokens(pages, torch.tensor([-1, 9, -1]), key, value)
    assert torch.equal(pages[2, :, 1], torch.tensor([1.0] * 4 + [2.0] * 4).expand(2, 8))
    assert pages.sum() == 2 * 4 * 3
