"""Which source rank gives what to which target rank: heads and layers by table, replicas by an even spread.

Knows holdings and runs; never looks at how a run was found. Deterministic, so that both ends choose alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from layouts.interleave import IntArray
from layouts.parallel import Holding, Placement, Span
from layouts.runs import Runs, ShardPair, block_borders


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


def choose_routes(source: Placement, target: Placement, runs: Mapping[ShardPair, Runs], salt: int) -> tuple[Route, ...]:
    """At most one route for each pair of ranks, in order of (target rank, source rank).

    Each target rank needs from every distinct source holding what both have. Where several source ranks
    have that holding, the needs of all readers are laid end to end in order of target rank, and cut into
    one part for each replica, as equal as block borders allow: see `_even_cuts`. The replicas take the parts in
    order of rank, beginning with number `salt` modulo their number.
    """
    block_tokens = min(source.interleave.block_tokens, target.interleave.block_tokens)
    num_tokens = {pair: int(piece["num_tokens"].sum()) for pair, piece in runs.items()}
    routes: list[Route] = []
    for holding, ranks in _replicas(source).items():
        needs = list(_needs_from(holding, target, runs, num_tokens))
        if needs:
            first = salt % len(ranks)
            routes.extend(_deal(needs, ranks[first:] + ranks[:first], block_tokens))
    return tuple(sorted(routes, key=lambda route: (route.target_rank, route.source_rank)))


def _replicas(placement: Placement) -> dict[Holding, list[int]]:
    """The distinct holdings, each with the ranks that have it in ascending order."""
    replicas: dict[Holding, list[int]] = defaultdict(list)
    for rank, holding in enumerate(placement.holdings):
        replicas[holding].append(rank)
    return replicas


class _Need(NamedTuple):
    """What one target rank needs from one source holding."""

    target_rank: int
    heads: Span
    layers: Span
    runs: Runs
    num_tokens: int

    @property
    def token_entries(self) -> int:
        """(head, layer) entries of one token."""
        return self.heads.size * self.layers.size

    def route(self, source_rank: int, first: int, last: int) -> Route:
        """The runs number first .. last-1 from one replica."""
        whole = first == 0 and last == len(self.runs)
        runs = self.runs if whole else self.runs[first:last]
        return Route(source_rank, self.target_rank, self.heads, self.layers, runs)


def _needs_from(
    holding: Holding, target: Placement, runs: Mapping[ShardPair, Runs], num_tokens: Mapping[ShardPair, int]
) -> Iterator[_Need]:
    for target_rank, need in enumerate(target.holdings):
        pair = (holding.shard, need.shard)
        if pair not in runs:
            continue
        heads, layers = holding.heads.intersect(need.heads), holding.layers.intersect(need.layers)
        if heads.size > 0 and layers.size > 0:
            yield _Need(target_rank, heads, layers, runs[pair], num_tokens[pair])


def _deal(needs: list[_Need], ranks: Sequence[int], block_tokens: int) -> Iterator[Route]:
    """Gives each rank its part of the needs laid end to end."""
    cuts = _even_cuts(needs, len(ranks), block_tokens) if len(ranks) > 1 else []
    for rank, (begin, end) in zip(ranks, pairwise([_Cut(0, 0, 0), *cuts, _Cut(0, len(needs), 0)]), strict=True):
        for index in range(begin.need, min(end.need + 1, len(needs))):
            first = begin.run if index == begin.need else 0
            last = end.run if index == end.need else len(needs[index].runs)
            if first < last:
                yield needs[index].route(rank, first, last)


class _Cut(NamedTuple):
    """A place in needs laid end to end: `entries` (token, head, layer) entries lie before it."""

    entries: int
    need: int
    run: int


def _even_cuts(needs: Sequence[_Need], num_parts: int, block_tokens: int) -> list[_Cut]:
    """Where to cut needs laid end to end so that the largest part exceeds the smallest by a block at most.

    Readers stay whole, an equal number for each part, if that is even enough. Otherwise each cut goes to the end
    of a need within half a block of its even place, which saves a route, or else to the nearest block border; no
    part is then more than a block away from an equal share. If two parts differ by more than a block all the same,
    cuts move to borders nearby.
    """
    line = _Line(needs)
    evens = [part * line.num_entries // num_parts for part in range(1, num_parts)]
    block_entries = block_tokens * max(need.token_entries for need in needs)

    def is_even(cuts: Sequence[_Cut]) -> bool:
        sizes = _sizes([[cut] for cut in cuts], line.num_entries)
        return max(sizes) - min(sizes) <= block_entries

    whole = [line.start_of(-(-part * len(needs) // num_parts)) for part in range(1, num_parts)]
    if is_even(whole):
        return whole
    nearest = [line.nearest(even, block_tokens) for even in evens]
    if is_even(nearest):
        return nearest
    return _levelled([line.borders_near(even) for even in evens], line.num_entries, block_entries) or nearest


class _Line:
    """Needs laid end to end, with the places where they may be cut."""

    def __init__(self, needs: Sequence[_Need]) -> None:
        self._needs = needs
        self._ends = list(accumulate(need.num_tokens * need.token_entries for need in needs))
        self._borders: dict[int, tuple[IntArray, IntArray]] = {}

    @property
    def num_entries(self) -> int:
        return self._ends[-1]

    def start_of(self, index: int) -> _Cut:
        """Before a need, or behind the last one."""
        return _Cut(self._start(index), index, 0)

    def nearest(self, even: int, block_tokens: int) -> _Cut:
        """The end of the need at a place if it is within half a block, else the nearest border, the later of two."""
        index = bisect_right(self._ends, even)
        if even == self._start(index):
            return self.start_of(index)
        block_entries = block_tokens * self._needs[index].token_entries

        def distance(border: _Cut) -> tuple[bool, int, int]:
            away = abs(border.entries - even)
            return border.run > 0 or 2 * away > block_entries, away, -border.entries

        return min(self._borders_in(index, even), key=distance)

    def borders_near(self, even: int) -> list[_Cut]:
        """The last two borders up to a place, and the next two."""
        at = bisect_right(self._ends, even)
        near = range(max(0, at - 2), min(at + 3, len(self._needs)))
        borders = sorted({border for index in near for border in self._borders_in(index, even)})
        after = bisect_right(borders, even, key=lambda border: border.entries)
        return borders[max(0, after - 2) : after + 2]

    def _borders_in(self, index: int, even: int) -> list[_Cut]:
        """Of the borders of one need, the two on either side of a place, which may lie outside."""
        need, start = self._needs[index], self._start(index)
        runs, tokens_before = self._borders_of(need.runs)
        after = int(np.searchsorted(tokens_before, (even - start) // need.token_entries, side="right"))
        near = slice(max(0, after - 2), after + 2)
        return [
            _Cut(start + tokens * need.token_entries, *((index, run) if run < len(need.runs) else (index + 1, 0)))
            for run, tokens in zip(runs[near].tolist(), tokens_before[near].tolist(), strict=True)
        ]

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _borders_of(self, runs: Runs) -> tuple[IntArray, IntArray]:
        if id(runs) not in self._borders:
            self._borders[id(runs)] = block_borders(runs)
        return self._borders[id(runs)]


def _levelled(choices: Sequence[Sequence[_Cut]], total: int, block_entries: int) -> list[_Cut]:
    """Cuts, one of each choice, whose parts are equal to within a block; none if there are no such."""
    smallest = sorted(
        (size for size in set(_sizes(choices, total)) if size * (len(choices) + 1) <= total), reverse=True
    )
    paths = (_path(choices, total, least, least + block_entries) for least in smallest)
    return next((path for path in paths if path), [])


def _sizes(choices: Sequence[Sequence[_Cut]], total: int) -> list[int]:
    """How many entries any part can have."""
    borders = pairwise([[_Cut(0, 0, 0)], *choices, [_Cut(total, 0, 0)]])
    return [end.entries - begin.entries for begins, ends in borders for begin in begins for end in ends]


def _path(choices: Sequence[Sequence[_Cut]], total: int, least: int, most: int) -> list[_Cut]:
    """Cuts, one of each choice, between which there are `least` to `most` entries; none if there are no such."""
    paths: dict[int, list[_Cut]] = {0: []}
    for borders in choices:
        paths = {
            border.entries: [*path, border]
            for border in borders
            for before, path in paths.items()
            if least <= border.entries - before <= most
        }
    return next((path for before, path in paths.items() if least <= total - before <= most), [])
