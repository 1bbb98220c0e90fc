"""What a read costs beyond moving its bytes: many small segments, or copies that make few large ones of them.

A stated model with two constants, measured when a rank starts to read, or configured. Knows numbers of segments and
bytes; how a transport moves them is not its business.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layouts import ConfigError
from transport.base import MemoryMap, Peer, TransferState, Transport
from transport.copies import gather
from transport.segments import Int64Array, Segments
from transport.staging import Staging

Path = Literal["direct", "gather", "scatter", "pack"]
"""How a read goes: its segments as they are; gathered into staging memory by the source; scattered from staging memory
by the reader; or both."""
PATHS: tuple[Path, ...] = get_args(Path)

_MEASURED_SEGMENTS, _MEASURED_BYTES, _MEASURED_APART, _MEASURED_ROW_BYTES = 256, 64, 8192, 2048
_MEASURED_ROUNDS = 5
_MEASUREMENT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ReadSize:
    """What the cost of a read depends on. `num_segments` are contiguous at both ends, `num_source_pieces` at the
    source, `num_target_pieces` at the reader."""

    num_bytes: int
    num_segments: int
    num_source_pieces: int
    num_target_pieces: int

    @classmethod
    def of(cls, segments: Segments) -> ReadSize:
        """Of segments that are merged and in order of target address."""
        source, length = segments.source, segments.length
        if (source[1:] < source[:-1]).any():
            order = np.argsort(source, kind="stable")
            source, length = source[order], length[order]
        return cls(
            segments.num_bytes,
            len(segments),
            _num_pieces(source, length),
            _num_pieces(segments.target, segments.length),
        )


def _num_pieces(address: Int64Array, length: Int64Array) -> int:
    return int(np.count_nonzero(address[:-1] + length[:-1] != address[1:])) + min(1, len(address))


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The two constants of a transport on a machine: seconds for one more segment, whatever its size, and seconds for
    one byte that is copied into or out of staging memory."""

    segment_s: float
    copy_s: float

    def __post_init__(self) -> None:
        for name in ("segment_s", "copy_s"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"cost {name} is {getattr(self, name)!r}; allowed are 0 to 1 seconds")

    def __str__(self) -> str:
        speed = f"{1e-9 / self.copy_s:.2f}" if self.copy_s else "free"
        return f"segment_us={1e6 * self.segment_s:.2f} copy_gb_per_s={speed}"

    def extra_s(self, path: Path, size: ReadSize) -> float:
        """Seconds that a path costs beyond moving the bytes in large pieces, which all of them must do."""
        num_segments, num_copies = {
            "direct": (size.num_segments, 0),
            "gather": (size.num_target_pieces, 1),
            "scatter": (size.num_source_pieces, 1),
            "pack": (1, 2),
        }[path]
        return num_segments * self.segment_s + num_copies * size.num_bytes * self.copy_s

    def cheapest(self, size: ReadSize, paths: Sequence[Path] = PATHS) -> Path:
        """The path with the least extra cost; of equal ones the first."""
        return min(paths, key=lambda path: self.extra_s(path, size))


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
    """Seconds per byte of gathering every second row of the first half of a slice into the other half."""
    half = staging.slice_bytes // 2
    rows = np.arange(0, half, 2 * _MEASURED_ROW_BYTES)
    lengths = np.full_like(rows, _MEASURED_ROW_BYTES)
    memory = staging.memory
    slice_ = staging.take()
    assert slice_ is not None, "costs are measured before anything is read"
    try:
        here = MemoryMap([memory])
        out = slice_.tensor[half:]
        return _median_s(lambda: gather(here, slice_.address + rows, lengths, out)) / int(lengths.sum())
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
