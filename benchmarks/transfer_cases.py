"""The pairs of layouts whose transfer is timed, and the memory that one target rank and its sources have for them.

Knows layouts, regions and block lists; processes and transports are the business of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Literal

import numpy as np
import numpy.typing as npt

from layouts import ParallelLayout, TransferPlan, plan_transfer
from transport.regions import Region, regions_of_rank
from transport.segments import Segments, lower_route

Order = Literal["contiguous", "reversed", "shuffled"]
Pages = Literal["stock", "cross-layer"]

NUM_LAYERS = 16
GQA_TOKEN_BYTES, MLA_TOKEN_BYTES = 512, 1152
"""Content of one token of one head in one layer: key and value of 128 bfloat16 each, or a latent of 576."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pair. `pages`: stock ones keep each layer apart (LBHNC), kvweave's own have all layers of a block together
    (BLHNC). `order`: of the block ids at both ends."""

    name: str
    source: ParallelLayout
    target: ParallelLayout
    token_bytes: int = GQA_TOKEN_BYTES
    order: Order = "shuffled"
    pages: Pages = "cross-layer"

    @property
    def is_equal(self) -> bool:
        """Whether a connector that moves whole blocks could do it."""
        return self.source == self.target

    def num_tokens(self, num_bytes: int) -> int:
        """Length of the prompt of which target rank 0 receives about `num_bytes`."""
        held = self.target.placement.holdings[0]
        token_bytes = self.token_bytes * held.heads.size * held.layers.size
        virtual = lcm(*(layout.interleave.virtual_block_tokens for layout in (self.source, self.target)))
        return max(1, num_bytes * self.target.num_shards // token_bytes // virtual) * virtual


def gqa(block: int, *, width: int = 1, tp: int = 1, interleave: int = 0) -> ParallelLayout:
    """8 KV heads, the sequence over `width` ranks; the interleave is the block unless given."""
    return ParallelLayout(
        tp=tp,
        pcp=width,
        dcp=width,
        num_kv_heads=8,
        num_layers=NUM_LAYERS,
        block_tokens=block,
        interleave_tokens=interleave or block,
    )


def mla(block: int, *, width: int, interleave: int = 0) -> ParallelLayout:
    """A latent, the sequence over `width` TP ranks."""
    return ParallelLayout(
        tp=width,
        dcp=width,
        mla=True,
        num_layers=NUM_LAYERS,
        block_tokens=block,
        interleave_tokens=interleave or block,
    )


def cases() -> list[Case]:
    """All of them. Sizes in the names are those of one block in one layer."""
    orders: tuple[Order, ...] = ("contiguous", "reversed", "shuffled")
    latent = MLA_TOKEN_BYTES
    return [
        *(Case(f"equal, {order}", gqa(16), gqa(16), GQA_TOKEN_BYTES, order, "stock") for order in orders),
        Case("TP1 -> TP2", gqa(16), gqa(16, tp=2)),
        Case("DCP4 -> DCP2, 64 KiB", gqa(16, width=4), gqa(16, width=2)),
        Case("DCP4 -> DCP2, 256 KiB", gqa(64, width=4), gqa(64, width=2)),
        Case("B -> 2B, 32 KiB", gqa(8), gqa(16)),
        Case("B -> 2B, 64 KiB", gqa(16), gqa(32)),
        Case("B -> 2B, 256 KiB", gqa(64), gqa(128)),
        Case("I=1 -> I=B", gqa(16, width=4, interleave=1), gqa(16, width=2)),
        Case("MLA DCP4 -> DCP2", mla(64, width=4), mla(64, width=2), latent),
        Case("MLA I=1 -> I=B", mla(64, width=4, interleave=1), mla(64, width=2), latent),
    ]


@dataclass(frozen=True, slots=True)
class Ends:
    """What a case needs in memory: `num_blocks` of each end, and bytes of each source rank and of target rank 0."""

    case: Case
    num_tokens: int
    plan: TransferPlan

    @classmethod
    def of(cls, case: Case, num_bytes: int) -> Ends:
        """For a prompt of which target rank 0 receives about `num_bytes`."""
        num_tokens = case.num_tokens(num_bytes)
        return cls(case, num_tokens, plan_transfer(case.source, case.target, 0, num_tokens))

    @property
    def source_ranks(self) -> list[int]:
        """Source ranks that target rank 0 reads from."""
        return [route.source_rank for route in self.plan.routes_to(0)]

    def source_bytes(self, rank: int) -> int:
        """Size of the cache of a source rank."""
        return self._size(self.case.source, rank)

    @property
    def target_bytes(self) -> int:
        """Size of the cache of target rank 0."""
        return self._size(self.case.target, 0)

    def segments(self, sources: Mapping[int, int], target: int) -> dict[int, Segments]:
        """What target rank 0, whose cache is at address `target`, reads from each rank, whose cache is at
        `sources[rank]`."""
        here = self._regions(self.case.target, 0, target), self._block_ids(self.case.target, 2)
        blocks = self._block_ids(self.case.source, 1)
        return {
            route.source_rank: lower_route(
                route, self._regions(self.case.source, route.source_rank, sources[route.source_rank]), blocks, *here
            )
            for route in self.plan.routes_to(0)
        }

    def block_descriptors(self, source: int, target: int) -> Segments:
        """Of an equal pair, what a connector moves that has a descriptor for each block in each layer, in its order."""
        regions = [self._regions(self.case.source, 0, address) for address in (source, target)]
        ids = self._block_ids(self.case.source, 1), self._block_ids(self.case.target, 2)
        sources, targets = (
            np.concatenate([region.base + blocks * region.block_stride for region in by_layer.values()])
            for by_layer, blocks in zip(regions, ids, strict=True)
        )
        first = regions[0][0]
        return Segments.of(sources, targets, first.num_heads * first.block_tokens * first.token_bytes)

    def _num_blocks(self, layout: ParallelLayout) -> int:
        return layout.interleave.num_virtual_blocks(self.num_tokens)

    def _size(self, layout: ParallelLayout, rank: int) -> int:
        holding = layout.placement.holdings[rank]
        page = holding.heads.size * layout.block_tokens * self.case.token_bytes
        return self._num_blocks(layout) * holding.layers.size * page

    def _block_ids(self, layout: ParallelLayout, seed: int) -> npt.NDArray[np.int64]:
        ids = np.arange(self._num_blocks(layout), dtype=np.int64)
        if self.case.order == "shuffled":
            return np.random.default_rng(seed).permutation(ids)
        return ids[::-1] if self.case.order == "reversed" else ids

    def _regions(self, layout: ParallelLayout, rank: int, address: int) -> dict[int, Region]:
        sizes = self._num_blocks(layout), layout.block_tokens, self.case.token_bytes
        holding = layout.placement.holdings[rank]
        return regions_of_rank(holding, *sizes, address, layers_apart=self.case.pages == "stock")
