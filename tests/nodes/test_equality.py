"""Real prefill and decode nodes of different layouts produce exactly the tokens of one plain node.

Every pair moves exactly the bytes its decode node lacks, and leaves both nodes without a held block or open lease.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from layouts import ParallelLayout
from tests.nodes.cluster import HEAD_SIZE, Layout, VllmNode, at_once, hand_over, plain_node
from tests.nodes.conftest import Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HEAD_BYTES = 2 * HEAD_SIZE * 4
"""Key and value of one token of one head in float32."""
NUM_LAYERS = 2
VOCABULARY = 512

TP1 = Layout(policy="fail")
TP2_DCP2_I1 = Layout(tp=2, dcp=2, interleave=1)
TP2_DCP2 = Layout(tp=2, dcp=2)
PAIRS = {  # in an order that starts few nodes twice
    "TP2 -> TP4 DCP2, one KV head": (Layout(tp=2), Layout(tp=4, dcp=2)),
    "PCP2 DCP2 -> TP1, half the block": (Layout(pcp=2, dcp=2, block=32, interleave=32), TP1),
    "PCP2 -> TP2 DCP2, twice the block": (Layout(pcp=2, block=8, interleave=8), TP2_DCP2),
    "TP2 -> TP1, two KV heads": (Layout(kv_heads=2, tp=2), Layout(kv_heads=2)),
    "TP2 DCP2 I=1 -> TP1": (TP2_DCP2_I1, TP1),
    "TP2 DCP2 I=1 -> TP2 DCP2 I=B": (TP2_DCP2_I1, TP2_DCP2),
    "TP1 -> TP2 DCP2": (TP1, TP2_DCP2),
}

Trio = tuple[VllmNode, VllmNode, VllmNode]
"""(source, target, plain node of the same model)"""


@pytest.fixture(scope="module", params=PAIRS.values(), ids=PAIRS.keys())
def nodes(request: pytest.FixtureRequest, farm: Farm) -> Trio:
    source, target = request.param
    plain, *pair = farm.get(plain_node(source.kv_heads), source, target)
    return pair[0], pair[1], plain


def prompt(pair: Trio, kind: str, num_tokens: int) -> list[int]:
    """Random tokens that no other test sends to these nodes."""
    source, target, _ = pair
    generator = random.Random(f"{source.node.name} {target.node.name} {kind} {num_tokens}")
    return [generator.randrange(2, VOCABULARY) for _ in range(num_tokens)]


def bytes_of(layout: Layout, start: int, stop: int) -> int:
    """Bytes that positions [start, stop) occupy on all ranks of a node, from the closed forms of `layouts`."""
    parallel = ParallelLayout(
        tp=layout.tp,
        pcp=layout.pcp,
        dcp=layout.dcp,
        num_kv_heads=layout.kv_heads,
        interleave_tokens=layout.interleave,
        block_tokens=layout.block,
        num_layers=NUM_LAYERS,
    )
    count = parallel.interleave.num_local_tokens
    return sum(
        (count(stop, held.shard) - count(start, held.shard)) * held.heads.size * held.layers.size * HEAD_BYTES
        for held in parallel.placement.holdings
    )


def check_one(pair: Trio, tokens: list[int], already: int) -> None:
    """One request through the pair: the plain node's tokens, and exactly the missing bytes."""
    source, target, plain = pair
    target.changes(lambda gained: True)
    assert hand_over(source, target, tokens).tokens == plain.complete(tokens).tokens
    gained = target.changes(lambda gained: any(key.startswith("loads") for key in gained))
    stop = len(tokens) - 1
    outcome = "loads|loaded" if already < stop else "loads|local_hit"
    assert {key: value for key, value in gained.items() if key.startswith("loads")} == {outcome: 1}
    assert gained.get("bytes_moved", 0) == gained.get("bytes_payload", 0) == bytes_of(target.layout, already, stop)


def lengths(layout: Layout) -> list[int]:
    block, virtual = layout.block, layout.virtual_block
    return sorted({1, block - 1, block, block + 1, virtual - 1, virtual, virtual + 1, 3 * virtual + 5})


def test_lengths_around_every_border(nodes: Trio) -> None:
    for num_tokens in lengths(nodes[1].layout):
        check_one(nodes, prompt(nodes, "single", num_tokens), already=0)
    nodes[0].assert_idle()
    nodes[1].assert_idle()


def test_repeated_and_extended_prompts_move_only_what_is_missing(
    nodes: Trio,
) -> None:
    virtual = nodes[1].layout.virtual_block
    first = prompt(nodes, "repeated", 3 * virtual + 5)
    check_one(nodes, first, already=0)
    check_one(nodes, first, already=3 * virtual)
    check_one(nodes, first + prompt(nodes, "extension", 2 * virtual), already=3 * virtual)
    whole = prompt(nodes, "whole", 2 * virtual + 1)
    check_one(nodes, whole, already=0)
    check_one(nodes, whole, already=2 * virtual)
    nodes[0].assert_idle()
    nodes[1].assert_idle()


def test_batch_of_six(nodes: Trio) -> None:
    source, target, plain = nodes
    prompts = [prompt(nodes, "batch", num_tokens) for num_tokens in (3, 20, 33, 64, 90, 150)]
    expected = [plain.complete(tokens).tokens for tokens in prompts]
    answers = at_once([partial(hand_over, source, target, tokens) for tokens in prompts])
    assert [answer.tokens for answer in answers] == expected
    source.assert_idle()
    target.assert_idle()


def test_each_node_alone(nodes: Trio) -> None:
    """Without a transfer: chunked prefill beside decodes, on the layout's own attention."""
    source, target, plain = nodes
    prompts = [prompt(nodes, "alone", num_tokens) for num_tokens in (2, 17, 65, 130)]
    expected = [plain.complete(tokens).tokens for tokens in prompts]
    for node in (source, target):
        answers = at_once([partial(node.complete, tokens) for tokens in prompts])
        assert [answer.tokens for answer in answers] == expected
