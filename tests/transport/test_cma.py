"""Reads straight out of another process: how pieces are cut into calls, and who is refused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from layouts import ConfigError
from transport import CmaTransport, Memory, Segments, Transfer, TransferFailed, TransferState, cma

SIZE = 1 << 16


class Pair:
    """A source and a reader in this process, each with a buffer."""

    def __init__(self, source: CmaTransport, reader: CmaTransport) -> None:
        self.source, self.reader = source, reader
        self.there = np.random.default_rng(0).integers(1, 256, SIZE).astype(np.uint8)
        self.here = np.zeros(SIZE, np.uint8)
        source.register([Memory(self.there.ctypes.data, SIZE)])
        reader.register([Memory(self.here.ctypes.data, SIZE)])

    def read(self, source: npt.ArrayLike = 0, target: npt.ArrayLike = 0, length: npt.ArrayLike = SIZE) -> Transfer:
        """Read pieces at these offsets, or everything."""
        peer = self.reader.attach(self.source.endpoint())
        pieces = Segments.of(source, target, length)
        shifted = pieces.source + self.there.ctypes.data, pieces.target + self.here.ctypes.data
        return self.reader.read(peer, Segments(*shifted, pieces.length))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with CmaTransport() as source, CmaTransport() as reader:
        yield Pair(source, reader)


def finish(transfer: Transfer) -> TransferState:
    for _ in range(100_000):
        if transfer.poll() is not TransferState.PENDING:
            break
    return transfer.poll()


class Kernel:
    """The real calls, counted, and on request as stingy or as forbidding as a kernel may be."""

    def __init__(self, most_bytes: int | None = None, error: int = 0, fails_beside: str = "") -> None:
        self.most_bytes, self.error, self.fails_beside = most_bytes, error, fails_beside
        self.calls: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self._libc = cma._libc()
        self.prctl = self._libc.prctl

    def process_vm_readv(self, pid: int, here: int, num_here: int, there: int, num_there: int, flags: int) -> int:
        self.calls.append((num_here, num_there))
        self.threads.add(threading.current_thread().name)
        if self.fails_beside and threading.current_thread().name != self.fails_beside:
            ctypes.set_errno(errno.ESRCH)
            return -1
        if self.error:
            ctypes.set_errno(self.error)
            return -1
        if self.most_bytes is not None:
            first = np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(here)).copy()
            first[1] = min(first[1], self.most_bytes)
            here, num_here = int(first.ctypes.data), 1
            return int(self._libc.process_vm_readv(pid, here, num_here, there, num_there, flags))
        return int(self._libc.process_vm_readv(pid, here, num_here, there, num_there, flags))


def use(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cma, "_libc", lambda: kernel)
    return kernel


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most_bytes", [None, 17, 1000])
def test_any_cut_and_any_short_count(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, seed: int, most_bytes: int | None
) -> None:
    """Random pieces, some touching on one side only; few pieces and bytes a call; a kernel that stops early."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 200, 60)
    target = np.cumsum(length) - length + np.cumsum(rng.integers(0, 2, 60) * rng.integers(1, 50, 60))
    order = np.arange(60) if seed % 2 else rng.permutation(60)
    source = np.empty(60, np.int64)
    source[order] = np.cumsum(length[order]) - length[order]
    use(Kernel(most_bytes), monkeypatch)
    monkeypatch.setattr(cma, "PIECES_PER_POLL", 5)
    monkeypatch.setattr(cma, "BYTES_PER_POLL", 150)
    wanted = np.zeros(SIZE, np.uint8)
    for there, here, size in zip(source, target, length, strict=True):
        wanted[here : here + size] = pair.there[there : there + size]
    with pair.read(source, target, length) as transfer:
        assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
    assert np.array_equal(pair.here, wanted)


def test_each_side_is_merged_on_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(Kernel(), monkeypatch)
    n = np.arange(16)
    with pair.read(n * 64, n * 128, 64) as transfer:
        assert finish(transfer) is TransferState.DONE
    with pair.read(n * 128, n * 64, 64) as transfer:
        assert finish(transfer) is TransferState.DONE
    assert {(16, 1), (1, 16)} <= set(kernel.calls)


def test_a_poll_copies_a_bounded_part(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "BYTES_PER_POLL", SIZE // 4)
    monkeypatch.setattr(cma, "SHARES", 1)  # so no second thread
    with pair.read() as transfer:
        for part in range(1, 4):
            assert transfer.poll() is TransferState.PENDING
            assert np.count_nonzero(pair.here) == part * SIZE // 4
        assert transfer.poll() is TransferState.DONE


def test_two_threads_copy_each_byte_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "BYTES_PER_POLL", SIZE // 32)
    kernel = use(Kernel(), monkeypatch)
    order = np.random.default_rng(3).permutation(SIZE // 64)
    for _ in range(20):
        pair.here[:] = 0
        with pair.read(order * 64, np.arange(SIZE // 64) * 64, 64) as transfer:
            assert finish(transfer) is TransferState.DONE
        assert np.array_equal(pair.here.reshape(-1, 64), pair.there.reshape(-1, 64)[order])
    assert len({name for name in kernel.threads if name.startswith("kvweave-cma")}) == 1


def test_what_the_second_thread_meets_fails_the_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "BYTES_PER_POLL", SIZE // 32)
    use(Kernel(fails_beside="MainThread"), monkeypatch)
    with pair.read() as transfer:
        assert finish(transfer) is TransferState.FAILED
        assert "it has ended" in transfer.cause


def test_a_source_that_closes_under_way_is_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "BYTES_PER_POLL", SIZE // 2)
    monkeypatch.setattr(cma, "SHARES", 1)
    transfer = pair.read()
    assert transfer.poll() is TransferState.PENDING
    pair.source.close()
    assert finish(transfer) is TransferState.FAILED
    assert "does not offer its memory any more" in transfer.cause


def test_unmapped_memory_fails_after_what_there_was() -> None:
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    here = np.ones(2 * page, np.uint8)
    with CmaTransport() as source, CmaTransport() as reader:
        source.register([Memory(base, 2 * page)])
        reader.register([Memory(here.ctypes.data, 2 * page)])
        peer = reader.attach(source.endpoint())
        libc.munmap(base + page, page)
        with reader.read(peer, Segments.of([base], [here.ctypes.data], [2 * page])) as transfer:
            assert finish(transfer) is TransferState.FAILED
        assert "not mapped" in transfer.cause
    libc.munmap(base, page)
    assert not here[:page].any()
    assert here[page:].all()


def changed(endpoint: bytes, **changes: object) -> bytes:
    """The endpoint of a process that is the same but for `changes`."""
    outer = msgspec.msgpack.decode(endpoint)
    inner = msgspec.msgpack.decode(outer["metadata"])
    return msgspec.msgpack.encode(outer | {"metadata": msgspec.msgpack.encode(inner | changes)})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host": "elsewhere/1"}, "runs on host elsewhere/1; allowed: this host.*Use transport 'nixl'"),
        ({"uid": 4321}, "runs as user 4321; allowed: our user"),
        ({"pid": 2**22 + 1}, "cannot be read: it has ended"),
        ({"nonce_address": 4096}, "not mapped"),
        ({"nonce": b"x" * 16}, "does not offer its memory any more"),
        ({"nonce": b"x" * 16, "start_time": 1}, "its number belongs to another"),
        ({"nonce": b"short"}, "endpoint of the peer cannot be read"),
        ({"pid": -1}, "endpoint of the peer cannot be read"),
        ({"extra": 1}, "endpoint of the peer cannot be read"),
    ],
)
def test_attach_refuses_whoever_is_not_that_process(pair: Pair, changes: dict[str, object], says: str) -> None:
    with pytest.raises(TransferFailed, match=says):
        pair.reader.attach(changed(pair.source.endpoint(), **changes))


def test_a_forbidding_kernel_is_named_with_the_remedy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = pair.source.endpoint()
    use(Kernel(error=errno.EPERM), monkeypatch)
    with pytest.raises(TransferFailed, match=r"EPERM.*ptrace_scope.*CAP_SYS_PTRACE"):
        pair.reader.attach(endpoint)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_the_call_is_a_config_error(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    use(Kernel(error=error), monkeypatch)
    with pytest.raises(ConfigError, match="'cma' cannot work in this process"):
        CmaTransport().start()


def test_other_devices_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0'.*'cpu'.*nixl"):
        pair.source.register([Memory(0, 64, "cuda:0")])
