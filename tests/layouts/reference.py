"""What a plan moves, entry by entry, for tests that count; `layouts.reference` has the laws."""

from __future__ import annotations

from collections.abc import Iterator

from layouts import Holding, Interleave, TransferPlan

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
        places.append((shard, dealt[shard] // interleave.block_tokens, dealt[shard] % interleave.block_tokens))
        dealt[shard] += 1
    return places


def entries_of(holding: Holding) -> Iterator[tuple[int, int]]:
    """(head, layer) pairs of a rank."""
    for layer in range(*holding.layers):
        for head in range(*holding.heads):
            yield head, layer


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
