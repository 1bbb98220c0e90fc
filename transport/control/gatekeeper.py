"""Gatekeeper of a control server: tells libzmq during a handshake whether a key may connect (ZAP, ZeroMQ RFC 27).

libzmq has proved by then that the peer has the secret of its key. Knows keys; no message ever gets here.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from transport.control.keys import NodeKeys

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MAX_LOGGED_ADDRESSES = 1000


class Gatekeeper:
    """Answers for all sockets of one ZeroMQ context; bound before they are, or libzmq would let everybody in.

    Made in one thread and used in another, as ZeroMQ allows when the hand-over is a full fence (Thread.start is one).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: NodeKeys) -> None:
        self._keys = keys
        self._logged: set[bytes] = set()
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_waiting(self) -> None:
        """Answer every question that is there."""
        while True:
            try:
                version, question, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            welcome = mechanism == b"CURVE" and self._welcomes(address, credentials[0])
            status = (b"200", b"OK") if welcome else (b"400", b"key not allowed")
            self.socket.send_multipart([version, question, *status, b"", b""])

    def close(self) -> None:
        """Stop answering."""
        self.socket.close(linger=0)

    def _welcomes(self, address: bytes, public: bytes) -> bool:
        """Whether this key (32 bytes) is allowed now: files may have come and gone."""
        self._keys = self._keys.refreshed_or_same()
        text = z85.encode(public)
        allowed = self._keys.allows(text)
        if not allowed and address not in self._logged and len(self._logged) < MAX_LOGGED_ADDRESSES:
            self._logged.add(address)
            logger.warning(
                "control connection refused address=%s key=%s cause=not allowed (logged once per address)",
                *(address.decode(errors="replace"), text.decode()),
            )
        return allowed
