"""Prefill and decode nodes whose scheduler sides are real and whose network, clock, memory and workers are scripted.

One thread, virtual time. Messages wait in a list until the script delivers, repeats or drops them, in any order. Memory
is a list of marks: a prefill writes its own marks into its blocks, and blocks that come back are overwritten at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from connector.config import WeaveConfig
from connector.consumer import Consumer
from connector.jobs import LoadJob, StepWork
from connector.lease import Offer
from connector.pace import Pace
from connector.peers import Standing
from connector.producer import Producer
from connector.prompt import digest
from connector.runner import DONE_ATTEMPTS, DONE_TIMEOUT_S
from connector.stats import Counters
from layouts import ParallelLayout
from tests.connector.engines import cache_format
from transport.control import messages as wire
from transport.errors import PeerSilent, ProtocolError

BLOCK_TOKENS = 4
LAYOUT = ParallelLayout(num_kv_heads=1, block_tokens=BLOCK_TOKENS, num_layers=1)
PLACEMENT = wire.PlacementInfo.from_placement(LAYOUT.placement)
NUM_RANKS = 2
CONFIG = WeaveConfig(lease_s=10, open_timeout_s=6, wait_timeout_s=20)

Address = tuple[str, int]


@dataclass(eq=False)
class Letter:
    """A question on its way to an address or, once it has a reply, the answer on its way back."""

    address: Address
    question: bytes
    future: Future[wire.Reply]
    reply: bytes = b""


class Network:
    """Every letter under way, and the clock of everybody."""

    def __init__(self) -> None:
        self.now = 0.0
        self.letters: list[Letter] = []
        self.servers: dict[Address, Any] = {}
        self.stopped: set[Address] = set()
        self._deadlines: list[tuple[float, Future[wire.Reply]]] = []

    def clock(self) -> float:
        return self.now

    def ask(self, address: Address, message: wire.Request, timeout_s: float) -> Future[wire.Reply]:
        future: Future[wire.Reply] = Future()
        self.letters.append(Letter(address, wire.encode(message), future))
        self._deadlines.append((self.now + timeout_s, future))
        return future

    def advance(self, seconds: float) -> None:
        """Questions without an answer end when their time is over, as the control client ends them."""
        self.now += seconds
        for _, future in [entry for entry in self._deadlines if entry[0] <= self.now]:
            if not future.done():
                future.set_exception(PeerSilent("no answer"))
        self._deadlines = [entry for entry in self._deadlines if entry[0] > self.now and not entry[1].done()]

    def happen(self, letter: Letter, fate: str) -> None:
        """a: it arrives; r: it arrives, and once more later; x: it is lost; -: it waits."""
        if fate == "r":
            self.letters.append(replace(letter))
        if fate in "ar":
            self.deliver(letter)
        elif fate == "x":
            self.letters.remove(letter)

    def deliver(self, letter: Letter) -> None:
        """Hand it over. A node that is down loses it, a stopped one gets it later."""
        if letter.reply:
            self.letters.remove(letter)
            if not letter.future.done():
                letter.future.set_result(wire.decode_reply(letter.reply))
        elif letter.address not in self.stopped:
            self.letters.remove(letter)
            if letter.address in self.servers:
                reply = self.servers[letter.address](wire.decode_request(letter.question))
                self.letters.append(replace(letter, reply=wire.encode(reply)))

    def deliver_all(self) -> None:
        """Until nothing moves any more."""
        while movable := [letter for letter in self.letters if letter.reply or letter.address not in self.stopped]:
            self.deliver(movable[0])


class ScriptedClient:
    """Stands for `ControlClient`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def request(self, address: Address, message: wire.Request, timeout_s: float) -> Future[wire.Reply]:
        return self._network.ask(address, message, timeout_s)


class ScriptedServer:
    """Stands for `ControlServer`."""

    network: Network

    def __init__(self, host: str, port: int, handler: Any, *_: Any, **__: Any) -> None:
        self.address, self._handler = (host, port), handler

    def start(self) -> None:
        self.network.servers[self.address] = self._handler

    def close(self) -> None:
        self.network.servers.pop(self.address, None)


@contextmanager
def scripted_servers(network: Network) -> Iterator[None]:
    with patch("connector.producer.ControlServer", type("Server", (ScriptedServer,), {"network": network})):
        yield


@dataclass(frozen=True)
class Ticket:
    """What a client hands from a prefill to a decode node, and what the right KV looks like."""

    params: dict[str, Any]
    tokens: list[int]
    marks: list[int]


class PrefillNode:
    """A real producer over a memory of marks."""

    def __init__(self, network: Network, port: int, num_blocks: int = 8) -> None:
        self.address = ("127.0.0.1", port)
        self.counters, self.sums = Counters(), defaultdict[str, float](float)
        self._network = network
        self._marks = itertools.count(1)
        self.memory = [0] * num_blocks
        self.start()

    def start(self) -> None:
        """A new life: an empty cache, no lease, another incarnation at the same address."""
        self._rewrite(range(len(self.memory)))
        self.free = list(range(len(self.memory)))
        self.pinned: dict[str, list[int]] = {}
        self.sums.clear()
        self.counters.take()
        self.producer = Producer(*self.address, CONFIG.lease_s, self.counters, Pace(), clock=self._network.clock)
        manifest = wire.Manifest(self.producer.incarnation, cache_format(LAYOUT), PLACEMENT, [])
        self.producer.start(manifest)

    def kill(self) -> None:
        self._network.servers.pop(self.address, None)

    def prefill(self, num_blocks: int) -> Ticket | None:
        """Compute a prompt of that many blocks and one token, and offer it. None when there are too few blocks."""
        if len(self.free) < num_blocks:
            return None
        blocks, self.free = self.free[:num_blocks], self.free[num_blocks:]
        self._rewrite(blocks)
        mark = self.memory[blocks[0]]
        tokens = [mark] * (num_blocks * BLOCK_TOKENS)
        request_id = f"p{mark}"
        self.pinned[request_id] = blocks
        held = (np.asarray(blocks, dtype=np.int64),)
        params = self.producer.offer(Offer(request_id, len(tokens), held, lambda n: digest(tokens, n)))
        return Ticket(params.to_dict(), [*tokens, 7], [self.memory[block] for block in blocks])

    def step(self) -> None:
        """Blocks whose lease has ended are taken by somebody else at once."""
        for request_id in self.producer.take_ended():
            blocks = self.pinned.pop(request_id)
            self._rewrite(blocks)
            self.free += blocks
        collect(self.counters, self.sums)

    def _rewrite(self, blocks: Any) -> None:
        for block in blocks:
            self.memory[block] = next(self._marks)

    def check_integrity(self) -> None:
        self.producer._leases.check_integrity()
        collect(self.counters, self.sums)
        assert sorted([*self.free, *itertools.chain(*self.pinned.values())]) == list(range(len(self.memory)))
        assert self.sums["open_leases"] == len(self.pinned)
        assert self.sums["leases_granted"] - sum_of(self.sums, "leases_ended") == len(self.pinned)
        assert self.producer.num_open_leases <= len(self.pinned)


@dataclass
class Reader:
    """One rank's part of a load, with the rules of `connector.runner`: read, confirm, and only then succeed."""

    job: LoadJob
    rank: int
    marks: list[int]
    """What the right KV looks like."""
    memory: list[int] | None
    seen: dict[int, int] = field(default_factory=dict)
    confirmation: Future[wire.Reply] | None = None
    num_attempts: int = 0
    succeeded: bool | None = None

    @property
    def part(self) -> list[int]:
        """Indices of the blocks it reads: every other one."""
        first, last = self.job.start // BLOCK_TOKENS, -(-self.job.stop // BLOCK_TOKENS)
        return list(range(first, last))[self.rank :: NUM_RANKS]

    def advance(self, network: Network) -> None:
        """One thing at a time, so that anything may happen in between."""
        left = [index for index in self.part if index not in self.seen]
        if not self.part:
            self.succeeded = True
        elif left:
            assert self.memory is not None
            self.seen[left[0]] = self.memory[int(self.job.source_block_ids[left[0]])]
        elif self.confirmation is None:
            self._confirm(network)
        elif self.confirmation.done():
            self._conclude(network)

    def stop(self, *, aborted: bool) -> None:
        if self.succeeded is None and (aborted or self.confirmation is None):
            self.succeeded = False

    def _confirm(self, network: Network) -> None:
        num_readers = min(NUM_RANKS, -(-self.job.stop // BLOCK_TOKENS) - self.job.start // BLOCK_TOKENS)
        message = wire.Done(
            capability=self.job.capability, load=self.job.load, reader=self.rank, num_readers=num_readers
        )
        self.num_attempts += 1
        self.confirmation = network.ask(self.job.source.address, message, DONE_TIMEOUT_S)

    def _conclude(self, network: Network) -> None:
        assert self.confirmation is not None
        try:
            reply = self.confirmation.result(timeout=0)
        except (PeerSilent, ProtocolError):
            if self.num_attempts < DONE_ATTEMPTS:
                self._confirm(network)
            else:
                self.succeeded = False
            return
        self.succeeded = isinstance(reply, wire.Ok)
        if self.succeeded:
            wrong = {index: mark for index, mark in self.seen.items() if mark != self.marks[index]}
            assert not wrong, f"confirmed blocks hold another request: {wrong}, right are {self.marks}"


@dataclass
class Request:
    """As vLLM's scheduler sees it: waiting, parked, running; gone when over and no read can touch its blocks."""

    name: str
    ticket: Ticket
    already: int
    state: str = "waiting"
    num_blocks: int = 0
    is_over: bool = False
    may_load: bool = True


class DecodeNode:
    """A real consumer, scripted workers, and as much of vLLM's scheduler as concerns them."""

    def __init__(self, network: Network, memories: dict[Address, PrefillNode], num_blocks: int = 12) -> None:
        self._network, self._memories, self._num_blocks = network, memories, num_blocks
        self._names = itertools.count()
        self.start()

    def start(self) -> None:
        """A new life: everything it knew and held is gone."""
        self.counters, self.sums = Counters(), defaultdict[str, float](float)
        self.consumer = Consumer(
            ScriptedClient(self._network),  # type: ignore[arg-type]
            cache_format(LAYOUT),
            PLACEMENT,
            CONFIG,
            self.counters,
            Pace(),
            clock=self._network.clock,
        )
        self.requests: dict[str, Request] = {}
        self.readers: dict[str, list[Reader]] = {}
        self.num_free = self._num_blocks
        self.num_arrived = 0

    def arrive(self, ticket: Ticket, already_blocks: int = 0) -> Request:
        name = f"d{next(self._names)}"
        already = min(already_blocks * BLOCK_TOKENS, len(ticket.tokens) - 1)
        request = self.requests[name] = Request(name, ticket, already)
        self.num_arrived += 1
        tokens = ticket.tokens
        self.consumer.on_new_request(name, ticket.params, len(tokens), lambda n: digest(tokens, n))
        return request

    def renew(self) -> None:
        """What the renewal thread does."""
        self.consumer._renewals.step(self._network.now)

    def step(self) -> None:
        """One step of the engine: schedule, tell the workers, hear their reports."""
        for request in [request for request in self.requests.values() if request.state == "waiting"]:
            self._schedule(request)
        self._begin(self.consumer.take_work())
        self._hear_reports()

    def read(self, name: str, rank: int) -> None:
        """One move of one rank."""
        reader = self.readers[name][rank]
        if reader.succeeded is None:
            reader.advance(self._network)

    def read_on(self, num_moves: int) -> None:
        """So many moves of every rank."""
        for name, readers in list(self.readers.items()):
            for rank in range(len(readers)):
                for _ in range(num_moves):
                    self.read(name, rank)

    def end(self, request: Request) -> None:
        """The client leaves, or the request has its last token."""
        request.is_over = True
        self.consumer.request_finished(request.name)
        for reader in self.readers.get(request.name, []):
            reader.stop(aborted=True)
        if request.state != "parked":
            self._free(request)
            del self.requests[request.name]

    def preempt(self, request: Request) -> None:
        self._free(request)
        request.state = "waiting"

    def _schedule(self, request: Request) -> None:
        count, is_async = self.consumer.get_num_new_matched_tokens(request.name, request.already)
        if count is None:
            return
        assert request.may_load or count == 0, "a request loads at most once"
        needed = -(-len(request.ticket.tokens) // BLOCK_TOKENS)
        if needed > self.num_free:
            return
        self.num_free -= needed
        request.num_blocks = needed
        request.state, request.may_load = ("parked" if is_async else "running"), False
        self.consumer.update_state_after_alloc(request.name, [list(range(needed))], count)

    def _begin(self, work: StepWork) -> None:
        for job in work.jobs:
            node, marks = self._memories[job.source.address], self.requests[job.request_id].ticket.marks
            self.readers[job.request_id] = [Reader(job, rank, marks, node.memory) for rank in range(NUM_RANKS)]
            if self.requests[job.request_id].is_over:
                for reader in self.readers[job.request_id]:
                    reader.stop(aborted=True)
        for name in work.lost:
            for reader in self.readers.get(name, []):
                reader.stop(aborted=False)

    def _hear_reports(self) -> None:
        done = {name for name, readers in self.readers.items() if all(r.succeeded is not None for r in readers)}
        failed = {name for name in done if not all(reader.succeeded for reader in self.readers[name])}
        loaded = sum(not self.requests[name].is_over for name in done - failed)
        collect(self.counters, self.sums)
        expected = self.sums["loads|loaded|"] + loaded
        self.consumer.update_connector_output(done, failed)
        collect(self.counters, self.sums)
        assert self.sums["loads|loaded|"] == expected, "loaded are those that every rank read and had confirmed"
        for name in done:
            del self.readers[name]
            request = self.requests[name]
            if request.is_over:
                self._free(request)
                del self.requests[name]
            elif name in failed:
                self._free(request)
                request.state = "waiting"
            else:
                request.state = "running"
                self.consumer.update_state_after_alloc(name, [[]], 0)

    def _free(self, request: Request) -> None:
        self.num_free += request.num_blocks
        request.num_blocks = 0

    def check_integrity(self) -> None:
        self.consumer.check_integrity()
        collect(self.counters, self.sums)
        assert self.num_free + sum(request.num_blocks for request in self.requests.values()) == self._num_blocks
        ended = sum_of(self.sums, "loads")
        assert ended + self.consumer.num_loads == self.num_arrived, "each request with a lease ends exactly once"
        assert self.sums["open_loads"] == self.consumer.num_loads
        for standing in Standing:
            assert self.sums[f"peers|{standing.value}"] == self.consumer._peers.count(standing)
        parked = {name for name, request in self.requests.items() if request.state == "parked"}
        assert parked >= self.readers.keys()
        assert parked <= self.consumer._claims.keys(), "vLLM waits for nothing that has ended"


def collect(counters: Counters, sums: dict[str, float]) -> None:
    for key, value in counters.take().items():
        sums[key] += value


def sum_of(sums: dict[str, float], name: str) -> float:
    return sum(value for key, value in sums.items() if key.split("|")[0] == name)
