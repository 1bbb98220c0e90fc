"""Slow, obvious versions of the arithmetic: deal tokens one by one, expand plans entry by entry."""

from __future__ import annotations

from collections.abc import Iterator

from layouts import Holding, Interleave, Placement, TransferPlan

Entry = tuple[int, int, int, int]
"""(target rank, position, head, layer)"""

Ends = tuple[tuple[int, int], tuple[int, int]]
"""((source block, source slot), (target block, target slot))"""


def deal(interleave: Interleave, num_tokens: int) -> list[tuple[int, int, int]]:
    """(shard, block, slot) of each position, by dealing tokens to shards that fill their blocks."""
    dealt = [0] * interleave.num_shards
    places = []
    for position in range(num_tokens):
        shard = position // interleave.run_tokens % interleave.num_shards
        places.append(
            (shard, dealt[shard] // interleave.block_tokens, dealt[shard] % interleave.block_tokens)
        )
        dealt[shard] += 1
    return places


def entries_of(holding: Holding) -> Iterator[tuple[int, int]]:
    """(head, layer) pairs of a rank."""
    for layer in range(*holding.layers):
        for head in range(*holding.heads):
            yield head, layer


def needed(source: Placement, target: Placement, start: int, stop: int) -> dict[Entry, Ends]:
    """Everything the target ranks need, with the places it has at both ends."""
    at_source, at_target = deal(source.interleave, stop), deal(target.interleave, stop)
    return {
        (rank, position, head, layer): (at_source[position][1:], at_target[position][1:])
        for rank, holding in enumerate(target.holdings)
        for position in range(start, stop)
        if at_target[position][0] == holding.shard
        for head, layer in entries_of(holding)
    }


def moved(plan: TransferPlan) -> dict[Entry, Ends]:
    """Everything a plan moves; asserts that nothing moves twice and that givers have what they give."""
    at_source = deal(plan.source.interleave, plan.stop)
    entries: dict[Entry, Ends] = {}
    for route in plan.routes:
        giver = plan.source.holdings[route.source_rank]
        given = set(entries_of(giver))
        for position, num_tokens, source_block, source_slot, target_block, target_slot in route.runs.tolist():
            for token in range(num_tokens):
                assert at_source[position + token][0] == giver.shard
                ends = (source_block, source_slot + token), (target_block, target_slot + token)
                for head, layer in entries_of(Holding(giver.shard, route.heads, route.layers)):
                    entry = (route.target_rank, position + token, head, layer)
                    assert entry not in entries and (head, layer) in given
                    entries[entry] = ends
    return entries


def num_runs(source: Interleave, target: Interleave, start: int, stop: int) -> int:
    """The least number of runs: a token joins its predecessor's if it follows in the block at both ends."""
    at_source, at_target = deal(source, stop), deal(target, stop)
    continued = sum(
        _follows(at_source[position - 1], at_source[position])
        and _follows(at_target[position - 1], at_target[position])
        for position in range(start + 1, stop)
    )
    return stop - start - continued


def _follows(before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    return before[:2] == after[:2] and before[2] + 1 == after[2]


def assert_spread(plan: TransferPlan) -> None:
    """No replica gives more than one reader's share above another one."""
    given = [0] * plan.source.num_ranks
    largest: dict[Holding, int] = {}
    for route in plan.routes:
        share = route.num_tokens * route.heads.size * route.layers.size
        holding = plan.source.holdings[route.source_rank]
        given[route.source_rank] += share
        largest[holding] = max(share, largest.get(holding, 0))
    for holding, share in largest.items():
        of_replicas = [given[rank] for rank, other in enumerate(plan.source.holdings) if other == holding]
        assert max(of_replicas) - min(of_replicas) <= share
