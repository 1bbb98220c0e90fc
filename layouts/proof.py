"""Proves single routes of a plan: their ranks, heads, layers, and the places of their runs.

Knows what a route claims and what the two interleaves say; takes nothing over from how the plan was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from layouts.errors import PlanError
from layouts.interleave import IntArray, Interleave
from layouts.parallel import Placement
from layouts.routes import Route
from layouts.runs import RUN_FIELDS, Runs, ShardPair, growth_per_period


def prove_ranks(route: Route, source: Placement, target: Placement) -> None:
    """Both ranks exist, and both hold all heads and layers of the route, which are some."""
    known = 0 <= route.source_rank < source.num_ranks and 0 <= route.target_rank < target.num_ranks
    require(known, "no such rank", route)
    for holding in source.holdings[route.source_rank], target.holdings[route.target_rank]:
        require(route.heads.size > 0 and holding.heads.covers(route.heads), "heads", route)
        require(route.layers.size > 0 and holding.layers.covers(route.layers), "layers", route)


def prove_runs(routes: Iterable[Route], source: Placement, target: Placement, start: int, stop: int) -> dict[int, int]:
    """Runs ascend without overlap inside start .. stop-1, and lie where both interleaves say.

    Both interleaves place a period later what they place now, in later blocks. So runs that repeat what came
    one period before are right if those are; only the others are looked at one by one, of all routes at once.

    Returns:
        The number of tokens of each distinct array of runs, by its id.
    """
    distinct = {(id(route.runs), shards_of(route, source, target)): route for route in routes}
    if not distinct:
        return {}
    growth = growth_per_period(source.interleave, target.interleave)
    owners, parts = [], []
    for owner, route in enumerate(distinct.values()):
        require(len(route.runs) > 0, "an empty run", route)
        require(int(route.runs["position"][0]) >= start and stop_of(route) <= stop, "positions", route)
        for part in _not_repeated(route.runs, growth):
            owners.append(owner)
            parts.append(part)
    unproven = _Unproven.of(list(distinct.values()), [shards for _, shards in distinct], owners, parts)
    unproven.prove_order()
    unproven.prove_end("source", source.interleave, 0)
    unproven.prove_end("target", target.interleave, 1)
    return {id(route.runs): route.num_tokens for route in distinct.values()}


def prove_apart(pieces: Iterable[Sequence[Route]]) -> None:
    """Routes of one piece share no position. Their runs are right, each piece is in order of position."""
    for routes in pieces:
        for before, after in pairwise(routes):
            require(stop_of(before) <= after.runs["position"][0], "a second copy", after)


def pieces_of(routes: Iterable[Route], key: Callable[[Route], Hashable]) -> list[list[Route]]:
    """The routes that have the same key, in order of position."""
    pieces: dict[Hashable, list[Route]] = defaultdict(list)
    for route in routes:
        pieces[key(route)].append(route)
    return [sorted(piece, key=lambda route: int(route.runs["position"][0])) for piece in pieces.values()]


def shards_of(route: Route, source: Placement, target: Placement) -> ShardPair:
    """The shards of the ranks of a route."""
    return source.holdings[route.source_rank].shard, target.holdings[route.target_rank].shard


def require(holds: bool, thing: str, route: Route) -> None:
    """Raises PlanError naming the route and the thing that does not hold."""
    if not holds:
        raise PlanError(
            f"route from source rank {route.source_rank} to target rank {route.target_rank}: {thing}; "
            f"heads {route.heads}, layers {route.layers}, {len(route.runs)} runs"
        )


def stop_of(route: Route) -> int:
    """The position behind the last one of a route that has runs."""
    return int(route.runs["position"][-1] + route.runs["num_tokens"][-1])


def _not_repeated(runs: Runs, growth: IntArray) -> list[Runs]:
    """The runs without those that repeat others one period later, which has been compared field by field.

    The first run may be cut by the start and the last by the stop. Each part begins with the last run before it
    and ends with the first behind it, so that what is proven of neighbors holds across the parts.
    """
    per_period = int(np.searchsorted(runs["position"], runs["position"][1 % len(runs)] + growth[0])) - 1
    num_periods = (len(runs) - 2) // max(per_period, 1)
    if per_period < 1 or num_periods < 2:
        return [runs]
    end = 1 + num_periods * per_period
    table = np.ascontiguousarray(runs[1:end]).view(np.int64).reshape(num_periods, -1)
    grown = np.broadcast_to(growth, (per_period, len(growth))).reshape(-1)
    if not (np.diff(table, axis=0) == grown).all():
        return [runs]
    return [runs[: per_period + 2], runs[end - 1 :]]


@dataclass(frozen=True, slots=True, eq=False)
class _Unproven:
    """Parts of the runs of several routes, end to end: a column per field; part, route and shards of each run."""

    routes: Sequence[Route]
    columns: Mapping[str, IntArray]
    part: IntArray
    owner: IntArray
    shards: IntArray

    @classmethod
    def of(
        cls, routes: Sequence[Route], shards: Sequence[ShardPair], owners: Sequence[int], parts: Sequence[Runs]
    ) -> _Unproven:
        table = np.concatenate(parts).view(np.int64).reshape(-1, len(RUN_FIELDS))
        part = np.repeat(np.arange(len(parts)), [len(runs) for runs in parts])
        owner = np.array(owners)[part]
        columns = dict(zip(RUN_FIELDS, np.ascontiguousarray(table.T), strict=True))
        return cls(routes, columns, part, owner, np.ascontiguousarray(np.array(shards, dtype=np.int64)[owner].T))

    def prove_order(self) -> None:
        position, num_tokens = self.columns["position"], self.columns["num_tokens"]
        self._require_all(num_tokens > 0, "an empty run")
        new_part = self.part[:-1] != self.part[1:]
        self._require_all(new_part | (position[:-1] + num_tokens[:-1] <= position[1:]), "overlapping runs")

    def prove_end(self, end: str, interleave: Interleave, side: int) -> None:
        """Each run stays inside one block, whose first and last slot of the run hold its first and last position.

        Between two slots of a block there are as many slots as tokens in the run, so those between are right too.
        """
        position, block, slot = (self.columns[name] for name in ("position", f"{end}_block", f"{end}_slot"))
        more = self.columns["num_tokens"] - 1
        self._require_all((slot >= 0) & (slot + more < interleave.block_tokens), f"{end} slots")
        for offset in (np.zeros_like(more), more) if more.any() else (more,):
            stored = interleave.position(self.shards[side], block, slot + offset)
            self._require_all(stored == position + offset, f"{end} positions")

    def _require_all(self, holds: npt.NDArray[np.bool_], thing: str) -> None:
        if not holds.all():
            require(False, thing, self.routes[self.owner[np.argmin(holds)]])
