"""A load moves only as its table says, ends once, and releases its lease exactly when the prefill node must know."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector import load as module
from connector.faults import INTERVAL_S, MAX_FAULTS, FaultLog
from connector.load import LEASE_IS_OVER, TRANSITIONS, Attempts, End, Event, Load, Outcome, State


def fire(load: Load, event: Event, now: float = 1.0, *, cause: str = "silent", flag: bool = False) -> None:
    match event:
        case Event.ANSWERED:
            load.answered(now)
        case Event.DECLINED:
            load.declined(cause, now)
        case Event.SPARED:
            load.spared(now)
        case Event.DISPATCHED:
            load.dispatched(load.num_tokens - load.start, now)
        case Event.LOST:
            load.lost(cause, now)
        case Event.ABANDONED:
            load.abandoned(by_error=flag, now=now)
        case Event.REPORTED:
            load.reported(has_failed=flag, now=now)


def test_the_docstring_shows_the_table() -> None:
    state, shown = State.OPENING, {}
    for line in (module.__doc__ or "").splitlines():
        if row := re.fullmatch(r"    ([A-Z]*) +([a-z]+) {2,}.*  ([A-Z]+)(?:, [a-z_ ]+)?", line):
            state = State[row[1]] if row[1] else state
            shown[state, Event[row[2].upper()]] = State[row[3]]
    assert shown == TRANSITIONS


def test_every_state_is_left_and_only_ended_is_final() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.ENDED}
    reached = {State.OPENING}
    for _ in State:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(State)


@pytest.mark.parametrize("event", Event)
def test_what_a_state_does_not_allow_is_a_bug(event: Event) -> None:
    load = Load(8, 0.0)
    if load.allows(event):
        fire(load, event)
    else:
        with pytest.raises(KeyError):
            fire(load, event)
        assert load == Load(8, 0.0)


RELEASED = {
    (Event.DECLINED, "silent"): True,
    (Event.DECLINED, "incompatible"): True,
    (Event.DECLINED, "unknown"): False,
    (Event.DECLINED, "expired"): False,
    (Event.SPARED, ""): True,
    (Event.ABANDONED, ""): True,
}


@pytest.mark.parametrize(("event", "cause"), RELEASED)
@pytest.mark.parametrize("is_ready", [False, True])
def test_ends_before_the_load_release_what_is_held(event: Event, cause: str, is_ready: bool) -> None:
    load = Load(8, 0.0)
    if is_ready:
        load.answered(0.5)
    fire(load, event, cause=cause)
    assert load.state is State.ENDED and load.take_release() is RELEASED[event, cause]
    assert not load.take_release()


def loading(start: int = 4) -> Load:
    load = Load(8, 0.0)
    load.answered(1.0)
    load.start = start
    load.dispatched(8 - start, 2.0)
    return load


def test_a_confirmed_load_is_not_released_and_a_failed_one_is() -> None:
    for has_failed in (False, True):
        load = loading()
        load.reported(has_failed=has_failed, now=3.0)
        assert load.end == (End(Outcome.FAILED, "read") if has_failed else End(Outcome.LOADED))
        assert load.take_release() is has_failed


def test_s17_an_abandoned_load_is_released_at_once_and_ends_with_its_reads() -> None:
    """Its request is over while reads are under way: the prefill node may go, the blocks here may not."""
    for by_error, outcome in ((False, End(Outcome.ABORTED)), (True, End(Outcome.FAILED, "expired"))):
        load = loading()
        load.lost("expired", 2.5)
        load.abandoned(by_error=by_error, now=3.0)
        assert load.end is None and load.is_parked and load.take_release()
        load.reported(has_failed=True, now=9.0)
        assert load.end == outcome and not load.take_release()


def test_a_load_takes_only_what_it_was_offered() -> None:
    load = Load(8, 0.0, start=4)
    load.answered(1.0)
    for num_tokens in (0, 5):
        with pytest.raises(AssertionError):
            load.dispatched(num_tokens, 2.0)


class LoadLife(RuleBasedStateMachine):
    """Random events against a dict of what must be known of a load."""

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(8, 0.0)
        self.model = {"state": "OPENING", "since": 0.0, "end": None, "releases": 0, "due": 0}
        self.now = 0.0

    @rule(event=st.sampled_from(Event), cause=st.sampled_from(["silent", "unknown", "expired"]), flag=st.booleans())
    def happens(self, event: Event, cause: str, flag: bool) -> None:
        model, self.now = self.model, self.now + 1
        before = State[str(model["state"])]
        if (before, event) not in TRANSITIONS:
            assert not self.load.allows(event)
            return
        fire(self.load, event, self.now, cause=cause, flag=flag)
        after = TRANSITIONS[before, event]
        model |= {"state": after.name, "since": model["since"] if after is before else self.now}
        if event is Event.LOST:
            model["loss"] = cause
        if event is Event.ABANDONED and before is State.LOADING:
            model |= {"verdict": "failed" if flag else "aborted", "due": 1}
        if after is State.ENDED:
            assert model["end"] is None, "an end is final"
            model["end"] = self.expected_end(event, flag)
            keeps = model["end"] == "loaded" or (event is Event.DECLINED and cause in LEASE_IS_OVER)
            model["due"] = 0 if keeps else 1

    def expected_end(self, event: Event, flag: bool) -> str:
        if event is Event.REPORTED:
            return str(self.model.get("verdict") or ("failed" if flag else "loaded"))
        return {Event.DECLINED: "local_prefill", Event.SPARED: "local_hit", Event.ABANDONED: "aborted"}[event]

    @rule()
    def release(self) -> None:
        self.model["releases"] += self.load.take_release()

    @invariant()
    def is_as_modelled(self) -> None:
        load, model = self.load, self.model
        load.check_integrity()
        assert (load.state.name, load.since) == (model["state"], model["since"])
        assert (load.end.outcome.value if load.end else None) == model["end"]
        assert model["releases"] <= model["due"], "released once, and only if it must be"
        if load.end and load.end.outcome is Outcome.FAILED:
            assert load.end.cause == model.get("loss", "read")


TestLoadLife = LoadLife.TestCase
TestLoadLife.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@given(timeout_s=st.floats(1, 3600), jitter=st.floats(0, 1))
def test_attempts_pause_longer_each_time_and_stop_in_time(timeout_s: float, jitter: float) -> None:
    attempts, asked, now = Attempts.starting(100.0, timeout_s, jitter), [], 100.0
    while not attempts.is_over(now):
        assert attempts.is_due(now)
        attempts.made(now)
        assert not attempts.is_due(now)
        asked.append(now)
        now = attempts.due
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert asked[0] == 100.0 and asked[-1] < 100.0 + timeout_s and len(asked) >= 3
    assert len(asked) <= 14, "an hour is enough for twelve doublings of a second"
    assert all(after == pytest.approx(2 * before) for before, after in itertools.pairwise(pauses))


def test_recurring_faults_are_logged_once_per_peer_and_cause_with_counts() -> None:
    faults = FaultLog()
    assert faults.note("a:1", "silent", 0.0) == 1
    assert [faults.note("a:1", "silent", float(second)) for second in range(1, 60)] == [0] * 59
    assert faults.note("a:1", "expired", 1.0) == faults.note("b:1", "silent", 1.0) == 1
    assert faults.note("a:1", "silent", INTERVAL_S) == 60
    assert faults.note("a:1", "silent", INTERVAL_S + 1) == 0


def test_a_flood_of_different_faults_takes_bounded_memory() -> None:
    faults = FaultLog()
    assert all(faults.note(f"peer{number}", "silent", 0.0) == 1 for number in range(3 * MAX_FAULTS))
    assert len(faults._faults) == MAX_FAULTS
