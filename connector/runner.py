"""The I/O thread of one decode rank: carries out load jobs, from the transfer plan to the confirmed read.

It owns the rank's data plane. The model thread hands over commands and collects results; it never waits. A load ends
exactly once: confirmed by the prefill node, or failed with a cause. It ends only when no remote operation can touch its
blocks any more, because its blocks are free for others from then on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from connector.jobs import LoadJob, SourceId
from connector.stats import Counters
from layouts import ConfigError, Placement, TransferPlan, plan_transfer, plan_volume
from transport.base import TransferState
from transport.control import messages as wire
from transport.control.client import ControlClient
from transport.data_plane import DataPlane, Link, Read
from transport.errors import PeerSilent, ProtocolError, TransferFailed
from transport.regions import Region
from transport.segments import Segments, lower_route

log = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 50e-6, 2e-3
DONE_TIMEOUT_S, DONE_ATTEMPTS = 3.0, 2
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    request_id: str
    succeeded: bool


@dataclass(frozen=True, slots=True)
class _Meet:
    source: SourceId
    manifest: wire.Manifest


@dataclass(frozen=True, slots=True)
class _Stop:
    request_id: str
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Wake:
    """Something happened that a look at the loads can act on."""


@dataclass(slots=True)
class _Source:
    """One prefill engine incarnation: what it told of itself, and the ranks attached so far."""

    ranks: dict[int, wire.RankInfo]
    placement: Placement
    links: dict[int, Link] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: wire.Manifest) -> _Source:
        return cls({info.rank: info for info in manifest.ranks}, manifest.placement.to_placement())

    def regions(self, rank: int) -> dict[int, Region]:
        return {info.layer: info.to_region() for info in self.rank_info(rank).regions}

    def rank_info(self, rank: int) -> wire.RankInfo:
        if rank not in self.ranks:
            raise TransferFailed(f"the prefill node told nothing of its rank {rank}, only of {sorted(self.ranks)}")
        return self.ranks[rank]


@dataclass(slots=True)
class _Active:
    """A load under way: reading first, then waiting for the prefill node's confirmation."""

    job: LoadJob
    plan: TransferPlan
    deadline: float
    began: float
    reads: list[Read] = field(default_factory=list)
    confirming_since: float = 0.0
    confirmation: Future[wire.Reply] | None = None
    attempts: int = 0
    failure: tuple[str, str] | None = None
    """(cause, detail) once it cannot succeed any more; it ends when its reads have."""

    @property
    def moves_in_poll(self) -> bool:
        """Whether looking again at once would move bytes."""
        return any(read.transfer.moves_in_poll and read.transfer.state is TransferState.PENDING for read in self.reads)

    def stop(self, cause: str, detail: str) -> None:
        """Give up, but let the reads under way end by themselves for a while: forcing them is dear."""
        if self.failure is None:
            self.failure = cause, detail
            self.deadline = min(self.deadline, time.monotonic() + STOP_GRACE_S)


class LoadRunner:
    """Runs the loads of one rank. All public methods may be called from another thread."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        regions: Mapping[int, Region],
        plane: DataPlane,
        client: ControlClient,
        read_timeout_s: float,
        counters: Counters,
    ) -> None:
        self._rank, self._placement, self._regions = rank, placement, regions
        self._plane, self._client = plane, client
        self._read_timeout_s, self._counters = read_timeout_s, counters
        self._commands: queue.SimpleQueue[LoadJob | _Meet | _Stop | _Wake | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._sources: dict[SourceId, _Source] = {}
        self._active: dict[str, _Active] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._client.start()
            self._plane.start_reading(self._client, self.wake)
            self._thread = threading.Thread(target=self._run, name=f"kvweave-io-{self._rank}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End every load (as failed), then the thread."""
        if self._thread is not None:
            self._commands.put(None)
            self._thread.join()
            self._thread = None
            self._client.close()

    def meet(self, source: SourceId, manifest: wire.Manifest) -> None:
        """Loads from this source will follow. An earlier life of the same address is over."""
        self._commands.put(_Meet(source, manifest))

    def submit(self, job: LoadJob) -> None:
        self._commands.put(job)

    def abort(self, request_id: str) -> None:
        """End this load early if it is still under way. Its result is reported as for any other."""
        self._commands.put(_Stop(request_id, "aborted", "the request is over"))

    def lose(self, request_id: str) -> None:
        """Its lease is gone or its prefill node silent: end it early, unless its own confirmation is on the way."""
        self._commands.put(_Stop(request_id, "lost", "the lease is gone, or the prefill node silent"))

    def wake(self) -> None:
        """Look at the loads now rather than at the next poll."""
        self._commands.put(_Wake())

    def take_finished(self) -> list[LoadResult]:
        """Loads that ended since the last call, each exactly once."""
        results = []
        while not self._finished.empty():
            results.append(self._finished.get())
        return results

    def _run(self) -> None:
        self._pause_s = MIN_POLL_S
        running = True
        while running:
            try:
                running = self._turn()
            except Exception:
                log.exception("the I/O thread goes on after an unexpected error rank=%d", self._rank)
        for active in list(self._active.values()):
            self._fail(active.job, "closed", "this node stops")

    def _turn(self) -> bool:
        """Obey one command if there is one and look at every load; False when it is time to stop."""
        try:
            command = self._commands.get(timeout=self._wait_s())
        except queue.Empty:
            self._pause_s = min(2 * self._pause_s, MAX_POLL_S)
        else:
            self._pause_s = MIN_POLL_S
            if command is None:
                return False
            self._obey(command)
        for active in list(self._active.values()):
            self._guarded(active.job, self._advance, active)
        return True

    def _wait_s(self) -> float | None:
        """How long to wait for a command: not at all while polling moves bytes, for ever without loads."""
        if not self._active:
            return None
        return 0.0 if any(active.moves_in_poll for active in self._active.values()) else self._pause_s

    def _obey(self, command: LoadJob | _Meet | _Stop | _Wake) -> None:
        match command:
            case LoadJob():
                self._guarded(command, self._begin, command)
            case _Meet(source, manifest):
                self._forget_former_lives(source)
                self._sources[source] = _Source.of(manifest)
            case _Stop(request_id, cause, detail) if active := self._active.get(request_id):
                if cause == "aborted" or active.confirmation is None:
                    active.stop(cause, detail)

    def _forget_former_lives(self, source: SourceId) -> None:
        for former in [known for known in self._sources if known.address == source.address]:
            for link in self._sources.pop(former).links.values():
                self._plane.detach(link)

    def _guarded(self, job: LoadJob, step: Callable[..., None], *args: object) -> None:
        """Whatever goes wrong with a load ends this load and no other."""
        try:
            step(*args)
        except TransferFailed as error:
            self._fail(job, "transfer", str(error))
        except ProtocolError as error:
            self._fail(job, "malformed", str(error))
        except ConfigError as error:
            self._fail(job, "incompatible", str(error))
        except Exception as error:  # the net of the thread cannot tell whose load it was, and that load would hang
            log.exception("load failed in an unexpected way request=%s rank=%d", job.request_id, self._rank)
            self._fail(job, "internal", repr(error))

    def _begin(self, job: LoadJob) -> None:
        """Plan, lower and post the reads of this rank's part."""
        if job.source not in self._sources:
            raise TransferFailed("the prefill node was restarted")
        source = self._sources[job.source]
        plan = plan_transfer(source.placement, self._placement, job.start, job.stop, salt=job.salt)
        now = time.monotonic()
        active = self._active[job.request_id] = _Active(job, plan, now + self._read_timeout_s, now)
        for source_rank, segments in self._segments_by_source(job, source, plan).items():
            if source_rank not in source.links:
                source.links[source_rank] = self._plane.attach(source.rank_info(source_rank).endpoint)
            active.reads.append(self._plane.read(source.links[source_rank], segments))
        self._advance(active)

    def _segments_by_source(self, job: LoadJob, source: _Source, plan: TransferPlan) -> dict[int, Segments]:
        by_source: dict[int, list[Segments]] = {}
        for route in plan.routes_to(self._rank):
            regions = source.regions(route.source_rank)
            segments = lower_route(route, regions, job.source_block_ids, self._regions, job.target_block_ids)
            by_source.setdefault(route.source_rank, []).append(segments)
        return {rank: Segments.concatenate(parts) for rank, parts in by_source.items()}

    def _count(self, active: _Active) -> None:
        """This rank's share of the counters; the payload comes from the plan, the bytes moved from the transfers."""
        volume = plan_volume(active.plan).ranks[self._rank]
        token_bytes = next(iter(self._regions.values())).token_bytes
        for read in active.reads:
            self._counters.add("reads", path=read.path, transport=read.transport)
            self._counters.add("bytes_moved", read.transfer.num_bytes, path=read.path, transport=read.transport)
            self._counters.add("segments", read.num_segments)
        self._counters.add("bytes_payload", volume.num_entries * token_bytes)
        self._counters.add("blocks_listed", volume.num_listed_blocks)
        self._counters.add("blocks_real", volume.num_real_blocks)
        self._counters.add("blocks_empty", volume.num_empty_blocks)

    def _advance(self, active: _Active) -> None:
        """One look at a load; ends it when there is nothing left to wait for."""
        states = {read.transfer.poll() for read in active.reads}
        if TransferState.FAILED in states:
            active.stop("transfer", next(read.transfer.cause for read in active.reads if read.transfer.cause))
        if TransferState.PENDING in states and time.monotonic() < active.deadline:
            return
        if active.failure is not None:
            self._fail(active.job, *active.failure)
        elif TransferState.PENDING in states:
            self._fail(active.job, "timeout", f"reads did not end in {self._read_timeout_s:g} s")
        elif active.confirmation is None:
            self._confirm(active)
        else:
            self._look_at_confirmation(active)

    def _confirm(self, active: _Active) -> None:
        """The bytes are here. They count only if the lease still held, which the prefill node has to say."""
        job = active.job
        if not active.reads:
            self._succeed(active)
            return
        if not active.attempts:
            active.confirming_since = time.monotonic()
            self._counters.observe("read_seconds", active.confirming_since - active.began)
        message = wire.Done(
            capability=job.capability, load=job.load, reader=self._rank, num_readers=len(active.plan.readers)
        )
        active.attempts += 1
        active.confirmation = self._client.request(job.source.address, message, DONE_TIMEOUT_S)
        active.confirmation.add_done_callback(lambda _: self.wake())

    def _look_at_confirmation(self, active: _Active) -> None:
        assert active.confirmation is not None
        if not active.confirmation.done():
            return
        try:
            reply = active.confirmation.result(timeout=0)
        except (PeerSilent, ProtocolError) as error:
            if active.attempts < DONE_ATTEMPTS:
                self._confirm(active)
            else:
                self._fail(active.job, "silent", str(error))
            return
        if isinstance(reply, wire.Ok):
            self._counters.observe("validate_seconds", time.monotonic() - active.confirming_since)
            self._succeed(active)
        else:
            self._fail(active.job, getattr(reply, "cause", "malformed"), "the lease ended before the reads did")

    def _succeed(self, active: _Active) -> None:
        self._end(active.job, succeeded=True)
        self._count(active)

    def _fail(self, job: LoadJob, cause: str, detail: str) -> None:
        self._counters.add("read_failures", cause=cause)
        log.warning(
            "load failed request=%s peer=%s:%d rank=%d cause=%s detail=%s",
            *(job.request_id, *job.source.address, self._rank, cause, detail),
        )
        self._end(job, succeeded=False)

    def _end(self, job: LoadJob, *, succeeded: bool) -> None:
        active = self._active.pop(job.request_id, None)
        try:
            with ExitStack() as closing:
                for read in active.reads if active else ():
                    closing.callback(read.transfer.close)
        finally:
            self._finished.put(LoadResult(job.request_id, succeeded))
