"""Both scheduler sides together, whatever the network, the clock and the nodes do to them.

Safety: bytes that a prefill node has confirmed are those of the right request (`scripted.Reader` checks it at each Ok).
Liveness: when nothing new happens, every request, lease and block comes to its one end within the stated bounds.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from connector.runner import DONE_ATTEMPTS, DONE_TIMEOUT_S
from tests.connector.scripted import CONFIG, DecodeNode, Network, PrefillNode, Ticket, scripted_servers

PORTS = (7001, 7002)
TICK_S = 0.25
LOAD_BOUND_S = CONFIG.open_timeout_s + CONFIG.wait_timeout_s + DONE_ATTEMPTS * DONE_TIMEOUT_S
"""From its arrival a load ends within this time, if its reads end at once."""
LEASE_BOUND_S = LOAD_BOUND_S + CONFIG.lease_s

pick = st.integers(0, 63)
"""An index into whatever there is, taken modulo its length."""
RECIPIENTS = ((0,), (0,), (1,), (1,), (0, 1), (0, 0), ())
"""Decode nodes that get the same params: mostly one, sometimes both, or one of them twice."""
local = st.sampled_from([0, 0, 0, 0, 1, 9])
"""Blocks that the decode node has already."""


class LifeCycle(RuleBasedStateMachine):
    """Two prefill and two decode nodes. Every rule is one event that somebody or something may cause at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self._patch = scripted_servers(self.network)
        self._patch.__enter__()
        self.sources = [PrefillNode(self.network, port) for port in PORTS]
        by_address = {node.address: node for node in self.sources}
        self.targets = [DecodeNode(self.network, by_address) for _ in range(2)]
        self.paused: set[DecodeNode] = set()
        self.tickets: list[Ticket] = []
        self.is_network_up = True

    @initialize(is_up=st.booleans())
    def how_it_ends(self, is_up: bool) -> None:
        """After the last event the network delivers everything, or nothing."""
        self.is_network_up = is_up

    # What nodes and clients do

    @rule(
        node=pick,
        num_blocks=st.integers(1, 3),
        to=st.sampled_from(RECIPIENTS),
        already=local,
        num_steps=st.integers(0, 3),
    )
    def hand_over(self, node: int, num_blocks: int, to: tuple[int, ...], already: int, num_steps: int) -> None:
        """A prefill, and the requests that come with its params; some get as far as being read at once."""
        source = self.sources[node % 2]
        if source.address in self.network.servers and source.address not in self.network.stopped:
            ticket = source.prefill(num_blocks)
            if ticket is not None:
                self.tickets.append(ticket)
                for target in to:
                    self.arrive(target, len(self.tickets) - 1, already)
                for _ in range(num_steps):
                    self.quick_moment(num_moves=0)

    @precondition(lambda self: self.tickets)
    @rule(node=pick, ticket=pick, already=local)
    def arrive(self, node: int, ticket: int, already: int) -> None:
        """With a ticket that may have been used or be out of date."""
        target = self.targets[node % 2]
        if target not in self.paused:
            target.arrive(self.tickets[ticket % len(self.tickets)], already)

    @rule(fates=st.lists(st.sampled_from("aaaaaa-rx"), max_size=6), num_moves=st.integers(0, 6))
    def moment(self, fates: list[str], num_moves: int) -> None:
        """Letters arrive (a), wait (-), come twice (r) or are lost (x); then everybody who is awake takes a step."""
        for letter, fate in zip(list(self.network.letters), fates, strict=False):
            self.network.happen(letter, fate)
        for target in self._awake():
            target.renew()
            target.step()
            target.read_on(num_moves)
        self.network.advance(0.05)

    @rule(num_moves=st.integers(1, 6))
    def quick_moment(self, num_moves: int) -> None:
        """Nothing is lost or late, and reads go on."""
        self.network.deliver_all()
        for target in self._awake():
            target.step()
            target.read_on(num_moves)
        self.network.deliver_all()

    @rule(node=pick)
    def step_source(self, node: int) -> None:
        source = self.sources[node % 2]
        if source.address not in self.network.stopped:
            source.step()

    @rule(node=pick, which=pick, num_moves=st.integers(1, 4), is_confirmed=st.booleans())
    def one_rank_reads(self, node: int, which: int, num_moves: int, is_confirmed: bool) -> None:
        """One rank gets ahead of the others, perhaps to its end."""
        target = self.targets[node % 2]
        if target.readers and target not in self.paused:
            name = list(target.readers)[which % len(target.readers)]
            for _ in range(num_moves):
                target.read(name, which % 2)
            if is_confirmed:
                self.network.deliver_all()
                target.read(name, which % 2)

    @rule(what=st.sampled_from(["all end", "one ends", "one is preempted"]), node=pick, which=pick)
    def requests(self, what: str, node: int, which: int) -> None:
        """All running requests have their last token; a client leaves at any moment; one that runs loses its blocks."""
        target = self.targets[node % 2]
        if target in self.paused:
            return
        running = [request for request in target.requests.values() if request.state == "running"]
        alive = [request for request in target.requests.values() if not request.is_over]
        if what == "all end":
            for request in running:
                target.end(request)
        elif what == "one ends" and alive:
            target.end(alive[which % len(alive)])
        elif what == "one is preempted" and running:
            target.preempt(running[which % len(running)])

    # What the network, the clock and fate do

    @precondition(lambda self: self.network.letters)
    @rule(which=pick, fate=st.sampled_from("arx"))
    def letter(self, which: int, fate: str) -> None:
        """One letter is delivered before all others, comes twice or is lost."""
        self.network.happen(self.network.letters[which % len(self.network.letters)], fate)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.0]), paused=st.sampled_from([0, 1, None]))
    def time_goes_by(self, seconds: float, paused: int | None) -> None:
        """Nodes stand still so long, and prefill nodes are the first to see that leases ran out. One may stay still."""
        self.network.advance(seconds)
        self.paused = set() if paused is None else {self.targets[paused]}
        for source in self.sources:
            if source.address not in self.network.stopped:
                source.step()

    @rule(what=st.sampled_from(["kill", "restart", "stop", "continue", "continue", "restart target"]), node=pick)
    def fault(self, what: str, node: int) -> None:
        source, target = self.sources[node % 2], self.targets[node % 2]
        if what == "stop":
            self.network.stopped.add(source.address)
        elif what == "restart target":
            self.paused.discard(target)
            target.start()
        else:
            self.network.stopped.discard(source.address)
            if what == "kill":
                source.kill()
            elif what == "restart":
                source.start()

    def _awake(self) -> list[DecodeNode]:
        return [target for target in self.targets if target not in self.paused]

    # Laws

    @invariant()
    def everything_adds_up(self) -> None:
        for node in (*self.sources, *self.targets):
            node.check_integrity()

    def teardown(self) -> None:
        try:
            self._comes_to_rest()
        finally:
            self._patch.__exit__(None, None, None)

    def _comes_to_rest(self) -> None:
        self.paused.clear()
        self.network.stopped.clear()
        began = self.network.now
        while self.network.now < began + LOAD_BOUND_S + 2 * TICK_S:
            self._tick()
        for target in self.targets:
            assert target.consumer.num_loads == 0, "a load outlives its bound"
            for request in list(target.requests.values()):
                assert request.state != "parked"
                target.end(request)
        while self.network.now < began + LEASE_BOUND_S + 2 * TICK_S:
            self._tick()
        for target in self.targets:
            target.check_integrity()
            assert target.num_free == target._num_blocks and not target.consumer._renewals.kept()
            assert target.consumer._renewals.num_unreleased == 0
        for source in self.sources:
            source.check_integrity()
            assert source.producer.num_open_leases == 0 and len(source.free) == len(source.memory)

    def _tick(self) -> None:
        """Everybody goes on for a moment; nobody new comes."""
        if self.is_network_up:
            self.network.deliver_all()
        else:
            self.network.letters.clear()
        for target in self.targets:
            target.renew()
            target.read_on(num_moves=4)
            target.step()
        for source in self.sources:
            source.step()
        self.network.advance(TICK_S)


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(8))
def test_long_walks(seed: int) -> None:
    """The same events, thousands in a row, chosen by their weights: states that only many requests together reach."""
    random, machine = Random(seed), LifeCycle()
    machine.how_it_ends(is_up=bool(seed % 2))
    for _ in range(800):
        n = random.randrange(64)
        event = random.choices(
            ["hand_over", "arrive", "moment", "quick", "rank", "source", "requests", "letter", "time", "fault"],
            [10, 3, 10, 8, 5, 3, 4, 4, 3, 1],
        )[0]
        match event:
            case "hand_over":
                machine.hand_over(n, random.randint(1, 3), random.choice(RECIPIENTS), n % 7 == 0, random.randint(0, 3))
            case "arrive" if machine.tickets:
                machine.arrive(n, random.randrange(max(0, len(machine.tickets) - 4), len(machine.tickets)), n % 2)
            case "moment":
                machine.moment(random.choices("a-rx", [6, 1, 1, 1], k=6), random.randint(0, 4))
            case "quick":
                machine.quick_moment(random.randint(1, 6))
            case "rank":
                machine.one_rank_reads(n, random.randrange(64), random.randint(1, 4), n % 3 > 0)
            case "source":
                machine.step_source(n)
            case "requests":
                machine.requests(random.choice(["all end", "all end", "one ends", "one is preempted"]), n, n)
            case "letter" if machine.network.letters:
                machine.letter(n, random.choice("arx"))
            case "time":
                machine.time_goes_by(random.choice([0.5, 0.5, 2.0, 5.0, 11.0]), random.choice([0, 1, None, None]))
            case "fault":
                machine.fault(random.choice(["kill", "restart", "stop", "continue", "restart target"]), n)
        machine.everything_adds_up()
    machine.teardown()
