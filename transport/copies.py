"""Copies between scattered memory and one flat buffer: a vectorised operation per stretch of memory.

Pieces move as rows of one size wherever their lengths and offsets have a useful common divisor. On the CPU numpy
does that (`take` and `put` of whole rows run at memory speed in the calling thread, without the interpreter lock
and without a thread pool of their own); elsewhere torch does, on a stream of its own. Knows addresses; knows no
peers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transport.base import MemoryMap
from transport.regions import Memory
from transport.segments import Int64Array, Segments

MIN_ROW_BYTES = 64
"""Finer rows than this are slower, on the CPU, than one operation per length of piece."""

_Bytes = npt.NDArray[np.uint8]
_Index = Int64Array | slice


def gather(memory: MemoryMap, addresses: Int64Array, lengths: Int64Array, out: torch.Tensor) -> None:
    """Copy pieces of `memory` one after the other into `out`, uint8 [at least sum of lengths].

    Returns when the bytes are in place. ValueError when a piece lies outside of `memory` or `out` is too small.
    """
    flat = _flat(out, lengths)
    for stretch, pieces in _by_stretch(memory, addresses, lengths):
        _copy(stretch, pieces.source, flat, pieces.target, pieces.length)


def scatter(data: torch.Tensor, memory: MemoryMap, addresses: Int64Array, lengths: Int64Array) -> None:
    """Copy `data`, uint8 [at least sum of lengths], piece by piece to `memory`; the inverse of `gather`.

    Pieces must not overlap. Returns when the bytes are in place. ValueError when one lies outside of `memory` or
    `data` is too small.
    """
    flat = _flat(data, lengths)
    for stretch, pieces in _by_stretch(memory, addresses, lengths):
        _copy(flat, pieces.target, stretch, pieces.source, pieces.length)


def common_divisor(numbers: Int64Array, *others: Int64Array) -> int:
    """Return the greatest common divisor of positive `numbers` and `others`; fast where one size divides them all."""
    unit = int(numbers.min())
    if unit != int(numbers.max()):
        others = numbers, *others
    for array in others:
        if (array % unit).any():
            unit = int(np.gcd.reduce(array, initial=unit))
    return unit


class _Side:
    """One end of a copy: a stretch of memory, and where in it the pieces lie (bytes from its start)."""

    def __init__(self, stretch: Memory, offsets: Int64Array, lengths: Int64Array) -> None:
        self.stretch = stretch
        self.offsets = offsets
        self.start = int(offsets[0])
        self.is_gapless = bool((offsets[:-1] + lengths[:-1] == offsets[1:]).all())

    def rows(self, lengths: Int64Array, unit: int) -> tuple[int, _Index]:
        """Return where rows of `unit` bytes start (below `unit`), and the numbers of the rows to move."""
        if self.is_gapless:
            first = self.start // unit
            return self.start % unit, slice(first, first + int(lengths.sum()) // unit)
        return self.start % unit, _expand(self.offsets // unit, lengths // unit)


def _by_stretch(memory: MemoryMap, addresses: Int64Array, lengths: Int64Array) -> Iterator[tuple[Memory, Segments]]:
    """Yield, per stretch of `memory`, its pieces: offset in the stretch, offset in the flat buffer, length."""
    pieces = Segments(addresses, np.cumsum(lengths) - lengths, lengths).without_empty()
    if len(pieces) == 0:
        return
    first, end = int(pieces.source.min()), int((pieces.source + pieces.length).max())
    stretch = memory.memory[int(memory.find(np.array([first]))[0])]
    if end <= stretch.end:
        yield stretch, Segments(pieces.source - stretch.address, pieces.target, pieces.length)
        return
    pieces = memory.fit(pieces, "source")
    index = memory.find(pieces.source)
    for number in np.unique(index).tolist():
        stretch, here = memory.memory[number], np.flatnonzero(index == number)
        yield stretch, Segments(pieces.source[here] - stretch.address, pieces.target[here], pieces.length[here])


def _copy(source_memory: Memory, from_: Int64Array, target_memory: Memory, to: Int64Array, lengths: Int64Array) -> None:
    """Copy piece i from one memory to the other; both on one device."""
    source, target = _Side(source_memory, from_, lengths), _Side(target_memory, to, lengths)
    scattered = [side.offsets - side.start for side in (source, target) if not side.is_gapless]
    unit = common_divisor(lengths, *scattered)
    if source_memory.device != "cpu":
        with _own_stream(source_memory.device):
            _copy_torch_rows(source, target, lengths, unit)
    elif unit >= MIN_ROW_BYTES or unit == int(lengths.max()):
        _copy_rows(source, target, lengths, unit)
    else:
        _copy_by_length(source, target, lengths)


def _copy_rows(source: _Side, target: _Side, lengths: Int64Array, unit: int) -> None:
    from_rows, take = _numpy_rows(source, lengths, unit)
    to_rows, put = _numpy_rows(target, lengths, unit)
    if isinstance(put, slice) and not isinstance(take, slice):
        np.take(from_rows, take, out=to_rows[put], mode="clip")  # other modes buffer the output
    elif isinstance(put, slice):
        to_rows[put] = from_rows[take]
    else:
        np.put(to_rows, put, from_rows[take], mode="clip")


def _numpy_rows(side: _Side, lengths: Int64Array, unit: int) -> tuple[npt.NDArray[np.void], _Index]:
    start, index = side.rows(lengths, unit)
    memory = _array(side.stretch)
    return memory[start : start + (len(memory) - start) // unit * unit].view(f"V{unit}"), index


def _copy_by_length(source: _Side, target: _Side, lengths: Int64Array) -> None:
    """Copy with one operation per length, wherever the pieces lie: rows that start at every byte."""
    order = np.argsort(lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        row = np.dtype(f"V{lengths[group[0]]}")
        from_rows, to_rows = (
            np.ndarray(len(memory) - row.itemsize + 1, row, memory.data, strides=(1,))
            for memory in (_array(source.stretch), _array(target.stretch))
        )
        to_rows[target.offsets[group]] = from_rows[source.offsets[group]]


def _copy_torch_rows(source: _Side, target: _Side, lengths: Int64Array, unit: int) -> None:
    """Copy on any device, in rows of words where both ends are aligned to words."""
    starts = source.stretch.address + source.start, target.stretch.address + target.start
    dtype = torch.int64 if all(number % 8 == 0 for number in (*starts, unit)) else torch.uint8
    from_rows, take = _torch_rows(source, lengths, unit, dtype)
    to_rows, put = _torch_rows(target, lengths, unit, dtype)
    if isinstance(put, slice) and not isinstance(take, slice):
        torch.index_select(from_rows, 0, take, out=to_rows[put])
    elif isinstance(put, slice):
        to_rows[put] = from_rows[take]
    else:
        to_rows.index_copy_(0, put, from_rows[take])


def _torch_rows(
    side: _Side, lengths: Int64Array, unit: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | slice]:
    start, index = side.rows(lengths, unit)
    memory = _tensor(side.stretch)
    rows = memory[start : start + (len(memory) - start) // unit * unit].view(dtype).view(-1, unit // dtype.itemsize)
    return rows, index if isinstance(index, slice) else torch.from_numpy(index).to(rows.device)


def _expand(first: Int64Array, counts: Int64Array) -> Int64Array:
    """Return first[i], first[i] + 1, ... (counts[i] numbers) for each i."""
    if int(counts.max()) == 1:
        return first
    ends = np.cumsum(counts)
    return np.repeat(first - (ends - counts), counts) + np.arange(int(ends[-1]), dtype=np.int64)


def _array(memory: Memory) -> _Bytes:
    """Return CPU memory as an array, whoever owns it."""
    interface = {"data": (memory.address, False), "shape": (memory.num_bytes,), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _tensor(memory: Memory) -> torch.Tensor:
    """Return memory on any device as a flat uint8 tensor."""
    if memory.device == "cpu":
        return torch.from_numpy(_array(memory))
    start = memory.address - memory.storage.data_ptr()
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.storage)
    return whole[start : start + memory.num_bytes]


def _flat(buffer: torch.Tensor, lengths: Int64Array) -> Memory:
    """Describe the flat end of a copy; ValueError when the pieces do not fit in."""
    if int(lengths.sum()) > buffer.numel():
        raise ValueError(f"pieces have {int(lengths.sum())} bytes, the buffer has {buffer.numel()}")
    return Memory(buffer.data_ptr(), buffer.numel(), str(buffer.device), buffer.untyped_storage())


@contextmanager
def _own_stream(device: str) -> Iterator[None]:
    """Run copies beside the model's own work, not behind it, and wait for their end."""
    stream = _stream_of(device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


@functools.cache
def _stream_of(device: str) -> Any:
    return torch.cuda.Stream(device)
