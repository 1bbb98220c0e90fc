"""Staging: a bound that holds, slices that do not overlap, memory that is not touched before it is needed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from layouts import ConfigError
from transport.staging import Slice, Staging

PAGE = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def take_all(staging: Staging) -> list[Slice]:
    taken: list[Slice] = []
    while (slice_ := staging.take()) is not None:
        taken.append(slice_)
    return taken


def test_slices_tile_the_memory() -> None:
    staging = Staging(10 * PAGE + 100, 2 * PAGE)
    assert (staging.num_slices, staging.num_free) == (5, 5)
    taken = take_all(staging)
    assert staging.num_free == 0
    memory = staging.memory
    assert memory.address % PAGE == 0
    assert [slice_.address for slice_ in taken] == list(range(memory.address, memory.end, 2 * PAGE))
    for slice_ in taken:
        assert slice_.tensor.data_ptr() == slice_.address
        assert slice_.tensor.numel() == slice_.num_bytes == 2 * PAGE


def test_the_last_given_back_is_taken_first() -> None:
    staging = Staging(4 * PAGE, PAGE)
    first, second = staging.take(), staging.take()
    assert first is not None and second is not None
    staging.give_back(first)
    assert staging.take() is first
    staging.give_back(second)
    staging.give_back(first)
    assert staging.num_free == 4


def test_giving_back_twice_is_our_bug() -> None:
    staging = Staging(2 * PAGE, PAGE)
    slice_ = staging.take()
    assert slice_ is not None
    staging.give_back(slice_)
    with pytest.raises(AssertionError, match="twice"):
        staging.give_back(slice_)


def test_memory_is_touched_when_it_is_used() -> None:
    size = 64 << 20
    before = resident_bytes()
    staging = Staging(size, 1 << 20)
    slice_ = staging.take()
    assert slice_ is not None
    slice_.tensor.fill_(1)
    staging.give_back(slice_)
    assert resident_bytes() - before < size // 4
    for slice_ in take_all(staging):
        slice_.tensor.fill_(1)
    assert size // 2 < resident_bytes() - before < size + (8 << 20)


def test_threads_never_share_a_slice() -> None:
    staging = Staging(4 * PAGE, PAGE)
    held, doubles = set[int](), list[int]()

    def work() -> None:
        for _ in range(2000):
            slice_ = staging.take()
            if slice_ is not None:
                if slice_.index in held:
                    doubles.append(slice_.index)
                held.add(slice_.index)
                held.discard(slice_.index)
                staging.give_back(slice_)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (doubles, staging.num_free) == ([], 4)


@pytest.mark.parametrize(
    "num_bytes, slice_bytes, thing",
    [(PAGE - 1, PAGE, "staging memory"), (8 * PAGE, PAGE + 1, "staging slice"), (8 * PAGE, 0, "staging slice")],
)
def test_impossible_sizes_are_refused(num_bytes: int, slice_bytes: int, thing: str) -> None:
    with pytest.raises(ConfigError, match=thing):
        Staging(num_bytes, slice_bytes)
