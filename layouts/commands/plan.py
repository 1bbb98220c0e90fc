"""`python -m kvweave plan`: who sends what to whom between two layouts, in words, tables and a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from layouts.commands.options import (
    LAYOUT_HELP,
    MAX_TOKENS,
    CacheSizes,
    add_cache_options,
    cache_sizes,
    integer,
    parse_layout,
)
from layouts.explain import describe_idle, describe_routes, draw_table, plan_tables
from layouts.plan import TransferPlan, plan_transfer
from layouts.volume import plan_volume
from layouts.words import counted

_DRAWN_BLOCKS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plan`."""
    parser.add_argument("--source", required=True, metavar="SIZES", help=f"layout of the prefill node; {LAYOUT_HELP}")
    parser.add_argument("--target", required=True, metavar="SIZES", help="layout of the decode node, written likewise")
    parser.add_argument(
        "--tokens", required=True, type=integer(1, MAX_TOKENS), metavar="N", help="tokens of the prompt"
    )
    parser.add_argument(
        "--start", type=integer(0, MAX_TOKENS), default=0, metavar="N", help="tokens the target has already (default 0)"
    )
    add_cache_options(parser)
    parser.add_argument("--png", metavar="FILE", help="also draw the two tables into this file (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError for sizes that cannot work."""
    cache = cache_sizes(options)
    source = parse_layout("--source", options.source, cache)
    target = parse_layout("--target", options.target, cache)
    plan = plan_transfer(source, target, options.start, options.tokens)
    tables = plan_tables(plan, _DRAWN_BLOCKS)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((110, 24)).columns
    lines = [
        *_summary(plan, cache),
        "",
        *describe_routes(plan, cache.entry_bytes),
        "",
        *describe_idle(plan),
        "",
        "Where the positions lie; [n] is the source shard they are on or come from.",
        "",
        *draw_table(tables[0], color=color, width=width),
        "",
        *draw_table(tables[1], color=color, width=width),
    ]
    print("\n".join(lines))
    if options.png:
        from layouts.commands.drawing import draw_tables, save

        save(draw_tables(*tables, start=options.start), options.png)
        print(f"\ndrawn: {options.png}")
    return 0


def _summary(plan: TransferPlan, cache: CacheSizes) -> list[str]:
    volume = plan_volume(plan)
    moved, padding = volume.num_entries * cache.entry_bytes, volume.num_padding_entries * cache.entry_bytes
    return [
        f"{cache.name}.",
        f"{counted(plan.stop, 'token')}, of which the target has {plan.start:,}: {counted(volume.num_runs, 'run')} "
        f"in {counted(volume.num_messages, 'message')}, {counted(moved, 'byte')}.",
        f"{counted(volume.num_listed_blocks, 'listed block')}, {volume.num_empty_blocks:,} of them empty and skipped; "
        f"whole source blocks would add {counted(padding, 'byte')} of padding.",
    ]
