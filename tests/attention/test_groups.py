"""The context-parallel paths on real gloo groups against one rank."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from attention.decode import attend_over_heads
from attention.local import PADDING, attend_local, plan_local
from attention.prefill import RowSplit, attend_over_rows, split_rows
from layouts import Interleave
from tests.attention.ranks import run_ranks
from tests.attention.workload import MIXED, SCALE, Request, Workload, make_workload

DECODES = (Request(5, 1), Request(0, 1), Request(40, 1))
DRAFTS = (Request(126, 4), Request(127, 2), Request(300, 4))
BATCHES = (MIXED, DECODES, DRAFTS)
KV_HEADS_AND_INTERLEAVES = ((1, 1), (2, 4), (1, 8))
BLOCK_TOKENS = 8


def shifted(positions: Sequence[np.ndarray], workload: Workload) -> list[np.ndarray]:
    """Positions among new tokens -> positions in the request; padding stays."""
    return [
        np.where(rows < 0, rows, rows + request.num_context)
        for rows, request in zip(positions, workload.requests, strict=True)
    ]


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def decode_over_heads(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    for requests, (num_kv_heads, tokens) in itertools.product(BATCHES, KV_HEADS_AND_INTERLEAVES):
        workload = make_workload(requests, num_kv_heads=num_kv_heads)
        interleave = Interleave(num_ranks, tokens, BLOCK_TOKENS)
        pages, table = workload.cache(interleave, rank)
        batch = plan_local(workload.positions, interleave, rank)
        heads = mine(workload.query, num_kv_heads, rank, num_ranks)
        part = attend_over_heads(heads, pages, table, batch, SCALE, group)
        check(part.out, mine(workload.answer(), num_kv_heads, rank, num_ranks))


def mine(rows: torch.Tensor, num_kv_heads: int, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's query heads: its share of those of each KV head."""
    return rows.unflatten(1, (num_kv_heads, num_ranks, -1))[:, :, rank].flatten(1, 2)


def prefill_with_whole_cache(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    for requests, num_kv_heads in itertools.product(BATCHES, (1, 2)):
        workload = make_workload(requests, num_kv_heads=num_kv_heads)
        interleave = Interleave(1, 1, BLOCK_TOKENS)
        pages, table = workload.cache(interleave, 0)
        split, positions = split_rows(workload.query_lens, group)
        batch = plan_local(shifted(positions, workload), interleave, 0)
        out = attend_local(own(split, workload.query), pages, table, batch, SCALE).out
        check(out if split is None else split.gather(out), workload.answer())


def prefill_with_sharded_cache(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    for requests, (num_kv_heads, tokens) in itertools.product(BATCHES, KV_HEADS_AND_INTERLEAVES):
        workload = make_workload(requests, num_kv_heads=num_kv_heads)
        interleave = Interleave(num_ranks, tokens, BLOCK_TOKENS)
        pages, table = workload.cache(interleave, rank)
        split, _ = split_rows(workload.query_lens, group)
        batch = plan_local(workload.positions, interleave, rank)
        part = attend_over_rows(own(split, workload.query), pages, table, batch, SCALE, split, group)
        check(part.out if split is None else split.gather(part.out), workload.answer())


def own(split: RowSplit | None, rows: torch.Tensor) -> torch.Tensor:
    return rows if split is None else split.select(rows)


def split_and_gather(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    query_lens = [1, 5, 8]
    split, positions = split_rows(query_lens, group)
    assert split is not None
    rows = torch.arange(14)
    assert torch.equal(split.gather(split.select(rows)), rows)
    assert [len(of_request) for of_request in positions] == [1, 4, 4]
    assert positions[1].tolist() == ([0, 1, PADDING, PADDING] if rank == 0 else [2, 3, 4, PADDING])
    assert split_rows([1, 3], group)[0] is None


def everything(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    decode_over_heads(rank, group, num_ranks)
    prefill_with_whole_cache(rank, group, num_ranks)
    prefill_with_sharded_cache(rank, group, num_ranks)


def test_two_ranks() -> None:
    run_ranks(2, everything, 2)


def test_four_ranks() -> None:
    run_ranks(4, everything, 4)


def test_split_and_gather() -> None:
    run_ranks(2, split_and_gather, 2)
