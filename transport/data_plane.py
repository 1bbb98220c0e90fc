"""How the bytes of one rank move: over which transport to each peer, and by which path each read goes.

Owns the rank's transports, staging memory and packer. Knows segments, peers and costs; knows no plans, requests or
vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from layouts import ConfigError
from transport.base import MemoryMap, Peer, Transfer, Transport
from transport.control import ControlClient
from transport.control.keys import NodeKeys
from transport.cost import PATHS, Path, ReadCost, ReadSize
from transport.endpoint import Label
from transport.errors import TransferFailed
from transport.measure import measure_copy_s, measure_segment_s
from transport.packing import Packer, PackerAddress
from transport.regions import Memory
from transport.segments import Segments
from transport.staging import Staging
from transport.unpacking import Unpacker

log = logging.getLogger(__name__)


AUTO = (("cma",), ("nixl",))
"""What "auto" stands for: of each group the first transport that works here. The first is for peers on one host."""


ReadPath = Path | Literal["auto"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How reads go.

    `path` "auto" takes the cheapest each time. `staging_bytes` bounds the staging memory of each direction: gathering
    for others, and reading. Costs of 0 are measured when reading starts; see `ReadCost`.
    """

    path: ReadPath = "auto"
    staging_bytes: int = 64 << 20
    segment_s: float = 0.0
    copy_s: float = 0.0


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank tells those who read from it: an endpoint of each of its transports, and who packs."""

    endpoints: Annotated[dict[Label, bytes], Meta(max_length=16)]
    packer: PackerAddress | None


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A peer that can be read from, over one of its transports."""

    transport: Transport
    peer: Peer
    packer: PackerAddress | None


@dataclass(frozen=True, slots=True)
class Read:
    """A read under way, and how it goes."""

    transfer: Transfer
    transport: str
    path: Path
    num_segments: int


class DataPlane:
    """Serves and reads the memory of one rank.

    start, then serve() where others read from here, and start_reading() where this rank reads from others; after that
    one thread owns attach, read, detach and close. `groups`: alternatives as in `AUTO`, not started. `host`: address at
    which peers reach this machine; `keys`: of the control channel.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Transport]],
        options: ReadOptions,
        host: str = "127.0.0.1",
        keys: NodeKeys | None = None,
    ) -> None:
        self._groups = groups
        self._options = options
        self._host, self._keys = host, keys
        self._transports: dict[str, Transport] = {}
        self._memory: list[Memory] = []
        self._packer: Packer | None = None
        self._unpacker: Unpacker | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._costs: dict[str, ReadCost] = {}

    @property
    def kinds(self) -> list[str]:
        """Names of the transports that work here, the fastest first."""
        return list(self._transports)

    def start(self, memory: Sequence[Memory]) -> None:
        """Start the transports, and let them reach `memory`.

        Raises:
            ConfigError: none works; of several reasons the last.
        """
        self._memory = list(memory)
        reasons = []
        for group in self._groups:
            for transport in group:
                try:
                    transport.start()
                    transport.register(memory)
                except ConfigError as error:
                    transport.close()
                    reasons.append(error)
                    log.info("transport left out transport=%s cause=%s", transport.kind, error)
                else:
                    self._transports[transport.kind] = transport
                    break
        if not self._transports:
            raise reasons[-1]

    def serve(self) -> bytes:
        """Let others read; returns what they need for `attach`.

        Raises:
            ConfigError: the packer cannot listen there.
        """
        if self._options.path not in ("direct", "scatter"):
            self._packer = Packer(self._host, self._new_staging(), self._memory, keys=self._keys)
            self._packer.start()
        endpoints = {kind: transport.endpoint() for kind, transport in self._transports.items()}
        return msgspec.msgpack.encode(Offer(endpoints, self._packer.address if self._packer else None))

    def start_reading(self, client: ControlClient, wake: Callable[[], None]) -> None:
        """Get ready to read, and measure the costs that are not configured, which takes some ten milliseconds.

        `wake` is called, from any thread, when there is something that a poll of a transfer could act on.
        """
        for transport in self._transports.values():
            transport.prepare_reads()
        staging = self._new_staging()
        self._copier = ThreadPoolExecutor(1, "kvweave-copy")
        self._unpacker = Unpacker(client, staging, MemoryMap(self._memory), wake, self._copier)
        copy_s = self._options.copy_s or measure_copy_s(staging)
        for kind, transport in self._transports.items():
            segment_s = self._options.segment_s or measure_segment_s(transport, staging)
            self._costs[kind] = ReadCost(segment_s, copy_s)
            log.info("cost of reads transport=%s %s", kind, self._costs[kind])

    def attach(self, offer: bytes) -> Link:
        """Connect to a peer over the first of our transports that it has and that reaches it.

        Raises:
            TransferFailed: none does, and why.
        """
        try:
            offered = msgspec.msgpack.decode(offer, type=Offer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"what the peer offers cannot be read: {error}") from error
        reasons = []
        for kind, transport in self._transports.items():
            if kind in offered.endpoints:
                try:
                    peer = transport.attach(offered.endpoints[kind])
                except TransferFailed as error:
                    reasons.append(f"{kind}: {error}")
                    continue
                log.info("peer attached transport=%s peer=%s passed_over=%s", kind, peer.name, "; ".join(reasons))
                return Link(transport, peer, offered.packer)
        if not reasons:
            reasons = [f"it has {', '.join(offered.endpoints) or 'none'}, this side {', '.join(self.kinds)}"]
        raise TransferFailed(f"no transport reaches the peer: {'; '.join(reasons)}")

    def read(self, link: Link, segments: Segments) -> Read:
        """Start to copy `segments` (source at the peer, target here) the cheapest way.

        Raises:
            ValueError: a target lies outside of the memory given to `start`.
            TransferFailed: the peer cannot be asked. What happens later shows as a FAILED transfer.
        """
        segments = segments.merged()
        path = self._path(link, segments)
        if path == "direct":
            transfer = link.transport.read(link.peer, segments)
        else:
            assert self._unpacker is not None, "start_reading() comes first"
            packer = link.packer if path in ("gather", "pack") else None
            scatters = path in ("scatter", "pack")
            transfer = self._unpacker.read(link.transport, link.peer, packer, segments, scatters=scatters)
        return Read(transfer, link.transport.kind, path, len(segments))

    def detach(self, link: Link) -> None:
        """Forget a peer; reads from it fail."""
        link.transport.detach(link.peer)

    def close(self) -> None:
        """End serving and reading, and release everything. Idempotent."""
        for transport in self._transports.values():
            transport.close()
        if self._packer is not None:
            self._packer.close()
        if self._copier is not None:
            self._copier.shutdown()
        self._transports.clear()

    def _path(self, link: Link, segments: Segments) -> Path:
        """The path that is configured, or the cheapest, of those that this link has."""
        paths = PATHS if link.packer is not None else ("direct", "scatter")
        if self._options.path in paths:
            return self._options.path
        return self._costs[link.transport.kind].cheapest(ReadSize.of(segments), paths)

    def _new_staging(self) -> Staging:
        staging = Staging(self._options.staging_bytes, device=self._memory[0].device)
        for transport in self._transports.values():
            transport.register([staging.memory])
        return staging
