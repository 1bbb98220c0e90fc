"""The serving end of transport `ucx`: a thread that answers each Ask with the bytes of registered memory.

One piece is sent from where it lies; several are gathered into a staging slice first. A reader may hold half of the
slices, and loses its session when it takes nothing for STALL_S, so one that is stopped does not stop others.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transport.base import MemoryMap
from transport.control.wakeup import Wakeup
from transport.copies import gather
from transport.process import Process
from transport.regions import Memory
from transport.segments import Int64Array
from transport.staging import Slice, Staging
from transport.ucx_messages import (
    MAX_MESSAGE_BYTES,
    TO_READER,
    TO_SOURCE,
    Ask,
    Bye,
    Gone,
    Hello,
    Offer,
    Refused,
    ToReader,
    Welcome,
    decode_to_source,
    encode,
)
from transport.ucx_worker import Endpoint, Mailbox, Outbox, Request, Worker

logger = logging.getLogger(__name__)

STALL_S = 30.0
CLOSE_S = 1.0
CHECK_S = 0.5
MAX_WAITING_ASKS = 4096
_NUM_MAIL_BUFFERS = 16
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """An Ask that may be answered."""

    tag: int
    addresses: Int64Array
    lengths: Int64Array
    num_bytes: int
    device: str

    @property
    def is_one_piece(self) -> bool:
        return bool((self.addresses[:-1] + self.lengths[:-1] == self.addresses[1:]).all())


@dataclass(slots=True, eq=False)
class _Send:
    """Bytes on their way; `staged` is where they were gathered, if they were."""

    request: Request
    staged: Slice | None


@dataclass(slots=True, eq=False)
class _Session:
    """A reader: what it waits for, and what is on its way to it."""

    session: bytes
    reader: str
    process: Process
    endpoint: Endpoint
    waiting: deque[_Wanted] = field(default_factory=deque)
    sending: list[_Send] = field(default_factory=list)
    moved_at: float = field(default_factory=time.monotonic)
    checked_at: float = field(default_factory=time.monotonic)

    @property
    def num_staged(self) -> int:
        return sum(send.staged is not None for send in self.sending)


class Source:
    """Serves the memory that `memory()` gives to readers that know the key of `offer`.

    Uses `worker` from start() to close(), in a thread of its own.
    """

    def __init__(
        self, worker: Worker, offer: Offer, memory: Callable[[], MemoryMap], staging_on: Callable[[str], Staging]
    ) -> None:
        self.offer = offer
        self._worker = worker
        self._memory = memory
        self._staging_on = staging_on
        self._wakeup = Wakeup()
        self._stopping = False
        self._sessions: dict[bytes, _Session] = {}
        self._ending: list[_Session] = []
        self._turn = 0
        worker.wake_on(self._wakeup.fileno())
        self._mail = Mailbox(worker, TO_SOURCE, MAX_MESSAGE_BYTES, _NUM_MAIL_BUFFERS)
        self._replies = Outbox(worker, TO_READER)
        self._thread = threading.Thread(target=self._run, name="kvweave-ucx-source", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End all sessions and the thread; bounded by CLOSE_S for the network."""
        self._stopping = True
        self._wakeup.call()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._step():
                    self._worker.wait(_IDLE_S)
        except Exception:
            logger.exception("serving over UCX has ended; peers cannot read from here any more")
        self._shut()

    def _step(self) -> bool:
        """Do what can be done; return whether there was anything."""
        self._worker.progress()
        mail = self._mail.take()
        for data in mail:
            self._handle(data)
        for session in list(self._sessions.values()):
            self._finish(session)
            self._check(session)
        self._ending = [session for session in self._ending if not self._has_ended(session)]
        return self._start_sends() or bool(mail)

    def _handle(self, data: bytes) -> None:
        try:
            message = decode_to_source(data)
        except msgspec.MsgspecError as error:
            logger.warning("something that is no message came in over UCX: %s", error)
            return
        if not hmac.compare_digest(message.key, self.offer.key):
            logger.warning("a message with a wrong access key came in over UCX")
            return
        session = self._sessions.get(message.session)
        if isinstance(message, Hello):
            self._welcome(message, session)
        elif session is None:
            logger.debug("a message of a session that has ended came in over UCX")
        elif isinstance(message, Bye):
            self._end(session)
        elif len(session.waiting) < MAX_WAITING_ASKS:
            self._accept(session, message)
        else:
            self._end(session, f"more than {MAX_WAITING_ASKS} requests are waiting")

    def _accept(self, session: _Session, ask: Ask) -> None:
        try:
            session.waiting.append(self._check_pieces(ask))
        except ValueError as error:
            logger.warning("reader %s asked for what it cannot have: %s", session.reader, error)
            self._reply(session, Refused(session.session, ask.tag, str(error)[:1024]))

    def _welcome(self, hello: Hello, session: _Session | None) -> None:
        session = session or self._open(hello)
        if session is not None:
            self._reply(session, Welcome(hello.session))

    def _open(self, hello: Hello) -> _Session | None:
        try:
            endpoint = self._worker.connect(hello.address)
        except self._worker.error as error:
            logger.warning("reader %s cannot be reached over UCX: %s", hello.reader, error)
            return None
        session = self._sessions[hello.session] = _Session(hello.session, hello.reader, hello.process, endpoint)
        return session

    def _start_sends(self) -> bool:
        """Start one send of each reader in turn, until none can be started; return whether any was."""
        started = False
        while True:
            ready = [session for session in self._sessions.values() if self._start_send(session)]
            if not ready:
                return started
            started = True

    def _start_send(self, session: _Session) -> bool:
        """Answer the next Ask of a reader; False when there is none, or when it needs a slice and none is left."""
        if not session.waiting:
            return False
        wanted, staged = session.waiting[0], None
        if not wanted.is_one_piece:
            staged = self._take_slice(session, wanted.device)
            if staged is None:
                return False
            gather(self._memory(), wanted.addresses, wanted.lengths, staged.tensor)
        session.waiting.popleft()
        if not session.sending:
            session.moved_at = time.monotonic()
        start = staged.address if staged else int(wanted.addresses[0])
        request = self._worker.send(session.endpoint, Memory(start, wanted.num_bytes, wanted.device), wanted.tag)
        session.sending.append(_Send(request, staged))
        return True

    def _check_pieces(self, ask: Ask) -> _Wanted:
        """Return what is asked for if it may be sent; ValueError for anything else."""
        addresses, lengths = ask.pieces
        limit = self.offer.slice_bytes
        if int(lengths.min()) < 1 or int(lengths.max()) > limit or int(lengths.sum()) > limit:
            raise ValueError(f"one message has 1 to {limit} bytes, asked for pieces of {lengths.tolist()[:8]} bytes")
        memory = self._memory()
        index = memory.find(addresses)
        ends = np.array([stretch.end for stretch in memory.memory], np.int64)[index]
        if (addresses > ends - lengths).any():
            bad = int(np.flatnonzero(addresses > ends - lengths)[0])
            raise ValueError(f"{lengths[bad]} bytes at {int(addresses[bad]):#x} reach beyond registered memory")
        devices = {memory.memory[i].device for i in np.unique(index).tolist()}
        if len(devices) > 1:
            raise ValueError(f"one message cannot come from several devices, {sorted(devices)}")
        return _Wanted(int.from_bytes(ask.tag), addresses, lengths, int(lengths.sum()), devices.pop())

    def _take_slice(self, session: _Session, device: str) -> Slice | None:
        staging = self._staging_on(device)
        if session.num_staged >= max(1, staging.num_slices // 2):
            return None
        return staging.take()

    def _finish(self, session: _Session) -> None:
        """Take back what has been sent or dropped."""
        done = [send for send in session.sending if send.request.completed]
        if done:
            session.moved_at = time.monotonic()
            session.sending = [send for send in session.sending if send not in done]
        for send in done:
            if send.staged:
                self._staging_on(str(send.staged.tensor.device)).give_back(send.staged)

    def _check(self, session: _Session) -> None:
        now = time.monotonic()
        if not session.endpoint.alive:
            self._end(session)
        elif session.sending and now - session.moved_at > STALL_S:
            self._end(session, f"nothing was taken for {STALL_S:g} s")
        elif now - session.checked_at > CHECK_S:
            session.checked_at = now
            if session.process.has_ended:
                self._end(session)

    def _end(self, session: _Session, cause: str = "") -> None:
        """Forget a reader; with a cause, which it is told if it can be."""
        if cause:
            logger.warning("reader %s is cut off: %s", session.reader, cause)
        self._sessions.pop(session.session, None)
        session.waiting.clear()
        self._worker.close(session.endpoint)
        self._ending.append(session)

    def _has_ended(self, session: _Session) -> bool:
        self._finish(session)
        return not session.sending

    def _reply(self, session: _Session, message: ToReader) -> None:
        self._replies.send(session.endpoint, encode(message))

    def _shut(self) -> None:
        sessions = list(self._sessions.values())
        for session in sessions:
            self._reply(session, Gone(session.session, "it has closed its transport"))
        self._worker.progress_until(lambda: self._replies.is_empty, CLOSE_S)
        for session in sessions:
            self._end(session)
        self._worker.progress_until(lambda: all(map(self._has_ended, self._ending)), CLOSE_S)
