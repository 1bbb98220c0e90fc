"""Leases of a prefill node: which finished request may still be read, by whom, and until when.

Pure bookkeeping with an explicit clock: no thread, no socket, no vLLM; `producer` drives it. A lease pins one request's
blocks until its one end. From then on every question about it is answered "expired", so that a late reader can never
take reused blocks for valid ones. Who may fire what:

    lease    event       fired by                                                        next
    GRANTED  open        a decode node with the same prompt                              OPENED
             release     a decode node that has no use for it                            ENDED, released
             expire      the clock: `lease_s` after the grant                            ENDED, expired
             close       this node stops                                                 ENDED, closed
    OPENED   open        a decode node, for one more load or repeating itself            OPENED, `lease_s` more
             renew       a decode node, for a load that is reading                       OPENED, `lease_s` more
             done        a reader of a load, when its bytes are there; the last one's    OPENED; ENDED, done
             release     a decode node, for one load; the last one's                     OPENED; ENDED, released
             expire      the clock: `lease_s` after the last open or renew               ENDED, expired
             close       this node stops                                                 ENDED, closed

    load     READING -- done by all its readers --> DONE;  READING -- release --> RELEASED

A load that is over is answered as if its lease were. A Done is confirmed again, even after the end: the first answer
may have been lost on its way, and what was true then is true of the bytes that the reader has.
"""

from __future__ import annotations

import enum
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connector.errors import LeaseBusy, LeaseExpired, LeaseUnknown, PromptMismatch

MAX_ENDED = 4096
MAX_LOADS = 1024


class LeaseEnd(enum.Enum):
    """Why a lease ended."""

    DONE = "done"
    RELEASED = "released"
    EXPIRED = "expired"
    CLOSED = "closed"


@dataclass(slots=True)
class _Load:
    """One decode node's load under a lease."""

    readers_done: set[int] = field(default_factory=set)
    num_readers: int = 0
    is_released: bool = False

    @property
    def end(self) -> LeaseEnd | None:
        """DONE or RELEASED, None while it reads."""
        if self.is_released:
            return LeaseEnd.RELEASED
        return LeaseEnd.DONE if 0 < self.num_readers <= len(self.readers_done) else None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a lease lets a decode node read: the KV of the first `num_tokens` positions of one request."""

    request_id: str
    num_tokens: int
    block_ids: tuple[npt.NDArray[np.int64], ...]
    digest: Callable[[int], bytes]
    """Digest of the first n tokens of the prompt (`connector.prompt.digest`)."""


@dataclass(slots=True)
class _Lease:
    """GRANTED while nobody has opened a load, then OPENED."""

    offer: Offer
    deadline: float
    loads: dict[str, _Load] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is remembered of a lease: enough to answer, not the request it held."""

    end: LeaseEnd
    loads: dict[str, _Load]


class LeaseTable:
    """All leases of one node. Not thread-safe: the owner holds a lock around every call.

    Every method takes `now` in seconds of one monotonic clock. Errors: `LeaseUnknown` for a capability never granted
    (or forgotten) and a load never opened, `LeaseExpired` for one that has ended, `PromptMismatch` when the prompt
    differs, `LeaseBusy` when too many loads share the lease.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._live: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._unreported: list[tuple[str, LeaseEnd]] = []

    def grant(self, offer: Offer, now: float) -> str:
        """Pin a request and return its capability: 128 random bits as 32 hexadecimal digits."""
        capability = secrets.token_hex(16)
        self._live[capability] = _Lease(offer, now + self.lease_s)
        return capability

    def open(self, capability: str, load: str, num_tokens: int, prompt_digest: bytes, now: float) -> Offer:
        """Admit a load of the first `num_tokens` positions by a reader whose prompt digest must match. Repeating it
        changes nothing but the deadline."""
        lease = self._get(capability, now)
        offer = lease.offer
        if num_tokens > offer.num_tokens:
            raise PromptMismatch("num_tokens", ours=str(offer.num_tokens), theirs=str(num_tokens))
        if prompt_digest != offer.digest(num_tokens):
            raise PromptMismatch("prompt_digest", ours="another prompt", theirs=prompt_digest.hex())
        if load not in lease.loads:
            if len(lease.loads) >= MAX_LOADS:
                raise LeaseBusy(f"{MAX_LOADS} loads share this lease")
            lease.loads[load] = _Load()
        self._reading(lease, load)
        lease.deadline = now + self.lease_s
        return offer

    def renew(self, capability: str, load: str, now: float) -> None:
        """Extend the lease for a load that reads."""
        lease = self._get(capability, now)
        self._reading(lease, load)
        lease.deadline = now + self.lease_s

    def done(self, capability: str, load: str, reader: int, num_readers: int, now: float) -> None:
        """Confirm that a reader's bytes arrived while the lease held."""
        if self._was_confirmed(capability, load, reader):
            return
        lease = self._get(capability, now)
        state = self._reading(lease, load)
        state.num_readers = num_readers
        state.readers_done.add(reader)
        self._end_if_over(capability, LeaseEnd.DONE)

    def release(self, capability: str, load: str, now: float) -> None:
        """The load will not read (any more). Releasing twice, or after the end, changes nothing; an Open of it that was
        overtaken is refused."""
        if capability in self._ended:
            return
        lease = self._get(capability, now)
        if load in lease.loads or len(lease.loads) < MAX_LOADS:
            lease.loads.setdefault(load, _Load()).is_released = True
        self._end_if_over(capability, LeaseEnd.RELEASED)

    def expire(self, now: float) -> None:
        """End every lease whose time is over."""
        for capability in [key for key, lease in self._live.items() if lease.deadline <= now]:
            self._finish(capability, LeaseEnd.EXPIRED)

    def close(self) -> None:
        """End every lease: the node stops."""
        for capability in list(self._live):
            self._finish(capability, LeaseEnd.CLOSED)

    def drain_ended(self) -> list[tuple[str, LeaseEnd]]:
        """Requests whose lease ended since the last call, each exactly once."""
        ended, self._unreported = self._unreported, []
        return ended

    @property
    def num_open(self) -> int:
        return len(self._live)

    def check_integrity(self) -> None:
        """Every lease is live or ended, never both; no live lease has only loads that are over."""
        assert not self._live.keys() & self._ended.keys()
        assert len(self._ended) <= MAX_ENDED
        for lease in self._live.values():
            assert not lease.loads or any(load.end is None for load in lease.loads.values())

    def _get(self, capability: str, now: float) -> _Lease:
        lease = self._live.get(capability)
        if lease is not None and lease.deadline <= now:
            self._finish(capability, LeaseEnd.EXPIRED)
            lease = None
        if lease is None:
            ended = self._ended.get(capability)
            raise LeaseUnknown() if ended is None else LeaseExpired(ended.end.value)
        return lease

    def _reading(self, lease: _Lease, load: str) -> _Load:
        if load not in lease.loads:
            raise LeaseUnknown()
        state = lease.loads[load]
        if state.end is not None:
            raise LeaseExpired(state.end.value)
        return state

    def _was_confirmed(self, capability: str, load: str, reader: int) -> bool:
        known = self._live.get(capability) or self._ended.get(capability)
        return known is not None and load in known.loads and reader in known.loads[load].readers_done

    def _end_if_over(self, capability: str, end: LeaseEnd) -> None:
        if all(load.end is not None for load in self._live[capability].loads.values()):
            self._finish(capability, end)

    def _finish(self, capability: str, end: LeaseEnd) -> None:
        lease = self._live.pop(capability)
        self._ended[capability] = _Ended(end, lease.loads)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._unreported.append((lease.offer.request_id, end))
