"""`python -m kvweave advise`: layouts for a model, its cards and its load, and the rule that decided."""

from __future__ import annotations

import argparse

from layouts.advise import (
    BLOCK_TOKENS,
    Choice,
    Load,
    ModelShape,
    advise_decode,
    advise_prefill,
    card_bytes,
    gather_costs,
    tp_layouts,
)
from layouts.commands.options import (
    DTYPE_BYTES,
    MAX_RANKS,
    MAX_SIZE,
    MAX_TOKENS,
    add_cache_options,
    cache_sizes,
    integer,
    positive,
)
from layouts.errors import config_error
from layouts.model_config import read_model_config
from layouts.parallel import ParallelLayout
from layouts.words import align, counted

_GIB = 1 << 30
_CONTEXTS = tuple(1 << power for power in range(12, 21, 2))
_CHUNKS = (2048, 8192, 32768)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `advise`."""
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="the model's config.json, or its folder; without it give --layers, and --kv-heads or --mla",
    )
    add_cache_options(parser, instead_of="--model-config")
    size = integer(1, MAX_SIZE)
    parser.add_argument("--query-heads", type=size, metavar="N", help="query heads (default 8 per KV head; MLA 128)")
    parser.add_argument("--gpus", type=integer(1, MAX_RANKS), required=True, metavar="N", help="cards of one node")
    parser.add_argument(
        "--memory-gib",
        type=positive,
        required=True,
        metavar="M",
        help="GiB per card left for the KV cache (vLLM logs it)",
    )
    parser.add_argument(
        "--context", type=integer(1, MAX_TOKENS), required=True, metavar="N", help="tokens of a sequence"
    )
    parser.add_argument("--concurrency", type=size, required=True, metavar="C", help="sequences at the same time")
    parser.add_argument(
        "--tp", type=size, default=1, metavar="N", help="smallest TP that holds the weights (default 1)"
    )
    parser.add_argument(
        "--ttft-s", type=positive, default=10.0, metavar="S", help="wanted time to first token (default 10)"
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=positive,
        default=8000.0,
        metavar="R",
        help="what one instance of --tp cards prefills; measure yours (default 8000)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the advice. Raises ConfigError for sizes that cannot work."""
    model = _model(options)
    load = Load(
        num_cards=options.gpus,
        card_bytes=int(options.memory_gib * _GIB),
        context_tokens=options.context,
        concurrency=options.concurrency,
        weights_tp=options.tp,
        ttft_s=options.ttft_s,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
    )
    decode, prefill = advise_decode(model, load), advise_prefill(model, load)
    kind = "MLA" if model.mla else f"{model.num_kv_heads} KV heads"
    lines = [
        f"Model: {kind}, {model.num_layers} layers: {model.token_bytes:,} bytes of KV cache per token and copy.",
        f"Load: {counted(load.concurrency, 'sequence')} of {load.context_tokens:,} tokens; "
        f"nodes of {counted(load.num_cards, 'card')} with {options.memory_gib:g} GiB for the KV cache each.",
        "",
        *_describe("Decode node", decode),
        "",
        *_describe("Prefill node", prefill),
        "",
        "GiB per card that one sequence takes:",
        *_context_table(model, load, decode.layout, prefill.layout),
        "",
        *_gather_lines(model, prefill.layout),
    ]
    print("\n".join(lines))
    return 0


def _model(options: argparse.Namespace) -> ModelShape:
    described = options.kv_heads is not None or options.mla
    if options.model_config is not None:
        if described or options.layers or options.head_dim or options.query_heads:
            raise config_error(
                "--model-config",
                got="also sizes of the model",
                allowed="either of them",
                remedy="Leave out --kv-heads, --mla, --layers, --head-dim and --query-heads.",
            )
        return read_model_config(options.model_config, DTYPE_BYTES[options.dtype])
    if not described or not options.layers:
        raise config_error(
            "model",
            got="no sizes" if not described else "no --layers",
            allowed="--model-config FILE, or --layers with --kv-heads or --mla",
            remedy="Pass --model-config with the model's config.json, for example.",
        )
    cache = cache_sizes(options)
    head_dim = options.head_dim or 128
    return ModelShape(
        num_layers=cache.num_layers,
        num_kv_heads=cache.num_kv_heads,
        entry_bytes=cache.entry_bytes,
        mla=cache.mla,
        num_query_heads=options.query_heads or (128 if cache.mla else 8 * cache.num_kv_heads),
        key_dim=192 if cache.mla else head_dim,
        value_dim=128 if cache.mla else head_dim,
    )


def _describe(node: str, choice: Choice) -> list[str]:
    layout = choice.layout
    flags = {
        "tensor-parallel-size": layout.tp,
        "prefill-context-parallel-size": layout.pcp,
        "decode-context-parallel-size": layout.dcp,
        "data-parallel-size": choice.num_instances,
    }
    sharded = f" --block-size {BLOCK_TOKENS}" + (
        f" --cp-kv-cache-interleave-size {BLOCK_TOKENS}" if layout.dcp > 1 else ""
    )
    return [
        f"{node}: {_name(layout)}, {counted(choice.num_instances, 'instance')}",
        f"  rule:  {choice.rule}",
        f"  why:   {choice.reason}",
        "  vLLM: " + "".join(f" --{flag} {size}" for flag, size in flags.items() if size > 1) + sharded,
    ]


def _name(layout: ParallelLayout) -> str:
    return f"TP {layout.tp}" + "".join(
        f" {axis.upper()} {getattr(layout, axis)}" for axis in ("pcp", "dcp") if getattr(layout, axis) > 1
    )


def _context_table(model: ModelShape, load: Load, *advised: ParallelLayout) -> list[str]:
    """One line per context, one column per layout: no sharding, what is advised, the most shards."""
    possible = list(tp_layouts(model, load))
    layouts = {_name(layout): layout for layout in (possible[0], *advised, possible[-1])}
    contexts = sorted({*_CONTEXTS, load.context_tokens})
    rows = [("context", "one copy", *layouts)]
    for context in contexts:
        sizes = [card_bytes(model, layout, context) for layout in layouts.values()]
        rows.append((f"{context:,}", *(_gib(size, load) for size in [context * model.token_bytes, *sizes])))
    return [f"  {line}" for line in align(rows, right=range(len(layouts) + 2))] + ["  (! exceeds the card)"]


def _gib(num_bytes: int, load: Load) -> str:
    return f"{num_bytes / _GIB:,.2f}{'!' if num_bytes > load.card_bytes else ' '}"


def _gather_lines(model: ModelShape, layout: ParallelLayout) -> list[str]:
    costs = gather_costs(model, layout.tp)
    chunks = ", ".join(f"{chunk:,} -> {round(chunk * costs.crossover):,}" for chunk in _CHUNKS)
    return [
        f"Prefill over a sharded cache at TP {layout.tp}, bytes per layer and rank:",
        f"  all-gather KV {costs.context_bytes:,} per token of context",
        f"  all-gather Q  {costs.query_bytes:,} per new token (query, partial result, lse)",
        f"  Q is cheaper from {costs.crossover:.1f} tokens of context per new token: chunk -> context {chunks}",
    ]
