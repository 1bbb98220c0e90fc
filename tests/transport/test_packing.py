"""Packed moves: exact bytes through bounded staging, and honest ends when a source or a reader misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import ParallelLayout, plan_transfer
from tests.transport.packing_ends import SIZE, SLICE, Source, Target
from tests.transport.source_process import content
from transport import (
    Memory,
    Peer,
    Region,
    Segments,
    Transfer,
    TransferState,
    create_transport,
    lower_route,
)
from transport.base import MemoryMap
from transport.control import ControlClient
from transport.control.messages import Gather, Request
from transport.memory import Fault
from transport.packing import Packer, PackerAddress
from transport.staging import Slice, Staging
from transport.unpacking import Unpacker, cut_slices

ROOT = Path(__file__).parents[2]


def finish(transfer: Transfer, timeout_s: float = 30.0) -> TransferState:
    deadline = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    return transfer.poll()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing changed"
        time.sleep(0.001)


def expected(pattern: Segments, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    wanted = target.copy()
    for start, end, length in zip(pattern.source, pattern.target, pattern.length, strict=True):
        wanted[end : end + length] = source[start : start + length]
    return wanted


def patterns() -> dict[str, Segments]:
    n, rng = np.arange(SIZE), np.random.default_rng(5)
    tokens = n[: SIZE // 1024]
    return {
        "one piece larger than a slice": Segments.of([5], [77], [3 * SLICE + 11]),
        "everything": Segments.of([0], [0], [SIZE]),
        "every second token": Segments.of(tokens[::2] // 2 * 1024, tokens[::2] * 1024, 1024),
        "heads of tokens, source token-major": Segments.of(tokens * 1024 + 512, tokens * 256, 256),
        "shuffled blocks": Segments.of(rng.permutation(64) * 8192, rng.permutation(64) * 8192, 8192),
        "unaligned": Segments.of(n[:200] * 4099 + 1, n[:200] * 5003 + 3, 1021),
        "many tiny ones": Segments.of(rng.permutation(40_000) * 24, n[:40_000] * 16, 8),
        "single bytes": Segments.of(n[:3000] * 7, n[:3000] * 11, 1),
        "all lengths, some of them 0": Segments.of(n[:300] * 3000, n[:300] * 3001, n[:300] * 7 % 1500),
        "nothing": Segments.of([], [], []),
    }


PATHS = ["gather and scatter", "gather", "scatter"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", patterns())
def test_exact_bytes(source: Source, target: Target, name: str, path: str) -> None:
    pattern = patterns()[name]
    wanted, untouched = expected(pattern, source.buffer, target.buffer), source.buffer.copy()
    with target.read(source, pattern, path=path) as transfer:
        assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
        assert transfer.num_bytes == pattern.num_bytes
    assert np.array_equal(target.buffer, wanted)
    assert np.array_equal(source.buffer, untouched)
    assert (target.staging.num_free, source.staging.num_free) == (4, 4)


def cache(layout: ParallelLayout, order: str) -> dict[int, Region]:
    """Regions, from address 0, of one rank with 16 blocks and 32 bytes a token and head."""
    heads = layout.placement.holdings[0].heads.size
    sizes = {"L": layout.num_layers, "B": 16, "H": heads, "N": layout.interleave.block_tokens}
    stride, strides = 32, {}
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes[axis]
    return {
        layer: Region(
            layer=layer,
            heads=layout.placement.holdings[0].heads,
            base=layer * strides["L"],
            num_blocks=16,
            block_tokens=layout.interleave.block_tokens,
            block_stride=strides["B"],
            head_stride=strides["H"],
            token_stride=strides["N"],
            token_bytes=32,
            page="plain",
            device="cpu",
        )
        for layer in range(layout.num_layers)
    }


@pytest.mark.parametrize("order", ["LBHN", "LBNH", "BLNH"])
@pytest.mark.parametrize(
    "from_layout, to_layout",
    [({"tp": 2, "dcp": 2}, {"tp": 2, "dcp": 2, "interleave_tokens": 16}), ({"tp": 1}, {"tp": 2})],
    ids=["interleave 1 to 16", "heads of one rank to two"],
)
def test_plans_that_move_in_small_pieces(
    source: Source, target: Target, from_layout: dict[str, int], to_layout: dict[str, int], order: str
) -> None:
    common = {"num_kv_heads": 1 if "dcp" in from_layout else 4, "num_layers": 4, "block_tokens": 16}
    giver, taker = (ParallelLayout(**(common | sizes)) for sizes in (from_layout, to_layout))
    tables = [np.random.default_rng(seed).permutation(16) for seed in (1, 2)]
    plan = plan_transfer(giver, taker, 0, 200)
    route = next(route for route in plan.routes if route.target_rank == 0 and len(route.runs))
    pattern = lower_route(route, cache(giver, order), tables[0], cache(taker, order), tables[1])
    assert len(pattern) > 50
    wanted = expected(pattern, source.buffer, target.buffer)
    with target.read(source, pattern) as transfer:
        assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
    assert np.array_equal(target.buffer, wanted)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_slices_cover_everything_once(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 3, 16]))
    lengths = np.array(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=60)), np.int64) * unit
    order = data.draw(st.permutations(range(len(lengths))))
    starts = (np.cumsum(lengths) - lengths)[order]
    slice_bytes, max_pieces = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 20))
    slices = cut_slices(Segments.of(starts, starts + 10_000, lengths[order]), slice_bytes, max_pieces)
    assert all(part.num_bytes <= slice_bytes and 1 <= len(part) <= max_pieces for part in slices)
    whole = Segments.concatenate(slices)
    assert (whole.target - whole.source == 10_000).all()
    assert np.array_equal(whole.source, np.cumsum(whole.length) - whole.length)  # in order of source, no gap
    assert whole.num_bytes == lengths.sum()
    divisor = int(np.gcd.reduce(lengths))
    if slice_bytes >= divisor:
        assert not (whole.length % divisor).any()


def test_neighbours_travel_as_one_piece(source: Source, target: Target, client: ControlClient) -> None:
    """What is contiguous at the source only is named once, however many pieces it has at the target."""
    asked: list[Gather] = []
    request = client.request

    def listen(address: tuple[str, int], message: Request, timeout_s: float) -> object:
        asked.extend([message] if isinstance(message, Gather) else [])
        return request(address, message, timeout_s)

    client.request = listen  # type: ignore[method-assign, assignment]
    n = np.arange(256)
    with target.read(source, Segments.of(n * 256, n * 512, 256)) as transfer:
        assert finish(transfer) is TransferState.DONE
    assert [(len(message.addresses), len(message.lengths)) for message in asked] == [(8, 8)]


@pytest.mark.parametrize("num_local, num_remote", [(1, 1), (1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("path", PATHS)
def test_two_reads_share_few_slices(client: ControlClient, num_local: int, num_remote: int, path: str) -> None:
    source, target = Source(num_slices=num_remote), Target(client, num_slices=num_local)
    n = np.arange(SIZE // 2048)
    halves = [Segments.of(n * 1024, n * 2048, 1024), Segments.of(n * 1024 + SIZE // 2, n * 2048 + 1024, 1024)]
    wanted = expected(Segments.concatenate(halves), source.buffer, target.buffer)
    reads = [target.read(source, half, path=path) for half in halves]
    assert [finish(read) for read in reads for other in reads if other.poll()] == [TransferState.DONE] * 4
    assert np.array_equal(target.buffer, wanted)
    assert (target.staging.num_free, source.staging.num_free) == (num_local, num_remote)
    target.transport.close()
    source.close()


def test_memory_stays_bounded(client: ControlClient) -> None:
    size = 32 << 20
    source, target = Source(size), Target(client, size)
    pattern = Segments.of(np.arange(size // 4096) * 4096, np.arange(size // 4096)[::-1] * 4096, 4096)
    before = resident_bytes()
    with target.read(source, pattern) as transfer:
        peak = before
        while transfer.poll() is TransferState.PENDING:
            peak = max(peak, resident_bytes())
        assert transfer.poll() is TransferState.DONE
    assert peak - before < 8 << 20
    target.transport.close()
    source.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


WHOLE = Segments.of([0], [0], [SIZE])


def hold_all(staging: Staging) -> list[Slice]:
    return [slice_ for _ in range(staging.num_slices) if (slice_ := staging.take()) is not None]


def test_a_busy_source_is_asked_again(source: Source, target: Target) -> None:
    held = hold_all(source.staging)
    with target.read(source, WHOLE) as transfer:
        assert finish(transfer, timeout_s=0.2) is TransferState.PENDING
        for slice_ in held:
            source.staging.give_back(slice_)
        assert finish(transfer) is TransferState.DONE
    assert np.array_equal(target.buffer, source.buffer)


def test_a_source_that_stays_busy_ends_the_read(source: Source, target: Target) -> None:
    hold_all(source.staging)
    with target.read(source, WHOLE, timeout_s=0.2) as transfer:
        assert finish(transfer) is TransferState.FAILED
        assert "all 4 staging slices are taken" in transfer.cause
    assert target.staging.num_free == 4


def test_a_reader_without_free_slices_waits(source: Source, target: Target) -> None:
    held = hold_all(target.staging)
    with target.read(source, WHOLE, timeout_s=0.1) as transfer:
        assert finish(transfer, timeout_s=0.3) is TransferState.PENDING
        for slice_ in held:
            target.staging.give_back(slice_)
        assert finish(transfer) is TransferState.DONE


def test_an_answer_wakes_the_reader(source: Source, target: Target) -> None:
    with target.read(source, WHOLE) as transfer:
        while transfer.poll() is TransferState.PENDING:
            assert target.woken.wait(10)
            target.woken.clear()
        assert transfer.poll() is TransferState.DONE


def test_a_dead_source_ends_the_read(source: Source, target: Target) -> None:
    source.packer.close()
    with target.read(source, WHOLE, timeout_s=0.3) as transfer:
        assert finish(transfer) is TransferState.FAILED
        assert "no answer within 0.3 s" in transfer.cause
    assert target.staging.num_free == 4


def test_a_restarted_source_is_another_one(source: Source, target: Target) -> None:
    old = source.packer
    old_address = old.address
    old.close()
    source.packer = Packer("127.0.0.1", source.staging, [], port=old_address.port)
    source.packer.start()
    assert source.packer.address.access != old_address.access
    with target.unpacker().read(
        target.transport,
        target.transport.attach(source.transport.endpoint()),
        old_address,
        Segments.of([source.address], [target.address], [SIZE]),
    ) as transfer:
        assert finish(transfer) is TransferState.FAILED
        assert "unknown" in transfer.cause and "restarted" in transfer.cause


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", range(3))
def test_a_failed_slice_fails_the_read(source: Source, target: Target, which: int, path: str) -> None:
    faults = [Fault()] * 3
    faults[which] = Fault(cause="the wire broke", at_once=which == 1)
    with target.read(source, WHOLE, faults=tuple(faults), path=path) as transfer:
        assert finish(transfer) is TransferState.FAILED
        assert "the wire broke" in transfer.cause
    assert target.staging.num_free == 4
    until(lambda: source.staging.num_free == 4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_polls", [0, 1, 3, 8])
def test_close_half_way(source: Source, target: Target, num_polls: int, path: str) -> None:
    faults = (Fault(), Fault(delay_polls=1000), Fault(delay_polls=1000))
    transfer = target.read(source, WHOLE, faults=faults, path=path)
    for _ in range(num_polls):
        transfer.poll()
        time.sleep(0.002)
    transfer.close()
    after = target.buffer.copy()
    assert (transfer.poll(), transfer.cause) == (TransferState.FAILED, "closed before it ended")
    assert target.staging.num_free == 4
    until(lambda: source.staging.num_free == 4)
    assert np.array_equal(target.buffer, after)
    transfer.close()


def test_closing_after_the_client_is_safe(source: Source, target: Target, client: ControlClient) -> None:
    transfer = target.read(source, WHOLE)
    client.close()
    transfer.close()
    assert target.staging.num_free == 4


def test_a_slice_kept_too_long_does_not_count(client: ControlClient) -> None:
    """The slice is taken back and reused while its reader still reads: it must not take that for its bytes."""
    source, slow = Source(num_slices=1, hold_s=0.05), Target(client, num_slices=1)
    one_slice = Segments.of([0], [0], [SLICE])
    with slow.read(source, one_slice, faults=(Fault(delay_polls=1_000_000),)) as transfer:
        until(lambda: transfer.poll() is TransferState.PENDING and transfer._parts[0].read is not None)
        time.sleep(0.1)
        quick = Target(client)
        with quick.read(source, WHOLE) as other:
            assert finish(other) is TransferState.DONE
        assert np.array_equal(quick.buffer, source.buffer)
        for part in transfer._parts:  # type: ignore[attr-defined]
            part.read._polls_left = 0
        assert finish(transfer) is TransferState.FAILED
        assert "expired" in transfer.cause
    for node in (slow.transport, quick.transport, source):
        node.close()


def test_a_target_that_is_not_ours_is_refused(source: Source, target: Target) -> None:
    with pytest.raises(ValueError, match="not in registered memory"):
        target.read(source, Segments.of([0], [SIZE - 8], [16]))


@pytest.mark.parametrize("kind", ["nixl", "cma"])
def test_between_two_processes(client: ControlClient, kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu12")
    size, tokens = 8 << 20, np.arange((8 << 20) // 1152)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/transport/packing_process.py"), kind, str(size), "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NIXL_LOG_LEVEL": "WARN"},
    )
    assert process.stdin is not None and process.stdout is not None
    endpoint, address, packer = next(words for line in process.stdout if len(words := line.split()) == 3)
    target = np.zeros(2 * size, np.uint8)
    pattern = Segments.of(tokens * 1152, tokens * 2304, 1152)
    memory, staging = Memory(int(target.ctypes.data), 2 * size), Staging(8 << 20)
    with create_transport(kind) as transport, ThreadPoolExecutor(1) as copier:
        transport.register([memory, staging.memory])
        peer: Peer = transport.attach(bytes.fromhex(endpoint.decode()))
        unpacker = Unpacker(client, staging, MemoryMap([memory]), lambda: None, copier)
        where = msgspec.msgpack.decode(bytes.fromhex(packer.decode()), type=PackerAddress)
        segments = Segments(pattern.source + int(address), pattern.target + memory.address, pattern.length)
        with unpacker.read(transport, peer, where, segments) as transfer:
            assert (finish(transfer), transfer.cause) == (TransferState.DONE, "")
    assert np.array_equal(target, expected(pattern, content(size, 3), np.zeros(2 * size, np.uint8)))
    process.communicate()
    assert process.returncode == 0
