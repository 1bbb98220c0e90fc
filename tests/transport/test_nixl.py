"""NIXL between real processes: killed, stopped and idle ones."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from layouts import ConfigError
from tests.transport.source_process import SourceProcess
from transport import Memory, NixlTransport, Peer, Segments, Transfer, TransferFailed, TransferState, nixl

pytest.importorskip("nixl_cu12")

SIZE = 16 << 20


@pytest.fixture(scope="module")
def sources() -> Iterator[list[SourceProcess]]:
    """Processes started side by side, because starting takes longest; the first one is to stay alive."""
    sources = [SourceProcess("nixl", SIZE, seed) for seed in range(4)]
    for source in sources:
        source.wait()
    yield sources[:]
    for source in sources:
        source.end()


@pytest.fixture
def alive(sources: list[SourceProcess]) -> SourceProcess:
    """A source that every test may use."""
    return sources[0]


@pytest.fixture
def doomed(sources: list[SourceProcess]) -> SourceProcess:
    """A source of one's own."""
    return sources.pop()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make UCX use sockets, as between machines, so that reads are really under way after they are posted."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


class Reader:
    """A NixlTransport with one buffer."""

    def __init__(self, transport: NixlTransport) -> None:
        self.transport = transport
        self.buffer = np.zeros(SIZE, np.uint8)
        transport.register([Memory(self.buffer.ctypes.data, SIZE)])

    def read(self, peer: Peer, source: SourceProcess, piece: int = 16 << 10) -> Transfer:
        """Read every second piece of the source."""
        start = np.arange(0, SIZE, 2 * piece, dtype=np.int64)
        base = int(self.buffer.ctypes.data)
        return self.transport.read(peer, Segments.of(source.address + start, base + start, piece))

    def has(self, source: SourceProcess, piece: int = 16 << 10) -> bool:
        """Return whether what read() brings is there."""
        mine, theirs = (part.reshape(-1, 2, piece)[:, 0] for part in (self.buffer, source.content))
        return np.array_equal(mine, theirs)


@pytest.fixture
def reader() -> Iterator[Reader]:
    with NixlTransport() as transport:
        yield Reader(transport)


def finish(transfer: Transfer, timeout_s: float = 10.0) -> TransferState:
    deadline = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    return transfer.poll()


def test_exact_bytes_from_another_process(reader: Reader, alive: SourceProcess) -> None:
    peer = reader.transport.attach(alive.endpoint)
    with reader.read(peer, alive) as transfer:
        assert finish(transfer) is TransferState.DONE
    assert reader.has(alive)


@pytest.mark.usefixtures("over_tcp")
def test_exact_bytes_over_tcp(reader: Reader, alive: SourceProcess) -> None:
    peer = reader.transport.attach(alive.endpoint)
    with reader.read(peer, alive, piece=1 << 20) as transfer:
        assert finish(transfer) is TransferState.DONE
    assert reader.has(alive, piece=1 << 20)


def test_killed_before_the_read(reader: Reader, alive: SourceProcess, doomed: SourceProcess) -> None:
    dead = reader.transport.attach(doomed.endpoint)
    assert finish(reader.read(dead, doomed)) is TransferState.DONE
    doomed.send_signal(signal.SIGKILL)
    with reader.read(dead, doomed) as transfer:
        assert finish(transfer) is TransferState.FAILED
    assert transfer.cause
    for _ in range(2):
        with pytest.raises(TransferFailed, match="cannot be attached"):
            reader.read(dead, doomed)
    with pytest.raises(TransferFailed, match="cannot be attached"):
        reader.transport.attach(doomed.endpoint)
    with reader.read(reader.transport.attach(alive.endpoint), alive) as transfer:
        assert finish(transfer) is TransferState.DONE
    assert reader.has(alive)


@pytest.mark.usefixtures("over_tcp")
def test_killed_during_the_read(reader: Reader, alive: SourceProcess, doomed: SourceProcess) -> None:
    peers = {source: reader.transport.attach(source.endpoint) for source in (doomed, alive)}
    for source in (doomed, alive):
        assert finish(reader.read(peers[source], source)) is TransferState.DONE
    doomed.send_signal(signal.SIGSTOP)  # so that the read is surely under way
    failing = reader.read(peers[doomed], doomed)
    assert failing.poll() is TransferState.PENDING
    doomed.send_signal(signal.SIGKILL)
    other = reader.read(peers[alive], alive)
    assert finish(failing) is TransferState.FAILED
    assert finish(other) is TransferState.DONE
    failing.close()
    other.close()
    reader.buffer[:] = 0
    time.sleep(0.1)
    assert not reader.buffer.any()


@pytest.mark.usefixtures("over_tcp")
def test_closing_a_read_from_a_stopped_process(
    reader: Reader, alive: SourceProcess, doomed: SourceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "CLOSE_GRACE_S", 0.1)
    peers = {source: reader.transport.attach(source.endpoint) for source in (doomed, alive)}
    endpoint = reader.transport.endpoint()
    for source in (doomed, alive):
        assert finish(reader.read(peers[source], source)) is TransferState.DONE
    reader.buffer[:] = 0
    doomed.send_signal(signal.SIGSTOP)
    transfer = reader.read(peers[doomed], doomed)
    begin = time.monotonic()
    transfer.close()
    assert time.monotonic() - begin < 5.0
    assert transfer.poll() is TransferState.FAILED
    at_close = reader.buffer.copy()  # the signal takes a moment: some pieces may have been answered before it
    doomed.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert np.array_equal(reader.buffer, at_close)  # the rest of the answer found nobody
    assert finish(reader.read(peers[alive], alive)) is TransferState.DONE
    assert reader.transport.endpoint() == endpoint  # whoever reads from here was not disturbed


def test_idle_agents_use_no_core(reader: Reader, alive: SourceProcess) -> None:
    peer = reader.transport.attach(alive.endpoint)
    reader.transport.endpoint()
    assert finish(reader.read(peer, alive)) is TransferState.DONE
    before = time.process_time(), _cpu_s(alive.process.pid)
    time.sleep(1.0)
    assert time.process_time() - before[0] < 0.1
    assert _cpu_s(alive.process.pid) - before[1] < 0.1


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install nixl-cu12"):
        NixlTransport().start()


def test_unknown_backend_is_a_config_error() -> None:
    with NixlTransport(backend="PIGEON") as transport, pytest.raises(ConfigError, match="PIGEON"):
        transport.endpoint()


def test_parameters_reach_the_backend() -> None:
    wrong = NixlTransport(backend_params={"ucx_error_handling_mode": "pigeon"})
    with wrong, pytest.raises(ConfigError, match="'pigeon'} cannot start"):
        wrong.endpoint()
    with NixlTransport(backend_params={"num_workers": 2}) as transport:
        assert transport.endpoint()
