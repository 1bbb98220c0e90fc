"""Transport between two processes of one host: the reader copies straight out of the source's memory.

The kernel call is process_vm_readv ("cross memory attach", man 2 process_vm_readv). It works on process numbers,
so a random nonce in the source's memory stands for its identity: it is read when a peer is attached and once more
behind the last byte of every transfer, and wiped when the source closes. The source takes no part in a read.
CPU memory only.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct

from layouts import ConfigError
from layouts.errors import config_error
from transport.base import Attached, Peer, Transfer, TransferState, Transport
from transport.errors import TransferFailed
from transport.process import host_identity, start_time
from transport.regions import Memory
from transport.segments import Int64Array, Segments

PIECES_PER_POLL = 1024  # the most that one call takes, IOV_MAX
BYTES_PER_POLL = 4 << 20  # seen: as fast as 64 MiB, and one poll takes about 1 ms
SHARES = 8
_NO_LIMIT = 1 << 62
_NONCE_BYTES = 16
_IOVEC_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
_Label = Annotated[str, Meta(min_length=1, max_length=256)]
_Vectors = tuple[int, int]  # where an array of `struct iovec` starts, and its size


class CmaTransport(Transport):
    """Reads the memory of other processes of this host, where the kernel permits it.

    Bytes move inside `poll`, at most BYTES_PER_POLL in PIECES_PER_POLL pieces each time, without the interpreter
    lock; so one thread can serve several transfers in turns. A second thread helps with larger reads. Starting lets
    processes of the same user read this one where the Yama security module would otherwise allow that to its parents
    only, as UCX does.
    """

    kind = "cma"

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._nonce = np.zeros(_NONCE_BYTES, np.uint8)
        self._processes: dict[Peer, _Process] = {}
        self._threads: Executor | None = None

    def _open(self, name: str) -> None:
        self._name = name
        self._nonce[:] = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.uint8)
        _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails without Yama, where it is not needed
        try:
            self._myself().prove()
        except TransferFailed as error:
            raise ConfigError(f"transport 'cma' cannot work in this process: {error}") from error

    def _register(self, memory: Sequence[Memory]) -> None:
        for stretch in memory:
            if stretch.device != "cpu":
                raise config_error(
                    "transport 'cma'",
                    got=f"memory on {stretch.device!r}",
                    allowed="memory on 'cpu'",
                    remedy="Use transport 'nixl'.",
                )

    def _publish(self) -> tuple[str, bytes]:
        return self._name, msgspec.msgpack.encode(self._myself())

    def _myself(self) -> _Process:
        return _Process(
            host=host_identity(),
            uid=os.geteuid(),
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            nonce_address=int(self._nonce.ctypes.data),
            nonce=self._nonce.tobytes(),
        )

    def _attach(self, attached: Attached) -> None:
        process = _Process.decode(attached.endpoint.metadata)
        process.prove_near()
        process.prove()
        self._processes[attached.peer] = process

    def _read(self, attached: Attached, segments: Segments) -> Transfer:
        if self._threads is None and (os.cpu_count() or 1) > 1:
            self._threads = ThreadPoolExecutor(1, "kvweave-cma")
        return _CmaRead(self._processes[attached.peer], segments, self._threads)

    def _detach(self, attached: Attached) -> None:
        self._processes.pop(attached.peer, None)

    def _shut(self) -> None:
        self._nonce[:] = 0  # whoever still reads from here finds out
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


class _Process(Struct, frozen=True, forbid_unknown_fields=True):
    """A process as its readers know it: where it runs, its number, and the nonce that tells it from a later one."""

    host: _Label
    uid: _Number
    pid: _Number
    start_time: _Number
    nonce_address: _Number
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `_publish` wrote; TransferFailed for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"'cma' endpoint of the peer cannot be read: {error}") from error

    def prove_near(self) -> None:
        """TransferFailed unless the process runs on this host, in this PID namespace, as this user."""
        if self.host != host_identity():
            raise TransferFailed(
                f"transport 'cma': the peer runs on host {self.host}; allowed: this host, {host_identity()} "
                "(boot id, PID namespace). Use transport 'nixl', or let both containers share a PID namespace."
            )
        if self.uid != os.geteuid():
            raise TransferFailed(
                f"transport 'cma': the peer runs as user {self.uid}; allowed: our user, {os.geteuid()}. Run both "
                "sides as one user, or use transport 'nixl'."
            )

    def prove(self) -> None:
        """TransferFailed unless this very process can be read: it lives, it is not closed, the kernel permits it."""
        found = np.empty(_NONCE_BYTES, np.uint8)
        size = np.array([_NONCE_BYTES], np.int64)
        here, there = (_Pieces(np.array([at], np.int64), size) for at in (found.ctypes.data, self.nonce_address))
        self.copy(here.ahead(), there.ahead())
        if found.tobytes() != self.nonce:
            if start_time(self.pid) != self.start_time:
                raise TransferFailed(f"process {self.pid} has ended; its number belongs to another one now")
            raise TransferFailed(f"process {self.pid} does not offer its memory any more")

    def copy(self, here: _Vectors, there: _Vectors) -> int:
        """Copy from `there` in that process to `here` in ours as far as both reach; return the bytes, at least one."""
        copied = _libc().process_vm_readv(self.pid, *here, *there, 0)
        if copied > 0:
            return int(copied)
        raise TransferFailed(f"process {self.pid} cannot be read: {self._reason(ctypes.get_errno())}")

    def _reason(self, number: int) -> str:
        if number == errno.ESRCH:
            return "it has ended"
        if number == errno.EFAULT:
            return "the memory asked for is not mapped, here or there"
        if number == errno.EPERM:
            return (
                "got EPERM; allowed: readers of its user and group with kernel.yama.ptrace_scope at most 1, or with "
                "CAP_SYS_PTRACE. Set kernel.yama.ptrace_scope=1 (the sysctl), grant CAP_SYS_PTRACE to the reader, or "
                "use transport 'nixl'"
            )
        return os.strerror(number) if number else "nothing was copied"


class _CmaRead(Transfer):
    """One read in a few shares, taken one after the other by poll() and by a second thread."""

    moves_in_poll = True

    def __init__(self, process: _Process, segments: Segments, threads: Executor | None) -> None:
        super().__init__(segments.num_bytes)
        self._process = process
        self._left = deque(_shares(segments))
        self._mine: _Share | None = None
        self._stopped = False
        self._help = threads.submit(self._take_shares) if threads is not None and len(self._left) > 1 else None

    def _advance(self) -> None:
        try:
            self._mine = self._mine or self._next()
            if self._mine is not None and self._mine.copy_some(self._process):
                self._mine = None
            if self._mine is None and not self._left and self._has_helped():
                self._process.prove()
                self._finish(TransferState.DONE)
        except TransferFailed as error:
            self._finish(TransferState.FAILED, str(error))

    def _has_helped(self) -> bool:
        """Whether the second thread has nothing of this read any more; raises what it met."""
        if self._help is None or self._help.cancel():
            return True
        if self._help.done():
            self._help.result()
        return self._help.done()

    def _take_shares(self) -> None:
        while (share := self._next()) is not None:
            while not self._stopped and not share.copy_some(self._process):
                pass

    def _next(self) -> _Share | None:
        try:
            return None if self._stopped else self._left.popleft()
        except IndexError:
            return None

    def _release(self) -> None:
        """The second thread is in one call at most."""
        self._stopped = True
        if self._help is not None and not self._help.cancel():
            self._help.exception()


class _Share:
    """Part of a read, as two lists of pieces of the same bytes that are used up together."""

    def __init__(self, segments: Segments) -> None:
        self._num_bytes = segments.num_bytes
        self._here = _Pieces(*_cut(*_joined(segments.target, segments.length)))
        self._there = _Pieces(*_joined(segments.source, segments.length))

    def copy_some(self, process: _Process) -> bool:
        """Copy as much as one call does; returns whether all is done."""
        copied = process.copy(self._here.ahead(BYTES_PER_POLL), self._there.ahead())
        self._there.advance(copied)
        return self._here.advance(copied) == self._num_bytes


def _shares(segments: Segments) -> list[_Share]:
    """Cut at most SHARES of about equal numbers of bytes."""
    source, length = _cut(segments.source, segments.length)
    segments = Segments(source, _cut(segments.target, segments.length)[0], length)
    ends = np.cumsum(segments.length)
    number = min(SHARES, max(1, int(ends[-1]) // BYTES_PER_POLL))
    cuts = np.unique(np.searchsorted(ends, ends[-1] * np.arange(1, number) // number, side="right"))
    borders = [0, *cuts[(cuts > 0) & (cuts < len(ends))].tolist(), len(ends)]
    return [
        _Share(Segments(segments.source[a:b], segments.target[a:b], segments.length[a:b])) for a, b in pairwise(borders)
    ]


class _Pieces:
    """Pieces of memory in the form the kernel takes, and how many of their bytes are done; none may be empty.

    Polling takes microseconds because it touches no array as a whole, only items, through memoryviews.
    """

    def __init__(self, address: Int64Array, length: Int64Array) -> None:
        vectors = np.stack([address, length], axis=1)  # int64 serves as void* and size_t
        self._pointer, self._count = int(vectors.ctypes.data), len(vectors)
        self._vectors = vectors.data
        self._ends = np.cumsum(length).data
        self._done = 0
        self._first = 0

    def ahead(self, num_bytes: int = _NO_LIMIT) -> _Vectors:
        """Return the next pieces: at most PIECES_PER_POLL, and beyond the first one at most `num_bytes`."""
        stop = min(self._first + PIECES_PER_POLL, self._count)
        stop = max(self._first + 1, bisect_right(self._ends, self._done + num_bytes, self._first, stop))
        return self._pointer + self._first * _IOVEC_BYTES, stop - self._first

    def advance(self, num_bytes: int) -> int:
        """Take `num_bytes` off the front; return how many bytes are done in all."""
        self._done += num_bytes
        self._first = bisect_right(self._ends, self._done, self._first)
        if self._first < self._count:
            left = self._ends[self._first] - self._done
            self._vectors[self._first, 0] += self._vectors[self._first, 1] - left
            self._vectors[self._first, 1] = left
        return self._done


def _joined(address: Int64Array, length: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Make one piece of neighbours that touch."""
    apart = address[:-1] + length[:-1] != address[1:]
    if apart.all():
        return address, length
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return address[first], np.add.reduceat(length, first)


def _cut(address: Int64Array, length: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Make pieces of at most BYTES_PER_POLL."""
    if int(length.max()) <= BYTES_PER_POLL:
        return address, length
    counts = -(-length // BYTES_PER_POLL)
    piece = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]) * BYTES_PER_POLL
    return address[piece] + skipped, np.minimum(length[piece] - skipped, BYTES_PER_POLL)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library, whose calls release the interpreter lock; ConfigError where it lacks the one needed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        raise config_error(
            "transport 'cma'", got=f"{sys.platform} without process_vm_readv", allowed="Linux", remedy="Use 'nixl'."
        )
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc
