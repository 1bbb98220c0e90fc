"""Attention of a batch of requests over the keys at hand: which rows see how many of them, and the loop.

Keys of a request are always held in increasing order of position, whatever rank they come from, so what a query row may
see of them is a prefix: `layouts` says how long it is, this module never divides a position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from attention.entries import EntryFormat, PagedCache, PageReader
from attention.kernels import IntArray, accumulate_prefix
from attention.merge import Partial, empty_partial
from layouts import Interleave

PADDING = -1
"""Position of a row that belongs to no token; its result is out 0, lse -inf. Such rows end a request."""


class TokenReader(Protocol):
    """Keys and values of one sequence, some at a time."""

    @property
    def format(self) -> EntryFormat: ...

    def __call__(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of the batch, which belong to one request in increasing order of position.

    `visible` int64 [stop - start] counts the keys that each row sees.
    """

    request: int
    start: int
    stop: int
    visible: IntArray


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """What the query rows of a step attend to; requests whose rows see nothing have no segment."""

    num_rows: int
    segments: tuple[Segment, ...]

    @property
    def num_pairs(self) -> int:
        """Pairs of a row and a key it sees: the work of one head."""
        return sum(int(segment.visible.sum()) for segment in self.segments)


def plan_rows(positions: Sequence[IntArray], count_visible: Callable[[int, IntArray], IntArray]) -> LocalBatch:
    """Plans the rows of a step.

    positions: per request the positions of its rows in batch order, then `PADDING`. count_visible(request, positions)
    counts for each position the keys up to it.
    """
    segments: list[Segment] = []
    row = 0
    for request, of_request in enumerate(positions):
        of_tokens = of_request[of_request != PADDING]
        visible = np.asarray(count_visible(request, of_tokens), dtype=np.int64)
        if len(visible) and visible[-1] > 0:
            segments.append(Segment(request, row, row + len(visible), visible))
        row += len(of_request)
    return LocalBatch(row, tuple(segments))


def plan_local(positions: Sequence[IntArray], interleave: Interleave, shard: int) -> LocalBatch:
    """Rows over all tokens up to their own that a shard holds."""
    return plan_rows(positions, lambda _, of_tokens: interleave.num_local_tokens(of_tokens + 1, shard))


def accumulate_batch(
    whole: Partial, query: torch.Tensor, batch: LocalBatch, reader: Callable[[int], TokenReader], scale: float
) -> None:
    """Merges into `whole` the attention of query [rows, Hq, K] over the keys that `reader(request)` reads."""
    for segment in batch.segments:
        accumulate_segment(whole, query, segment, reader(segment.request), scale)


def accumulate_segment(whole: Partial, query: torch.Tensor, segment: Segment, read: TokenReader, scale: float) -> None:
    """As `accumulate_batch`, for the rows of one request."""
    rows = slice(segment.start, segment.stop)
    part = Partial(whole.out[rows], whole.lse[rows])
    accumulate_prefix(part, query[rows], read, segment.visible, scale, read.format.tile_tokens)


def attend_local(
    query: torch.Tensor, cache: PagedCache, block_table: torch.Tensor, batch: LocalBatch, scale: float
) -> Partial:
    """Attention of all rows over the tokens in the pages of this rank.

    query [rows, Hq, K]; block_table [requests, blocks] int. Returns out [rows, Hq, V] float32 and lse [rows, Hq].
    """
    whole = empty_partial(tuple(query.shape[:2]), cache.format.value_size, query.device)
    accumulate_batch(whole, query, batch, lambda request: PageReader(cache, block_table[request]), scale)
    return whole
