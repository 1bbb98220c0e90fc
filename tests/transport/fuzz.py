"""Attacks a control port and says how it fared: `python -m tests.transport.fuzz --frames 100000 [--curve]`.

The server is another process with a real prefill node's leases behind it, whose memory, threads and descriptors are
watched from here. After every batch a valid Open has to be served, and every message has to have been answered.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import zmq

from tests.transport.fuzz_frames import Fuzz
from tests.transport.fuzz_server import is_right, valid_open
from tests.transport.samples import MESSAGES
from transport.control.keys import NodeKeys, PeerKey, create_keys
from transport.control.messages import Renew, decode_reply, encode

BATCH = 250
PATIENCE_MS = 20_000
MAX_GROWTH_MIB = 16.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the server's process holds."""

    rss_mib: float
    num_threads: int
    num_descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), descriptors)


@dataclass(slots=True)
class Report:
    """What was sent and what came back; `footprints` are of the server after each tenth of the frames."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    num_opens_served: int = 0
    seconds: float = 0.0
    footprints: list[Footprint] = field(default_factory=list)

    @property
    def warm(self) -> Footprint:
        return self.footprints[0]

    @property
    def end(self) -> Footprint:
        return self.footprints[-1]

    @property
    def growth_mib(self) -> float:
        return self.end.rss_mib - self.warm.rss_mib

    def __str__(self) -> str:
        sent = ", ".join(f"{kind} {count:,}" for kind, count in self.sent.most_common())
        answers = ", ".join(f"{kind} {count:,}" for kind, count in self.answers.most_common())
        return (
            f"sent      {self.sent.total():,}: {sent}\n"
            f"answers   {self.answers.total():,}: {answers}\n"
            f"opens     {self.num_opens_served:,} valid ones in between, all served\n"
            f"memory    {', '.join(f'{footprint.rss_mib:.1f}' for footprint in self.footprints)} MiB\n"
            f"threads   {self.warm.num_threads} -> {self.end.num_threads}\n"
            f"files     {self.warm.num_descriptors} -> {self.end.num_descriptors}\n"
            f"time      {self.seconds:.1f} s"
        )


@dataclass(slots=True)
class Target:
    """The server under attack, and how an honest peer talks to it."""

    pid: int
    port: int
    capability: str
    keys: NodeKeys | None
    context: zmq.Context[zmq.Socket[bytes]]

    def connect(self, keys: NodeKeys | None, server_key: bytes = b"") -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        if keys is not None:
            dealer.set(zmq.CURVE_SERVERKEY, server_key or keys.own.public)
            dealer.set(zmq.CURVE_PUBLICKEY, keys.own.public)
            dealer.set(zmq.CURVE_SECRETKEY, keys.secret)
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        return dealer

    def honest(self) -> zmq.Socket[bytes]:
        return self.connect(self.keys)


@contextmanager
def attacked_server(folder: Path, curve: bool) -> Iterator[Target]:
    keys = create_keys(folder / "keys", "node", ["127.0.0.1"]) if curve else None
    command = [sys.executable, "-m", "tests.transport.fuzz_server", str(folder / "keys") if curve else ""]
    with (
        zmq.Context() as context,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            port, capability = process.stdout.readline().split()
            yield Target(process.pid, int(port), capability, keys, context)
            assert process.poll() is None, "the server died"
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            finally:
                process.kill()
            context.destroy(linger=0)


def attack(target: Target, num_frames: int, seed: int) -> Report:
    """Send that many bad messages, batch by batch."""
    messages = [*MESSAGES, valid_open(target.capability, "fuzz"), Renew(target.capability, "fuzz")]
    fuzz, report, begin = Fuzz(messages, seed), Report(), time.monotonic()
    source = fuzz.messages_of_frames()
    with target.honest() as honest:
        _send_batch(honest, target, iter(()), report)
        for number in range(0, num_frames, BATCH):
            _send_batch(honest, target, islice(source, min(BATCH, num_frames - number)), report)
            _knock(target, fuzz, report)
            if (number + BATCH) * 10 // num_frames > len(report.footprints):
                report.footprints.append(Footprint.of(target.pid))
    with target.honest() as newcomer:
        _send_batch(newcomer, target, iter(()), report)
    report.footprints.append(_settled(target.pid))
    report.seconds = time.monotonic() - begin
    return report


def _send_batch(
    dealer: zmq.Socket[bytes], target: Target, messages: Iterator[tuple[str, list[bytes]]], report: Report
) -> None:
    """Every message is answered, and then a valid Open is served."""
    expected = 0
    for kind, frames in messages:
        dealer.send_multipart(frames)
        report.sent[kind] += 1
        expected += 1
    check = os.urandom(16)
    dealer.send_multipart([check, encode(valid_open(target.capability, "check"))])
    while True:
        assert dealer.poll(PATIENCE_MS), f"no answer; {expected} messages are unanswered"
        *envelope, frame = dealer.recv_multipart()
        reply = decode_reply(frame)
        if envelope == [check]:
            break
        expected -= 1
        report.answers[getattr(reply, "cause", type(reply).__name__)] += 1
    assert expected == 0, f"{expected} messages were not answered"
    assert is_right(reply), f"a valid Open was answered with {reply}"
    report.num_opens_served += 1


def _knock(target: Target, fuzz: Fuzz, report: Report) -> None:
    """What comes in by other doors: junk connections, messages that are cut off, peers without an allowed key."""
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            report.sent["connection"] += 1
            with suppress(OSError):  # cut off already
                connection.sendall(fuzz.connection())
    report.sent["cut_off"] += 1
    with target.honest() as dealer:
        dealer.send_multipart(fuzz.cut_off())
        dealer.poll(20)
    if target.keys is not None:
        _knock_without_key(target, fuzz, report)


def _knock_without_key(target: Target, fuzz: Fuzz, report: Report) -> None:
    assert target.keys is not None
    public, secret = zmq.curve_keypair()
    stranger = NodeKeys(target.keys.directory, PeerKey("stranger", public), secret)
    for keys in (None, stranger):
        with target.connect(keys, target.keys.own.public) as dealer:
            with suppress(zmq.Again):  # refused already
                dealer.send_multipart([b"envelope", encode(valid_open(target.capability, "stranger"))], zmq.NOBLOCK)
            report.sent["stranger"] += 1
            assert not dealer.poll(20), "a peer without an allowed key was answered"


def _settled(pid: int, patience_s: float = 15.0) -> Footprint:
    """The server's footprint once it has dropped the connections that ended."""
    footprint, deadline = Footprint.of(pid), time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(0.5)
        before, footprint = footprint, Footprint.of(pid)
        if before.num_descriptors == footprint.num_descriptors:
            break
    return footprint


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transport.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, metavar="N", help="messages to send (100000)")
    parser.add_argument("--curve", action="store_true", help="with encryption and client authentication")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, attacked_server(Path(folder), options.curve) as target:
        report = attack(target, options.frames, options.seed)
    print(report)
    if report.growth_mib > MAX_GROWTH_MIB:
        print(f"FAILED: the server has grown by more than {MAX_GROWTH_MIB} MiB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
