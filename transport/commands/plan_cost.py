"""`python -m kvweave plan --cost`: which path each read of a plan would take, and what that rests on.

Prices the plan for caches as kvweave's own pages lay them out, with blocks in order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from layouts import Placement, TransferPlan, plan_transfer
from layouts.commands import plan as plan_command
from layouts.commands.options import cache_sizes, parse_layout
from layouts.errors import config_error
from transport.cost import PATHS, ReadCost, ReadSize
from transport.regions import Region, regions_of_rank
from transport.segments import Segments, lower_route

SEGMENT_US, COPY_GB_PER_S = 5.0, 4.0
"""Defaults: about what NIXL over shared memory and two processor cores make."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`, and those of the price."""
    plan_command.add_options(parser)
    parser.add_argument("--cost", action="store_true", help="also print which path each read takes, and why")
    parser.add_argument(
        "--segment-us", type=float, default=SEGMENT_US, metavar="US", help=f"cost of one more piece ({SEGMENT_US:g})"
    )
    parser.add_argument(
        "--copy-gb-per-s", type=float, default=COPY_GB_PER_S, metavar="G", help=f"speed of copies ({COPY_GB_PER_S:g})"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the plan, then the prices."""
    if options.copy_gb_per_s <= 0 or options.segment_us < 0:
        raise config_error(
            "--segment-us, --copy-gb-per-s",
            got=f"{options.segment_us:g}, {options.copy_gb_per_s:g}",
            allowed="0 or more, more than 0",
            remedy="Take those that a decode node logs as `cost of reads`.",
        )
    code = plan_command.run(options)
    if options.cost:
        cache = cache_sizes(options)
        source = parse_layout("--source", options.source, cache)
        target = parse_layout("--target", options.target, cache)
        plan = plan_transfer(source, target, options.start, options.tokens)
        cost = ReadCost(1e-6 * options.segment_us, 1e-9 / options.copy_gb_per_s)
        print("\n".join(["", *describe_costs(plan, cache.entry_bytes, cost)]))
    return code


def describe_costs(plan: TransferPlan, entry_bytes: int, cost: ReadCost) -> Iterator[str]:
    """One line for each read: its pieces, the extra milliseconds of each path, and the cheapest."""
    yield f"Reads, with {cost}; extra milliseconds of each path beyond moving the bytes:"
    yield ""
    yield f"{'read':>10} {'bytes':>13} {'pieces':>9} {'at source':>9} {'at reader':>9}" + "".join(
        f"{path:>10}" for path in PATHS
    )
    for route in plan.routes:
        source = _regions(plan.source, route.source_rank, plan.stop, entry_bytes)
        target = _regions(plan.target, route.target_rank, plan.stop, entry_bytes)
        blocks = [np.arange(side.interleave.num_virtual_blocks(plan.stop)) for side in (plan.source, plan.target)]
        segments: Segments = lower_route(route, source, blocks[0], target, blocks[1])
        size = ReadSize.of(segments)
        prices = "".join(f"{1e3 * cost.extra_s(path, size):>10.3f}" for path in PATHS)
        yield (
            f"{f'{route.source_rank} -> {route.target_rank}':>10} {size.num_bytes:>13,} {size.num_segments:>9,} "
            f"{size.num_source_pieces:>9,} {size.num_target_pieces:>9,}{prices}  {cost.cheapest(size)}"
        )


def _regions(placement: Placement, rank: int, num_tokens: int, entry_bytes: int) -> dict[int, Region]:
    interleave = placement.interleave
    sizes = interleave.num_virtual_blocks(num_tokens), interleave.block_tokens, entry_bytes
    return regions_of_rank(placement.holdings[rank], *sizes)
