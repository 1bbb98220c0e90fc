"""Control client: asks other engines without ever making one peer wait for another.

One thread owns one ZeroMQ DEALER per address. Callers get a future; a sequence number ties each reply to
its request, so a late reply answers nobody. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq

from transport.control.address import Address, url_of
from transport.control.keys import NodeKeys
from transport.control.messages import MAX_FRAME_BYTES, Reply, Request, decode_reply, encode
from transport.control.wakeup import Wakeup
from transport.errors import PeerSilent, ProtocolError

logger = logging.getLogger(__name__)

IDLE_S = 60.0
HEARTBEAT_MS = 2000
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Call:
    """One request on its way; `deadline` is in time.monotonic() seconds."""

    sequence: int
    address: Address
    frame: bytes
    deadline: float
    timeout_s: float
    future: Future[Reply]

    @property
    def peer(self) -> str:
        return url_of(self.address)


@dataclass(slots=True)
class _Link:
    """The socket of one address and the calls that wait on it."""

    socket: zmq.Socket[bytes]
    calls: dict[int, _Call] = field(default_factory=dict)
    idle_since: float = 0.0


class ControlClient:
    """Sends requests to any number of control servers; `request` may be called from any thread.

    With `keys` every connection is encrypted, and made only to a server that proves to have the key of its host.
    """

    def __init__(self, keys: NodeKeys | None = None) -> None:
        self._keys = keys
        self._sequences = itertools.count(1)
        self._lock = threading.Lock()
        self._incoming: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._wakeup: Wakeup | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._wakeup = Wakeup()
                self._loop = _Loop(self._incoming, self._wakeup, self._keys)
                self._thread = threading.Thread(target=self._loop.run, name="kvweave-control-client", daemon=True)
                self._thread.start()

    def request(self, address: Address, message: Request, timeout_s: float) -> Future[Reply]:
        """Send `message` and return the future of its reply.

        The future raises PeerSilent when no reply came within `timeout_s` or the client was closed, and
        ProtocolError when the reply cannot be read. RuntimeError when the client is not started.
        """
        future: Future[Reply] = Future()
        deadline = time.monotonic() + timeout_s
        call = _Call(next(self._sequences), address, encode(message), deadline, timeout_s, future)
        with self._lock:
            if self._wakeup is None:
                raise RuntimeError("control client is not running; call start() before request()")
            self._incoming.append(call)
            self._wakeup.call()
        return future

    def close(self) -> None:
        """Stop; every pending future gets PeerSilent. Idempotent."""
        with self._lock:
            thread, wakeup = self._thread, self._wakeup
            self._thread = self._wakeup = None
            if thread is None or wakeup is None:
                return
            self._loop.stopping = True
            wakeup.call()
        thread.join(_CLOSE_TIMEOUT_S)
        if thread.is_alive():
            logger.error("control client: a callback does not return; its thread is left behind")
        else:
            wakeup.close()


class _Loop:
    """What the client's thread does: send what comes in, hand out replies, end what takes too long."""

    def __init__(self, incoming: deque[_Call], wakeup: Wakeup, keys: NodeKeys | None) -> None:
        self.stopping = False
        self._keys = keys
        self._incoming = incoming
        self._wakeup = wakeup
        self._links: dict[Address, _Link] = {}
        self._deadlines: list[tuple[float, int, Address]] = []

    def run(self) -> None:
        """Turn until stopped; an unexpected error fails the calls under way and is survived."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while not self.stopping:
            try:
                self._turn()
            except Exception as error:
                logger.exception("control client failed; its calls fail with it")
                self._end_all(f"the control client failed: {error}")
        self._end_all("the control client was closed")
        self._context.term()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._wait_ms()))
        self._wakeup.clear()
        while self._incoming:
            self._send(self._incoming.popleft())
        for link in [link for link in self._links.values() if link.socket in ready]:
            self._receive(link)
        self._expire(time.monotonic())

    def _wait_ms(self) -> int | None:
        ends = [link.idle_since + IDLE_S for link in self._links.values() if not link.calls]
        ends += [deadline for deadline, _, _ in self._deadlines[:1]]
        return max(0, math.ceil((min(ends) - time.monotonic()) * 1000)) if ends else None

    def _send(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            link = self._links.get(call.address) or self._connect(call.address)
            link.socket.send_multipart([call.sequence.to_bytes(8, "big"), call.frame], zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError, TypeError) as error:  # such as a host name with a NUL in it
            self._drop_if_unused(call.address)  # ZeroMQ does not try again after a failed handshake
            call.future.set_exception(PeerSilent(f"{call.peer} cannot be asked: {error}"))
            return
        link.calls[call.sequence] = call
        heapq.heappush(self._deadlines, (call.deadline, call.sequence, call.address))

    def _connect(self, address: Address) -> _Link:
        server_key = self._server_key(address)
        dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.IPV6, int(":" in address[0]))
        dealer.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        dealer.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._keys is not None:
            dealer.set(zmq.CURVE_SERVERKEY, server_key)
            dealer.set(zmq.CURVE_PUBLICKEY, self._keys.own.public)
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        try:
            dealer.connect(url_of(address))
        except zmq.ZMQError:
            dealer.close()
            raise
        self._poller.register(dealer, zmq.POLLIN)
        link = self._links[address] = _Link(dealer, idle_since=time.monotonic())
        return link

    def _server_key(self, address: Address) -> bytes:
        """The public key to expect at `address`; none without keys. ValueError when no allowed key is for it."""
        if self._keys is None:
            return b""
        self._keys = self._keys.refreshed_or_same()
        return self._keys.key_at(address[0]).public

    def _receive(self, link: _Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sequence = int.from_bytes(frames[0][:8], "big")
            if len(frames) == 2 and sequence in link.calls:  # else too late, or no answer to anything
                _settle(link.calls[sequence], frames[1])
                del link.calls[sequence]
                link.idle_since = time.monotonic()

    def _expire(self, now: float) -> None:
        """End calls whose time is up; drop links that are idle, or whose every call went unanswered.

        Dropping a silent link throws away what it still queues, so a restarted peer gets no stale requests.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, address = heapq.heappop(self._deadlines)
            link = self._links.get(address)
            call = link.calls.pop(sequence, None) if link else None
            if link is None or call is None:
                continue
            self._drop_if_unused(address)
            hint = "" if self._keys is None else "; does it allow the key of this node?"
            call.future.set_exception(PeerSilent(f"{call.peer} gave no answer within {call.timeout_s:g} s{hint}"))
        for address, link in list(self._links.items()):
            if not link.calls and now - link.idle_since >= IDLE_S:
                self._drop(address)

    def _drop_if_unused(self, address: Address) -> None:
        if address in self._links and not self._links[address].calls:
            self._drop(address)

    def _drop(self, address: Address) -> None:
        link = self._links.pop(address)
        self._poller.unregister(link.socket)
        link.socket.close(linger=0)

    def _end_all(self, cause: str) -> None:
        calls = [call for link in self._links.values() for call in link.calls.values()]
        for address in list(self._links):
            self._drop(address)
        self._deadlines.clear()
        for call in calls:
            call.future.set_exception(PeerSilent(f"{call.peer}: {cause}"))
        while self._incoming:
            call = self._incoming.popleft()
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(PeerSilent(f"{call.peer}: {cause}"))


def _settle(call: _Call, frame: bytes) -> None:
    try:
        reply = decode_reply(frame)
    except ProtocolError as error:
        call.future.set_exception(ProtocolError(f"{call.peer} answered badly: {error}"))
    else:
        call.future.set_result(reply)
