"""SIGKILL and SIGSTOP for the processes of a cluster, at seeded moments, and when each of them was dead."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice

from examples.nodes import Node

READY_TIMEOUT_S = 300.0
AFTERMATH_S = 3.0
"""Connections of a former life may break so long after the next one is ready."""


class Part(StrEnum):
    """A process group of the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    PROXY = "proxy"


class Means(StrEnum):
    """What is done to it."""

    KILL = "kill"
    STOP = "stop"


DECK = (
    *((Means.KILL, Part.PROXY), (Means.STOP, Part.DECODE), (Means.STOP, Part.PREFILL), (Means.KILL, Part.PREFILL)),
    *((Means.KILL, Part.DECODE), (Means.STOP, Part.PROXY), (Means.STOP, Part.DECODE), (Means.STOP, Part.PREFILL)),
    *((Means.KILL, Part.PROXY), (Means.STOP, Part.DECODE)),
)
"""Of the first four, one restarts a node, which takes long; of ten, two."""


@dataclass(frozen=True, slots=True)
class Blow:
    """`delay_s` after the first `after` requests were sent, the part is killed or stopped; it is started again, or goes
    on, `down_s` later."""

    after: int
    delay_s: float
    means: Means
    part: Part
    down_s: float

    def __str__(self) -> str:
        return f"{self.means} {self.part}"


def plan_blows(source: random.Random, count: int, num_requests: int) -> list[Blow]:
    """`count` blows in the order of their moments, none of them after nine tenths of the requests."""
    moments = sorted(source.randrange(num_requests // 20, num_requests * 9 // 10) for _ in range(count))
    cards = list(islice(cycle(DECK), count))
    source.shuffle(cards)
    return [
        Blow(after, source.uniform(0, 0.5), means, part, source.uniform(0.5, 8.0 if means is Means.STOP else 2.0))
        for after, (means, part) in zip(moments, cards, strict=True)
    ]


@contextmanager
def stopped(node: Node) -> Iterator[None]:
    """Context in which all processes of the node stand still."""
    os.killpg(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(node.pid, signal.SIGCONT)


def restart(node: Node, timeout_s: float = READY_TIMEOUT_S, down_s: float = 0.0) -> None:
    """End the node as a crash would, start it again on the same ports, and wait until it serves."""
    node.kill()
    time.sleep(down_s)
    node.start()
    node.wait_ready(timeout_s)


class Striker:
    """Carries out blows and knows who was dead when. Different parts may be struck at the same time, one only once."""

    def __init__(self, nodes: Mapping[Part, Node], before_kill: Callable[[Part], None]) -> None:
        self._nodes = nodes
        self._before_kill = before_kill
        self._lock = threading.Lock()
        self._down: list[tuple[Part, float, float]] = []
        self._dying: dict[Part, float] = {}
        self.carried_out: Counter[str] = Counter()

    def strike(self, blow: Blow) -> None:
        """Blocks until the part is back. Raises NodeFailed when it does not come back."""
        time.sleep(blow.delay_s)
        node = self._nodes[blow.part]
        if blow.means is Means.STOP:
            with stopped(node):
                time.sleep(blow.down_s)
        else:
            self._before_kill(blow.part)
            with self._recorded(blow.part):
                restart(node, down_s=blow.down_s)
        with self._lock:
            self.carried_out[str(blow)] += 1

    def is_down(self, parts: Collection[Part], began: float, ended: float) -> bool:
        """Whether one of the parts was dead at a moment of this time."""
        with self._lock:
            down = [*self._down, *((part, since, float("inf")) for part, since in self._dying.items())]
        return any(part in parts and since < ended and began < until for part, since, until in down)

    @contextmanager
    def _recorded(self, part: Part) -> Iterator[None]:
        began = time.monotonic()
        with self._lock:
            self._dying[part] = began
        try:
            yield
        finally:
            with self._lock:
                del self._dying[part]
                self._down.append((part, began, time.monotonic() + AFTERMATH_S))
