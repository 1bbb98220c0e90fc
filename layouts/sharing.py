"""Target ranks that hold the same: each byte read once from the source node, the rest exchanged inside the target node.

A second way to carry out a transfer plan, which reads less between the nodes and copies more inside one. Like the
plan, it is pure, deterministic and proves itself; it knows no link, no speed and no bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from layouts.errors import PlanError
from layouts.interleave import IntArray
from layouts.parallel import Placement, Span
from layouts.plan import TransferPlan
from layouts.proof import pieces_of, prove_apart, prove_ranks, prove_runs, require
from layouts.routes import Need, Route, deal, needs_of, replicas, smaller_block, spread
from layouts.runs import RUN_DTYPE, Runs

_Ranks = TypeVar("_Ranks", int, tuple[int, int])
_Parts = dict[tuple[Span, Span], list[Runs]]
"""By (heads, layers): the arrays of runs moved."""

_Spans = tuple[bytes, bytes]
"""Firsts and stops of spans of positions without gaps."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """What `plan` moves, with each distinct target holding read once.

    `reads` are routes from source ranks to target ranks, ordered and unique as those of a plan. `exchanges` are routes
    from target ranks to target ranks with the same holding, so their `source_rank` is a target rank too, and both
    ends of a run are equal. They are ordered by (taker, giver, heads, layers), and may begin once the giver's reads
    have ended. A shared plan proves itself on construction, see `check`.
    """

    plan: TransferPlan
    reads: tuple[Route, ...]
    exchanges: tuple[Route, ...]

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_read_entries(self) -> int:
        """(token, head, layer) entries that cross from the source node to the target node."""
        return sum(route.num_entries for route in self.reads)

    @property
    def num_exchanged_entries(self) -> int:
        """Entries that target ranks give each other."""
        return sum(route.num_entries for route in self.exchanges)

    def check(self) -> None:
        """Proves that every target rank gets each (position, head, layer) it needs exactly once.

        Reads lie where both interleaves say; all ranks with one target holding together get its entries, each once,
        for the reasons that `TransferPlan.check` gives. Each of these ranks gives every other one exactly the
        positions, heads and layers it has read, so that all are complete, and nothing is given that was not read.
        At last, reads and exchanges are those that both ends choose.

        Raises:
            PlanError: the first thing that does not hold.
        """
        source, target = self.plan.source, self.plan.target
        for read in self.reads:
            prove_ranks(read, source, target)
        prove_runs(self.reads, source, target, self.plan.start, self.plan.stop)
        self._check_totals()
        prove_apart(
            pieces_of(self.reads, lambda read: (target.holdings[read.target_rank], source.holdings[read.source_rank]))
        )
        for exchange in self.exchanges:
            prove_ranks(exchange, target, target)
            giver, taker = (target.holdings[rank] for rank in (exchange.source_rank, exchange.target_rank))
            require(giver == taker and exchange.source_rank != exchange.target_rank, "no replicas", exchange)
        prove_runs(self.exchanges, target, target, self.plan.start, self.plan.stop)
        self._check_exchanges()
        self._check_choice()

    def _check_totals(self) -> None:
        read = dict.fromkeys(self.plan.target.holdings, 0)
        for route in self.reads:
            read[self.plan.target.holdings[route.target_rank]] += route.num_entries
        for holding, tokens in zip(self.plan.target.holdings, self.plan.num_tokens_to, strict=True):
            needed = tokens * holding.heads.size * holding.layers.size
            if read[holding] != needed:
                raise PlanError(f"target ranks with {holding} read {read[holding]} of {needed} entries")

    def _check_exchanges(self) -> None:
        """Each replica gives each other one what it has read itself, no more and no less."""
        read = _by_ranks(self.reads, lambda route: route.target_rank)
        given = _by_ranks(self.exchanges, lambda route: (route.source_rank, route.target_rank))
        spans: dict[tuple[int, ...], _Spans] = {}
        for ranks in replicas(self.plan.target).values():
            for giver, taker in permutations(ranks, 2):
                own, arrived = (_spans_of(parts, spans) for parts in (read[giver], given[giver, taker]))
                if own != arrived:
                    raise PlanError(f"target rank {giver} does not give rank {taker} exactly what it has read")

    def _check_choice(self) -> None:
        reads = _choose_reads(self.plan)
        exchanges = _exchanges_after(reads, self.plan.target)
        for ours, chosen in ((self.reads, reads), (self.exchanges, exchanges)):
            if [route.terms for route in ours] != [route.terms for route in chosen]:
                raise PlanError("the routes are not those that the other end chooses among replicas, or out of order")


def share_replicas(plan: TransferPlan) -> SharedPlan:
    """Reads each distinct target holding once, and completes its replicas from each other.

    What ranks with one holding need is laid end to end in order of source holding, and cut into one part for each, as
    equal as block borders allow (see `choose_routes`); rank number `salt` modulo their number begins. The parts are
    then spread over the replicas at the source as any needs are. So all links between the nodes work, and carry what is
    needed once; inside the target node each of k replicas gives its part to the k - 1 others. Without replicas
    at the target the reads are the routes of the plan.
    """
    reads = _choose_reads(plan)
    return SharedPlan(plan, reads, _exchanges_after(reads, plan.target))


def _choose_reads(plan: TransferPlan) -> tuple[Route, ...]:
    block_tokens = smaller_block(plan.source, plan.target)
    needs_to: dict[int, list[Need]] = defaultdict(list)
    for need in needs_of(plan.source, plan.target, plan.runs_by_shards()):
        needs_to[need.target_rank].append(need)
    parts = [
        part._replace(target_rank=rank)
        for ranks in replicas(plan.target).values()
        for rank, part in spread(needs_to[ranks[0]], ranks, block_tokens, plan.salt)
    ]
    return deal(plan.source, sorted(parts, key=lambda part: part.target_rank), block_tokens, plan.salt)


def _exchanges_after(reads: Sequence[Route], target: Placement) -> tuple[Route, ...]:
    """What replicas give each other after they have read."""
    read = _by_ranks(reads, lambda route: route.target_rank)
    exchanges = []
    for ranks in replicas(target).values():
        for giver in ranks if len(ranks) > 1 else ():
            for (heads, layers), parts in read[giver].items():
                runs = _stored(parts)
                exchanges += [Route(giver, taker, heads, layers, runs) for taker in ranks if taker != giver]
    return tuple(sorted(exchanges, key=lambda route: (route.target_rank, route.source_rank, route.heads, route.layers)))


def _by_ranks(routes: Iterable[Route], ranks: Callable[[Route], _Ranks]) -> dict[_Ranks, _Parts]:
    """The arrays of runs by ranks, then by (heads, layers)."""
    runs: dict[_Ranks, _Parts] = defaultdict(lambda: defaultdict(list))
    for route in routes:
        runs[ranks(route)][route.heads, route.layers].append(route.runs)
    return runs


def _stored(parts: Iterable[Runs]) -> Runs:
    """The fewest runs in which a target rank stores what it has read in parts; both ends of a run are the target's."""
    runs = np.concatenate(list(parts))
    runs = runs[np.argsort(runs["position"])]
    follows = _follows(runs["position"], runs["num_tokens"]) & _follows(runs["target_slot"], runs["num_tokens"])
    first = np.flatnonzero(~(follows & (np.diff(runs["target_block"], prepend=-1) == 0)))
    stored = np.empty(len(first), dtype=RUN_DTYPE)
    stored["position"] = runs["position"][first]
    stored["num_tokens"] = np.add.reduceat(runs["num_tokens"], first)
    for end in ("source", "target"):
        stored[f"{end}_block"], stored[f"{end}_slot"] = runs["target_block"][first], runs["target_slot"][first]
    stored.setflags(write=False)
    return stored


def _follows(start: IntArray, num_tokens: IntArray) -> npt.NDArray[np.bool_]:
    """Which pieces begin where the one before ends; the first has none before."""
    follows = np.zeros(len(start), dtype=np.bool_)
    follows[1:] = start[:-1] + num_tokens[:-1] == start[1:]
    return follows


def _spans_of(parts: _Parts, known: dict[tuple[int, ...], _Spans]) -> dict[tuple[Span, Span], _Spans]:
    """Which positions are moved, by (heads, layers); `known` are those of arrays looked at before, by their ids."""
    for arrays in parts.values():
        ids = tuple(map(id, arrays))
        if ids not in known:
            known[ids] = _joined_spans(arrays)
    return {part: known[tuple(map(id, arrays))] for part, arrays in parts.items()}


def _joined_spans(arrays: Sequence[Runs]) -> _Spans:
    runs = np.concatenate(arrays)
    runs = runs[np.argsort(runs["position"])]
    first = np.flatnonzero(~_follows(runs["position"], runs["num_tokens"]))
    last = np.append(first[1:] - 1, -1)
    stops = runs["position"][last] + runs["num_tokens"][last]
    return runs["position"][first].tobytes(), stops.tobytes()
