"""Keeps the leases of open loads alive, and notices when a peer has lost one or stopped answering.

One thread per decode engine, so that leases outlive steps of the engine that take longer than a lease.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from transport.control import messages as wire
from transport.control.client import ControlClient
from transport.errors import PeerSilent, ProtocolError

log = logging.getLogger(__name__)


MIN_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Renewal:
    address: tuple[str, int]
    capability: str
    interval_s: float
    due: float
    answer: Future[wire.Reply] | None = None


class Renewals:
    """Renew every registered load each `interval_s`; what is lost is handed out once by `take_lost`."""

    def __init__(self, client: ControlClient, interval_s: float, timeout_s: float) -> None:
        self._client, self._interval_s, self._timeout_s = client, interval_s, timeout_s
        self._changed = threading.Condition()
        self._renewals: dict[str, _Renewal] = {}
        self._lost: dict[str, str] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvweave-renewals", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def add(self, load: str, address: tuple[str, int], capability: str, lease_s: float) -> None:
        """Renew from now on, well within the lease the peer granted."""
        interval_s = max(MIN_INTERVAL_S, min(self._interval_s, lease_s / 3))
        with self._changed:
            self._renewals[load] = _Renewal(address, capability, interval_s, time.monotonic() + interval_s)
            self._changed.notify()

    def remove(self, load: str) -> None:
        with self._changed:
            self._renewals.pop(load, None)
            self._lost.pop(load, None)

    def take_lost(self) -> dict[str, str]:
        """Loads whose lease is gone, with the cause, since the last call."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return lost

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                for load, renewal in list(self._renewals.items()):
                    self._step(load, renewal, now)
                next_due = min((renewal.due for renewal in self._renewals.values()), default=None)
                self._changed.wait(None if next_due is None else max(0.0, next_due - time.monotonic()))

    def _step(self, load: str, renewal: _Renewal, now: float) -> None:
        """Read the last answer, then ask again, unless the last question is still open."""
        if renewal.due > now:
            return
        renewal.due = now + renewal.interval_s
        if renewal.answer is not None:
            if not renewal.answer.done():
                return
            if cause := _loss(renewal.answer):
                self._lost[load] = cause
                del self._renewals[load]
                return
        message = wire.Renew(capability=renewal.capability, load=load)
        renewal.answer = self._client.request(renewal.address, message, self._timeout_s)


def _loss(answer: Future[wire.Reply]) -> str | None:
    """Why the lease is lost, None if it holds."""
    try:
        reply = answer.result(timeout=0)
    except PeerSilent:
        return "silent"
    except ProtocolError:
        return "malformed"
    return reply.cause if isinstance(reply, wire.Refused) else None
