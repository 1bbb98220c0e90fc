"""Leases end exactly once, for one cause, and answer "expired" ever after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.errors import LeaseExpired, LeaseUnknown, PromptMismatch
from connector.lease import LeaseEnd, LeaseTable, Offer
from connector.prompt import digest

PROMPT = list(range(40))


def offer(request_id: str = "r") -> Offer:
    return Offer(request_id, len(PROMPT), (np.arange(3),), lambda n: digest(PROMPT, n))


def opened(table: LeaseTable, load: str = "a", request_id: str = "r") -> str:
    capability = table.grant(offer(request_id), 0.0)
    table.open(capability, load, 40, digest(PROMPT, 40), 0.0)
    return capability


def test_the_last_reader_ends_the_lease() -> None:
    table = LeaseTable(30)
    capability = opened(table)
    table.done(capability, "a", 0, 2, 1.0)
    assert table.drain_ended() == []
    table.done(capability, "a", 3, 2, 1.0)
    assert table.drain_ended() == [("r", LeaseEnd.DONE)]
    assert table.drain_ended() == []


def test_a_repeated_done_is_confirmed_again_but_a_new_one_is_not() -> None:
    table = LeaseTable(30)
    capability = opened(table)
    table.done(capability, "a", 0, 1, 1.0)
    table.done(capability, "a", 0, 1, 2.0)
    with pytest.raises(LeaseExpired):
        table.done(capability, "a", 1, 1, 2.0)
    assert table.drain_ended() == [("r", LeaseEnd.DONE)]


def test_done_after_the_lease_ran_out_does_not_count() -> None:
    table = LeaseTable(30)
    capability = opened(table)
    with pytest.raises(LeaseExpired):
        table.done(capability, "a", 0, 1, 30.0)
    assert table.drain_ended() == [("r", LeaseEnd.EXPIRED)]


def test_renewal_extends_and_an_unopened_load_cannot_renew() -> None:
    table = LeaseTable(30)
    capability = opened(table)
    table.renew(capability, "a", 29.0)
    with pytest.raises(LeaseUnknown):
        table.renew(capability, "b", 29.0)
    table.expire(58.0)
    assert table.num_open == 1
    table.expire(59.0)
    assert table.num_open == 0


def test_two_loads_of_one_capability_both_have_to_end() -> None:
    table = LeaseTable(30)
    capability = opened(table)
    table.open(capability, "b", 16, digest(PROMPT, 16), 1.0)
    table.done(capability, "a", 0, 1, 2.0)
    assert table.num_open == 1
    table.release(capability, "b", 2.0)
    assert table.drain_ended() == [("r", LeaseEnd.RELEASED)]
    with pytest.raises(LeaseExpired):
        table.open(capability, "c", 16, digest(PROMPT, 16), 3.0)


def test_release_without_open_frees_at_once_and_twice_is_harmless() -> None:
    table = LeaseTable(30)
    capability = table.grant(offer(), 0.0)
    table.release(capability, "a", 1.0)
    table.release(capability, "a", 1.0)
    assert table.drain_ended() == [("r", LeaseEnd.RELEASED)]


def test_foreign_capabilities_and_foreign_prompts_are_refused() -> None:
    table = LeaseTable(30)
    capability = table.grant(offer(), 0.0)
    with pytest.raises(LeaseUnknown):
        table.open("0" * 32, "a", 40, digest(PROMPT, 40), 0.0)
    with pytest.raises(PromptMismatch, match="prompt_digest"):
        table.open(capability, "a", 40, digest([*PROMPT[:-1], 7], 40), 0.0)
    with pytest.raises(PromptMismatch, match="num_tokens: this node has 40, the reader has 41"):
        table.open(capability, "a", 41, digest(PROMPT, 41), 0.0)
    assert table.num_open == 1


def test_the_digest_knows_more_than_tokens() -> None:
    assert digest(PROMPT, 40, "salt") != digest(PROMPT, 40)
    assert digest(PROMPT, 39) == digest([*PROMPT[:39], 7], 39)


class LeaseLife(RuleBasedStateMachine):
    """Random lives of leases: each is reported ended at most once, and open + ended = granted."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(10)
        self.now = 0.0
        self.capabilities: list[str] = []
        self.ended: list[str] = []

    @rule()
    def grant(self) -> None:
        self.capabilities.append(self.table.grant(offer(f"r{len(self.capabilities)}"), self.now))

    @rule(seconds=st.floats(0, 12))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        index=st.integers(0, 3),
        load=st.sampled_from("ab"),
        event=st.sampled_from(["open", "renew", "done", "release", "expire"]),
        reader=st.integers(0, 1),
    )
    def event(self, index: int, load: str, event: str, reader: int) -> None:
        capability = self.capabilities[index] if index < len(self.capabilities) else "0" * 32
        try:
            match event:
                case "open":
                    self.table.open(capability, load, 40, digest(PROMPT, 40), self.now)
                case "renew":
                    self.table.renew(capability, load, self.now)
                case "done":
                    self.table.done(capability, load, reader, 2, self.now)
                case "release":
                    self.table.release(capability, load, self.now)
                case "expire":
                    self.table.expire(self.now)
        except (LeaseUnknown, LeaseExpired):
            pass

    @invariant()
    def each_ends_once(self) -> None:
        self.table.check_integrity()
        self.ended += [request_id for request_id, _ in self.table.drain_ended()]
        assert len(set(self.ended)) == len(self.ended)
        assert len(self.ended) + self.table.num_open == len(self.capabilities)


TestLeaseLife = LeaseLife.TestCase
TestLeaseLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
