"""How much a transfer moves, and what it leaves out: counted from a plan, or by formula without a plan.

Counts only. An *entry* is one token of one KV head in one layer; entries times the bytes of one entry are bytes, and
nothing here knows how many that is, nor any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layouts.interleave import IntArray, Interleave
from layouts.parallel import Holding, ParallelLayout, Placement
from layouts.plan import TransferPlan, plan_transfer
from layouts.routes import Route
from layouts.runs import ShardPair

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankVolume:
    """What one target rank receives.

    Listed blocks are those of its block table that positions start .. stop-1 touch on any shard; real ones get at
    least one token on this rank. Messages are routes: source ranks it reads from. Segments are what is contiguous at
    both ends, of one head in one layer: consecutive slots of one block, where heads lie apart and no two blocks touch.
    Where memory does touch they are merged later, so these are the most. Source blocks are those that hold a token it
    needs, of replicas one; whole-block entries are what it would receive if those could only be moved whole.
    """

    rank: int
    num_listed_blocks: int
    num_real_blocks: int
    num_tokens: int
    num_runs: int
    num_entries: int
    num_messages: int
    num_segments: int
    num_source_blocks: int
    num_whole_block_entries: int

    @property
    def num_empty_blocks(self) -> int:
        """Listed blocks that nothing is moved into."""
        return self.num_listed_blocks - self.num_real_blocks

    @property
    def num_padding_entries(self) -> int:
        """Entries that moving whole source blocks would add."""
        return self.num_whole_block_entries - self.num_entries


@dataclass(frozen=True, slots=True)
class Volume:
    """What a transfer moves: `ranks` is indexed by target rank, properties are sums over them."""

    ranks: tuple[RankVolume, ...]

    @property
    def num_listed_blocks(self) -> int:
        """Blocks that the target's block table names."""
        return self._sum(lambda rank: rank.num_listed_blocks)

    @property
    def num_real_blocks(self) -> int:
        """Blocks that receive tokens."""
        return self._sum(lambda rank: rank.num_real_blocks)

    @property
    def num_empty_blocks(self) -> int:
        """Listed blocks that are skipped."""
        return self._sum(lambda rank: rank.num_empty_blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens received; a token counts once per rank that stores it."""
        return self._sum(lambda rank: rank.num_tokens)

    @property
    def num_runs(self) -> int:
        """Runs read, over all routes."""
        return self._sum(lambda rank: rank.num_runs)

    @property
    def num_entries(self) -> int:
        """Entries received."""
        return self._sum(lambda rank: rank.num_entries)

    @property
    def num_messages(self) -> int:
        """Pairs of a source rank and a target rank that talk."""
        return self._sum(lambda rank: rank.num_messages)

    @property
    def num_segments(self) -> int:
        """Contiguous pieces of one head in one layer."""
        return self._sum(lambda rank: rank.num_segments)

    @property
    def num_source_blocks(self) -> int:
        """Source blocks read from, once per reader."""
        return self._sum(lambda rank: rank.num_source_blocks)

    @property
    def num_whole_block_entries(self) -> int:
        """Entries received if only whole source blocks could be moved."""
        return self._sum(lambda rank: rank.num_whole_block_entries)

    @property
    def num_padding_entries(self) -> int:
        """Entries that moving whole source blocks would add."""
        return self._sum(lambda rank: rank.num_padding_entries)

    def _sum(self, count: Callable[[RankVolume], int]) -> int:
        return sum(map(count, self.ranks))


def plan_volume(plan: TransferPlan) -> Volume:
    """Counts what a plan moves. Costs one pass over its distinct arrays of runs."""
    counted: dict[int, _Traffic] = {}
    parts: dict[tuple[int, Holding], list[Route]] = defaultdict(list)
    for route in plan.routes:
        if id(route.runs) not in counted:
            counted[id(route.runs)] = _traffic_of(route)
        parts[route.target_rank, plan.source.holdings[route.source_rank]].append(route)
    received: list[list[_Received]] = [[] for _ in plan.target.holdings]
    for (target_rank, _), routes in parts.items():
        traffic = counted[id(routes[0].runs)] if len(routes) == 1 else _joined(routes, counted)
        num_tiles = routes[0].heads.size * routes[0].layers.size
        received[target_rank].append(_Received(traffic, num_tiles, len(routes)))
    return _volume(plan.source, plan.target, plan.start, plan.stop, received)


def predict_volume(
    source: ParallelLayout | Placement, target: ParallelLayout | Placement, start: int, stop: int
) -> Volume:
    """What `plan_volume` counts in `plan_transfer(source, target, start, stop)`, by formula.

    How tokens of one source shard meet one target shard repeats after lcm(source virtual block, target virtual block)
    positions, so the counts of whole periods are multiplied. Costs time with one period and with ranks, not with the
    number of tokens. Messages are those of readers that are not split: a plan has more where it cuts the range of a
    target rank between replicas, and all other numbers alike.

    Args:
        source, target: layouts of one model.
        start, stop: the positions start .. stop-1 are moved.

    Raises:
        ConfigError: KV heads or layers differ, or not 0 <= start <= stop.
    """
    source, target = (side.placement if isinstance(side, ParallelLayout) else side for side in (source, target))
    same_cache = (source.num_kv_heads, source.num_layers) == (target.num_kv_heads, target.num_layers)
    if not same_cache or not 0 <= start <= stop:
        plan_transfer(source, target, start, stop)  # refuses, in its own words
    traffic = _traffic_between(source.interleave, target.interleave, start, stop)
    givers = dict.fromkeys(source.holdings)
    by_need = {need: _needed(need, givers, traffic) for need in dict.fromkeys(target.holdings)}
    return _volume(source, target, start, stop, [by_need[need] for need in target.holdings])


def predict_shared_volume(
    source: ParallelLayout | Placement, target: ParallelLayout | Placement, start: int, stop: int
) -> Volume:
    """What crosses between the nodes in `share_replicas`, by formula: `ranks` is indexed by distinct target holding.

    Arguments, costs, messages and errors are those of `predict_volume`.
    """
    target = target.placement if isinstance(target, ParallelLayout) else target
    distinct = replace(target, holdings=tuple(dict.fromkeys(target.holdings)))
    return predict_volume(source, distinct, start, stop)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What moves between one source shard and one target shard."""

    num_tokens: int
    num_runs: int
    num_segments: int
    num_source_blocks: int


@dataclass(frozen=True, slots=True)
class _Received:
    """What a rank gets from one source holding: its traffic, for `num_tiles` pairs of a head and a layer."""

    traffic: _Traffic
    num_tiles: int
    num_messages: int


def _needed(need: Holding, givers: Iterable[Holding], traffic: Mapping[ShardPair, _Traffic]) -> list[_Received]:
    """What a rank gets from each of the distinct source holdings."""
    received = []
    for giver in givers:
        if (giver.shard, need.shard) in traffic:
            heads, layers = giver.heads.intersect(need.heads), giver.layers.intersect(need.layers)
            if heads.size > 0 and layers.size > 0:
                received.append(_Received(traffic[giver.shard, need.shard], heads.size * layers.size, 1))
    return received


def _traffic_of(route: Route) -> _Traffic:
    """Counts one array of runs; its blocks ascend, as its positions do."""
    runs = route.runs
    ends = _Ends(*(runs[name] for name in _Ends._fields))
    num_segments, num_blocks = (int(np.count_nonzero(new)) + 1 for new in (ends.new_segment(), ends.new_source_block()))
    return _Traffic(route.num_tokens, len(runs), num_segments, num_blocks)


def _joined(routes: list[Route], counted: dict[int, _Traffic]) -> _Traffic:
    """The traffic of routes that share a range between replicas; a block cut between two of them counts once."""
    ordered = sorted(routes, key=lambda route: int(route.runs["position"][0]))
    traffic = [counted[id(route.runs)] for route in ordered]
    num_cut = sum(
        int(left.runs["source_block"][-1] == right.runs["source_block"][0]) for left, right in pairwise(ordered)
    )
    return _Traffic(
        sum(part.num_tokens for part in traffic),
        sum(part.num_runs for part in traffic),
        sum(part.num_segments for part in traffic),
        sum(part.num_source_blocks for part in traffic) - num_cut,
    )


def _traffic_between(source: Interleave, target: Interleave, start: int, stop: int) -> dict[ShardPair, _Traffic]:
    """The traffic of each pair (source shard, target shard) that has any, from whole periods and what is left."""
    period = lcm(source.virtual_block_tokens, target.virtual_block_tokens)
    first_end = min(stop, -(-start // period) * period)
    num_periods, rest = divmod(stop - first_end, period)
    counts = _count_pairs(source, target, start, first_end)
    if num_periods:
        counts = counts + num_periods * _count_pairs(source, target, 0, period)
    counts = counts + _count_pairs(source, target, 0, rest)
    shape = (source.num_shards, target.num_shards)
    return {
        (int(pair[0]), int(pair[1])): _Traffic(*counts[:, pair[0], pair[1]].tolist())
        for pair in np.argwhere(counts[0].reshape(shape))
    }


def _count_pairs(source: Interleave, target: Interleave, start: int, stop: int) -> IntArray:
    """int64 [4, source shards, target shards]: the fields of `_Traffic` for start .. stop-1, inside one period."""
    shape = (source.num_shards, target.num_shards)
    if start >= stop:
        return np.zeros((4, *shape), dtype=np.int64)
    cuts = [np.arange(start - start % step, stop, step) for step in {source.run_tokens, target.run_tokens}]
    positions = np.unique(np.maximum(np.concatenate(cuts), start)).astype(np.int64)
    source_shards, *source_ends = source.locate(positions)
    target_shards, *target_ends = target.locate(positions)
    pairs = np.ravel_multi_index((source_shards, target_shards), shape)
    order = np.argsort(pairs, kind="stable")
    pairs, sizes = pairs[order], np.diff(positions, append=stop)[order]
    source_block, source_slot, target_block, target_slot = (column[order] for column in (*source_ends, *target_ends))
    ends = _Ends(source_block, source_slot, target_block, target_slot, sizes)
    new_pair = np.diff(pairs, prepend=-1) != 0
    parts = np.ones_like(new_pair), new_pair | ends.new_segment(), new_pair | ends.new_source_block()
    tokens = np.bincount(pairs, weights=sizes, minlength=shape[0] * shape[1]).astype(np.int64)
    counts = [np.bincount(pairs[part], minlength=len(tokens)) for part in parts]
    return np.stack([tokens, *counts]).reshape(4, *shape)


class _Ends(NamedTuple):
    """Where ascending runs lie at both ends; int64 arrays of one size."""

    source_block: IntArray
    source_slot: IntArray
    target_block: IntArray
    target_slot: IntArray
    num_tokens: IntArray

    def new_source_block(self) -> BoolArray:
        """Which runs are in another source block than the one before; the first has none before."""
        return np.diff(self.source_block, prepend=self.source_block[:1]).astype(np.bool_)

    def new_segment(self) -> BoolArray:
        """Which runs do not go on, at both ends, where the one before stops; the first has none before."""
        new = self.new_source_block()
        new[1:] |= self.target_block[:-1] != self.target_block[1:]
        for slot in (self.source_slot, self.target_slot):
            new[1:] |= slot[:-1] + self.num_tokens[:-1] != slot[1:]
        return new


def _volume(source: Placement, target: Placement, start: int, stop: int, received: list[list[_Received]]) -> Volume:
    """`received` is indexed by target rank."""
    interleave = target.interleave
    first_block = start // interleave.virtual_block_tokens
    num_listed = interleave.num_virtual_blocks(stop) - first_block if start < stop else 0
    local = [_local(interleave, shard, start, stop) for shard in range(interleave.num_shards)]
    ranks = []
    for rank, (holding, parts) in enumerate(zip(target.holdings, received, strict=True)):
        num_tokens, num_real = local[holding.shard]
        num_source_tokens = source.interleave.block_tokens
        ranks.append(
            RankVolume(
                rank=rank,
                num_listed_blocks=num_listed,
                num_real_blocks=num_real,
                num_tokens=num_tokens,
                num_runs=sum(part.traffic.num_runs for part in parts),
                num_entries=num_tokens * holding.heads.size * holding.layers.size,
                num_messages=sum(part.num_messages for part in parts),
                num_segments=sum(part.traffic.num_segments * part.num_tiles for part in parts),
                num_source_blocks=sum(part.traffic.num_source_blocks for part in parts),
                num_whole_block_entries=sum(
                    part.traffic.num_source_blocks * num_source_tokens * part.num_tiles for part in parts
                ),
            )
        )
    return Volume(tuple(ranks))


def _local(interleave: Interleave, shard: int, start: int, stop: int) -> tuple[int, int]:
    """(tokens, blocks with at least one of them) that a shard stores of the positions start .. stop-1."""
    first, end = interleave.num_local_tokens(start, shard), interleave.num_local_tokens(stop, shard)
    if first == end:
        return 0, 0
    return end - first, interleave.num_local_blocks(stop, shard) - first // interleave.block_tokens
