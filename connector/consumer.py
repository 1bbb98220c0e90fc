"""The scheduler side of a decode node: opens leases, claims tokens once the prefill node has answered, sends the jobs.

Methods are named like the vLLM hooks they serve and run on the engine thread. Requests are seen through a few plain
values, so this runs without vLLM in tests. How a load lives and ends is `load`'s business; here events become messages,
and messages events.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.allowed import AllowedPeers
from connector.config import WeaveConfig
from connector.errors import BadParams, ForgedParams
from connector.faults import FaultLog
from connector.jobs import LoadJob, SourceId, StepWork
from connector.load import Attempts, Event, Load, Outcome, State
from connector.pace import Pace
from connector.params import TransferParams, wants_remote_prefill
from connector.peers import PeerTable
from connector.renewals import Renewals
from connector.signing import SharedSecret
from connector.stats import Counters
from transport.control import messages as wire
from transport.control.client import ControlClient
from transport.errors import PeerSilent, ProtocolError

log = logging.getLogger(__name__)

CLIENT = "client"
"""Stands for the peer in the log when the fault is in what a client sent."""


@dataclass(slots=True)
class _Claim:
    """A load and what its messages need."""

    load_id: str
    load: Load
    params: TransferParams
    question: wire.Open
    attempts: Attempts
    answers: list[Future[wire.Reply]] = field(default_factory=list)
    opened: wire.Opened | None = None
    silence: str = "silent"
    """What to call it when the time for an answer is over."""

    @property
    def peer(self) -> str:
        return f"{self.params.host}:{self.params.port}"


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
        clock: Callable[[], float] = time.monotonic,
        secret: SharedSecret | None = None,
        transports: Sequence[str] = (),
    ) -> None:
        self._client, self._cache, self._placement = client, cache, placement
        self._transports = list(transports)
        self._config = config
        self._allowed, self._secret = AllowedPeers.parse(config.allowed_peers), secret
        self.counters = counters
        self._pace = pace
        self._clock = clock
        self._renewals = Renewals(client)
        self._peers = PeerTable(counters)
        self._faults = FaultLog()
        self._claims: dict[str, _Claim] = {}
        self._request_of: dict[str, str] = {}
        self._next = StepWork()

    def start(self) -> None:
        self._client.start()
        self._renewals.start()

    def close(self) -> None:
        self._renewals.close()
        self._client.close()

    @property
    def num_loads(self) -> int:
        return len(self._claims)

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
            parsed = TransferParams.parse(params, self._secret)
        except BadParams as error:
            self._refuse_params(request_id, "malformed", str(error))
            return
        except ForgedParams as error:
            self._refuse_params(request_id, "forbidden", str(error))
            return
        if not self._allowed.allow(parsed.host):
            allowed = self._config.allowed_peers
            self._refuse_params(request_id, "forbidden", f"host {parsed.host} is not in allowed_peers ({allowed})")
            return
        now, load_id, wanted = self._clock(), secrets.token_hex(16), min(parsed.num_tokens, num_tokens - 1)
        if wanted < 1:
            self._renewals.release(load_id, parsed.address, parsed.capability, now)
            self.counters.add("loads", outcome=Outcome.LOCAL_HIT.value)
            return
        if request_id in self._claims:
            self._renewals.release(load_id, parsed.address, parsed.capability, now)
            self._refuse_params(request_id, "duplicate", "reads for a request of this name are still under way")
            return
        question = wire.Open(
            capability=parsed.capability,
            load=load_id,
            cache=self._cache,
            placement=self._placement,
            num_tokens=wanted,
            prompt_digest=digest(wanted),
            known_incarnation=parsed.incarnation if self._peers.has_met(parsed.source) else "",
            transports=self._transports,
        )
        jitter = int(load_id[:8], 16) / 2**32
        attempts = Attempts.starting(now, self._config.open_timeout_s, jitter)
        self._claims[request_id] = _Claim(load_id, Load(wanted, now), parsed, question, attempts)
        self._request_of[load_id] = request_id
        self.counters.add("open_loads")
        self._pursue(request_id)

    def _refuse_params(self, request_id: str, cause: str, detail: str) -> None:
        if times := self._faults.note(CLIENT, cause, self._clock()):
            log.warning(
                "prefilling locally request=%s peer=%s cause=%s times=%d detail=%s",
                *(request_id, CLIENT, cause, times, detail),
            )
        self.counters.add("loads", outcome=Outcome.LOCAL_PREFILL.value, cause=cause)

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those this node has; None while the prefill node has not answered."""
        self._pursue(request_id)
        claim = self._claims.get(request_id)
        if claim is None or claim.load.is_parked:
            return 0, False
        if claim.load.state is State.OPENING:
            return None, False
        claim.load.start = num_computed_tokens
        missing = max(0, claim.load.num_tokens - num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The blocks exist: send the job, or let the prefill node go when nothing is to be loaded.

        vLLM may take nothing although something is offered, even before the offer (a request with prompt logprobs).
        """
        claim = self._claims.get(request_id)
        if claim is None or claim.load.is_parked:
            return
        if num_external_tokens == 0:
            claim.load.spared(self._clock())
            self._settle(request_id)
            return
        load, opened, now = claim.load, claim.opened, self._clock()
        assert opened is not None, "vLLM takes tokens only after they were offered"
        self.counters.observe("queue_seconds", now - load.since)
        load.dispatched(num_external_tokens, now)
        self._next.jobs.append(
            LoadJob(
                request_id=request_id,
                load=claim.load_id,
                capability=claim.params.capability,
                source=claim.params.source,
                start=load.start,
                stop=load.num_tokens,
                source_block_ids=np.asarray(opened.block_ids[0], dtype=np.int64),
                target_block_ids=np.asarray(block_ids[0], dtype=np.int64),
            )
        )

    def take_work(self) -> StepWork:
        """What the workers are to do from this step on."""
        for request_id in list(self._claims):
            self._pursue(request_id)
        for load_id, cause in self._renewals.take_lost().items():
            if load_id in self._request_of:
                self._lose(self._request_of[load_id], cause, "the lease is lost")
        self._decline_overdue()
        work, self._next = self._next, StepWork()
        return work

    def update_connector_output(self, finished: set[str], failed: set[str]) -> None:
        """Every rank has reported these loads."""
        for request_id in finished:
            claim = self._claims.get(request_id)
            if claim is not None and claim.load.is_parked:
                now = self._clock()
                self.counters.add("transfer_seconds", now - claim.load.dispatched_at)
                claim.load.reported(has_failed=request_id in failed, now=now)
                self._settle(request_id)

    def request_finished(self, request_id: str, *, by_error: bool = False) -> None:
        """The request is over for vLLM, for whatever reason. A parked one stays known until its reads have ended.

        `by_error`: vLLM ended it because its load failed (kv_load_failure_policy fail), not the client.
        """
        claim = self._claims.get(request_id)
        if claim is not None and claim.load.allows(Event.ABANDONED):
            claim.load.abandoned(by_error=by_error, now=self._clock())
            self._settle(request_id)

    def check_integrity(self) -> None:
        """Every claim is open, in the state its records say, and no lease is renewed for anything else."""
        assert {self._request_of[claim.load_id] for claim in self._claims.values()} == self._claims.keys()
        assert len(self._request_of) == len(self._claims)
        for claim in self._claims.values():
            claim.load.check_integrity()
            assert claim.load.end is None
            assert (claim.opened is None) == (claim.load.state is State.OPENING)
        assert self._renewals.kept() <= {claim.load_id for claim in self._claims.values() if claim.opened is not None}

    def _pursue(self, request_id: str) -> None:
        """While OPENING: take an answer, else ask when it is time, else give up when the time is over.

        Whatever goes wrong here ends this load and no other.
        """
        claim = self._claims.get(request_id)
        if claim is None or claim.load.state is not State.OPENING:
            return
        try:
            self._take_answers(request_id, claim)
            if claim.load.state is State.OPENING:
                self._ask_or_give_up(request_id, claim)
        except ProtocolError as error:
            self._decline(request_id, "malformed", str(error))
        except Exception as error:  # vLLM's engine thread: whatever escapes here ends the engine, not one load
            log.exception("opening a lease failed in an unexpected way request=%s peer=%s", request_id, claim.peer)
            if claim.load.allows(Event.DECLINED):
                self._decline(request_id, "internal", repr(error))

    def _take_answers(self, request_id: str, claim: _Claim) -> None:
        """Take the first answer that settles the question; that the peer is busy, or silent so far, settles nothing."""
        for answer in [answer for answer in claim.answers if answer.done()]:
            claim.answers.remove(answer)
            try:
                reply = answer.result(timeout=0)
            except PeerSilent:
                claim.silence = "silent"
                continue
            self._peers.heard(claim.params.address)
            if isinstance(reply, wire.Refused) and reply.cause == "busy":
                claim.silence = "busy"
                continue
            self._take_answer(request_id, claim, reply)
            return

    def _ask_or_give_up(self, request_id: str, claim: _Claim) -> None:
        now, attempts, address = self._clock(), claim.attempts, claim.params.address
        if attempts.is_over(now):
            if claim.silence == "silent":
                self._peers.gave_up(address)
            detail = f"no answer in {attempts.timeout_s:g} s, asked {attempts.num_made} times"
            self._decline(request_id, claim.silence, detail)
        elif attempts.is_due(now):
            if attempts.num_made:
                self.counters.add("open_repeats", cause=claim.silence)
                self._peers.missed(address)
            attempts.made(now)
            answer = self._client.request(address, claim.question, attempts.deadline - now)
            answer.add_done_callback(lambda _: self._pace.wake())
            claim.answers.append(answer)

    def _take_answer(self, request_id: str, claim: _Claim, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Refused):
            detail = f"{reply.field}: there {reply.ours}, here {reply.theirs}" if reply.field else reply.detail
            self._decline(request_id, reply.cause, detail)
        elif not isinstance(reply, wire.Opened):
            self._decline(request_id, "malformed", f"answered Open with {type(reply).__name__}")
        elif reply.incarnation != claim.params.incarnation:
            self._decline(request_id, "unknown", "the prefill node was restarted since it computed this prompt")
        else:
            self._open(claim, reply)

    def _open(self, claim: _Claim, reply: wire.Opened) -> None:
        """The lease is ours. Raises ProtocolError when the answer cannot be used."""
        params, load, now = claim.params, claim.load, self._clock()
        self._meet(params.source, reply.manifest)
        needed = self._peers.interleave(params.source).num_virtual_blocks(load.num_tokens)
        if len(reply.block_ids) != 1 or len(reply.block_ids[0]) < needed:
            raise ProtocolError(f"the answer lists {[len(ids) for ids in reply.block_ids]} blocks, needed {needed}")
        self.counters.observe("handshake_seconds", now - load.since)
        claim.opened = reply
        load.answered(now)
        self._renewals.keep(claim.load_id, params.address, params.capability, reply.lease_s, now)

    def _meet(self, source: SourceId, manifest: wire.Manifest | None) -> None:
        """The first answer of a life of a prefill node: its earlier lives are over, and what was read from them too."""
        if self._peers.has_met(source):
            return
        self._peers.meet(source, manifest)
        assert manifest is not None, "meeting without one fails"
        self._next.manifests.append((source, manifest))
        self.counters.add("handshakes")
        for request_id, claim in list(self._claims.items()):
            if claim.params.address == source.address and claim.params.source != source:
                self._lose(request_id, "unknown", "the prefill node was restarted")

    def _decline_overdue(self) -> None:
        """Blocks a request waits for may be under a lease of another node that waits too: somebody gives in."""
        oldest = self._clock() - self._config.wait_timeout_s
        for request_id, claim in list(self._claims.items()):
            if claim.load.state is State.READY and claim.load.since <= oldest:
                self._decline(request_id, "timeout", f"no blocks within {self._config.wait_timeout_s:g} s")

    def _lose(self, request_id: str, cause: str, detail: str) -> None:
        """The lease of an open load is gone: before the job is sent decline it, afterwards stop the workers."""
        claim = self._claims[request_id]
        if cause == "silent":
            self._peers.gave_up(claim.params.address)
        if claim.load.is_parked:
            claim.load.lost(cause, self._clock())
            self._next.lost.append(request_id)
        else:
            self._decline(request_id, cause, detail)

    def _decline(self, request_id: str, cause: str, detail: str) -> None:
        claim, now = self._claims[request_id], self._clock()
        if times := self._faults.note(claim.peer, cause, now):
            log.warning(
                "prefilling locally request=%s peer=%s cause=%s times=%d detail=%s",
                *(request_id, claim.peer, cause, times, detail),
            )
        claim.load.declined(cause, now)
        self._settle(request_id)

    def _settle(self, request_id: str) -> None:
        """After an event: release the lease if it is not needed any more, and count the load if it has ended."""
        claim = self._claims[request_id]
        load, params = claim.load, claim.params
        if load.take_release():
            self._renewals.release(claim.load_id, params.address, params.capability, self._clock())
        if load.end is None:
            return
        del self._claims[request_id], self._request_of[claim.load_id]
        self._renewals.forget(claim.load_id)
        outcome = load.end.outcome
        self.counters.add("open_loads", -1)
        self.counters.add("loads", outcome=outcome.value, cause=load.end.cause)
        if outcome in (Outcome.LOADED, Outcome.LOCAL_HIT):
            self.counters.add("tokens_local", min(load.start, load.num_tokens))
        if outcome is Outcome.LOADED:
            self.counters.add("tokens_loaded", load.num_tokens - load.start)
