"""Speed, balance and memory of the context-parallel paths: `python -m benchmarks.attention`.

Ranks are processes with one thread each; one rank and several are timed in turn, so that other work on the machine
meets both. Figures that count are ratios of medians. `--check` compares with the goals.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention.cost import PathName, Rates
from attention.local import plan_rows
from attention.step import own_positions
from benchmarks import attention_cases as cases
from benchmarks.attention_ranks import run_ranks
from benchmarks.goals import Goal, Sample, report_goals
from layouts import chunk_swap
from layouts.commands.options import integer
from layouts.words import align

PARTS = ("work", "memory", "decode", "prefill")
NUM_RANKS = 2
DECODE_CONTEXTS = (1 << 13, 1 << 15, 1 << 17)
PREFILL_LENGTHS = (1 << 11, 1 << 12, 1 << 13, 1 << 14)
PREFILL_CONTEXTS = (0, 1 << 13, 1 << 15)
MEMORY_CONTEXTS = (1 << 14, 1 << 17)
MEMORY_WORKSPACE = 4096
WORK_RANKS = (2, 4, 8)
WORK_LENGTHS = (64, 256, 1024, 4096)
FEWEST = 7
"""Repetitions of the points that have a goal; larger ones are repeated less."""
FEW = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one configuration, one rank and several, by what they do."""

    new_tokens: int
    context_tokens: int
    samples: dict[str, Sample]
    chosen: str = ""

    @classmethod
    def of(cls, new_tokens: int, context_tokens: int, seconds: cases.Times, chosen: str = "") -> Timing:
        samples = {name: Sample.of([1e3 * each for each in times]) for name, times in seconds.items()}
        return cls(new_tokens, context_tokens, samples, chosen)

    def ratio(self, name: str) -> float:
        """To one rank."""
        return self.samples[name].median / self.samples["one rank"].median

    @property
    def regret(self) -> float:
        """The chosen path to the best."""
        return self.samples[self.chosen].median / min(self.samples[name].median for name in PathName)


@dataclass(frozen=True, slots=True)
class Work:
    """Counted pairs of row and key, most to least over the ranks."""

    num_ranks: int
    tokens_per_rank: int
    chunk_swap: float
    contiguous: float
    chunk_swap_worst: float
    """Of the next 2 * ranks - 1 lengths, which chunks do not divide."""


def pairs_per_rank(num_tokens: int, num_ranks: int, *, contiguous: bool = False) -> list[int]:
    """Pairs that each rank computes for one prompt."""
    if contiguous:
        rows = np.array_split(np.arange(num_tokens), num_ranks)
    else:
        swap = chunk_swap([num_tokens], num_ranks)
        rows = [own_positions(swap, rank)[0] for rank in range(num_ranks)]
    return [plan_rows([own], lambda _, positions: positions + 1).num_pairs for own in rows]


def imbalance(pairs: Sequence[int]) -> float:
    return max(pairs) / min(pairs)


def measure_work() -> list[Work]:
    rows = []
    for num_ranks in WORK_RANKS:
        for each in WORK_LENGTHS:
            length = num_ranks * each
            uneven = range(length, length + 2 * num_ranks)
            rows.append(
                Work(
                    num_ranks,
                    each,
                    imbalance(pairs_per_rank(length, num_ranks)),
                    imbalance(pairs_per_rank(length, num_ranks, contiguous=True)),
                    max(imbalance(pairs_per_rank(length, num_ranks)) for length in uneven),
                )
            )
    return rows


def measure_memory() -> list[dict[str, int]]:
    return [run_ranks(NUM_RANKS, cases.measure_memory, each, MEMORY_WORKSPACE)[0] for each in MEMORY_CONTEXTS]


def measure_decode(contexts: Sequence[int], repetitions: int) -> Iterator[Timing]:
    for context in contexts:
        times = run_ranks(NUM_RANKS, cases.time_decode, context, repetitions)[0]
        yield Timing.of(1, context, times)


def measure_prefill(
    lengths: Sequence[int], contexts: Sequence[int], repetitions: int, rates: Rates
) -> Iterator[Timing]:
    for new in lengths:
        for context in contexts:
            has_goal = (new, context) == (1 << 13, 0)
            count = repetitions if has_goal or new * (new + 2 * context) <= 1 << 26 else min(FEW, repetitions)
            times = run_ranks(NUM_RANKS, cases.time_prefill, new, context, count)[0]
            yield Timing.of(new, context, times, chosen_path(new, context, rates))


def chosen_path(new: int, context: int, rates: Rates) -> str:
    """What the cost function chooses for NUM_RANKS PCP ranks over which the cache is sharded too."""
    return str(cases.choose_prefill(new, context, NUM_RANKS, rates))


def goals(results: dict[str, Any]) -> Iterator[Goal]:
    """The goals of what was measured."""
    if "work" in results:
        worst = max(row.chunk_swap for row in results["work"])
        yield Goal("work per rank, max/min, 64 and more tokens per rank", worst, "<=", 1.02)
    for row in results.get("memory", []):
        name = f"MLA workspace, peak extra memory to workspace, context {row['context']:,}"
        yield Goal(name, row["peak_bytes"] / row["workspace_bytes"], "<=", 2.0)
    for row in results.get("decode", []):
        if row.context_tokens == 1 << 15:
            yield Goal(f"DCP {NUM_RANKS} decode step at 32k to one rank", row.ratio("all-to-all"), "<=", 0.65)
    for row in results.get("prefill", []):
        if (row.new_tokens, row.context_tokens) == (1 << 13, 0):
            yield Goal(f"PCP {NUM_RANKS} prefill of 8k to one rank", row.ratio(row.chosen), "<=", 0.6)
    if results.get("prefill"):
        yield Goal("chosen path to the best", max(row.regret for row in results["prefill"]), "<=", 1.1)


def print_results(results: dict[str, Any]) -> None:
    if "work" in results:
        print("\nPairs computed, most to least over the ranks (one prompt)")
        table: list[tuple[str, ...]] = [
            ("ranks", "tokens per rank", "chunk swap", "contiguous", "chunk swap, worst uneven length")
        ]
        table += [
            (
                str(row.num_ranks),
                f"{row.tokens_per_rank:,}",
                *(f"{each:.3f}" for each in list(asdict(row).values())[2:]),
            )
            for row in results["work"]
        ]
        print("\n".join(align(table, right=range(5))))
    if "memory" in results:
        print(f"\nMLA decode step, latents gathered through a workspace of {MEMORY_WORKSPACE:,} tokens")
        for row in results["memory"]:
            peak, workspace = row["peak_bytes"] / 2**20, row["workspace_bytes"] / 2**20
            print(
                f"context {row['context']:,}: peak extra {peak:.1f} MiB, workspace {workspace:.1f} MiB, "
                f"cache of one rank {row['cache_bytes'] / 2**20:.1f} MiB"
            )
    for part in ("decode", "prefill"):
        for row in results.get(part, []):
            chosen = f", chosen: {row.chosen}" if row.chosen else ""
            print(f"\n{part}: {row.new_tokens:,} new, {row.context_tokens:,} context{chosen}")
            lines = [(name, f"{sample} ms", f"{row.ratio(name):.3f}") for name, sample in row.samples.items()]
            print("\n".join(align(lines, right=[2])))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "work" in options.only:
        results["work"] = measure_work()
    if "memory" in options.only:
        results["memory"] = measure_memory()
    if "decode" in options.only:
        results["decode"] = list(measure_decode(options.decode_contexts, options.repetitions))
    if "prefill" in options.only:
        results["rates"] = run_ranks(NUM_RANKS, cases.measure_rates, options.repetitions)[0]
        print(f"{'rates':14} {results['rates']}")
        prefills = measure_prefill(
            options.prefill_lengths, options.prefill_contexts, options.repetitions, results["rates"]
        )
        results["prefill"] = list(prefills)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was measured; with --check a line per goal, exit code 1 on a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    size = integer(1, 1 << 20)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--repetitions", type=integer(FEWEST, 1000), default=FEWEST, metavar="N", help="at least 7 (7)")
    parser.add_argument("--decode-contexts", type=size, nargs="+", default=DECODE_CONTEXTS, metavar="N")
    parser.add_argument("--prefill-lengths", type=size, nargs="+", default=PREFILL_LENGTHS, metavar="N")
    parser.add_argument(
        "--prefill-contexts", type=integer(0, 1 << 20), nargs="+", default=PREFILL_CONTEXTS, metavar="N"
    )
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw decode and prefill times to FILE")
    options = parser.parse_args(arguments)
    configuration = {
        "ranks": f"1 and {NUM_RANKS}, one thread each, gloo",
        "decode": f"{cases.DECODE_REQUESTS} requests, {cases.DECODE}",
        "prefill": str(cases.PREFILL),
        "repetitions": options.repetitions,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
    }
    for name, value in configuration.items():
        print(f"{name:14} {value}")
    results = measure(options)
    print_results(results)
    if options.json:
        rows = {
            part: [asdict(row) if not isinstance(row, dict) else row for row in results[part]]
            for part in PARTS
            if part in results
        }
        options.json.write_text(json.dumps({"configuration": configuration, **rows}, indent=2) + "\n")
    if options.png:
        from benchmarks.attention_plots import draw

        draw(results, options.png)
    if not options.check:
        return 0
    print()
    return report_goals(goals(results))


if __name__ == "__main__":
    sys.exit(main())
