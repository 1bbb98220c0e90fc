"""The slow, obvious version of the arithmetic, which plans are compared with.

Tokens are dealt to shards one by one, plans are unrolled token by token. Shares no formula with the rest of the
package: from it come only the types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from layouts.interleave import IntArray, Interleave
from layouts.parallel import Holding, Placement
from layouts.plan import TransferPlan
from layouts.routes import Route
from layouts.sharing import SharedPlan

EMPTY = -1
"""The content of a cache slot that nothing was written to."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each position of a request is: int64 arrays of one size."""

    shard: IntArray
    block: IntArray
    slot: IntArray


@lru_cache(maxsize=1024)
def deal(interleave: Interleave, num_tokens: int) -> Places:
    """Deals tokens to shards, I at a time with more than one shard; each shard fills its blocks in order."""
    dealt = [0] * interleave.num_shards
    places = []
    shard, turn = 0, 0
    for _ in range(num_tokens):
        places.append((shard, *divmod(dealt[shard], interleave.block_tokens)))
        dealt[shard] += 1
        turn += 1
        if turn == interleave.interleave_tokens:
            shard, turn = (shard + 1) % interleave.num_shards, 0
    columns = np.array(places, dtype=np.int64).reshape(-1, 3).T
    return Places(*columns)


def find_fault(plan: TransferPlan) -> str | None:
    """What is wrong with a plan, in words: entries moved wrongly, twice, not at all, in too many runs or unevenly."""
    for route in plan.routes:
        if fault := _fault_of_route(plan, route):
            return f"source rank {route.source_rank} to target rank {route.target_rank}: {fault}"
    for rank in range(plan.target.num_ranks):
        if fault := _fault_of_reader(plan, rank):
            return f"target rank {rank}: {fault}"
    return _fault_of_readers(plan) or _fault_of_spread(plan)


def fill(placement: Placement, start: int, stop: int) -> list[IntArray]:
    """The caches of all ranks, each [blocks, slots, heads, layers], with positions start .. stop-1 in place.

    An entry has a number that tells its position, head and layer; everything else is EMPTY.
    """
    places = deal(placement.interleave, stop)
    caches = empty_caches(placement, stop)
    for cache, holding in zip(caches, placement.holdings, strict=True):
        mine = np.flatnonzero(places.shard[start:] == holding.shard) + start
        heads, layers = np.arange(*holding.heads), np.arange(*holding.layers)
        names = (mine[:, None, None] * placement.num_kv_heads + heads[:, None]) * placement.num_layers + layers
        cache[places.block[mine], places.slot[mine]] = names
    return caches


def execute(plan: TransferPlan, source: Sequence[IntArray]) -> list[IntArray]:
    """Does what a plan says: the caches of the target ranks after reading from those of the source ranks."""
    caches = empty_caches(plan.target, plan.stop)
    _copy(plan.routes, plan.source, source, plan.target, caches)
    return caches


def execute_shared(shared: SharedPlan, source: Sequence[IntArray]) -> tuple[list[IntArray], list[IntArray]]:
    """Does what a shared plan says: the caches of the target ranks after the reads alone, and after the exchanges.

    Exchanges take nothing that came by an exchange, so they may happen in any order.
    """
    plan = shared.plan
    read = empty_caches(plan.target, plan.stop)
    _copy(shared.reads, plan.source, source, plan.target, read)
    whole = [cache.copy() for cache in read]
    _copy(shared.exchanges, plan.target, read, plan.target, whole)
    return read, whole


def _copy(
    routes: Sequence[Route], givers: Placement, given: Sequence[IntArray], takers: Placement, taken: Sequence[IntArray]
) -> None:
    for route in routes:
        giver, taker = givers.holdings[route.source_rank], takers.holdings[route.target_rank]
        _, source_block, source_slot, target_block, target_slot = _unrolled(route)
        moved = given[route.source_rank][source_block, source_slot]
        written = taken[route.target_rank][target_block, target_slot]
        written[_part(route, taker)] = moved[_part(route, giver)]
        taken[route.target_rank][target_block, target_slot] = written


def empty_caches(placement: Placement, num_tokens: int) -> list[IntArray]:
    """A cache for each rank with all the blocks of a request, [blocks, slots, heads, layers]."""
    interleave = placement.interleave
    num_blocks = int(deal(interleave, num_tokens).block.max(initial=-1)) + 1
    return [
        np.full((num_blocks, interleave.block_tokens, held.heads.size, held.layers.size), EMPTY, dtype=np.int64)
        for held in placement.holdings
    ]


def moved_entries(plan: TransferPlan) -> IntArray:
    """int64 [entries, 9], sorted: target rank, head, layer, source shard, position, and both ends of each entry."""
    rows = [np.empty((0, 9), dtype=np.int64)]
    for route in plan.routes:
        tokens = np.stack(_unrolled(route), axis=1)
        for head, layer in _heads_and_layers(route):
            shard = plan.source.holdings[route.source_rank].shard
            label = np.tile(np.array([route.target_rank, head, layer, shard], dtype=np.int64), (len(tokens), 1))
            rows.append(np.concatenate((label, tokens), axis=1))
    table = np.concatenate(rows)
    entries: IntArray = table[np.lexsort(table.T[::-1])]
    return entries


def _heads_and_layers(route: Route) -> Iterator[tuple[int, int]]:
    for layer in range(*route.layers):
        for head in range(*route.heads):
            yield head, layer


def _part(route: Route, holding: Holding) -> tuple[slice, slice, slice]:
    """The route's heads and layers in a cache [tokens, heads, layers] of a holding."""
    heads, layers = holding.heads.start, holding.layers.start
    return (
        slice(None),
        slice(route.heads.start - heads, route.heads.stop - heads),
        slice(route.layers.start - layers, route.layers.stop - layers),
    )


def _unrolled(route: Route) -> tuple[IntArray, ...]:
    """(position, source block, source slot, target block, target slot) of each token of a route."""
    runs = route.runs
    num_tokens = runs["num_tokens"]
    run = np.repeat(np.arange(len(runs)), num_tokens)
    token = np.arange(len(run)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
    return (
        runs["position"][run] + token,
        runs["source_block"][run],
        runs["source_slot"][run] + token,
        runs["target_block"][run],
        runs["target_slot"][run] + token,
    )


def _fault_of_route(plan: TransferPlan, route: Route) -> str | None:
    """Both ranks must have the route's tokens, heads and layers, where it says."""
    position, *ends = _unrolled(route)
    if int(position.min()) < plan.start or int(position.max()) >= plan.stop:
        return f"moves positions {position.min()} .. {position.max()} outside {plan.start} .. {plan.stop - 1}"
    sides = (
        ("source", plan.source, route.source_rank, ends[:2]),
        ("target", plan.target, route.target_rank, ends[2:]),
    )
    for name, placement, rank, (block, slot) in sides:
        holding, places = placement.holdings[rank], deal(placement.interleave, plan.stop)
        if not set(_heads_and_layers(route)) <= set(
            _heads_and_layers(Route(rank, rank, holding.heads, holding.layers, route.runs))
        ):
            return f"heads {route.heads}, layers {route.layers} are not those of the {name}"
        right = (places.shard[position] == holding.shard) & (places.block[position] == block)
        wrong = np.flatnonzero(~(right & (places.slot[position] == slot)))
        if len(wrong):
            return f"position {position[wrong[0]]} is not in {name} block {block[wrong[0]]} slot {slot[wrong[0]]}"
    return None


def _fault_of_reader(plan: TransferPlan, rank: int) -> str | None:
    """The rank must get each entry it needs once, in as few runs as there are."""
    holding, places = plan.target.holdings[rank], deal(plan.target.interleave, plan.stop)
    times = np.zeros((plan.stop, plan.target.num_kv_heads, plan.target.num_layers), dtype=np.int64)
    needed = np.zeros_like(times)
    mine = np.flatnonzero(places.shard[plan.start :] == holding.shard) + plan.start
    needed[mine, slice(*holding.heads), slice(*holding.layers)] = 1
    num_runs: dict[Holding, int] = {}
    for route in plan.routes_to(rank):
        count = np.bincount(_unrolled(route)[0], minlength=plan.stop)
        times[:, slice(*route.heads), slice(*route.layers)] += count[:, None, None]
        giver = plan.source.holdings[route.source_rank]
        num_runs[giver] = num_runs.get(giver, 0) + len(route.runs)
    wrong = np.argwhere(times != needed)
    if len(wrong):
        position, head, layer = wrong[0]
        return f"gets position {position}, head {head}, layer {layer} {times[tuple(wrong[0])]} times"
    for giver, number in num_runs.items():
        fewest = _fewest_runs(plan, giver.shard, holding.shard)
        if number != fewest:
            return f"reads {number} runs where {fewest} would do"
    return None


def _fewest_runs(plan: TransferPlan, source_shard: int, target_shard: int) -> int:
    """Pieces that are contiguous at both ends, of the positions of a pair of shards."""
    source, target = deal(plan.source.interleave, plan.stop), deal(plan.target.interleave, plan.stop)
    both = (source.shard == source_shard) & (target.shard == target_shard)
    position = np.flatnonzero(both[plan.start :]) + plan.start
    follows = np.diff(position) == 1
    for places in source, target:
        follows &= (np.diff(places.block[position]) == 0) & (np.diff(places.slot[position]) == 1)
    return len(position) - int(follows.sum())


def _fault_of_readers(plan: TransferPlan) -> str | None:
    """The counts that both ends act on."""
    places = deal(plan.target.interleave, plan.stop)
    counts = np.bincount(places.shard[plan.start :], minlength=plan.target.interleave.num_shards)
    tokens = tuple(int(counts[holding.shard]) for holding in plan.target.holdings)
    if plan.num_tokens_to != tokens:
        return f"num_tokens_to is {plan.num_tokens_to}, should be {tokens}"
    readers = tuple(rank for rank, number in enumerate(tokens) if number)
    if plan.readers != readers:
        return f"readers are {plan.readers}, should be {readers}"
    pairs = {(route.source_rank, route.target_rank) for route in plan.routes}
    of_source = tuple(sum(source == rank for source, _ in pairs) for rank in range(plan.source.num_ranks))
    if plan.num_readers_of != of_source:
        return f"num_readers_of is {plan.num_readers_of}, should be {of_source}"
    return None


def _fault_of_spread(plan: TransferPlan) -> str | None:
    """Replicas must give the same amount to within a block, of the smaller size, of one reader."""
    given = given_entries(plan)
    largest: dict[Holding, int] = {}
    for route in plan.routes:
        holding = plan.source.holdings[route.source_rank]
        largest[holding] = max(largest.get(holding, 0), route.heads.size * route.layers.size)
    block_tokens = min(plan.source.interleave.block_tokens, plan.target.interleave.block_tokens)
    for holding, token_entries in largest.items():
        of_replicas = [given[rank] for rank, other in enumerate(plan.source.holdings) if other == holding]
        if max(of_replicas) - min(of_replicas) > block_tokens * token_entries:
            return f"replicas give from {min(of_replicas)} to {max(of_replicas)} entries"
    return None


def given_entries(plan: TransferPlan) -> npt.NDArray[np.int64]:
    """int64 [source ranks]: (token, head, layer) entries that each gives."""
    given = np.zeros(plan.source.num_ranks, dtype=np.int64)
    for route in plan.routes:
        given[route.source_rank] += int(route.runs["num_tokens"].sum()) * route.heads.size * route.layers.size
    return given
