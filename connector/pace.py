"""Slows an engine that has nothing to compute and only waits for a peer.

vLLM steps without a pause while a request waits for remote KV or holds blocks under a lease, and every step wakes
all workers. On a busy host that starves the very threads the engine waits for.
"""

from __future__ import annotations

import sys
import threading
import time

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5e-3, 8e-3
SWITCH_INTERVAL_S = 0.5e-3
CPU_WAIT_S = 100e-6


class Pace:
    """Pauses grow while steps stay idle; `wake` (from any thread) ends one at once."""

    def __init__(self) -> None:
        self._news = threading.Event()
        self._pause_s = FIRST_PAUSE_S

    def wake(self) -> None:
        """Something arrived that the next step can act on."""
        self._news.set()

    def step(self, *, is_idle: bool) -> None:
        """Called by the engine thread once a step; pauses before an idle one."""
        if is_idle and not self._news.wait(self._pause_s):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        else:
            self._pause_s = FIRST_PAUSE_S
        self._news.clear()


def favour_short_threads() -> None:
    """Let threads that wait for the interpreter lock have it after 0.5 ms instead of Python's 5 ms.

    A control message needs the lock about ten times; beside an engine thread that never sleeps, each time cost a whole
    interval.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))


def sleep_instead_of_spinning() -> None:
    """On the CPU platform, let vLLM's processes sleep 0.1 ms between two looks at their message queues.

    They spin with sched_yield, which pays when every process has a core of its own. On the CPU platform the cores are
    shared with everybody, and a node whose request waits for a peer never stops spinning: with two nodes of a few ranks
    on two cores, threads that were not spinning stood still for up to 9 s (Linux 6.18).
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(CPU_WAIT_S)
