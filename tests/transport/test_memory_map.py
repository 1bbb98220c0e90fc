"""Cutting segments where registered memory is cut: against a slow reference, and in time however many stretches."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import Memory, Segments
from transport.base import MAX_CUTS, MemoryMap

stretches = st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=8)
pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6)


def lay_out(described: list[tuple[bool, int]]) -> list[Memory]:
    """Stretches one behind the other, with 3 bytes of nothing in front of some."""
    memory, address = [], 0
    for gap, num_bytes in described:
        address += 3 * gap
        memory.append(Memory(address, num_bytes))
        address += num_bytes
    return memory


@given(stretches, pieces, st.sampled_from(["source", "target"]))
def test_every_piece_lies_in_one_stretch(
    described: list[tuple[bool, int]], pieces: list[tuple[int, int]], side: str
) -> None:
    memory = lay_out(described)
    covered = {address for m in memory for address in range(m.address, m.end)}
    here = np.array([begin for begin, _ in pieces])
    there = 1000 + 100 * np.arange(len(pieces))
    length = [num_bytes for _, num_bytes in pieces]
    segments = Segments.of(here, there, length) if side == "source" else Segments.of(there, here, length)
    if any(begin + i not in covered for begin, num_bytes in pieces for i in range(num_bytes)):
        with pytest.raises(ValueError, match="not in registered memory"):
            MemoryMap(memory).fit(segments, side)
        return
    fitted = MemoryMap(memory).fit(segments, side)
    own, other = (fitted.source, fitted.target) if side == "source" else (fitted.target, fitted.source)
    expected = [
        (max(begin, m.address), 1000 + 100 * i + max(begin, m.address) - begin, min(begin + size, m.end))
        for i, (begin, size) in enumerate(pieces)
        for m in memory
        if max(begin, m.address) < min(begin + size, m.end)
    ]
    assert list(zip(own, other, own + fitted.length, strict=True)) == expected


def test_no_segments_need_no_memory() -> None:
    assert len(MemoryMap().fit(Segments.of([], [], []), "source")) == 0


def test_as_many_stretches_as_a_peer_may_name_cost_little() -> None:
    memory = MemoryMap([Memory(16 * i, 16) for i in range(65_536)])
    begin = time.process_time()
    fitted = memory.fit(Segments.of([0], [0], [1 << 20]), "source")
    assert len(fitted) == 65_536
    assert time.process_time() - begin < 1.0  # one pass for each stretch would take minutes


def test_more_cuts_than_allowed_are_refused_before_they_are_made() -> None:
    memory = MemoryMap([Memory(16 * i, 16) for i in range(65_536)])
    num_segments = MAX_CUTS // 65_535 + 1
    again_and_again = Segments.of(0, (1 << 20) * np.arange(num_segments), 1 << 20)
    with pytest.raises(ValueError, match=f"cross {65_535 * num_segments} borders.*allowed are {MAX_CUTS}"):
        memory.fit(again_and_again, "source")
