"""`python -m kvweave crossover`: where the cheapest prefill path changes, by new tokens and context. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from attention.cost import AttentionShape, Batch, PathName, Rates, choose_path
from layouts.advise import ModelShape
from layouts.commands.options import DTYPE_BYTES, MAX_RANKS, MAX_SIZE, MAX_TOKENS, integer, positive
from layouts.errors import ConfigError, config_error
from layouts.model_config import read_model_config
from layouts.words import align, counted

CHUNKS = tuple(1 << power for power in range(9, 18))
CONTEXTS = (0, *(1 << power for power in range(10, 21)))
LETTERS = {PathName.KEYS: "K", PathName.QUERIES: "Q", PathName.RING: "ring"}
_COLORS = {PathName.KEYS: "#5b9bd5", PathName.QUERIES: "#f4a259", PathName.RING: "#70b77e"}
_MAP_POINTS = 80


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `crossover`."""
    size, ranks = integer(1, MAX_SIZE), integer(1, MAX_RANKS)
    parser.add_argument("--model-config", required=True, metavar="FILE", help="the model's config.json, or its folder")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16", help="of queries and cache (bfloat16)")
    parser.add_argument("--tp", type=ranks, default=1, metavar="N", help="tensor parallel size (1)")
    parser.add_argument("--pcp", type=ranks, default=2, metavar="N", help="prefill context parallel size (2)")
    parser.add_argument(
        "--shards", type=ranks, metavar="N", help="shards of the cache: 1, PCP (the default) or TP * PCP"
    )
    parser.add_argument(
        "--workspace-tokens", type=size, default=16384, metavar="N", help="context gathered at a time (16384)"
    )
    parser.add_argument(
        "--free-tokens", type=integer(1, MAX_TOKENS), metavar="N", help="memory for a path, in cached tokens (any)"
    )
    default = Rates()
    rates = {
        "--tflops": (default.flops_per_s / 1e12, "attention speed of a card, in TFLOP/s"),
        "--link-gb-per-s": (default.link_bytes_per_s / 1e9, "what a card receives, in GB/s"),
        "--memory-gb-per-s": (default.memory_bytes_per_s / 1e9, "memory speed of a card, in GB/s"),
        "--exchange-us": (default.exchange_s * 1e6, "time of an exchange of next to nothing, in microseconds"),
    }
    for name, (value, help) in rates.items():
        parser.add_argument(name, type=positive, default=value, metavar="R", help=f"{help} ({value:g}); measure yours")
    parser.add_argument(
        "--overlap-percent",
        type=integer(0, 100),
        default=round(100 * default.overlap),
        metavar="P",
        help=f"share of a ring's travel that hides behind computation ({100 * default.overlap:g})",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the map of paths")


def run(options: argparse.Namespace) -> int:
    """Prints the map of paths and where it changes. Raises ConfigError for sizes that cannot work."""
    model = read_model_config(options.model_config, DTYPE_BYTES[options.dtype])
    shape = shape_of_rank(model, options.tp, DTYPE_BYTES[options.dtype])
    crossover = Crossover.from_options(options, model, shape)
    print(
        f"Cheapest path of a prefill layer at TP {options.tp}, PCP {options.pcp}, "
        f"{counted(crossover.num_shards, 'shard')} of the cache:\n"
        f"K {PathName.KEYS}, Q {PathName.QUERIES}, ring. Rows: new tokens; columns: tokens of context.\n"
    )
    rows = [("", *(f"{context:,}" for context in CONTEXTS))]
    rows += [(f"{new:,}", *(LETTERS[crossover.choose(new, context)] for context in CONTEXTS)) for new in CHUNKS]
    print("\n".join(align(rows, right=range(len(rows[0])))) + "\n")
    for new in CHUNKS:
        print(f"{new:>9,} new tokens: {crossover.describe(new)}")
    if options.png:
        draw(crossover, options.png)
    return 0


def shape_of_rank(model: ModelShape, tp: int, element_bytes: int) -> AttentionShape:
    """Attention of one of `tp` ranks. MLA expands latents; the rotary part, which is only copied, counts as latent."""
    query_heads = ceil(model.num_query_heads / tp)
    entry_size = model.entry_bytes // element_bytes
    return AttentionShape(
        query_heads=query_heads,
        kv_heads=1 if model.mla else ceil(model.num_kv_heads / tp),
        key_size=model.key_dim,
        value_size=model.value_dim,
        entry_size=entry_size,
        element_bytes=element_bytes,
        expand_flops=2 * query_heads * entry_size * (model.key_dim + model.value_dim) if model.mla else 0,
    )


@dataclass(frozen=True, slots=True)
class Crossover:
    """The cheapest path as a function of new tokens and context."""

    shape: AttentionShape
    rates: Rates
    pcp: int
    num_shards: int
    workspace_tokens: int
    paths: tuple[PathName, ...] = tuple(PathName)
    free_bytes: int | None = None

    @classmethod
    def from_options(cls, options: argparse.Namespace, model: ModelShape, shape: AttentionShape) -> Crossover:
        """Raises ConfigError for a number of shards that PCP does not allow."""
        allowed = sorted({1, options.pcp, options.tp * options.pcp})
        num_shards = options.pcp if options.shards is None else options.shards
        if num_shards not in allowed:
            raise config_error(
                f"--shards with --tp {options.tp} and --pcp {options.pcp}",
                got=num_shards,
                allowed=", ".join(map(str, allowed)),
                remedy="Choose one of these.",
            )
        rates = Rates(
            flops_per_s=options.tflops * 1e12,
            link_bytes_per_s=options.link_gb_per_s * 1e9,
            memory_bytes_per_s=options.memory_gb_per_s * 1e9,
            exchange_s=options.exchange_us * 1e-6,
            overlap=options.overlap_percent / 100,
        )
        travels_absorbed = model.mla and num_shards > options.pcp
        paths = (PathName.KEYS, PathName.RING) if travels_absorbed else tuple(PathName)
        free_bytes = None if options.free_tokens is None else options.free_tokens * shape.entry_bytes
        return cls(shape, rates, options.pcp, num_shards, options.workspace_tokens, paths, free_bytes)

    def choose(self, new: int, context: int) -> PathName:
        batch = Batch((new,), (context,), self.pcp, self.num_shards, self.workspace_tokens)
        return choose_path(self.shape, batch, self.rates, self.paths, self.free_bytes)

    def flips(self, new: int) -> Iterator[tuple[int, PathName]]:
        """(context, path): the path that is cheapest from there on."""
        yield 0, self.choose(new, 0)
        for low, high in pairwise(CONTEXTS):
            before, after = self.choose(new, low), self.choose(new, high)
            if before != after:
                yield self._first_of(after, new, low, high), after

    def _first_of(self, path: PathName, new: int, low: int, high: int) -> int:
        """The least context in (low, high] from which `path` is chosen."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.choose(new, middle) == path else (middle, high)
        return high

    def describe(self, new: int) -> str:
        (_, first), *later = self.flips(new)
        return "; ".join([str(first), *(f"{path} from {context:,} tokens of context" for context, path in later)])


def draw(crossover: Crossover, path: str) -> None:
    """Writes the map of paths as a picture. ConfigError without matplotlib, or where the file cannot be written."""
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error
    new_tokens = [CHUNKS[0] * (CHUNKS[-1] / CHUNKS[0]) ** (point / _MAP_POINTS) for point in range(_MAP_POINTS + 1)]
    contexts = [CONTEXTS[1] * (CONTEXTS[-1] / CONTEXTS[1]) ** (point / _MAP_POINTS) for point in range(_MAP_POINTS + 1)]
    names = list(PathName)
    chosen = [[names.index(crossover.choose(int(new), int(context))) for context in contexts] for new in new_tokens]
    figure = Figure(figsize=(8, 5.5), layout="constrained", dpi=110)
    axis: Any = figure.subplots()
    axis.pcolormesh(
        contexts, new_tokens, chosen, cmap=ListedColormap([_COLORS[name] for name in names]), vmin=0, vmax=2
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("tokens of context")
    axis.set_ylabel("new tokens")
    axis.set_title(f"Cheapest path, PCP {crossover.pcp}, {counted(crossover.num_shards, 'shard')} of the cache")
    figure.legend(
        handles=[Patch(facecolor=_COLORS[name], label=str(name)) for name in names], loc="outside lower center", ncols=3
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"picture file {Path(path)}: {error}; choose a .png, .svg or .pdf that can be written"
        ) from None
