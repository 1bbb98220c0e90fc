"""Laws of the cost of a path, and what the command prints of them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attention.cost import AttentionShape, Batch, PathName, Rates, choose_path, path_costs, reduces
from kvweave import main
from layouts import ConfigError

SHAPE = AttentionShape(query_heads=8, kv_heads=1, key_size=128, value_size=128, entry_size=256)
SLOW_LINK = Rates(link_bytes_per_s=1e9, overlap=0.0)


def batch(new: int, context: int, pcp: int = 4, num_shards: int = 4) -> Batch:
    return Batch((new,), (context,), pcp, num_shards, workspace_tokens=8192)


def test_pairs_are_those_of_causal_attention() -> None:
    assert Batch((3, 1), (0, 5), 1, 1).num_pairs == (1 + 2 + 3) + 6


def test_longer_contexts_move_queries_and_not_keys() -> None:
    choices = [choose_path(SHAPE, batch(4096, context), SLOW_LINK) for context in (0, 1 << 12, 1 << 17, 1 << 20)]
    assert choices[0] == PathName.KEYS
    assert choices[-1] == PathName.QUERIES
    assert sorted(choices, key=list(PathName).index) == choices


def test_crossover_is_where_bytes_are_equal() -> None:
    """Without latency and merging: context * entry * (W - 1) / W against own rows * (query + result) * (W - 1)."""
    rates = Rates(exchange_s=0.0, memory_bytes_per_s=1e30, overlap=0.0)
    crossover = (4096 // 4) * (SHAPE.query_bytes + SHAPE.result_bytes) * 4 // SHAPE.entry_bytes
    for context, expected in ((crossover - 64, PathName.KEYS), (crossover + 64, PathName.QUERIES)):
        assert choose_path(SHAPE, batch(4096, context), rates, (PathName.KEYS, PathName.QUERIES)) == expected


def test_whole_caches_exchange_no_context() -> None:
    whole = [path_costs(SHAPE, batch(4096, context, num_shards=1), SLOW_LINK) for context in (0, 1 << 20)]
    for path in PathName:
        assert whole[0][path].travel_s == whole[1][path].travel_s
        assert whole[0][path].peak_bytes == whole[1][path].peak_bytes


def test_memory_of_keys_and_ring_does_not_grow_with_the_context() -> None:
    costs = [path_costs(SHAPE, batch(4096, context), SLOW_LINK) for context in (1 << 14, 1 << 20)]
    for path in PathName:
        assert costs[0][path].peak_bytes == costs[1][path].peak_bytes
    assert costs[0][PathName.RING].peak_bytes < costs[0][PathName.KEYS].peak_bytes


def test_what_does_not_fit_is_not_chosen() -> None:
    costs = path_costs(SHAPE, batch(1 << 16, 0), SLOW_LINK)
    assert choose_path(SHAPE, batch(1 << 16, 0), SLOW_LINK) == PathName.KEYS
    free = costs[PathName.RING].peak_bytes
    assert choose_path(SHAPE, batch(1 << 16, 0), SLOW_LINK, free_bytes=free) == PathName.RING
    assert choose_path(SHAPE, batch(1 << 16, 0), SLOW_LINK, free_bytes=0) == PathName.RING


def test_ring_hides_its_travel_but_no_more_than_computation_lasts() -> None:
    hidden, bare = (
        path_costs(SHAPE, batch(1 << 16, 0), replace(SLOW_LINK, overlap=overlap))[PathName.RING]
        for overlap in (1.0, 0.0)
    )
    assert hidden.travel_s == max(0.0, bare.travel_s - bare.compute_s)


def test_expansion_of_latents_counts_where_it_happens() -> None:
    """Keys that travel are expanded on every rank, keys that stay on one."""
    expanding = replace(SHAPE, expand_flops=10**6)
    extra = {
        path: path_costs(expanding, batch(4096, 8192), SLOW_LINK)[path].compute_s
        - path_costs(SHAPE, batch(4096, 8192), SLOW_LINK)[path].compute_s
        for path in PathName
    }
    assert extra[PathName.KEYS] == extra[PathName.RING] == pytest.approx(4 * extra[PathName.QUERIES])


def test_endings_are_chosen_by_size() -> None:
    in_network = Rates(reduces_in_network=True)
    assert not reduces(4, SHAPE, 8, in_network)
    assert reduces(4096, SHAPE, 8, in_network)
    assert not reduces(4096, SHAPE, 8, Rates())


@pytest.mark.parametrize("wrong", [{"flops_per_s": 0.0}, {"overlap": 1.5}, {"exchange_s": -1.0}])
def test_impossible_rates_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="speeds above 0"):
        Rates(**wrong)


def test_cost_needs_no_torch() -> None:
    code = "import sys, attention.cost, attention.crossover; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return str(tmp_path)


def test_command_prints_and_draws_where_the_path_changes(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    arguments = ["crossover", "--model-config", model, "--tp", "8", "--pcp", "4", "--overlap-percent", "0"]
    assert main([*arguments, "--png", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG")
    line = next(line for line in lines if "8,192 new tokens" in line)
    first, flip = line.split(": ")[1].split("; ")
    assert first == "all-gather KV"
    context = int(flip.removeprefix("all-gather Q from ").removesuffix(" tokens of context").replace(",", ""))
    shape = AttentionShape(query_heads=8, kv_heads=1, key_size=128, value_size=128, entry_size=256)
    rates = Rates(overlap=0.0)
    for tokens, expected in ((context - 1, PathName.KEYS), (context, PathName.QUERIES)):
        assert choose_path(shape, Batch((8192,), (tokens,), 4, 4, 16384), rates) == expected


def test_command_refuses_shards_that_pcp_does_not_allow(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crossover", "--model-config", model, "--tp", "2", "--pcp", "4", "--shards", "2"]) == 2
    assert "--shards with --tp 2 and --pcp 4: got 2; allowed: 1, 4, 8" in capsys.readouterr().err
