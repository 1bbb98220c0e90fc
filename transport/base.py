"""What every transport does: register memory, attach to peers, read from them, let go of everything.

The life cycle is written once here; a transport fills in how bytes move. A transport is owned by one thread:
all calls come from it. Nothing here knows plans, requests or vLLM.
"""

from __future__ import annotations

import enum
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Literal, Self

import numpy as np

from transport.endpoint import Endpoint, decode_endpoint, encode_endpoint
from transport.errors import TransferFailed
from transport.regions import Memory
from transport.segments import Int64Array, Segments

MAX_CUTS = 1 << 20
"""How many borders between stretches the segments of one read may cross: a peer chooses its stretches and strides."""


class TransferState(enum.Enum):
    """Where a transfer stands; DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer(ABC):
    """One read under way. Close it, also after a failure: only then is its target memory free to reuse."""

    moves_in_poll: ClassVar[bool] = False
    """Whether bytes move only while poll() runs: then poll again at once, waiting brings nothing."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._state = TransferState.PENDING
        self._cause = ""
        self.closed = False

    @property
    def cause(self) -> str:
        """Why the transfer failed; empty unless it did."""
        return self._cause

    @property
    def state(self) -> TransferState:
        """The state as of the last poll."""
        return self._state

    def poll(self) -> TransferState:
        """Return the state without waiting; DONE means that every byte is in place."""
        if self._state is TransferState.PENDING:
            self._advance()
        return self._state

    def close(self) -> None:
        """End the transfer; afterwards it writes no local memory any more. Bounded in time, idempotent.

        A transfer that had not ended becomes FAILED, and its target memory holds arbitrary bytes. Stopping
        one half-way can be costly (see NixlTransport): where there is time, poll until it ends, then close.
        """
        if not self.closed:
            self.closed = True
            self._release()
            self._finish(TransferState.FAILED, "closed before it ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self, state: TransferState, cause: str = "") -> None:
        """Enter a final state; the first one counts."""
        if self._state is TransferState.PENDING:
            self._state, self._cause = state, cause

    @abstractmethod
    def _advance(self) -> None:
        """Look whether a pending transfer has ended, and call `_finish` if so."""

    @abstractmethod
    def _release(self) -> None:
        """Make sure, in bounded time, that no byte arrives any more, and free what the transfer holds."""


class NothingToRead(Transfer):
    """The transfer of zero bytes: DONE from the start."""

    def __init__(self) -> None:
        super().__init__(0)
        self._finish(TransferState.DONE)

    def _advance(self) -> None:
        """Nothing is under way."""

    def _release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Handle of an attached endpoint; `name` is unique to one start of one transport."""

    name: str


class MemoryMap:
    """Registered memory of one end: finds the stretch that a segment lies in."""

    def __init__(self, memory: Sequence[Memory] = ()) -> None:
        self.memory = tuple(sorted((m for m in memory if m.num_bytes), key=lambda stretch: stretch.address))
        self._start = np.array([stretch.address for stretch in self.memory], np.int64)
        self._end = np.array([stretch.end for stretch in self.memory], np.int64)

    def find(self, addresses: Int64Array) -> Int64Array:
        """Return the index of the stretch of each address; ValueError when one lies outside of all."""
        behind = np.searchsorted(self._start, addresses, side="right")
        outside = addresses >= np.concatenate(([0], self._end))[behind]
        if outside.any():
            raise ValueError(f"address {int(addresses[np.argmax(outside)]):#x} is not in registered memory")
        return behind - 1

    def fit(self, segments: Segments, side: Literal["source", "target"]) -> Segments:
        """Cut segments where a stretch ends and the next one begins; none of them may be empty.

        ValueError when a byte lies outside of all stretches, or when there would be more than MAX_CUTS cuts.
        """
        if len(segments) == 0:
            return segments
        addresses: Int64Array = getattr(segments, side)
        first = self.find(addresses)
        if (addresses + segments.length <= self._end[first]).all():
            return segments
        last = self.find(addresses + segments.length - 1)
        self._check_no_gap(first, last)
        num_cuts = int((last - first).sum())
        if num_cuts > MAX_CUTS:
            raise ValueError(
                f"{len(segments)} segments cross {num_cuts} borders of registered memory, allowed are {MAX_CUTS}; "
                "register larger stretches"
            )
        return self._cut(segments, addresses, first, last)

    def _check_no_gap(self, first: Int64Array, last: Int64Array) -> None:
        """ValueError when some of the stretches from `first[i]` to `last[i]` do not touch."""
        num_gaps = np.concatenate(([0], np.cumsum(self._start[1:] > self._end[:-1])))
        torn = np.flatnonzero(num_gaps[first] != num_gaps[last])
        if len(torn):
            stretches = slice(int(first[torn[0]]), int(last[torn[0]]))
            ends = self._end[stretches]
            bad = int(ends[self._start[1:][stretches] > ends][0])
            raise ValueError(f"address {bad:#x} is not in registered memory")

    def _cut(self, segments: Segments, addresses: Int64Array, first: Int64Array, last: Int64Array) -> Segments:
        """Cut segment i into one piece for each stretch from `first[i]` to `last[i]`."""
        num_pieces = last - first + 1
        head = np.cumsum(num_pieces) - num_pieces
        segment = np.repeat(np.arange(len(segments)), num_pieces)
        stretch = np.arange(len(segment)) - (head - first)[segment]
        skipped = self._start[stretch] - addresses[segment]
        skipped[head] = 0
        end = np.concatenate((skipped[1:], [0]))
        end[head + num_pieces - 1] = segments.length
        return Segments(segments.source[segment] + skipped, segments.target[segment] + skipped, end - skipped)


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """What a transport keeps of a peer it can read from."""

    peer: Peer
    endpoint: Endpoint
    memory: MemoryMap


class Transport(ABC):
    """One-sided reads from attached peers into registered local memory.

    start, register, then endpoint() for those who read from here, and attach/read for reading from others.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self._started = False
        self._memory: list[Memory] = []
        self._local = MemoryMap()
        self._peers: dict[Peer, Attached] = {}
        self._transfers: dict[Transfer, Peer] = {}

    def start(self) -> None:
        """Make the transport usable. Idempotent; also after close()."""
        if not self._started:
            self._open(f"kvweave-{uuid.uuid4().hex}")
            self._started = True

    def register(self, memory: Sequence[Memory]) -> None:
        """Add memory that peers may read and reads may fill; before endpoint() and read()."""
        self._need_start()
        self._register(memory)
        self._memory.extend(memory)
        self._local = MemoryMap(self._memory)

    def endpoint(self) -> bytes:
        """Return what a peer needs for attach(); it names all memory registered so far."""
        self._need_start()
        name, metadata = self._publish()
        return encode_endpoint(self.kind, name, self._memory, metadata)

    def prepare_reads(self) -> None:
        """Do now what the first read would otherwise have to wait for; after register()."""
        self._need_start()
        self._prepare_reads()

    def attach(self, endpoint: bytes) -> Peer:
        """Make a peer readable; TransferFailed when the bytes are no endpoint or it cannot be reached.

        Attaching a known endpoint again takes over its newer list of memory.
        """
        self._need_start()
        described = decode_endpoint(endpoint, self.kind)
        peer = Peer(described.name)
        attached = Attached(peer, described, MemoryMap(described.stretches))
        self._attach(attached)
        self._peers[peer] = attached
        return peer

    def read(self, peer: Peer, segments: Segments) -> Transfer:
        """Start copying `segments` (source at the peer, target here) and return the transfer.

        ValueError when a target lies outside registered memory; TransferFailed when the peer is not attached,
        does not offer that memory or cannot be asked. Whatever happens later shows as a FAILED transfer.
        """
        self._need_start()
        if peer not in self._peers:
            raise TransferFailed(f"peer {peer.name} is not attached; call attach() with its endpoint")
        attached = self._peers[peer]
        segments = self._local.fit(segments.without_empty(), "target")
        try:
            segments = attached.memory.fit(segments, "source")
        except ValueError as error:
            raise TransferFailed(f"peer {peer.name} does not offer what is to be read: {error}") from error
        if len(segments) == 0:
            return NothingToRead()
        self._transfers = {t: p for t, p in self._transfers.items() if not t.closed}
        transfer = self._read(attached, segments)
        self._transfers[transfer] = peer
        return transfer

    def detach(self, peer: Peer) -> None:
        """Forget a peer; its transfers are closed. Unknown peers are ignored."""
        for transfer in [t for t, p in self._transfers.items() if p == peer]:
            transfer.close()
        attached = self._peers.pop(peer, None)
        if attached is not None:
            self._detach(attached)

    def close(self) -> None:
        """Close all transfers and release everything. Idempotent."""
        if not self._started:
            return
        for peer in list(self._peers):
            self.detach(peer)
        self._shut()
        self._transfers.clear()
        self._memory.clear()
        self._local = MemoryMap()
        self._started = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _need_start(self) -> None:
        if not self._started:
            raise TransferFailed("transport is not running; call start() first")

    @abstractmethod
    def _open(self, name: str) -> None:
        """Start under a name that no other transport has."""

    def _prepare_reads(self) -> None:  # noqa: B027 - most transports have nothing to prepare
        """Set up what reading needs beyond serving."""

    @abstractmethod
    def _register(self, memory: Sequence[Memory]) -> None:
        """Make `memory` reachable; ConfigError for devices that this transport cannot serve."""

    @abstractmethod
    def _publish(self) -> tuple[str, bytes]:
        """Return (name, metadata) for the endpoint."""

    @abstractmethod
    def _attach(self, attached: Attached) -> None:
        """Get ready to read from a peer, again if it is known; TransferFailed when that cannot work."""

    @abstractmethod
    def _read(self, attached: Attached, segments: Segments) -> Transfer:
        """Start a read of at least one non-empty segment, each within one stretch at both ends."""

    @abstractmethod
    def _detach(self, attached: Attached) -> None:
        """Forget a peer that has no open transfers."""

    @abstractmethod
    def _shut(self) -> None:
        """Release everything; no transfer is open, no peer attached."""
