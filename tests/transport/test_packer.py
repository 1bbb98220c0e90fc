"""What a packer answers, to whom, and when it takes its slices back."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from tests.transport.packing_ends import SIZE, SLICE, Source
from transport.control import ControlClient
from transport.control.messages import MAX_PIECES, Gather, Gathered, GiveBack, Ok, Refused, Renew, Reply, Request


def ask(source: Source, client: ControlClient, message: Request) -> Reply:
    return client.request(source.packer.address.control, message, 10.0).result()


def gather_of(source: Source, addresses: list[int], lengths: list[int], reader: str = "reader") -> Gather:
    return Gather(
        source.packer.address.access,
        reader,
        np.array(addresses, "<i8").tobytes(),
        np.array(lengths, "<i8").tobytes(),
    )


def test_a_reader_that_dies_loses_its_slices(client: ControlClient) -> None:
    source = Source(num_slices=2, hold_s=0.2)
    one = gather_of(source, [source.address], [16])
    assert [type(ask(source, client, one)) for _ in range(3)] == [Gathered, Gathered, Refused]
    time.sleep(0.3)
    assert isinstance(ask(source, client, gather_of(source, [source.address], [16], "another")), Gathered)
    source.close()
    assert source.staging.num_free == 2


def test_a_reader_that_talks_keeps_its_slices(client: ControlClient) -> None:
    source = Source(num_slices=2, hold_s=0.3)
    access = source.packer.address.access
    first = ask(source, client, gather_of(source, [source.address], [16]))
    assert isinstance(first, Gathered)
    for _ in range(4):
        time.sleep(0.15)
        assert ask(source, client, GiveBack(access, "reader", [])) == Ok()
    assert ask(source, client, GiveBack(access, "reader", [first.slice_id])) == Ok()
    source.close()


def test_slices_belong_to_their_reader(source: Source, client: ControlClient) -> None:
    access = source.packer.address.access
    given = ask(source, client, gather_of(source, [source.address], [16]))
    assert isinstance(given, Gathered)
    for reader, slice_ids in (("thief", [given.slice_id]), ("reader", [given.slice_id + 1])):
        answer = ask(source, client, GiveBack(access, reader, slice_ids))
        assert isinstance(answer, Refused) and answer.cause == "expired"
    assert source.staging.num_free == 3
    assert ask(source, client, GiveBack(access, "reader", [given.slice_id])) == Ok()
    assert isinstance(ask(source, client, GiveBack(access, "reader", [given.slice_id])), Refused)
    assert source.staging.num_free == 4


@pytest.mark.parametrize(
    "addresses, lengths",
    [
        ([0], [8]),
        ([-8], [8]),
        ([SIZE], [1]),
        ([SIZE - 4], [8]),
        ([0], [0]),
        ([0], [-1]),
        ([0, 8], [8, -8]),
        ([0, 8], [8, 8, 8]),
        ([], []),
        ([], [8]),
        ([0], []),
        ([0], [SLICE + 1]),
        ([0, 0], [SLICE // 2 + 1]),
        ([0, 0], [(1 << 63) - 1]),
        ([0] * MAX_PIECES, [8]),
    ],
)
def test_requests_that_cannot_be_served(
    source: Source, client: ControlClient, addresses: list[int], lengths: list[int]
) -> None:
    base = 0 if addresses == [0] and lengths == [8] else source.address
    answer = ask(source, client, gather_of(source, [base + address for address in addresses], lengths))
    assert isinstance(answer, Refused) and answer.cause == "malformed"
    assert source.staging.num_free == 4
    assert isinstance(ask(source, client, gather_of(source, [source.address], [8])), Gathered)


def test_who_has_no_key_gets_nothing(source: Source, client: ControlClient) -> None:
    for access in ("", "0" * 32, source.packer.address.access[:-1]):
        stolen = msgspec.structs.replace(gather_of(source, [source.address], [16]), access=access)
        answer = ask(source, client, stolen)
        assert isinstance(answer, Refused) and answer.cause == ("unknown" if access else "malformed")
    other = ask(source, client, Renew("capability", "load"))
    assert isinstance(other, Refused) and other.cause == "malformed"
