"""Two machines on one: a source and a reader in network namespaces of their own, joined by a virtual cable.

Also with a rate cap and with lost packets. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import Cable
from tests.transport.source_process import ROOT, SourceProcess

NUM_BYTES = 24 << 20
LIBRARIES = {"nixl": "nixl_cu12"}
"""The transports that cross machines, with what has to be installed for each."""
CAP_BIT_S = 10**9
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


@pytest.fixture
def cable() -> Iterator[Cable]:
    with ExitStack() as stack:
        try:
            joined = stack.enter_context(namespaces.cable())
        except namespaces.NotPermitted as error:
            pytest.skip(str(error))
        yield joined


@pytest.fixture(params=LIBRARIES)
def read_across(request: pytest.FixtureRequest, cable: Cable) -> Iterator[Callable[[], float]]:
    """Read everything from one namespace into the other in two halves; returns the seconds of the second half."""
    pytest.importorskip(LIBRARIES[request.param])
    sources: list[SourceProcess] = []

    def options(end: int) -> dict[str, object]:
        return {}

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
    command = [*cable.inside(1), "cat", f"/sys/class/net/{cable.devices[1]}/statistics/rx_bytes"]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


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
