"""Which source rank gives which tokens, heads and layers to which target rank.

Pure and deterministic, so both ends of a transfer can compute the same plan. Matches by absolute position
only; knows block table indices and slots, never physical block ids, addresses, bytes or transports.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layouts.errors import PlanError, config_error
from layouts.interleave import Interleave
from layouts.parallel import ParallelLayout, Placement
from layouts.proof import pieces_of, prove_apart, prove_ranks, prove_runs, shards_of
from layouts.routes import Route, choose_routes
from layouts.runs import Runs, ShardPair, runs_by_shards


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Everything that moves positions start .. stop-1 from one placement to another.

    `routes` are ordered by (target rank, source rank), with at most one for each pair of ranks; ranks without a
    route have nothing to give or to read. A plan proves itself on construction, see `check`.
    """

    source: Placement
    target: Placement
    start: int
    stop: int
    routes: tuple[Route, ...]
    salt: int = 0

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
        share no position, and from different holdings of one shard no (head, layer); those from replicas of
        one holding have positions that do not meet. What is disjoint and has the right total covers everything.
        At last, the routes are those that both ends choose. Costs a few passes over the distinct arrays of runs.

        Raises:
            PlanError: the first thing that does not hold.
        """
        if not 0 <= self.start <= self.stop:
            raise PlanError(f"positions {self.start} .. {self.stop} are not a range")
        for route in self.routes:
            prove_ranks(route, self.source, self.target)
        self._check_totals(prove_runs(self.routes, self.source, self.target, self.start, self.stop))
        prove_apart(self._pieces())
        chosen = choose_routes(self.source, self.target, self.runs_by_shards(), self.salt)
        if [route.terms for route in self.routes] != [route.terms for route in chosen]:
            raise PlanError("the routes are not those that the other end chooses among replicas, or out of order")

    def runs_by_shards(self) -> dict[ShardPair, Runs]:
        """All runs of each pair (source shard, target shard) that has any, ascending; read-only arrays."""
        runs: dict[ShardPair, Runs] = {}
        for routes in self._pieces():
            pair = shards_of(routes[0], self.source, self.target)
            if pair not in runs:
                parts = [route.runs for route in routes]
                runs[pair] = parts[0] if len(parts) == 1 else np.concatenate(parts)
                runs[pair].setflags(write=False)
        return runs

    def _check_totals(self, num_tokens: dict[int, int]) -> None:
        filled = [0] * self.target.num_ranks
        for route in self.routes:
            filled[route.target_rank] += num_tokens[id(route.runs)] * route.heads.size * route.layers.size
        for rank, (holding, tokens) in enumerate(zip(self.target.holdings, self.num_tokens_to, strict=True)):
            needed = tokens * holding.heads.size * holding.layers.size
            if filled[rank] != needed:
                raise PlanError(f"target rank {rank} gets {filled[rank]} of {needed} (token, head, layer) entries")

    def _pieces(self) -> list[list[Route]]:
        """The routes to one target rank from replicas of one source holding, in order of position."""
        return pieces_of(self.routes, lambda route: (route.target_rank, self.source.holdings[route.source_rank]))


def plan_transfer(
    source: ParallelLayout | Placement,
    target: ParallelLayout | Placement,
    start: int,
    stop: int,
    salt: int = 0,
) -> TransferPlan:
    """Plans the transfer of the positions start .. stop-1.

    Args:
        source, target: the layouts, or the tables taken from a handshake.
        start: first position the target lacks; any, also inside a source block.
        stop: number of tokens of the request that the source has.
        salt: which replica begins; any integer that both ends know. One request is spread alike whatever it
            is, but prompts of a block or two would all read the same replica: requests that are numbered
            through, or have random salts, spread over all.

    Of replicas (source ranks with equal holdings) each gives the same number of bytes to within a block, a
    target rank's range being split between them at block borders where needed; `choose_routes` has the rule, and
    what it promises over many requests. Every target replica reads its own copy; `share_replicas` has the other way.

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
    runs = runs_by_shards(source.interleave, target.interleave, start, stop)
    return TransferPlan(source, target, start, stop, choose_routes(source, target, runs, salt), salt)


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


def _num_tokens_between(interleave: Interleave, shard: int, start: int, stop: int) -> int:
    return interleave.num_local_tokens(stop, shard) - interleave.num_local_tokens(start, shard)
