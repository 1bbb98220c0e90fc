"""What every transport does alike: exact bytes, honest failures, and no byte after close."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from layouts import ConfigError
from tests.transport.source_process import SourceProcess
from transport import (
    Memory,
    MemoryTransport,
    NixlTransport,
    Peer,
    Segments,
    Transfer,
    TransferFailed,
    TransferState,
    Transport,
    create_transport,
)

SIZE = 1 << 20
LIBRARIES = {"memory": "numpy", "cma": "numpy", "nixl": "nixl_cu12"}
"""The transports, with what has to be installed for each."""
BETWEEN_PROCESSES = [kind for kind in LIBRARIES if kind != "memory"]


class Node:
    """A started transport with one registered buffer."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self.transport = transport
        self.buffer = np.random.default_rng(seed).integers(0, 256, SIZE).astype(np.uint8)
        self.address = int(self.buffer.ctypes.data)
        transport.start()
        transport.register([Memory(self.address, SIZE)])


def finish(transfer: Transfer, timeout_s: float = 30.0) -> TransferState:
    deadline = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    return transfer.poll()


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Node]]:
    pytest.importorskip(LIBRARIES[request.param])
    nodes: list[Node] = []

    def one() -> Node:
        nodes.append(Node(create_transport(request.param), seed=len(nodes)))
        return nodes[-1]

    yield one
    for node in nodes:
        node.transport.close()


def offsets(name: str) -> Segments:
    """Offsets of a pattern within both buffers."""
    n = np.arange(64, dtype=np.int64)
    if name == "contiguous":
        return Segments.of([4096], [8192], [SIZE // 2])
    if name == "strided":
        return Segments.of(n * 8192, n * 4096 + 64, 2048)
    if name == "reversed":
        return Segments.of(n * 4096, (63 - n) * 4096, 4096)
    if name == "tiny":
        return Segments.of(n * 100, n * 64, 1 + n % 3)
    if name == "unaligned":
        return Segments.of(n * 4099 + 1, n * 5003 + 3, 1021)
    if name == "zero-length":
        return Segments.of(n * 64, n * 64, n % 2 * 64)
    if name == "everything":
        return Segments.of([0], [0], [SIZE])
    raise KeyError(name)


def at(pattern: Segments, source: Node, target: Node) -> Segments:
    return Segments(pattern.source + source.address, pattern.target + target.address, pattern.length)


def expected(pattern: Segments, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    wanted = target.copy()
    for start, end, length in zip(pattern.source, pattern.target, pattern.length, strict=True):
        wanted[end : end + length] = source[start : start + length]
    return wanted


PATTERNS = ["contiguous", "strided", "reversed", "tiny", "unaligned", "zero-length", "everything"]


@pytest.mark.parametrize("name", PATTERNS)
def test_exact_bytes(make: Callable[[], Node], name: str) -> None:
    source, target, pattern = make(), make(), offsets(name)
    wanted, untouched = expected(pattern, source.buffer, target.buffer), source.buffer.copy()
    peer = target.transport.attach(source.transport.endpoint())
    with target.transport.read(peer, at(pattern, source, target)) as transfer:
        assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
        assert transfer.num_bytes == pattern.num_bytes
    assert np.array_equal(target.buffer, wanted)
    assert np.array_equal(source.buffer, untouched)


def test_many_peers_at_once(make: Callable[[], Node]) -> None:
    sources, target = [make() for _ in range(4)], make()
    share, reads = SIZE // 4, []
    for number, source in enumerate(sources):
        peer = target.transport.attach(source.transport.endpoint())
        pattern = Segments.of([0], [number * share], [share])
        reads.append(target.transport.read(peer, at(pattern, source, target)))
    assert [finish(read) for read in reads] == [TransferState.DONE] * 4
    for number, source in enumerate(sources):
        part = target.buffer[number * share : (number + 1) * share]
        assert np.array_equal(part, source.buffer[:share])


def test_both_ways_at_once(make: Callable[[], Node]) -> None:
    one, other = make(), make()
    first, second = offsets("strided"), offsets("tiny")
    wanted = expected(first, one.buffer, other.buffer)
    to_one, to_other = one.transport, other.transport
    there = to_other.attach(to_one.endpoint())
    back = to_one.attach(to_other.endpoint())
    assert finish(to_other.read(there, at(first, one, other))) is TransferState.DONE
    assert np.array_equal(other.buffer, wanted)
    wanted = expected(second, other.buffer, one.buffer)
    assert finish(to_one.read(back, at(second, other, one))) is TransferState.DONE
    assert np.array_equal(one.buffer, wanted)


def test_nothing_to_read_is_done(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    assert target.transport.read(peer, Segments.of([], [], [])).poll() is TransferState.DONE


def test_no_byte_arrives_after_close(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    transfer = target.transport.read(peer, at(offsets("everything"), source, target))
    transfer.close()
    transfer.close()
    assert transfer.poll() in (TransferState.DONE, TransferState.FAILED)
    target.buffer[:] = 7
    time.sleep(0.05)
    assert (target.buffer == 7).all()


def test_closing_the_transport_closes_its_reads(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    transfer = target.transport.read(peer, at(offsets("everything"), source, target))
    target.transport.close()
    target.transport.close()
    assert transfer.poll() is not TransferState.PENDING
    with pytest.raises(TransferFailed, match="start"):
        target.transport.read(peer, at(offsets("tiny"), source, target))


def test_restart_after_close(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    target.transport.close()
    target.transport.start()
    target.transport.start()
    target.transport.register([Memory(target.address, SIZE)])
    peer = target.transport.attach(source.transport.endpoint())
    assert finish(target.transport.read(peer, at(offsets("tiny"), source, target))) is TransferState.DONE


def test_a_closed_source_fails_and_a_new_one_serves(make: Callable[[], Node]) -> None:
    source, other, target = make(), make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    assert finish(target.transport.read(peer, at(offsets("tiny"), source, target))) is TransferState.DONE
    source.transport.close()
    with target.transport.read(peer, at(offsets("tiny"), source, target)) as transfer:
        assert finish(transfer) is TransferState.FAILED
    assert transfer.cause
    peer = target.transport.attach(other.transport.endpoint())
    assert finish(target.transport.read(peer, at(offsets("tiny"), other, target))) is TransferState.DONE


def test_foreign_addresses_are_refused(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    for shift in (-1, SIZE - 9):
        pattern = Segments.of([0], [shift], [10])
        with pytest.raises(ValueError, match="registered"):
            target.transport.read(peer, at(pattern, source, target))
        pattern = Segments.of([shift], [0], [10])
        with pytest.raises(TransferFailed, match="does not offer"):
            target.transport.read(peer, at(pattern, source, target))


def test_detached_and_unknown_peers_are_refused(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    peer = target.transport.attach(source.transport.endpoint())
    assert target.transport.attach(source.transport.endpoint()) == peer
    target.transport.detach(peer)
    target.transport.detach(peer)
    for stranger in (peer, Peer("nobody")):
        with pytest.raises(TransferFailed, match="not attached"):
            target.transport.read(stranger, at(offsets("tiny"), source, target))
    peer = target.transport.attach(source.transport.endpoint())
    assert finish(target.transport.read(peer, at(offsets("tiny"), source, target))) is TransferState.DONE


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80"])
def test_junk_is_no_endpoint(make: Callable[[], Node], data: bytes) -> None:
    with pytest.raises(TransferFailed, match="cannot be read"):
        make().transport.attach(data)


def test_the_other_transport_is_no_peer() -> None:
    pytest.importorskip("nixl_cu12")
    with MemoryTransport() as memory, NixlTransport() as nixl, pytest.raises(TransferFailed, match="'nixl'"):
        memory.attach(nixl.endpoint())


def test_a_segment_may_span_neighbouring_registrations(make: Callable[[], Node]) -> None:
    source, target = make(), make()
    source.transport.close()
    source.transport.start()
    for part in range(4):
        source.transport.register([Memory(source.address + part * SIZE // 4, SIZE // 4)])
    peer = target.transport.attach(source.transport.endpoint())
    assert finish(target.transport.read(peer, at(offsets("everything"), source, target))) is TransferState.DONE
    assert np.array_equal(target.buffer, source.buffer)


def test_unknown_devices_are_refused(make: Callable[[], Node]) -> None:
    with pytest.raises(ConfigError, match="tpu"):
        make().transport.register([Memory(0, 64, "tpu:0")])


def test_unknown_transports_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed are cma, memory, nixl"):
        create_transport("carrier pigeon")
    with pytest.raises(ConfigError, match="wings"):
        create_transport("memory", wings=2)


# Two processes: what a transport does when the source is really somewhere else.


class Reader:
    """A started transport with a buffer of its own, attached to sources."""

    def __init__(self, kind: str, num_bytes: int) -> None:
        self.transport = create_transport(kind)
        self.buffer = np.zeros(num_bytes, np.uint8)
        self.transport.start()
        self.transport.register([Memory(int(self.buffer.ctypes.data), num_bytes)])

    def read(self, source: SourceProcess, pattern: Segments) -> Transfer:
        peer = self.transport.attach(source.endpoint)
        shift = int(self.buffer.ctypes.data)
        return self.transport.read(
            peer, Segments(pattern.source + source.address, pattern.target + shift, pattern.length)
        )


@pytest.fixture(params=BETWEEN_PROCESSES)
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(LIBRARIES[request.param])
    return str(request.param)


@pytest.fixture
def start(kind: str) -> Iterator[Callable[..., list[SourceProcess]]]:
    sources: list[SourceProcess] = []

    def some(num_bytes: int, count: int = 1) -> list[SourceProcess]:
        sources.extend(SourceProcess(kind, num_bytes, seed) for seed in range(count))
        for source in sources:
            source.wait()
        return sources

    yield some
    for source in sources:
        source.end()


def read_whole(num_bytes: int) -> Segments:
    return Segments.of([0], [0], [num_bytes])


@pytest.mark.timeout(300)
def test_more_bytes_than_31_bits_count(kind: str, start: Callable[..., list[SourceProcess]]) -> None:
    num_bytes = (2 << 30) + 4097
    (source,), reader = start(num_bytes), Reader(kind, num_bytes)
    with reader.transport, reader.read(source, read_whole(num_bytes)) as transfer:
        assert (finish(transfer, 120.0), transfer.cause) == (TransferState.DONE, "")
        assert transfer.num_bytes == num_bytes
    period = source.content[: 64 * 251 * 4096]
    for begin in range(0, num_bytes, len(period)):
        part = reader.buffer[begin : begin + len(period)]
        assert np.array_equal(part, period[: len(part)])


def test_a_killed_source_fails_and_others_go_on(kind: str, start: Callable[..., list[SourceProcess]]) -> None:
    num_bytes = 32 << 20
    pattern = Segments.of(np.arange(0, num_bytes, 32768), np.arange(0, num_bytes, 32768), 16384)
    (doomed, alive), reader = start(num_bytes, 2), Reader(kind, num_bytes)
    with reader.transport:
        for source in (doomed, alive):
            with reader.read(source, pattern) as transfer:
                assert finish(transfer) is TransferState.DONE
        under_way = reader.read(doomed, pattern)
        under_way.poll()
        doomed.send_signal(signal.SIGKILL)
        other = reader.read(alive, pattern)
        assert finish(under_way) is not TransferState.PENDING
        assert finish(other) is TransferState.DONE
        under_way.close()
        other.close()
        with pytest.raises(TransferFailed), reader.read(doomed, pattern) as transfer:
            assert finish(transfer) is TransferState.FAILED
            raise TransferFailed(transfer.cause)
        reader.buffer[:] = 0
        with reader.read(alive, pattern) as transfer:
            assert finish(transfer) is TransferState.DONE
    assert np.array_equal(reader.buffer.reshape(-1, 2, 16384)[:, 0], alive.content.reshape(-1, 2, 16384)[:, 0])
    assert not reader.buffer.reshape(-1, 2, 16384)[:, 1].any()


def test_closing_under_way_stops_the_bytes(kind: str, start: Callable[..., list[SourceProcess]]) -> None:
    num_bytes = 64 << 20
    (source,), reader = start(num_bytes), Reader(kind, num_bytes)
    with reader.transport:
        transfer = reader.read(source, read_whole(num_bytes))
        transfer.poll()
        transfer.close()
        reader.buffer[:] = 0
        time.sleep(0.1)
        assert not reader.buffer.any()
        with reader.read(source, read_whole(num_bytes)) as transfer:
            assert finish(transfer) is TransferState.DONE
    assert np.array_equal(reader.buffer, source.content)


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_reads_leave_nothing(kind: str, start: Callable[..., list[SourceProcess]]) -> None:
    num_bytes, piece = 1 << 20, 2048
    at = np.arange(0, num_bytes, 2 * piece)
    (source,) = start(num_bytes)

    def read_often(count: int) -> int:
        """Return how resident memory grew over the second half."""
        reader = Reader(kind, num_bytes)
        with reader.transport:
            resident = []
            for number in range(count):
                with reader.read(source, Segments.of(at, np.roll(at, number), piece)) as transfer:
                    assert finish(transfer) is TransferState.DONE
                if number in (count // 2 - 1, count - 1):
                    resident.append(resident_bytes())
            assert threads_and_files()[1] < 100
        return resident[1] - resident[0]

    read_often(10)  # a library may keep what it set up once in a process
    before = threads_and_files()
    growth = read_often(2000)
    assert growth < 10 * (1 << 20), f"{growth / 10 / (1 << 20):.2f} MiB more for each 100 reads"
    deadline = time.monotonic() + 5.0
    while any(now > then for now, then in zip(threads_and_files(), before, strict=True)):
        assert time.monotonic() < deadline, f"threads and files were {before}, are {threads_and_files()}"
        time.sleep(0.01)
