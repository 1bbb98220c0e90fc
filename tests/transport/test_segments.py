"""Segments: lowering a plan moves exactly its bytes, in as few pieces as the memory allows."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import RUN_DTYPE, ConfigError, ParallelLayout, Route, Span, plan_transfer
from transport import Region, Segments, lower_route, region_of

ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


class Rank:
    """One rank's cache of all its layers as bytes, filled with what each (token, head, layer) should hold."""

    def __init__(self, layout: ParallelLayout, rank: int, order: str, num_blocks: int, page_tokens: int) -> None:
        self.layout = layout
        self.holding = layout.placement.holdings[rank]
        pages = layout.interleave.block_tokens // page_tokens
        heads, layers = self.holding.heads, self.holding.layers
        sizes = dict(zip("LBHNC", (layers.size, num_blocks * pages, heads.size, page_tokens, 8), strict=True))
        whole = torch.zeros([sizes[axis] for axis in order], dtype=torch.uint8)
        self.views = list(whole.permute([order.index(axis) for axis in "LBHNC"]))
        self.page_tokens = page_tokens
        self.regions = {
            layer: region_of(view, layer=layer, heads=heads, block_tokens=pages * page_tokens)
            for layer, view in zip(range(*layers), self.views, strict=True)
        }

    def tokens(self, position: int, table: list[int]) -> torch.Tensor:
        """Return what lies at one position of this rank's shard, [layers, heads, 8]."""
        page, slot = self.place(position, table)
        return torch.stack([view[page, :, slot] for view in self.views])

    def place(self, position: int, table: list[int]) -> tuple[int, int]:
        """Return (page, slot in the page) of a position."""
        _, index, slot = self.layout.interleave.locate(position)
        pages_per_block = self.layout.interleave.block_tokens // self.page_tokens
        return table[index] * pages_per_block + slot // self.page_tokens, slot % self.page_tokens

    def content(self, position: int) -> torch.Tensor:
        layers = torch.arange(*self.holding.layers)[:, None, None]
        heads = torch.arange(*self.holding.heads)[None, :, None]
        mixed = (position * 131 + layers * 31 + heads * 17 + torch.arange(8) * 7) % 251 + 1
        return mixed.to(torch.uint8)

    def owns(self, position: int) -> bool:
        return bool(self.layout.interleave.owner(position) == self.holding.shard)

    def fill(self, num_tokens: int, table: list[int]) -> None:
        for position in filter(self.owns, range(num_tokens)):
            page, slot = self.place(position, table)
            for view, values in zip(self.views, self.content(position), strict=True):
                view[page, :, slot] = values


def copy(segments: Segments) -> None:
    for source, target, length in zip(segments.source, segments.target, segments.length, strict=True):
        ctypes.memmove(int(target), int(source), int(length))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ParallelLayout, ParallelLayout]:
    def one(num_layers: int, num_kv_heads: int) -> ParallelLayout:
        tp, dcp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
        if num_kv_heads * dcp > tp:
            dcp = 1
        block = draw(st.sampled_from([4, 8]))
        interleave = draw(st.sampled_from([1, 2, block]))
        return ParallelLayout(
            tp=tp,
            dcp=dcp,
            pp=draw(st.sampled_from([1, 2])),
            num_kv_heads=num_kv_heads,
            interleave_tokens=interleave,
            block_tokens=block,
            num_layers=num_layers,
        )

    num_layers, heads = draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2, 4]))
    return one(num_layers, heads), one(num_layers, heads)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 40), st.sampled_from(ORDERS), st.sampled_from(ORDERS), st.data())
def test_lowered_plans_move_exactly_their_bytes(
    pair: tuple[ParallelLayout, ParallelLayout], num_tokens: int, order: str, other: str, data: st.DataObject
) -> None:
    source, target = pair
    span = target.interleave.num_shards * target.interleave.block_tokens
    start = data.draw(st.integers(0, (num_tokens - 1) // span)) * span
    num_blocks = 48
    tables = [data.draw(st.permutations(range(num_blocks))) for _ in range(2)]
    pages = [data.draw(st.sampled_from([2, layout.interleave.block_tokens])) for layout in pair]
    givers = [Rank(source, rank, order, num_blocks, pages[0]) for rank in range(source.num_ranks)]
    takers = [Rank(target, rank, other, num_blocks, pages[1]) for rank in range(target.num_ranks)]
    for giver in givers:
        giver.fill(num_tokens, tables[0])
    for route in plan_transfer(source, target, start, num_tokens).routes:
        giver, taker = givers[route.source_rank], takers[route.target_rank]
        segments = lower_route(route, giver.regions, tables[0], taker.regions, tables[1])
        tokens = int(route.runs["num_tokens"].sum())
        assert segments.num_bytes == tokens * route.heads.size * route.layers.size * 8
        assert len(segments) == len(segments.merged())
        copy(segments)
    for taker in takers:
        written = 0
        for position in filter(taker.owns, range(start, num_tokens)):
            assert torch.equal(taker.tokens(position, tables[1]), taker.content(position))
            written += taker.content(position).numel()
        assert sum(int((view != 0).sum()) for view in taker.views) == written


def make_route(runs: list[tuple[int, ...]], heads: int = 4, layers: int = 2) -> Route:
    return Route(0, 0, Span(0, heads), Span(0, layers), np.array(runs, RUN_DTYPE))


def make_regions(order: str, heads: int = 4, layers: int = 2, block: int = 16, **options: object) -> dict[int, Region]:
    """Regions of a cache with 64 blocks at address 0, 32 bytes a token and head."""
    sizes = dict(zip("LBHN", (layers, 64, heads, block), strict=True))
    stride, strides = 32, {}
    for axis in reversed(order[:-1]):
        strides[axis] = stride
        stride *= sizes[axis]
    shape = {"num_blocks": 64, "block_tokens": block, "token_bytes": 32, "page": "plain", "device": "cpu"}
    shape |= {"block_stride": strides["B"], "head_stride": strides["H"], "token_stride": strides["N"]}
    return {
        layer: Region(layer=layer, heads=Span(0, heads), base=layer * strides["L"], **(shape | options))
        for layer in range(layers)
    }


WHOLE = [(16 * n, 16, n, 0, n, 0) for n in range(8)]


@pytest.mark.parametrize(
    ("order", "source_ids", "target_ids", "count"),
    [
        ("LBHNC", range(8), range(8), 2),  # adjacent blocks: one piece per layer
        ("LBNHC", range(8), range(8), 2),
        ("LHBNC", range(8), range(8), 8),  # one per layer and head
        ("BLHNC", range(8), range(8), 1),  # all layers of all blocks at once
        ("BHLNC", range(8), range(8), 1),
        ("BLHNC", range(0, 16, 2), range(0, 16, 2), 8),  # all layers of a block
        ("LBHNC", range(0, 16, 2), range(0, 16, 2), 16),  # one per block and layer
        ("LBHNC", range(16, 8, -1), range(40, 32, -1), 2),  # both backwards, as a free list hands them out
        ("LBHNC", range(8), range(40, 32, -1), 16),  # one forwards, one backwards
        ("LBHNC", [5, 3, 9, 4, 6, 10, 11, 12], [15, 13, 19, 14, 16, 20, 21, 22], 4),  # any common order
    ],
)
def test_number_of_segments(order: str, source_ids: range, target_ids: range, count: int) -> None:
    regions = make_regions(order)
    segments = lower_route(make_route(WHOLE), regions, list(source_ids), regions, list(target_ids))
    assert len(segments) == count
    assert segments.num_bytes == 8 * 16 * 4 * 32 * 2


def test_different_orders_meet_per_token_and_head() -> None:
    ids, here, there = range(0, 16, 2), make_regions("LBHNC"), make_regions("LBNHC")
    segments = lower_route(make_route(WHOLE), here, ids, there, ids)
    assert set(segments.length.tolist()) == {32}


def test_a_partial_block_moves_only_its_tokens() -> None:
    regions = make_regions("LBHNC", heads=1, layers=1)
    route = make_route([(0, 16, 0, 0, 0, 0), (16, 5, 1, 0, 1, 0)], heads=1, layers=1)
    segments = lower_route(route, regions, [3, 4], regions, [7, 8])
    assert (segments.source.tolist(), segments.length.tolist()) == ([3 * 512], [21 * 32])


def test_one_head_of_a_wider_peer() -> None:
    source, target = make_regions("LBHNC"), make_regions("LBHNC", heads=1)
    target = {layer: _holding(region, Span(2, 3)) for layer, region in target.items()}
    route = Route(0, 0, Span(2, 3), Span(0, 2), np.array(WHOLE[:1], RUN_DTYPE))
    segments = lower_route(route, source, [1], target, [0])
    assert segments.source.tolist() == [(4 + 2) * 512, 64 * 2048 + (4 + 2) * 512]


def _holding(region: Region, heads: Span) -> Region:
    fields = {name: getattr(region, name) for name in Region.__slots__}
    return Region(**(fields | {"heads": heads}))


OPAQUE = {"page": "cpu_attn_vec"}


@pytest.mark.parametrize(
    ("source", "target", "runs", "says"),
    [
        ({}, {"token_bytes": 16}, WHOLE, "token_bytes"),
        (OPAQUE, {}, WHOLE, "page"),
        (OPAQUE, {"page": "cpu_attn_amx"}, WHOLE, "cpu_attn_amx"),
        (OPAQUE, OPAQUE, [(4, 12, 0, 4, 0, 4)], "cut"),
        (OPAQUE, OPAQUE, [(0, 8, 0, 0, 0, 0), (8, 8, 1, 0, 0, 8)], "cut"),
        (OPAQUE, OPAQUE, [(0, 8, 0, 8, 0, 0)], "cut"),
        (OPAQUE, OPAQUE, [(0, 4, 0, 0, 0, 0), (8, 4, 0, 8, 0, 8)], "cut"),
        ({}, {}, [(0, 17, 0, 0, 0, 0)], "ends at slot"),
        ({}, {}, [(0, 16, 8, 0, 0, 0)], "block table"),
        ({}, {"num_blocks": 3}, WHOLE, "block ids"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(
    source: dict[str, object], target: dict[str, object], runs: list[tuple[int, ...]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        lower_route(
            make_route(runs),
            make_regions("LBHNC", **source),
            range(8),
            make_regions("LBHNC", **target),
            range(8),
        )


def test_missing_layers_and_heads_are_refused() -> None:
    regions = make_regions("LBHNC")
    with pytest.raises(ConfigError, match="layer 2"):
        lower_route(make_route(WHOLE, layers=3), regions, range(8), regions, range(8))
    with pytest.raises(ConfigError, match="heads"):
        lower_route(make_route(WHOLE, heads=5), regions, range(8), regions, range(8))


def test_opaque_pages_of_different_block_size_are_refused() -> None:
    wide = make_regions("LBHNC", block=32, **OPAQUE)
    with pytest.raises(ConfigError, match="block_tokens"):
        lower_route(make_route(WHOLE), make_regions("LBHNC", **OPAQUE), range(8), wide, range(8))


def test_opaque_pages_move_whole_even_when_the_last_is_partly_filled() -> None:
    regions = make_regions("LBHNC", **OPAQUE)
    runs = [(0, 8, 0, 0, 0, 0), (8, 8, 0, 8, 0, 8), (16, 5, 1, 0, 1, 0)]  # in two runs, as interleave 8 gives
    segments = lower_route(make_route(runs), regions, [3, 5], regions, [7, 9])
    assert segments.num_bytes == 2 * 2 * 4 * 512


def test_nothing_lowers_to_nothing() -> None:
    segments = lower_route(make_route([]), {}, [], {}, [])
    assert len(segments) == segments.num_bytes == len(segments.merged()) == 0


def test_merge_drops_empty_segments_and_joins_in_any_order() -> None:
    segments = Segments.of([20, 0, 5, 10], [120, 100, 7, 110], [10, 10, 0, 10]).merged()
    assert (segments.source.tolist(), segments.target.tolist(), segments.length.tolist()) == (
        [0],
        [100],
        [30],
    )


@pytest.mark.parametrize("length", [[[1]], [1, 2], [-1]])
def test_shapeless_segments_are_refused(length: list[object]) -> None:
    with pytest.raises(ValueError):
        Segments(np.array([0]), np.array([0]), np.array(length))


def test_lowering_a_quarter_million_tokens_is_quick() -> None:
    source = ParallelLayout(tp=8, dcp=8, mla=True, interleave_tokens=16, block_tokens=16, num_layers=61)
    target = ParallelLayout(tp=1, mla=True, block_tokens=16, num_layers=61)
    plan = plan_transfer(source, target, 0, 250_000)
    ids = np.random.default_rng(0).permutation(250_000 // 16 + 8)
    shape = {"block_tokens": 16, "token_bytes": 1152, "page": "plain", "device": "cpu", "head_stride": 0}
    shape |= {"num_blocks": len(ids), "block_stride": 16 * 1152, "token_stride": 1152}
    regions = {n: Region(layer=n, heads=Span(0, 1), base=n << 34, **shape) for n in range(61)}
    begin = time.perf_counter()
    segments = [lower_route(route, regions, ids, regions, ids) for route in plan.routes]
    assert time.perf_counter() - begin < 2.0
    assert sum(part.num_bytes for part in segments) == 250_000 * 61 * 1152
