"""Life-cycle cases that comparable systems got wrong, on real nodes with small pools: right tokens or a clear error,
within a bound in seconds, and block pools and leases back at their start.

Where each case is tested ("scripted": the real scheduler sides with a scripted network and clock):

| case | here, on real processes | elsewhere |
|---|---|---|
| S2 | test_s2_* | connector/test_cases.py test_s2_* (scripted) |
| S6 | test_s6_* | nodes/test_failures.py test_abort_while_the_load_is_parked; scripted: test_s6_* |
| S7 | test_s7_* | scripted: test_s7_* |
| S8 | test_s8_* | nodes/test_failures.py test_forged_and_used_*; connector/test_pair.py test_forged_params_* |
| S9 | test_s9_* | nodes/test_failures.py test_prefill_node_is_killed_*; scripted: test_s9_* |
| S10 | cannot be forced from outside | connector/test_cases.py test_s10_*; connector/test_life_cycle.py |
| S12 | test_s12_* | scripted: test_s12_* |
| S13 | test_s13_* | scripted: test_s13_* |
| S14 | test_s14_* | transport/test_control.py, transport/test_fuzz.py |
| S15 | test_s15_* | transport/test_control.py test_port_taken_names_the_port |
| S16 | | nodes/test_failures.py test_another_model_*; connector/test_pair.py test_a_peer_* |
| S17 | test_s17_* | scripted: test_s17_* |
| S18 | test_s18_* | nodes/test_failures.py test_rejected_request_*; scripted: test_s18_* |
| S19 | test_s19_* | nodes/test_failures.py test_rejected_request_and_n_equal_two_*; scripted: test_s19_* |
| S20 | cannot be forced from outside | connector/test_cases.py test_s20_*; connector/test_pair.py test_an_error_* |
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import zmq

from tests.chaos.blows import stopped
from tests.chaos.soak import control_ports
from tests.chaos.traffic import forged
from tests.nodes.cluster import READY_TIMEOUT_S, Answer, Layout, VllmNode, at_once, hand_over
from tests.nodes.conftest import Farm
from tests.nodes.test_failures import num_loads, relay
from tests.transport.fuzz_frames import Fuzz
from tests.transport.samples import MESSAGES
from transport.control import messages as wire
from transport.control.client import ControlClient

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BOUND_S = 10.0
PORTS = control_ports(random.Random(os.getpid()))
FOUR_SHARDS = Layout(tp=4, dcp=4, num_blocks=24)
SOURCE = Layout(num_blocks=48, port=PORTS[0])
TARGET = Layout(tp=2, dcp=2, num_blocks=24, port=PORTS[1])
TINY = Layout(num_blocks=8, lease_s=2.0)
"""Seven blocks, 112 tokens."""


@pytest.fixture
def source(farm: Farm) -> VllmNode:
    return farm.get(SOURCE)[0]


@pytest.fixture
def target(farm: Farm) -> VllmNode:
    return farm.get(TARGET)[0]


@pytest.fixture
def tiny(farm: Farm) -> VllmNode:
    return farm.get(TINY)[0]


@contextmanager
def within(bound_s: float) -> Iterator[None]:
    """Context that has to be left within so many seconds."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < bound_s, f"took {took_s:.1f} s, bound {bound_s:g} s"


def prompt(seed: str, num_tokens: int = 70) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 512) for _ in range(num_tokens)]


def outcomes(node: VllmNode, num_expected: int, timeout_s: float = 5.0) -> dict[str, float]:
    """Loads that ended since the last call, by cause and outcome: `num_expected` of them."""
    gained = node.changes(lambda gained: num_loads(gained) >= num_expected, timeout_s)
    return {key.removeprefix("loads|"): value for key, value in gained.items() if key.startswith("loads|")}


def meet(source: VllmNode, target: VllmNode) -> None:
    """The first contact of two nodes is slow; what was counted before does not matter."""
    hand_over(source, target, prompt(f"first contact {time.monotonic()}", 20))
    outcomes(target, 1)


def assert_rest(*nodes: VllmNode, within_s: float = 5.0) -> None:
    for node in nodes:
        node.assert_idle(within_s)


def test_s2_empty_shards_on_either_side(farm: Farm) -> None:
    """One rank read by nobody (37 tokens), shards empty on both sides (5), one token: all blocks are free in 1 s."""
    source, target = farm.get(FOUR_SHARDS, TARGET)
    for reader in (target, source):
        meet(source, reader)
    for reader, num_tokens in [(target, 37), (source, 5), (target, 2), (source, 2), (target, 1)]:
        tokens = prompt(f"S2 {num_tokens} {reader is source}", num_tokens)
        expected = source.complete(tokens).tokens
        with within(BOUND_S):
            assert hand_over(source, reader, tokens).tokens == expected
        source.assert_idle(timeout_s=1.0)
        assert set(outcomes(reader, 1)) == {"loaded" if num_tokens > 1 else "local_hit"}
    assert_rest(source, target)
    farm.stop(FOUR_SHARDS)


def test_s6_blocks_of_an_aborted_load_go_to_the_next_request(source: VllmNode, tiny: VllmNode) -> None:
    """The client leaves while its load is under way; the next request wants the whole pool."""
    first, second = prompt("S6 first"), prompt("S6 second", 100)
    expected = source.complete(second).tokens
    meet(source, tiny)
    with relay(source.prefill(first), num_requests=1) as params:
        with pytest.raises(TimeoutError):
            tiny.complete(first, params, timeout_s=1.0)
        with within(BOUND_S):
            assert hand_over(source, tiny, second).tokens == expected
    ended = outcomes(tiny, 2)
    assert ended["aborted"] == ended["loaded"] == 1
    assert_rest(tiny)
    assert_rest(source, within_s=BOUND_S)


def test_s7_decode_node_stands_still_past_the_lease(tiny: VllmNode, target: VllmNode) -> None:
    """Open is answered while the decode node stands still; when it goes on, its pages belong to others."""
    tokens, others = prompt("S7"), [prompt(f"S7 {number}", 100) for number in range(3)]
    expected = tiny.complete(tokens).tokens
    meet(tiny, target)
    params = tiny.prefill(tokens)
    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as until_the_lease_is_over:
            with stopped(tiny.node):
                waiting = pool.submit(target.complete, tokens, params)
                time.sleep(0.5)
                until_the_lease_is_over.enter_context(stopped(target.node))
            time.sleep(TINY.lease_s + 0.3)
            for other in others:
                tiny.complete(other)
        with within(BOUND_S):
            assert waiting.result().tokens == expected
    (ending,) = outcomes(target, 1)
    assert ending in ("read|failed", "expired|failed", "expired|local_prefill", "silent|local_prefill")
    assert_rest(tiny, target)


def test_s8_no_forged_or_late_params_are_followed(source: VllmNode, target: VllmNode) -> None:
    """Expired ones, and two dozen with wrong types, huge numbers, foreign lives and hosts, all at once."""
    late = prompt("S8 late")
    expected, params = source.complete(late).tokens, source.prefill(late)
    source.assert_idle(timeout_s=SOURCE.lease_s + 5)
    meet(source, target)
    assert target.complete(late, params).tokens == expected
    assert outcomes(target, 1) == {"expired|local_prefill": 1}
    generator = random.Random("S8")
    prompts = [prompt(f"S8 {number}", 20) for number in range(24)]
    texts = [source.complete(tokens).tokens for tokens in prompts]

    def present(tokens: Sequence[int], text: Sequence[int], params: dict[str, Any]) -> None:
        with within(2 * BOUND_S):
            try:
                assert target.complete(tokens, params).tokens == text
            except AssertionError as error:
                assert "answered 4" in str(error)

    at_once([partial(present, *pair, forged(generator)) for pair in zip(prompts, texts, strict=True)])
    gained = target.changes(lambda gained: num_loads(gained) > 0)
    assert not [key for key in gained if key.startswith(("bytes_moved", "segments", "loads|loaded"))]
    assert target.node.is_healthy()
    assert_rest(source, target, within_s=TARGET.lease_s + 5)


def timed(call: Callable[[], Answer]) -> tuple[Answer | OSError, float]:
    """The answer, or the error of a broken connection, and the seconds it took."""
    began = time.monotonic()
    try:
        return call(), time.monotonic() - began
    except OSError as error:
        return error, time.monotonic() - began


def test_s9_prefill_node_then_decode_node_are_killed_and_restarted(source: VllmNode, target: VllmNode) -> None:
    """On the same ports, with requests under way: these end in 10 s, the next ones load, nobody else is restarted."""
    prompts = [prompt(f"S9 {number}", 60) for number in range(6)]
    texts = [source.complete(tokens).tokens for tokens in prompts]
    meet(source, target)
    lives = source.node.pid, target.node.pid
    params = [source.prefill(tokens) for tokens in prompts]
    calls = [partial(target.complete, *pair) for pair in zip(prompts, params, strict=True)]
    with ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(timed, call) for call in calls[:3]]
        source.node.kill()
        endings = [*(future.result() for future in under_way), *(timed(call) for call in calls[3:5])]
    assert [ending.tokens for ending, _ in endings if isinstance(ending, Answer)] == texts[:5]
    assert max(seconds for _, seconds in endings) < BOUND_S
    source.node.start()
    source.node.wait_ready(READY_TIMEOUT_S)
    with within(BOUND_S):
        assert calls[5]().tokens == texts[5]
    assert "unknown|local_prefill" in outcomes(target, len(prompts))
    assert_loads(source, target, "S9 after P")

    with ThreadPoolExecutor(3) as pool:
        params = [source.prefill(tokens) for tokens in prompts]
        under_way = [pool.submit(timed, partial(target.complete, *pair)) for pair in zip(prompts, params, strict=True)]
        target.node.kill()
        endings = [future.result() for future in under_way]
    assert all(isinstance(ending, OSError) or ending.tokens in texts for ending, _ in endings)
    assert max(seconds for _, seconds in endings) < BOUND_S
    source.assert_idle(timeout_s=SOURCE.lease_s + BOUND_S)
    target.node.start()
    target.node.wait_ready(READY_TIMEOUT_S)
    target.changes(lambda gained: True)
    assert_loads(source, target, "S9 after D")
    assert lives[0] != source.node.pid and lives[1] != target.node.pid


def assert_loads(source: VllmNode, target: VllmNode, seed: str) -> None:
    """The next batch is loaded and right, and nothing of it stays."""
    prompts = [prompt(f"{seed} {number}") for number in range(3)]
    texts = [source.complete(tokens).tokens for tokens in prompts]
    with within(BOUND_S):
        answers = at_once([partial(hand_over, source, target, tokens) for tokens in prompts])
    assert [answer.tokens for answer in answers] == texts
    assert outcomes(target, 3) == {"loaded": 3}
    assert_rest(source, target)


def test_s12_decode_node_is_nearly_out_of_blocks(source: VllmNode, tiny: VllmNode) -> None:
    """Seven blocks; A needs 4 + 1, B needs 3 + 1; then requests that end with their first token, and n=2."""
    prompts = [prompt("S12 A", 60), prompt("S12 B", 44)]
    texts = [source.complete(tokens).tokens for tokens in prompts]
    meet(source, tiny)
    params = [source.prefill(tokens) for tokens in prompts]
    with within(BOUND_S):
        answers = at_once([partial(tiny.complete, *pair) for pair in zip(prompts, params, strict=True)])
    assert [answer.tokens for answer in answers] == texts
    assert_rest(source, tiny)

    tokens = prompt("S12 stops", 44)
    text = source.complete(tokens).tokens
    first = tiny.complete(tokens, source.prefill(tokens), stop_token_ids=text[:1])
    assert (first.tokens, first.finish_reason) == (text[:1], "stop")
    ended_on_both = source.complete(tokens, {"do_remote_decode": True}, max_tokens=1, stop_token_ids=text[:1])
    assert tiny.complete(tokens, ended_on_both.params, stop_token_ids=text[:1]).tokens == text[:1]
    with within(BOUND_S):
        assert tiny.complete(tokens, source.prefill(tokens), n=2, temperature=1.0, top_k=1).tokens == text
    assert_rest(source, tiny)


def test_s13_a_stopped_prefill_node_delays_no_other(source: VllmNode, tiny: VllmNode, target: VllmNode) -> None:
    """Its requests wait for their bound and are computed here; those of the other node do not wait with them."""
    prompts, stuck = [prompt(f"S13 {number}") for number in range(10)], [prompt(f"S13 stuck {n}", 40) for n in range(2)]
    texts, stuck_texts = ([source.complete(tokens).tokens for tokens in some] for some in (prompts, stuck))
    meet(source, target)

    def times(some: Sequence[Sequence[int]]) -> list[float]:
        return [timed(partial(hand_over, source, target, tokens))[1] for tokens in some]

    usual_s = statistics.median(times(prompts[:5]))
    params = [tiny.prefill(tokens) for tokens in stuck]
    with ThreadPoolExecutor(2) as pool, stopped(tiny.node):
        waiting = [pool.submit(timed, partial(target.complete, *pair)) for pair in zip(stuck, params, strict=True)]
        time.sleep(0.3)
        beside_s = statistics.median(times(prompts[5:]))
        endings = [future.result() for future in waiting]
    assert beside_s < 3 * usual_s + 0.2, f"{beside_s:.2f} s beside a stopped node, usually {usual_s:.2f} s"
    assert [ending.tokens for ending, _ in endings if isinstance(ending, Answer)] == stuck_texts
    assert max(seconds for _, seconds in endings) < 2 * BOUND_S
    assert outcomes(target, 12) == {"loaded": 10, "silent|local_prefill": 2}
    assert [target.complete(tokens).tokens for tokens in prompts] == texts
    assert_rest(source, target, tiny)


def test_s14_junk_at_the_control_port_of_a_node_that_serves(source: VllmNode, target: VllmNode) -> None:
    """Bad frames are answered, bad connections cut, requests go on; the next good message is served."""
    meet(source, target)
    prompts = [prompt(f"S14 {number}") for number in range(6)]
    texts = [source.complete(tokens).tokens for tokens in prompts]
    params = source.prefill(prompts[0])
    address = params["host"], params["port"]
    fuzz = Fuzz(MESSAGES, seed=14)
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context, context.socket(zmq.DEALER) as attacker:
        serving = pool.submit(lambda: [hand_over(source, target, tokens).tokens for tokens in prompts])
        attacker.set(zmq.LINGER, 0)
        attacker.connect("tcp://{}:{}".format(*address))
        frames = fuzz.messages_of_frames()
        for _ in range(300):
            attacker.send_multipart(next(frames)[1])
            assert attacker.poll(int(1000 * BOUND_S)), "a bad frame was not answered"
            wire.decode_reply(attacker.recv_multipart()[-1])
        for number in range(100):
            with socket.create_connection(address, timeout=BOUND_S) as scan, suppress(OSError):
                scan.sendall(fuzz.connection() if number % 2 else b"")
        attacker.send_multipart(fuzz.cut_off())
        assert serving.result(timeout=2 * BOUND_S) == texts
    client = ControlClient()
    client.start()
    try:
        assert isinstance(client.request(address, wire.Describe(), BOUND_S).result(BOUND_S), wire.Description)
    finally:
        client.close()
    assert_loads_beside(source, target)
    source.assert_idle(timeout_s=SOURCE.lease_s + 5)


def assert_loads_beside(source: VllmNode, target: VllmNode) -> None:
    outcomes(target, 1)
    assert_loads(source, target, "S14 after")


def test_s15_control_port_is_taken(farm: Farm, tiny: VllmNode) -> None:
    """The node does not start, and says which port; with port 0 it advertises the one it found."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        node = farm.make(Layout(num_blocks=8, port=taken)).node
        try:
            node.start()
            assert node.wait_ended(180), "a node whose control port is taken should refuse to start"
        finally:
            node.stop()
        assert f"{taken}" in "".join(line for line in node.log_path.read_text().splitlines() if "Error" in line)
    params = tiny.prefill(prompt("S15"))
    with socket.create_connection((params["host"], params["port"]), timeout=BOUND_S):
        assert params["port"] > 0
    tiny.assert_idle(timeout_s=TINY.lease_s + 5)


def preemptions(node: VllmNode) -> float:
    return node.metrics()["vllm:num_preemptions_total"]


def test_s17_a_loaded_request_is_preempted(source: VllmNode, tiny: VllmNode) -> None:
    """Two requests outgrow the pool: the preempted one is computed here, not loaded again."""
    prompts = [prompt("S17 A", 33), prompt("S17 B", 40)]
    texts = [source.complete(tokens, max_tokens=60).tokens for tokens in prompts]
    meet(source, tiny)
    before = preemptions(tiny)
    params = [source.prefill(tokens) for tokens in prompts]
    with within(2 * BOUND_S):
        calls = [partial(tiny.complete, *pair, max_tokens=60) for pair in zip(prompts, params, strict=True)]
        answers = at_once(calls)
    assert [answer.tokens for answer in answers] == texts
    assert preemptions(tiny) > before
    assert outcomes(tiny, 2) == {"loaded": 2}
    assert_rest(source, tiny)


def test_s17_preemption_while_a_load_is_parked(source: VllmNode, tiny: VllmNode) -> None:
    """The parked load holds blocks which a running request needs: that one waits, both are right."""
    parked, running = prompt("S17 parked", 60), prompt("S17 running", 17)
    texts = source.complete(parked).tokens, source.complete(running, max_tokens=70).tokens
    meet(source, tiny)
    before = preemptions(tiny)
    with relay(source.prefill(parked), num_requests=1) as params, ThreadPoolExecutor(1) as pool, within(2 * BOUND_S):
        waiting = pool.submit(tiny.complete, parked, params)
        time.sleep(0.5)
        assert tiny.complete(running, source.prefill(running), max_tokens=70).tokens == texts[1]
        assert waiting.result().tokens == texts[0]
    assert preemptions(tiny) > before
    ended = outcomes(tiny, 2)
    assert ended.pop("loaded") == 1 and list(ended.values()) == [1] and next(iter(ended)).endswith("|failed")
    assert_rest(tiny)
    assert_rest(source, within_s=BOUND_S)


def test_s18_nothing_to_load_releases_at_once(source: VllmNode, target: VllmNode) -> None:
    """All is here already; less than a block; one token: no lease outlives its request by a second."""
    meet(source, target)
    whole = prompt("S18", 2 * TARGET.virtual_block + 1)
    for tokens, ending in [
        *((whole, "loaded"), (whole, "local_hit"), (prompt("S18 short", 5), "loaded")),
        (prompt("S18 one", 1), "local_hit"),
    ]:
        expected = source.complete(tokens).tokens
        with within(BOUND_S):
            assert hand_over(source, target, tokens).tokens == expected
        source.assert_idle(timeout_s=1.0)
        assert outcomes(target, 1) == {ending: 1}
    assert_rest(target)


def test_s19_the_same_params_at_two_nodes_and_twice_at_one(source: VllmNode, target: VllmNode, tiny: VllmNode) -> None:
    """Each load is validated by itself, the lease ends once, and all four answers are right."""
    tokens = prompt("S19", 50)
    expected = source.complete(tokens).tokens
    for reader in (target, tiny):
        meet(source, reader)
    assert_rest(source)
    source.changes(lambda gained: True)
    params = source.prefill(tokens)
    readers = (target, tiny, target)
    with within(BOUND_S):
        answers = at_once([partial(reader.complete, tokens, params) for reader in readers])
    assert [answer.tokens for answer in answers] == [expected] * 3
    assert target.complete(tokens, params).tokens == expected
    assert sum(outcomes(target, 3).values()) == 3 and sum(outcomes(tiny, 1).values()) == 1
    assert_rest(source, target, tiny, within_s=SOURCE.lease_s + 5)
    gained = source.changes(lambda gained: "leases_granted" in gained)
    ended = sum(value for key, value in gained.items() if key.startswith("leases_ended"))
    assert gained["leases_granted"] == ended == 1
