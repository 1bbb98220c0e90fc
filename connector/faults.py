"""Decides which recurring fault is worth a log line: the first of a peer and cause, then one a minute with a count."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

INTERVAL_S = 60.0
MAX_FAULTS = 1000


@dataclass(slots=True)
class _Fault:
    logged_at: float
    num_since: int = 0


class FaultLog:
    """Not thread-safe: every thread that logs faults has one of its own. Time is handed in, in seconds."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._faults: OrderedDict[tuple[str, str], _Fault] = OrderedDict()

    def note(self, peer: str, cause: str, now: float) -> int:
        """Take note of a fault. Returns 0 to keep quiet, else how often it happened since its last line (this time
        included): log it with that count."""
        fault = self._faults.get((peer, cause))
        if fault is None:
            fault = self._faults[peer, cause] = _Fault(now)
            if len(self._faults) > MAX_FAULTS:
                self._faults.popitem(last=False)
            return 1
        fault.num_since += 1
        if now - fault.logged_at < self._interval_s:
            return 0
        times, fault.num_since, fault.logged_at = fault.num_since, 0, now
        return times
