"""The two constants of `cost.ReadCost`, measured on this rank's own memory in a few milliseconds."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np

from layouts import ConfigError
from transport.base import MemoryMap, Peer, TransferState, Transport
from transport.copies import scatter
from transport.segments import Segments
from transport.staging import Staging

_MEASURED_SEGMENTS, _MEASURED_BYTES, _MEASURED_APART, _MEASURED_ROW_BYTES = 256, 64, 8192, 512
_MEASURED_ROUNDS = 5
_MEASUREMENT_TIMEOUT_S = 5.0


def measure_segment_s(transport: Transport, staging: Staging) -> float:
    """Seconds per segment of reads from this rank's own memory, small enough that their bytes cost nothing.

    `transport` is ready to read, and knows the memory of `staging`.
    """
    source, target = staging.memory.address, staging.memory.address + staging.slice_bytes // 2
    number = np.arange(_MEASURED_SEGMENTS) * _MEASURED_APART  # each in pages of its own, as those of a cache are
    many, one = (
        Segments.of(source + number[:count], target + number[:count], _MEASURED_BYTES)
        for count in (_MEASURED_SEGMENTS, 1)
    )
    peer = transport.attach(transport.endpoint())
    try:
        many_s, one_s = (_median_s(functools.partial(_read, transport, peer, segments)) for segments in (many, one))
    finally:
        transport.detach(peer)
    return max(0.0, many_s - one_s) / (_MEASURED_SEGMENTS - 1)


def measure_copy_s(staging: Staging) -> float:
    """Seconds per byte of scattering one half of a slice, in the smallest usual rows, over the other half."""
    half = staging.slice_bytes // 2
    rows = np.arange(0, half, 2 * _MEASURED_ROW_BYTES)
    lengths = np.full_like(rows, _MEASURED_ROW_BYTES)
    memory = staging.memory
    slice_ = staging.take()
    assert slice_ is not None, "costs are measured before anything is read"
    try:
        here = MemoryMap([memory])
        data = slice_.tensor[half:]
        return _median_s(lambda: scatter(data, here, slice_.address + rows, lengths)) / int(lengths.sum())
    finally:
        staging.give_back(slice_)


def _read(transport: Transport, peer: Peer, segments: Segments) -> None:
    with transport.read(peer, segments) as transfer:
        deadline = time.monotonic() + _MEASUREMENT_TIMEOUT_S
        while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
            time.sleep(0)
        if transfer.poll() is not TransferState.DONE:
            raise ConfigError(f"a read of own memory did not work: {transfer.cause or 'it does not end'}")


def _median_s(action: Callable[[], object]) -> float:
    """Median seconds of a few runs of `action`, after one that does not count."""
    action()
    times = []
    for _ in range(_MEASURED_ROUNDS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
