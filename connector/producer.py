"""The scheduler side of a prefill node: grants leases for finished prefills and answers the decode nodes' questions.

Two threads meet here: vLLM's engine thread calls the methods named like its hooks, the control server's thread calls
`answer`. One lock guards the lease table; nothing else is shared. Does not import vllm.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from connector.errors import LeaseBusy, LeaseExpired, LeaseUnknown, PromptMismatch
from connector.lease import LeaseTable, Offer
from connector.pace import Pace
from connector.params import TransferParams
from connector.reception import describe
from connector.stats import Counters
from transport.control import messages as wire
from transport.control.keys import NodeKeys
from transport.control.server import ControlServer
from transport.errors import ProtocolError

log = logging.getLogger(__name__)


class Producer:
    """Leases of one engine and the control port at which they are presented."""

    def __init__(
        self,
        host: str,
        port: int,
        lease_s: float,
        counters: Counters,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        keys: NodeKeys | None = None,
    ) -> None:
        self.incarnation = secrets.token_hex(16)
        self.counters = counters
        self._pace = pace
        self._clock = clock
        self._lock = threading.Lock()
        self._leases = LeaseTable(lease_s)
        self._server = ControlServer(host, port, self.answer, keys)
        self._manifest: wire.Manifest | None = None
        self._transports: tuple[str, ...] = ()
        self._description: wire.Description | None = None

    def start(self, manifest: wire.Manifest, transports: Sequence[str] = ()) -> None:
        """Serve, now that every rank's memory is known. Raises ConfigError when the port cannot be bound."""
        self._manifest = manifest
        self._transports = tuple(transports)
        self._description = describe(manifest.incarnation, manifest.cache, manifest.placement, transports)
        self._server.start()
        host, port = self._server.address
        log.info("control port open host=%s port=%d incarnation=%s", host, port, self.incarnation)

    def close(self) -> None:
        self._server.close()
        with self._lock:
            self._leases.close()

    def offer(self, offer: Offer) -> TransferParams:
        """Pin a finished prefill; returns what its client hands to the decode node."""
        with self._lock:
            capability = self._leases.grant(offer, self._clock())
        host, port = self._server.address
        self.counters.add("leases_granted")
        self.counters.add("open_leases")
        return TransferParams(capability, host, port, self.incarnation, offer.num_tokens)

    def take_ended(self) -> list[str]:
        """Ids of the requests whose lease ended since the last call: their blocks may be freed now."""
        with self._lock:
            self._leases.expire(self._clock())
            ended = self._leases.drain_ended()
        for request_id, end in ended:
            self.counters.add("leases_ended", cause=end.value)
            self.counters.add("open_leases", -1)
            log.debug("lease ended request=%s cause=%s", request_id, end.value)
        return [request_id for request_id, _ in ended]

    @property
    def num_open_leases(self) -> int:
        with self._lock:
            return self._leases.num_open

    def answer(self, request: wire.Request) -> wire.Reply:
        """Answer one control message (on the server's thread)."""
        try:
            with self._lock:
                return self._answer(request)
        except LeaseUnknown:
            return wire.Refused(cause="unknown")
        except LeaseExpired as error:
            return wire.Refused(cause="expired", detail=str(error))
        except LeaseBusy as error:
            return wire.Refused(cause="busy", detail=str(error))
        except PromptMismatch as error:
            return wire.Refused(cause="incompatible", field=error.field, ours=error.ours, theirs=error.theirs)

    def _answer(self, request: wire.Request) -> wire.Reply:
        now = self._clock()
        match request:
            case wire.Open():
                return self._open(request, now)
            case wire.Describe():
                return self._describe()
            case wire.Renew(capability, load):
                self._leases.renew(capability, load, now)
            case wire.Done(capability, load, reader, num_readers):
                self._leases.done(capability, load, reader, num_readers, now)
                self._pace.wake()
            case wire.Release(capability, load):
                self._leases.release(capability, load, now)
                self._pace.wake()
            case _:
                raise ProtocolError(f"a prefill node does not answer {type(request).__name__}")
        return wire.Ok(lease_s=self._leases.lease_s)

    def _describe(self) -> wire.Reply:
        assert self._description is not None, "the server starts with it"
        return msgspec.structs.replace(self._description, num_open_leases=self._leases.num_open)

    def _transport_mismatch(self, theirs: Sequence[str]) -> wire.Mismatch | None:
        """What to refuse a reader with that has none of this node's transports; sides that do not say are let pass."""
        if not theirs or not self._transports or set(theirs) & set(self._transports):
            return None
        return wire.Mismatch("transports", ", ".join(self._transports), ", ".join(theirs))

    def _open(self, request: wire.Open, now: float) -> wire.Reply:
        manifest = self._manifest
        assert manifest is not None, "the server starts with the manifest"
        mismatch = wire.find_mismatch(manifest.cache, request.cache) or self._transport_mismatch(request.transports)
        if mismatch is not None:
            return wire.Refused(cause="incompatible", field=mismatch.field, ours=mismatch.ours, theirs=mismatch.theirs)
        offer = self._leases.open(request.capability, request.load, request.num_tokens, request.prompt_digest, now)
        return wire.Opened(
            incarnation=self.incarnation,
            num_tokens=offer.num_tokens,
            block_ids=[ids.tolist() for ids in offer.block_ids],
            lease_s=self._leases.lease_s,
            manifest=None if request.known_incarnation == self.incarnation else manifest,
        )
