"""A prefill and a decode node of different layouts, without vLLM: every byte arrives, every block comes back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from connector.config import WeaveConfig
from connector.jobs import StepWork
from connector.lease import LeaseTable, Offer
from connector.prompt import digest
from layouts import ParallelLayout
from tests.connector.engines import (
    CONTENT_BYTES,
    Node,
    content,
    decode_node,
    offer,
    prefill_node,
    wait_for,
)
from transport.base import Transfer
from transport.control import messages as wire

LAYERS = {"num_layers": 3}
PAIRS = {
    "TP1 -> TP2 DCP2": (
        ParallelLayout(num_kv_heads=1, block_tokens=4, **LAYERS),
        ParallelLayout(tp=2, dcp=2, num_kv_heads=1, interleave_tokens=4, block_tokens=4, **LAYERS),
    ),
    "TP2 DCP2 I=1 -> TP1": (
        ParallelLayout(tp=2, dcp=2, num_kv_heads=1, interleave_tokens=1, block_tokens=4, **LAYERS),
        ParallelLayout(num_kv_heads=1, block_tokens=8, **LAYERS),
    ),
    "PCP2 DCP2 -> TP2, two heads": (
        ParallelLayout(pcp=2, dcp=2, num_kv_heads=2, interleave_tokens=2, block_tokens=8, **LAYERS),
        ParallelLayout(tp=2, num_kv_heads=2, block_tokens=4, **LAYERS),
    ),
    "PCP2 -> TP4 DCP2 PP1": (
        ParallelLayout(pcp=2, num_kv_heads=2, block_tokens=4, **LAYERS),
        ParallelLayout(tp=4, dcp=2, num_kv_heads=2, interleave_tokens=3, block_tokens=6, **LAYERS),
    ),
    "MLA TP2 DCP2 -> PP3 TP2": (
        ParallelLayout(tp=2, dcp=2, mla=True, interleave_tokens=4, block_tokens=4, **LAYERS),
        ParallelLayout(tp=2, pp=3, mla=True, block_tokens=16, **LAYERS),
    ),
}
TWO_PLAIN = (
    ParallelLayout(num_kv_heads=2, block_tokens=4, **LAYERS),
    ParallelLayout(num_kv_heads=2, block_tokens=8, **LAYERS),
)


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(nodes: ExitStack, pair: tuple[ParallelLayout, ParallelLayout], transport: str, **p: Any) -> tuple[Node, Node]:
    source, target = prefill_node(pair[0], transport, **p), decode_node(pair[1], transport)
    nodes.callback(source.close)
    nodes.callback(target.close)
    return source, target


def arrive(node: Node, request_id: str, params: dict[str, Any], tokens: list[int]) -> None:
    assert node.consumer is not None
    node.consumer.on_new_request(request_id, params, len(tokens), lambda n: digest(tokens, n))


def matched(node: Node, request_id: str, already: int = 0) -> int:
    """Tokens offered, once the prefill node has answered."""
    consumer = node.consumer
    assert consumer is not None
    answers: list[tuple[int | None, bool]] = []
    wait_for(
        lambda: answers.append(consumer.get_num_new_matched_tokens(request_id, already)) or answers[-1][0] is not None
    )
    count, is_async = answers[-1]
    assert count is not None and is_async is (count > 0)
    return count


def load(source: Node, target: Node, request_id: str, params: dict[str, Any], tokens: list[int], **kw: Any) -> bool:
    """Arrive, allocate, load; True when the load succeeded."""
    blocks, already = kw["blocks"], kw.get("already", 0)
    arrive(target, request_id, params, tokens)
    count = matched(target, request_id, already)
    assert target.consumer is not None
    target.consumer.update_state_after_alloc(request_id, [blocks], count)
    wait_for(lambda: request_id in target.received, source, target)
    return target.received[request_id]


@pytest.mark.parametrize("transport", ["memory/direct", "nixl/direct", "nixl/pack", "cma/direct", "cma/pack"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_every_byte_arrives_and_every_block_comes_back(
    nodes: ExitStack, pair: tuple[ParallelLayout, ParallelLayout], transport: str
) -> None:
    source, target = start(nodes, pair, transport)
    virtual = target.layout.interleave.virtual_block_tokens
    expected_bytes = 0
    lengths = sorted({2, 5, virtual, virtual + 1, 3 * virtual + 5})
    for number, n in enumerate(lengths):
        tokens = list(range(n))
        kv = content(number, n, source.layout)
        held = list(range(60, 60 - source.layout.interleave.num_virtual_blocks(n), -1))
        blocks = list(range(1, 1 + target.layout.interleave.num_virtual_blocks(n)))
        source.caches.write(held, kv)
        already = virtual if n > 2 * virtual else 0
        params = offer(source, f"p{n}", held, tokens)
        assert load(source, target, f"d{n}", params, tokens, blocks=blocks, already=already)
        assert target.caches.holds(blocks, kv, already, n - 1)
        wait_for(lambda: f"p{n}" in source.sent, source, timeout_s=4)  # noqa: B023
        for cache in (cache for rank in target.caches.ranks for cache in rank.values()):
            cache.zero_()
        expected_bytes += sum(
            CONTENT_BYTES
            * heads.size
            * layers.size
            * (
                target.layout.interleave.num_local_tokens(n - 1, shard)
                - target.layout.interleave.num_local_tokens(already, shard)
            )
            for shard, heads, layers in ((h.shard, h.heads, h.layers) for h in target.layout.placement.holdings)
        )
    sums = target.counters.take()
    assert total(sums, "bytes_moved") == total(sums, "bytes_payload") == expected_bytes
    assert sums["loads|loaded|"] == len(lengths)
    assert source.producer is not None and source.producer.num_open_leases == 0
    assert target.consumer is not None and target.consumer.num_loads == 0


def total(sums: dict[str, float], name: str) -> float:
    """A counter, whatever its labels."""
    return sum(value for key, value in sums.items() if key.split("|")[0] == name)


def ends(node: Node) -> dict[str, float]:
    """How the loads of this node ended since the last look at its counters: "outcome|cause" -> number."""
    sums = node.counters.take()
    return {key.removeprefix("loads|"): value for key, value in sums.items() if key.startswith("loads|")}


def test_only_the_claimed_positions_are_written(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(21))
    source.caches.write(list(range(6)), content(0, 21, source.layout))
    assert load(source, target, "d", offer(source, "p", range(6), tokens), tokens, blocks=[3, 1, 2], already=8)
    assert target.caches.num_written_bytes() == (20 - 8) * 2 * 3 * CONTENT_BYTES


def test_full_local_hit_and_one_token_prompts_release_at_once(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(17))
    arrive(target, "d", offer(source, "p", range(5), tokens), tokens)
    assert matched(target, "d", 16) == 0
    target.consumer.update_state_after_alloc("d", [[0, 1, 2]], 0)
    arrive(target, "d1", offer(source, "p1", [0], [5]), [5])
    wait_for(lambda: sorted(source.sent) == ["p", "p1"], source, target, timeout_s=4)
    assert target.counters.take()["loads|local_hit|"] == 2


def test_abort_before_during_and_after_the_load(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    for moment in ("opening", "ready", "loading"):
        arrive(target, moment, offer(source, f"p-{moment}", range(3), tokens), tokens)
        if moment != "opening":
            count = matched(target, moment)
        if moment == "loading":
            target.consumer.update_state_after_alloc(moment, [[0, 1]], count)
        target.consumer.request_finished(moment)
        target.step(aborted=[moment])
        wait_for(lambda: f"p-{moment}" in source.sent, source, target, timeout_s=4)  # noqa: B023
    wait_for(lambda: "loading" in target.received, target)
    assert target.consumer.num_loads == 0
    assert target.counters.take()["loads|aborted|"] == 3


def test_lease_that_ends_during_the_load_fails_it(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    count = matched(target, "d")
    source.producer._leases.expire(time.monotonic() + 1e6)
    target.consumer.update_state_after_alloc("d", [[0, 1]], count)
    wait_for(lambda: "d" in target.received, source, target)
    assert target.received["d"] is False
    sums = target.counters.take()
    assert sums["loads|failed|read"] == 1 and sums["read_failures|expired"] == 1
    assert matched(target, "d") == 0


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"capability": "0" * 32}, "unknown"),
        ({"capability": "x"}, "malformed"),
        ({"capability": 7}, "malformed"),
        ({"port": 10**30}, "malformed"),
        ({"port": True}, "malformed"),
        ({"host": "a b"}, "malformed"),
        ({"host": "localhost"}, "malformed"),
        ({"num_tokens": 0}, "malformed"),
        ({"num_tokens": 10**30}, "malformed"),
        ({"num_tokens": 5}, ""),
        ({"num_tokens": 9}, ""),
        ({"incarnation": "f" * 32}, "unknown"),
    ],
)
def test_forged_params_never_read(nodes: ExitStack, change: dict[str, Any], cause: str) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens) | change, tokens)
    count = matched(target, "d")
    assert count == (0 if cause else min(change["num_tokens"], 8))
    if cause:
        assert ends(target) == {f"local_prefill|{cause}": 1}


def test_another_prompt_cannot_use_the_capability(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    params = offer(source, "p", range(3), list(range(9)))
    arrive(target, "d", params, [*range(9), 100])
    assert matched(target, "d") == 9, "the first nine tokens are those of the lease"
    arrive(target, "e", params, [100, *range(1, 9)])
    assert matched(target, "e") == 0
    assert ends(target) == {"local_prefill|incompatible": 1}


def test_used_capability_is_expired(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    params = offer(source, "p", range(3), tokens)
    assert load(source, target, "d", params, tokens, blocks=[0, 1])
    arrive(target, "again", params, tokens)
    assert matched(target, "again") == 0
    assert target.counters.take()["loads|local_prefill|expired"] == 1


def test_a_peer_with_another_cache_is_refused_by_name(nodes: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    source = prefill_node(TWO_PLAIN[0], "memory")
    nodes.callback(source.close)
    tokens = list(range(9))
    for field, value in [
        ("model", "other"),
        ("dtype", "bf16"),
        ("head_bytes", 48),
        ("num_layers", 4),
        ("page", "amx"),
    ]:
        target = decode_node(TWO_PLAIN[1], "memory", **{field: value})
        nodes.callback(target.close)
        caplog.clear()
        for attempt in "ab":
            arrive(target, attempt, offer(source, f"p-{field}-{attempt}", range(3), tokens), tokens)
            assert matched(target, attempt) == 0
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1 and f"{field}: there " in warnings[0] and str(value) in warnings[0]
        wait_for(lambda: source.producer.num_open_leases == 0, source)


def test_a_silent_peer_costs_its_timeout_and_nothing_else(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    target.consumer._config = WeaveConfig(open_timeout_s=1)
    tokens = list(range(9))
    params = offer(source, "p", range(3), tokens)
    arrive(target, "dead", params | {"port": 9}, tokens)
    assert load(source, target, "alive", params, tokens, blocks=[0, 1])
    assert matched(target, "dead") == 0
    assert target.counters.take()["loads|local_prefill|silent"] == 1


def test_lease_of_a_vanished_decode_node_ends_by_itself(nodes: ExitStack) -> None:
    source = prefill_node(TWO_PLAIN[0], "memory", lease_s=0.2)
    nodes.callback(source.close)
    offer(source, "p", range(3), list(range(9)))
    wait_for(lambda: source.sent == ["p"], source, timeout_s=4)
    assert source.counters.take()["leases_ended|expired"] == 1


def test_renewals_keep_a_waiting_load_alive(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory", lease_s=2)
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    count = matched(target, "d")
    time.sleep(3)
    source.step()
    assert source.producer.num_open_leases == 1
    target.consumer.update_state_after_alloc("d", [[0, 1]], count)
    wait_for(lambda: target.received.get("d") is True, source, target)


def test_prefill_node_that_dies_before_the_load_costs_a_local_prefill(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    count = matched(target, "d")
    source.close()
    target.consumer.update_state_after_alloc("d", [[0, 1]], count)
    wait_for(lambda: "d" in target.received, target)
    assert target.received["d"] is False


def test_a_peer_that_claims_another_incarnation_cannot_speak_for_it(nodes: ExitStack) -> None:
    """A client that knows the prefill node's incarnation points the decode node at a node of its own."""
    source, target = start(nodes, TWO_PLAIN, "memory")
    liar = prefill_node(TWO_PLAIN[0], "memory")
    nodes.callback(liar.close)
    tokens, kv = list(range(9)), content(1, 9, source.layout)
    source.caches.write([0, 1, 2], kv)
    liar.producer.incarnation = source.producer.incarnation
    arrive(target, "forged", offer(liar, "p", range(3), tokens), tokens)
    matched(target, "forged")
    assert load(source, target, "victim", offer(source, "p", range(3), tokens), tokens, blocks=[0, 1])
    assert target.caches.holds([0, 1], kv, 0, 8)


def test_only_allowed_peers_are_contacted(nodes: ExitStack) -> None:
    source = prefill_node(TWO_PLAIN[0], "memory")
    nodes.callback(source.close)
    tokens = list(range(9))
    for networks, count in [("10.0.0.0/8, ::1", 0), ("10.0.0.1,127.0.0.0/8", 8)]:
        target = decode_node(TWO_PLAIN[1], "memory", config=WeaveConfig(allowed_peers=networks))
        nodes.callback(target.close)
        arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
        assert matched(target, "d") == count


def test_requests_that_read_nothing_release_before_the_answer_and_after(nodes: ExitStack) -> None:
    """vLLM takes no external token for a request with prompt logprobs, whatever was offered."""
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    for name in ("before", "after"):
        arrive(target, name, offer(source, f"p-{name}", range(3), tokens), tokens)
        if name == "after":
            matched(target, name)
        target.consumer.update_state_after_alloc(name, [[0, 1]], 0)
        assert target.consumer.num_loads == 0
    wait_for(lambda: len(source.sent) == 2, source, target, timeout_s=4)


def test_counters_never_fall_when_the_target_has_more_than_the_lease_covers(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    arrive(target, "d", offer(source, "p", range(3), list(range(9))), list(range(40)))
    assert matched(target, "d", 32) == 0
    target.consumer.update_state_after_alloc("d", [[0, 1, 2, 3, 4]], 0)
    sums = target.counters.take()
    assert sums["loads|local_hit|"] == 1 and sums["tokens_local"] == 9 and "tokens_loaded" not in sums


def test_fewer_tokens_than_offered_are_the_first_ones(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens, kv = list(range(21)), content(3, 21, source.layout)
    source.caches.write(list(range(6)), kv)
    arrive(target, "d", offer(source, "p", range(6), tokens), tokens)
    assert matched(target, "d") == 20
    target.consumer.update_state_after_alloc("d", [[0, 1, 2]], 16)
    wait_for(lambda: target.received.get("d") is True, source, target)
    assert target.caches.holds([0, 1, 2], kv, 0, 16)
    assert target.caches.num_written_bytes() == 16 * 2 * 3 * CONTENT_BYTES


def test_a_request_that_never_gets_blocks_gives_its_lease_back(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    assert matched(target, "d") == 8
    target.consumer._config = WeaveConfig(wait_timeout_s=1)
    wait_for(lambda: source.sent == ["p"], source, target, timeout_s=5)
    assert target.counters.take()["loads|local_prefill|timeout"] == 1


def test_a_lost_lease_does_not_stop_a_load_that_waits_for_its_confirmation(nodes: ExitStack) -> None:
    """The last Ok may be lost on its way: the lease is over then, and asking again still gets Ok."""
    source, target = start(nodes, TWO_PLAIN, "memory")
    answer, seen = source.producer.answer, threading.Event()

    def slow(request: wire.Request) -> wire.Reply:
        reply = answer(request)
        if isinstance(request, wire.Done):
            seen.set()
            time.sleep(0.3)
        return reply

    source.producer._server._handler = slow
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    target.consumer.update_state_after_alloc("d", [[0, 1]], matched(target, "d"))
    target.step()
    assert seen.wait(5)
    target.workers[0].begin(StepWork(lost=["d"]))
    wait_for(lambda: "d" in target.received, source, target)
    assert target.received["d"] is True


def test_ended_leases_do_not_keep_their_requests_alive() -> None:
    table, token_ids = LeaseTable(30), list(range(1000))
    keeper = Keeper()
    held = weakref.ref(keeper)
    capability = table.grant(Offer("r", 1000, (), partial(keeper.digest, token_ids)), 0.0)
    table.release(capability, "a", 1.0)
    del keeper
    gc.collect()
    assert table.drain_ended()
    assert held() is None


class Keeper:
    """Stands for a request that an offer's digest holds."""

    def digest(self, token_ids: list[int], num_tokens: int) -> bytes:
        return digest(token_ids, num_tokens)


def test_an_error_while_a_transfer_closes_neither_loses_the_report_nor_the_thread(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory/direct")  # a packed read would keep its staging slice
    tokens = list(range(9))

    def broken_close(transfer: Transfer) -> None:
        raise OSError("close failed")

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "close", broken_close)
        load(source, target, "broken", offer(source, "p", range(3), tokens), tokens, blocks=[0, 1])
    assert load(source, target, "next", offer(source, "q", range(3), tokens), tokens, blocks=[0, 1])


@pytest.mark.parametrize("block_ids", [[], [[0]], [[0, 1, 2], [0]]], ids=["none", "too few", "two groups"])
def test_an_answer_with_the_wrong_blocks_is_refused_before_anything_is_claimed(
    nodes: ExitStack, block_ids: list[list[int]]
) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    answer = source.producer.answer

    def wrong(request: wire.Request) -> wire.Reply:
        reply = answer(request)
        return structs.replace(reply, block_ids=block_ids) if isinstance(reply, wire.Opened) else reply

    source.producer._server._handler = wrong
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    assert matched(target, "d") == 0
    assert ends(target) == {"local_prefill|malformed": 1}


def test_nodes_without_a_common_transport_meet_and_part(nodes: ExitStack) -> None:
    source, target = start(nodes, TWO_PLAIN, "memory")
    assert source.producer is not None and target.consumer is not None
    source.producer._transports = ("cma", "nixl")
    target.consumer._transports = ["ucx"]
    tokens = list(range(9))
    arrive(target, "d", offer(source, "p", range(3), tokens), tokens)
    assert matched(target, "d") == 0
    wait_for(lambda: target.counters.take().get("loads|local_prefill|incompatible") == 1, target)
