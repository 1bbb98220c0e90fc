"""The proxy between two scripted nodes, over real HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from examples.nodes import free_ports
from examples.proxy import ProxyConfig, build_app, has_several_prompts, prefill_body
from tests.examples.fake_node import WAIT_S, FakeNode, serve

PARAMS = {"capability": "c1", "host": "127.0.0.1", "port": 1, "incarnation": "i", "num_tokens": 3}
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 7, "temperature": 0}


class Setup:
    """A running proxy with its two nodes and a client of it."""

    def __init__(self, prefill: FakeNode, decode: FakeNode, client: httpx.Client) -> None:
        self.prefill = prefill
        self.decode = decode
        self.client = client

    def complete(self, **changes: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**PROMPT, **changes})

    def counter(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"kvweave_proxy_{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.contextmanager
def running(prefill_urls: list[str] | None = None, **limits: float) -> Iterator[Setup]:
    """A proxy in front of fresh nodes; `prefill_urls` replaces the address of P."""
    prefill, decode = FakeNode(PARAMS), FakeNode()
    with serve(prefill.app) as prefill_url, serve(decode.app) as decode_url:
        urls = tuple([prefill_url] if prefill_urls is None else prefill_urls)
        config = ProxyConfig(urls, (decode_url,), **limits)
        with serve(build_app(config)) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
            try:
                yield Setup(prefill, decode, client)
            finally:
                prefill.release.set()
                decode.release.set()


def unused_url() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_prefill_then_decode_with_the_params_of_the_prefill_node() -> None:
    with running() as setup:
        answer = setup.complete(min_tokens=3, stream_options={"include_usage": True}, n=2)
        assert answer.status_code == 200 and answer.json()["text"] == "hello"
        ((prefill_path, prefilled, prefill_id),) = setup.prefill.requests
        ((decode_path, decoded, decode_id),) = setup.decode.requests
    assert prefill_path == decode_path == "/v1/completions"
    assert prefill_id == decode_id != ""
    assert prefilled == {
        **PROMPT,
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert decoded == {
        **PROMPT,
        "min_tokens": 3,
        "stream_options": {"include_usage": True},
        "n": 2,
        "kv_transfer_params": PARAMS,
    }


def test_chat_and_the_request_id_of_the_client() -> None:
    with running() as setup:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"X-Request-Id": "mine", "Authorization": "Bearer x"}
        assert setup.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        ((path, prefilled, request_id),) = setup.prefill.requests
    assert (path, request_id, setup.decode.requests[0][2]) == ("/v1/chat/completions", "mine", "mine")
    assert prefilled["max_tokens"] == prefilled["max_completion_tokens"] == 1


def test_stream_is_passed_through_piece_by_piece() -> None:
    with (
        running() as setup,
        setup.client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as s,
    ):
        pieces = s.iter_raw()
        assert next(pieces) == b"data: one\n\n"  # D is still holding the second piece
        setup.decode.release.set()
        assert b"".join(pieces) == b"data: two\n\n"
        assert s.headers["content-type"].startswith("text/event-stream")
        assert setup.prefill.bodies[0]["stream"] is False


def test_prefill_node_is_down() -> None:
    with running([unused_url()]) as setup:
        assert setup.complete().json()["text"] == "hello"
        assert setup.decode.bodies == [PROMPT]
        assert setup.counter('fallbacks_total{cause="unreachable"}') == 1


def refuses(node: FakeNode) -> None:
    node.status = 500


def has_no_params(node: FakeNode) -> None:
    node.params = None


def hangs(node: FakeNode) -> None:
    node.hold_answer = True


@pytest.mark.parametrize(("fault", "cause"), [(refuses, "refused"), (has_no_params, "no_params"), (hangs, "timeout")])
def test_prefill_node_fails(fault: Callable[[FakeNode], None], cause: str) -> None:
    with running(prefill_timeout_s=0.5) as setup:
        fault(setup.prefill)
        assert setup.complete().status_code == 200
        assert setup.decode.bodies == [PROMPT]
        assert setup.counter(f'fallbacks_total{{cause="{cause}"}}') == 1


def test_batch_of_prompts_and_no_prefill_node_go_to_decode_alone() -> None:
    with running() as setup:
        assert setup.complete(prompt=["one", "two"]).status_code == 200
        assert setup.prefill.requests == []
    with running([]) as setup:
        assert setup.complete().status_code == 200
    assert has_several_prompts({"prompt": [[1, 2], [3]]})
    assert not has_several_prompts({"prompt": [1, 2]})
    assert not has_several_prompts({"prompt": ["one"]})


def test_params_sent_by_the_client_reach_no_node() -> None:
    with running([]) as setup:
        setup.complete(kv_transfer_params={"capability": "stolen"})
        assert setup.decode.bodies == [PROMPT]
    assert prefill_body({"kv_transfer_params": {"capability": "stolen"}})["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }


def test_errors_of_the_decode_node() -> None:
    with running() as setup:
        setup.decode.status = 400
        assert setup.complete().status_code == 400
    with serve(build_app(ProxyConfig((), (unused_url(),)))) as url:
        for answer in (httpx.post(f"{url}/v1/completions", json=PROMPT), httpx.get(f"{url}/v1/models")):
            assert answer.status_code == 502
            assert "no answer from http://127.0.0.1" in answer.json()["error"]["message"]


def test_decode_node_breaks_off_a_stream() -> None:
    with running() as setup:
        setup.decode.break_stream = True
        answer = setup.complete(stream=True)
        first, second = answer.text.strip().split("\n\n")
        assert first == "data: one" and '"decode_failed"' in second
        assert setup.counter("decode_failures_total") == 1


@pytest.mark.parametrize("held", ["prefill", "decode"])
def test_client_that_leaves_cancels_the_node_at_work(held: str) -> None:
    with running() as setup:
        node: FakeNode = getattr(setup, held)
        node.hold_answer = True
        with pytest.raises(httpx.ReadTimeout):
            setup.client.post("/v1/completions", json=PROMPT, timeout=0.5)
        assert node.disconnected.wait(WAIT_S)
        assert setup.counter("disconnects_total") == 1
        assert held == "decode" or setup.decode.requests == []


def test_client_that_leaves_a_stream_cancels_the_decode_node() -> None:
    with running() as setup:
        with setup.client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as answer:
            assert next(answer.iter_raw()) == b"data: one\n\n"
        assert setup.decode.disconnected.wait(WAIT_S)


def test_nodes_take_turns() -> None:
    nodes = [FakeNode(PARAMS), FakeNode(PARAMS), FakeNode(), FakeNode()]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serve(node.app)) for node in nodes]
        url = stack.enter_context(serve(build_app(ProxyConfig(tuple(urls[:2]), tuple(urls[2:])))))
        for _ in range(4):
            httpx.post(f"{url}/v1/completions", json=PROMPT)
    assert [len(node.requests) for node in nodes] == [2, 2, 2, 2]


def test_bad_bodies_health_and_models() -> None:
    with running() as setup:
        assert setup.client.post("/v1/completions", content=b"{").status_code == 400
        assert setup.client.post("/v1/completions", content=b"[1]").status_code == 400
        assert setup.client.get("/health").json() == {"status": "ok"}
        assert setup.client.get("/v1/models").json() == {"data": [{"id": "fake"}]}
        assert setup.counter("requests_total") == 2


def test_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match="--decode"):
        ProxyConfig((), ())
    with pytest.raises(ValueError, match="prefill_timeout_s is 0"):
        ProxyConfig((), ("http://127.0.0.1:1",), prefill_timeout_s=0)
