"""Which source rank gives which tokens, heads and layers to which target rank.

Pure and deterministic, so both ends of a transfer can compute the same plan. Matches by absolute position
only; knows block table indices and slots, never physical block ids, addresses, bytes or transports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from layouts.check import PlanError, config_error
from layouts.interleave import Interleave
from layouts.parallel import Holding, ParallelLayout, Placement, Span

RUN_FIELDS = ("position", "num_tokens", "source_block", "source_slot", "target_block", "target_slot")
RUN_DTYPE = np.dtype([(name, np.int64) for name in RUN_FIELDS])
"""One run: `num_tokens` consecutive positions that lie in consecutive slots of one block at both ends.

Blocks are indices into the request's block table on that side.
"""

Runs = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What one source rank gives to one target rank: all `runs`, for all `heads`, in all `layers`.

    `runs` is a read-only array of RUN_DTYPE in ascending order of position, shared between routes that
    move the same tokens.
    """

    source_rank: int
    target_rank: int
    heads: Span
    layers: Span
    runs: Runs

    @property
    def num_tokens(self) -> int:
        """Tokens moved, each for all heads and layers."""
        return int(self.runs["num_tokens"].sum())


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Everything that moves positions start .. stop-1 from one placement to another.

    `routes` are ordered by (target rank, source rank); ranks without a route have nothing to give or to read.
    A plan proves itself on construction, see `check`.
    """

    source: Placement
    target: Placement
    start: int
    stop: int
    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        self.check()

    def routes_to(self, target_rank: int) -> tuple[Route, ...]:
        """What a target rank reads."""
        return tuple(route for route in self.routes if route.target_rank == target_rank)

    def routes_from(self, source_rank: int) -> tuple[Route, ...]:
        """What a source rank gives."""
        return tuple(route for route in self.routes if route.source_rank == source_rank)

    @property
    def readers(self) -> tuple[int, ...]:
        """Target ranks that read at least one run, ascending."""
        return tuple(sorted({route.target_rank for route in self.routes}))

    @property
    def num_readers_of(self) -> tuple[int, ...]:
        """Per source rank, how many target ranks read from it; 0 for those that must still be released."""
        counts = [0] * self.source.num_ranks
        for route in self.routes:
            counts[route.source_rank] += 1
        return tuple(counts)

    @property
    def num_tokens_to(self) -> tuple[int, ...]:
        """Per target rank, how many of the positions its shard stores; 0 for those that need nothing."""
        per_shard = [
            _num_tokens_between(self.target.interleave, shard, self.start, self.stop)
            for shard in range(self.target.interleave.num_shards)
        ]
        return tuple(per_shard[holding.shard] for holding in self.target.holdings)

    def check(self) -> None:
        """Proves that every target rank gets each (position, head, layer) it needs exactly once.

        Each route stays inside both holdings, its runs are in bounds, ascending and disjoint, and both
        interleaves place them where the runs say. So routes to one rank from different source shards
        share no position, and from different holdings of one shard no (head, layer); one holding serves a
        rank once. What is disjoint and has the right total covers everything. Costs a few passes over the
        distinct arrays of runs.

        Raises:
            PlanError: the first thing that does not hold.
        """
        for route in self.routes:
            _check_ranks(route, self.source, self.target)
        num_tokens = self._check_runs()
        filled = [0] * self.target.num_ranks
        served: set[tuple[int, Holding]] = set()
        for route in self.routes:
            source = self.source.holdings[route.source_rank]
            _require((route.target_rank, source) not in served, "a second copy", route)
            served.add((route.target_rank, source))
            filled[route.target_rank] += num_tokens[id(route.runs)] * route.heads.size * route.layers.size
        for rank, (holding, tokens) in enumerate(zip(self.target.holdings, self.num_tokens_to, strict=True)):
            needed = tokens * holding.heads.size * holding.layers.size
            if filled[rank] != needed:
                raise PlanError(
                    f"target rank {rank} gets {filled[rank]} of {needed} (token, head, layer) entries"
                )

    def _check_runs(self) -> dict[int, int]:
        """Checks each array of runs for its pair of shards; gives the number of tokens by the array's id."""
        num_tokens: dict[int, int] = {}
        checked: set[tuple[int, int, int]] = set()
        for route in self.routes:
            source_shard = self.source.holdings[route.source_rank].shard
            target_shard = self.target.holdings[route.target_rank].shard
            key = (id(route.runs), source_shard, target_shard)
            if key not in checked:
                checked.add(key)
                _check_order(route, self.start, self.stop)
                _check_end(route, "source", self.source.interleave, source_shard)
                _check_end(route, "target", self.target.interleave, target_shard)
                num_tokens[id(route.runs)] = route.num_tokens
        return num_tokens


def plan_transfer(
    source: ParallelLayout | Placement, target: ParallelLayout | Placement, start: int, stop: int
) -> TransferPlan:
    """Plans the transfer of the positions start .. stop-1.

    Args:
        source, target: the layouts, or the tables taken from a handshake.
        start: first position the target lacks; any, also inside a source block.
        stop: number of tokens of the request that the source has.

    Of replicas (source ranks with equal holdings) each target rank reads one: readers come in order of
    rank, and each takes the replica that has the least to give so far, the lowest rank on ties. Readers
    of equal amounts therefore go round the replicas in turn, and no replica gives more than one reader's
    share above another. Every target replica reads its own copy.

    Raises:
        ConfigError: KV heads or layers differ, or not 0 <= start <= stop.
    """
    source, target = _placement_of(source), _placement_of(target)
    _require_same_cache(source, target)
    if not 0 <= start <= stop:
        raise config_error(
            "start, stop",
            got=f"{start}, {stop}",
            allowed="0 <= start <= stop",
            remedy="Pass the number of tokens the target has, then the number the source has.",
        )
    runs = _runs_by_shards(source.interleave, target.interleave, start, stop)
    return TransferPlan(source, target, start, stop, _choose_routes(source, target, runs))


def _placement_of(layout: ParallelLayout | Placement) -> Placement:
    return layout.placement if isinstance(layout, ParallelLayout) else layout


def _require_same_cache(source: Placement, target: Placement) -> None:
    for name in ("num_kv_heads", "num_layers"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise config_error(
                name,
                got=f"{ours} at the source, {theirs} at the target",
                allowed="equal numbers",
                remedy="Serve the same model on both sides.",
            )


def _runs_by_shards(
    source: Interleave, target: Interleave, start: int, stop: int
) -> dict[tuple[int, int], Runs]:
    """The runs of each (source shard, target shard) that has any, ascending by position.

    Both layouts repeat after a common multiple of their virtual blocks: other blocks, the same shards and
    slots. So one such period is computed, beginning with the whole run that `start` is in, and repeated.
    """
    if start == stop:
        return {}
    first = max(start - start % source.run_tokens, start - start % target.run_tokens)
    period = lcm(source.virtual_block_tokens, target.virtual_block_tokens)
    num_periods = -(-(stop - first) // period)
    step = (period, period // source.virtual_block_tokens, period // target.virtual_block_tokens)
    runs = {}
    for pair, pattern in _runs_of_one_period(source, target, first, min(first + period, stop)):
        repeated = _trim(_repeat(pattern, num_periods, step), start, stop)
        repeated.setflags(write=False)
        if len(repeated):
            runs[pair] = repeated
    return runs


def _runs_of_one_period(
    source: Interleave, target: Interleave, first: int, end: int
) -> Iterator[tuple[tuple[int, int], Runs]]:
    """The runs of positions first .. end-1 by (source shard, target shard)."""
    cuts = [
        np.arange(first - first % tokens, end, tokens, dtype=np.int64)
        for tokens in {source.run_tokens, target.run_tokens}
    ]
    positions = np.unique(np.concatenate(cuts))
    positions = positions[positions >= first]
    source_shards, source_blocks, source_slots = source.locate(positions)
    target_shards, target_blocks, target_slots = target.locate(positions)
    pairs = source_shards * target.num_shards + target_shards
    columns = np.diff(positions, append=end), source_blocks, source_slots, target_blocks, target_slots
    order = np.argsort(pairs, kind="stable")
    runs = np.empty(len(positions), dtype=RUN_DTYPE)
    for name, column in zip(RUN_FIELDS, (positions, *columns), strict=True):
        runs[name] = column[order]
    pairs = pairs[order]
    firsts = np.flatnonzero(np.diff(pairs, prepend=-1))
    for pair, piece in zip(pairs[firsts].tolist(), np.split(runs, firsts[1:]), strict=True):
        yield divmod(pair, target.num_shards), piece


def _repeat(pattern: Runs, num_periods: int, step: tuple[int, int, int]) -> Runs:
    """The runs of all periods; `step` is by how much position, source block and target block grow in each."""
    runs = np.empty((num_periods, len(pattern)), dtype=RUN_DTYPE)
    runs[:] = pattern
    periods = np.arange(num_periods, dtype=np.int64)[:, None]
    for name, growth in zip(("position", "source_block", "target_block"), step, strict=True):
        runs[name] += periods * growth
    return runs.reshape(-1)


def _trim(runs: Runs, start: int, stop: int) -> Runs:
    """Ascending runs cut to the positions start .. stop-1; only the first can begin before `start`."""
    runs = runs[: np.searchsorted(runs["position"], stop)]
    if len(runs):
        early = max(0, start - int(runs["position"][0]))
        for name in ("position", "source_slot", "target_slot"):
            runs[name][0] += early
        runs["num_tokens"][0] -= early
        runs["num_tokens"][-1] = min(runs["num_tokens"][-1], stop - runs["position"][-1])
    return runs


def _choose_routes(
    source: Placement, target: Placement, runs: dict[tuple[int, int], Runs]
) -> tuple[Route, ...]:
    """One route per target rank and source holding it needs part of; `plan_transfer` states the choice."""
    num_tokens = {pair: int(piece["num_tokens"].sum()) for pair, piece in runs.items()}
    replicas = _replicas_by_shard(source)
    given = [0] * source.num_ranks
    routes = []
    for target_rank, need in enumerate(target.holdings):
        for source_shard in range(source.interleave.num_shards):
            pair = (source_shard, need.shard)
            if pair not in runs:
                continue
            for holding, ranks in replicas[source_shard].items():
                heads, layers = holding.heads.intersect(need.heads), holding.layers.intersect(need.layers)
                if heads.size > 0 and layers.size > 0:
                    source_rank = min(ranks, key=given.__getitem__)
                    given[source_rank] += num_tokens[pair] * heads.size * layers.size
                    routes.append(Route(source_rank, target_rank, heads, layers, runs[pair]))
    return tuple(sorted(routes, key=lambda route: (route.target_rank, route.source_rank)))


def _replicas_by_shard(placement: Placement) -> dict[int, dict[Holding, list[int]]]:
    """For each shard the distinct holdings, each with the ranks that have it in ascending order."""
    replicas: dict[int, dict[Holding, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, holding in enumerate(placement.holdings):
        replicas[holding.shard][holding].append(rank)
    return replicas


def _num_tokens_between(interleave: Interleave, shard: int, start: int, stop: int) -> int:
    return interleave.num_local_tokens(stop, shard) - interleave.num_local_tokens(start, shard)


def _check_ranks(route: Route, source: Placement, target: Placement) -> None:
    """Both ranks exist, and both hold all heads and layers of the route, which are some."""
    known = 0 <= route.source_rank < source.num_ranks and 0 <= route.target_rank < target.num_ranks
    _require(known, "no such rank", route)
    for holding in source.holdings[route.source_rank], target.holdings[route.target_rank]:
        _require(route.heads.size > 0 and holding.heads.covers(route.heads), "heads", route)
        _require(route.layers.size > 0 and holding.layers.covers(route.layers), "layers", route)


def _check_order(route: Route, start: int, stop: int) -> None:
    """Runs have tokens, ascend without overlap and stay inside start .. stop-1."""
    first, ends = route.runs["position"], route.runs["position"] + route.runs["num_tokens"]
    _require(len(first) > 0 and bool((ends > first).all()), "an empty run", route)
    _require(bool(first[0] >= start and ends[-1] <= stop), "positions", route)
    _require(bool((ends[:-1] <= first[1:]).all()), "overlapping runs", route)


def _check_end(route: Route, end: str, interleave: Interleave, shard: int) -> None:
    """Each run stays inside one block, whose first and last slot of the run hold its first and last position.

    Between two slots of a block there are as many slots as tokens in the run, so those between are right too.
    """
    runs = route.runs
    position, block, slot = runs["position"], runs[f"{end}_block"], runs[f"{end}_slot"]
    more = runs["num_tokens"] - 1
    _require(bool(slot.min() >= 0 and (slot + more).max() < interleave.block_tokens), f"{end} slots", route)
    for offset in (np.zeros_like(more), more) if more.any() else (more,):
        stored = interleave.position(shard, block, slot + offset)
        _require(bool((stored == position + offset).all()), f"{end} positions", route)


def _require(holds: bool, thing: str, route: Route) -> None:
    if not holds:
        raise PlanError(
            f"route from source rank {route.source_rank} to target rank {route.target_rank}: {thing}; "
            f"heads {route.heads}, layers {route.layers}, {len(route.runs)} runs"
        )
