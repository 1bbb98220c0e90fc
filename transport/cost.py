"""What a read costs beyond moving its bytes: many small segments, or copies that make few large ones of them.

A stated model with two constants, measured when a rank starts to read, or configured. Knows numbers of segments and
bytes; how a transport moves them is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layouts import ConfigError
from transport.segments import Int64Array, Segments

Path = Literal["direct", "gather", "scatter", "pack"]
"""How a read goes: its segments as they are; gathered into staging memory by the source; scattered from staging memory
by the reader; or both."""
PATHS: tuple[Path, ...] = get_args(Path)


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
