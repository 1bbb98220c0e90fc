"""Bytes between engines: cache memory as regions, plans as segments, one-sided reads, the control channel.

Knows addresses, agents and ports; knows no requests and no vLLM. Positions are the business of `layouts`.
"""

from typing import Any

from layouts import ConfigError
from transport.base import Peer, Transfer, TransferState, Transport
from transport.cma import CmaTransport
from transport.errors import PeerSilent, ProtocolError, TransferFailed, TransportError
from transport.memory import MemoryTransport
from transport.nixl import NixlTransport
from transport.regions import Memory, Region, memory_of, region_of
from transport.segments import Segments, lower_route

__all__ = [
    "TRANSPORTS",
    "CmaTransport",
    "Memory",
    "MemoryTransport",
    "NixlTransport",
    "Peer",
    "PeerSilent",
    "ProtocolError",
    "Region",
    "Segments",
    "Transfer",
    "TransferFailed",
    "TransferState",
    "Transport",
    "TransportError",
    "create_transport",
    "lower_route",
    "memory_of",
    "region_of",
]

TRANSPORTS: dict[str, type[Transport]] = {kind.kind: kind for kind in (CmaTransport, MemoryTransport, NixlTransport)}


def create_transport(name: str, **options: Any) -> Transport:
    """Return the transport of that name, not started; ConfigError for unknown names and options."""
    if name not in TRANSPORTS:
        raise ConfigError(f"transport is {name!r}; allowed are {', '.join(sorted(TRANSPORTS))}")
    try:
        return TRANSPORTS[name](**options)
    except TypeError as error:
        raise ConfigError(f"transport {name!r} does not take these options: {error}") from error
