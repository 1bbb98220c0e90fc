"""A sharded context in pieces that fit a workspace: what each rank contributes, and where each token comes to lie.

Positions of a request are cut at virtual blocks, so that every rank's share starts at a block. The last piece of a
request is uneven: some ranks have more tokens of it than others, and pad.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.entries import PagedCache
from attention.kernels import IntArray
from attention.local import Segment
from attention.step import Step
from layouts import Interleave
from layouts.errors import config_error


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of one request in a piece, all of them seen by the rows of `segment`.

    Rank r has `num_tokens[r]` of them, from its token `first_token[r]` on, and puts them at `offsets[r]` of its
    contribution. `index` [positions] finds them, in order, in the contributions of all ranks.
    """

    segment: Segment
    first_token: IntArray
    num_tokens: IntArray
    offsets: IntArray
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Spans that are exchanged together; each rank contributes `padded_tokens`."""

    spans: tuple[Span, ...]
    padded_tokens: int

    def fill(
        self, cache: PagedCache, block_table: torch.Tensor, shard: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's contribution [padded_tokens, Hkv, E], at the start of `into` where that is given; padding is
        whatever was there."""
        filled = new_entries(cache, self.padded_tokens) if into is None else into[: self.padded_tokens]
        tile_tokens = cache.format.tile_tokens
        for span in self.spans:
            first, count, offset = (int(each[shard]) for each in (span.first_token, span.num_tokens, span.offsets))
            for start in range(0, count, tile_tokens):
                stop = min(start + tile_tokens, count)
                tokens = cache.entries(block_table[span.segment.request], first + start, first + stop)
                filled[offset + start : offset + stop] = tokens
        return filled

    def seen_of(self, shard: int) -> Iterator[tuple[Span, Segment]]:
        """Spans of which a shard contributes tokens, with the rows that see these."""
        for span in self.spans:
            count, segment = span.num_tokens[shard], span.segment
            if count:
                yield span, replace(segment, visible=np.full_like(segment.visible, count))


def new_entries(cache: PagedCache, num_tokens: int) -> torch.Tensor:
    """Room for entries of a cache: [num_tokens, Hkv, E], not initialized."""
    num_heads, _, entry_size = cache.pages.shape[1:]
    return cache.pages.new_empty((num_tokens, num_heads, entry_size))


def reorg_kvcache(gathered: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Contributions of all ranks [W, padded tokens, Hkv, E] -> tokens of one request in order [len(index), Hkv, E].

    Shards interleave positions, ranks have uneven lengths, and padding is dropped: `index` knows.
    """
    return gathered.flatten(0, 1).index_select(0, index)


def plan_pieces(step: Step, workspace_tokens: int, device: torch.device | str = "cpu") -> tuple[Piece, ...]:
    """Cuts the contexts of a step so that all ranks together contribute at most `workspace_tokens` at a time.

    Raises:
        ConfigError: the workspace does not hold one virtual block.
    """
    interleave = step.interleave
    if workspace_tokens < interleave.virtual_block_tokens:
        raise config_error(
            f"workspace_tokens with {interleave.num_shards} shards and blocks of {interleave.block_tokens}",
            got=workspace_tokens,
            allowed=f"{interleave.virtual_block_tokens} or more",
            remedy="Give the workspace room for one block of every shard.",
        )
    pieces = _cut(step, workspace_tokens // interleave.num_shards)
    return tuple(_plan_piece(step, piece, device) for piece in pieces)


Cut = tuple[int, int, int]
"""(request, first position, end position)."""


def _cut(step: Step, rank_tokens: int) -> Iterator[list[Cut]]:
    """Fills one piece after the other, request after request, with up to `rank_tokens` on the fullest rank."""
    interleave = step.interleave
    piece: list[Cut] = []
    used = np.zeros(interleave.num_shards, dtype=np.int64)
    for request, context in enumerate(step.contexts):
        start = 0
        while start < context:
            stop = context
            if (used + _num_tokens(interleave, start, stop)).max() > rank_tokens:
                room = (rank_tokens - int(used.max())) // interleave.block_tokens
                stop = start + room * interleave.virtual_block_tokens
            if stop > start:
                piece.append((request, start, stop))
                used = used + _num_tokens(interleave, start, stop)
                start = stop
            if start < context:
                yield piece
                piece, used = [], np.zeros_like(used)
    if piece:
        yield piece


def _num_tokens(interleave: Interleave, start: int, stop: int) -> IntArray:
    """How many of the positions start .. stop-1 each shard holds."""
    return _first_tokens(interleave, stop) - _first_tokens(interleave, start)


def _first_tokens(interleave: Interleave, position: int) -> IntArray:
    """Each shard's index of its first token at `position` or later."""
    return np.array([interleave.num_local_tokens(position, shard) for shard in range(interleave.num_shards)])


def _plan_piece(step: Step, piece: list[Cut], device: torch.device | str) -> Piece:
    interleave = step.interleave
    counts = [_num_tokens(interleave, start, stop) for _, start, stop in piece]
    offsets = np.cumsum([np.zeros_like(counts[0]), *counts], axis=0)
    padded_tokens = int(offsets[-1].max())
    spans = []
    for (request, start, stop), num_tokens, offset in zip(piece, counts, offsets, strict=False):
        owner = interleave.owner(np.arange(start, stop, dtype=np.int64))
        index = np.empty(stop - start, dtype=np.int64)
        for shard in range(interleave.num_shards):
            index[owner == shard] = shard * padded_tokens + offset[shard] + np.arange(num_tokens[shard])
        spans.append(
            Span(
                segment=context_segment(step, request, stop - start),
                first_token=_first_tokens(interleave, start),
                num_tokens=num_tokens,
                offsets=offset,
                index=torch.from_numpy(index).to(device),
            )
        )
    return Piece(tuple(spans), padded_tokens)


def context_segment(step: Step, request: int, num_keys: int) -> Segment:
    """This rank's rows of a request, all of which see `num_keys` tokens of its context."""
    first = sum(len(rows) for rows in step.own[:request])
    num_rows = int((step.own[request] >= 0).sum())
    return Segment(request, first, first + num_rows, np.full(num_rows, num_keys, dtype=np.int64))
