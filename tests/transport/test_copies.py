"""Gather and scatter: exact bytes for pieces of any size, alignment and order, and no byte beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import Memory
from transport import copies as module
from transport.base import MemoryMap
from transport.copies import gather, scatter

Int64Array = np.typing.NDArray[np.int64]


class Cache:
    """Several stretches of memory with known bytes."""

    def __init__(self, *sizes: int) -> None:
        rng = np.random.default_rng(len(sizes))
        self.buffers = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
        self.memory = MemoryMap([Memory(int(buffer.ctypes.data), len(buffer)) for buffer in self.buffers])

    def addresses(self, number: int, offsets: Int64Array) -> Int64Array:
        return offsets + int(self.buffers[number].ctypes.data)

    def snapshot(self) -> list[np.ndarray]:
        return [buffer.copy() for buffer in self.buffers]


def slow_gather(cache: Cache, addresses: Int64Array, lengths: Int64Array) -> bytes:
    out = b""
    for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        for buffer in cache.buffers:
            start = address - int(buffer.ctypes.data)
            if 0 <= start < len(buffer):
                out += buffer[start : start + length].tobytes()
    return out


def check_there_and_back(cache: Cache, addresses: Int64Array, lengths: Int64Array) -> None:
    """Gather equals the slow way; scattering other bytes changes the pieces, and nothing but them."""
    total = int(lengths.sum())
    out = torch.full((total + 64,), 7, dtype=torch.uint8)
    before = cache.snapshot()
    gather(cache.memory, addresses, lengths, out)
    assert out[:total].numpy().tobytes() == slow_gather(cache, addresses, lengths)
    assert (out[total:] == 7).all()
    other = torch.from_numpy(255 - out.numpy())
    scatter(other, cache.memory, addresses, lengths)
    assert slow_gather(cache, addresses, lengths) == other[:total].numpy().tobytes()
    scatter(out, cache.memory, addresses, lengths)
    assert all(np.array_equal(a, b) for a, b in zip(before, cache.buffers, strict=True))


@pytest.fixture(params=["numpy", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's own way, and the one of other devices, which works on any."""
    if request.param == "torch":
        rows = module._copy_torch_rows
        monkeypatch.setattr(module, "_copy_rows", rows)
        monkeypatch.setattr(module, "MIN_ROW_BYTES", 1)
    return str(request.param)


@pytest.mark.parametrize("row", [1, 8, 24, 64, 512, 1152, 65536])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_rows_of_one_size(way: str, row: int, order: str) -> None:
    cache = Cache(40 * row)
    number = np.arange(0, 40, 2)
    if order != "forward":
        number = number[::-1] if order == "backward" else np.random.default_rng(0).permutation(number)
    check_there_and_back(cache, cache.addresses(0, number * row), np.full(20, row))


def test_pieces_in_several_stretches_and_mixed_order(way: str) -> None:
    cache = Cache(64 * 128, 64 * 128, 64 * 128)
    rng = np.random.default_rng(3)
    addresses = np.concatenate([cache.addresses(number, np.arange(0, 64, 3) * 128) for number in range(3)])
    check_there_and_back(cache, rng.permutation(addresses), np.full(len(addresses), 128))


def test_runs_of_tokens_at_odd_starts(way: str) -> None:
    cache = Cache(100_000)
    starts, lengths = np.array([3, 7, 11, 60]) * 1152 + 37, np.array([1, 3, 40, 2]) * 1152
    check_there_and_back(cache, cache.addresses(0, starts), lengths)


def test_a_piece_over_the_border_of_two_stretches() -> None:
    buffer = np.random.default_rng(0).integers(0, 256, 8192).astype(np.uint8)
    base = int(buffer.ctypes.data)
    memory = MemoryMap([Memory(base, 4096), Memory(base + 4096, 4096)])
    out = torch.zeros(3000, dtype=torch.uint8)
    gather(memory, np.array([base + 3000]), np.array([3000]), out)
    assert out.numpy().tobytes() == buffer[3000:6000].tobytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pieces(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), min_size=1, max_size=40))
    unit = data.draw(st.sampled_from([1, 3, 16, 64, 100]))
    gaps, lengths = (np.array(column, np.int64) * unit for column in zip(*pieces, strict=True))
    starts = np.cumsum(gaps + lengths) - lengths + data.draw(st.integers(0, 9))
    order = data.draw(st.permutations(range(len(pieces))))
    cache = Cache(int(starts[-1] + lengths[-1]) + 10)
    check_there_and_back(cache, cache.addresses(0, starts[order]), lengths[order])


@pytest.mark.parametrize("offset, length", [(-1, 4), (4093, 4), (4096, 1), (0, 5000)])
def test_memory_that_is_not_ours_is_refused(offset: int, length: int) -> None:
    cache = Cache(4096)
    addresses, lengths = cache.addresses(0, np.array([16, offset])), np.array([16, length])
    with pytest.raises(ValueError, match="not in registered memory"):
        gather(cache.memory, addresses, lengths, torch.zeros(8192, dtype=torch.uint8))


def test_a_buffer_that_is_too_small_is_refused() -> None:
    cache = Cache(4096)
    addresses, lengths = cache.addresses(0, np.array([0, 2048])), np.array([1024, 1024])
    small = torch.zeros(2047, dtype=torch.uint8)
    for copy in (
        lambda: gather(cache.memory, addresses, lengths, small),
        lambda: scatter(small, cache.memory, addresses, lengths),
    ):
        with pytest.raises(ValueError, match="2048 bytes, the buffer has 2047"):
            copy()
