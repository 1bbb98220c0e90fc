"""What a reader and a source of transport `ucx` say to each other besides the bytes: msgpack, decoded strictly.

A reader introduces itself with Hello and asks for one message of bytes with each Ask; whoever does not know the
access key of the source is not answered. Nothing here moves anything.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from transport.endpoint import Label
from transport.process import Process
from transport.segments import Int64Array

MAX_PIECES = 4096
MAX_MESSAGE_BYTES = 96 << 10
"""Of one message; room for an Ask with MAX_PIECES pieces."""
KEY_BYTES = 16
TO_SOURCE, TO_READER = 1, 2
"""Tags of messages; bytes come under tags from `data_tags`."""

_DATA = 1 << 63
_PREFIX_BYTES = 4
_Blob = Annotated[bytes, Meta(max_length=8 * MAX_PIECES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_WorkerAddress = Annotated[bytes, Meta(min_length=1, max_length=4096)]
_Session = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Tag = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]
_Cause = Annotated[str, Meta(max_length=1024)]


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of an endpoint: where and who the source is, what opens it, how many bytes it sends in one message."""

    address: _WorkerAddress
    process: Process
    key: _Key
    slice_bytes: _Size


class ToSource(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """From a reader; `session` is its random name for this connection."""

    key: _Key
    session: _Session


class Hello(ToSource, frozen=True, tag="hello"):
    """Opens a session, or asks whether its source still lives; answered by Welcome to the worker at `address`."""

    address: _WorkerAddress
    reader: Label
    process: Process


class Ask(ToSource, frozen=True, tag="ask"):
    """Send these pieces (little-endian int64 each), one after the other, as one message under `tag`."""

    tag: _Tag
    addresses: _Blob
    lengths: _Blob

    @classmethod
    def of(cls, offer: Offer, session: bytes, tag: int, addresses: Int64Array, lengths: Int64Array) -> Ask:
        """Ask for pieces at `addresses`."""
        blobs = (np.asarray(part, "<i8").tobytes() for part in (addresses, lengths))
        return cls(offer.key, session, tag.to_bytes(8), *blobs)

    @property
    def pieces(self) -> tuple[Int64Array, Int64Array]:
        """Addresses and lengths; ValueError unless they are as many of both and at least one."""
        addresses, lengths = (np.frombuffer(blob, "<i8").astype(np.int64) for blob in (self.addresses, self.lengths))
        if len(addresses) != len(lengths) or len(lengths) == 0:
            raise ValueError(f"asked for {len(addresses)} addresses and {len(lengths)} lengths")
        return addresses, lengths


class Bye(ToSource, frozen=True, tag="bye"):
    """Ends a session."""


class ToReader(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """From a source."""

    session: _Session


class Welcome(ToReader, frozen=True, tag="welcome"):
    """The session is open and the source lives."""


class Refused(ToReader, frozen=True, tag="refused"):
    """An Ask will not be answered by bytes."""

    tag: _Tag
    cause: _Cause


class Gone(ToReader, frozen=True, tag="gone"):
    """The source has ended the session and will not open another one."""

    cause: _Cause


_to_source: msgspec.msgpack.Decoder[Hello | Ask | Bye] = msgspec.msgpack.Decoder(Hello | Ask | Bye)
_to_reader: msgspec.msgpack.Decoder[Welcome | Refused | Gone] = msgspec.msgpack.Decoder(Welcome | Refused | Gone)


def encode(message: ToSource | ToReader) -> bytes:
    """Return a message as it is sent: its length, for UCXX does not tell the receiver, and its content."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_PREFIX_BYTES) + content


def decode_to_source(data: bytes) -> Hello | Ask | Bye:
    """Read what a reader sent, with anything behind its end; msgspec.MsgspecError unless it is a message."""
    return _to_source.decode(_content(data))


def decode_to_reader(data: bytes) -> Welcome | Refused | Gone:
    """Read what a source sent, with anything behind its end; msgspec.MsgspecError unless it is a message."""
    return _to_reader.decode(_content(data))


def _content(data: bytes) -> bytes:
    return data[_PREFIX_BYTES : _PREFIX_BYTES + int.from_bytes(data[:_PREFIX_BYTES])]


def data_tags() -> Iterator[int]:
    """Yield tags that nobody can guess and that are not those of messages; each once."""
    return (_DATA | number % _DATA for number in itertools.count(secrets.randbits(63)))
