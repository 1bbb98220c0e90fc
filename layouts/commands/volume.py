"""`python -m kvweave volume`: what one pair of layouts costs per transfer, for one or many prompt lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from layouts.commands.options import (
    LAYOUT_HELP,
    MAX_TOKENS,
    CacheSizes,
    Replicas,
    add_cache_options,
    add_replicas_option,
    cache_sizes,
    integer,
    parse_layout,
)
from layouts.errors import config_error
from layouts.explain import describe
from layouts.volume import Volume, predict_shared_volume, predict_volume
from layouts.words import align

HEADLINE = (
    "tokens",
    "prompts",
    "bytes",
    "blocks",
    "empty",
    "messages",
    "segments",
    "bytes/segment",
    "whole blocks add",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `volume`."""
    parser.add_argument("--source", required=True, metavar="SIZES", help=f"layout of the prefill node; {LAYOUT_HELP}")
    parser.add_argument("--target", required=True, metavar="SIZES", help="layout of the decode node, written likewise")
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="N[xCOUNT],...",
        help="prompt lengths, each with how many prompts have it: 512x70,8192x25,131072x5",
    )
    parser.add_argument(
        "--start", type=integer(0, MAX_TOKENS), default=0, metavar="N", help="tokens the target has already (default 0)"
    )
    add_cache_options(parser)
    add_replicas_option(parser)


def run(options: argparse.Namespace) -> int:
    """Prints one line per length and the sum. Raises ConfigError for sizes that cannot work."""
    cache = cache_sizes(options)
    source = parse_layout("--source", options.source, cache)
    target = parse_layout("--target", options.target, cache)
    lengths = parse_lengths(options.tokens)
    fetched, shared = (
        [count(source, target, min(options.start, length), length) for length, _ in lengths]
        for count in (predict_volume, predict_shared_volume)
    )
    replicas = Replicas(options.replicas, *(_num_bytes(volumes, lengths, cache) for volumes in (fetched, shared)))
    counts = "over all target ranks" if not replicas.shared else "of replicas at the target counted once"
    for line in [
        f"source: {describe(source.placement)}",
        f"target: {describe(target.placement)}",
        f"model:  {cache.name}; bytes, blocks, messages and segments per prompt, {counts}",
        replicas.explanation,
        "",
        *align(_rows(shared if replicas.shared else fetched, lengths, cache), right=range(len(HEADLINE))),
    ]:
        print(line)
    return 0


def _num_bytes(volumes: Sequence[Volume], lengths: Sequence[tuple[int, int]], cache: CacheSizes) -> int:
    """Of all prompts together."""
    entries = sum(volume.num_entries * count for volume, (_, count) in zip(volumes, lengths, strict=True))
    return entries * cache.entry_bytes


def parse_lengths(text: str) -> list[tuple[int, int]]:
    """(length, number of prompts) pairs from `512x70,8192`.

    Raises:
        ConfigError: naming the part that is neither.
    """
    lengths = []
    for part in text.split(","):
        length, separator, count = part.strip().partition("x")
        try:
            lengths.append((integer(1, MAX_TOKENS)(length), integer(1, MAX_TOKENS)(count if separator else "1")))
        except argparse.ArgumentTypeError:
            raise config_error(
                "--tokens",
                got=repr(part),
                allowed=f"N or NxCOUNT with integers from 1 to {MAX_TOKENS}",
                remedy="Write 512x70,8192x25, for example.",
            ) from None
    return lengths


def _rows(volumes: Sequence[Volume], lengths: Sequence[tuple[int, int]], cache: CacheSizes) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [HEADLINE]
    rows += [
        _row(f"{length:,}", count, [(volume, 1)], cache)
        for (length, count), volume in zip(lengths, volumes, strict=True)
    ]
    if len(lengths) > 1:
        total = sum(count for _, count in lengths)
        weighted = [(volume, count) for (_, count), volume in zip(lengths, volumes, strict=True)]
        rows.append(_row("all", total, weighted, cache))
    return rows


def _row(name: str, num_prompts: int, weighted: Sequence[tuple[Volume, int]], cache: CacheSizes) -> tuple[str, ...]:
    """One line; `weighted` has volumes with the number of times each counts."""
    entries, padding, blocks, empty, messages, segments = (
        sum(getattr(volume, f"num_{field}") * count for volume, count in weighted)
        for field in ("entries", "padding_entries", "real_blocks", "empty_blocks", "messages", "segments")
    )
    share = f"{100 * padding / entries:,.1f} %" if entries else "-"
    return (
        name,
        f"{num_prompts:,}",
        f"{entries * cache.entry_bytes:,}",
        f"{blocks:,}",
        f"{empty:,}",
        f"{messages:,}",
        f"{segments:,}",
        f"{entries * cache.entry_bytes // segments:,}" if segments else "-",
        share,
    )
