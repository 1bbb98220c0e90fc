"""Which transport a pair of ranks uses, which path a read takes, and that every path brings the exact bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from layouts import ConfigError, ParallelLayout, plan_transfer
from transport import MemoryTransport, Segments, TransferFailed, TransferState, Transport, create_transport
from transport.commands.plan_cost import describe_costs
from transport.control import ControlClient
from transport.cost import PATHS, Path, ReadCost, ReadSize
from transport.data_plane import DataPlane, Link, Offer, ReadOptions
from transport.regions import Memory

SIZE = 1 << 20
DEAR_SEGMENTS = ReadOptions(staging_bytes=8 << 20, segment_s=1e-3, copy_s=1e-12)


class Rank:
    """A rank with a buffer, whose transports are given by groups of names or objects."""

    def __init__(
        self, stack: ExitStack, *groups: Sequence[str | Transport], options: ReadOptions = DEAR_SEGMENTS
    ) -> None:
        self.buffer = np.random.default_rng(len(groups)).integers(0, 256, SIZE).astype(np.uint8)
        self.address = int(self.buffer.ctypes.data)
        made = [[create_transport(one) if isinstance(one, str) else one for one in group] for group in groups]
        self.plane = DataPlane(made, options)
        stack.callback(self.plane.close)
        self.plane.start([Memory(self.address, SIZE)])

    def start_reading(self, stack: ExitStack) -> None:
        client = ControlClient()
        client.start()
        stack.callback(client.close)
        self.plane.start_reading(client, lambda: None)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Absent(MemoryTransport):
    """A transport whose library is missing."""

    kind = "absent"

    def _open(self, name: str) -> None:
        raise ConfigError("transport 'absent' needs a library; run `pip install absent`")


class Deaf(MemoryTransport):
    """A transport that starts and reaches nobody."""

    kind = "deaf"

    def _attach(self, attached: object) -> None:
        raise TransferFailed("out of reach")


def read(rank: Rank, link: Link, segments: Segments) -> Path:
    started = rank.plane.read(link, segments)
    deadline = time.monotonic() + 20
    with started.transfer as transfer:
        while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
            time.sleep(0)
        assert (transfer.poll(), transfer.cause) == (TransferState.DONE, "")
    return started.path


@pytest.mark.parametrize("kind", ["memory", "cma"])
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_every_path_brings_the_same_bytes(stack: ExitStack, kind: str, path: str) -> None:
    options = ReadOptions(path=path, staging_bytes=8 << 20, segment_s=1e-3, copy_s=1e-12)  # type: ignore[arg-type]
    source, target = Rank(stack, [kind], options=options), Rank(stack, [kind], options=options)
    target.start_reading(stack)
    link = target.plane.attach(source.plane.serve())
    rows = np.random.default_rng(7).permutation(SIZE // 256)[: SIZE // 512]
    segments = Segments.of(source.address + rows * 256, target.address + np.arange(len(rows)) * 512, 256)
    before = target.buffer.copy()
    assert read(target, link, segments) == ("pack" if path == "auto" else path)
    for number, row in enumerate(rows.tolist()):
        before[number * 512 : number * 512 + 256] = source.buffer[row * 256 : row * 256 + 256]
    assert np.array_equal(target.buffer, before)


def test_the_first_of_each_group_that_works_is_kept(stack: ExitStack) -> None:
    rank = Rank(stack, ["cma"], [Absent(), "memory", "nixl"])
    assert rank.plane.kinds == ["cma", "memory"]


def test_without_any_transport_the_last_reason_is_given(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="pip install absent"):
        Rank(stack, [Absent()])


def test_the_next_transport_is_tried_when_one_does_not_reach_the_peer(stack: ExitStack) -> None:
    source, target = Rank(stack, [Deaf()], ["memory"]), Rank(stack, [Deaf()], ["memory"])
    link = target.plane.attach(source.plane.serve())
    assert link.transport.kind == "memory"


def test_no_common_transport_names_both_sides(stack: ExitStack) -> None:
    source, target = Rank(stack, ["memory"]), Rank(stack, ["cma"])
    with pytest.raises(TransferFailed, match="it has memory, this side cma"):
        target.plane.attach(source.plane.serve())


@pytest.mark.parametrize("offer", [b"", b"\xc1", msgspec.msgpack.encode({"endpoints": 3, "packer": None})])
def test_an_offer_that_cannot_be_read_is_a_failed_transfer(stack: ExitStack, offer: bytes) -> None:
    with pytest.raises(TransferFailed, match="cannot be read"):
        Rank(stack, ["memory"]).plane.attach(offer)


def test_a_source_that_does_not_pack_is_read_without_it(stack: ExitStack) -> None:
    source = Rank(stack, ["memory"], options=ReadOptions(path="direct"))
    target = Rank(stack, ["memory"])
    target.start_reading(stack)
    offer = source.plane.serve()
    assert msgspec.msgpack.decode(offer, type=Offer).packer is None
    rows = np.arange(1000)
    segments = Segments.of(source.address + rows * 256, target.address + rows * 512, 256)
    assert read(target, target.plane.attach(offer), segments) == "scatter"


def test_what_is_not_configured_is_measured(stack: ExitStack) -> None:
    rank = Rank(stack, ["memory"], options=ReadOptions(staging_bytes=4 << 20))
    rank.start_reading(stack)
    cost = rank.plane._costs["memory"]
    assert 0 < cost.segment_s < 1e-3 and 1e-12 < cost.copy_s < 1e-7


def size(*, source_gap: int = 0, target_gap: int = 0, count: int = 100, length: int = 64) -> ReadSize:
    number = np.arange(count)
    return ReadSize.of(Segments.of(number * (length + source_gap), number * (length + target_gap), length).merged())


@pytest.mark.parametrize(
    ("read_size", "path"),
    [
        (size(), "direct"),
        (size(source_gap=8), "gather"),
        (size(target_gap=8), "scatter"),
        (size(source_gap=8, target_gap=8), "pack"),
        (size(source_gap=8, target_gap=8, length=1 << 20), "direct"),
    ],
)
def test_the_cheapest_path_follows_from_where_the_pieces_lie(read_size: ReadSize, path: Path) -> None:
    assert ReadCost(segment_s=5e-6, copy_s=0.25e-9).cheapest(read_size) == path


def test_pieces_are_counted_on_each_side() -> None:
    assert size(source_gap=8) == ReadSize(6400, 100, 100, 1)
    assert size(target_gap=8) == ReadSize(6400, 100, 1, 100)
    assert size() == ReadSize(6400, 1, 1, 1)


@pytest.mark.parametrize("values", [(-1e-9, 0.0), (0.0, 1.0), (float("nan"), 0.0)])
def test_impossible_costs_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="allowed are 0 to 1 seconds"):
        ReadCost(*values)


def test_the_price_of_a_plan_counts_what_its_reads_would_be() -> None:
    source = ParallelLayout(pcp=2, dcp=2, num_kv_heads=2, interleave_tokens=1, block_tokens=16, num_layers=3)
    target = ParallelLayout(num_kv_heads=2, block_tokens=32, num_layers=3)
    lines = list(describe_costs(plan_transfer(source, target, 0, 64), 512, ReadCost(5e-6, 0.25e-9)))
    first, second = (line.split() for line in lines[-2:])
    assert first[:3] == ["0", "->", "0"] and second[:3] == ["1", "->", "0"]
    assert int(first[3].replace(",", "")) == 32 * 2 * 3 * 512  # 32 tokens, 2 heads, 3 layers
    assert int(first[4].replace(",", "")) == 32 * 2 * 3  # a piece for each, as every second token is another rank's
    assert first[-1] == "scatter"
