"""A wake-up call: lets any thread end the wait of the one thread that polls sockets."""

from __future__ import annotations

import socket
from contextlib import suppress


class Wakeup:
    """A socket pair; `call()` from anywhere makes `fileno()` readable until `clear()`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """File descriptor to poll for reading."""
        return self._receiver.fileno()

    def call(self) -> None:
        """Wake the poller; a full buffer means that it is being woken already."""
        with suppress(BlockingIOError):
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Forget all calls so far; by the polling thread only."""
        with suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        """Release both ends."""
        self._receiver.close()
        self._sender.close()
