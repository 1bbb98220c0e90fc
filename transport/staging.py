"""One bounded buffer cut into equal slices, through which packed moves pass.

Knows memory and devices; knows nothing of what lies in a slice or who reads it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from layouts.errors import config_error
from transport.regions import Memory

DEFAULT_SLICE_BYTES = 4 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a staging buffer; `tensor` is its memory as uint8 [num_bytes]."""

    index: int
    address: int
    num_bytes: int
    tensor: torch.Tensor = field(compare=False, repr=False)


class Staging:
    """`num_bytes` bytes on `device`, allocated once, handed out in slices of `slice_bytes`; thread-safe.

    The slice given back last is taken first, so memory that was never needed is never touched. ConfigError
    when no slice fits, or slices are not whole pages.
    """

    def __init__(self, num_bytes: int, slice_bytes: int = DEFAULT_SLICE_BYTES, device: str = "cpu") -> None:
        if slice_bytes < _PAGE_BYTES or slice_bytes % _PAGE_BYTES:
            raise config_error(
                "staging slice",
                got=f"{slice_bytes} bytes",
                allowed=f"multiples of {_PAGE_BYTES}",
                remedy=f"Use {DEFAULT_SLICE_BYTES}.",
            )
        if num_bytes < slice_bytes:
            raise config_error(
                "staging memory",
                got=f"{num_bytes} bytes",
                allowed=f"at least one slice of {slice_bytes} bytes",
                remedy="Make it larger, or its slices smaller.",
            )
        self.slice_bytes = slice_bytes
        self.num_slices = num_bytes // slice_bytes
        size = self.num_slices * slice_bytes
        buffer = torch.empty(size + _PAGE_BYTES, dtype=torch.uint8, device=device)
        start = -buffer.data_ptr() % _PAGE_BYTES
        self._bytes = buffer[start : start + size]
        self._lock = threading.Lock()
        self._free = [self._slice(index) for index in reversed(range(self.num_slices))]

    @property
    def memory(self) -> Memory:
        """What to register with transports: all slices, and nothing else."""
        return Memory(self._bytes.data_ptr(), self._bytes.numel(), str(self._bytes.device), self._bytes)

    @property
    def num_free(self) -> int:
        """Number of slices that take() can still hand out."""
        with self._lock:
            return len(self._free)

    def take(self) -> Slice | None:
        """Return a slice for the caller alone, or None when all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slice_: Slice) -> None:
        """Make a taken slice available again; its bytes may change from now on."""
        with self._lock:
            assert slice_ not in self._free, f"slice {slice_.index} is given back twice"
            self._free.append(slice_)

    def _slice(self, index: int) -> Slice:
        start = index * self.slice_bytes
        tensor = self._bytes[start : start + self.slice_bytes]
        return Slice(index, tensor.data_ptr(), self.slice_bytes, tensor)
