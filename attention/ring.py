"""Keys travel in a ring: a rank's keys visit all others, one rank at a time, and travel while others compute.

Nothing is gathered: a rank holds its own keys, those that visit and those that come next. New tokens visit as the
chunks their ranks computed, and every rank writes what it holds of a chunk while that is there. A sharded context
visits in pieces of the same workspace as in `attention.keys`.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from attention.entries import PagedCache, PageReader, Reader
from attention.exchange import rotate
from attention.keys import flat_starts
from attention.local import PADDING, LocalBatch, accumulate_batch, accumulate_segment, plan_rows
from attention.merge import Partial, empty_partial
from attention.pieces import Piece, context_segment, plan_pieces
from attention.step import RowSplit, Step, own_positions


@dataclass(frozen=True, slots=True)
class RingPath:
    """`batches[source]` are this rank's rows over the new tokens that a PCP rank computed, whose requests begin at
    `starts`. The context is in the own pages (`context`), or visits in `pieces` over `shards`."""

    split: RowSplit | None
    batches: tuple[LocalBatch, ...]
    starts: tuple[int, ...]
    context: LocalBatch
    shards: dist.ProcessGroup | None
    pieces: tuple[Piece, ...]

    def attend(
        self,
        query: torch.Tensor,
        entries: torch.Tensor,
        cache: PagedCache,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
    ) -> Partial:
        """See `prefill.Path`."""
        whole = empty_partial(tuple(query.shape[:2]), cache.format.value_size, query.device)
        self._accumulate_new(whole, query, entries, cache, slots, scale)
        accumulate_batch(whole, query, self.context, lambda request: PageReader(cache, block_table[request]), scale)
        if self.shards is not None:
            for piece in self.pieces:
                accumulate_visits(whole, query, piece, cache, block_table, self.shards, scale)
        return whole

    def _accumulate_new(
        self,
        whole: Partial,
        query: torch.Tensor,
        entries: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        scale: float,
    ) -> None:
        visits = [(0, entries)] if self.split is None else rotate(entries, self.split.group)
        for source, visiting in visits:
            cache.write(slots if self.split is None else self._slots_of(source, slots), visiting)
            readers = [Reader(visiting[start:], cache.format) for start in self.starts]
            accumulate_batch(whole, query, self.batches[source], readers.__getitem__, scale)

    def _slots_of(self, source: int, slots: torch.Tensor) -> torch.Tensor:
        """Where the rows of a PCP rank are written on this rank: flat slots, negative for padding."""
        assert self.split is not None
        rows = self.split.rows[source]
        return torch.where(rows < 0, PADDING, slots[rows.clamp(min=0)])


def accumulate_visits(
    whole: Partial,
    query: torch.Tensor,
    piece: Piece,
    cache: PagedCache,
    block_table: torch.Tensor,
    shards: dist.ProcessGroup,
    scale: float,
) -> None:
    """Merges into `whole` the attention of the own rows over one piece of their contexts, shard after shard."""
    for shard, visiting in rotate(piece.fill(cache, block_table, dist.get_rank(shards)), shards):
        for span, segment in piece.seen_of(shard):
            read = Reader(visiting[span.offsets[shard] :], cache.format)
            accumulate_segment(whole, query, segment, read, scale)


def plan_ring(step: Step, workspace_tokens: int, device: torch.device | str = "cpu") -> RingPath:
    """Keys travel in a ring, at most `workspace_tokens` of the context at a time.

    Raises:
        ConfigError: the workspace does not hold one virtual block.
    """
    batches, starts = _plan_new(step)
    in_own_pages: tuple[int, ...] = step.contexts if step.shards is None else ()
    segments = [context_segment(step, request, context) for request, context in enumerate(in_own_pages)]
    num_rows = sum(len(rows) for rows in step.own)
    return RingPath(
        split=step.split,
        batches=batches,
        starts=starts,
        context=LocalBatch(num_rows, tuple(segment for segment in segments if segment.visible.any())),
        shards=step.shards,
        pieces=() if step.shards is None else plan_pieces(step, workspace_tokens, device),
    )


def _plan_new(step: Step) -> tuple[tuple[LocalBatch, ...], tuple[int, ...]]:
    """The own rows over what each rank brings, and where requests begin in what it brings."""
    if step.split is None:
        return (plan_rows(step.own, lambda _, new_positions: new_positions + 1),), flat_starts(step.query_lens)
    swap, rank = step.split.swap, step.split.rank

    def plan_source(source: int) -> LocalBatch:
        keys = [of_request[of_request != PADDING] for of_request in own_positions(swap, source)]

        def count_visible(request: int, rows: np.ndarray) -> np.ndarray:
            if swap.replicated[request] and source != rank:  # all ranks bring the same: count the own
                return np.zeros_like(rows)
            return np.searchsorted(keys[request], rows, side="right")

        return plan_rows(step.own, count_visible)

    return tuple(plan_source(source) for source in range(swap.pcp)), flat_starts(swap.local_lens)
