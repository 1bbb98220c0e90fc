"""Life-cycle cases that comparable systems got wrong, on the real scheduler sides, with a scripted network and clock.

The numbers are those of the list of cases; what needs real processes is tested in tests/nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from connector.faults import INTERVAL_S
from connector.renewals import ANSWER_TIMEOUT_S, ATTEMPTS
from connector.renewals import INTERVAL_S as RENEW_INTERVAL_S
from connector.runner import DONE_ATTEMPTS, DONE_TIMEOUT_S
from tests.connector.scripted import CONFIG, DecodeNode, Network, PrefillNode, Request, Ticket, scripted_servers
from transport.control import messages as wire

TICK_S = 0.25
SILENCE_S = RENEW_INTERVAL_S * ATTEMPTS * 2 + RENEW_INTERVAL_S
"""From a prefill node's last answer to the loss of its leases."""


@dataclass
class World:
    """Two prefill and two decode nodes."""

    network: Network
    sources: list[PrefillNode]
    targets: list[DecodeNode]

    @property
    def source(self) -> PrefillNode:
        return self.sources[0]

    @property
    def target(self) -> DecodeNode:
        return self.targets[0]

    def hand_over(self, num_blocks: int = 3, already_blocks: int = 0) -> Request:
        ticket = self.source.prefill(num_blocks)
        assert ticket is not None
        return self.target.arrive(ticket, already_blocks)

    def parked(self, num_blocks: int = 3) -> Request:
        """A request whose reads are about to begin."""
        request = self.hand_over(num_blocks)
        self.network.deliver_all()
        self.target.step()
        assert request.state == "parked"
        return request

    def tick(self, num_moves: int = 4, *, is_delivered: bool = True) -> None:
        """A moment in which everybody goes on."""
        if is_delivered:
            self.network.deliver_all()
        for target in self.targets:
            target.renew()
            target.read_on(num_moves)
            target.step()
        for source in self.sources:
            source.step()
        for node in (*self.sources, *self.targets):
            node.check_integrity()
        self.network.advance(TICK_S)

    def run(self, seconds: float, num_moves: int = 4, *, is_delivered: bool = True) -> None:
        end = self.network.now + seconds
        while self.network.now < end:
            self.tick(num_moves, is_delivered=is_delivered)

    def assert_at_rest(self) -> None:
        """Every lease is over, every block is back where it was."""
        assert all(len(source.free) == len(source.memory) for source in self.sources)
        assert all(target.consumer.num_loads == 0 and not target.readers for target in self.targets)


@pytest.fixture
def world() -> Iterator[World]:
    network = Network()
    with scripted_servers(network):
        sources = [PrefillNode(network, port) for port in (7001, 7002)]
        by_address = {node.address: node for node in sources}
        yield World(network, sources, [DecodeNode(network, by_address) for _ in range(2)])


def outcomes(target: DecodeNode) -> dict[str, float]:
    return {
        key.removeprefix("loads|"): value for key, value in target.sums.items() if key.startswith("loads|") and value
    }


def test_s2_one_block_on_two_ranks_leaves_nothing_behind(world: World) -> None:
    """One of the ranks has nothing to read: nobody waits for it, and all blocks are back within 1 s."""
    request = world.parked(num_blocks=1)
    world.run(1.0)
    assert request.state == "running" and outcomes(world.target) == {"loaded|": 1}
    world.assert_at_rest()


def test_s6_blocks_of_an_aborted_load_come_back_after_its_reads(world: World) -> None:
    request = world.parked()
    world.target.read_on(1)
    request.is_over = True
    world.target.consumer.request_finished(request.name)
    world.run(2 * TICK_S, num_moves=0)
    assert len(world.source.free) == len(world.source.memory), "the prefill node is released at once"
    assert world.target.num_free < 12 and world.target.consumer.num_loads == 1, "the reads are still under way"
    world.run(1.0)
    assert outcomes(world.target) == {"aborted|": 1}
    assert world.target.num_free == 12
    world.assert_at_rest()


@pytest.mark.parametrize("num_moves_before", range(4))
def test_s7_decode_node_stands_still_past_the_lease(world: World, num_moves_before: int) -> None:
    """Its blocks are taken by others. Whatever it had read before, the load fails (`Reader` checks the bytes)."""
    request = world.parked()
    world.target.read_on(num_moves_before)
    world.network.advance(CONFIG.lease_s)
    world.source.step()
    world.run(1.0)
    assert request.state == "running" and not request.may_load, "computed here"
    assert outcomes(world.target) == {"failed|read": 1} or outcomes(world.target) == {"failed|expired": 1}
    world.assert_at_rest()


def test_s7_prefill_node_finds_out_last(world: World) -> None:
    """The lease has run out but nobody has looked: the Done itself must not count any more."""
    world.parked()
    world.target.read_on(1)
    world.network.advance(CONFIG.lease_s)
    world.target.read_on(2)
    world.network.deliver_all()
    world.target.read_on(1)
    world.target.step()
    world.target.check_integrity()
    assert outcomes(world.target) == {"failed|read": 1}


@pytest.mark.parametrize("which", ["answer", "question"])
def test_s10_done_is_lost_once(world: World, which: str) -> None:
    """Asking again is answered with Ok, also when the first answer, on its way, was the end of the lease."""
    world.parked()
    world.target.read_on(3)
    if which == "answer":
        for letter in list(world.network.letters):
            world.network.deliver(letter)
    world.network.letters.clear()
    world.network.advance(DONE_TIMEOUT_S)
    world.run(1.0)
    assert outcomes(world.target) == {"loaded|": 1}
    world.assert_at_rest()


def test_s10_done_is_lost_for_good(world: World) -> None:
    request = world.parked()
    world.target.read_on(4)
    began = world.network.now
    while request.state == "parked":
        world.network.letters.clear()
        world.tick(is_delivered=False)
        assert world.network.now - began <= DONE_ATTEMPTS * DONE_TIMEOUT_S + 2 * TICK_S
    assert set(outcomes(world.target)) <= {"failed|read", "failed|silent"}
    world.run(CONFIG.lease_s + 1)
    world.assert_at_rest()


def test_s10_every_letter_comes_twice_and_in_reverse(world: World) -> None:
    for _ in range(2):
        world.hand_over(2)
    for _ in range(20):
        for letter in reversed(list(world.network.letters)):
            world.network.happen(letter, "r")
        for letter in list(world.network.letters):
            world.network.happen(letter, "a")
        world.tick(num_moves=2)
    assert outcomes(world.target) == {"loaded|": 2}
    world.assert_at_rest()


def test_s10_a_late_done_of_a_released_load_is_refused(world: World) -> None:
    request = world.parked()
    world.target.read_on(3)
    dones = list(world.network.letters)
    world.target.end(request)
    world.target.renew()
    for letter in [letter for letter in world.network.letters if letter not in dones]:
        world.network.deliver(letter)
    for letter in dones:
        world.network.deliver(letter)
    replies = [wire.decode_reply(letter.reply) for letter in world.network.letters if letter.reply]
    assert sum(isinstance(reply, wire.Refused) and reply.cause == "expired" for reply in replies) == len(dones) == 2


def test_s12_too_few_blocks_for_two_requests(world: World) -> None:
    """A holds its blocks until it ends, B keeps its lease by renewals and then loads: no deadlock, no leak."""
    world.target.num_free = world.target._num_blocks = 5
    first, second = world.hand_over(3), world.hand_over(3)
    world.run(CONFIG.lease_s + 5)
    assert (first.state, second.state) == ("running", "waiting")
    world.target.end(first)
    world.run(2.0)
    assert second.state == "running" and outcomes(world.target) == {"loaded|": 2}
    world.assert_at_rest()


def test_s12_nobody_frees_blocks(world: World) -> None:
    world.target.num_free = world.target._num_blocks = 5
    first, second = world.hand_over(3), world.hand_over(3)
    world.run(CONFIG.wait_timeout_s + 1)
    assert (first.state, second.state) == ("running", "waiting")
    assert outcomes(world.target) == {"loaded|": 1, "local_prefill|timeout": 1}
    world.assert_at_rest()


def test_s13_a_stopped_peer_delays_nobody_else(world: World) -> None:
    world.network.stopped.add(world.sources[1].address)
    ticket = world.sources[1].prefill(2)
    assert ticket is not None
    stuck = world.target.arrive(ticket)
    request = world.hand_over()
    world.run(1.0)
    assert request.state == "running" and stuck.state == "waiting"
    world.run(CONFIG.open_timeout_s)
    assert stuck.state == "running" and outcomes(world.target) == {"loaded|": 1, "local_prefill|silent": 1}
    assert world.target.sums["peers|silent"] == world.target.sums["peers|known"] == 1


def test_s9_restarted_prefill_node_is_met_again_by_itself(world: World) -> None:
    """Requests of its former life end at once when its new one is met, and the next request loads."""
    world.target.num_free = world.target._num_blocks = 4
    world.parked()
    waiting = world.hand_over(2)
    world.network.deliver_all()
    world.target.step()
    world.source.start()
    request = world.hand_over(2)
    world.network.deliver_all()
    world.target.step()
    world.target.check_integrity()
    assert outcomes(world.target) == {"local_prefill|unknown": 1, "failed|unknown": 1}
    assert waiting.state != "parked"
    assert world.target.sums["handshakes"] == 2
    for other in list(world.target.requests.values()):
        if other is not request:
            world.target.end(other)
    world.run(2.0)
    assert request.state == "running" and outcomes(world.target)["loaded|"] == 1


def test_s9_killed_prefill_node_costs_its_bound(world: World) -> None:
    """A waiting request loses its lease, a new one gets no answer: both are computed here within the bound."""
    world.target.num_free = world.target._num_blocks = 0
    waiting = world.hand_over()
    world.run(1.0)
    world.source.kill()
    world.run(SILENCE_S + ANSWER_TIMEOUT_S)
    assert outcomes(world.target) == {"local_prefill|silent": 1} and waiting.state == "waiting"


def test_s17_preempted_after_its_load(world: World) -> None:
    request = world.parked()
    world.run(1.0)
    world.target.preempt(request)
    world.run(1.0)
    assert request.state == "running" and outcomes(world.target) == {"loaded|": 1}


@pytest.mark.parametrize("is_ready", [False, True])
def test_s18_all_is_here_already(world: World, is_ready: bool) -> None:
    request = world.hand_over(3, already_blocks=3)
    if is_ready:
        world.network.deliver_all()
        world.target.step()
    else:
        world.target.end(request)
    world.tick()
    world.tick()
    assert set(outcomes(world.target)) == {"local_hit|" if is_ready else "aborted|"}
    world.assert_at_rest()


def test_s19_the_same_params_at_two_nodes_and_twice_at_one(world: World) -> None:
    """Each load is validated by itself; the blocks are freed once, after the last."""
    ticket = world.source.prefill(3)
    assert ticket is not None
    requests = [target.arrive(ticket) for target in (*world.targets, world.target)]
    world.network.deliver_all()
    for target in world.targets:
        target.step()
    world.targets[1].read_on(3)
    world.network.deliver_all()
    world.targets[1].read_on(1)
    world.source.step()
    assert len(world.source.free) == 5, "two loads still read"
    world.run(1.0)
    assert [request.state for request in requests] == ["running"] * 3
    assert outcomes(world.targets[0]) == {"loaded|": 2} and outcomes(world.targets[1]) == {"loaded|": 1}
    late = world.target.arrive(ticket)
    world.run(1.0)
    assert late.state == "running" and outcomes(world.target)["local_prefill|expired"] == 1
    world.assert_at_rest()


@pytest.mark.parametrize("error", [RuntimeError("closed"), ValueError("too large"), KeyError("bug")])
def test_s20_an_exception_while_asking_ends_one_load(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(world.target.consumer._client, "request", broken)
        first = world.hand_over(2)
    second = world.hand_over(2)
    world.run(1.0)
    assert first.state == second.state == "running"
    assert outcomes(world.target) == {"local_prefill|internal": 1, "loaded|": 1}
    world.assert_at_rest()


def test_s20_an_exception_in_the_renewal_thread_loses_its_loads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.target.num_free = world.target._num_blocks = 0
    world.hand_over(2)
    world.network.deliver_all()
    world.target.step()
    world.network.advance(RENEW_INTERVAL_S)
    with monkeypatch.context() as patch:
        patch.setattr(world.target.consumer._renewals, "step", lambda now: 1 / 0)
        assert world.target.consumer._renewals._guarded_step() is None
    world.run(1.0)
    assert outcomes(world.target) == {"local_prefill|internal": 1}
    world.assert_at_rest()


def test_open_is_repeated_to_a_silent_peer_and_answered_once(world: World) -> None:
    world.network.stopped.add(world.source.address)
    ticket = world.sources[0].prefill(3)
    assert ticket is not None
    request = world.target.arrive(ticket)
    world.run(4.0)
    assert sum(not letter.reply for letter in world.network.letters) == 3
    assert world.target.sums["open_repeats|silent"] == 2
    world.network.stopped.clear()
    world.run(1.0)
    assert request.state == "running" and outcomes(world.target) == {"loaded|": 1}
    assert world.source.sums["leases_ended|done"] == 1
    world.assert_at_rest()


def test_open_survives_a_lost_question(world: World) -> None:
    request = world.hand_over()
    world.network.letters.clear()
    world.run(3.0)
    assert request.state == "running" and outcomes(world.target) == {"loaded|": 1}


def test_open_is_repeated_to_a_busy_peer(world: World) -> None:
    answer, busy = world.network.servers[world.source.address], [True, True]

    def sometimes_busy(question: wire.Request) -> wire.Reply:
        return wire.Refused("busy") if isinstance(question, wire.Open) and busy and busy.pop() else answer(question)

    world.network.servers[world.source.address] = sometimes_busy
    request = world.hand_over()
    world.run(CONFIG.open_timeout_s)
    assert request.state == "running" and outcomes(world.target) == {"loaded|": 1}
    assert world.target.sums["open_repeats|busy"] == 2


def test_one_lost_renewal_loses_no_lease(world: World) -> None:
    world.target.num_free = world.target._num_blocks = 0
    world.hand_over()
    world.run(1.0)
    for _ in range(3):
        world.run(RENEW_INTERVAL_S)
        world.network.letters.clear()
        world.network.advance(ANSWER_TIMEOUT_S)
    assert world.target.consumer.num_loads == 1 and outcomes(world.target) == {}


def test_release_is_repeated_until_it_is_heard(world: World) -> None:
    request = world.hand_over()
    world.run(0.5, num_moves=0)
    world.target.end(request)
    world.target.renew()
    world.network.letters.clear()
    world.run(2 * RENEW_INTERVAL_S + 3 * TICK_S)
    assert world.source.sums["leases_ended|released"] == 1
    world.assert_at_rest()


def test_a_recurring_fault_is_logged_once_a_minute_with_its_count(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    lines = []
    for _ in range(5):
        for _ in range(10):
            world.target.arrive(Ticket({"do_remote_prefill": True}, [1, 2], []))
        world.network.advance(INTERVAL_S / 3)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split("times=")[1].split()[0] for line in lines] == ["1", "30"]
    assert all("peer=client cause=malformed" in line and "request=d" in line for line in lines)
    assert world.target.counters.take()["loads|local_prefill|malformed"] == 50
