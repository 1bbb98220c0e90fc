"""Real nodes when something dies, stalls, lies or does not fit: the right tokens or a clear error, and no leak."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from examples.nodes import stop_all
from tests.nodes.cluster import Layout, VllmNode, hand_over, plain_node
from tests.nodes.conftest import Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BOUND_S = 10.0
STRICT = Layout(policy="fail")
SHARDED = Layout(tp=2, dcp=2)
ALLOWED_PARAMS = {
    *("do_remote_prefill", "do_remote_decode", "capability", "host", "port", "incarnation", "num_tokens"),
    "remote_prefill_cached_tokens",  # added by vLLM
}


@dataclass(frozen=True)
class Cluster:
    """One KV head: a node with policy recompute, one with policy fail (each source of the other), a plain node."""

    sharded: VllmNode
    strict: VllmNode
    plain: VllmNode


@pytest.fixture
def cluster(farm: Farm) -> Cluster:
    return Cluster(*farm.get(SHARDED, STRICT, plain_node(1)))


def prompt(seed: str, num_tokens: int = 70) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 512) for _ in range(num_tokens)]


@contextmanager
def relay(params: dict[str, Any], num_requests: int) -> Iterator[dict[str, Any]]:
    """Params that reach the prefill node through a relay which passes the first requests and then falls silent."""
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(f"tcp://{params['host']}:{params['port']}")
    stop = threading.Event()

    def forward() -> None:
        remaining, senders = num_requests, []
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        poller.register(back, zmq.POLLIN)
        while not stop.is_set():
            ready = dict(poller.poll(50))
            if front in ready:
                sender, *frames = front.recv_multipart()
                if remaining:
                    remaining -= 1
                    senders.append(sender)
                    back.send_multipart(frames)
            if back in ready:
                front.send_multipart([senders.pop(0), *back.recv_multipart()])
        front.close(0)
        back.close(0)

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield params | {"host": "127.0.0.1", "port": port}
    finally:
        stop.set()
        thread.join()
        context.term()


def test_prefill_node_falls_silent_after_open(cluster: Cluster) -> None:
    """The read is done but nobody confirms it: policy recompute prefills locally, policy fail reports an error."""
    tokens = prompt("silent after open")
    expected = cluster.plain.complete(tokens).tokens
    for source, target in [(cluster.strict, cluster.sharded), (cluster.sharded, cluster.strict)]:
        hand_over(source, target, prompt("first contact"))  # a node's first request is slow
        target.changes(lambda gained: True)
        with relay(source.prefill(tokens), num_requests=1) as params:
            began = time.monotonic()
            if target is cluster.sharded:
                assert target.complete(tokens, params).tokens == expected
            else:
                with pytest.raises(AssertionError, match="answered 5"):
                    target.complete(tokens, params)
            assert time.monotonic() - began < BOUND_S
        assert num_failed(target.changes(lambda gained: num_failed(gained) > 0)) == 1
        target.assert_idle()
        source.assert_idle(timeout_s=BOUND_S)
    again = prompt("afterwards")
    assert hand_over(cluster.sharded, cluster.strict, again).tokens == cluster.plain.complete(again).tokens


def test_abort_while_the_load_is_parked(cluster: Cluster) -> None:
    """The client leaves while nobody confirms the read: blocks come back on both sides."""
    source, target, tokens = cluster.strict, cluster.sharded, prompt("abort")
    target.changes(lambda gained: True)
    with relay(source.prefill(tokens), num_requests=1) as params, pytest.raises(TimeoutError):
        target.complete(tokens, params, timeout_s=1.0)
    assert target.changes(lambda gained: "loads|aborted" in gained, timeout_s=BOUND_S)["loads|aborted"] == 1
    target.assert_idle(timeout_s=BOUND_S)
    source.assert_idle(timeout_s=BOUND_S)


def test_forged_and_used_capabilities_read_nothing(cluster: Cluster) -> None:
    source, target, plain = cluster.strict, cluster.sharded, cluster.plain
    tokens = prompt("forged")
    target.changes(lambda gained: True)
    used = source.prefill(tokens)
    assert used.keys() <= ALLOWED_PARAMS
    target.complete(tokens, used)
    target.changes(lambda gained: "bytes_moved" in gained)
    forged: list[dict[str, Any]] = [
        used,
        used | {"capability": "0" * 32},
        used | {"capability": 5},
        used | {"incarnation": "f" * 32},
        used | {"num_tokens": 2**62},
        used | {"host": "no such host!"},
        used | {"port": "1"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"},
    ]
    for number, params in enumerate(forged):
        other = prompt(f"forged {number}")
        assert target.complete(other, params).tokens == plain.complete(other).tokens
    with pytest.raises(AssertionError, match="answered 400"):
        target.complete(tokens, used | {"num_tokens": 10**20})
    gained = target.changes(lambda gained: num_loads(gained) >= len(forged))
    assert "bytes_moved" not in gained and "segments" not in gained
    foreign = source.prefill(prompt("somebody else's"))
    assert target.complete(tokens, foreign).tokens == plain.complete(tokens).tokens
    assert "bytes_moved" not in target.changes(lambda gained: num_loads(gained) == 1)
    source.assert_idle(timeout_s=BOUND_S)
    target.assert_idle()


def num_failed(gained: dict[str, float]) -> float:
    """Failed loads, whatever the cause."""
    return sum(value for key, value in gained.items() if key.startswith("loads|") and key.endswith("|failed"))


def num_loads(gained: dict[str, float]) -> float:
    return sum(value for key, value in gained.items() if key.startswith("loads"))


def test_rejected_request_and_n_equal_two_release_the_lease(cluster: Cluster) -> None:
    source, target, tokens = cluster.strict, cluster.sharded, prompt("rejected")
    with pytest.raises(AssertionError, match="answered 4"):
        target.complete(tokens, source.prefill(tokens), max_tokens=100_000)
    source.assert_idle(timeout_s=2)
    expected = cluster.plain.complete(tokens).tokens
    both = target.complete(tokens, source.prefill(tokens), n=2, temperature=1.0, top_k=1)
    assert both.tokens == expected
    source.assert_idle(timeout_s=2)
    target.assert_idle()


def test_another_model_is_refused_at_first_contact(cluster: Cluster, farm: Farm) -> None:
    (other,) = farm.get(Layout(kv_heads=2))
    tokens = prompt("another model")
    expected = other.complete(tokens).tokens
    other.changes(lambda gained: True)
    for _ in range(2):
        assert other.complete(tokens, cluster.strict.prefill(tokens)).tokens == expected
    gained = other.changes(lambda gained: num_loads(gained) == 2)
    assert gained["loads|incompatible|local_prefill"] == 2 and "bytes_moved" not in gained
    lines = [line for line in other.node.log_path.read_text().splitlines() if "cause=incompatible" in line]
    assert len(lines) == 1 and "model: there tiny-1-kv-heads, here tiny-2-kv-heads" in lines[0]
    cluster.strict.assert_idle(timeout_s=2)


def test_start_up_refuses_impossible_layouts(farm: Farm) -> None:
    refused = {
        Layout(tp=2, dcp=2, interleave=3): ("block", "16", "3", "interleave"),
        Layout(kv_heads=2, tp=2, dcp=2): ("2", "kv heads"),
    }
    nodes = {farm.make(layout): words for layout, words in refused.items()}
    try:
        for node in nodes:
            node.node.start()
        for node, words in nodes.items():
            assert node.node.wait_ended(120), "the node should refuse to start"
            errors = [line.lower() for line in node.node.log_path.read_text().splitlines() if "error" in line.lower()]
            assert any(all(word in line for word in words) for line in errors), errors[-5:]
    finally:
        stop_all([node.node for node in nodes])


def test_prefill_node_is_killed_while_requests_wait(cluster: Cluster, farm: Farm) -> None:
    """Open unanswered, then a dead peer: correct by local prefill within the bound, and later requests too."""
    source, target, plain = cluster.strict, cluster.sharded, cluster.plain
    prompts = [prompt(f"killed {number}") for number in range(3)]
    expected = [plain.complete(tokens).tokens for tokens in prompts]
    params = [source.prefill(tokens) for tokens in prompts]
    with ThreadPoolExecutor() as pool:
        os.killpg(source.node.pid, signal.SIGSTOP)
        waiting = [pool.submit(target.complete, *pair) for pair in zip(prompts[:2], params[:2], strict=True)]
        time.sleep(1.0)
        assert not any(future.done() for future in waiting)
        began = time.monotonic()
        farm.kill(STRICT)
        assert [future.result(timeout=BOUND_S).tokens for future in waiting] == expected[:2]
        assert time.monotonic() - began < BOUND_S
    began = time.monotonic()
    assert target.complete(prompts[2], params[2]).tokens == expected[2]
    assert time.monotonic() - began < BOUND_S
    assert target.complete(prompts[2]).tokens == expected[2]
    target.assert_idle()
