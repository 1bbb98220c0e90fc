"""Reader side of moves through staging memory: a read in slices that the source gathers, this side scatters, or both.

Slices are pipelined: the source gathers the next ones while this side reads and scatters the present one. What
was read from a gathered slice counts only when the packer confirms that it held its bytes until it was given back.
Knows segments and peers; knows no plans or requests.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transport.base import MemoryMap, NothingToRead, Peer, Transfer, TransferState, Transport
from transport.control import ControlClient
from transport.control.messages import MAX_PIECES, Gather, Gathered, GiveBack, Ok, Refused, Reply
from transport.copies import common_divisor, scatter
from transport.errors import TransferFailed, TransportError
from transport.packing import PackerAddress
from transport.segments import Int64Array, Segments
from transport.staging import Slice, Staging

DEPTH = 3
TIMEOUT_S = 30.0
_FIRST_RETRY_S = 0.001
_LAST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Unpacker:
    """What all reads through staging memory of one I/O thread share.

    `staging` must be registered with the transports; `memory` is the cache that reads fill. A read has up to
    `depth` slices asked for or being read, and fails when the source does not answer, or has no free slice, for
    `timeout_s`. `copier` scatters one slice while the next is read. `wake` is called from another thread whenever
    something has happened that poll() can act on.
    """

    client: ControlClient
    staging: Staging
    memory: MemoryMap
    wake: Callable[[], None]
    copier: Executor
    depth: int = DEPTH
    timeout_s: float = TIMEOUT_S

    def read(
        self,
        transport: Transport,
        peer: Peer,
        packer: PackerAddress | None,
        segments: Segments,
        *,
        scatters: bool = True,
    ) -> Transfer:
        """Start copying `segments` (source at the peer, target here).

        With a `packer`, which packs for that peer, the source gathers, and each read is contiguous there; else pieces
        are read where they lie. If this side `scatters`, each read is contiguous here; else it fills the cache itself.
        ValueError when a target lies outside of the cache. Whatever happens later shows as a FAILED transfer.
        """
        segments = self.memory.fit(segments.without_empty(), "target")
        if len(segments) == 0:
            return NothingToRead()
        return StagedRead(self, transport, peer, packer, segments, scatters)


def cut_slices(
    segments: Segments, slice_bytes: int, max_pieces: int = MAX_PIECES, order: Literal["source", "target"] = "source"
) -> list[Segments]:
    """Order non-empty segments by address, and cut them into slices of at most `slice_bytes` and `max_pieces`.

    Pieces are cut at multiples of the common divisor of all lengths, so between tokens, unless that is larger than
    a slice.
    """
    address = segments.source if order == "source" else segments.target
    if (address[1:] < address[:-1]).any():
        sorted_ = np.argsort(address, kind="stable")
        segments = Segments(segments.source[sorted_], segments.target[sorted_], segments.length[sorted_])
    length = int(segments.length[0])
    if length <= slice_bytes and (segments.length == length).all():
        starts = list(range(0, len(segments), min(max_pieces, slice_bytes // length)))
    else:
        unit = common_divisor(segments.length)
        segments, number = _cut_at_multiples(segments, slice_bytes // unit * unit or slice_bytes)
        first = np.flatnonzero(np.diff(number, prepend=-1))
        rank = np.arange(len(number)) - np.repeat(first, np.diff(first, append=len(number)))
        starts = np.flatnonzero(rank % max_pieces == 0).tolist()
    return [
        Segments(segments.source[start:stop], segments.target[start:stop], segments.length[start:stop])
        for start, stop in zip(starts, [*starts[1:], len(segments)], strict=True)
    ]


def _cut_at_multiples(segments: Segments, size: int) -> tuple[Segments, Int64Array]:
    """Cut segments, thought of as lying one after the other, at multiples of `size`; number the stretches."""
    end = np.cumsum(segments.length)
    start = end - segments.length
    first = start // size
    counts = (end - 1) // size - first + 1
    if int(counts.max()) == 1:
        return segments, first
    parent = np.repeat(np.arange(len(first)), counts)
    number = first[parent] + np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut_start = np.maximum(start[parent], number * size)
    cut_end = np.minimum(end[parent], (number + 1) * size)
    moved = cut_start - start[parent]
    return Segments(segments.source[parent] + moved, segments.target[parent] + moved, cut_end - cut_start), number


@dataclass(slots=True, eq=False)
class _Part:
    """One slice on its way: gathered on demand (`answer`) or not at all, then read into the cache, or into `local` and
    from there scattered into the cache (`copy`)."""

    pieces: Segments
    local: Slice | None
    answer: Future[Reply] | None = None
    slice_id: int = -1
    read: Transfer | None = None
    copy: Future[None] | None = None


class StagedRead(Transfer):
    """A read through staging slices; all progress but the last copy is made in poll(), by the thread that calls it.

    While this side has no free slice it waits; the source refuses for want of one, and is asked again later.
    """

    def __init__(
        self,
        shared: Unpacker,
        transport: Transport,
        peer: Peer,
        packer: PackerAddress | None,
        segments: Segments,
        scatters: bool,
    ) -> None:
        super().__init__(segments.num_bytes)
        self._shared = shared
        self._transport = transport
        self._peer = peer
        self._packer = packer
        self._scatters = scatters
        self._reader = uuid.uuid4().hex
        slice_bytes = min(shared.staging.slice_bytes, packer.slice_bytes if packer else shared.staging.slice_bytes)
        self._waiting = deque(cut_slices(segments, slice_bytes, order="source" if scatters else "target"))
        self.num_reads = len(self._waiting)
        self._parts: list[_Part] = []
        self._read_slices: list[int] = []  # to give back
        self._confirmations: list[Future[Reply]] = []
        self._served = time.monotonic()
        self._retry_s, self._retry_at = _FIRST_RETRY_S, 0.0
        self.poll()

    def _advance(self) -> None:
        try:
            self._start_slices()
            for part in list(self._parts):
                self._drive(part)
            self._confirmations = [future for future in self._confirmations if not self._is_confirmed(future)]
        except TransportError as error:
            self._finish(TransferState.FAILED, f"staged read from {self._peer.name} failed: {error}")
        else:
            if not (self._waiting or self._parts or self._confirmations):
                self._finish(TransferState.DONE)

    def _start_slices(self) -> None:
        """Start slices while there is room for them, and return those that are read."""
        while self._waiting and self._num_asked < self._shared.depth and time.monotonic() >= self._retry_at:
            local = self._shared.staging.take() if self._scatters else None
            if local is None and self._scatters:
                break
            part = _Part(self._waiting.popleft(), local)
            self._parts.append(part)
            if self._packer is None:
                self._read(part, None)
            else:
                part.answer = self._ask(self._packer, part.pieces)
        if self._packer is not None and self._read_slices:
            message = GiveBack(self._packer.access, self._reader, self._read_slices)
            self._confirmations.append(self._request(self._packer, message))
            self._read_slices = []

    @property
    def _num_asked(self) -> int:
        return sum(part.copy is None for part in self._parts)

    def _ask(self, packer: PackerAddress, pieces: Segments) -> Future[Reply]:
        """Ask for a slice, and return those that are read with the same message."""
        message = Gather(packer.access, self._reader, *_source_runs(pieces), self._read_slices)
        self._read_slices = []
        return self._request(packer, message)

    def _read(self, part: _Part, gathered: int | None) -> None:
        """Start to read a slice: from address `gathered`, where it is in one piece, or from where its pieces lie."""
        pieces = part.pieces
        if gathered is not None and part.local is not None:
            segments = Segments.of([gathered], [part.local.address], [pieces.num_bytes])
        else:
            flat = _flat_offsets(pieces)
            source = pieces.source if gathered is None else gathered + flat
            target = pieces.target if part.local is None else part.local.address + flat
            segments = Segments(source, target, pieces.length).merged()
        part.read = self._transport.read(self._peer, segments)

    def _drive(self, part: _Part) -> None:
        """Take a slice as far as it goes: its answer, its read, its way to the cache."""
        if part.copy is not None:
            if part.copy.done():
                part.copy.result()
                self._end(part)
            return
        if part.read is None and part.answer is not None and part.answer.done():
            self._take_answer(part, part.answer.result())
        if part.read is None:
            return
        while part.read.poll() is TransferState.PENDING:
            if not part.read.moves_in_poll:
                return
        part.read.close()
        if part.read.poll() is TransferState.FAILED:
            raise TransferFailed(part.read.cause)
        if part.answer is not None:
            self._read_slices.append(part.slice_id)
        if part.local is None:
            self._end(part)
        else:
            pieces = part.pieces
            part.copy = self._shared.copier.submit(
                scatter, part.local.tensor, self._shared.memory, pieces.target, pieces.length
            )
            part.copy.add_done_callback(lambda _: self._shared.wake())
        self._start_slices()  # at once, so that the source is not idle meanwhile
        self._shared.wake()  # the next slice is worth a look soon

    def _take_answer(self, part: _Part, answer: Reply) -> None:
        """Start to read a gathered slice, or put it back in line when the source has none free."""
        if isinstance(answer, Gathered) and answer.num_bytes == part.pieces.num_bytes:
            self._served, self._retry_s = time.monotonic(), _FIRST_RETRY_S
            part.slice_id = answer.slice_id
            self._read(part, answer.address)
        elif isinstance(answer, Refused) and answer.cause == "busy":
            self._end(part)
            self._waiting.appendleft(part.pieces)
            self._retry_later(answer)
        else:
            raise _unexpected(answer)

    def _retry_later(self, answer: Refused) -> None:
        now = time.monotonic()
        if now - self._served > self._shared.timeout_s:
            raise TransferFailed(f"no slice for {self._shared.timeout_s:g} s: {answer.detail}")
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _is_confirmed(self, future: Future[Reply]) -> bool:
        if future.done() and not isinstance(answer := future.result(), Ok):
            raise _unexpected(answer)
        return future.done()

    def _request(self, packer: PackerAddress, message: Gather | GiveBack) -> Future[Reply]:
        future = self._shared.client.request(packer.control, message, self._shared.timeout_s)
        future.add_done_callback(lambda _: self._shared.wake())
        return future

    def _end(self, part: _Part) -> None:
        """A slice is through, or has to be asked for anew."""
        self._parts.remove(part)
        if part.local is not None:
            self._shared.staging.give_back(part.local)

    def _release(self) -> None:
        """End reads and copies first: until then they write into local slices and into the cache."""
        for part in list(self._parts):
            if part.read is not None:
                part.read.close()
            if part.copy is not None and not part.copy.cancel():
                part.copy.exception()  # waits for a copy of one slice
            self._end(part)
        self._waiting.clear()
        if self._packer is not None and self._state is not TransferState.DONE:
            with suppress(RuntimeError):  # the client is closed already; the packer reclaims in time
                message = GiveBack(self._packer.access, self._reader, [], leaving=True)
                self._shared.client.request(self._packer.control, message, self._shared.timeout_s)


def _flat_offsets(pieces: Segments) -> Int64Array:
    """Where in a slice each piece lies."""
    return np.cumsum(pieces.length) - pieces.length


def _source_runs(pieces: Segments) -> tuple[bytes, bytes]:
    """Return addresses and lengths for Gather, neighbours joined, a single length where all are alike."""
    source, length = pieces.source, pieces.length
    touching = source[:-1] + length[:-1] == source[1:]
    if touching.any():
        first = np.flatnonzero(np.concatenate(([True], ~touching)))
        source, length = source[first], np.add.reduceat(length, first)
    if (length == length[0]).all():
        length = length[:1]
    return source.astype("<i8", copy=False).tobytes(), length.astype("<i8").tobytes()


def _unexpected(answer: Reply) -> TransferFailed:
    if isinstance(answer, Refused):
        return TransferFailed(f"packer refused ({answer.cause}): {answer.detail}")
    return TransferFailed(f"packer answered with {answer}")
