"""Keeps the leases of open loads alive, notices when one is lost, and gives back those that are not needed any more.

One thread per decode engine, so that leases outlive steps of the engine that take longer than a lease. What it does is
in `step`, which is told the time and does not wait.
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

INTERVAL_S, MIN_INTERVAL_S = 1.0, 0.05
ANSWER_TIMEOUT_S, ATTEMPTS = 1.9, 2
"""A question without an answer is asked once more, over a new connection, before the peer counts as silent. The time is
just under two intervals, so that it is over when looked at."""
TRANSIENT = ("silent", "busy")

Address = tuple[str, int]


@dataclass(slots=True)
class _Task:
    """One question to one peer: a Renew, asked again and again, or a Release, asked until it is answered."""

    address: Address
    message: wire.Renew | wire.Release
    interval_s: float
    due: float
    answer: Future[wire.Reply] | None = None
    num_misses: int = 0
    """Times in a row that it got no answer."""


class Renewals:
    """Renews every load that is kept; what is lost is handed out once by `take_lost`. Thread-safe."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._kept: dict[str, _Task] = {}
        self._released: dict[str, _Task] = {}
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

    def keep(self, load: str, address: Address, capability: str, lease_s: float, now: float) -> None:
        """Renew from now on, well within the lease the peer granted."""
        interval_s = max(MIN_INTERVAL_S, min(INTERVAL_S, lease_s / 3))
        message = wire.Renew(capability=capability, load=load)
        with self._changed:
            self._kept[load] = _Task(address, message, interval_s, now + interval_s)
            self._changed.notify()

    def forget(self, load: str) -> None:
        """Do not renew any more."""
        with self._changed:
            self._kept.pop(load, None)
            self._lost.pop(load, None)

    def release(self, load: str, address: Address, capability: str, now: float) -> None:
        """Tell the peer that this load will not read. If it cannot be reached the lease ends by itself."""
        message = wire.Release(capability=capability, load=load)
        with self._changed:
            self._kept.pop(load, None)
            self._released[load] = _Task(address, message, 2 * INTERVAL_S, now)
            self._changed.notify()

    def take_lost(self) -> dict[str, str]:
        """Loads whose lease is gone, with the cause, since the last call."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return lost

    def kept(self) -> set[str]:
        """Loads renewed now, or lost and not taken yet."""
        with self._changed:
            return set(self._kept) | set(self._lost)

    @property
    def num_unreleased(self) -> int:
        """Releases that wait for their answer."""
        with self._changed:
            return len(self._released)

    def step(self, now: float) -> float | None:
        """Read answers and ask what is due; returns when the next question is, None if there is none."""
        with self._changed:
            for load, task in list(self._kept.items()):
                if task.due <= now and (cause := self._renew(task, now)):
                    self._lose(load, cause)
            for load, task in list(self._released.items()):
                if task.due <= now and self._is_released(task, now):
                    del self._released[load]
            return min((task.due for task in (*self._kept.values(), *self._released.values())), default=None)

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                next_due = self._guarded_step()
                self._changed.wait(None if next_due is None else max(0.0, next_due - time.monotonic()))

    def _guarded_step(self) -> float | None:
        try:
            return self.step(time.monotonic())
        except Exception:
            log.exception("renewing leases failed; the loads under way count as lost")
            for load in list(self._kept):
                self._lose(load, "internal")
            self._released.clear()
            return None

    def _renew(self, task: _Task, now: float) -> str:
        """Read the last answer, then ask again unless the last question is still open. Returns why the lease is lost,
        nothing if it is not."""
        task.due = now + task.interval_s
        if task.answer is not None and not task.answer.done():
            return ""
        cause = "" if task.answer is None else _refusal(task.answer)
        task.num_misses = task.num_misses + 1 if cause in TRANSIENT else 0
        if cause and task.num_misses in (0, ATTEMPTS):
            return cause
        self._ask(task)
        return ""

    def _is_released(self, task: _Task, now: float) -> bool:
        """Whether the peer knows, or cannot be told; asks if neither."""
        task.due = now + task.interval_s
        if task.answer is not None:
            if not task.answer.done():
                return False
            task.num_misses += 1
            if _refusal(task.answer) not in TRANSIENT or task.num_misses == ATTEMPTS:
                return True
        self._ask(task)
        return False

    def _ask(self, task: _Task) -> None:
        task.answer = self._client.request(task.address, task.message, ANSWER_TIMEOUT_S)

    def _lose(self, load: str, cause: str) -> None:
        del self._kept[load]
        self._lost[load] = cause


def _refusal(answer: Future[wire.Reply]) -> str:
    """Why the peer says no, nothing if it says yes."""
    try:
        reply = answer.result(timeout=0)
    except PeerSilent:
        return "silent"
    except ProtocolError:
        return "malformed"
    return reply.cause if isinstance(reply, wire.Refused) else ""
