"""`python -m kvweave plan`: who sends what to whom between two layouts, in words, tables and a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
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
    vllm_notes,
)
from layouts.errors import config_error
from layouts.explain import crossing, describe_exchanges, describe_idle, describe_routes, draw_table, plan_tables
from layouts.plan import TransferPlan, plan_transfer
from layouts.routes import Route
from layouts.sharing import SharedPlan, share_replicas
from layouts.volume import Volume, plan_volume, predict_shared_volume, predict_volume
from layouts.words import counted

_DRAWN_BLOCKS = 8
_MAX_EXCHANGES = 1 << 16


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
    add_replicas_option(parser)
    parser.add_argument("--png", metavar="FILE", help="also draw the two tables into this file (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError for sizes that cannot work."""
    cache = cache_sizes(options)
    source = parse_layout("--source", options.source, cache)
    target = parse_layout("--target", options.target, cache)
    plan = plan_transfer(source, target, options.start, options.tokens)
    volumes = [count(source, target, plan.start, plan.stop) for count in (predict_volume, predict_shared_volume)]
    replicas = Replicas(options.replicas, *(volume.num_entries * cache.entry_bytes for volume in volumes))
    carried = _shared(plan) if replicas.shared else plan
    tables = plan_tables(plan, _DRAWN_BLOCKS)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((110, 24)).columns
    lines = [
        f"{cache.name}.",
        *_summary(plan, crossing(carried), volumes[replicas.shared], cache),
        replicas.explanation,
        *vllm_notes(source=source, target=target),
        "",
        *describe_routes(carried, cache.entry_bytes),
        "",
        *describe_idle(carried),
        *_exchange_lines(carried, cache),
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


def _shared(plan: TransferPlan) -> SharedPlan:
    """The shared plan. Raises ConfigError where so many ranks are replicas that it would be too long to make."""
    numbers = Counter(plan.target.holdings).values()
    num_exchanges = sum(number * (number - 1) for number in numbers)
    if num_exchanges > _MAX_EXCHANGES:
        raise config_error(
            "--replicas",
            got=f"{num_exchanges:,} exchanges between target ranks",
            allowed=f"up to {_MAX_EXCHANGES:,}",
            remedy="Pass --replicas fetch, or a smaller tp.",
        )
    return share_replicas(plan)


def _summary(plan: TransferPlan, routes: Sequence[Route], moved: Volume, cache: CacheSizes) -> list[str]:
    """`moved` is what the routes move between the nodes."""
    filled = plan_volume(plan)
    num_runs = sum(len(route.runs) for route in routes)
    num_bytes, padding = (entries * cache.entry_bytes for entries in (moved.num_entries, moved.num_padding_entries))
    return [
        f"{counted(plan.stop, 'token')}, of which the target has {plan.start:,}: {counted(num_runs, 'run')} "
        f"in {counted(len(routes), 'message')}, {counted(num_bytes, 'byte')}.",
        f"{counted(filled.num_listed_blocks, 'listed block')}, {filled.num_empty_blocks:,} of them empty and skipped; "
        f"whole source blocks would add {counted(padding, 'byte')} of padding.",
    ]


def _exchange_lines(carried: TransferPlan | SharedPlan, cache: CacheSizes) -> list[str]:
    if not isinstance(carried, SharedPlan) or not carried.exchanges:
        return []
    lines = describe_exchanges(carried, cache.entry_bytes)
    return ["", "Inside the target node, once a rank has read its part:", "", *lines]
