"""The scheduler side of a decode node: opens leases, claims tokens once the prefill node has answered, sends the jobs.

Methods are named like the vLLM hooks they serve and run on the engine thread. Requests are seen through a few plain
values, so this runs without vLLM in tests. A load (`_Load`) ends exactly once, with one outcome:

    arrive -> OPENING -> READY -> LOADING -> loaded | failed | aborted
                 |         `----> local_hit | aborted
                 `-> local_prefill (refused, silent, malformed: the prompt is computed here)
"""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from connector.config import WeaveConfig
from connector.errors import BadParams
from connector.jobs import LoadJob, SourceId, StepWork
from connector.pace import Pace
from connector.params import TransferParams, wants_remote_prefill
from connector.renewals import Renewals
from connector.stats import Counters
from layouts import Interleave
from transport.control import messages as wire
from transport.control.client import ControlClient
from transport.errors import PeerSilent, ProtocolError

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 1.0
RENEW_TIMEOUT_S = 4.0
RELEASE_TIMEOUT_S = 2.0
MAX_FAULTS_SEEN = 1000


class Phase(enum.Enum):
    OPENING = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    ENDING = enum.auto()
    """Over for vLLM while loading: the workers still have to report the end of their reads."""


@dataclass(slots=True)
class _Load:
    load: str
    params: TransferParams
    num_tokens: int
    answer: Future[wire.Reply]
    phase: Phase = Phase.OPENING
    opened: wire.Opened | None = None
    start: int = 0
    """Positions before it were here already."""
    ready_since: float = 0.0
    loading_since: float = 0.0
    outcome: str = ""
    """How it ends, where that is decided before the workers' report."""


class Consumer:
    """All loads of one decode engine."""

    def __init__(
        self,
        client: ControlClient,
        cache: wire.CacheFormat,
        placement: wire.PlacementInfo,
        config: WeaveConfig,
        counters: Counters,
        pace: Pace,
    ) -> None:
        self._client, self._cache, self._placement = client, cache, placement
        self._config = config
        self.counters = counters
        self._pace = pace
        self._renewals = Renewals(client, RENEW_INTERVAL_S, RENEW_TIMEOUT_S)
        self._loads: dict[str, _Load] = {}
        self._request_of: dict[str, str] = {}
        self._sources: dict[SourceId, Interleave] = {}
        self._next = StepWork()
        self._faults_seen: set[tuple[tuple[str, int], str]] = set()

    def start(self) -> None:
        self._client.start()
        self._renewals.start()

    def close(self) -> None:
        self._renewals.close()
        self._client.close()

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def on_new_request(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        num_tokens: int,
        digest: Callable[[int], bytes],
    ) -> None:
        """Present the capability as soon as the request arrives. The last token is always recomputed here, so its KV
        is not asked for."""
        if not wants_remote_prefill(params):
            return
        assert params is not None
        try:
            parsed = TransferParams.parse(params)
        except BadParams as error:
            self._refuse_params(request_id, "malformed", str(error))
            return
        if not self._config.allows_peer(parsed.host):
            self._refuse_params(request_id, "forbidden", f"host {parsed.host} is not in allowed_peers")
            return
        load, wanted = secrets.token_hex(16), min(parsed.num_tokens, num_tokens - 1)
        if wanted < 1:
            self._release(parsed, load)
            self.counters.add("loads", outcome="local_hit")
            return
        message = wire.Open(
            capability=parsed.capability,
            load=load,
            cache=self._cache,
            placement=self._placement,
            num_tokens=wanted,
            prompt_digest=digest(wanted),
            known_incarnation=parsed.incarnation if parsed.source in self._sources else "",
        )
        answer = self._client.request(parsed.address, message, self._config.open_timeout_s)
        answer.add_done_callback(lambda _: self._pace.wake())
        self._loads[request_id] = _Load(load, parsed, wanted, answer)
        self._request_of[load] = request_id

    def _refuse_params(self, request_id: str, cause: str, detail: str) -> None:
        log.warning("prefilling locally request=%s cause=%s detail=%s", request_id, cause, detail)
        self.counters.add("loads", outcome="local_prefill", cause=cause)

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those this node has; None while the prefill node has not answered."""
        self._poll_answer(request_id)
        load = self._loads.get(request_id)
        if load is None or load.phase in (Phase.LOADING, Phase.ENDING):
            return 0, False
        if load.phase is Phase.OPENING:
            return None, False
        load.start = num_computed_tokens
        missing = max(0, load.num_tokens - num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The blocks exist: send the job, or let the prefill node go when nothing is to be loaded.

        vLLM may take nothing although something is offered, even before the offer (a request with prompt logprobs).
        """
        load = self._loads.get(request_id)
        if load is None or load.phase not in (Phase.OPENING, Phase.READY):
            return
        if num_external_tokens == 0:
            self._end(request_id, "local_hit", release=True)
            return
        assert load.opened is not None and load.start + num_external_tokens <= load.num_tokens
        load.num_tokens = load.start + num_external_tokens
        load.phase, load.loading_since = Phase.LOADING, time.monotonic()
        self._next.jobs.append(
            LoadJob(
                request_id=request_id,
                load=load.load,
                capability=load.params.capability,
                source=load.params.source,
                start=load.start,
                stop=load.num_tokens,
                source_block_ids=np.asarray(load.opened.block_ids[0], dtype=np.int64),
                target_block_ids=np.asarray(block_ids[0], dtype=np.int64),
            )
        )

    def take_work(self) -> StepWork:
        """What the workers are to do from this step on."""
        for request_id in list(self._loads):
            self._poll_answer(request_id)
        for load, cause in self._renewals.take_lost().items():
            self._lost(self._request_of[load], cause)
        self._decline_overdue()
        work, self._next = self._next, StepWork()
        return work

    def update_connector_output(self, finished: set[str], failed: set[str]) -> None:
        """Every rank has reported these loads."""
        for request_id in finished:
            load = self._loads.get(request_id)
            if load is None:
                continue
            self.counters.add("transfer_seconds", time.monotonic() - load.loading_since)
            if load.phase is Phase.ENDING:
                self._end(request_id, load.outcome, release=False)
            else:
                has_failed = request_id in failed
                self._end(request_id, "failed" if has_failed else "loaded", release=has_failed)

    def request_finished(self, request_id: str, *, by_error: bool = False) -> None:
        """The request is over for vLLM, for whatever reason. A parked one stays known until its reads have ended.

        `by_error`: vLLM ended it because its load failed (kv_load_failure_policy fail), not the client.
        """
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.phase is Phase.LOADING:
            load.phase, load.outcome = Phase.ENDING, "failed" if by_error else "aborted"
            self._release(load.params, load.load)
        elif load.phase is not Phase.ENDING:
            self._end(request_id, "aborted", release=True)

    def _poll_answer(self, request_id: str) -> None:
        """OPENING -> READY or local_prefill, once the prefill node's answer is there."""
        load = self._loads.get(request_id)
        if load is None or load.phase is not Phase.OPENING or not load.answer.done():
            return
        try:
            self._take_answer(request_id, load, load.answer.result(timeout=0))
        except PeerSilent:
            self._decline(request_id, "silent", f"no answer in {self._config.open_timeout_s:g} s")
        except ProtocolError as error:
            self._decline(request_id, "malformed", str(error))

    def _take_answer(self, request_id: str, load: _Load, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Refused):
            detail = f"{reply.field}: there {reply.ours}, here {reply.theirs}" if reply.field else reply.detail
            self._decline(request_id, reply.cause, detail)
        elif not isinstance(reply, wire.Opened):
            self._decline(request_id, "malformed", f"answered Open with {type(reply).__name__}")
        elif reply.incarnation != load.params.incarnation:
            self._decline(request_id, "unknown", "the prefill node was restarted since it computed this prompt")
        else:
            self._meet(load.params.source, reply)
            needed = self._sources[load.params.source].num_virtual_blocks(load.num_tokens)
            if len(reply.block_ids) != 1 or len(reply.block_ids[0]) < needed:
                raise ProtocolError(f"the answer lists {[len(ids) for ids in reply.block_ids]} blocks, needed {needed}")
            load.opened, load.phase, load.ready_since = reply, Phase.READY, time.monotonic()
            self._renewals.add(load.load, load.params.address, load.params.capability, reply.lease_s)

    def _meet(self, source: SourceId, reply: wire.Opened) -> None:
        """Take note of a source's manifest; the first one counts. Raises ProtocolError when there is no usable one."""
        if source in self._sources:
            return
        if reply.manifest is None or reply.manifest.incarnation != source.incarnation:
            raise ProtocolError("the answer holds no manifest of its own incarnation")
        interleave = reply.manifest.placement.to_placement().interleave
        for former in [known for known in self._sources if known.address == source.address]:
            del self._sources[former]
        self._sources[source] = interleave
        self._next.manifests.append((source, reply.manifest))

    def _decline_overdue(self) -> None:
        """Blocks a request waits for may be under a lease of another node that waits too: somebody gives in."""
        oldest = time.monotonic() - self._config.wait_timeout_s
        for request_id, load in list(self._loads.items()):
            if load.phase is Phase.READY and load.ready_since < oldest:
                self._decline(request_id, "timeout", f"no blocks within {self._config.wait_timeout_s:g} s")

    def _lost(self, request_id: str, cause: str) -> None:
        """The lease of an open load is gone: before the job is sent decline it, afterwards stop the workers."""
        if self._loads[request_id].phase is Phase.READY:
            self._decline(request_id, cause, "lease lost while waiting for blocks")
        else:
            self._next.lost.append(request_id)

    def _decline(self, request_id: str, cause: str, detail: str) -> None:
        params = self._loads[request_id].params
        fault = (params.address, cause)
        if len(self._faults_seen) > MAX_FAULTS_SEEN:
            self._faults_seen.clear()
        level = logging.DEBUG if fault in self._faults_seen else logging.WARNING
        self._faults_seen.add(fault)
        log.log(
            level,
            "prefilling locally request=%s peer=%s:%d cause=%s detail=%s (logged once per peer and cause)",
            *(request_id, *params.address, cause, detail),
        )
        self._end(request_id, "local_prefill", release=cause not in ("unknown", "expired"), cause=cause)

    def _end(self, request_id: str, outcome: str, *, release: bool, cause: str = "") -> None:
        load = self._loads.pop(request_id)
        del self._request_of[load.load]
        self._renewals.remove(load.load)
        if release:
            self._release(load.params, load.load)
        self.counters.add("loads", outcome=outcome, cause=cause)
        if outcome in ("loaded", "local_hit"):
            self.counters.add("tokens_local", min(load.start, load.num_tokens))
        if outcome == "loaded":
            self.counters.add("tokens_loaded", load.num_tokens - load.start)

    def _release(self, params: TransferParams, load: str) -> None:
        """Tell the prefill node that this load will not read. Best effort: the lease ends by itself otherwise."""
        message = wire.Release(capability=params.capability, load=load)
        self._client.request(params.address, message, RELEASE_TIMEOUT_S)
