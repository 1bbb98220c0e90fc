"""Who computes and who holds what in one step: rows split over PCP ranks, tokens of the cache spread over shards.

Positions come from `layouts`; this module arranges them and knows no keys and no values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from attention.exchange import gather
from attention.kernels import IntArray
from attention.local import PADDING
from layouts import ChunkSwap, Interleave, chunk_swap
from layouts.errors import config_error


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Which rows of a flat batch each PCP rank computes (chunk swap).

    `rows` int64 [num_ranks, local rows] are rows of the flat batch, -1 for padding; `restore` [flat rows] finds each of
    them in the rank-major results. Rows that all ranks compute come from rank 0.
    """

    swap: ChunkSwap
    rank: int
    rows: torch.Tensor
    restore: torch.Tensor
    group: dist.ProcessGroup

    @property
    def num_ranks(self) -> int:
        return self.swap.pcp

    def select(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a flat batch [flat rows, ...]; padding repeats a row."""
        return flat[self.rows[self.rank].clamp(min=0)]

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        """Each rank's rows of a flat batch: [num_ranks, local rows, ...]."""
        return flat[self.rows.clamp(min=0)]

    def gather(self, local_rows: torch.Tensor) -> torch.Tensor:
        """The flat batch from every rank's rows."""
        return gather(local_rows, self.group).flatten(0, 1)[self.restore]


def split_rows(
    query_lens: Sequence[int],
    group: dist.ProcessGroup,
    decodes: Sequence[bool] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[RowSplit | None, tuple[IntArray, ...]]:
    """Splits the rows of a step over the ranks of `group`.

    Returns the split, or None when every rank computes all rows (short requests and `decodes` only), and per request
    the positions of this rank's rows among its new tokens (`PADDING` for padding).
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    swap = chunk_swap(query_lens, num_ranks, decodes)
    positions = own_positions(swap, rank)
    if all(swap.replicated):
        return None, positions
    rows = np.stack([swap.rank_indices(each) for each in range(num_ranks)])
    places = np.flatnonzero(rows >= 0)[::-1]  # backwards: the first rank that has a row wins
    restore = np.empty(sum(query_lens), dtype=np.int64)
    restore[rows.reshape(-1)[places]] = places
    split = RowSplit(swap, rank, torch.from_numpy(rows).to(device), torch.from_numpy(restore).to(device), group)
    return split, positions


def own_positions(swap: ChunkSwap, rank: int) -> tuple[IntArray, ...]:
    """Per request the positions of a rank's rows among its new tokens, `PADDING` for padding."""
    return tuple(
        np.where(of_request < length, of_request, PADDING)
        for of_request, length in zip(swap.rank_positions(rank), swap.query_lens, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One step as one rank sees it. Build it with `plan_step`.

    Each request has `contexts` tokens in the cache and `query_lens` new ones. `own` are the positions of this rank's
    rows among the new tokens. Without `split` every rank has all rows; without `shards` it holds all tokens.
    """

    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    interleave: Interleave
    shard: int
    split: RowSplit | None
    shards: dist.ProcessGroup | None
    num_row_ranks: int
    own: tuple[IntArray, ...]

    @property
    def positions(self) -> list[IntArray]:
        """Positions of all rows, per request."""
        return [
            np.arange(context, context + length) for context, length in zip(self.contexts, self.query_lens, strict=True)
        ]

    @property
    def own_positions(self) -> list[IntArray]:
        """Positions of this rank's rows, per request, `PADDING` for padding."""
        return [
            np.where(rows == PADDING, PADDING, rows + context)
            for rows, context in zip(self.own, self.contexts, strict=True)
        ]

    @property
    def num_head_ranks(self) -> int:
        """Ranks of the shard group that have the same rows and different query heads."""
        return self.interleave.num_shards // self.num_row_ranks if self.shards is not None else 1


def plan_step(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    interleave: Interleave,
    *,
    rows: dist.ProcessGroup | None = None,
    shards: dist.ProcessGroup | None = None,
    decodes: Sequence[bool] | None = None,
    device: torch.device | str = "cpu",
) -> Step:
    """The step of this rank.

    Args:
        interleave: of the cache, W = 1, or the size of `shards`.
        rows: the PCP group; None for PCP = 1.
        shards: the ranks the cache is spread over, row ranks fastest (vLLM's DCP group: shard = tp * PCP + pcp).
        decodes: which requests are decodes; needed where those have 2 * PCP rows or more (speculation).

    Raises:
        ConfigError: W is not the size of `shards`, or not a multiple of PCP.
    """
    num_shards = 1 if shards is None else dist.get_world_size(shards)
    num_row_ranks = 1 if rows is None else dist.get_world_size(rows)
    if num_shards != interleave.num_shards or (num_shards > 1 and num_shards % num_row_ranks):
        raise config_error(
            f"num_shards of the cache with {num_row_ranks} PCP ranks and a shard group of {num_shards}",
            got=interleave.num_shards,
            allowed="the size of the shard group, 1 or a multiple of PCP",
            remedy="Build the interleave and the groups from one ParallelLayout.",
        )
    if rows is None:
        split, own = None, tuple(np.arange(length, dtype=np.int64) for length in query_lens)
    else:
        split, own = split_rows(query_lens, rows, decodes, device)
    return Step(
        query_lens=tuple(query_lens),
        contexts=tuple(contexts),
        interleave=interleave,
        shard=0 if shards is None else dist.get_rank(shards),
        split=split,
        shards=shards if num_shards > 1 else None,
        num_row_ranks=num_row_ranks,
        own=own,
    )
