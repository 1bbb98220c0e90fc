"""Control server: answers the requests of other engines in a thread of its own, and never dies of one.

It knows frames and threads; what a request means is the business of the handler it is given.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from layouts import ConfigError
from transport.control.address import Address, bindable_address, url_of
from transport.control.gatekeeper import Gatekeeper
from transport.control.keys import NodeKeys
from transport.control.messages import (
    MAX_REQUEST_BYTES,
    Refused,
    Reply,
    Request,
    WrongVersion,
    as_text,
    decode_request,
    encode,
)
from transport.control.wakeup import Wakeup
from transport.errors import ProtocolError

logger = logging.getLogger(__name__)

MAX_ENVELOPE_FRAMES = 1
MAX_ENVELOPE_BYTES = 64
HANDSHAKE_MS = 5000
_CLOSE_TIMEOUT_S = 5.0


class ControlServer:
    """ZeroMQ ROUTER on (host, port) that passes each request to `handler` and sends back its reply.

    A message is an optional envelope frame (the client's sequence number, echoed unread) and a frame of
    `messages`. Anything else is answered with Refused; frames beyond twice MAX_REQUEST_BYTES cut the
    connection. `handler` runs in the server's thread and should not block; a ProtocolError it raises is the
    peer's fault, any other exception is ours: both are answered with Refused("malformed").

    With `keys` everything is encrypted, and who does not prove to have an allowed key is cut off in the handshake.
    """

    def __init__(self, host: str, port: int, handler: Callable[[Request], Reply], keys: NodeKeys | None = None) -> None:
        self._host = host
        self._port = port
        self._handler = handler
        self._keys = keys
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._wakeup: Wakeup | None = None
        self._stopping = False

    @property
    def address(self) -> Address:
        """(host, port) to advertise; after start() the numeric address and the real port."""
        return self._host, self._port

    def start(self) -> None:
        """Bind and serve; ConfigError when the address is taken, a wildcard or not ours. Idempotent."""
        if self._thread is not None:
            return
        number, port = bindable_address(self._host, self._port)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.set(zmq.IPV6, int(":" in number))
        router.set(zmq.MAXMSGSIZE, 2 * MAX_REQUEST_BYTES)
        router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)  # who connects and says nothing does not keep its place
        gatekeeper = None
        if self._keys is not None:
            gatekeeper = Gatekeeper(context, self._keys)
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        try:
            router.bind(url_of((number, port)))
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(
                f"control port {port} on {self._host!r} cannot be bound ({error}); "
                "set `port` to a free port, or to 0 to pick one"
            ) from error
        self._host = number
        self._port = int(router.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        self._context, self._wakeup, self._stopping = context, Wakeup(), False
        self._thread = threading.Thread(
            target=self._serve, args=(router, gatekeeper, self._wakeup), name="kvweave-control-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        if self._thread is None or self._context is None or self._wakeup is None:
            return
        self._stopping = True
        self._wakeup.call()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("control server on port %d: its handler does not return; left behind", self._port)
        else:
            self._context.term()
            self._wakeup.close()
        self._thread = self._context = self._wakeup = None

    def _serve(self, router: zmq.Socket[bytes], gatekeeper: Gatekeeper | None, wakeup: Wakeup) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        if gatekeeper is not None:
            poller.register(gatekeeper.socket, zmq.POLLIN)
        poller.register(wakeup.fileno(), zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll()
                wakeup.clear()
                if gatekeeper is not None:
                    gatekeeper.answer_waiting()
                self._answer_waiting(router)
        finally:
            router.close(linger=0)
            if gatekeeper is not None:
                gatekeeper.close()

    def _answer_waiting(self, router: zmq.Socket[bytes]) -> None:
        while not self._stopping:
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope, frame = _split(frames)
            reply = self._answer(frame)
            with suppress(zmq.Again):  # a client that does not read its answers loses them
                router.send_multipart([identity, *envelope, reply], zmq.NOBLOCK)

    def _answer(self, frame: bytes) -> bytes:
        """Return the frame that answers `frame`; the one blanket except of this thread."""
        try:
            return encode(self._handler(decode_request(frame)))
        except WrongVersion as error:
            return _refusal("version", error)
        except ProtocolError as error:
            return _refusal("malformed", error)
        except Exception as error:
            logger.exception("control request failed in its handler")
            return _refusal("malformed", f"the handler failed: {type(error).__name__}")


def _split(frames: Sequence[bytes]) -> tuple[Sequence[bytes], bytes]:
    """Split what came into (envelope to echo, message frame); an oversized envelope spoils the message."""
    if not frames:
        return (), b""
    envelope = frames[:-1]
    if len(envelope) > MAX_ENVELOPE_FRAMES or any(len(part) > MAX_ENVELOPE_BYTES for part in envelope):
        return (), b""
    return envelope, frames[-1]


def _refusal(cause: str, detail: object) -> bytes:
    refused = Refused("version" if cause == "version" else "malformed", detail=as_text(detail, 4096))
    return encode(refused)
