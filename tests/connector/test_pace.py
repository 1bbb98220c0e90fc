"""An engine that only waits slows down, and is woken by news."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from connector.pace import FIRST_PAUSE_S, LONGEST_PAUSE_S, SWITCH_INTERVAL_S, Pace, favour_short_threads


@pytest.fixture
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def seconds_of(pace: Pace, *, is_idle: bool) -> float:
    began = time.monotonic()
    pace.step(is_idle=is_idle)
    return time.monotonic() - began


def test_idle_steps_pause_ever_longer_up_to_a_bound() -> None:
    pace = Pace()
    pauses = [seconds_of(pace, is_idle=True) for _ in range(8)]
    assert pauses[0] >= FIRST_PAUSE_S
    assert min(pauses[5:]) >= LONGEST_PAUSE_S


def test_a_step_with_work_does_not_pause_and_starts_over() -> None:
    pace = Pace()
    for _ in range(8):
        pace.step(is_idle=True)
    assert min(seconds_of(pace, is_idle=False) for _ in range(5)) < FIRST_PAUSE_S
    assert min(seconds_of(Pace(), is_idle=True) for _ in range(5)) < LONGEST_PAUSE_S


def test_news_end_a_pause_at_once_and_are_not_lost() -> None:
    pace = Pace()
    pace.wake()
    assert min(seconds_of(pace, is_idle=True), 1) < LONGEST_PAUSE_S
    pace._pause_s = 10.0
    threading.Timer(0.05, pace.wake).start()
    assert seconds_of(pace, is_idle=True) < 5


def test_the_switch_interval_is_lowered_never_raised(switch_interval: None) -> None:
    favour_short_threads()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    sys.setswitchinterval(1e-4)
    favour_short_threads()
    assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.05)
