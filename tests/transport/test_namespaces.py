"""Two machines on one: a source and a reader in network namespaces of their own, joined by a virtual cable.

Also with a rate cap and with lost packets. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.transport.source_process import ROOT, SourceProcess

NUM_BYTES = 24 << 20
LIBRARIES = {"nixl": "nixl_cu12", "ucx": "ucxx"}
"""The transports that cross machines, with what has to be installed for each."""
CAP_BIT_S = 10**9
_ADDRESSES = ("10.213.77.1", "10.213.77.2")
_READ = textwrap.dedent("""
    import json, sys, time
    import numpy as np
    from tests.transport.source_process import content
    from transport import Memory, Segments, TransferState, create_transport
    kind, options, endpoint = sys.argv[1], json.loads(sys.argv[2]), bytes.fromhex(sys.argv[3])
    address, num_bytes, seed = map(int, sys.argv[4:])
    buffer = np.zeros(num_bytes, np.uint8)
    piece = 64 << 10
    at = np.arange(0, num_bytes, 2 * piece)
    with create_transport(kind, **options) as transport:
        transport.register([Memory(buffer.ctypes.data, num_bytes)])
        peer = transport.attach(endpoint)
        seconds = []
        for first in (0, piece):
            begin = time.monotonic()
            segments = Segments.of(address + first + at, buffer.ctypes.data + first + at, piece)
            with transport.read(peer, segments) as transfer:
                while transfer.poll() is TransferState.PENDING:
                    assert time.monotonic() - begin < 80
                    time.sleep(0.0002)
                assert transfer.poll() is TransferState.DONE, transfer.cause
            seconds.append(time.monotonic() - begin)
    assert np.array_equal(buffer, content(num_bytes, seed))
    print("exact", seconds[1])
""")


@dataclass(frozen=True, slots=True)
class Cable:
    """Two namespaces and the names of the devices that join them."""

    namespaces: tuple[str, str]
    devices: tuple[str, str]

    def inside(self, end: int) -> list[str]:
        """What to put in front of a command that is to run at one end."""
        return ["ip", "netns", "exec", self.namespaces[end]]

    def cap(self, bit_s: int) -> None:
        """Let each end send at most so much."""
        for end, device in enumerate(self.devices):
            shape = ["tbf", "rate", f"{bit_s}bit", "burst", "256kb", "latency", "50ms"]
            run(*self.inside(end), "tc", "qdisc", "add", "dev", device, "root", *shape)

    def lose(self, probability: float) -> None:
        """Drop packets that arrive at either end."""
        for end in range(2):
            pick = ["-m", "statistic", "--mode", "random", "--probability", str(probability)]
            run(*self.inside(end), "iptables", "-A", "INPUT", *pick, "-j", "DROP")

    def num_lost(self) -> int:
        """Packets dropped so far."""
        listings = [run(*self.inside(end), "iptables", "-nvxL", "INPUT") for end in range(2)]
        return sum(int(line.split()[0]) for text in listings for line in text.splitlines() if " DROP " in line)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not permitted here: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def cable() -> Iterator[Cable]:
    missing = [tool for tool in ("ip", "tc", "iptables") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}; install iproute2 and iptables")
    tag = uuid.uuid4().hex[:6]
    cable = Cable((f"kvw-{tag}-0", f"kvw-{tag}-1"), (f"kvw{tag}0", f"kvw{tag}1"))
    try:
        for namespace in cable.namespaces:
            run("ip", "netns", "add", namespace)
        ends = [["name", device, "netns", space] for device, space in zip(cable.devices, cable.namespaces, strict=True)]
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for end, (device, address) in enumerate(zip(cable.devices, _ADDRESSES, strict=True)):
            run(*cable.inside(end), "ip", "address", "add", f"{address}/24", "dev", device)
            for name in ("lo", device):
                run(*cable.inside(end), "ip", "link", "set", name, "up")
        yield cable
    finally:
        for namespace in cable.namespaces:  # its end of the cable goes with it
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@pytest.fixture(params=LIBRARIES)
def read_across(request: pytest.FixtureRequest, cable: Cable) -> Iterator[Callable[[], float]]:
    """Read everything from one namespace into the other in two halves; returns the seconds of the second half."""
    pytest.importorskip(LIBRARIES[request.param])
    sources: list[SourceProcess] = []

    def options(end: int) -> dict[str, object]:
        return {"host": _ADDRESSES[end]} if request.param == "ucx" else {}

    def environment(end: int) -> dict[str, str]:
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": cable.devices[end], "PYTHONPATH": str(ROOT)}

    def read() -> float:
        source = SourceProcess(
            request.param, NUM_BYTES, 5, options=options(0), command=cable.inside(0), env=environment(0)
        )
        sources.append(source)
        source.wait()
        sizes = [str(source.address), str(NUM_BYTES), "5"]
        arguments = [request.param, json.dumps(options(1)), source.endpoint.hex(), *sizes]
        done = subprocess.run(
            [*cable.inside(1), sys.executable, "-c", _READ, *arguments],
            env={**os.environ, **environment(1)},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        exact, seconds = done.stdout.splitlines()[-1].split()
        assert exact == "exact"
        return float(seconds)

    yield read
    for source in sources:
        source.end()


def num_received(cable: Cable) -> int:
    """Bytes that came in at the reader's end."""
    path = f"/sys/class/net/{cable.devices[1]}/statistics/rx_bytes"
    return int(run(*cable.inside(1), "cat", path))


def test_between_two_machines(cable: Cable, read_across: Callable[[], float]) -> None:
    read_across()
    assert NUM_BYTES <= num_received(cable) < 1.1 * NUM_BYTES  # over the cable, once, and little beside the payload


def test_over_a_slow_cable(cable: Cable, read_across: Callable[[], float]) -> None:
    cable.cap(CAP_BIT_S)
    assert read_across() > NUM_BYTES / 2 * 8 / CAP_BIT_S / 1.5  # the cap is there


def test_with_lost_packets(cable: Cable, read_across: Callable[[], float]) -> None:
    cable.lose(0.01)
    read_across()
    assert cable.num_lost() > 0
