"""The small domain over which the laws of layouts are checked whole, and random layouts beyond it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from hypothesis import strategies as st

from layouts import ConfigError, Interleave, ParallelLayout

NUM_SHARDS = (1, 2, 3, 4, 6, 8)
BLOCK_TOKENS = (4, 8, 16)
NUM_KV_HEADS = (1, 2, 4, 8)
TP_SIZES = (1, 2, 4, 8)
PCP_SIZES = (1, 2, 4)


def sharded(num_shards: int, interleave_tokens: int, block_tokens: int) -> ParallelLayout:
    """One rank per shard, one head, one layer: a layout of the vectors, written W, I, B."""
    return ParallelLayout(
        tp=num_shards, dcp=num_shards, mla=True, interleave_tokens=interleave_tokens, block_tokens=block_tokens
    )


def interleaved_layouts(block_sizes: Iterable[int] = BLOCK_TOKENS) -> list[ParallelLayout]:
    """One for each number of shards and block size, with I of 1, 2 and B where there is more than one shard."""
    return [
        sharded(num_shards, tokens, block)
        for num_shards, block in product(NUM_SHARDS, block_sizes)
        for tokens in ((1, 2, block) if num_shards > 1 else (block,))
    ]


def parallel_layouts(num_kv_heads: int, tp_sizes: Iterable[int] = TP_SIZES) -> list[ParallelLayout]:
    """Every accepted TP, PCP and DCP in both meanings of PCP, sharded or not; I, B and PP take turns among them."""
    caches = [(1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (8, 8), (1, 16), (2, 16), (16, 16), (3, 6)]
    layouts = []
    for tp, pcp, older, is_sharded in product(tp_sizes, PCP_SIZES, (False, True), (True, False)):
        for dcp in (1, 2, 4, 8, 16, 32):
            tokens, block = caches[len(layouts) % len(caches)]
            sizes: dict[str, Any] = {"tp": tp, "pcp": pcp, "dcp": dcp, "pp": 1 + len(layouts) % 2, "num_layers": 3}
            sizes |= {"interleave_tokens": tokens, "block_tokens": block, "pcp_shards_kv": older}
            if (pcp == 1 and older) or (dcp * pcp == 1 and not is_sharded):
                continue  # the same layout as another
            try:
                layouts.append(ParallelLayout(num_kv_heads=num_kv_heads, dcp_sharded=is_sharded, **sizes))
            except ConfigError:
                continue
    return layouts


def boundaries(*interleaves: Interleave) -> list[int]:
    """Prompt lengths at, before and behind each length at which something new begins in one of the layouts."""
    lengths = {0}
    for interleave in interleaves:
        turn = interleave.interleave_tokens * interleave.num_shards
        sizes = interleave.interleave_tokens, turn, interleave.block_tokens, interleave.virtual_block_tokens
        lengths |= {size + more for size in sizes for more in (-1, 0, 1)}
    return sorted(lengths)


def ranges(source: Interleave, target: Interleave) -> Iterator[tuple[int, int]]:
    """From the start to every boundary, and from the second virtual block of the target to some."""
    lengths = boundaries(source, target)
    yield from ((0, length) for length in lengths)
    first = target.virtual_block_tokens
    yield from ((first, first + length) for length in lengths[:: max(1, len(lengths) // 4)])


@st.composite
def layouts(draw: st.DrawFn, num_kv_heads: int, num_layers: int) -> ParallelLayout:
    """Any layout of a model with up to 6 ranks for each head and each axis."""
    interleave_tokens = draw(st.integers(1, 8))
    sizes: dict[str, Any] = {
        "tp": num_kv_heads * draw(st.sampled_from((1, 2, 3, 4, 6))),
        "pcp": draw(st.sampled_from((1, 1, 2, 3))),
        "pp": draw(st.integers(1, min(3, num_layers))),
        "num_kv_heads": num_kv_heads,
        "num_layers": num_layers,
        "interleave_tokens": interleave_tokens,
        "block_tokens": interleave_tokens * draw(st.integers(1, 5)),
        "pcp_shards_kv": draw(st.booleans()),
        "dcp_sharded": draw(st.sampled_from((True, True, True, False))),
    }
    candidates = []
    for dcp in sorted({1, 2, 3, 4, 6, sizes["pcp"], sizes["tp"] * sizes["pcp"]}):
        try:
            candidates.append(ParallelLayout(dcp=dcp, **sizes))
        except ConfigError:
            continue
    return draw(st.sampled_from(candidates))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[ParallelLayout, ParallelLayout, int, int]:
    """(source, target, start, stop) of one model."""
    heads, num_layers = draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 4))
    stop = draw(st.integers(0, 120))
    source, target = draw(layouts(heads, num_layers)), draw(layouts(heads, num_layers))
    return source, target, draw(st.integers(0, stop)), stop
