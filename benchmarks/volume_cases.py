"""What `benchmarks.transfer_volume` compares: models, layouts, prompt lengths, and the three ways to ship a cache.

Prices by formula (`predict_volume`) and counts in real plans; knows nothing of pictures or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from statistics import NormalDist

from layouts import ParallelLayout, Volume, plan_transfer, plan_volume, predict_volume

CP_SIZES = (1, 2, 4, 8, 16)
BLOCK_SIZES = (16, 32, 64, 128)
LENGTHS = tuple(
    sorted({1 << power for power in range(18)} | {3 << power for power in range(0, 16, 2)} | {1000, 100_000})
)
COUNTED_TOKENS = 20_000
"""Longest prompt of which every plan is also built and counted; longer ones are for one block size."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model's KV cache: `entry_bytes` per token, head and layer."""

    name: str
    num_kv_heads: int
    mla: bool
    num_layers: int
    entry_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one copy of the cache."""
        return self.num_kv_heads * self.num_layers * self.entry_bytes

    def layout(self, cp: int, block_tokens: int, interleave_tokens: int) -> ParallelLayout:
        """`cp` ranks that shard every sequence and hold all heads and layers."""
        return ParallelLayout(
            pcp=cp,
            dcp=cp,
            num_kv_heads=self.num_kv_heads,
            mla=self.mla,
            num_layers=self.num_layers,
            block_tokens=block_tokens,
            interleave_tokens=interleave_tokens,
        )


GQA_8 = Model("GQA-8", num_kv_heads=8, mla=False, num_layers=80, entry_bytes=2 * 128 * 2)
MLA_576 = Model("MLA-576", num_kv_heads=1, mla=True, num_layers=61, entry_bytes=576 * 2)
MODELS = (GQA_8, MLA_576)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt between two nodes of equal layout, the only ones that whole-block schemes can serve.

    `listed`: every block that the block table lists, on every rank. `whole_i1`, `whole_ib`: only blocks with tokens,
    whole, with interleave 1 or interleave = block size. `exact`: what kvweave moves with either interleave.
    """

    model: str
    cp: int
    block_tokens: int
    num_tokens: int
    content_bytes: int
    listed_bytes: int
    whole_i1_bytes: int
    whole_ib_bytes: int
    exact_i1_bytes: int
    exact_ib_bytes: int
    blocks_i1: int
    blocks_ib: int
    empty_blocks_ib: int
    messages_i1: int
    messages_ib: int
    segments_i1: int
    segments_ib: int


def price(model: Model, cp: int, block_tokens: int, num_tokens: int) -> Case:
    """One case, by formula."""
    fine, coarse = (_symmetric(model, cp, block_tokens, interleave, num_tokens) for interleave in (1, block_tokens))
    return Case(
        model=model.name,
        cp=cp,
        block_tokens=block_tokens,
        num_tokens=num_tokens,
        content_bytes=num_tokens * model.token_bytes,
        listed_bytes=coarse.num_listed_blocks * block_tokens * model.token_bytes,
        whole_i1_bytes=fine.num_whole_block_entries * model.entry_bytes,
        whole_ib_bytes=coarse.num_whole_block_entries * model.entry_bytes,
        exact_i1_bytes=fine.num_entries * model.entry_bytes,
        exact_ib_bytes=coarse.num_entries * model.entry_bytes,
        blocks_i1=fine.num_real_blocks,
        blocks_ib=coarse.num_real_blocks,
        empty_blocks_ib=coarse.num_empty_blocks,
        messages_i1=fine.num_messages,
        messages_ib=coarse.num_messages,
        segments_i1=fine.num_segments,
        segments_ib=coarse.num_segments,
    )


def all_cases() -> list[Case]:
    """Every model, CP size, block size and length."""
    return [
        price(model, cp, block_tokens, num_tokens)
        for model in MODELS
        for cp in CP_SIZES
        for block_tokens in BLOCK_SIZES
        for num_tokens in LENGTHS
    ]


@dataclass(frozen=True, slots=True)
class Resharding:
    """Segments that a prompt has on its way from 8 ranks to 4."""

    model: str
    block_tokens: int
    num_tokens: int
    segments_i1: int
    segments_ib: int


def reshardings() -> list[Resharding]:
    """Every model, block size and length."""
    return [
        Resharding(
            model.name, block_tokens, length, *(_reshard(model, block_tokens, i, length) for i in (1, block_tokens))
        )
        for model in MODELS
        for block_tokens in BLOCK_SIZES
        for length in LENGTHS
    ]


def _reshard(model: Model, block_tokens: int, interleave_tokens: int, num_tokens: int) -> int:
    source, target = (model.layout(cp, block_tokens, interleave_tokens) for cp in (8, 4))
    return predict_volume(source, target, 0, num_tokens).num_segments


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different layouts that a deployment may have."""

    name: str
    model: Model
    source: dict[str, int]
    target: dict[str, int]

    def layouts(self) -> tuple[ParallelLayout, ParallelLayout]:
        """Source and target."""
        heads, mla, layers = self.model.num_kv_heads, self.model.mla, self.model.num_layers
        sides = [
            ParallelLayout(
                tp=sizes.get("tp", 1),
                pcp=sizes.get("pcp", 1),
                dcp=sizes.get("dcp", 1),
                block_tokens=sizes["block"],
                interleave_tokens=sizes.get("interleave", 1),
                num_kv_heads=heads,
                mla=mla,
                num_layers=layers,
            )
            for sizes in (self.source, self.target)
        ]
        return sides[0], sides[1]


def _pair(name: str, model: Model, source: str, target: str) -> Pair:
    sides = [
        {key: int(size) for key, size in (part.split("=") for part in side.split(","))} for side in (source, target)
    ]
    return Pair(name, model, *sides)


PAIRS = (
    _pair(
        "sharded PCP to DCP", MLA_576, "tp=8,pcp=2,dcp=16,block=64,interleave=64", "tp=8,dcp=8,block=64,interleave=64"
    ),
    _pair("fine to coarse", MLA_576, "tp=8,dcp=8,block=64,interleave=1", "tp=8,dcp=4,block=64,interleave=64"),
    _pair(
        "large to small blocks", MLA_576, "pcp=4,dcp=4,block=128,interleave=128", "tp=8,dcp=2,block=16,interleave=16"
    ),
    _pair("replicated PCP to TP", GQA_8, "tp=2,pcp=4,block=16", "tp=8,block=32"),
    _pair("replicated PCP to DCP", GQA_8, "tp=2,pcp=4,block=16", "tp=16,dcp=2,block=32,interleave=32"),
    _pair("sharded PCP to DCP", GQA_8, "pcp=8,dcp=8,block=64,interleave=64", "tp=16,dcp=2,block=64,interleave=64"),
)
PAIR_LENGTHS = (100, 4096, 131_072)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Prompt lengths as a log-normal distribution: `median` tokens, standard deviation `spread` of the logarithm.

    `lengths` are the middles of equally likely parts, so every run of the benchmark has the same ones.
    """

    name: str
    median: int
    spread: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """32 lengths, each as likely as any other."""
        normal = NormalDist(log(self.median), self.spread)
        middles = (normal.inv_cdf((part + 0.5) / 32) for part in range(32))
        return tuple(min(max(round(exp(middle)), LENGTHS[0]), LENGTHS[-1]) for middle in middles)


DISTRIBUTIONS = (
    Distribution("chat", 300, 1.0),
    Distribution("documents", 6000, 0.8),
    Distribution("agents", 40_000, 0.7),
)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes of whole-block schemes over a distribution, relative to the content (which is what kvweave moves)."""

    distribution: str
    cp: int
    block_tokens: int
    listed: float
    whole_i1: float
    whole_ib: float


def overheads() -> list[Overhead]:
    """Every distribution, CP size and block size; relative bytes are the same for every model."""
    rows = []
    for distribution in DISTRIBUTIONS:
        for cp in CP_SIZES:
            for block_tokens in BLOCK_SIZES:
                cases = [price(MLA_576, cp, block_tokens, length) for length in distribution.lengths]
                content = sum(case.content_bytes for case in cases)
                shares = {
                    name: sum(getattr(case, f"{name}_bytes") for case in cases) / content
                    for name in ("listed", "whole_i1", "whole_ib")
                }
                rows.append(Overhead(distribution.name, cp, block_tokens, **shares))
    return rows


def compared() -> Iterator[tuple[ParallelLayout, ParallelLayout, int]]:
    """(source, target, length) of everything that is both priced by formula and counted in a plan."""
    for model in MODELS:
        for cp in CP_SIZES:
            for block_tokens in BLOCK_SIZES:
                for interleave in (1, block_tokens):
                    layout = model.layout(cp, block_tokens, interleave)
                    for length in LENGTHS:
                        if length <= COUNTED_TOKENS or block_tokens == interleave == BLOCK_SIZES[-1]:
                            yield layout, layout, length
    for pair in PAIRS:
        for length in PAIR_LENGTHS:
            yield *pair.layouts(), length


def count_in_plan(source: ParallelLayout, target: ParallelLayout, num_tokens: int) -> Volume:
    """The volume counted in a plan that was built and has proven itself."""
    return plan_volume(plan_transfer(source, target, 0, num_tokens))


def as_rows(items: Sequence[Case] | Sequence[Overhead] | Sequence[Resharding]) -> list[dict[str, object]]:
    """Plain dictionaries for JSON."""
    return [asdict(item) for item in items]


def _symmetric(model: Model, cp: int, block_tokens: int, interleave_tokens: int, num_tokens: int) -> Volume:
    layout = model.layout(cp, block_tokens, interleave_tokens)
    return predict_volume(layout, layout, 0, num_tokens)
