"""Transport over UCX through UCXX, with no NIXL on either side.

It looks one-sided and is two-sided: a thread of the source answers requests (see ucx_source.py) with messages of at
most one slice. Many small segments travel in one message, gathered and scattered through staging memory; a message
that is one piece at an end is sent from, or received into, that piece. The reader's side does all its work in poll.

A process of the same host is watched through its number and start time, any other one through UCX and by asking it.
Between processes of one host bytes take loopback TCP, at about a sixth of the speed of NIXL on the same machine; where
both may read each other's memory, transport `cma` is the one to use (see ucx_worker.py for why UCX's is not).

Known fault: with UCXX 0.52 and UCX 1.21 a reader whose source is killed while bytes are under way can be brought down
by a segmentation fault inside UCX (seen in about one of fifty such deaths on a loaded machine). So "auto" leaves this
transport out.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from layouts.errors import config_error, require_at_least
from transport.base import Attached, Transfer, Transport
from transport.errors import TransferFailed
from transport.process import Process
from transport.regions import Memory
from transport.segments import Segments
from transport.ucx_messages import KEY_BYTES, Offer
from transport.ucx_worker import Worker

if TYPE_CHECKING:  # both need torch, which importing this package does not
    from transport.staging import Staging
    from transport.ucx_reader import Reader
    from transport.ucx_source import Source

DEFAULT_STAGING_BYTES = 64 << 20
DEFAULT_SLICE_BYTES = 4 << 20


class UcxTransport(Transport):
    """Reads over the networks that UCX finds: RDMA, TCP.

    `host` is the address of this machine that peers reach it by; only its interface is used. `staging_bytes` bounds
    the memory for packed moves, on each device and for each direction; it is allocated when first needed.
    """

    kind = "ucx"
    packs_itself = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        slice_bytes: int = DEFAULT_SLICE_BYTES,
    ) -> None:
        super().__init__()
        require_at_least(1, staging_bytes=staging_bytes, slice_bytes=slice_bytes)
        self._host = host
        self._staging_bytes = staging_bytes
        self._slice_bytes = slice_bytes
        self._name = ""
        self._source: Source | None = None
        self._reader: Reader | None = None

    def _open(self, name: str) -> None:
        from transport.ucx_reader import Reader

        self._reader = Reader(name, self._host, lambda: self._local, self._new_staging())
        self._name = name

    def _register(self, memory: Sequence[Memory]) -> None:
        for stretch in memory:
            if stretch.device.partition(":")[0] not in ("cpu", "cuda"):
                raise config_error(
                    "transport 'ucx'",
                    got=f"memory on {stretch.device!r}",
                    allowed="memory on 'cpu' and 'cuda:N'",
                    remedy="Use transport 'nixl' with a backend for that device.",
                )

    def _publish(self) -> tuple[str, bytes]:
        from transport.ucx_source import Source

        if self._source is None:
            worker = Worker(self._host)
            offer = Offer(worker.address, Process.current(), secrets.token_bytes(KEY_BYTES), self._slice_bytes)
            self._source = Source(worker, offer, lambda: self._local, self._new_staging())
            self._source.start()
        return self._name, msgspec.msgpack.encode(self._source.offer)

    def _attach(self, attached: Attached) -> None:
        assert self._reader is not None
        try:
            offer = msgspec.msgpack.decode(attached.endpoint.metadata, type=Offer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"'ucx' endpoint of the peer cannot be read: {error}") from error
        self._reader.connect(attached.peer, offer)

    def _read(self, attached: Attached, segments: Segments) -> Transfer:
        assert self._reader is not None
        return self._reader.read(attached.peer, segments)

    def _detach(self, attached: Attached) -> None:
        assert self._reader is not None
        self._reader.disconnect(attached.peer)

    def _shut(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._source is not None:
            self._source.close()
        self._reader = self._source = None

    def _new_staging(self) -> Callable[[str], Staging]:
        """Return what gives the staging memory of each device; sizes that cannot work raise ConfigError now."""
        from transport.staging import Staging

        staging_on = functools.cache(functools.partial(Staging, self._staging_bytes, self._slice_bytes))
        staging_on("cpu")
        return staging_on
