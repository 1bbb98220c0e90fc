"""The runs between two interleaves: pieces of a request that are contiguous at both ends.

Knows positions, shards, blocks and slots of the two sides; nothing of ranks, heads or layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np
import numpy.typing as npt

from layouts.interleave import IntArray, Interleave

RUN_FIELDS = ("position", "num_tokens", "source_block", "source_slot", "target_block", "target_slot")
RUN_DTYPE = np.dtype([(name, np.int64) for name in RUN_FIELDS])
"""One run: `num_tokens` consecutive positions that lie in consecutive slots of one block at both ends.

Blocks are indices into the request's block table on that side.
"""

Runs = npt.NDArray[np.void]
ShardPair = tuple[int, int]
"""(source shard, target shard)"""


def runs_by_shards(source: Interleave, target: Interleave, start: int, stop: int) -> dict[ShardPair, Runs]:
    """The runs of positions start .. stop-1 for each pair of shards that has any, ascending; read-only arrays.

    Both layouts repeat after a common multiple of their virtual blocks: other blocks, the same shards and
    slots. So one such period is computed, beginning with the whole run that `start` is in, and repeated.
    """
    if start == stop:
        return {}
    first = max(start - start % source.run_tokens, start - start % target.run_tokens)
    growth = growth_per_period(source, target)
    period = int(growth[0])
    num_periods = -(-(stop - first) // period)
    patterns = list(_runs_of_one_period(source, target, first, min(first + period, stop)))
    memory = np.empty(num_periods * sum(len(pattern) for _, pattern in patterns), dtype=RUN_DTYPE)
    runs, used = {}, 0
    for pair, pattern in patterns:
        repeated = memory[used : used + num_periods * len(pattern)]
        used += len(repeated)
        _repeat(pattern, growth, repeated)
        repeated = _trim(repeated, start, stop)
        repeated.setflags(write=False)
        if len(repeated):
            runs[pair] = repeated
    return runs


def growth_per_period(source: Interleave, target: Interleave) -> IntArray:
    """int64 [6]: by how much each field of a run grows until both layouts repeat."""
    period = lcm(source.virtual_block_tokens, target.virtual_block_tokens)
    blocks = period // source.virtual_block_tokens, period // target.virtual_block_tokens
    return np.array([period, 0, blocks[0], 0, blocks[1], 0], dtype=np.int64)


def block_borders(runs: Runs) -> tuple[IntArray, IntArray]:
    """Where ascending runs may be cut so that no block is cut at either end: (run indices, tokens before each).

    Both ends of the runs count as borders. Between two neighbors lies part of one block of each side.
    """
    new_block = (np.diff(runs["source_block"]) != 0) | (np.diff(runs["target_block"]) != 0)
    indices = np.concatenate(([0], np.flatnonzero(new_block) + 1, [len(runs)]))
    tokens_before = np.concatenate(([0], np.cumsum(runs["num_tokens"])))
    return indices, tokens_before[indices]


def _runs_of_one_period(
    source: Interleave, target: Interleave, first: int, end: int
) -> Iterator[tuple[ShardPair, Runs]]:
    """The runs of positions first .. end-1 by pair of shards."""
    positions = _cuts(first, end, source.run_tokens, target.run_tokens)
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


def _cuts(first: int, end: int, *sizes: int) -> IntArray:
    """The multiples of any size in first .. end-1; `first` is one of them."""
    small, large = sorted(sizes)
    cuts = np.arange(-(-first // small) * small, end, small, dtype=np.int64)
    if large % small:
        others = np.arange(-(-first // large) * large, end, large, dtype=np.int64)
        cuts = np.union1d(cuts, others)
    return cuts


def _repeat(pattern: Runs, growth: IntArray, repeated: Runs) -> None:
    """Fills `repeated` with the runs of all periods; `growth` is by how much each field grows from one to the next."""
    num_periods = len(repeated) // len(pattern)
    table = repeated.view(np.int64).reshape(num_periods, -1)
    table[0] = pattern.view(np.int64)
    grown = np.broadcast_to(growth, (len(pattern), len(growth))).reshape(-1)
    done = 1
    while done < num_periods:  # doubles what is done, so that each run is written once
        more = min(done, num_periods - done)
        np.add(table[:more], done * grown, out=table[done : done + more])
        done += more


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
