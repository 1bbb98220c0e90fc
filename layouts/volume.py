"""How much a transfer plan moves, and what it leaves out. Counts only; knows no bytes and no time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from layouts.interleave import Interleave
from layouts.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class RankVolume:
    """What one target rank receives.

    Listed blocks are those of its block table that positions start .. stop-1 touch on any shard; real
    ones get at least one token on this rank. An entry is one token of one KV head in one layer: entries
    times the bytes of one token of one head are the bytes received.
    """

    rank: int
    num_listed_blocks: int
    num_real_blocks: int
    num_tokens: int
    num_runs: int
    num_entries: int

    @property
    def num_empty_blocks(self) -> int:
        """Listed blocks that nothing is moved into."""
        return self.num_listed_blocks - self.num_real_blocks


@dataclass(frozen=True, slots=True)
class Volume:
    """What a plan moves: `ranks` is indexed by target rank."""

    ranks: tuple[RankVolume, ...]

    @property
    def num_real_blocks(self) -> int:
        """Blocks that receive tokens, over all target ranks."""
        return sum(rank.num_real_blocks for rank in self.ranks)

    @property
    def num_empty_blocks(self) -> int:
        """Listed blocks that are skipped, over all target ranks."""
        return sum(rank.num_empty_blocks for rank in self.ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all target ranks; a token counts once per rank that stores it."""
        return sum(rank.num_tokens for rank in self.ranks)

    @property
    def num_runs(self) -> int:
        """Runs read, over all routes."""
        return sum(rank.num_runs for rank in self.ranks)

    @property
    def num_entries(self) -> int:
        """Entries received, over all target ranks."""
        return sum(rank.num_entries for rank in self.ranks)


def plan_volume(plan: TransferPlan) -> Volume:
    """Counts per target rank. Costs time with ranks and routes, not with tokens."""
    num_runs: Counter[int] = Counter()
    for route in plan.routes:
        num_runs[route.target_rank] += len(route.runs)
    interleave = plan.target.interleave
    first_block, num_blocks = (
        plan.start // interleave.virtual_block_tokens,
        interleave.num_virtual_blocks(plan.stop),
    )
    num_listed = num_blocks - first_block if plan.start < plan.stop else 0
    ranks = []
    for rank, (holding, num_tokens) in enumerate(zip(plan.target.holdings, plan.num_tokens_to, strict=True)):
        num_real = _num_touched_blocks(interleave, holding.shard, plan.start, plan.stop)
        num_entries = num_tokens * holding.heads.size * holding.layers.size
        ranks.append(RankVolume(rank, num_listed, num_real, num_tokens, num_runs[rank], num_entries))
    return Volume(tuple(ranks))


def _num_touched_blocks(interleave: Interleave, shard: int, start: int, stop: int) -> int:
    """Blocks of a shard that hold at least one of the positions start .. stop-1."""
    first, end = interleave.num_local_tokens(start, shard), interleave.num_local_tokens(stop, shard)
    if first == end:
        return 0
    return interleave.num_local_blocks(stop, shard) - first // interleave.block_tokens
