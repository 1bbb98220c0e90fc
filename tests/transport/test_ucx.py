"""UCX through UCXX between real processes: what a key opens, who may die, and what is left behind."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from layouts import ConfigError
from transport import Memory, Peer, Segments, Transfer, TransferFailed, TransferState, UcxTransport
from transport.endpoint import decode_endpoint, encode_endpoint

pytest.importorskip("ucxx")

from tests.transport.ucx_process import SIZE, RestlessReader, Source, every_second, finish
from transport import ucx_reader, ucx_worker
from transport.process import Process
from transport.ucx_messages import Ask, Offer, decode_to_source, encode

SMALL_SLICES = {"staging_bytes": 1 << 20, "slice_bytes": 128 << 10}
NOTICED_S = 5.0
"""A process that dies must be noticed within this time."""
ELSEWHERE = Process("a host that is not this one", 1, 1)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_reader, "CONNECT_S", 60.0)  # other processes are slow on a machine full of tests


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    """A source that nobody hurts."""
    source = Source(1)
    yield source
    assert source.process.is_alive()
    source.end()


@pytest.fixture
def doomed() -> Iterator[Source]:
    """A source to kill, stop or close."""
    source = Source(2)
    yield source
    source.end()


class Reader:
    """A UcxTransport with one buffer."""

    def __init__(self, transport: UcxTransport) -> None:
        self.transport = transport
        self.buffer = np.zeros(SIZE, np.uint8)
        self.address = int(self.buffer.ctypes.data)
        transport.register([Memory(self.address, SIZE)])

    def read(self, peer: Peer, source: Source | Reader, piece: int = 16 << 10) -> Transfer:
        """Read every second piece of the source."""
        return self.transport.read(peer, every_second(source.address, self.address, piece))

    def assert_reads(self, source: Source, piece: int = 16 << 10) -> None:
        """All of the source can be read, and nothing beside it is written."""
        self.buffer[:] = 0
        with self.read(self.transport.attach(source.endpoint), source, piece) as transfer:
            assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
        mine, theirs = (part.reshape(-1, 2, piece) for part in (self.buffer, source.content))
        assert np.array_equal(mine[:, 0], theirs[:, 0])
        assert not mine[:, 1].any()

    def assert_no_byte_arrives(self) -> None:
        self.buffer[:] = 0
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            self.transport._reader.pump()  # type: ignore[union-attr]
        assert not self.buffer.any()


@pytest.fixture
def reader() -> Iterator[Reader]:
    with UcxTransport() as transport:
        yield Reader(transport)


@pytest.fixture
def slow_reader() -> Iterator[Reader]:
    """One that asks for little at a time, so that a read can be met half-way."""
    with UcxTransport(**SMALL_SLICES) as transport:
        yield Reader(transport)


def begin(reader: Reader, source: Source, piece: int) -> Transfer:
    """Start a read and return when some of it is here and some is not."""
    transfer = reader.read(reader.transport.attach(source.endpoint), source, piece)
    total = transfer._num_missing  # type: ignore[attr-defined]
    while transfer.poll() is TransferState.PENDING and transfer._num_missing == total:  # type: ignore[attr-defined]
        time.sleep(0)
    assert transfer.poll() is TransferState.PENDING
    return transfer


@pytest.mark.parametrize("piece", [1 << 10, 16 << 10, 4 << 20])
def test_exact_bytes_from_another_process(reader: Reader, source: Source, piece: int) -> None:
    reader.assert_reads(source, piece)
    reader.assert_reads(source, piece)


def test_small_staging_serves_large_reads(slow_reader: Reader, source: Source) -> None:
    peer = slow_reader.transport.attach(source.endpoint)
    transfers = [slow_reader.read(peer, source, 2 << 10), slow_reader.read(peer, source, 4 << 10)]
    assert [finish(transfer) for transfer in transfers] == [TransferState.DONE] * 2
    slow_reader.assert_reads(source, 2 << 10)


def _with_offer(endpoint: bytes, **changes: object) -> bytes:
    described = decode_endpoint(endpoint, "ucx")
    offer = msgspec.structs.replace(msgspec.msgpack.decode(described.metadata, type=Offer), **changes)
    return encode_endpoint("ucx", described.name, described.stretches, msgspec.msgpack.encode(offer))


def test_a_wrong_key_opens_nothing(reader: Reader, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(TransferFailed, match="no answer"):
        patch.setattr(ucx_reader, "CONNECT_S", 0.5)
        reader.transport.attach(_with_offer(source.endpoint, key=secrets.token_bytes(16)))
    reader.assert_reads(source)


@pytest.mark.parametrize("shift", [-1, SIZE - (16 << 10) + 1, 1 << 45, -(1 << 45)])
def test_the_source_gives_only_registered_memory(reader: Reader, source: Source, shift: int) -> None:
    """Whatever the reader believes: the endpoint it uses here claims all memory."""
    described = decode_endpoint(source.endpoint, "ucx")
    boundless = encode_endpoint("ucx", described.name, [Memory(0, 1 << 61)], described.metadata)
    peer = reader.transport.attach(boundless)
    base, n = reader.address, 16 << 10
    for starts in ([shift], [0, shift]):
        pieces = Segments.of(source.address + np.array(starts), base + np.arange(len(starts)) * n, n)
        with reader.transport.read(peer, pieces) as transfer:
            assert finish(transfer) is TransferState.FAILED
        assert "registered memory" in transfer.cause
    assert not reader.buffer.any()
    reader.assert_reads(source)


def test_more_than_a_slice_at_once_is_refused(source: Source) -> None:
    with UcxTransport(slice_bytes=8 << 20) as transport:
        larger = Reader(transport)
        peer = transport.attach(_with_offer(source.endpoint, slice_bytes=1 << 30))
        with larger.read(peer, source, 8 << 20) as transfer:
            assert finish(transfer) is TransferState.FAILED
    assert "one message has 1 to" in transfer.cause


def test_garbage_at_the_port_disturbs_nobody(reader: Reader, source: Source) -> None:
    ports = _listening_ports(source.pid)
    assert ports
    for port in ports:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), secrets.token_bytes(100_000)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.settimeout(0.2)
                try:
                    stranger.sendall(data)
                    stranger.recv(1)
                except OSError:
                    pass
    reader.assert_reads(source)


def _listening_ports(pid: int) -> list[int]:
    """Ports a process listens on; none may be on another address than 127.0.0.1."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:"):
            inodes.add(target[8:-1])
    ports = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            assert address == "0100007F", "listens beyond the host it was given"
            ports.append(int(port, 16))
    return ports


@pytest.mark.parametrize("piece", [4 << 10, 1 << 20])
@pytest.mark.parametrize("when", ["before the first read", "idle"])  # not during one: see "Known fault" in ucx.py
def test_a_killed_source_is_noticed(slow_reader: Reader, source: Source, doomed: Source, when: str, piece: int) -> None:
    reader = slow_reader
    peer = reader.transport.attach(doomed.endpoint)
    reader.transport.attach(source.endpoint)
    if when == "idle":
        reader.assert_reads(doomed, piece)
    doomed.send_signal(signal.SIGKILL)
    failing = reader.read(peer, doomed, piece)
    assert finish(failing, NOTICED_S) is TransferState.FAILED
    assert failing.cause
    failing.close()
    with pytest.raises(TransferFailed, match="ended"):
        reader.transport.attach(doomed.endpoint)
    reader.assert_no_byte_arrives()
    reader.assert_reads(source, piece)


@pytest.mark.parametrize("piece", [4 << 10, 1 << 20])
def test_closing_a_read_from_a_stopped_source(
    slow_reader: Reader, source: Source, doomed: Source, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(ucx_reader, "CLOSE_GRACE_S", 0.5)
    transfer = begin(slow_reader, doomed, piece)
    doomed.send_signal(signal.SIGSTOP)
    started_at = time.monotonic()
    transfer.close()
    assert time.monotonic() - started_at < 3.0
    slow_reader.assert_reads(source, piece)
    slow_reader.buffer[:] = 0
    doomed.send_signal(signal.SIGCONT)
    slow_reader.assert_no_byte_arrives()
    slow_reader.assert_reads(doomed, piece)


@pytest.mark.parametrize("limit", ["STALL_S", "SILENT_S"])
def test_a_silent_source_is_given_up(
    reader: Reader, doomed: Source, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(ucx_reader, limit, 1.0)
    endpoint = _with_offer(doomed.endpoint, process=ELSEWHERE) if limit == "SILENT_S" else doomed.endpoint
    peer = reader.transport.attach(endpoint)
    doomed.send_signal(signal.SIGSTOP)
    with reader.read(peer, doomed) as transfer:
        assert finish(transfer, NOTICED_S) is TransferState.FAILED
    assert "sent nothing for 1 s" in transfer.cause


@pytest.fixture
def own_source() -> Iterator[Reader]:
    """A source in this process, where its staging memory can be seen."""
    with UcxTransport(**SMALL_SLICES) as transport:
        transport.endpoint()
        yield Reader(transport)


def test_a_busy_source_is_not_given_up(own_source: Reader, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on another host, with no memory left to send from: it answers when it is asked whether it lives."""
    monkeypatch.setattr(ucx_reader, "SILENT_S", 2.0)
    endpoint = _with_offer(own_source.transport.endpoint(), process=ELSEWHERE)
    peer = reader.transport.attach(endpoint)
    staging = own_source.transport._source._staging_on("cpu")  # type: ignore[union-attr]
    slices = [slice_ for _ in range(staging.num_slices) if (slice_ := staging.take())]
    with reader.read(peer, own_source) as transfer:
        assert finish(transfer, 3.0) is TransferState.PENDING
        for slice_ in slices:
            staging.give_back(slice_)
        assert finish(transfer) is TransferState.DONE


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_or_stops_does_not_hurt_others(
    own_source: Reader, reader: Reader, end: signal.Signals
) -> None:
    peer = reader.transport.attach(own_source.transport.endpoint())
    other = RestlessReader(own_source.transport.endpoint(), own_source.address, 4 << 10)
    other.send_signal(end)
    with reader.read(peer, own_source) as transfer:
        assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
    other.end()
    staging = own_source.transport._source._staging_on("cpu")  # type: ignore[union-attr]
    deadline = time.monotonic() + NOTICED_S
    while staging.num_free < staging.num_slices:
        assert time.monotonic() < deadline, "slices of a reader that was killed are not given back"
        time.sleep(0.01)


def test_closing_the_source_fails_its_readers(reader: Reader, doomed: Source) -> None:
    peer = reader.transport.attach(doomed.endpoint)
    doomed.pipe.close()
    doomed.process.join(10)
    with reader.read(peer, doomed) as transfer:
        assert finish(transfer, NOTICED_S) is TransferState.FAILED
    assert transfer.cause


def test_many_transfers_leave_nothing_behind(reader: Reader, source: Source) -> None:
    start_at = np.arange(0, 1 << 20, 16 << 10, dtype=np.int64)
    pieces = Segments.of(source.address + start_at, reader.address + start_at[::-1], 16 << 10)

    def read(times: int) -> None:
        for number in range(times):
            if number % 50 == 0:
                peer = reader.transport.attach(source.endpoint)
            with reader.transport.read(peer, pieces) as transfer:
                assert finish(transfer) is TransferState.DONE
            if number % 50 == 49:
                reader.transport.detach(peer)

    read(100)
    pids = os.getpid(), source.pid
    before = [_usage(pid) for pid in pids]
    read(400)
    for pid, (rss, descriptors, threads) in zip(pids, before, strict=True):
        now = _usage(pid)
        assert now[0] - rss < 4 << 20
        assert now[1] <= descriptors + 1
        assert now[2] <= threads


def _usage(pid: int) -> tuple[int, int, int]:
    """Resident bytes, file descriptors, threads."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    descriptors, threads = (len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads


def test_closing_releases_threads_and_descriptors() -> None:
    def once() -> None:
        with UcxTransport() as source, UcxTransport() as target:
            there, here = Reader(source), Reader(target)
            with here.read(target.attach(source.endpoint()), there) as transfer:
                assert finish(transfer) is TransferState.DONE

    for _ in range(2):
        once()
    _, descriptors, threads = _usage(os.getpid())
    for _ in range(5):
        once()
    assert _usage(os.getpid())[1:] == (descriptors, threads)
    assert not [thread for thread in threading.enumerate() if "ucx" in thread.name]


def test_an_idle_source_uses_no_core(reader: Reader, source: Source) -> None:
    reader.assert_reads(source)
    before = _cpu_s(source.pid)
    time.sleep(2.0)
    assert _cpu_s(source.pid) - before < 0.1


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_environment_stays_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", "64K")
    before = dict(os.environ)
    with UcxTransport() as transport:
        transport.endpoint()
    assert dict(os.environ) == before


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "no host"])
def test_hosts_that_are_not_ours_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        UcxTransport(host=host).start()


@pytest.mark.parametrize("sizes", [{"slice_bytes": 1000}, {"staging_bytes": 4096}, {"staging_bytes": 0}])
def test_impossible_staging_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="staging"):
        UcxTransport(**sizes).start()


def test_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    ucx_worker._load_ucxx.cache_clear()
    with pytest.raises(ConfigError, match="pip install ucxx-cu12"):
        UcxTransport().start()


def test_a_ucx_without_network_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc")
    with pytest.raises(ConfigError, match="UCX_TLS=rc"):
        UcxTransport().start()


def test_messages_survive_their_frame() -> None:
    offer = Offer(b"address", Process.current(), bytes(16), 1 << 20)
    addresses, lengths = np.array([1, 1 << 40]), np.array([2, 3])
    ask = Ask.of(offer, bytes(range(16)), 1 << 63, addresses, lengths)
    decoded = decode_to_source(encode(ask) + b"rest of an older message")
    assert decoded == ask
    assert isinstance(decoded, Ask)
    assert [part.tolist() for part in decoded.pieces] == [[1, 1 << 40], [2, 3]]


@pytest.mark.parametrize("data", [b"", bytes(100), b"\xff" * 100, b"\0\0\0\1\xc0"])
def test_garbage_is_no_message(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_to_source(data)
