"""Keys travel: every rank attends with its own queries to tokens gathered from all ranks.

New tokens are gathered over the PCP ranks, because each writes what it holds of them; a sharded context is gathered in
pieces that fit a workspace, and results accumulate by lse, so that memory does not grow with the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from attention.entries import EntryFormat, PagedCache, Reader
from attention.exchange import gather
from attention.local import LocalBatch, accumulate_batch, accumulate_segment, attend_local, plan_local, plan_rows
from attention.merge import Partial, empty_partial
from attention.pieces import Piece, new_entries, plan_pieces, reorg_kvcache
from attention.step import RowSplit, Step


@dataclass(frozen=True, slots=True)
class WholeKeyPath:
    """Each rank holds the whole cache: its rows attend to its own pages."""

    split: RowSplit | None
    batch: LocalBatch

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
        cache.write(slots, entries if self.split is None else self.split.gather(entries))
        return attend_local(query, cache, block_table, self.batch, scale)


@dataclass(frozen=True, slots=True)
class GatheredKeyPath:
    """The cache is sharded over `shards`. `batch` is this rank's rows over the new tokens of the flat batch, in which
    requests begin at `starts`."""

    split: RowSplit | None
    shards: dist.ProcessGroup
    batch: LocalBatch
    starts: tuple[int, ...]
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
        new = entries if self.split is None else self.split.gather(entries)
        cache.write(slots, new)
        whole = empty_partial(tuple(query.shape[:2]), cache.format.value_size, query.device)
        accumulate_batch(
            whole, query, self.batch, lambda request: Reader(new[self.starts[request] :], cache.format), scale
        )
        self._accumulate_context(whole, query, cache, block_table, scale)
        return whole

    def _accumulate_context(
        self, whole: Partial, query: torch.Tensor, cache: PagedCache, block_table: torch.Tensor, scale: float
    ) -> None:
        """Piece by piece through one workspace, which holds a contribution and what is gathered of all ranks."""
        most = max((piece.padded_tokens for piece in self.pieces), default=0)
        own, everyone = new_entries(cache, most), new_entries(cache, most * dist.get_world_size(self.shards))
        for piece in self.pieces:
            filled = piece.fill(cache, block_table, dist.get_rank(self.shards), own)
            gathered = gather(filled, self.shards, everyone)
            for span in piece.spans:
                read = GatheredReader(gathered, span.index, cache.format)
                accumulate_segment(whole, query, span.segment, read, scale)


@dataclass(frozen=True, slots=True)
class GatheredReader:
    """Tokens of one span as keys and values, reorganized only as they are read."""

    gathered: torch.Tensor
    index: torch.Tensor
    format: EntryFormat

    def __call__(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.format.read(reorg_kvcache(self.gathered, self.index[start:stop]))


def plan_keys(step: Step, workspace_tokens: int, device: torch.device | str = "cpu") -> WholeKeyPath | GatheredKeyPath:
    """Keys travel, at most `workspace_tokens` of the context at a time.

    Raises:
        ConfigError: the workspace does not hold one virtual block.
    """
    if step.shards is None:
        return WholeKeyPath(step.split, plan_local(step.own_positions, step.interleave, 0))
    return GatheredKeyPath(
        split=step.split,
        shards=step.shards,
        batch=plan_rows(step.own, lambda _, new_positions: new_positions + 1),
        starts=flat_starts(step.query_lens),
        pieces=plan_pieces(step, workspace_tokens, device),
    )


def flat_starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of several consecutive parts starts."""
    return tuple(accumulate((0, *lengths)))[:-1]
