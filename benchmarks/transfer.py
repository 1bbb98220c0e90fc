"""How fast KV cache moves between two processes, for pairs of layouts and networks: `python -m benchmarks.transfer`.

On the same memory and in the same rounds: raw NIXL reads of 1 MiB, a copy within one process, a transfer block by block
as a stock connector does it (equal layouts only), and kvweave over each of its transports. `--check` compares with the
goals.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.goals import Goal, Sample, report_goals
from benchmarks.namespaces import ADDRESSES, NotPermitted, cable
from benchmarks.transfer_cases import cases
from benchmarks.transfer_reader import Order, Row
from layouts.commands.options import integer
from transport.cost import PATHS

SOURCE = [sys.executable, "-m", "benchmarks.transfer_source"]
READER = [sys.executable, "-m", "benchmarks.transfer_reader"]
NETWORKS = {
    "host": ("cma", "nixl"),
    "tcp": ("nixl",),
    "veth": ("nixl",),
}
"""Processes of one host with all that UCX has there, the same over TCP alone, and two namespaces with a slow cable;
with the transports that are timed there."""
TCP_ONLY = {"UCX_TLS": "tcp,self"}
VETH_BIT_S = 4 * 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; with --check one line per goal, exit code 1 on a miss."""
    names = [case.name for case in cases()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="may be repeated (all)")
    parser.add_argument("--case", action="append", choices=names, metavar="NAME", help="may be repeated (all)")
    parser.add_argument("--path", action="append", choices=PATHS, help="time this path too; may be repeated")
    parser.add_argument("--mib", type=integer(1, 4096), default=256, metavar="N", help="size of a transfer (256)")
    parser.add_argument("--rounds", type=integer(1, 1000), default=7, metavar="N", help="times of each (7)")
    parser.add_argument("--staging-mib", type=integer(4, 4096), default=64, metavar="N", help="staging memory (64)")
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them")
    options = parser.parse_args(arguments)
    configuration = {
        "mib": options.mib,
        "rounds": options.rounds,
        "staging_mib": options.staging_mib,
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    print("configuration", json.dumps(configuration))
    rows: list[Row] = []
    for network in options.network or NETWORKS:
        try:
            for row in timed(network, options, options.case or names):
                print(line_of(row, rows), flush=True)
                rows.append(row)
        except NotPermitted as error:
            print(f"network {network} is left out: {error}", file=sys.stderr)
    if options.json:
        options.json.write_text(
            json.dumps({"configuration": configuration, "rows": [asdict(r) for r in rows]}, indent=1)
        )
    if options.png:
        from benchmarks.transfer_plot import draw

        draw(rows, options.png)
    return report_goals(goals_of(rows)) if options.check else 0


def timed(network: str, options: argparse.Namespace, names: Sequence[str]) -> Iterator[Row]:
    """The rows of one network, as they come."""
    with _places(network) as (source, reader, host, interface):
        order = Order(
            network=network,
            source_command=[*source, *SOURCE],
            host=host,
            interface=interface,
            num_bytes=options.mib << 20,
            rounds=options.rounds,
            staging_bytes=options.staging_mib << 20,
            transports=list(NETWORKS[network]),
            paths=options.path or [],
            names=list(names),
        )
        command = [*reader, *READER, json.dumps(asdict(order))]
        env = os.environ | ({} if network == "host" else TCP_ONLY)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield Row(**json.loads(line))
        if process.returncode:
            raise SystemExit(f"error: the reading process on network {network} failed, see above")


@contextmanager
def _places(network: str) -> Iterator[tuple[list[str], list[str], str, str]]:
    """What to put before the commands of source and reader, the source's address, the reader's interface."""
    if network != "veth":
        yield [], [], "127.0.0.1", ""
        return
    with cable() as joined:
        joined.cap(VETH_BIT_S)
        yield joined.inside(0), joined.inside(1), ADDRESSES[0], joined.devices[1]


def line_of(row: Row, before: Sequence[Row]) -> str:
    """A line of the table, with the speed relative to raw reads in the same rounds."""
    sample = Sample.of([1e3 * seconds for seconds in row.seconds])
    speed = row.num_bytes / statistics.median(row.seconds) / 1e9
    raw = speed_ratio([*before, row], row.network, row.case, row.way)
    return (
        f"{row.network:5} {row.case:20} {row.way:23} {row.num_bytes >> 20:5} MiB {row.num_segments:7} segments "
        f"{row.path:14} {sample!s:28} ms {speed:6.2f} GB/s  {raw:5.2f} of raw"
    )


def speed_ratio(rows: Sequence[Row], network: str, case: str, way: str, to: str = "raw") -> float:
    """Speed of a way relative to another, as the median over rounds; NaN when either was not timed."""
    found = {row.way: row for row in rows if (row.network, row.case) == (network, case)}
    if way not in found or to not in found:
        return float("nan")
    ours, other = found[way], found[to]
    size = ours.num_bytes / other.num_bytes
    return statistics.median(size * b / a for a, b in zip(ours.seconds, other.seconds, strict=True))


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """All goals of the rows that were timed."""
    goals: list[Goal] = []
    for network, transports in NETWORKS.items():
        if not any(row.network == network for row in rows):
            continue
        for way in transports:
            goals += _goals_on(rows, network, way)
    wire = [row.wire_bytes / row.num_bytes for row in rows if row.wire_bytes and row.way in NETWORKS["host"]]
    if wire:
        goals.append(
            Goal("veth: bytes on the wire, TCP headers and control messages included, of payload", max(wire), "<=", 1.1)
        )
    return goals


def _goals_on(rows: Sequence[Row], network: str, way: str) -> list[Goal]:
    goals = []
    for order, bound in (("contiguous", 0.7), ("reversed", 0.7), ("shuffled", 1.0)):
        time = 1 / speed_ratio(rows, network, f"equal, {order}", way, to="blocks")
        goals.append(Goal(f"{network}, {way}: equal, {order}, of the time block by block", time, "<=", bound))
    for pair in ("DCP4 -> DCP2", "B -> 2B"):
        for size, bound in (("256 KiB", 0.9), ("64 KiB", 0.8)):
            case = f"{pair}, {size}"
            goals.append(
                Goal(f"{network}, {way}: {case}, of raw speed", speed_ratio(rows, network, case, way), ">=", bound)
            )
    if way == "cma":
        for case, bound in (("equal, shuffled", 2.0), ("B -> 2B, 32 KiB", 4.0)):
            pieces = {"equal, shuffled": "64 KiB", "B -> 2B, 32 KiB": "4 KiB"}[case]
            ratio = speed_ratio(rows, network, case, way, to="stock")
            goals.append(
                Goal(f"{network}, {way}: of NIXL's speed on the same segments of {pieces}", ratio, ">=", bound)
            )
    case = "I=1 -> I=B"
    goals.append(Goal(f"{network}, {way}: {case}, of raw speed", speed_ratio(rows, network, case, way), ">=", 0.5))
    return [goal for goal in goals if goal.value == goal.value]


if __name__ == "__main__":
    sys.exit(main())
