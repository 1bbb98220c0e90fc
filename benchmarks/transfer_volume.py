"""How much a KV cache transfer ships: whole blocks with interleave 1 or block size, against exactly the tokens.

    python -m benchmarks.transfer_volume [--json FILE] [--markdown FILE] [--png-dir DIR] [--check]

Pure arithmetic, no GPU and no network: every number is computed by formula, and counted again in plans.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from benchmarks.volume_cases import (
    BLOCK_SIZES,
    CP_SIZES,
    DISTRIBUTIONS,
    LENGTHS,
    MLA_576,
    MODELS,
    PAIR_LENGTHS,
    PAIRS,
    Case,
    Overhead,
    Resharding,
    all_cases,
    as_rows,
    compared,
    count_in_plan,
    overheads,
    price,
    reshardings,
)
from layouts import ConfigError, Volume, predict_volume

CPU_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise: what was measured, what it must be, and whether it is."""

    name: str
    value: str
    goal: str
    met: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Formula against count: how many volumes differ of how many, and what each costs in milliseconds."""

    num_cases: int
    num_different: int
    formula_ms: tuple[float, ...]
    count_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the benchmark found."""

    cases: list[Case]
    overheads: list[Overhead]
    reshardings: list[Resharding]
    comparison: Comparison
    cpu_s: float

    @property
    def short_prompt(self) -> Case:
        """The known case: 16 tokens, blocks of 16, 4 ranks."""
        return price(MLA_576, 4, 16, 16)


def measure() -> Report:
    """Runs everything."""
    began = process_time()
    found = (all_cases(), overheads(), reshardings(), compare())
    return Report(*found, process_time() - began)


def compare() -> Comparison:
    """Prices by formula and counts in plans, and expects the same."""
    formula_ms, count_ms, num_different = [], [], 0
    for source, target, length in compared():
        began = perf_counter()
        predicted = predict_volume(source, target, 0, length)
        priced = perf_counter()
        counted = count_in_plan(source, target, length)
        formula_ms.append(1000 * (priced - began))
        count_ms.append(1000 * (perf_counter() - priced))
        num_different += not agree(predicted, counted)
    return Comparison(len(formula_ms), num_different, tuple(formula_ms), tuple(count_ms))


def agree(predicted: Volume, counted: Volume) -> bool:
    """All numbers are equal; only messages may be more in a plan, which may split a range between replicas."""
    same = [replace(rank, num_messages=0) for rank in predicted.ranks] == [
        replace(rank, num_messages=0) for rank in counted.ranks
    ]
    return same and predicted.num_messages <= counted.num_messages


def goals(report: Report) -> list[Goal]:
    """What must hold, in the order of the report."""
    short, comparison = report.short_prompt, report.comparison
    fill = 100 * short.content_bytes / short.whole_i1_bytes
    exact = [case.exact_i1_bytes / case.content_bytes for case in report.cases]
    exact += [case.exact_ib_bytes / case.content_bytes for case in report.cases]
    worse = sum(
        case.exact_ib_bytes > case.whole_ib_bytes or case.exact_i1_bytes > case.whole_i1_bytes for case in report.cases
    )
    return [
        _equal("blocks of 16 tokens on 4 ranks, B=16, I=1", short.blocks_i1, 4),
        _equal("fill of these blocks, %", fill, 25.0),
        _equal("blocks of the same prompt with I=B", short.blocks_ib, 1),
        _equal("empty blocks skipped with I=B", short.empty_blocks_ib, 3),
        _equal("bytes kvweave ships per byte needed, smallest", min(exact), 1.0),
        _equal("bytes kvweave ships per byte needed, largest", max(exact), 1.0),
        _equal("cases in which whole blocks ship less than kvweave", worse, 0),
        _equal(f"volumes that differ, formula against plan, of {comparison.num_cases}", comparison.num_different, 0),
        Goal("CPU time of the benchmark, s", f"{report.cpu_s:.1f}", f"<= {CPU_LIMIT_S:g}", report.cpu_s <= CPU_LIMIT_S),
    ]


def _equal(name: str, value: float, goal: float) -> Goal:
    return Goal(name, f"{value:g}", f"{goal:g}", value == goal)


def configuration() -> dict[str, object]:
    """Everything that the numbers depend on."""
    return {
        "models": [asdict(model) for model in MODELS],
        "cp_sizes": CP_SIZES,
        "block_sizes": BLOCK_SIZES,
        "lengths": LENGTHS,
        "distributions": [asdict(distribution) for distribution in DISTRIBUTIONS],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def as_json(report: Report) -> dict[str, object]:
    """The whole report; times as median, minimum and maximum."""
    comparison = report.comparison
    return {
        "configuration": configuration(),
        "goals": [asdict(goal) for goal in goals(report)],
        "cases": as_rows(report.cases),
        "overheads": as_rows(report.overheads),
        "reshardings": as_rows(report.reshardings),
        "pairs": [dict(zip(_PAIR_COLUMNS, row, strict=True)) for row in pair_rows()],
        "formula_ms": _spread(comparison.formula_ms),
        "count_ms": _spread(comparison.count_ms),
        "num_compared": comparison.num_cases,
        "cpu_s": round(report.cpu_s, 2),
    }


_PAIR_COLUMNS = (
    "pair",
    "model",
    "prefill node",
    "decode node",
    "tokens",
    "MiB moved",
    "MiB in whole blocks",
    "messages",
    "segments",
    "KiB per segment",
    "empty blocks skipped",
)


def pair_rows() -> list[tuple[str, ...]]:
    """What unequal layouts exchange, over all decode ranks."""
    rows = []
    for pair in PAIRS:
        for length in PAIR_LENGTHS:
            volume = predict_volume(*pair.layouts(), 0, length)
            moved, whole = (
                entries * pair.model.entry_bytes for entries in (volume.num_entries, volume.num_whole_block_entries)
            )
            sides = (" ".join(f"{key}={size}" for key, size in side.items()) for side in (pair.source, pair.target))
            rows.append(
                (
                    pair.name,
                    pair.model.name,
                    *sides,
                    f"{length:,}",
                    f"{moved / 2**20:,.1f}",
                    f"{whole / 2**20:,.1f}",
                    f"{volume.num_messages:,}",
                    f"{volume.num_segments:,}",
                    f"{moved / volume.num_segments / 1024:,.1f}",
                    f"{volume.num_empty_blocks:,}",
                )
            )
    return rows


def as_markdown(report: Report) -> str:
    """The tables for `docs/volume.md`."""
    short = [price(model, 4, 16, 16) for model in MODELS]
    overhead = [
        (row.distribution, str(row.cp), str(row.block_tokens), *map(_percent, (row.listed, row.whole_i1, row.whole_ib)))
        for row in report.overheads
        if row.cp > 1
    ]
    lengths = [case for case in report.cases if (case.cp, case.block_tokens) == (8, 64) and case.num_tokens in _SHOWN]
    parts = [
        ("16 tokens, blocks of 16, 4 ranks", _SHORT_COLUMNS, [_case_row(case) for case in short]),
        ("8 ranks, blocks of 64", _SHORT_COLUMNS, [_case_row(case) for case in lengths]),
        (
            "Padding by load, % of the bytes needed (kvweave: 0)",
            ("load", "ranks", "block", "every listed block", "whole blocks, I=1", "whole blocks, I=B"),
            overhead,
        ),
        ("Unequal layouts", _PAIR_COLUMNS, pair_rows()),
    ]
    return "\n".join(f"### {title}\n\n{_table(columns, rows)}\n" for title, columns, rows in parts)


_SHOWN = (1, 16, 64, 512, 1000, 4096, 32_768, 131_072)
_SHORT_COLUMNS = (
    "model",
    "tokens",
    "KiB needed = kvweave",
    "every listed block",
    "whole blocks, I=1",
    "whole blocks, I=B",
    "blocks I=1",
    "blocks I=B",
    "empty skipped",
    "messages I=1 / I=B",
    "segments I=1 / I=B",
)


def _case_row(case: Case) -> tuple[str, ...]:
    sizes = (case.content_bytes, case.listed_bytes, case.whole_i1_bytes, case.whole_ib_bytes)
    return (
        case.model,
        f"{case.num_tokens:,}",
        *(f"{size / 1024:,.0f}" for size in sizes),
        f"{case.blocks_i1:,}",
        f"{case.blocks_ib:,}",
        f"{case.empty_blocks_ib:,}",
        f"{case.messages_i1} / {case.messages_ib}",
        f"{case.segments_i1:,} / {case.segments_ib:,}",
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):,.1f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _spread(times_ms: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(median(times_ms), 3),
        "minimum": round(min(times_ms), 3),
        "maximum": round(max(times_ms), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit code 1 with `--check` when a goal is missed, 2 when a file cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer_volume", description="Volume of transfers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--png-dir", type=Path, metavar="DIR", help="write the pictures (needs matplotlib)")
    parser.add_argument("--check", action="store_true", help="print one line per goal; exit 1 when one is missed")
    options = parser.parse_args(arguments)
    report = measure()
    try:
        _write(report, options)
    except (ConfigError, OSError) as error:
        print(f"python -m benchmarks.transfer_volume: error: {error}", file=sys.stderr)
        return 2
    if not options.check:
        print("\n".join(f"{name}: {value}" for name, value in configuration().items()))
        print(f"\n{as_markdown(report)}")
        for name, times in (("formula", report.comparison.formula_ms), ("plan and count", report.comparison.count_ms)):
            print(f"{name}, ms per volume over {len(times)}: {_spread(times)}")
        return 0
    checked = goals(report)
    for goal in checked:
        print(f"{'ok  ' if goal.met else 'MISS'} {goal.name}: {goal.value} (goal {goal.goal})")
    return 0 if all(goal.met for goal in checked) else 1


def _write(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(as_markdown(report), encoding="utf-8")
    if options.png_dir:
        from benchmarks.volume_plots import draw_all

        options.png_dir.mkdir(parents=True, exist_ok=True)
        draw_all(report.cases, report.overheads, report.reshardings, options.png_dir)


if __name__ == "__main__":
    sys.exit(main())
