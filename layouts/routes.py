"""Which source rank gives what to which target rank: heads and layers by table, replicas by an even spread.

Knows holdings and runs; never looks at how a run was found. Deterministic, so that both ends choose alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    @property
    def num_entries(self) -> int:
        """(token, head, layer) entries moved."""
        return self.num_tokens * self.heads.size * self.layers.size

    @property
    def terms(self) -> tuple[object, ...]:
        """What tells apart routes of runs that are known to be right."""
        first = int(self.runs["position"][0])
        return self.source_rank, self.target_rank, self.heads, self.layers, first, len(self.runs)


class Need(NamedTuple):
    """What one target rank needs from the ranks with one source holding."""

    giver: Holding
    target_rank: int
    heads: Span
    layers: Span
    runs: Runs
    num_tokens: int

    @property
    def token_entries(self) -> int:
        """(head, layer) entries of one token."""
        return self.heads.size * self.layers.size

    def part(self, first: int, last: int) -> Need:
        """The runs number first .. last-1 of it."""
        if first == 0 and last == len(self.runs):
            return self
        runs = self.runs[first:last]
        return self._replace(runs=runs, num_tokens=int(runs["num_tokens"].sum()))

    def route(self, source_rank: int) -> Route:
        """All of it from one replica."""
        return Route(source_rank, self.target_rank, self.heads, self.layers, self.runs)


def choose_routes(source: Placement, target: Placement, runs: Mapping[ShardPair, Runs], salt: int) -> tuple[Route, ...]:
    """At most one route for each pair of ranks, in order of (target rank, source rank).

    Each target rank needs from every distinct source holding what both have. Where several source ranks
    have that holding, the needs of all readers are laid end to end in order of target rank, and cut into
    one part for each replica, as equal as block borders allow: see `_even_cuts`. The replicas take the parts in
    order of rank, beginning with number `salt` modulo their number.

    Over many equal requests with salts that count up, m requests give each of k replicas m parts in a row. So all
    have given the same after k requests, and meanwhile are at most k // 2 blocks apart: two such rows differ in at
    most min(m, k - m) pairs of parts, each by at most a block. Requests of whole blocks, cut at rounded even places,
    stay within one block. Requests that are not equal add up to a block each; no rule that knows one request alone
    can do better for all mixtures, as who should take a larger part depends on what came before.
    """
    return deal(source, needs_of(source, target, runs), smaller_block(source, target), salt)


def needs_of(source: Placement, target: Placement, runs: Mapping[ShardPair, Runs]) -> list[Need]:
    """What each target rank needs from each distinct source holding, in order of target rank."""
    num_tokens = {pair: int(piece["num_tokens"].sum()) for pair, piece in runs.items()}
    givers, needs = list(replicas(source)), []
    for target_rank, need in enumerate(target.holdings):
        for giver in givers:
            pair = (giver.shard, need.shard)
            if pair not in runs:
                continue
            heads, layers = giver.heads.intersect(need.heads), giver.layers.intersect(need.layers)
            if heads.size > 0 and layers.size > 0:
                needs.append(Need(giver, target_rank, heads, layers, runs[pair], num_tokens[pair]))
    return needs


def deal(source: Placement, needs: Iterable[Need], block_tokens: int, salt: int) -> tuple[Route, ...]:
    """Spreads the needs from each holding over the source ranks that have it; routes as `choose_routes` has them."""
    needs_from: dict[Holding, list[Need]] = defaultdict(list)
    for need in needs:
        needs_from[need.giver].append(need)
    routes: list[Route] = []
    for giver, ranks in replicas(source).items():
        routes.extend(part.route(rank) for rank, part in spread(needs_from[giver], ranks, block_tokens, salt))
    return tuple(sorted(routes, key=lambda route: (route.target_rank, route.source_rank)))


def spread(needs: Sequence[Need], ranks: Sequence[int], block_tokens: int, salt: int) -> Iterator[tuple[int, Need]]:
    """The needs laid end to end and cut into equal parts, one for each rank: (rank, part of a need) pairs.

    Rank number `salt` modulo their number begins.
    """
    if not needs:
        return
    turn = salt % len(ranks)
    cuts = _even_cuts(needs, len(ranks), block_tokens) if len(ranks) > 1 else []
    borders = pairwise([_Cut(0, 0, 0), *cuts, _Cut(0, len(needs), 0)])
    for rank, (begin, end) in zip([*ranks[turn:], *ranks[:turn]], borders, strict=True):
        for index in range(begin.need, min(end.need + 1, len(needs))):
            first = begin.run if index == begin.need else 0
            last = end.run if index == end.need else len(needs[index].runs)
            if first < last:
                yield rank, needs[index].part(first, last)


def replicas(placement: Placement) -> dict[Holding, list[int]]:
    """The distinct holdings, each with the ranks that have it in ascending order."""
    ranks_of: dict[Holding, list[int]] = defaultdict(list)
    for rank, holding in enumerate(placement.holdings):
        ranks_of[holding].append(rank)
    return ranks_of


def smaller_block(source: Placement, target: Placement) -> int:
    """Tokens of the smaller block: what equal shares may differ by."""
    return min(source.interleave.block_tokens, target.interleave.block_tokens)


class _Cut(NamedTuple):
    """A place in needs laid end to end: `entries` (token, head, layer) entries lie before it."""

    entries: int
    need: int
    run: int


def _even_cuts(needs: Sequence[Need], num_parts: int, block_tokens: int) -> list[_Cut]:
    """Where to cut needs laid end to end so that the largest part exceeds the smallest by a block at most.

    Readers stay whole, an equal number for each part, if that is even enough. Otherwise each cut goes to the end
    of a need less than half a block from its even place, which saves a route, or else to the nearest block border; no
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

    def __init__(self, needs: Sequence[Need]) -> None:
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
        """The end of the need at a place if less than half a block away, else the nearest border, the later of two."""
        index = bisect_right(self._ends, even)
        if even == self._start(index):
            return self.start_of(index)
        block_entries = block_tokens * self._needs[index].token_entries

        def distance(border: _Cut) -> tuple[bool, int, int]:
            away = abs(border.entries - even)
            return border.run > 0 or 2 * away >= block_entries, away, -border.entries

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
