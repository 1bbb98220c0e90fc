"""How long a transfer plan and the sizes of its byte segments take: `python -m benchmarks.plan_speed`.

Times are CPU times of one core, so that other work on the machine does not count. `--check` compares with the goals.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from layouts import ParallelLayout, TransferPlan, plan_transfer
from layouts.commands.options import integer

TOKEN_BYTES = 576 * 2  # one MLA latent in bfloat16
SOURCE = ParallelLayout(tp=8, dcp=8, mla=True, interleave_tokens=64, block_tokens=64, num_layers=61)
TARGET = replace(SOURCE, tp=4, dcp=4)
LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 20)
INTERLEAVES = (1, 8, 64)
GOALS_MS = {(1 << 20, 64): 150.0, (1 << 20, 1): 150.0, (1 << 15, 64): 5.0, (1 << 15, 1): 5.0}


@dataclass(frozen=True, slots=True)
class Timing:
    """One row: milliseconds over all repetitions."""

    num_tokens: int
    interleave_tokens: int
    num_runs: int
    segment_bytes: int
    median_ms: float
    least_ms: float
    most_ms: float


def segment_sizes(plan: TransferPlan) -> int:
    """Computes the size of each segment in each layer, and gives their sum: the bytes the plan moves."""
    total = 0
    for route in plan.routes:
        sizes = route.runs["num_tokens"] * (TOKEN_BYTES * route.heads.size)
        total += int(sizes.sum()) * route.layers.size
    return total


def measure(num_tokens: int, interleave_tokens: int, repetitions: int) -> Timing:
    """Plans again and again from the two layouts."""
    source, target = (replace(layout, interleave_tokens=interleave_tokens) for layout in (SOURCE, TARGET))
    times, num_runs, num_bytes = [], 0, 0
    for _ in range(repetitions + 1):  # the first one fills caches
        began = time.process_time()
        plan = plan_transfer(source, target, 0, num_tokens)
        num_bytes = segment_sizes(plan)
        times.append(1e3 * (time.process_time() - began))
        num_runs = sum(len(route.runs) for route in plan.routes)
    times = times[1:]
    return Timing(num_tokens, interleave_tokens, num_runs, num_bytes, statistics.median(times), min(times), max(times))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table over lengths and interleaves; with --check one line per goal, exit code 1 on a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_speed", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--repetitions", type=integer(7, 1000), default=9, metavar="N", help="at least 7 (9)")
    options = parser.parse_args(arguments)
    configuration = {
        "source": str(SOURCE),
        "target": str(TARGET),
        "token_bytes": TOKEN_BYTES,
        "repetitions": options.repetitions,
        "clock": "CPU time of one core",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
    for name, value in configuration.items():
        print(f"{name:12} {value}")
    rows = [measure(n, tokens, options.repetitions) for tokens in INTERLEAVES for n in LENGTHS]
    print(f"\n{'tokens':>9} {'I':>3} {'runs':>9} {'median ms':>10} {'least':>8} {'most':>8} {'ns per run':>11}")
    for row in rows:
        print(
            f"{row.num_tokens:>9,} {row.interleave_tokens:>3} {row.num_runs:>9,} {row.median_ms:>10.2f} "
            f"{row.least_ms:>8.2f} {row.most_ms:>8.2f} {1e6 * row.median_ms / row.num_runs:>11.0f}"
        )
    if options.json:
        figures = {"configuration": configuration, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if options.check and not _goals_met(rows) else 0


def _goals_met(rows: Sequence[Timing]) -> bool:
    print()
    met = True
    for row in rows:
        goal = GOALS_MS.get((row.num_tokens, row.interleave_tokens))
        if goal is not None:
            missed = row.median_ms > goal
            met = met and not missed
            name = f"plan of {row.num_tokens:,} tokens, I={row.interleave_tokens}"
            print(f"{name:36} {row.median_ms:8.2f} ms   goal <= {goal:g} ms   {'MISSED' if missed else 'met'}")
    return met


if __name__ == "__main__":
    sys.exit(main())
