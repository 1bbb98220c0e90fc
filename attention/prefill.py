"""Prefill context parallelism: ranks compute different rows of one batch (chunk swap).

A `RowSplit` is one step's chunk swap in tensors. Keys and values of new tokens are always gathered, because every rank
writes what it holds of them. Then there are two routes: where each rank holds the whole cache, own rows attend to it
alone; where the cache is sharded over the same ranks, queries are gathered, every row attends to the own shard and the
partial results of a row go to the ranks that compute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from attention.exchange import combine, gather
from attention.local import PADDING, LocalBatch, attend_local
from attention.merge import Partial
from layouts import chunk_swap


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Which rows of a flat batch each rank computes.

    `indices` [num_ranks, local rows] are rows of the flat batch (padding repeats row 0), `restore` [rows] finds each
    row in the rank-major results; rows that all ranks compute come from rank 0.
    """

    rank: int
    indices: torch.Tensor
    restore: torch.Tensor
    group: dist.ProcessGroup

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a flat batch [rows, ...]."""
        return rows[self.indices[self.rank]]

    def gather(self, local_rows: torch.Tensor) -> torch.Tensor:
        """The flat batch from every rank's rows."""
        return gather(local_rows, self.group).flatten(0, 1)[self.restore]


def split_rows(query_lens: Sequence[int], group: dist.ProcessGroup) -> tuple[RowSplit | None, tuple[np.ndarray, ...]]:
    """Splits the rows of a step over the ranks of `group`.

    Returns the split, or None when all requests are too short and every rank computes all rows, and per request the
    positions of this rank's rows among its new tokens (`PADDING` for padding).
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    swap = chunk_swap(query_lens, num_ranks)
    positions = tuple(
        np.where(of_request < length, of_request, PADDING)
        for of_request, length in zip(swap.rank_positions(rank), query_lens, strict=True)
    )
    indices = np.stack([swap.rank_indices(each) for each in range(num_ranks)])
    num_rows = sum(query_lens)
    if indices.shape[1] == num_rows:
        return None, positions
    places = np.flatnonzero(indices >= 0)[::-1]  # backwards: the first rank that has a row wins
    restore = np.empty(num_rows, dtype=np.int64)
    restore[indices.reshape(-1)[places]] = places
    return (
        RowSplit(rank, torch.from_numpy(np.maximum(indices, 0)), torch.from_numpy(restore), group),
        positions,
    )


def attend_over_rows(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    batch: LocalBatch,
    scale: float,
    split: RowSplit | None,
    group: dist.ProcessGroup,
) -> Partial:
    """As `local.attend_local`, for this rank's rows over the tokens of all shards, where `group` both splits the rows
    and shards the cache. `batch` plans ALL rows of the step with this rank's shard. Without a split each rank has, and
    gets, all rows."""
    gathered = query if split is None else split.gather(query)
    out, lse = attend_local(gathered, pages, block_table, batch, scale)
    if split is None:
        num_ranks = dist.get_world_size(group)
        return combine(out.expand(num_ranks, *out.shape), lse.expand(num_ranks, *lse.shape), group)
    return combine(out[split.indices], lse[split.indices], group)
