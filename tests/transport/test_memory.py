"""Scripted faults of the in-process transport."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from transport import Memory, MemoryTransport, Peer, Segments, TransferFailed, TransferState
from transport.memory import Fault

FAULTS = [Fault(delay_polls=2), Fault(delay_polls=1, cause="cut"), Fault(at_once=True, cause="no"), Fault()]


@pytest.fixture
def parts() -> Iterator[tuple[MemoryTransport, Peer, Segments, np.ndarray]]:
    source, target = np.full(8, 1, np.uint8), np.zeros(8, np.uint8)
    with MemoryTransport() as giver, MemoryTransport(FAULTS) as taker:
        giver.register([Memory(source.ctypes.data, 8)])
        taker.register([Memory(target.ctypes.data, 8)])
        segments = Segments.of([source.ctypes.data], [target.ctypes.data], [8])
        yield taker, taker.attach(giver.endpoint()), segments, target


def test_faults_come_in_order(parts: tuple[MemoryTransport, Peer, Segments, np.ndarray]) -> None:
    taker, peer, segments, target = parts
    late = taker.read(peer, segments)
    assert [late.poll() for _ in range(2)] == [TransferState.PENDING] * 2
    assert not target.any()
    assert late.poll() is TransferState.DONE
    assert target.all()
    failing = taker.read(peer, segments)
    assert (failing.poll(), failing.poll()) == (TransferState.PENDING, TransferState.FAILED)
    assert failing.cause == "cut"
    with pytest.raises(TransferFailed, match="no"):
        taker.read(peer, segments)
    assert taker.read(peer, segments).poll() is TransferState.DONE


def test_closing_a_late_read_fails_it(parts: tuple[MemoryTransport, Peer, Segments, np.ndarray]) -> None:
    taker, peer, segments, target = parts
    late = taker.read(peer, segments)
    late.close()
    assert (late.poll(), late.cause) == (TransferState.FAILED, "closed before it ended")
    assert not target.any()
