"""From a route to byte segments: (source address, target address, length) as arrays, merged where possible.

Knows the strides of both ends and the block ids of one request; knows no sockets, agents or devices. All work
is on whole arrays: one pass per group of layers with equal strides, never Python per segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from layouts import ConfigError, Route, Span
from transport.regions import PLAIN, Region

Int64Array = npt.NDArray[np.int64]
BlockIds = npt.ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Pieces to copy: `length[i]` bytes from `source[i]` to `target[i]`; int64 arrays of one size."""

    source: Int64Array
    target: Int64Array
    length: Int64Array

    def __post_init__(self) -> None:
        shapes = [np.shape(array) for array in (self.source, self.target, self.length)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise ValueError(f"segments need three flat arrays of one size, got shapes {shapes}")
        if len(self) and int(self.length.min()) < 0:
            raise ValueError(f"segment lengths must not be negative, got {int(self.length.min())}")

    @classmethod
    def of(cls, source: npt.ArrayLike, target: npt.ArrayLike, length: npt.ArrayLike) -> Segments:
        """Build segments from anything array-like; the three broadcast against each other."""
        arrays = np.broadcast_arrays(*(np.asarray(part, np.int64) for part in (source, target, length)))
        return cls(*(np.ascontiguousarray(array).reshape(-1) for array in arrays))

    @classmethod
    def concatenate(cls, parts: list[Segments]) -> Segments:
        """Join the segments of several routes, in order; none give none."""
        empty = np.empty(0, np.int64)
        return cls(
            np.concatenate([empty, *(part.source for part in parts)]),
            np.concatenate([empty, *(part.target for part in parts)]),
            np.concatenate([empty, *(part.length for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """Bytes in all segments together."""
        return int(self.length.sum())

    def without_empty(self) -> Segments:
        """Return the segments that have any bytes."""
        kept = self.length > 0
        return self if kept.all() else Segments(self.source[kept], self.target[kept], self.length[kept])

    def merged(self) -> Segments:
        """Join segments that touch at both ends, whatever order they came in; drop empty ones.

        The result is ordered by target address. Targets must not overlap, as those of a plan never do.
        """
        whole = self.without_empty()
        if len(whole) < 2:
            return whole
        source, target, length = whole.source, whole.target, whole.length
        if (target[1:] < target[:-1]).any():
            order = np.argsort(target, kind="stable")
            source, target, length = source[order], target[order], length[order]
        touching = (source[:-1] + length[:-1] == source[1:]) & (target[:-1] + length[:-1] == target[1:])
        if not touching.any():
            return Segments(source, target, length)
        first = np.flatnonzero(np.concatenate(([True], ~touching)))
        return Segments(source[first], target[first], np.add.reduceat(length, first))


def lower_route(
    route: Route,
    source: Mapping[int, Region],
    source_block_ids: BlockIds,
    target: Mapping[int, Region],
    target_block_ids: BlockIds,
) -> Segments:
    """Return the merged segments of `route`; regions by global layer, block ids by index in the block table.

    ConfigError when a region or block is missing or out of range, or when the two ends cannot be copied byte
    for byte: different token bytes, different pages, or opaque pages that would have to be cut.
    """
    if len(route.runs) == 0:
        return Segments.of([], [], [])
    groups: dict[tuple[Region, Region], list[tuple[int, int]]] = {}
    for layer in range(route.layers.start, route.layers.stop):
        here, there = _region(source, layer, "source"), _region(target, layer, "target")
        shapes = replace(here, layer=0, base=0), replace(there, layer=0, base=0)
        groups.setdefault(shapes, []).append((here.base, there.base))
    parts = []
    for (here, there), bases in groups.items():
        offsets = _lower_layer(route, here, source_block_ids, there, target_block_ids)
        base = np.array(bases, np.int64).reshape(-1, 2)
        parts.append(Segments.of(base[:, :1] + offsets.source, base[:, 1:] + offsets.target, offsets.length))
    return Segments.concatenate(parts).merged()


def _region(regions: Mapping[int, Region], layer: int, end: str) -> Region:
    if layer not in regions:
        raise ConfigError(f"{end} has no cache region for layer {layer}; it has layers {sorted(regions)}")
    return regions[layer]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Token ranges, each within one page at both ends: flat page numbers and slots in the page."""

    source_page: Int64Array
    source_slot: Int64Array
    target_page: Int64Array
    target_slot: Int64Array
    num_tokens: Int64Array

    def __getitem__(self, index: Any) -> _Pieces:
        return _Pieces(
            self.source_page[index],
            self.source_slot[index],
            self.target_page[index],
            self.target_slot[index],
            self.num_tokens[index],
        )


def _lower_layer(
    route: Route, source: Region, source_block_ids: BlockIds, target: Region, target_block_ids: BlockIds
) -> Segments:
    """Lower one layer whose bases are 0, merged within the layer."""
    _check_formats(source, target)
    source_heads = _local_heads(route.heads, source, "source")
    target_heads = _local_heads(route.heads, target, "target")
    runs = route.runs if source.page == PLAIN else _whole_tiles(route.runs, source)
    pieces = _pieces(
        runs,
        source,
        _block_ids(source_block_ids, runs["source_block"], source, "source"),
        target,
        _block_ids(target_block_ids, runs["target_block"], target, "target"),
    )
    num_heads, unit = source_heads.stop - source_heads.start, source.token_bytes
    if num_heads == 1 or source.head_stride == target.head_stride == unit:
        num_heads, unit = 1, num_heads * unit  # all heads of a token in one piece
    if not source.token_stride == target.token_stride == unit:
        pieces = _single_tokens(pieces)
    heads = np.arange(num_heads, dtype=np.int64)[:, None]
    return Segments.of(
        _offsets(pieces.source_page, pieces.source_slot, heads + source_heads.start, source),
        _offsets(pieces.target_page, pieces.target_slot, heads + target_heads.start, target),
        pieces.num_tokens * unit,
    ).merged()


def _offsets(page: Int64Array, slot: Int64Array, head: Int64Array, region: Region) -> Int64Array:
    return page * region.page_stride + head * region.head_stride + slot * region.token_stride


def _check_formats(source: Region, target: Region) -> None:
    for name in ("token_bytes", "page"):
        here, there = getattr(source, name), getattr(target, name)
        if here != there:
            raise ConfigError(f"{name} is {here!r} at the source and {there!r} at the target; both must be equal")
    if source.page != PLAIN:
        for name in ("block_tokens", "page_tokens"):
            here, there = getattr(source, name), getattr(target, name)
            if here != there:
                raise ConfigError(
                    f"{name} is {here} at the source and {there} at the target; opaque pages "
                    f"({source.page!r}) need equal ones, or a backend with plain pages"
                )


def _local_heads(heads: Span, region: Region, end: str) -> Span:
    if not region.heads.start <= heads.start < heads.stop <= region.heads.stop:
        raise ConfigError(f"{end} holds heads {tuple(region.heads)} and cannot give or take heads {tuple(heads)}")
    return Span(heads.start - region.heads.start, heads.stop - region.heads.start)


def _block_ids(block_ids: BlockIds, indices: Int64Array, region: Region, end: str) -> Int64Array:
    """Translate indices into the block table to block ids, both checked."""
    table = np.asarray(block_ids, np.int64)
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(table):
        raise ConfigError(f"{end} block table has {len(table)} blocks, the route needs index {int(indices.max())}")
    ids = table[indices]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < region.num_blocks:
        raise ConfigError(
            f"{end} block ids reach from {int(ids.min())} to {int(ids.max())}, "
            f"its cache has blocks 0 to {region.num_blocks - 1}"
        )
    return ids


def _whole_tiles(runs: npt.NDArray[Any], region: Region) -> npt.NDArray[Any]:
    """Turn runs into one run of whole pages per block; ConfigError where a page would have to be cut.

    A block may be filled only up to some slot (the end of the sequence): what lies behind is moved, not read.
    """
    runs = runs[np.lexsort((runs["target_slot"], runs["target_block"]))]
    new_block = np.concatenate(([True], np.diff(runs["target_block"]) != 0))
    first = np.flatnonzero(new_block)
    follows = np.concatenate(([0], (runs["target_slot"] + runs["num_tokens"])[:-1]))
    same_source = np.concatenate(([True], np.diff(runs["source_block"]) == 0))
    fits = (
        (runs["source_slot"] == runs["target_slot"])
        & (runs["target_slot"] == np.where(new_block, 0, follows))
        & (new_block | same_source)
    )
    if not fits.all():
        bad = runs[np.flatnonzero(~fits)[0]]
        raise ConfigError(
            f"opaque page {region.page!r} would have to be cut: {bad['num_tokens']} tokens from slot "
            f"{bad['source_slot']} of source block {bad['source_block']} belong at slot {bad['target_slot']} "
            f"of target block {bad['target_block']}; use equal layouts on both sides, or plain pages"
        )
    tiles = runs[first]
    tokens = np.add.reduceat(runs["num_tokens"], first)
    tiles["num_tokens"] = -(-tokens // region.page_tokens) * region.page_tokens
    return tiles


def _pieces(
    runs: npt.NDArray[Any], source: Region, source_ids: Int64Array, target: Region, target_ids: Int64Array
) -> _Pieces:
    """Number pages through, and cut runs where a page ends at either end; runs must stay in their block."""
    for end, region in (("source", source), ("target", target)):
        ends = runs[f"{end}_slot"] + runs["num_tokens"]
        if int(ends.max()) > region.block_tokens or int(runs[f"{end}_slot"].min()) < 0:
            raise ConfigError(f"a run ends at slot {int(ends.max())} of a {end} block of {region.block_tokens} tokens")
    pieces = _Pieces(
        source_ids * source.pages_per_block,
        runs["source_slot"].astype(np.int64),
        target_ids * target.pages_per_block,
        runs["target_slot"].astype(np.int64),
        runs["num_tokens"].astype(np.int64),
    )
    if source.pages_per_block > 1:
        pieces = _cut(pieces, "source", source.page_tokens)
    if target.pages_per_block > 1:
        pieces = _cut(pieces, "target", target.page_tokens)
    return pieces


def _cut(pieces: _Pieces, end: str, page_tokens: int) -> _Pieces:
    """Cut pieces where a page of `end` ends, and carry their slots over into the page number."""
    slot = getattr(pieces, f"{end}_slot")
    first_page = slot // page_tokens
    counts = (slot + pieces.num_tokens - 1) // page_tokens - first_page + 1
    parents, part = _repeat(counts)
    pieces, slot = pieces[parents], slot[parents]
    page = first_page[parents] + part
    start = np.maximum(slot, page * page_tokens)
    stop = np.minimum(slot + pieces.num_tokens, (page + 1) * page_tokens)
    moved = replace(_advance(pieces, start - slot), num_tokens=stop - start)
    return replace(
        moved,
        **{f"{end}_page": getattr(moved, f"{end}_page") + page, f"{end}_slot": start - page * page_tokens},
    )


def _single_tokens(pieces: _Pieces) -> _Pieces:
    parents, token = _repeat(pieces.num_tokens)
    return replace(_advance(pieces[parents], token), num_tokens=np.ones_like(token))


def _advance(pieces: _Pieces, num_tokens: Int64Array) -> _Pieces:
    return replace(
        pieces,
        source_slot=pieces.source_slot + num_tokens,
        target_slot=pieces.target_slot + num_tokens,
    )


def _repeat(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, for item i repeated counts[i] times, the index of the item and the number of the repetition."""
    parents = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    starts = np.cumsum(counts) - counts
    return parents, np.arange(len(parents), dtype=np.int64) - starts[parents]
