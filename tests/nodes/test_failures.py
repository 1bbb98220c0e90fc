"""Real nodes when something dies, stalls, lies or does not fit: the right tokens or a clear error, and no leak."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from examples.nodes import stop_all, wait_all_ready
from tests.nodes.cluster import READY_TIMEOUT_S, Layout, VllmNode, at_once, hand_over, make_node
from tests.nodes.conftest import Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SHORT_LEASE = {"lease_s": 5.0}
BOUND_S = 10.0


def prompt(seed: str, num_tokens: int = 70) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 512) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def trio(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmNode]]:
    """A prefill node with short leases, decode nodes with either failure policy, a plain node."""
    logs, model = tmp_path_factory.mktemp("logs"), farm.model(1)
    sharded = Layout(tp=2, dcp=2)
    nodes = {
        "source": make_node("source", model, Layout(), logs, role="kv_producer", extra_config=SHORT_LEASE),
        "target": make_node("target", model, sharded, logs, role="kv_consumer"),
        "strict": make_node("strict", model, Layout(), logs, role="kv_consumer", policy="fail"),
        "plain": make_node("plain", model, Layout(block=32), logs, role=None),
    }
    try:
        for node in nodes.values():
            node.node.start()
        wait_all_ready([node.node for node in nodes.values()], READY_TIMEOUT_S)
        yield nodes
    finally:
        stop_all([node.node for node in nodes.values()])


@contextmanager
def relay(params: dict[str, Any], num_messages: int) -> Iterator[dict[str, Any]]:
    """Params that reach the prefill node through a relay which passes the first requests and then falls silent."""
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(f"tcp://{params['host']}:{params['port']}")
    stop = threading.Event()

    def forward() -> None:
        remaining, senders = num_messages, []
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


@contextmanager
def stopped(node: VllmNode) -> Iterator[None]:
    """The node's whole process group is stopped meanwhile."""
    os.killpg(node.node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.node.pid, signal.SIGCONT)


def test_prefill_node_falls_silent_after_open(trio: dict[str, VllmNode]) -> None:
    """The read is done but nobody confirms it: policy recompute prefills locally, policy fail reports an error."""
    tokens = prompt("silent after open")
    expected = trio["plain"].complete(tokens).tokens
    for name in ("target", "strict"):
        trio[name].changes(lambda gained: True)
        with relay(trio["source"].prefill(tokens), 1) as params:
            began = time.monotonic()
            if name == "target":
                assert trio[name].complete(tokens, params).tokens == expected
            else:
                with pytest.raises(AssertionError, match="answered 5"):
                    trio[name].complete(tokens, params)
            assert time.monotonic() - began < BOUND_S
        assert trio[name].changes(lambda gained: "loads|failed" in gained)["loads|failed"] == 1
        trio[name].assert_idle()
    trio["source"].assert_idle(timeout_s=BOUND_S)
    for name in ("target", "strict"):
        assert hand_over(trio["source"], trio[name], tokens).tokens == expected


def test_abort_while_the_load_is_parked(trio: dict[str, VllmNode]) -> None:
    """The client leaves while the prefill node is stopped: blocks come back on both sides afterwards."""
    source, target, tokens = trio["source"], trio["target"], prompt("abort")
    with relay(source.prefill(tokens), 1) as params, pytest.raises(TimeoutError):
        target.complete(tokens, params, timeout_s=1.0)
    target.assert_idle(timeout_s=BOUND_S)
    source.assert_idle(timeout_s=BOUND_S)
    with stopped(source), pytest.raises(TimeoutError):
        target.complete(tokens, PARKED_PARAMS | {"port": 9}, timeout_s=0.5)
    target.assert_idle(timeout_s=BOUND_S)


PARKED_PARAMS = {
    "do_remote_prefill": True,
    "capability": "0" * 32,
    "incarnation": "1" * 32,
    "host": "127.0.0.1",
    "num_tokens": 70,
}


def test_forged_and_used_capabilities_read_nothing(trio: dict[str, VllmNode]) -> None:
    source, target, plain = trio["source"], trio["target"], trio["plain"]
    tokens = prompt("forged")
    used = source.prefill(tokens)
    assert set(used) <= {
        *("do_remote_prefill", "do_remote_decode", "capability", "host", "port", "incarnation", "num_tokens"),
        "remote_prefill_cached_tokens",
    }
    hand_over_params = dict(used)
    target.complete(tokens, hand_over_params)
    target.changes(lambda gained: "bytes_moved" in gained)
    forged = [
        used,
        used | {"capability": "0" * 32},
        used | {"capability": 5},
        used | {"incarnation": "f" * 32},
        used | {"num_tokens": 10**20},
        used | {"host": "no such host!"},
        used | {"port": "1"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"},
    ]
    for number, params in enumerate(forged):
        other = prompt(f"forged {number}")
        assert target.complete(other, params).tokens == plain.complete(other).tokens
    gained = target.changes(
        lambda gained: sum(value for key, value in gained.items() if key.startswith("loads")) == len(forged)
    )
    assert "bytes_moved" not in gained and "segments" not in gained
    foreign = source.prefill(prompt("somebody else's"))
    assert target.complete(tokens, foreign).tokens == plain.complete(tokens).tokens
    assert "bytes_moved" not in target.changes(lambda gained: "loads|incompatible|local_prefill" in gained)
    source.assert_idle(timeout_s=BOUND_S)
    target.assert_idle()


def test_rejected_request_and_n_equal_two_release_the_lease(trio: dict[str, VllmNode]) -> None:
    source, target, tokens = trio["source"], trio["target"], prompt("rejected")
    with pytest.raises(AssertionError, match="answered 4"):
        target.complete(tokens, source.prefill(tokens), max_tokens=100_000)
    source.assert_idle(timeout_s=2)
    expected = trio["plain"].complete(tokens).tokens
    assert target.complete(tokens, source.prefill(tokens), n=2).tokens == expected
    source.assert_idle(timeout_s=2)
    target.assert_idle()


def test_another_model_is_refused_at_first_contact(trio: dict[str, VllmNode], farm: Farm) -> None:
    (other,) = farm.get(Layout(kv_heads=2))
    tokens = prompt("another model")
    expected = other.complete(tokens).tokens
    for _ in range(2):
        assert other.complete(tokens, trio["source"].prefill(tokens)).tokens == expected
    gained = other.changes(lambda gained: gained.get("loads|incompatible|local_prefill") == 2)
    assert "bytes_moved" not in gained
    lines = [line for line in other.node.log_path.read_text().splitlines() if "cause=incompatible" in line]
    assert len(lines) == 1 and "model: there tiny-1-kv-heads, here tiny-2-kv-heads" in lines[0]
    trio["source"].assert_idle(timeout_s=2)
    farm.stop(other)


@pytest.mark.parametrize(
    ("layout", "flags", "words"),
    [
        (Layout(tp=2, dcp=2, interleave=3), [], ("16", "3", "interleave")),
        (Layout(kv_heads=2, tp=2, dcp=2), [], ("2", "DCP")),
    ],
    ids=["interleave does not divide the block", "DCP x KV heads > TP"],
)
def test_start_up_refuses(farm: Farm, tmp_path: Path, layout: Layout, flags: list[str], words: tuple[str, ...]) -> None:
    node = make_node("refused", farm.model(layout.kv_heads), layout, tmp_path, flags=flags)
    node.node.start()
    try:
        assert node.node.wait_ended(90), "the node should refuse to start"
        errors = [line for line in node.node.log_path.read_text().splitlines() if "Error" in line]
        assert any(all(word.lower() in line.lower() for word in words) for line in errors), errors[-5:]
    finally:
        node.node.kill()


def test_prefill_node_is_killed_while_requests_wait(trio: dict[str, VllmNode]) -> None:
    """Last in this module: it kills the prefill node. Open unanswered, then a dead peer, then new requests."""
    source, target, plain = trio["source"], trio["target"], trio["plain"]
    prompts = [prompt(f"killed {number}") for number in range(3)]
    expected = [plain.complete(tokens).tokens for tokens in prompts]
    params = [source.prefill(tokens) for tokens in prompts]
    with stopped(source), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(target.complete, *pair) for pair in zip(prompts[:2], params[:2], strict=True)]
        time.sleep(1.0)
        assert not any(future.done() for future in waiting)
        source.node.kill()
        began = time.monotonic()
        assert [future.result(timeout=BOUND_S).tokens for future in waiting] == expected[:2]
        assert time.monotonic() - began < BOUND_S
    began = time.monotonic()
    assert target.complete(prompts[2], params[2]).tokens == expected[2]
    assert time.monotonic() - began < BOUND_S
    assert at_once([lambda: target.complete(prompts[2]).tokens]) == [expected[2]]
    target.assert_idle()
