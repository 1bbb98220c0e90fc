"""Transport within one process: moves real bytes by memmove, and can be scripted to misbehave.

For tests and for engines that share a process; it reads only CPU memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layouts import ConfigError
from transport.base import Attached, Transfer, TransferState, Transport
from transport.errors import TransferFailed
from transport.regions import Memory
from transport.segments import Segments

_running: dict[str, MemoryTransport] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """How one read misbehaves: PENDING for some polls, then failing with `cause` if there is one.

    With `at_once` the read itself raises TransferFailed.
    """

    delay_polls: int = 0
    cause: str = ""
    at_once: bool = False


class MemoryTransport(Transport):
    """Reads from other MemoryTransports of this process; the n-th read takes the n-th of `faults`."""

    kind = "memory"

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        super().__init__()
        self._faults = deque(faults)
        self._name = ""

    def _open(self, name: str) -> None:
        self._name = name
        _running[name] = self

    def _register(self, memory: Sequence[Memory]) -> None:
        for stretch in memory:
            if stretch.device != "cpu":
                raise ConfigError(
                    f"transport 'memory' cannot reach memory on {stretch.device!r}, only 'cpu'; use transport 'nixl'"
                )

    def _publish(self) -> tuple[str, bytes]:
        return self._name, b""

    def _attach(self, attached: Attached) -> None:
        if attached.peer.name not in _running:
            raise TransferFailed(f"peer {attached.peer.name} does not run in this process")

    def _read(self, attached: Attached, segments: Segments) -> Transfer:
        fault = self._faults.popleft() if self._faults else Fault()
        if fault.at_once:
            raise TransferFailed(fault.cause or "read was refused")
        return _Copy(attached.peer.name, segments, fault)

    def _detach(self, attached: Attached) -> None:
        """Nothing is kept per peer."""

    def _shut(self) -> None:
        del _running[self._name]


class _Copy(Transfer):
    """Copies everything at the poll that ends it."""

    def __init__(self, peer_name: str, segments: Segments, fault: Fault) -> None:
        super().__init__(segments.num_bytes)
        self._peer_name = peer_name
        self._segments = segments
        self._cause_to_come = fault.cause
        self._polls_left = fault.delay_polls

    def _advance(self) -> None:
        if self._peer_name not in _running:
            self._finish(TransferState.FAILED, f"peer {self._peer_name} is gone")
        elif self._polls_left:
            self._polls_left -= 1
        elif self._cause_to_come:
            self._finish(TransferState.FAILED, self._cause_to_come)
        else:
            self._copy()
            self._finish(TransferState.DONE)

    def _copy(self) -> None:
        pieces = zip(
            self._segments.source.tolist(),
            self._segments.target.tolist(),
            self._segments.length.tolist(),
            strict=True,
        )
        for source, target, length in pieces:
            ctypes.memmove(target, source, length)

    def _release(self) -> None:
        """Bytes move only inside poll(), so nothing can arrive any more."""
