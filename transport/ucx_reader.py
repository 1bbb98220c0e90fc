"""The reading end of transport `ucx`: asks sources for messages, a window of them at a time, and puts them in place.

All work is done by the thread that polls. A read that is closed leaves what is on its way into staging memory to
arrive there unseen, and waits for what is on its way into the target.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transport.base import MemoryMap, Peer, Transfer, TransferState
from transport.copies import scatter
from transport.errors import TransferFailed
from transport.process import Process
from transport.regions import Memory
from transport.segments import Segments
from transport.staging import Slice, Staging
from transport.ucx_messages import (
    KEY_BYTES,
    MAX_PIECES,
    TO_READER,
    TO_SOURCE,
    Ask,
    Bye,
    Gone,
    Hello,
    Offer,
    Refused,
    data_tags,
    decode_to_reader,
    encode,
)
from transport.ucx_worker import Endpoint, Mailbox, Outbox, Request, Worker

CONNECT_S = 5.0
CHECK_S = 0.5
"""How often to look whether the process of a source lives, or to ask it when it sends nothing."""
SILENT_S = 4.0
"""A source that does not even answer that is given up, or after STALL_S where its process is seen to live."""
STALL_S = 30.0
CLOSE_GRACE_S = 5.0
CLOSE_S = 1.0
ALONE_BYTES = 512 << 10
"""From this size on, a piece travels alone: copying it to and from staging memory costs more than a message."""

_MAIL_BYTES = 4096
_NUM_MAIL_BUFFERS = 8


class Reader:
    """Reads from any number of sources with one worker.

    `memory()` gives the registered memory that reads may fill, `staging_on(device)` the slices to receive into.
    """

    def __init__(
        self, name: str, host: str, memory: Callable[[], MemoryMap], staging_on: Callable[[str], Staging]
    ) -> None:
        self._name = name
        self._process = Process.current()
        self._memory = memory
        self._staging_on = staging_on
        self._worker = Worker(host)
        self._mail = Mailbox(self._worker, TO_READER, _MAIL_BYTES, _NUM_MAIL_BUFFERS)
        self._outbox = Outbox(self._worker, TO_SOURCE)
        self._tags = data_tags()
        self._sessions: dict[Peer, _Session] = {}
        self._ending: list[_Session] = []

    def connect(self, peer: Peer, offer: Offer) -> None:
        """Open a session unless there is one; TransferFailed when the source does not answer within CONNECT_S."""
        session = self._sessions.get(peer)
        if session is None or session.cause:
            session = self._new_session(peer, offer)
        if not self._pump_until(lambda: session.is_open or bool(session.cause), CONNECT_S):
            self._break(session, f"gave no answer within {CONNECT_S:g} s")
        if session.cause:
            raise TransferFailed(f"peer {peer.name} cannot be attached: {session.cause}")

    def read(self, peer: Peer, segments: Segments) -> Transfer:
        """Start to read; over a new connection if the old one is lost."""
        session = self._sessions[peer]
        if session.cause and not session.is_final:
            session = self._new_session(peer, session.offer)
        slice_bytes = min(session.offer.slice_bytes, self._staging_on("cpu").slice_bytes)
        read = _UcxRead(self, session, segments.num_bytes, deque(_messages(segments, slice_bytes)))
        if session.cause:
            read.lose(session.cause)
        else:
            session.waiting.append(read)
            self.pump()
        return read

    def disconnect(self, peer: Peer) -> None:
        """End the session with a source that no open transfer reads from."""
        session = self._sessions.pop(peer, None)
        if session is not None and not session.cause:
            self._outbox.send(session.endpoint, encode(Bye(session.offer.key, session.name)))
            self._worker.progress_until(lambda: self._outbox.is_empty, CLOSE_S)
            self._break(session, "it was detached")

    def close(self) -> None:
        """Wait a little for what closed reads have left; no session is open."""
        self._pump_until(lambda: not self._ending, CLOSE_S)

    def pump(self) -> None:
        """Do what can be done without waiting: for all reads, because they share the connections."""
        self._worker.progress()
        for data in self._mail.take():
            self._handle(data)
        arrived: list[_Asked] = []
        for session in [*self._sessions.values(), *self._ending]:
            arrived += session.take_completed()
        for session in list(self._sessions.values()):
            if not session.cause:
                self._check(session)
                self._ask(session)
        for asked in arrived:
            self._deliver(asked)
        self._ending = [session for session in self._ending if session.asked]

    def withdraw(self, read: _UcxRead) -> None:
        """Make sure, in bounded time, that nothing of a read arrives in its target any more."""
        session = read.session
        read.parts.clear()
        for asked in session.asked.values():
            if asked.read is read and asked.staged:
                asked.read = None
        if not session.cause and not self._pump_until(lambda: not session.is_filling(read), CLOSE_GRACE_S):
            self._break(session, f"a read that was closed did not end within {CLOSE_GRACE_S:g} s")
        ended = self._pump_until(lambda: not session.is_filling(read), CLOSE_GRACE_S)
        assert ended, "UCX closed an endpoint and left a receive of it open"

    def _pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        def holds() -> bool:
            self.pump()
            return condition()

        return self._worker.progress_until(holds, timeout_s)

    def _new_session(self, peer: Peer, offer: Offer) -> _Session:
        if offer.process.has_ended:
            raise TransferFailed(f"peer {peer.name} cannot be reached: {_ended(offer)}")
        try:
            endpoint = self._worker.connect(offer.address)
        except self._worker.error as error:
            raise TransferFailed(f"peer {peer.name} cannot be reached: {error}") from error
        session = self._sessions[peer] = _Session(peer, offer, endpoint, offer.process.is_near)
        self._greet(session)
        return session

    def _greet(self, session: _Session) -> None:
        hello = Hello(session.offer.key, session.name, self._worker.address, self._name, self._process)
        self._outbox.send(session.endpoint, encode(hello))

    def _handle(self, data: bytes) -> None:
        try:
            message = decode_to_reader(data)
        except msgspec.MsgspecError:
            return  # not from a source: those know the name of a session
        session = next((one for one in self._sessions.values() if one.name == message.session), None)
        if session is None or session.cause:
            return
        if isinstance(message, Gone):
            session.is_final = True
            self._break(session, message.cause)
        elif isinstance(message, Refused):
            self._refuse(session, message)
        else:
            session.is_open = True
            session.heard_at = time.monotonic()

    def _refuse(self, session: _Session, message: Refused) -> None:
        """Fail the read that an Ask was for; letting go of the request cancels it, and nothing comes for it."""
        asked = session.asked.pop(int.from_bytes(message.tag), None)
        if asked is not None:
            if asked.read is not None:
                asked.read.lose(message.cause)
            self._give_back(asked)

    def _check(self, session: _Session) -> None:
        now = time.monotonic()
        silent_s = now - session.heard_at
        patience_s = STALL_S if session.is_near else SILENT_S
        if not session.endpoint.alive:
            self._break(session, "the connection is lost")
        elif not session.is_open and silent_s > CONNECT_S:
            self._break(session, f"gave no answer within {CONNECT_S:g} s")
        elif session.asked and silent_s > patience_s:
            self._break(session, f"sent nothing for {patience_s:g} s")
        elif now - session.checked_at > CHECK_S:
            session.checked_at = now
            if session.offer.process.has_ended:
                self._break(session, _ended(session.offer))
            elif session.asked and silent_s > CHECK_S:
                self._greet(session)

    def _ask(self, session: _Session) -> None:
        """Ask for more, as long as the window has room and there is memory to receive into."""
        window = max(1, self._staging_on("cpu").num_slices // 2)
        while session.is_open and session.waiting and len(session.asked) < window:
            if not session.waiting[0].parts:
                session.waiting.popleft()
            elif not self._ask_next(session, session.waiting[0]):
                return

    def _ask_next(self, session: _Session, read: _UcxRead) -> bool:
        part = read.parts[0]
        device, staged = self._device_of(part), None
        if not _is_one_piece(part):
            staged = self._staging_on(device).take()
            if staged is None:
                return False
        read.parts.popleft()
        if not session.asked:
            session.heard_at = time.monotonic()
        tag = next(self._tags)
        memory = Memory(staged.address if staged else int(part.target[0]), part.num_bytes, device)
        request = self._worker.receive(memory, tag, session.endpoint)
        session.asked[tag] = _Asked(read, part, request, staged)
        self._outbox.send(session.endpoint, encode(Ask.of(session.offer, session.name, tag, part.source, part.length)))
        return True

    def _device_of(self, part: Segments) -> str:
        memory = self._memory()
        return memory.memory[int(memory.find(part.target[:1])[0])].device

    def _deliver(self, asked: _Asked) -> None:
        read, is_whole = asked.read, asked.request.status == 0
        if asked.staged is not None and is_whole and read is not None:
            scatter(asked.staged.tensor, self._memory(), asked.part.target, asked.part.length)
        self._give_back(asked)
        if read is not None:
            read.arrived() if is_whole else read.lose("the connection is lost")

    def _give_back(self, asked: _Asked) -> None:
        if asked.staged is not None:
            self._staging_on(str(asked.staged.tensor.device)).give_back(asked.staged)

    def _break(self, session: _Session, cause: str) -> None:
        """Cut a connection; its reads fail, and what they still receive ends in one of the next rounds."""
        session.cause = cause
        for read in session.waiting:
            read.lose(cause)
        for asked in session.asked.values():
            if asked.read is not None:
                asked.read.lose(cause)
        session.waiting.clear()
        self._worker.close(session.endpoint)
        if session.asked:
            self._ending.append(session)


@dataclass(slots=True, eq=False)
class _Asked:
    """A message that is to come: whose it is (None: nobody's any more), and the slice it comes into, if any."""

    read: _UcxRead | None
    part: Segments
    request: Request
    staged: Slice | None


@dataclass(slots=True, eq=False)
class _Session:
    """A connection to a source, `is_near` if its process can be watched from here; `cause` says why it is over,
    `is_final` that there cannot be another one."""

    peer: Peer
    offer: Offer
    endpoint: Endpoint
    is_near: bool
    name: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    is_open: bool = False
    cause: str = ""
    is_final: bool = False
    waiting: deque[_UcxRead] = field(default_factory=deque)
    asked: dict[int, _Asked] = field(default_factory=dict)
    heard_at: float = field(default_factory=time.monotonic)
    checked_at: float = field(default_factory=time.monotonic)

    def take_completed(self) -> list[_Asked]:
        """Remove and return what has arrived, or never will."""
        tags = [tag for tag, asked in self.asked.items() if asked.request.completed]
        if tags:
            self.heard_at = time.monotonic()
        return [self.asked.pop(tag) for tag in tags]

    def is_filling(self, read: _UcxRead) -> bool:
        """Whether a message may still come into the target of `read`."""
        return any(asked.read is read and asked.staged is None for asked in self.asked.values())


class _UcxRead(Transfer):
    """A read as parts of one message each; `parts` are those not asked for yet."""

    def __init__(self, reader: Reader, session: _Session, num_bytes: int, parts: deque[Segments]) -> None:
        super().__init__(num_bytes)
        self._reader = reader
        self._num_missing = len(parts)
        self.session = session
        self.parts = parts

    def arrived(self) -> None:
        """One part is in place."""
        self._num_missing -= 1
        if self._num_missing == 0:
            self._finish(TransferState.DONE)

    def lose(self, cause: str) -> None:
        """It will not become whole."""
        self.parts.clear()
        self._finish(TransferState.FAILED, f"read from {self.session.peer.name} failed: {cause}")

    def _advance(self) -> None:
        self._reader.pump()

    def _release(self) -> None:
        self._reader.withdraw(self)


def _ended(offer: Offer) -> str:
    return f"process {offer.process.pid} of this host has ended"


def _messages(segments: Segments, slice_bytes: int) -> Iterator[Segments]:
    """Yield what goes in one message each: large pieces alone, small ones together."""
    segments = _cut(segments, slice_bytes)
    alone = segments.length >= ALONE_BYTES
    for index in np.flatnonzero(alone).tolist():
        yield _part(segments, slice(index, index + 1))
    small = _part(segments, ~alone)
    ends = np.cumsum(small.length)
    start, before = 0, 0
    while start < len(small):
        stop = min(int(np.searchsorted(ends, before + slice_bytes, "right")), start + MAX_PIECES)
        yield _part(small, slice(start, stop))
        start, before = stop, int(ends[stop - 1])


def _cut(segments: Segments, limit: int) -> Segments:
    """Cut pieces that are longer than `limit`."""
    if int(segments.length.max()) <= limit:
        return segments
    counts = -(-segments.length // limit)
    piece = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]) * limit
    whole = _part(segments, piece)
    return Segments(whole.source + skipped, whole.target + skipped, np.minimum(whole.length - skipped, limit))


def _part(segments: Segments, index: slice | np.ndarray) -> Segments:
    return Segments(segments.source[index], segments.target[index], segments.length[index])


def _is_one_piece(part: Segments) -> bool:
    return bool((part.target[:-1] + part.length[:-1] == part.target[1:]).all())
