"""Proves single routes of a plan: their ranks, heads, layers, and the places of their runs.

Knows what a route claims and what the two interleaves say; takes nothing over from how the plan was made.
"""

from __future__ import annotations

import numpy as np

from layouts.errors import PlanError
from layouts.interleave import IntArray, Interleave
from layouts.parallel import Placement
from layouts.routes import Route
from layouts.runs import Runs, ShardPair, growth_per_period


def prove_ranks(route: Route, source: Placement, target: Placement) -> None:
    """Both ranks exist, and both hold all heads and layers of the route, which are some."""
    known = 0 <= route.source_rank < source.num_ranks and 0 <= route.target_rank < target.num_ranks
    require(known, "no such rank", route)
    for holding in source.holdings[route.source_rank], target.holdings[route.target_rank]:
        require(route.heads.size > 0 and holding.heads.covers(route.heads), "heads", route)
        require(route.layers.size > 0 and holding.layers.covers(route.layers), "layers", route)


def prove_runs(route: Route, source: Interleave, target: Interleave, shards: ShardPair, start: int, stop: int) -> None:
    """Runs ascend without overlap inside start .. stop-1, and lie where both interleaves say.

    Both interleaves place a period later what they place now, in later blocks. So runs that repeat what came
    one period before are right if those are; only the others are looked at one by one.
    """
    require(len(route.runs) > 0, "an empty run", route)
    require(int(route.runs["position"][0]) >= start and stop_of(route) <= stop, "positions", route)
    for runs in _not_repeated(route.runs, growth_per_period(source, target)):
        _prove_order(runs, route)
        _prove_end(runs, "source", source, shards[0], route)
        _prove_end(runs, "target", target, shards[1], route)


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
    if not (np.diff(table, axis=0) == np.tile(growth, per_period)).all():
        return [runs]
    return [runs[: per_period + 2], runs[end - 1 :]]


def _prove_order(runs: Runs, route: Route) -> None:
    position, num_tokens = runs["position"], runs["num_tokens"]
    require(int(num_tokens.min()) > 0, "an empty run", route)
    require(bool((position[:-1] + num_tokens[:-1] <= position[1:]).all()), "overlapping runs", route)


def _prove_end(runs: Runs, end: str, interleave: Interleave, shard: int, route: Route) -> None:
    """Each run stays inside one block, whose first and last slot of the run hold its first and last position.

    Between two slots of a block there are as many slots as tokens in the run, so those between are right too.
    """
    position, block, slot = runs["position"], runs[f"{end}_block"], runs[f"{end}_slot"]
    more = runs["num_tokens"] - 1
    inside = int(slot.min()) >= 0 and int((slot + more).max()) < interleave.block_tokens
    require(inside, f"{end} slots", route)
    for offset in (np.zeros_like(more), more) if more.any() else (more,):
        stored = interleave.position(shard, block, slot + offset)
        require(bool((stored == position + offset).all()), f"{end} positions", route)
