"""Transport over NIXL: one-sided reads through UCX, between processes and machines, from and to CPU and GPU.

Cancelling a NIXL read releases its handle but does not stop its bytes (seen with NIXL 1.5 over TCP: memory
is still written after release and after disconnecting the peer). Only destroying the agent does. Hence two
agents: one that peers read from, whose address stays valid, and one that reads, which may be torn down and
rebuilt. That is the last resort: where UCX emulates reads in software (TCP only, no RDMA and not one machine),
a source that answers a reader who is gone can abort its whole process ("Fatal: unexpected error: Endpoint
timeout"), so reads get time to end by themselves first.

Only the serving agent has a progress thread. One beside the thread that reads would make UCX lock at every step: seen
with NIXL 1.5 over shared memory and over TCP, a read takes half the processor time without, for segments of 2 KiB
as of 64 KiB. What a reading agent has under way moves on while it is polled.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal

import numpy as np

from layouts import ConfigError
from transport.base import Attached, MemoryMap, Peer, Transfer, TransferState, Transport
from transport.errors import TransferFailed
from transport.regions import Memory
from transport.segments import Int64Array, Segments

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
_PROGRESS_POLL_US = 10_000


class NixlTransport(Transport):
    """Reads with the NIXL backend `backend`, started with `backend_params` (names and values as that backend has them,
    such as num_workers or ucx_devices of UCX).

    Posting may copy at once (it does between processes of one machine), so `read` can take as long as the
    copy; it does not hold the interpreter lock. Closing a transfer waits up to CLOSE_GRACE_S for its end, then
    as long for other reads under way, and rebuilds the reading agent; attached peers stay attached.
    """

    kind = "nixl"

    def __init__(self, backend: str = "UCX", backend_params: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._backend = backend
        self._backend_params = {name: str(value) for name, value in (backend_params or {}).items()}
        self._name = ""
        self._num_readers = 0
        self._server: _Agent | None = None
        self._reader: _Agent | None = None

    def _open(self, name: str) -> None:
        self._bindings = _load_bindings()
        self._name = name

    def _register(self, memory: Sequence[Memory]) -> None:
        for stretch in memory:
            _kind_of(stretch.device)
        for agent in (self._server, self._reader):
            if agent is not None:
                agent.register(memory)

    def _publish(self) -> tuple[str, bytes]:
        if self._server is None:
            self._server = self._new_agent(self._name, progresses=True)
        return self._name, self._server.metadata()

    def _prepare_reads(self) -> None:
        self._current_reader()

    def _attach(self, attached: Attached) -> None:
        reader, known = self._current_reader(), self._peers.get(attached.peer)
        changed = known is not None and known.endpoint.metadata != attached.endpoint.metadata
        reader.load(attached, again=changed or attached.peer in reader.stale)  # each time costs a file descriptor

    def _read(self, attached: Attached, segments: Segments) -> Transfer:
        reader = self._current_reader()
        if attached.peer in reader.stale:
            for transfer, peer in self._transfers.items():
                if peer == attached.peer:
                    transfer.poll()  # what is lost with the old connection shall know it first
        reader.load(attached, again=attached.peer in reader.stale)
        source = _descriptors(segments.source, segments.length, attached.memory)
        target = _descriptors(segments.target, segments.length, self._local)
        return _NixlRead(self, reader, attached.peer, source, target, segments.num_bytes)

    def _detach(self, attached: Attached) -> None:
        if self._reader is not None:
            self._reader.unload(attached.peer)

    def _shut(self) -> None:
        for agent in (self._server, self._reader):
            if agent is not None:
                agent.destroy()
        self._server = self._reader = None

    def _current_reader(self) -> _Agent:
        if self._reader is None:
            self._num_readers += 1
            self._reader = self._new_agent(f"{self._name}-reader-{self._num_readers}", progresses=False)
        return self._reader

    def _new_agent(self, name: str, *, progresses: bool) -> _Agent:
        agent = _Agent(self._bindings, name, self._backend, self._backend_params, progresses)
        agent.register(self._memory)
        return agent

    def retire(self, agent: _Agent, cause: str) -> None:
        """Destroy a reading agent, so that nothing it started writes memory; reads still open fail."""
        logger.warning("NIXL agent is rebuilt: %s", cause)
        others = [t for t in self._transfers if isinstance(t, _NixlRead) and t.agent is agent]
        _wait([transfer for transfer in others if not transfer.closed])
        for transfer in others:
            transfer.lose(cause)
        agent.destroy()
        if self._reader is agent:
            self._reader = None


class _Agent:
    """A NIXL agent with one backend: registered memory, loaded peers, and reads by handle."""

    def __init__(
        self, bindings: ModuleType, name: str, backend: str, params: Mapping[str, str], progresses: bool
    ) -> None:
        self._bindings = bindings
        self.errors: tuple[type[Exception], ...] = tuple(
            item for key, item in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error")
        )
        config = bindings.nixlAgentConfig()
        config.useProgThread = progresses
        config.pthrDelay = _PROGRESS_POLL_US  # with 0, the default of NIXL's Python API, it spins on a core
        self._agent: Any = bindings.nixlAgent(name, config)
        if backend not in self._agent.getAvailPlugins():
            raise ConfigError(
                f"NIXL backend is {backend!r}; this installation has {sorted(self._agent.getAvailPlugins())}"
            )
        try:
            self._backend = self._agent.createBackend(backend, dict(params))
        except self.errors as error:
            raise ConfigError(
                f"NIXL backend {backend!r} with parameters {dict(params)} cannot start ({error}); "
                "UCX_TLS must allow self and a network"
            ) from error
        self._registered: list[Any] = []
        self._loaded: set[Peer] = set()
        self.stale: set[Peer] = set()  # connection lost; the next read connects anew

    def register(self, memory: Sequence[Memory]) -> None:
        """Register stretches, one list per kind of memory."""
        for kind in ("DRAM", "VRAM"):
            rows = [
                (stretch.address, stretch.num_bytes, _device_number(stretch.device), "")
                for stretch in memory
                if _kind_of(stretch.device) == kind and stretch.num_bytes
            ]
            if rows:
                descriptors = self._bindings.nixlRegDList(self._segment_kind(kind), rows)
                self._agent.registerMem(descriptors, [self._backend])
                self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """Return what a peer's agent loads in order to read from here."""
        return bytes(self._agent.getLocalMD())

    def load(self, attached: Attached, again: bool = False) -> None:
        """Load the metadata of a peer unless that is done already; TransferFailed when it is unusable."""
        if again:
            self.unload(attached.peer)
        if attached.peer in self._loaded:
            return
        try:
            self._agent.loadRemoteMD(attached.endpoint.metadata)
        except self.errors as error:
            raise TransferFailed(f"peer {attached.peer.name} cannot be attached: {error}") from error
        self._loaded.add(attached.peer)

    def unload(self, peer: Peer) -> None:
        """Disconnect from a peer."""
        self.stale.discard(peer)
        if peer in self._loaded:
            self._loaded.discard(peer)
            with suppress(*self.errors):
                self._agent.invalidateRemoteMD(peer.name)

    def post(self, peer: Peer, source: _Descriptors, target: _Descriptors) -> tuple[int, bool]:
        """Start a read; return its handle and whether it is done already. Raises one of `errors`."""
        self._agent.getNotifs({})  # there are none; it makes UCX look at its connections, so that a lost one shows
        handle = self._agent.createXferReq(
            self._bindings.NIXL_READ, self._list(target), self._list(source), peer.name, b"", [self._backend]
        )
        try:
            return handle, self._is_done(self._agent.postXferReq(handle, b""))
        except self.errors:
            self.release(handle)
            raise

    def is_done(self, handle: int) -> bool:
        """Return whether a read has ended well; raises one of `errors` when it has ended badly."""
        return self._is_done(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        """Free the handle of a read that has ended."""
        with suppress(*self.errors):
            self._agent.releaseXferReq(handle)

    def lost_peer(self, error: Exception) -> bool:
        """Return whether `error` says that the connection is gone, and the bytes on it with it."""
        return isinstance(error, self._bindings.nixlRemoteDisconnectError)

    def destroy(self) -> None:
        """Destroy the agent: its connections close and its memory is written no more."""
        self._registered.clear()
        self._loaded.clear()
        self.stale.clear()
        self._agent = None

    def _is_done(self, status: Any) -> bool:
        return bool(status == self._bindings.NIXL_SUCCESS)

    def _list(self, descriptors: _Descriptors) -> Any:
        kind, rows = descriptors
        return self._bindings.nixlXferDList(self._segment_kind(kind), rows)

    def _segment_kind(self, kind: str) -> Any:
        return self._bindings.DRAM_SEG if kind == "DRAM" else self._bindings.VRAM_SEG


class _NixlRead(Transfer):
    """A posted read; after its agent is gone it can write nothing."""

    def __init__(
        self,
        transport: NixlTransport,
        agent: _Agent,
        peer: Peer,
        source: _Descriptors,
        target: _Descriptors,
        num_bytes: int,
    ) -> None:
        super().__init__(num_bytes)
        self._transport = transport
        self.agent: _Agent | None = agent
        self._peer = peer
        self._handle: int | None = None
        self._quiet = False
        try:
            self._handle, done = agent.post(peer, source, target)
        except agent.errors as error:
            self._fail(agent, error)
        else:
            if done:
                self._finish(TransferState.DONE)

    def lose(self, cause: str) -> None:
        """Take note that the agent is about to be destroyed."""
        self._drop_handle()
        self._finish(TransferState.FAILED, cause)

    def _advance(self) -> None:
        if self.agent is None or self._handle is None:
            return
        try:
            if self.agent.is_done(self._handle):
                self._finish(TransferState.DONE)
        except self.agent.errors as error:
            self._fail(self.agent, error)

    def _fail(self, agent: _Agent, error: Exception) -> None:
        self._quiet = agent.lost_peer(error)
        agent.stale.add(self._peer)
        self._finish(TransferState.FAILED, f"read from {self._peer.name} failed: {error}")

    def _release(self) -> None:
        """Wait a little for the end; if there is none, or it was not clean, tear down the agent."""
        _wait([self])
        ended = self._state is TransferState.DONE or self._quiet
        if self.agent is not None and not ended:
            self._transport.retire(self.agent, f"read from {self._peer.name} did not end: {self._cause}")
        self._drop_handle()

    def _drop_handle(self) -> None:
        if self.agent is not None and self._handle is not None:
            self.agent.release(self._handle)
        self.agent = self._handle = None


def _wait(transfers: Sequence[Transfer]) -> None:
    """Give transfers CLOSE_GRACE_S to end; NIXL offers nothing to wait on, so they are polled."""
    deadline = time.monotonic() + CLOSE_GRACE_S
    while [t for t in transfers if t.poll() is TransferState.PENDING] and time.monotonic() < deadline:
        time.sleep(0.001)


_Descriptors = tuple[Literal["DRAM", "VRAM"], "np.typing.NDArray[np.uint64]"]


def _descriptors(addresses: Int64Array, lengths: Int64Array, memory: MemoryMap) -> _Descriptors:
    """Return (kind of memory, rows of address, length, device number); ValueError when kinds are mixed."""
    index = memory.find(addresses)
    kinds = {_kind_of(memory.memory[i].device) for i in np.unique(index).tolist()}
    if len(kinds) != 1:
        raise ValueError(f"one read cannot mix CPU and GPU memory on one side, got {sorted(kinds)}")
    numbers = np.array([_device_number(stretch.device) for stretch in memory.memory], np.int64)
    rows = np.stack([addresses, lengths, numbers[index]], axis=1).astype(np.uint64)
    return kinds.pop(), rows


def _kind_of(device: str) -> Literal["DRAM", "VRAM"]:
    name = device.partition(":")[0]
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"transport 'nixl' cannot reach memory on {device!r}; allowed are 'cpu' and 'cuda:N'")
    return "DRAM" if name == "cpu" else "VRAM"


def _device_number(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _load_bindings() -> ModuleType:
    for name in ("nixl._bindings", "nixl_cu12._bindings", "nixl_cu13._bindings"):
        with suppress(ImportError):
            return importlib.import_module(name)
    raise ConfigError(
        "transport 'nixl' needs the NIXL library, which is not installed; run `pip install nixl-cu12` "
        "(nixl-cu13 for CUDA 13), or choose transport 'memory' within one process"
    )
