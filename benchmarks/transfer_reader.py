"""The reading process of `benchmarks.transfer`: times every way to move a case on one network.

Started with one JSON argument, `Order`; writes `Row`s as lines of JSON. Every way of a case is timed once in each
round, so that whatever else happens on the machine meets all alike. Every way must deliver the exact bytes.
"""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.stock_nixl import CONNECTOR_THREADS, timed_read
from benchmarks.transfer_cases import Case, Ends, cases
from benchmarks.transfer_source import own_stdout
from connector.runner import MAX_POLL_S, MIN_POLL_S
from transport import create_transport
from transport.base import TransferState
from transport.control import ControlClient
from transport.data_plane import DataPlane, Link, Offer, Read, ReadOptions
from transport.endpoint import decode_endpoint
from transport.regions import memory_of
from transport.segments import Segments

RAW_PIECE = 1 << 20
TIMEOUT_S = 120.0
CHECKED_SEGMENTS = 2000


@dataclass(frozen=True, slots=True)
class Order:
    """What to time. `source_command` starts the source process, `host` is its address; `interface` counts bytes."""

    network: str
    source_command: list[str]
    host: str
    interface: str
    num_bytes: int
    rounds: int
    staging_bytes: int
    transports: list[str]
    paths: list[str]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to move one case. `seconds` of each round; `path` as chosen by the cost model; `wire_bytes` of one
    transfer by the interface's counter, 0 where there is none."""

    network: str
    case: str
    way: str
    num_bytes: int
    num_segments: int
    path: str
    seconds: list[float]
    wire_bytes: int = 0


class Ways:
    """Everything that can move a case: each is a function that moves all of it and waits."""

    def __init__(self, order: Order, case: Case) -> None:
        self.order, self.case = order, case
        self.ends = Ends.of(case, order.num_bytes)
        sizes = [self.ends.source_bytes(rank) for rank in self.ends.source_ranks]
        self._source = subprocess.Popen(order.source_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._source.stdin is not None and self._source.stdout is not None
        wanted = {"host": order.host, "staging_bytes": order.staging_bytes, "sizes": sizes}
        self._source.stdin.write(json.dumps(wanted) + "\n")
        self._source.stdin.flush()
        self.target = torch.zeros(self.ends.target_bytes // 8, dtype=torch.int64)
        self.answer: dict[str, Any] = json.loads(self._source.stdout.readline())
        self.sources = dict(zip(self.ends.source_ranks, self.answer["addresses"], strict=True))
        by_rank = self.ends.segments(self.sources, self.target.data_ptr())
        self.segments = list(by_rank.values())
        self.num_bytes = sum(segments.num_bytes for segments in self.segments)
        self._news = threading.Event()
        self._client = ControlClient()
        self._client.start()
        self._planes: dict[str, tuple[DataPlane, Link]] = {}
        self.paths: dict[str, str] = {}

    def close(self) -> None:
        """End the source process and everything here."""
        for plane, _ in self._planes.values():
            plane.close()
        self._client.close()
        self._source.communicate()

    def all(self) -> dict[str, Callable[[], float]]:
        """The ways by name, each a function that moves everything and returns the seconds.

        Stock NIXL agents read as many bytes in pieces of 1 MiB ("raw"), the case's own segments ("stock"), and block by
        block with the threads of NixlConnector ("blocks"); "memcpy" copies within this process; the rest is ours.
        """
        memory, source = memory_of([self.target]), self._nixl_metadata()
        stock = partial(timed_read, memory, source)
        found: dict[str, Callable[[], float]] = {
            "raw": partial(stock, self._raw_pieces()),
            "memcpy": lambda: _timed(self._memcpy),
            "stock": partial(stock, Segments.concatenate(self.segments)),
        }
        if self.case.is_equal:
            blocks = self.ends.block_descriptors(self.answer["addresses"][0], self.target.data_ptr())
            found["blocks"] = partial(stock, blocks, num_threads=CONNECTOR_THREADS)
            found["blocks, merged by NIXL"] = partial(stock, blocks, num_threads=CONNECTOR_THREADS, merge=True)
        for name in self.order.transports:
            found[name] = partial(_timed, self._ours(name, "auto"))
            for path in self.order.paths:
                found[f"{name}, {path}"] = partial(_timed, self._ours(name, path))
        return found

    def check(self, way: str) -> None:
        """Raises RuntimeError unless the target holds the bytes of the source; forgets them."""
        base, here = self.target.data_ptr(), self.target.numpy()
        for (rank, address), segments in zip(self.sources.items(), self.segments, strict=True):
            for number in np.random.default_rng(rank).permutation(len(segments))[:CHECKED_SEGMENTS]:
                source, target = int(segments.source[number]) - address, int(segments.target[number]) - base
                words = int(segments.length[number]) // 8
                found = here[target // 8 : target // 8 + words]
                if not np.array_equal(found, np.arange(source // 8, source // 8 + words)):
                    raise RuntimeError(f"{self.case.name}: {way} brought wrong bytes from source rank {rank}")
        self.target.zero_()

    def _plane(self, name: str, path: str) -> tuple[DataPlane, Link]:
        key = f"{name}/{path}"
        if key not in self._planes:
            options = ReadOptions(path=path, staging_bytes=self.order.staging_bytes)  # type: ignore[arg-type]
            plane = DataPlane([[create_transport(name)]], options)
            plane.start(memory_of([self.target]))
            plane.start_reading(self._client, self._news.set)
            self._planes[key] = plane, plane.attach(base64.b64decode(self.answer["offers"][name]))
        return self._planes[key]

    def _ours(self, name: str, path: str) -> Callable[[], None]:
        plane, link = self._plane(name, path)

        def move() -> None:
            reads = [plane.read(link, segments) for segments in self.segments]
            self.paths[name if path == "auto" else f"{name}, {path}"] = "+".join(sorted({read.path for read in reads}))
            _wait(reads, self._news)

        return move

    def _raw_pieces(self) -> Segments:
        """As many bytes as the case has, from the first source, in pieces of 1 MiB in an order of their own."""
        size = min(self.num_bytes, self.ends.source_bytes(self.ends.source_ranks[0]), self.ends.target_bytes)
        starts = np.arange(0, size // RAW_PIECE, dtype=np.int64) * RAW_PIECE
        order = np.resize(np.random.default_rng(0).permutation(len(starts)), self.num_bytes // RAW_PIECE)
        sources = starts[order] + self.answer["addresses"][0]
        pieces = Segments.of(sources, np.resize(starts, len(order)) + self.target.data_ptr(), RAW_PIECE)
        self.raw_bytes = pieces.num_bytes
        return pieces

    def _nixl_metadata(self) -> bytes:
        offer = msgspec.msgpack.decode(base64.b64decode(self.answer["offers"]["nixl"]), type=Offer)
        return decode_endpoint(offer.endpoints["nixl"], "nixl").metadata

    def _memcpy(self) -> None:
        """The same number of bytes from one half of a buffer to the other."""
        half = len(self.target) // 2
        for _ in range(2):
            self.target[:half].copy_(self.target[half : 2 * half])

    def peak_bytes(self) -> tuple[int, int]:
        """Peak resident memory of (source, this process)."""
        status = Path(f"/proc/{self.answer['pid']}/status").read_text()
        source_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return source_kib << 10, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _timed(move: Callable[[], None]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def _wait(reads: list[Read], news: threading.Event) -> None:
    """Poll as the connector's I/O thread does, until all reads are done."""
    deadline = time.monotonic() + TIMEOUT_S
    pending = [read.transfer for read in reads]
    pause_s = MIN_POLL_S
    while pending:
        for transfer in list(pending):
            state = transfer.poll()
            if state is TransferState.PENDING:
                continue
            pending.remove(transfer)
            transfer.close()
            if state is TransferState.FAILED:
                raise RuntimeError(transfer.cause)
        if pending and not any(transfer.moves_in_poll for transfer in pending):
            pause_s = MIN_POLL_S if news.wait(pause_s) else min(MAX_POLL_S, 2 * pause_s)
            news.clear()
        if time.monotonic() > deadline:
            raise RuntimeError(f"a read did not end within {TIMEOUT_S:g} s")


@contextmanager
def _ways(order: Order, case: Case) -> Iterator[Ways]:
    ways = Ways(order, case)
    try:
        yield ways
    finally:
        ways.close()


def time_case(order: Order, case: Case) -> Iterator[Row]:
    """Every way once in a round that does not count, checked, and then in each of the rounds."""
    with _ways(order, case) as ways:
        moves = ways.all()
        wire: dict[str, int] = {}
        for name, move in moves.items():
            before = _interface_bytes(order.interface)
            move()
            wire[name] = _interface_bytes(order.interface) - before
            if name not in ("raw", "memcpy"):
                ways.check(name)
        seconds: dict[str, list[float]] = {name: [] for name in moves}
        for _ in range(order.rounds):
            for name, move in moves.items():
                seconds[name].append(move())
        for name in moves:
            num_bytes = ways.raw_bytes if name == "raw" else ways.num_bytes
            num_segments = sum(len(segments) for segments in ways.segments)
            path = ways.paths.get(name, "")
            yield Row(order.network, case.name, name, num_bytes, num_segments, path, seconds[name], wire[name])


def _interface_bytes(interface: str) -> int:
    if not interface:
        return 0
    return int(Path(f"/sys/class/net/{interface}/statistics/rx_bytes").read_text())


def main() -> None:
    """Carry out the order given as argument."""
    results = own_stdout()
    fields: Mapping[str, Any] = json.loads(sys.argv[1])
    order = Order(**fields)
    for case in cases():
        if case.name in order.names:
            for row in time_case(order, case):
                print(json.dumps(asdict(row)), file=results, flush=True)


if __name__ == "__main__":
    main()
