"""How long a transfer plan and its byte segments take: `python -m benchmarks.plan_speed`.

Times are CPU times of one core, so that other work on the machine counts little. `--check` compares with the goals.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from layouts import ParallelLayout, Span, TransferPlan, plan_transfer
from layouts.commands.options import integer
from layouts.interleave import IntArray
from transport.regions import PLAIN, Region
from transport.segments import lower_route

TOKEN_BYTES = 576 * 2  # one MLA latent in bfloat16
SOURCE = ParallelLayout(tp=8, dcp=8, mla=True, interleave_tokens=64, block_tokens=64, num_layers=61)
TARGET = replace(SOURCE, tp=4, dcp=4)
REPLICATED = replace(TARGET, tp=32)  # eight times the ranks, the same runs
LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 20)
SHORT, LONG = 1 << 15, 1 << 20
INTERLEAVES = (1, 8, 64)
MAX_LOWERED = 1 << 20
"""Segments of all layers that are computed with their addresses; more would travel packed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds over all repetitions."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}..{self.most:.2f})"


@dataclass(frozen=True, slots=True)
class Timing:
    """One row: a plan with the sizes of its segments, the segments themselves, and the memory of the plan."""

    num_tokens: int
    interleave_tokens: int
    num_target_ranks: int
    num_runs: int
    num_segments: int
    segment_bytes: int
    plan_ms: Spread
    lowered_ms: Spread | None
    """Plan and all segments with both addresses, as a transport reads them; None for more than MAX_LOWERED of these."""

    peak_bytes: int

    @property
    def bytes_per_run(self) -> float:
        """Memory that planning takes at its peak."""
        return self.peak_bytes / self.num_runs


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that must not exceed its goal."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def is_met(self) -> bool:
        """Whether it does not."""
        return self.value <= self.most

    def __str__(self) -> str:
        value, most = f"{self.value:.2f} {self.unit}", f"{self.most:g} {self.unit}"
        return f"{self.name:66} {value:>14}   goal <= {most:14} {'met' if self.is_met else 'MISSED'}"


def segment_sizes(plan: TransferPlan) -> tuple[int, int]:
    """Sizes each segment; layers, and routes with the same runs, have the same. Gives number and bytes of all."""
    sizes: dict[int, tuple[int, int]] = {}
    number, num_bytes = 0, 0
    for route in plan.routes:
        if id(route.runs) not in sizes:
            of_one_head = route.runs["num_tokens"] * TOKEN_BYTES
            sizes[id(route.runs)] = len(of_one_head), int(of_one_head.sum())
        segments, of_one_layer = sizes[id(route.runs)]
        number += segments * route.layers.size
        num_bytes += of_one_layer * route.heads.size * route.layers.size
    return number, num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """The caches of one rank of each side, and block tables in no order, as after hours of serving."""

    source: dict[int, Region]
    target: dict[int, Region]
    source_block_ids: IntArray
    target_block_ids: IntArray

    @classmethod
    def of(cls, source: ParallelLayout, target: ParallelLayout, num_tokens: int) -> Caches:
        """Large enough for one request."""
        random, sides = np.random.default_rng(0), []
        for layout in (source, target):
            num_blocks = layout.interleave.num_virtual_blocks(num_tokens)
            regions = {layer: _region(layer, num_blocks, layout.block_tokens) for layer in range(layout.num_layers)}
            sides.append((regions, random.permutation(num_blocks)))
        (source_regions, source_ids), (target_regions, target_ids) = sides
        return cls(source_regions, target_regions, source_ids, target_ids)

    def lower(self, plan: TransferPlan) -> tuple[int, int]:
        """Makes all segments of a plan: (number, bytes)."""
        number, num_bytes = 0, 0
        for route in plan.routes:
            segments = lower_route(route, self.source, self.source_block_ids, self.target, self.target_block_ids)
            number += len(segments)
            num_bytes += segments.num_bytes
        return number, num_bytes


def _region(layer: int, num_blocks: int, block_tokens: int) -> Region:
    block_bytes = block_tokens * TOKEN_BYTES
    return Region(
        layer=layer,
        heads=Span(0, 1),
        base=layer * num_blocks * block_bytes,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        block_stride=block_bytes,
        head_stride=TOKEN_BYTES,
        token_stride=TOKEN_BYTES,
        token_bytes=TOKEN_BYTES,
        page=PLAIN,
        device="cpu",
    )


def measure(num_tokens: int, interleave_tokens: int, repetitions: int, target: ParallelLayout = TARGET) -> Timing:
    """Plans again and again from the two layouts."""
    source, target = (replace(layout, interleave_tokens=interleave_tokens) for layout in (SOURCE, target))

    def make() -> TransferPlan:
        return plan_transfer(source, target, 0, num_tokens)

    plan = make()
    number, num_bytes = segment_sizes(plan)
    lowered_ms = None
    if number <= MAX_LOWERED:
        caches = Caches.of(source, target, num_tokens)
        lowered_ms = _timed(lambda: caches.lower(make()), repetitions)
    return Timing(
        num_tokens=num_tokens,
        interleave_tokens=interleave_tokens,
        num_target_ranks=target.num_ranks,
        num_runs=sum(len(runs) for runs in {id(route.runs): route.runs for route in plan.routes}.values()),
        num_segments=number,
        segment_bytes=num_bytes,
        plan_ms=_timed(lambda: segment_sizes(make()), repetitions),
        lowered_ms=lowered_ms,
        peak_bytes=_peak_bytes(make),
    )


def _timed(work: Callable[[], object], repetitions: int) -> Spread:
    times = []
    for _ in range(repetitions + 1):  # the first one fills caches
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return Spread(statistics.median(times[1:]), min(times[1:]), max(times[1:]))


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def goals(rows: Sequence[Timing]) -> list[Goal]:
    """What must hold: times, memory by runs, and that neither tokens nor ranks cost what runs do not."""
    by_case = {(row.num_tokens, row.interleave_tokens, row.num_target_ranks): row for row in rows}
    short, long = ({tokens: by_case[n, tokens, TARGET.num_ranks] for tokens in INTERLEAVES} for n in (SHORT, LONG))
    wide, lowered = by_case[LONG, 1, REPLICATED.num_ranks], long[64].lowered_ms
    found = [
        Goal(f"plan and segment sizes, {row.num_tokens:,} tokens, I={tokens}", row.plan_ms.median, most, "ms")
        for of_length, most in ((long, 150.0), (short, 5.0))
        for tokens, row in of_length.items()
    ]
    if lowered is not None:
        name = f"plan and {long[64].num_segments:,} segments with addresses, {LONG:,} tokens, I=64"
        found.append(Goal(name, lowered.median, 150.0, "ms"))
    return [
        *found,
        Goal("memory at the peak per run, 1,048,576 runs", long[1].bytes_per_run, 200.0, "bytes"),
        _ratio("memory per run, 1,048,576 runs against 131,072", long[1].bytes_per_run, long[8].bytes_per_run, 1.5),
        _ratio("time of 32 times the tokens in half the runs", long[64].plan_ms.median, short[1].plan_ms.median, 2.5),
        _ratio("time of 8 times the ranks in the same runs", wide.plan_ms.median, long[1].plan_ms.median, 1.5),
    ]


def _ratio(name: str, value: float, compared_with: float, most: float) -> Goal:
    return Goal(name, value / compared_with, most, "times")


def configuration(repetitions: int) -> dict[str, object]:
    """Everything that the numbers depend on."""
    return {
        "source": str(SOURCE),
        "target": str(TARGET),
        "token_bytes": TOKEN_BYTES,
        "repetitions": repetitions,
        "clock": "CPU time of one core",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def table(rows: Sequence[Timing]) -> list[str]:
    """One line per row; times as median (least..most)."""
    head = f"{'tokens':>9} {'I':>3} {'ranks':>5} {'runs':>9} {'segments':>10} {'plan + sizes, ms':>24} "
    lines = [f"{head}{'plan + addresses, ms':>26} {'bytes per run':>14}"]
    for row in rows:
        lines.append(
            f"{row.num_tokens:>9,} {row.interleave_tokens:>3} {row.num_target_ranks:>5} {row.num_runs:>9,} "
            f"{row.num_segments:>10,} {row.plan_ms!s:>24} {row.lowered_ms or '-'!s:>26} {row.bytes_per_run:>14,.0f}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table over lengths and interleaves; with --check one line per goal, exit code 1 on a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_speed", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the goals; exit 1 when one is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--repetitions", type=integer(7, 1000), default=15, metavar="N", help="at least 7 (15)")
    options = parser.parse_args(arguments)
    used = configuration(options.repetitions)
    print("\n".join(f"{name:12} {value}" for name, value in used.items()))
    rows = [measure(n, tokens, options.repetitions) for tokens in INTERLEAVES for n in LENGTHS]
    rows.append(measure(LONG, 1, options.repetitions, REPLICATED))
    print("\n".join(("", *table(rows))))
    checked = goals(rows)
    if options.json:
        goal_rows, timings = ([asdict(row) for row in found] for found in (checked, rows))
        figures = {"configuration": used, "goals": goal_rows, "rows": timings}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if not options.check:
        return 0
    print("\n".join(("", *map(str, checked))))
    return 0 if all(goal.is_met for goal in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
