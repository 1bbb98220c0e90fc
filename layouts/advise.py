"""Which layout to choose for a model, its cards and its load: known rules, applied in a stated order.

Knows sizes and arithmetic only: no engine, no card by name, no measurement. Rates and memory are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from layouts.errors import ConfigError, config_error, divisors, require_at_least
from layouts.parallel import ParallelLayout
from layouts.words import counted

BLOCK_TOKENS = 64
"""Block size and interleave of advised layouts: equal, so that whole blocks move and short prompts touch few."""

_ACTIVATION_BYTES = 2
_LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What attention needs to know of a model.

    `entry_bytes` is one token of one KV head in one layer, key and value together (of the latent for `mla`);
    `key_dim` and `value_dim` are a query head's sizes as attention computes them.
    """

    num_layers: int
    num_kv_heads: int
    entry_bytes: int
    mla: bool
    num_query_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__slots__ if name != "mla"}
        require_at_least(1, **sizes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one copy of the cache: all heads, all layers."""
        return self.num_layers * self.num_kv_heads * self.entry_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What has to be served, and with what.

    Args:
        num_cards: cards of one node; the prefill node and the decode node are advised for this many each.
        card_bytes: memory of one card that is left for the KV cache (vLLM logs it as "Available KV cache memory").
        context_tokens: length of a sequence.
        concurrency: sequences at the same time.
        weights_tp: smallest tensor parallel size at which the weights fit.
        ttft_s: wanted time to the first token.
        prefill_tokens_per_s: what one instance of `weights_tp` cards computes at this context, without PCP.
    """

    num_cards: int
    card_bytes: int
    context_tokens: int
    concurrency: int
    weights_tp: int
    ttft_s: float
    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_cards=self.num_cards,
            card_bytes=self.card_bytes,
            context_tokens=self.context_tokens,
            concurrency=self.concurrency,
            weights_tp=self.weights_tp,
        )
        if self.weights_tp > self.num_cards:
            raise config_error(
                f"tp with {self.num_cards} cards",
                got=self.weights_tp,
                allowed=f"1 to {self.num_cards}",
                remedy="Give the node more cards, or let the weights span several nodes with pp.",
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout for one node, `num_instances` times (DP), with the rule that decided and its numbers in words."""

    layout: ParallelLayout
    num_instances: int
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatherCosts:
    """What prefill with a sharded cache exchanges per layer and rank, up to the factor (ranks - 1) / ranks.

    Gathering KV costs `context_bytes` per token of context; gathering Q costs `query_bytes` per new token, for the
    query and for the partial result that goes back. Keys and values of new tokens are gathered either way.
    """

    context_bytes: int
    query_bytes: int

    @property
    def crossover(self) -> float:
        """Tokens of context per new token from which gathering Q is cheaper."""
        return self.query_bytes / self.context_bytes


def card_bytes(model: ModelShape, layout: ParallelLayout, num_tokens: int) -> int:
    """Bytes that a sequence takes on the fullest card of a layout, in whole blocks."""
    return layout.interleave.num_local_blocks(num_tokens, 0) * _block_bytes(model, layout)


def max_tokens(model: ModelShape, layout: ParallelLayout, num_bytes: int) -> int:
    """The longest sequence whose share fits into `num_bytes` on every card."""
    return num_bytes // _block_bytes(model, layout) * layout.interleave.virtual_block_tokens


def num_sequences(model: ModelShape, layout: ParallelLayout, load: Load) -> int:
    """Sequences of the load's context that one instance holds at the same time."""
    return load.card_bytes // card_bytes(model, layout, load.context_tokens)


def gather_costs(model: ModelShape, tp: int) -> GatherCosts:
    """The two ways to attend to a sharded context, on one of `tp` tensor parallel ranks."""
    query_heads = ceil(model.num_query_heads / tp)
    kv_heads = 1 if model.mla else ceil(model.num_kv_heads / tp)
    per_head = (model.key_dim + model.value_dim) * _ACTIVATION_BYTES + _LSE_BYTES
    return GatherCosts(kv_heads * model.entry_bytes, query_heads * per_head)


def tp_layouts(model: ModelShape, load: Load) -> Iterator[ParallelLayout]:
    """Layouts without PCP that the cards allow, the fewest cards per instance and the fewest shards first.

    DCP goes up to TP / KV heads (TP for MLA): beyond that two ranks of a group would hold different heads.
    """
    for tp in divisors(load.num_cards):
        for dcp in divisors(tp) if tp >= load.weights_tp else ():
            layout = _layout(model, tp=tp, dcp=dcp)
            if layout is not None:
                yield layout


def advise_decode(model: ModelShape, load: Load) -> Choice:
    """The layout of the decode node: memory decides.

    Rules, first match: the sequences fit without sharding -> data parallel only; one exceeds a card, or they do
    together -> the smallest instance that holds them, by heads (TP) before positions (DCP); no instance holds all
    -> the one that holds most.

    Raises:
        ConfigError: one sequence fits nowhere, with the longest that does.
    """
    fitting, unsharded = _fitting(model, load), next(tp_layouts(model, load))
    capacity = {layout: num_sequences(model, layout, load) * (load.num_cards // layout.tp) for layout in fitting}
    enough = [layout for layout in fitting if capacity[layout] >= load.concurrency]
    layout = enough[0] if enough else max(fitting, key=lambda each: capacity[each])
    num_instances = load.num_cards // layout.tp
    held = f"{num_instances} x TP {layout.tp} x DCP {layout.dcp} hold {counted(capacity[layout], 'sequence')}"
    if not enough:
        rule, reason = "memory is short: most sequences", f"{held}, of {load.concurrency:,} wanted; the others wait"
    elif layout == unsharded:
        rule, reason = (
            "short sequences fit without sharding: DP only",
            f"{held}, {load.concurrency:,} wanted; sharding would add exchanges",
        )
    else:
        short = "the sequences together exceed" if unsharded in fitting else "one sequence exceeds"
        split = "split KV heads by TP" if layout.dcp == 1 else "split positions by DCP"
        rule = f"{short} the cards without sharding: {split}"
        limit = "no smaller instance does" if layout.dcp == 1 else _dcp_limit(model, layout)
        reason = f"{held}, {load.concurrency:,} wanted; {limit}"
    return Choice(layout, num_instances, rule, reason)


def advise_prefill(model: ModelShape, load: Load) -> Choice:
    """The layout of the prefill node: time decides, once a sequence fits.

    Rules, first match: the time to the first token is met -> no PCP; load is moderate (cards are left when each
    sequence has an instance) -> PCP up to the goal; otherwise -> no PCP, because it would speed up one prompt by
    delaying another. Assumes that PCP and TP divide the time by the number of cards.

    Raises:
        ConfigError: one sequence fits nowhere, with the longest that does.
    """
    base = _fitting(model, load)[0]
    num_instances = load.num_cards // base.tp
    rate = load.prefill_tokens_per_s * base.tp / load.weights_tp
    ttft_s = load.context_tokens / rate
    speed = f"{load.context_tokens:,} tokens at {rate:,.0f} tokens/s take {ttft_s:,.1f} s, wanted {load.ttft_s:,.1f} s"
    if ttft_s <= load.ttft_s:
        return Choice(base, num_instances, "time to first token is met: no PCP", speed)
    spare = load.num_cards // (base.tp * load.concurrency)
    wanted = ceil(ttft_s / load.ttft_s)
    sizes = [size for size in divisors(num_instances) if 1 < size <= spare]
    pcp = next((size for size in sizes if size >= wanted), sizes[-1] if sizes else 1)
    layout = _with_pcp(model, load, base.tp, pcp) if pcp > 1 else None
    if layout is None:
        reason = f"{speed}; {counted(load.concurrency, 'sequence')} leave no cards idle for PCP"
        return Choice(base, num_instances, "load is not moderate: DP, no PCP", reason)
    reason = (
        f"{speed}; cards are idle at {counted(load.concurrency, 'sequence')}; PCP {pcp} takes {ttft_s / pcp:,.1f} s"
    )
    stored = (
        "every PCP rank stores all KV" if layout.dcp == 1 else "KV does not fit on each PCP rank and is sharded too"
    )
    return Choice(layout, num_instances // pcp, "too slow and load is moderate: add PCP", f"{reason}; {stored}")


def _fitting(model: ModelShape, load: Load) -> list[ParallelLayout]:
    """The layouts that hold one sequence of the load's context."""
    layouts = list(tp_layouts(model, load))
    if not layouts:
        raise config_error(
            f"tp with {load.num_cards} cards and {model.num_kv_heads} KV heads",
            got=load.weights_tp,
            allowed="up to the largest divisor of the cards that divides, or is a multiple of, the KV heads",
            remedy="Choose another number of cards, or a smaller tp.",
        )
    fitting = [layout for layout in layouts if num_sequences(model, layout, load) > 0]
    if not fitting:
        longest = max(max_tokens(model, layout, load.card_bytes) for layout in layouts)
        raise config_error(
            "context",
            got=load.context_tokens,
            allowed=f"up to {longest} tokens on these cards",
            remedy="Use more cards or memory, or a KV cache dtype of fewer bytes.",
        )
    return fitting


def _with_pcp(model: ModelShape, load: Load, tp: int, pcp: int) -> ParallelLayout | None:
    """The layout with PCP and the fewest shards that holds a sequence."""
    for dcp in sorted({1, pcp, tp * pcp}):
        layout = _layout(model, tp=tp, pcp=pcp, dcp=dcp)
        if layout is not None and num_sequences(model, layout, load) > 0:
            return layout
    return None


def _layout(model: ModelShape, *, tp: int, dcp: int, pcp: int = 1) -> ParallelLayout | None:
    """The layout of these sizes, where it exists."""
    try:
        return ParallelLayout(
            tp=tp,
            pcp=pcp,
            dcp=dcp,
            num_kv_heads=model.num_kv_heads,
            mla=model.mla,
            num_layers=model.num_layers,
            block_tokens=BLOCK_TOKENS,
            interleave_tokens=BLOCK_TOKENS,
        )
    except ConfigError:
        return None


def _block_bytes(model: ModelShape, layout: ParallelLayout) -> int:
    """Bytes of one block on the rank with the most heads and layers."""
    holdings = layout.placement.holdings
    tiles = max(holding.heads.size * holding.layers.size for holding in holdings)
    return tiles * layout.block_tokens * model.entry_bytes


def _dcp_limit(model: ModelShape, layout: ParallelLayout) -> str:
    if model.mla:
        return f"DCP <= TP = {layout.tp} (one latent)"
    return f"DCP <= TP / KV heads = {layout.tp} / {model.num_kv_heads} = {layout.tp // model.num_kv_heads}"
