"""A load of a decode node, from the arrival of its request to its one end: states, events and deadlines.

Pure bookkeeping with an explicit clock: no thread, no socket, no vLLM; `consumer` drives it. Who may fire what:

    state    event       fired by                                                   next
    OPENING  answered    the prefill node: Opened                                   READY
             declined    the prefill node: Refused; the clock: `open_timeout_s`     ENDED, local_prefill
             spared      vLLM: it takes nothing from outside for this request       ENDED, local_hit
             abandoned   vLLM: the request is over                                  ENDED, aborted
    READY    dispatched  vLLM: the request has blocks                               LOADING
             declined    the renewals: lease lost; the clock: `wait_timeout_s`      ENDED, local_prefill
             spared      vLLM: all is here already                                  ENDED, local_hit
             abandoned   vLLM: the request is over                                  ENDED, aborted
    LOADING  lost        the renewals: lease lost, or the prefill node is silent    LOADING
             abandoned   vLLM: the request is over                                  ENDING
             reported    the workers: every rank has ended its reads                ENDED, loaded or failed
    ENDING   lost        the renewals                                               ENDING
             reported    the workers                                                ENDED, aborted or failed

ENDING exists because a parked request's blocks stay its own until no read can touch them. There is no way out of ENDED.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
FIRST_PAUSE_SHARE = 1 / 6
"""The first pause is at most this share of the time for all attempts: with pauses that double, three attempts fit."""


class State(enum.Enum):
    OPENING = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class Event(enum.Enum):
    ANSWERED = enum.auto()
    DECLINED = enum.auto()
    SPARED = enum.auto()
    DISPATCHED = enum.auto()
    LOST = enum.auto()
    ABANDONED = enum.auto()
    REPORTED = enum.auto()


class Outcome(enum.Enum):
    """How a load ends, as counted."""

    LOADED = "loaded"
    LOCAL_HIT = "local_hit"
    LOCAL_PREFILL = "local_prefill"
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OPENING, Event.ANSWERED): State.READY,
    (State.OPENING, Event.DECLINED): State.ENDED,
    (State.OPENING, Event.SPARED): State.ENDED,
    (State.OPENING, Event.ABANDONED): State.ENDED,
    (State.READY, Event.DISPATCHED): State.LOADING,
    (State.READY, Event.DECLINED): State.ENDED,
    (State.READY, Event.SPARED): State.ENDED,
    (State.READY, Event.ABANDONED): State.ENDED,
    (State.LOADING, Event.LOST): State.LOADING,
    (State.LOADING, Event.ABANDONED): State.ENDING,
    (State.LOADING, Event.REPORTED): State.ENDED,
    (State.ENDING, Event.LOST): State.ENDING,
    (State.ENDING, Event.REPORTED): State.ENDED,
}

LEASE_IS_OVER = ("unknown", "expired")
"""Causes after which the prefill node holds nothing for this load: there is nothing to release."""


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome
    cause: str = ""


@dataclass(slots=True)
class Load:
    """One load. Each method is an event of the table above; firing one that the state does not allow is a bug."""

    num_tokens: int
    """It wants, and from dispatch on gets, the positions before this one."""
    since: float
    """When its state began, in seconds of the caller's clock."""
    state: State = State.OPENING
    start: int = 0
    """Positions before it were here already."""
    dispatched_at: float = 0.0
    end: End | None = None
    loss: str = ""
    """Why its lease is gone, once it is."""
    _verdict: Outcome | None = None
    """How it will end, where that is decided before the workers' report."""
    _owes_release: bool = False
    _is_released: bool = False

    def allows(self, event: Event) -> bool:
        return (self.state, event) in TRANSITIONS

    @property
    def is_parked(self) -> bool:
        """Reads may be under way."""
        return self.state in (State.LOADING, State.ENDING)

    def answered(self, now: float) -> None:
        """The lease is ours."""
        self._move(Event.ANSWERED, now)

    def declined(self, cause: str, now: float) -> None:
        """Nothing will come from the prefill node: the prompt is computed here."""
        self._move(Event.DECLINED, now)
        self._finish(End(Outcome.LOCAL_PREFILL, cause), release=cause not in LEASE_IS_OVER)

    def spared(self, now: float) -> None:
        """Nothing has to be fetched."""
        self._move(Event.SPARED, now)
        self._finish(End(Outcome.LOCAL_HIT), release=True)

    def dispatched(self, num_external_tokens: int, now: float) -> None:
        """The workers fetch `num_external_tokens` from `start` on."""
        assert 0 < num_external_tokens <= self.num_tokens - self.start
        self._move(Event.DISPATCHED, now)
        self.num_tokens, self.dispatched_at = self.start + num_external_tokens, now

    def lost(self, cause: str, now: float) -> None:
        """The lease is gone while workers read."""
        self._move(Event.LOST, now)
        self.loss = cause

    def abandoned(self, *, by_error: bool, now: float) -> None:
        """vLLM has ended the request: by itself because its load failed, or because the client left."""
        if self._move(Event.ABANDONED, now) is State.ENDED:
            self._finish(End(Outcome.ABORTED), release=True)
        else:
            self._verdict, self._owes_release = Outcome.FAILED if by_error else Outcome.ABORTED, True

    def reported(self, *, has_failed: bool, now: float) -> None:
        """No rank reads any more."""
        self._move(Event.REPORTED, now)
        outcome = self._verdict or (Outcome.FAILED if has_failed else Outcome.LOADED)
        cause = self.loss or "read" if outcome is Outcome.FAILED else ""
        self._finish(End(outcome, cause), release=outcome is Outcome.FAILED)

    def take_release(self) -> bool:
        """Whether the prefill node has to be told, now, that this load will not read. True at most once."""
        is_due = self._owes_release and not self._is_released
        self._is_released |= is_due
        return is_due

    def check_integrity(self) -> None:
        """It has an end exactly if it has ended, and is never both loaded and released."""
        assert (self.state is State.ENDED) == (self.end is not None)
        assert not (self.end and self.end.outcome is Outcome.LOADED and self._owes_release)
        assert self.state is not State.ENDING or self._verdict is not None

    def _move(self, event: Event, now: float) -> State:
        state = TRANSITIONS[self.state, event]
        if state is not self.state:
            self.state, self.since = state, now
        return state

    def _finish(self, end: End, *, release: bool) -> None:
        assert self.end is None, f"a load ends once: {self.end}, then {end}"
        self.end = end
        self._owes_release |= release


@dataclass(slots=True)
class Attempts:
    """When to ask a prefill node, and when to ask again: at once, then after pauses that double, until `deadline`.

    Earlier questions stay open meanwhile: what repeats a question to a node that is only slow must not lose its answer.
    """

    deadline: float
    timeout_s: float
    due: float
    pause_s: float
    num_made: int = 0

    @classmethod
    def starting(cls, now: float, timeout_s: float, jitter: float) -> Attempts:
        """`jitter`, 0 to 1, spreads the repeats of requests that arrive together over half a pause."""
        pause_s = min(FIRST_PAUSE_S, timeout_s * FIRST_PAUSE_SHARE)
        return cls(now + timeout_s, timeout_s, now, pause_s * (0.75 + jitter / 2))

    def made(self, now: float) -> None:
        """The node has been asked."""
        self.num_made += 1
        self.due, self.pause_s = now + self.pause_s, 2 * self.pause_s

    def is_due(self, now: float) -> bool:
        return self.due <= now < self.deadline

    def is_over(self, now: float) -> bool:
        return now >= self.deadline
