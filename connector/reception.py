"""What a node says of itself to `python -m kvweave doctor`, and the port at which one that only decodes says it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from kvweave import __version__
from transport.control import messages as wire
from transport.control.keys import NodeKeys
from transport.control.server import ControlServer

log = logging.getLogger(__name__)


def describe(
    incarnation: str, cache: wire.CacheFormat, placement: wire.PlacementInfo, transports: Sequence[str]
) -> wire.Description:
    """The description of a node that has granted no lease yet."""
    return wire.Description(
        version=__version__,
        incarnation=incarnation,
        transports=list(transports),
        cache=cache,
        placement=placement,
        num_open_leases=0,
    )


class Reception:
    """The control port of a node that only decodes, opened if its `port` is set. Knows no lease and no memory."""

    def __init__(self, host: str, port: int, keys: NodeKeys | None = None) -> None:
        self._server = ControlServer(host, port, self._answer, keys)
        self._description: wire.Description | None = None

    def start(self, cache: wire.CacheFormat, placement: wire.PlacementInfo, transports: Sequence[str]) -> None:
        """Answer from now on. Raises ConfigError when the port cannot be bound."""
        self._description = describe(secrets.token_hex(16), cache, placement, transports)
        self._server.start()
        log.info("control port open host=%s port=%d, to describe this node only", *self.address)

    def close(self) -> None:
        self._server.close()

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    def _answer(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Describe) and self._description is not None:
            return self._description
        return wire.Refused(cause="unknown", detail="this node only decodes: it has no leases")
