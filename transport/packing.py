"""Source side of packed moves: gathers the pieces that a reader names into a staging slice it can read at once.

A slice belongs to its reader until it comes back. One that stays away too long is taken back; the reader learns
of it when it returns the slice, and must then discard what it read. Knows addresses; knows no plans or requests.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from transport.base import MemoryMap
from transport.control import ControlServer
from transport.control.address import Address
from transport.control.keys import NodeKeys
from transport.control.messages import (
    MAX_PIECES,
    Count,
    Gather,
    Gathered,
    GiveBack,
    Identifier,
    Label,
    Ok,
    Refused,
    Reply,
    Request,
)
from transport.copies import gather
from transport.errors import ProtocolError
from transport.regions import Memory
from transport.segments import Int64Array
from transport.staging import Slice, Staging

HOLD_S = 30.0


class PackerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader must know of a packer; whoever knows `access` can read the memory that it packs."""

    host: Label
    port: Count
    access: Identifier
    slice_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]

    @property
    def control(self) -> Address:
        """Where its control server listens."""
        return self.host, self.port


@dataclass(slots=True)
class _Loan:
    """The slices one reader holds, and when it was last heard of (time.monotonic)."""

    heard: float = 0.0
    slices: dict[int, Slice] = field(default_factory=dict)


class Packer:
    """Gathers from `memory` into slices of `staging`, in a thread of its own, for whoever has its address.

    A reader that says nothing for `hold_s` loses its slices. `staging` must be registered with the transports
    that readers use, and may be shared with others in this process.
    """

    def __init__(
        self,
        host: str,
        staging: Staging,
        memory: Sequence[Memory],
        *,
        port: int = 0,
        hold_s: float = HOLD_S,
        keys: NodeKeys | None = None,
    ) -> None:
        self._staging = staging
        self._memory = MemoryMap(memory)
        self._hold_s = hold_s
        self._access = secrets.token_hex(16)
        self._slice_ids = itertools.count()
        self._loans: dict[str, _Loan] = {}  # by reader; touched by the server's thread only
        self._server = ControlServer(host, port, self._answer, keys)

    @property
    def address(self) -> PackerAddress:
        """What to tell readers, after start()."""
        return PackerAddress(*self._server.address, self._access, self._staging.slice_bytes)

    def start(self) -> None:
        """Serve; ConfigError when the port cannot be bound. Idempotent."""
        self._server.start()

    def close(self) -> None:
        """Stop serving and take back all slices; close the transports that read them first. Idempotent."""
        self._server.close()
        for reader in list(self._loans):
            self._end_loan(reader)

    def _answer(self, request: Request) -> Reply:
        if not isinstance(request, Gather | GiveBack):
            return Refused("malformed", detail=f"a packer does not answer {type(request).__name__}")
        if not secrets.compare_digest(request.access.encode(), self._access.encode()):
            return Refused("unknown", detail="the access key is not the one of this packer; was it restarted?")
        now = time.monotonic()
        self._reclaim(now)
        given = request.give_back if isinstance(request, Gather) else request.slices
        complete = self._take_back(request.reader, given, now)
        if isinstance(request, GiveBack) and request.leaving:
            self._end_loan(request.reader)
        if not complete:
            return Refused("expired", detail=f"a slice was not given back within {self._hold_s:g} s")
        return self._gather(request, now) if isinstance(request, Gather) else Ok()

    def _gather(self, request: Gather, now: float) -> Reply:
        addresses, lengths = _pieces(request, self._staging.slice_bytes)
        slice_ = self._staging.take()
        if slice_ is None:
            return Refused("busy", detail=f"all {self._staging.num_slices} staging slices are taken")
        with ExitStack() as undo:
            undo.callback(self._staging.give_back, slice_)
            try:
                gather(self._memory, addresses, lengths, slice_.tensor)
            except ValueError as error:
                raise ProtocolError(f"pieces cannot be gathered: {error}") from error
            undo.pop_all()
        slice_id = next(self._slice_ids)
        loan = self._loans.setdefault(request.reader, _Loan())
        loan.heard = now
        loan.slices[slice_id] = slice_
        return Gathered(slice_id, slice_.address, int(lengths.sum()))

    def _take_back(self, reader: str, slice_ids: Sequence[int], now: float) -> bool:
        """Free slices of `reader`; whether it still held all of them."""
        loan = self._loans.get(reader)
        if loan is None:
            return not slice_ids
        loan.heard = now
        returned = [loan.slices.pop(slice_id, None) for slice_id in slice_ids]
        for slice_ in returned:
            if slice_ is not None:
                self._staging.give_back(slice_)
        if not loan.slices:
            del self._loans[reader]
        return None not in returned

    def _reclaim(self, now: float) -> None:
        for reader, loan in list(self._loans.items()):
            if now - loan.heard > self._hold_s:
                self._end_loan(reader)

    def _end_loan(self, reader: str) -> None:
        loan = self._loans.pop(reader, None)
        for slice_ in loan.slices.values() if loan else ():
            self._staging.give_back(slice_)


def _pieces(request: Gather, slice_bytes: int) -> tuple[Int64Array, Int64Array]:
    """Return the addresses and lengths of a request; ProtocolError unless they can fill a slice."""
    if len(request.addresses) % 8 or len(request.lengths) % 8:
        raise ProtocolError("addresses and lengths must be 8 bytes each")
    addresses, lengths = (np.frombuffer(part, "<i8").astype(np.int64) for part in (request.addresses, request.lengths))
    if not 1 <= len(addresses) <= MAX_PIECES or len(lengths) not in (1, len(addresses)):
        raise ProtocolError(
            f"got {len(addresses)} addresses and {len(lengths)} lengths; allowed are 1 to {MAX_PIECES} "
            "addresses, and one length for all or one each"
        )
    lengths = np.broadcast_to(lengths, addresses.shape)
    if int(lengths.min()) < 1 or int(lengths.max()) > slice_bytes or int(lengths.sum()) > slice_bytes:
        raise ProtocolError(f"pieces must have at least 1 byte each and at most {slice_bytes} bytes together")
    return addresses, lengths
