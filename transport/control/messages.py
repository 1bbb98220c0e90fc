"""Messages of the control channel: what two engines say to each other, and their bytes.

A frame is one byte `PROTOCOL_VERSION` followed by a msgpack map whose `type` names the message. Decoding is
strict: unknown types, unknown fields, wrong types and values out of range are refused with `ProtocolError`.
Nothing here knows sockets, threads or vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from layouts import Holding, Interleave, Placement, Span
from transport.errors import ProtocolError
from transport.regions import Region

PROTOCOL_VERSION = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_PIECES = 32_768

Identifier = Annotated[str, Meta(min_length=1, max_length=64)]
OptionalIdentifier = Annotated[str, Meta(max_length=64)]
Label = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Rank = Annotated[int, Meta(ge=0, lt=4096)]
NumRanks = Annotated[int, Meta(ge=1, le=4096)]
NumTokens = Annotated[int, Meta(ge=0, le=1 << 40)]
NumLeases = Annotated[int, Meta(ge=0, le=1 << 31)]
NumBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
Address = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
BlockIds = Annotated[list[BlockId], Meta(max_length=4 << 20)]
Digest = Annotated[bytes, Meta(max_length=64)]
SliceId = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
SliceIds = Annotated[list[SliceId], Meta(max_length=4096)]
Numbers = Annotated[bytes, Meta(max_length=8 * MAX_PIECES)]
LeaseSeconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]


class CacheFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal on both sides before any byte may move.

    `head_bytes` is the content of one token of one KV head; `page` is "plain" or names an opaque format.
    """

    model: Label
    dtype: Label
    kv_dtype: Label
    num_layers: Count
    num_kv_heads: Count
    head_bytes: Count
    mla: bool
    page: Label


class Mismatch(NamedTuple):
    """The first field in which two cache formats differ, with both values as text."""

    field: str
    ours: str
    theirs: str


def find_mismatch(ours: CacheFormat, theirs: CacheFormat) -> Mismatch | None:
    """Return the first differing field in declaration order, or None when the formats are equal."""
    for field in CacheFormat.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return Mismatch(field, str(mine), str(other))
    return None


class HoldingInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Wire form of `layouts.Holding`; half-open ranges of global heads and layers."""

    shard: Rank
    first_head: Index
    end_head: Index
    first_layer: Index
    end_layer: Index


class PlacementInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of `layouts.Placement`: the explicit table of what each rank holds."""

    num_shards: NumRanks
    interleave_tokens: Count
    block_tokens: Count
    num_kv_heads: Count
    num_layers: Count
    holdings: Annotated[list[HoldingInfo], Meta(min_length=1, max_length=4096)]

    @classmethod
    def from_placement(cls, placement: Placement) -> PlacementInfo:
        """Describe `placement` for a peer."""
        interleave = placement.interleave
        return cls(
            num_shards=interleave.num_shards,
            interleave_tokens=interleave.interleave_tokens,
            block_tokens=interleave.block_tokens,
            num_kv_heads=placement.num_kv_heads,
            num_layers=placement.num_layers,
            holdings=[HoldingInfo(h.shard, *h.heads, *h.layers) for h in placement.holdings],
        )

    def to_placement(self) -> Placement:
        """Return the placement, or raise ProtocolError when its numbers contradict each other."""
        try:
            return Placement(
                interleave=Interleave(self.num_shards, self.interleave_tokens, self.block_tokens),
                holdings=tuple(
                    Holding(h.shard, Span(h.first_head, h.end_head), Span(h.first_layer, h.end_layer))
                    for h in self.holdings
                ),
                num_kv_heads=self.num_kv_heads,
                num_layers=self.num_layers,
            )
        except ValueError as error:
            raise ProtocolError(f"placement of the peer is impossible: {error}") from error


class RegionInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Wire form of `transport.Region`; strides and sizes in bytes."""

    layer: Index
    first_head: Index
    end_head: Index
    base: Address
    num_blocks: BlockId
    block_tokens: Count
    page_tokens: Count
    block_stride: NumBytes
    head_stride: NumBytes
    token_stride: NumBytes
    token_bytes: NumBytes
    page: Label
    device: Label

    @classmethod
    def from_region(cls, region: Region) -> RegionInfo:
        """Describe `region` for a peer."""
        return cls(
            layer=region.layer,
            first_head=region.heads.start,
            end_head=region.heads.stop,
            base=region.base,
            num_blocks=region.num_blocks,
            block_tokens=region.block_tokens,
            page_tokens=region.page_tokens,
            block_stride=region.block_stride,
            head_stride=region.head_stride,
            token_stride=region.token_stride,
            token_bytes=region.token_bytes,
            page=region.page,
            device=region.device,
        )

    def to_region(self) -> Region:
        """Return the region, or raise ProtocolError when its numbers contradict each other."""
        try:
            return Region(
                layer=self.layer,
                heads=Span(self.first_head, self.end_head),
                base=self.base,
                num_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                block_stride=self.block_stride,
                head_stride=self.head_stride,
                token_stride=self.token_stride,
                token_bytes=self.token_bytes,
                page=self.page,
                device=self.device,
                page_tokens=self.page_tokens,
            )
        except ValueError as error:
            raise ProtocolError(f"region of the peer is impossible: {error}") from error


class RankInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an engine: how to attach to its memory, and where its cache lies in it."""

    rank: Rank
    endpoint: Annotated[bytes, Meta(max_length=1 << 20)]
    regions: Annotated[list[RegionInfo], Meta(max_length=16_384)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """All that a peer needs to read from one incarnation of an engine; sent once per incarnation."""

    incarnation: Identifier
    cache: CacheFormat
    placement: PlacementInfo
    ranks: Annotated[list[RankInfo], Meta(max_length=4096)]


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that travels as a frame of its own."""


class Open(Message, frozen=True):
    """Ask for the blocks behind `capability`, on behalf of the load `load`.

    The reader wants the first `num_tokens` positions and proves by `prompt_digest` that it has the same
    prompt. `transports` are the names of those it has; none given means that it does not say.
    """

    capability: Identifier
    load: Identifier
    cache: CacheFormat
    placement: PlacementInfo
    num_tokens: NumTokens
    prompt_digest: Digest
    known_incarnation: OptionalIdentifier = ""
    transports: Annotated[list[Label], Meta(max_length=16)] = []


class Renew(Message, frozen=True):
    """Extend the lease of a load."""

    capability: Identifier
    load: Identifier


class Done(Message, frozen=True):
    """Reader `reader` of `num_readers` has all its bytes; the read counts only if the answer is Ok."""

    capability: Identifier
    load: Identifier
    reader: Rank
    num_readers: NumRanks


class Release(Message, frozen=True):
    """The load will not read (any more)."""

    capability: Identifier
    load: Identifier


class Opened(Message, frozen=True):
    """Answer to Open: one list of block ids per KV cache group; the manifest unless known already."""

    incarnation: Identifier
    num_tokens: NumTokens
    block_ids: Annotated[list[BlockIds], Meta(max_length=64)]
    lease_s: LeaseSeconds
    manifest: Manifest | None = None


class Describe(Message, frozen=True):
    """Ask a node who it is; needs no capability."""


class Description(Message, frozen=True):
    """Answer to Describe, for people: holds no address, no endpoint, nothing that gives access to memory.

    `transports` are names, in the order in which the node prefers them.
    """

    version: Label
    incarnation: Identifier
    transports: Annotated[list[Label], Meta(max_length=16)]
    cache: CacheFormat
    placement: PlacementInfo
    num_open_leases: NumLeases


class Gather(Message, frozen=True):
    """Ask a packer to gather pieces of its memory into one slice, and give read slices back to it.

    `addresses` and `lengths` (one for all, or one each) are little-endian int64; `access` is the packer's key.
    `reader` names one packed read; nobody else knows it.
    """

    access: Identifier
    reader: Identifier
    addresses: Numbers
    lengths: Numbers
    give_back: SliceIds = []


class Gathered(Message, frozen=True):
    """Answer to Gather: the pieces lie one after the other at `address` until the slice is given back."""

    slice_id: SliceId
    address: Address
    num_bytes: NumBytes


class GiveBack(Message, frozen=True):
    """Slices are read; Ok says that they held their bytes until now, "expired" that one may not have.

    With `leaving` the reader gives up, and everything it holds is free.
    """

    access: Identifier
    reader: Identifier
    slices: SliceIds
    leaving: bool = False


class Ok(Message, frozen=True):
    """Yes; `lease_s` is what the lease has left where that matters."""

    lease_s: LeaseSeconds = 0.0


Cause = Literal["unknown", "expired", "incompatible", "malformed", "version", "busy"]


class Refused(Message, frozen=True):
    """No, and why; `field`, `ours` and `theirs` (of the one who refuses) are set for "incompatible"."""

    cause: Cause
    field: Label = ""
    ours: Label = ""
    theirs: Label = ""
    detail: Text = ""


Request = Open | Renew | Done | Release | Describe | Gather | GiveBack
Reply = Opened | Description | Ok | Refused | Gathered

_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class WrongVersion(ProtocolError):
    """The frame was written by another version of the protocol."""


def encode(message: Request | Reply) -> bytes:
    """Return the frame of `message`; ValueError when it exceeds MAX_FRAME_BYTES."""
    frame = bytes((PROTOCOL_VERSION,)) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        kind = type(message).__name__
        raise ValueError(f"{kind} message takes {len(frame)} bytes, allowed are {MAX_FRAME_BYTES}")
    return frame


def decode_request(frame: bytes) -> Request:
    """Read the frame of a request; WrongVersion or ProtocolError say what is wrong with it."""
    return _decode(_request_decoder, frame, MAX_REQUEST_BYTES)


def decode_reply(frame: bytes) -> Reply:
    """Read the frame of a reply; WrongVersion or ProtocolError say what is wrong with it."""
    return _decode(_reply_decoder, frame, MAX_FRAME_BYTES)


def _decode(decoder: msgspec.msgpack.Decoder[_M], frame: bytes, max_bytes: int) -> _M:
    if not frame:
        raise ProtocolError("frame is empty")
    if frame[0] != PROTOCOL_VERSION:
        raise WrongVersion(f"frame has protocol version {frame[0]}, spoken here is {PROTOCOL_VERSION}")
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame has {len(frame)} bytes, allowed are {max_bytes}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"frame cannot be read: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame cannot be read: {error}") from error


def as_text(value: Any, limit: int) -> str:
    """Return `value` as text that fits a field of `limit` characters."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
