"""`python -m layouts.check`: random pairs of layouts, each planned and compared with the token-by-token reference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from random import Random
from typing import NoReturn

from layouts.commands.options import integer
from layouts.errors import ConfigError, PlanError, config_error
from layouts.parallel import ParallelLayout
from layouts.plan import plan_transfer
from layouts.reference import find_fault

__all__ = ["ConfigError", "check_pairs", "config_error", "draw_pair", "main"]

MAX_PAIRS, MAX_SEED, MAX_TOKENS = 10_000_000, (1 << 63) - 1, 400
MAX_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints how many pairs passed and failed; exit code 1 if any failed, 2 for bad arguments."""
    parser = _OneLineParser(prog="python -m layouts.check", description=__doc__)
    parser.add_argument("--pairs", type=integer(1, MAX_PAIRS), default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=integer(0, MAX_SEED), default=0, help="which (0)")
    options = parser.parse_args(arguments)
    faults = check_pairs(options.pairs, options.seed)
    for fault in faults[:MAX_SHOWN]:
        print(fault, file=sys.stderr)
    print(f"{options.pairs - len(faults)} passed, {len(faults)} failed")
    return 1 if faults else 0


def check_pairs(num_pairs: int, seed: int) -> list[str]:
    """What is wrong with the plans of random pairs of layouts: one line for each wrong plan."""
    random, faults = Random(seed), []
    for number in range(num_pairs):
        source, target, start, stop = draw_pair(random)
        described = f"pair {number}: {source} -> {target}, positions {start} .. {stop}"
        try:
            fault = find_fault(plan_transfer(source, target, start, stop, salt=number))
        except PlanError as error:
            fault = str(error)
        if fault:
            faults.append(f"{described}: {fault}")
    return faults


def draw_pair(random: Random) -> tuple[ParallelLayout, ParallelLayout, int, int]:
    """Two layouts of one model, and the range of positions to move: (source, target, start, stop)."""
    num_kv_heads, mla = random.choice((1, 2, 3, 4, 8)), random.random() < 0.3
    num_layers = random.randint(1, 5)
    source, target = (_draw_layout(random, num_kv_heads, mla, num_layers) for _ in range(2))
    stop = random.randint(0, MAX_TOKENS)
    in_blocks = target.interleave.virtual_block_tokens * random.randint(0, 8)
    start = random.choice((0, in_blocks, random.randint(0, stop)))
    return source, target, min(start, stop), stop


def _draw_layout(random: Random, num_kv_heads: int, mla: bool, num_layers: int) -> ParallelLayout:
    """Any layout that is not refused: sizes are drawn until they fit together."""
    while True:
        interleave_tokens, tp, pcp = random.choice((1, 2, 3, 4, 8, 16)), random.choice((1, 2, 3, 4, 6, 8, 16)), 1
        if random.random() < 0.4:
            pcp = random.choice((2, 3, 4))
        try:
            return ParallelLayout(
                tp=tp,
                pcp=pcp,
                dcp=random.choice((1, 1, 2, 3, 4, 6, 8, pcp, tp * pcp)),
                pp=random.randint(1, min(3, num_layers)),
                num_kv_heads=num_kv_heads,
                mla=mla,
                interleave_tokens=interleave_tokens,
                block_tokens=interleave_tokens * random.randint(1, 5),
                num_layers=num_layers,
                pcp_shards_kv=random.random() < 0.3,
                dcp_sharded=random.random() < 0.9,
            )
        except ConfigError:
            continue


class _OneLineParser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


if __name__ == "__main__":
    sys.exit(main())
