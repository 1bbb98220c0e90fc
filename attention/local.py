"""Attention of a batch of requests over the pages of one rank: which rows see how many of its keys, and the loop.

A rank holds the positions of a request in increasing order, so what a query row may see of them is always a prefix of
the rank's tokens: `layouts` says how long it is, this module never divides a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from attention.kernels import attend_prefix
from attention.merge import Partial, empty_partial
from layouts import Interleave

PADDING = -2
"""Position of a row that belongs to no token; its result is out 0, lse -inf. Not -1, to which 0 would be the next."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of the batch, which are consecutive positions of one request.

    `visible` [stop - start] counts the keys of this rank that each row sees.
    """

    request: int
    start: int
    stop: int
    visible: torch.Tensor

    @property
    def num_keys(self) -> int:
        return int(self.visible[-1])


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """What the query rows of a step attend to on this rank; `segments` are in order of requests."""

    num_rows: int
    segments: tuple[Segment, ...]


def plan_local(positions: Sequence[np.ndarray], interleave: Interleave, shard: int) -> LocalBatch:
    """Plans the rows of a step. `positions`: per request the int64 positions of its query rows in batch order,
    `PADDING` for rows without a token."""
    segments: list[Segment] = []
    row = 0
    for request, of_request in enumerate(positions):
        for piece in np.split(of_request, np.flatnonzero(np.diff(of_request) != 1) + 1):
            stop = row + len(piece)
            if len(piece) and piece[0] != PADDING:
                visible = np.asarray(interleave.num_local_tokens(piece + 1, shard), dtype=np.int64)
                segments.append(Segment(request, row, stop, torch.from_numpy(visible)))
            row = stop
    return LocalBatch(row, tuple(segments))


def attend_local(
    query: torch.Tensor, pages: torch.Tensor, block_table: torch.Tensor, batch: LocalBatch, scale: float
) -> Partial:
    """Attention of all rows over the keys of this rank.

    query [rows, Hq, D]; pages [num_blocks, Hkv, B, 2 D], keys then values of each token; block_table
    [requests, blocks] int. Returns out [rows, Hq, D] float32 and lse [rows, Hq].
    """
    num_heads, head_size = query.shape[1:]
    out, lse = empty_partial((batch.num_rows, num_heads), head_size, query.device)
    for request, segments in groupby(batch.segments, key=lambda segment: segment.request):
        pieces = list(segments)
        key, value = gather_tokens(pages, block_table[request], max(piece.num_keys for piece in pieces))
        for piece in pieces:
            rows = slice(piece.start, piece.stop)
            out[rows], lse[rows] = attend_prefix(query[rows], key, value, piece.visible, scale)
    return Partial(out, lse)


def gather_tokens(pages: torch.Tensor, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `num_tokens` tokens of one request on this rank, as key and value [Hkv, num_tokens, D]."""
    num_blocks = -(-num_tokens // pages.shape[2])
    tokens = pages.index_select(0, block_ids[:num_blocks]).transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    key, value = tokens.chunk(2, dim=-1)
    return key, value


def write_tokens(pages: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Stores tokens in the pages. slots [T] are flat slots, negative where the token belongs to another rank; key and
    value [T, Hkv, D]."""
    mine = torch.nonzero(slots >= 0).squeeze(-1)
    blocks, slot_in_block = torch.unravel_index(slots[mine], (pages.shape[0], pages.shape[2]))
    pages[blocks, :, slot_in_block] = torch.cat([key[mine], value[mine]], dim=-1)
