"""Who holds what: from the parallel sizes of an engine to one explicit table rank -> (shard, heads, layers).

Knows ranks, shards, KV heads and layers; nothing of positions beyond `Interleave`, nothing of memory or
peers. Only this module derives a shard from a rank number, and only for the engine's own ranks: a peer's
table is taken from the handshake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from layouts.errors import ConfigError, config_error, divisors, listed, require_at_least
from layouts.interleave import Interleave


class Span(NamedTuple):
    """A half-open range of KV heads or layers."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many heads or layers."""
        return self.stop - self.start

    def intersect(self, other: Span) -> Span:
        """What both have; of size 0 or less when that is nothing."""
        return Span(max(self.start, other.start), min(self.stop, other.stop))

    def covers(self, other: Span) -> bool:
        """Whether `other` lies inside."""
        return self.start <= other.start <= other.stop <= self.stop

    def __str__(self) -> str:
        return f"{self.start}..{self.stop}"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: the tokens of a shard, for a range of KV heads, in a range of layers.

    Ranks with equal holdings are *replicas*.
    """

    shard: int
    heads: Span
    layers: Span


@dataclass(frozen=True, slots=True)
class Placement:
    """The table that travels in the handshake: how tokens map to shards, and what each rank holds.

    `holdings` is indexed by rank. For every shard the layer ranges of its ranks partition all layers, and
    for every (shard, layer range) the head ranges partition all heads; ranges may repeat (replicas) but
    not overlap.

    Raises:
        ConfigError: a size below 1, a shard out of range, or ranges that leave a gap or overlap.
    """

    interleave: Interleave
    holdings: tuple[Holding, ...]
    num_kv_heads: int
    num_layers: int

    def __post_init__(self) -> None:
        require_at_least(1, num_kv_heads=self.num_kv_heads, num_layers=self.num_layers, num_ranks=len(self.holdings))
        self._check_shards()
        most = min(self.interleave.num_shards, self.num_ranks + 1)  # of more shards than ranks, one of these is empty
        layers_of: dict[int, set[Span]] = {shard: set() for shard in range(most)}
        heads_of: dict[tuple[int, Span], set[Span]] = {}
        for holding in self.holdings:
            layers_of.setdefault(holding.shard, set()).add(holding.layers)
            heads_of.setdefault((holding.shard, holding.layers), set()).add(holding.heads)
        for shard, spans in layers_of.items():
            _require_partition(f"layers held of shard {shard}", spans, self.num_layers)
        for (shard, layers), spans in heads_of.items():
            _require_partition(f"KV heads held of shard {shard}, layers {layers}", spans, self.num_kv_heads)

    @property
    def num_ranks(self) -> int:
        """Ranks in the table."""
        return len(self.holdings)

    def _check_shards(self) -> None:
        for rank, holding in enumerate(self.holdings):
            if not 0 <= holding.shard < self.interleave.num_shards:
                raise config_error(
                    f"shard of rank {rank}",
                    got=holding.shard,
                    allowed=f"0 to {self.interleave.num_shards - 1}",
                    remedy="Make num_shards and the table of holdings agree.",
                )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The parallel sizes of one engine, in vLLM's terms.

    Rank number = (pp * PCP + pcp) * TP + tp. Context parallel groups take ranks tp-major with pcp fastest
    (`vllm/distributed/parallel_state.py`), so shard = (tp * PCP + pcp) mod W with W = `dcp`: that is tp
    mod W without PCP, pcp for W = PCP, tp * PCP + pcp for W = TP * PCP. With W = 1 every PCP rank has a
    full replica.

    Args:
        tp, pcp, dcp, pp: tensor, prefill context, decode context and pipeline parallel size.
        num_kv_heads: KV heads of the model; set to 1 for `mla`, whose latent all tensor parallel ranks hold.
        mla: multi-head latent attention.
        interleave_tokens, block_tokens: I and B of `Interleave`.
        num_layers: layers with a KV cache over all pipeline stages.
        pcp_shards_kv: the older meaning of PCP, in which it shards the KV cache too: W = PCP * DCP and
            shard = pcp * DCP + tp mod DCP.
        dcp_sharded: whether the KV cache is sharded over context parallel ranks at all (vLLM's
            `KVCacheSpec.dcp_sharded`). Sliding-window and state layers are not: W = 1, and the ranks over which
            others are sharded hold replicas. A model with several KV cache groups has one layout for each, such as
            `replace(layout, dcp_sharded=False, num_layers=30)`, and one plan; a state counts as one position.
        layers_per_stage: layers of each pipeline stage (vLLM's VLLM_PP_LAYER_PARTITION); by default
        vLLM's rule.

    Raises:
        ConfigError: sizes that cannot work together, with the numbers and a remedy.
    """

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    pp: int = 1
    num_kv_heads: int = 1
    mla: bool = False
    interleave_tokens: int = 1
    block_tokens: int = 16
    num_layers: int = 1
    pcp_shards_kv: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    dcp_sharded: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, tp=self.tp, pcp=self.pcp, dcp=self.dcp, pp=self.pp)
        require_at_least(1, num_kv_heads=self.num_kv_heads, num_layers=self.num_layers)
        if self.mla:
            object.__setattr__(self, "num_kv_heads", 1)
        self._check_context_parallel()
        self._check_heads()
        self._check_stages()
        _ = self.interleave  # refuses what `Interleave` refuses

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine: PP * PCP * TP."""
        return self.pp * self.pcp * self.tp

    @property
    def num_shards(self) -> int:
        """W: over how many ranks one sequence is spread."""
        if not self.dcp_sharded:
            return 1
        return self.pcp * self.dcp if self.pcp_shards_kv else self.dcp

    @property
    def interleave(self) -> Interleave:
        """How positions map to shards, blocks and slots."""
        return Interleave(self.num_shards, self.interleave_tokens, self.block_tokens)

    @property
    def placement(self) -> Placement:
        """The table of all ranks."""
        ranks = product(self._stages(), range(self.pcp), range(self.tp))
        holdings = tuple(Holding(self._shard(pcp, tp), self._heads(tp), layers) for layers, pcp, tp in ranks)
        return Placement(self.interleave, holdings, self.num_kv_heads, self.num_layers)

    @property
    def is_started_by_vllm(self) -> bool:
        """Whether vLLM 0.32 starts with these sizes; layouts are more general than its choice of DCP where PCP > 1."""
        return self.pcp == 1 or (not self.pcp_shards_kv and self.dcp in (1, self.pcp, self.tp * self.pcp))

    def _shard(self, pcp: int, tp: int) -> int:
        if not self.dcp_sharded:
            return 0
        if self.pcp_shards_kv:
            return pcp * self.dcp + tp % self.dcp
        return (tp * self.pcp + pcp) % self.dcp

    def _heads(self, tp: int) -> Span:
        if self.tp <= self.num_kv_heads:
            num_heads = self.num_kv_heads // self.tp
            return Span(tp * num_heads, (tp + 1) * num_heads)
        head = tp // self._num_head_replicas
        return Span(head, head + 1)

    def _stages(self) -> list[Span]:
        stops = [0]
        for size in self.layers_per_stage or split_layers(self.num_layers, self.pp):
            stops.append(stops[-1] + size)
        return [Span(start, stop) for start, stop in pairwise(stops)]

    @property
    def _num_head_replicas(self) -> int:
        """Tensor parallel ranks that hold the same KV head."""
        return max(1, self.tp // self.num_kv_heads)

    @property
    def _group_tp_ranks(self) -> int:
        """Tensor parallel ranks that share one sequence's tokens; all of them must hold the same heads."""
        if not self.dcp_sharded:
            return 1
        return self.dcp if self.pcp_shards_kv else max(1, self.dcp // self.pcp)

    def _check_context_parallel(self) -> None:
        """A group is part of one PCP axis, or whole PCP axes of ranks that follow each other."""
        pcp = 1 if self.pcp_shards_kv else self.pcp
        sizes = sorted({*divisors(pcp), *(pcp * size for size in divisors(self.tp))})
        if self.dcp not in sizes:
            allowed = "the divisors of tp" if pcp == 1 else "the divisors of PCP, and PCP times those of TP"
            raise config_error(
                f"dcp with tp={self.tp}" + (f" and pcp={pcp}" if pcp > 1 else ""),
                got=self.dcp,
                allowed=f"{allowed}, {listed(sizes)}",
                remedy="Choose one of these, or make tp a multiple of dcp.",
            )

    def _check_heads(self) -> None:
        heads, group = self.num_kv_heads, self._group_tp_ranks
        if not self.mla and heads % self.tp and self.tp % heads:
            raise config_error(
                f"tp with num_kv_heads={heads}",
                got=self.tp,
                allowed="a divisor or a multiple of num_kv_heads",
                remedy=f"Choose tp among {listed(divisors(heads))} or a multiple of {heads}.",
            )
        if self.mla or group == 1:
            return
        if group * heads > self.tp:
            raise self._straddle_error(
                f"DCP x KV heads <= TP (DCP counted in TP ranks), here {group} x {heads} > {self.tp}"
            )
        if self._num_head_replicas % group:
            raise self._straddle_error(
                f"a divisor of TP / KV heads = {self.tp} / {heads} = {self._num_head_replicas}, "
                "so that no DCP group straddles two KV heads"
            )

    def _straddle_error(self, allowed: str) -> ConfigError:
        """The tensor parallel ranks of one context parallel group hold different heads."""
        dcp_sizes = list(divisors(self._num_head_replicas))
        raise_tp = f", or raise tp to a multiple of {self._group_tp_ranks * self.num_kv_heads}"
        if self.pcp > 1 and not self.pcp_shards_kv:  # dcp counts PCP ranks too
            dcp_sizes, raise_tp = [1, *(self.pcp * size for size in dcp_sizes)], ""
        return config_error(
            f"dcp with tp={self.tp}, pcp={self.pcp}, num_kv_heads={self.num_kv_heads}",
            got=self.dcp,
            allowed=allowed,
            remedy=f"Set dcp to one of {listed(dcp_sizes)}{raise_tp}.",
        )

    def _check_stages(self) -> None:
        if self.layers_per_stage is None:
            if self.pp > self.num_layers:
                raise config_error(
                    f"pp with num_layers={self.num_layers}",
                    got=self.pp,
                    allowed=f"1 to {self.num_layers}",
                    remedy="Give every stage at least one layer.",
                )
            return
        for layers in self.layers_per_stage:
            require_at_least(1, layers_per_stage=layers)
        if len(self.layers_per_stage) != self.pp or sum(self.layers_per_stage) != self.num_layers:
            raise config_error(
                f"layers_per_stage with pp={self.pp} and num_layers={self.num_layers}",
                got=self.layers_per_stage,
                allowed=f"{self.pp} numbers with sum {self.num_layers}",
                remedy="Copy VLLM_PP_LAYER_PARTITION, or leave it out for an even split.",
            )


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """vLLM's default pipeline split (`vllm.distributed.utils.get_pp_indices`).

    Even; what remains goes one each to the stages from the last but one backwards, because the last stage
    also has the final norm and, when they are few, the first has the embedding.
    """
    base, remaining = divmod(num_layers, num_stages)
    first = num_stages - 1 - remaining
    return tuple(base + (first <= stage < num_stages - 1) for stage in range(num_stages))


def _require_partition(thing: str, spans: Iterable[Span], size: int) -> None:
    """The distinct spans must cover 0..size exactly once."""
    ordered = sorted(spans)
    borders = [Span(0, 0), *ordered, Span(size, size)]
    gapless = all(left.stop == right.start for left, right in pairwise(borders))
    if not gapless or any(span.size < 1 for span in ordered):
        raise config_error(
            thing,
            got=listed(ordered) or "none",
            allowed=f"ranges that cover 0..{size} once",
            remedy="Give every rank its range; replicas repeat a range exactly.",
        )
