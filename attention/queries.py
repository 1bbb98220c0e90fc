"""Queries travel: every rank attends to the tokens it holds, with the rows and heads of all ranks, and results return.

The path of decode (DCP), where ranks have other heads of the same rows, and one of three paths of prefill (PCP), where
they have other rows, or both. New tokens are in the cache before attention starts, so prefills, decodes and
speculative rows are the same case.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention.entries import PagedCache
from attention.exchange import Ending, combine, combine_copies, gather
from attention.local import LocalBatch, attend_local, plan_local
from attention.merge import Partial
from attention.step import RowSplit, Step
from layouts import Interleave


@dataclass(frozen=True, slots=True)
class QueryExchange:
    """How the ranks of `group` share queries and results: rank = head rank * row ranks + row rank.

    `split` says which rows a rank has (None: all). With `has_all_heads` each rank computed the queries of all head
    ranks itself (see `attention.projection`), so only results travel.
    """

    group: dist.ProcessGroup
    split: RowSplit | None
    num_head_ranks: int
    ending: Ending = Ending.ALL_TO_ALL
    has_all_heads: bool = False

    @property
    def num_row_ranks(self) -> int:
        num_ranks: int = dist.get_world_size(self.group)
        return num_ranks // self.num_head_ranks

    def gather(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """query [own rows, Hq, K] of every rank -> [all rows, head ranks * Hq, K], in which the queries of each KV head
        are adjacent."""
        if self.has_all_heads or (self.split is None and self.num_head_ranks == 1):
            return query
        gathered = gather(query.unflatten(1, (num_kv_heads, -1)), self.group)
        by_rank = gathered.unflatten(0, (self.num_head_ranks, self.num_row_ranks))
        rows = by_rank[:, 0] if self.split is None else by_rank.flatten(1, 2)[:, self.split.restore]
        return rows.permute(1, 2, 0, 3, 4).flatten(1, 3)  # from [head ranks, rows, KV heads, Hq / KV heads, K]

    def combine(self, part: Partial, num_kv_heads: int) -> Partial:
        """The inverse of `gather` for results: each rank gets its rows and heads, merged over all shards."""
        if self.split is None and self.num_head_ranks == 1:
            return combine_copies(part, self.group)
        mine = Partial(*(self._by_rank(each, num_kv_heads) for each in part))
        mine = combine(mine, self.group, self.ending)
        return Partial(mine.out.flatten(1, 2), mine.lse.flatten(1, 2))

    def _by_rank(self, results: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """[all rows, all heads, ...] -> [ranks, own rows, KV heads, Hq / KV heads, ...]."""
        by_head = results.unflatten(1, (num_kv_heads, self.num_head_ranks, -1))
        if self.split is None:
            by_row = by_head.expand(self.num_row_ranks, *by_head.shape)
        else:
            by_row = self.split.spread(by_head)
        return by_row.movedim(3, 0).flatten(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class QueryPath:
    """All rows over the tokens of this rank. `blocks` are the entries of a block table that count as this rank's."""

    split: RowSplit | None
    batch: LocalBatch
    blocks: slice
    exchange: QueryExchange | None

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
        return attend_shared(query, cache, block_table[:, self.blocks], self.batch, self.exchange, scale)


def attend_shared(
    query: torch.Tensor,
    cache: PagedCache,
    block_table: torch.Tensor,
    batch: LocalBatch,
    exchange: QueryExchange | None,
    scale: float,
) -> Partial:
    """As `local.attend_local`, for own rows and heads over the tokens of all ranks of an exchange; `batch` plans ALL
    rows with this rank's tokens. New tokens are in the pages."""
    if exchange is None:
        return attend_local(query, cache, block_table, batch, scale)
    gathered = exchange.gather(query, cache.num_kv_heads)
    part = attend_local(gathered, cache, block_table, batch, scale)
    return exchange.combine(part, cache.num_kv_heads)


def plan_queries(step: Step, ending: Ending = Ending.ALL_TO_ALL, *, has_all_heads: bool = False) -> QueryPath:
    """Queries travel to the shards; where each PCP rank holds the whole cache, to every PCP-th block of it."""
    if step.shards is not None:
        batch = plan_local(step.positions, step.interleave, step.shard)
        exchange = QueryExchange(step.shards, step.split, step.num_head_ranks, ending, has_all_heads)
        return QueryPath(step.split, batch, slice(None), exchange)
    if step.split is None:
        return QueryPath(None, plan_local(step.positions, step.interleave, 0), slice(None), None)
    num_ranks, rank = step.split.num_ranks, step.split.rank
    by_blocks = Interleave(num_ranks, step.interleave.block_tokens, step.interleave.block_tokens)
    batch = plan_local(step.positions, by_blocks, rank)
    return QueryPath(
        step.split, batch, slice(rank, None, num_ranks), QueryExchange(step.split.group, step.split, 1, ending)
    )
