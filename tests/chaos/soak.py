"""A soak under blows: `python -m tests.chaos.soak --requests 2000 --events 20 --seed 1`.

A prefill node, a decode node that shards differently, both with small pools, and the proxy serve mixed requests while
they are killed and stopped at seeded moments. Every answer is compared with that of a single plain node. An error
counts as passed only where it has to happen: 4xx for forged params, and anything while a process that this request
cannot do without was dead. In the end both pools and all leases have to be back where they were.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from examples.nodes import Node, exit_on_signals, free_ports, running
from tests.chaos.blows import READY_TIMEOUT_S, Blow, Part, Striker, plan_blows
from tests.chaos.traffic import (
    BOUND_S,
    Ask,
    Cluster,
    Ending,
    Kind,
    Outcome,
    make_asks,
    make_prompts,
    single_node_texts,
)
from tests.nodes.cluster import HEAD_SIZE, Layout, VllmNode, make_node, plain_node
from tests.tiny_model import write_tiny_llama

PREFILL_BLOCKS, DECODE_BLOCKS = 56, 28
"""Room for about six of the longest prompts, so that every freed block is wanted at once."""
NUM_CLIENTS = 10
BACK_OFF_S = 5.0
"""A client that met a dead process comes back after this."""
NUM_LAST = 5
IDLE_WITHIN_S = 20.0

NEEDS = {
    **{kind: {Part.PROXY, Part.DECODE} for kind in Kind},
    Kind.REPLAYED: {Part.PREFILL, Part.DECODE},
    Kind.FOREIGN: {Part.PREFILL, Part.DECODE},
    Kind.FORGED: {Part.DECODE},
}
"""What a request cannot do without: behind the proxy the decode node prefills where no prefill node does."""


@dataclass(slots=True)
class Report:
    """What happened. `problems` are the failed checks, one line each."""

    endings: Counter[str] = field(default_factory=Counter)
    num_passed: int = 0
    num_excused: int = 0
    slowest_s: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def passed(self, text: str) -> None:
        self.num_passed += 1
        self.endings[text] += 1

    def lines(self) -> Iterator[str]:
        yield f"time      {self.seconds:.0f} s; slowest request {self.slowest_s:.1f} s, bound {BOUND_S:g} s"
        yield "blows     " + (", ".join(f"{blow} {count}" for blow, count in sorted(self.blows.items())) or "none")
        for text, count in sorted(self.endings.items()):
            yield f"ending    {text}: {count:,}"
        yield f"          of these {self.num_excused:,} errors while a process they need was dead"
        for name, value in sorted(self.counters.items()):
            yield f"counter   {name}: {value:,.0f}"
        for problem in self.problems:
            yield f"FAILED    {problem}"
        yield f"{self.num_passed:,} passed, {len(self.problems):,} failed"


class Soak:
    """One run on nodes that serve already."""

    def __init__(self, cluster: Cluster, nodes: dict[Part, VllmNode], proxy: Node) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._striker = Striker({part: node.node for part, node in nodes.items()} | {Part.PROXY: proxy}, self._count)
        self._lock = threading.Lock()
        self._report = Report()

    def run(self, asks: Sequence[Ask], blows: Sequence[Blow]) -> Report:
        """Send all requests, deal all blows, then look whether everything is as before."""
        began = time.monotonic()
        room, due = threading.Semaphore(2 * NUM_CLIENTS), list(blows)
        latest: dict[Part, Future[None]] = {}
        sent: list[Future[None]] = []
        with ThreadPoolExecutor(len(Part)) as strikers, ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for ask in asks:
                while due and due[0].after <= ask.number:
                    blow = due.pop(0)
                    if blow.part in latest:
                        latest[blow.part].result()  # it has to be back first, and requests go on when it falls again
                    latest[blow.part] = strikers.submit(self._striker.strike, blow)
                room.acquire()
                sent.append(clients.submit(self._client, ask))
                sent[-1].add_done_callback(lambda _: room.release())
            for future in (*sent, *latest.values()):
                future.result()
        self._check_the_end()
        self._report.blows = self._striker.carried_out
        self._report.seconds = time.monotonic() - began
        return self._report

    def _client(self, ask: Ask) -> None:
        ending = self._cluster.send(ask)
        self._judge(ending)
        if ending.outcome is Outcome.BROKEN:
            time.sleep(BACK_OFF_S)

    def _judge(self, ending: Ending) -> None:
        ask, outcome = ending.ask, ending.outcome
        is_excused = outcome is Outcome.BROKEN and self._striker.is_down(NEEDS[ask.kind], ending.began, ending.ended)
        is_right = outcome in (Outcome.RIGHT, Outcome.LEFT) or (ask.kind is Kind.FORGED and outcome is Outcome.REFUSED)
        text = " ".join(filter(None, (f"{ask.kind}: {outcome}", ending.cause)))
        with self._lock:
            self._report.slowest_s = max(self._report.slowest_s, ending.ended - ending.began)
            self._report.num_excused += is_excused
            if is_right or is_excused:
                self._report.passed(text)
            else:
                self._report.problems.append(f"request {ask.number}, {len(ask.prompt)} tokens, {text}")

    def _check_the_end(self) -> None:
        """The next requests are loaded and right, then nothing is left of any."""
        prompts = list(self._cluster.texts)[:NUM_LAST]
        for number, prompt in enumerate(prompts):
            self._judge(self._cluster.send(Ask(number, Kind.WHOLE, prompt, 4, f"last-{number}")))
        for part, node in self._nodes.items():
            try:
                node.assert_idle(timeout_s=IDLE_WITHIN_S)
            except AssertionError as error:
                self._report.problems.append(f"{part} node not idle {IDLE_WITHIN_S:g} s after the end: {error}")
            else:
                self._report.passed(f"{part} node: block pool and leases as at the start")
            self._count(part)

    def _count(self, part: Part) -> None:
        """Add what this life of a node counted: its counters end with it."""
        if part not in self._nodes:
            return
        with suppress(OSError):
            gained = self._nodes[part].counters()
            with self._lock:
                for name, value in gained.items():
                    if re.match(r"loads|leases_|handshakes|read_failures", name):
                        self._report.counters[name] += round(value)


def proxy_node(prefill: str, decode: str, logs: Path) -> Node:
    """The example proxy, whose limits keep a request below BOUND_S."""
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-m", "examples.proxy", "--port", str(port), "--prefill", prefill, "--decode", decode),
        *("--connect-timeout-s", "5", "--prefill-timeout-s", "10", "--decode-timeout-s", "45"),
    ]
    return Node("proxy", command, {}, logs / "proxy.log", url=f"http://127.0.0.1:{port}")


def soak(directory: Path, num_requests: int, num_blows: int, seed: int) -> Report:
    """Start everything in `directory`, run, stop everything."""
    source = random.Random(seed)
    prompts = make_prompts(source, max(40, num_requests // 4))
    asks, blows = make_asks(source, prompts, num_requests), plan_blows(source, num_blows, num_requests)
    model, logs = write_tiny_llama(directory / "tiny-1-kv-heads", num_kv_heads=1, head_size=HEAD_SIZE), directory
    ports = control_ports(source)
    prefill = make_node(model, Layout(num_blocks=PREFILL_BLOCKS, port=ports[0]), logs)
    decode = make_node(model, Layout(tp=2, dcp=2, num_blocks=DECODE_BLOCKS, port=ports[1]), logs)
    plain, proxy = make_node(model, plain_node(1), logs), proxy_node(prefill.url, decode.url, logs)
    with httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        with running([plain.node], READY_TIMEOUT_S):
            texts = single_node_texts(http, plain.url, prompts)
        with running([prefill.node, decode.node, proxy], READY_TIMEOUT_S):
            cluster = Cluster(http, proxy.url, prefill.url, decode.url, texts)
            return Soak(cluster, {Part.PREFILL: prefill, Part.DECODE: decode}, proxy).run(asks, blows)


def control_ports(source: random.Random) -> list[int]:
    """Two ports that outgoing connections do not take while a node restarts (below Linux' ephemeral ones)."""
    return source.sample(range(20_000, 30_000), 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="Requests under blows.")
    parser.add_argument("--requests", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--events", type=int, default=20, help="SIGKILLs and SIGSTOPs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the nodes' logs (default: a new one)")
    options = parser.parse_args(arguments)
    exit_on_signals()
    directory = options.logs or Path(tempfile.mkdtemp(prefix="kvweave-soak-"))
    print(
        f"seed {options.seed}: {options.requests:,} requests, {options.events} events; logs in {directory}", flush=True
    )
    report = soak(directory, options.requests, options.events, options.seed)
    print(*report.lines(), sep="\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
