"""What one transport tells another so that it can attach: who it is and which memory may be read.

The bytes travel inside the manifest of an engine; they are decoded strictly and trusted no further than their
types. Nothing here moves data.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from transport.errors import TransferFailed
from transport.regions import Memory

Label = Annotated[str, Meta(min_length=1, max_length=256)]
Size = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]


class Endpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """`kind` is the transport's name, `name` unique to one start of it, `metadata` its own business."""

    kind: Label
    name: Label
    memory: Annotated[list[tuple[Size, Size, Label]], Meta(max_length=65_536)]
    metadata: bytes = b""

    @property
    def stretches(self) -> list[Memory]:
        """The memory that may be read."""
        return [Memory(address, num_bytes, device) for address, num_bytes, device in self.memory]


_decoder = msgspec.msgpack.Decoder(Endpoint)


def encode_endpoint(kind: str, name: str, memory: list[Memory], metadata: bytes) -> bytes:
    """Return the bytes for `decode_endpoint`."""
    stretches = [(stretch.address, stretch.num_bytes, stretch.device) for stretch in memory]
    return msgspec.msgpack.encode(Endpoint(kind, name, stretches, metadata))


def decode_endpoint(data: bytes, kind: str) -> Endpoint:
    """Read the endpoint of a transport of the same kind; TransferFailed for anything else."""
    try:
        endpoint = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"endpoint of the peer cannot be read: {error}") from error
    if endpoint.kind != kind:
        raise TransferFailed(
            f"peer uses transport {endpoint.kind!r}, this side uses {kind!r}; choose the same on both sides"
        )
    return endpoint
