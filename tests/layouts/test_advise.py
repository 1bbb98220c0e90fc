"""Which layout is advised, why, and what the advice counts on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layouts import ConfigError, ParallelLayout
from layouts.advise import (
    BLOCK_TOKENS,
    Load,
    ModelShape,
    advise_decode,
    advise_prefill,
    card_bytes,
    gather_costs,
    max_tokens,
    num_sequences,
    tp_layouts,
)
from layouts.model_config import read_model_config

GIB = 1 << 30
MLA = ModelShape(61, 1, 1152, True, 128, 192, 128)
GQA = ModelShape(80, 8, 512, False, 64, 128, 128)
LOAD = Load(
    num_cards=8,
    card_bytes=60 * GIB,
    context_tokens=131_072,
    concurrency=4,
    weights_tp=1,
    ttft_s=10.0,
    prefill_tokens_per_s=8000.0,
)


def sizes(layout: ParallelLayout) -> tuple[int, int, int]:
    return layout.tp, layout.pcp, layout.dcp


def test_bytes_per_token_are_the_known_ones() -> None:
    assert MLA.token_bytes == 70_272
    assert GQA.token_bytes == 327_680


def test_short_and_busy_is_data_parallel_only() -> None:
    load = replace(LOAD, context_tokens=4096, concurrency=200)
    decode, prefill = advise_decode(GQA, load), advise_prefill(GQA, load)
    assert (sizes(decode.layout), decode.num_instances) == ((1, 1, 1), 8)
    assert decode.rule == "short sequences fit without sharding: DP only"
    assert (sizes(prefill.layout), prefill.rule) == ((1, 1, 1), "time to first token is met: no PCP")


def test_a_sequence_larger_than_a_card_is_split_by_dcp() -> None:
    load = replace(LOAD, context_tokens=1 << 20, concurrency=4, weights_tp=8)
    choice = advise_decode(MLA, load)
    assert (sizes(choice.layout), choice.num_instances) == ((8, 1, 8), 1)
    assert choice.rule == "one sequence exceeds the cards without sharding: split positions by DCP"
    assert "DCP <= TP = 8" in choice.reason


def test_heads_are_split_before_positions() -> None:
    choice = advise_decode(GQA, replace(LOAD, num_cards=16, card_bytes=20 * GIB, concurrency=8))
    assert (sizes(choice.layout), choice.num_instances) == ((2, 1, 1), 8)
    assert choice.rule == "one sequence exceeds the cards without sharding: split KV heads by TP"


def test_copies_that_waste_memory_are_made_shards() -> None:
    """One sequence fits on each of 8 copies, but not eight of them."""
    choice = advise_decode(MLA, replace(LOAD, weights_tp=8, card_bytes=20 * GIB, concurrency=8))
    assert choice.rule == "the sequences together exceed the cards without sharding: split positions by DCP"
    assert choice.layout.dcp > 1


def test_short_memory_gets_the_layout_that_holds_most() -> None:
    load = replace(LOAD, weights_tp=8, card_bytes=20 * GIB, concurrency=1000)
    choice = advise_decode(MLA, load)
    assert choice.rule == "memory is short: most sequences"
    assert "1,000 wanted" in choice.reason
    most = max(num_sequences(MLA, layout, load) * 8 // layout.tp for layout in tp_layouts(MLA, load))
    assert num_sequences(MLA, choice.layout, load) * choice.num_instances == most


def test_a_slow_prompt_and_idle_cards_get_pcp() -> None:
    choice = advise_prefill(MLA, replace(LOAD, concurrency=1))
    assert (sizes(choice.layout), choice.num_instances) == ((1, 2, 1), 4)
    assert choice.rule == "too slow and load is moderate: add PCP"
    assert "every PCP rank stores all KV" in choice.reason


def test_pcp_shards_kv_that_does_not_fit_on_each_rank() -> None:
    load = replace(LOAD, num_cards=16, card_bytes=30 * GIB, context_tokens=1_000_000, concurrency=1)
    choice = advise_prefill(MLA, load)
    assert sizes(choice.layout) == (4, 4, 4)
    assert "is sharded too" in choice.reason


def test_a_busy_node_gets_no_pcp() -> None:
    choice = advise_prefill(MLA, replace(LOAD, concurrency=8))
    assert (sizes(choice.layout), choice.rule) == ((1, 1, 1), "load is not moderate: DP, no PCP")


@pytest.mark.parametrize("model", [MLA, GQA])
@pytest.mark.parametrize("num_cards", [1, 4, 8, 16, 24])
def test_every_advised_layout_holds_a_sequence_and_uses_cards_that_exist(model: ModelShape, num_cards: int) -> None:
    for context in (100, 20_000, 131_072, 1 << 20):
        for concurrency in (1, 7, 300):
            load = replace(LOAD, num_cards=num_cards, context_tokens=context, concurrency=concurrency)
            try:
                choices = advise_decode(model, load), advise_prefill(model, load)
            except ConfigError as error:
                assert "context: got" in str(error)
                assert all(max_tokens(model, each, load.card_bytes) < context for each in tp_layouts(model, load))
                continue
            for choice in choices:
                assert choice.num_instances * choice.layout.num_ranks <= num_cards
                assert card_bytes(model, choice.layout, context) <= load.card_bytes


def test_dcp_stops_where_ranks_would_hold_different_heads() -> None:
    layouts = list(tp_layouts(GQA, replace(LOAD, num_cards=32)))
    assert max(layout.dcp for layout in layouts if layout.tp == 16) == 2
    assert max(layout.dcp for layout in layouts if layout.tp == 32) == 4
    assert {layout.dcp for layout in layouts if layout.tp <= 8} == {1}


def test_card_bytes_are_whole_blocks_of_the_fullest_rank() -> None:
    layout = ParallelLayout(tp=4, dcp=4, mla=True, num_layers=61, block_tokens=64, interleave_tokens=64)
    assert card_bytes(MLA, layout, 1) == 64 * 61 * 1152
    assert card_bytes(MLA, layout, 4 * 64 + 1) == 2 * 64 * 61 * 1152
    longest = max_tokens(MLA, layout, GIB)
    assert card_bytes(MLA, layout, longest) <= GIB < card_bytes(MLA, layout, longest + 1)
    assert BLOCK_TOKENS == 64


def test_gathering_queries_wins_above_the_crossover() -> None:
    costs = gather_costs(GQA, tp=8)
    assert costs.context_bytes == 512
    assert costs.query_bytes == 8 * ((128 + 128) * 2 + 4)
    new_tokens, context = 1000, round(1000 * costs.crossover)
    assert costs.query_bytes * new_tokens == pytest.approx(costs.context_bytes * context, rel=0.01)


def test_nothing_fits_names_the_longest_that_does() -> None:
    with pytest.raises(ConfigError, match="context: got 131072; allowed: up to 26176 tokens on these cards"):
        advise_decode(GQA, replace(LOAD, card_bytes=GIB))


def test_tp_of_more_cards_than_there_are() -> None:
    with pytest.raises(ConfigError, match="tp with 8 cards: got 16; allowed: 1 to 8"):
        replace(LOAD, weights_tp=16)


def test_no_tp_that_suits_heads_and_cards() -> None:
    with pytest.raises(ConfigError, match="tp with 7 cards and 8 KV heads: got 2"):
        advise_decode(GQA, replace(LOAD, num_cards=7, weights_tp=2))


def test_model_config_of_gqa_and_mla(tmp_path: Path) -> None:
    gqa = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": gqa}))
    assert read_model_config(tmp_path, 2) == GQA
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 61, "num_attention_heads": 128, **latent}))
    assert read_model_config(tmp_path / "config.json", 2) == MLA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "got list; allowed: a JSON object"),
        ("{}", "key num_hidden_layers: got None; allowed: an integer of at least 1"),
        ('{"num_hidden_layers": "many"}', "key num_hidden_layers: got 'many'"),
    ],
)
def test_bad_model_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path, 2)


def test_missing_model_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*allowed: a config\.json or its folder"):
        read_model_config(tmp_path / "nothing.json", 2)
