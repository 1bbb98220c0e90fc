"""What the attention benchmark counts, and that its goals can be missed."""

from dataclasses import replace

import pytest

from attention.cost import PathName, Rates
from benchmarks.attention import Timing, chosen_path, goals, imbalance, pairs_per_rank
from benchmarks.attention_cases import PREFILL_WORKSPACE
from benchmarks.goals import Sample


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 32, 100])
def test_chunk_swap_gives_all_ranks_the_same_work(num_ranks: int, chunk: int) -> None:
    num_tokens = 2 * num_ranks * chunk
    pairs = pairs_per_rank(num_tokens, num_ranks)
    assert sum(pairs) == num_tokens * (num_tokens + 1) // 2
    assert imbalance(pairs) == 1.0


def test_contiguous_rows_are_unequal_work() -> None:
    assert pairs_per_rank(4, 2, contiguous=True) == [1 + 2, 3 + 4]
    assert imbalance(pairs_per_rank(4096, 8, contiguous=True)) > 14


def timing(new: int, context: int, chosen: str = "", **milliseconds: float) -> Timing:
    samples = {name: Sample(value, value, value, 7) for name, value in milliseconds.items()}
    return Timing(new, context, samples, chosen)


def test_goals_are_met_and_missed() -> None:
    times = {"one rank": 10.0, "all-to-all": 6.0} | {str(path): 5.0 for path in PathName}
    decode, prefill = timing(1, 1 << 15, **times), timing(1 << 13, 0, str(PathName.KEYS), **times)
    memory = {"context": 1 << 17, "peak_bytes": 15, "workspace_bytes": 10}
    results = {"decode": [decode], "prefill": [prefill], "memory": [memory]}
    assert [goal.is_met for goal in goals(results)] == [True] * 4
    slow = {**times, "one rank": 7.0, str(PathName.RING): 4.0}
    missed = {
        "decode": [timing(1, 1 << 15, **slow)],
        "prefill": [replace(timing(1 << 13, 0, **slow), chosen=str(PathName.KEYS))],
        "memory": [{**memory, "peak_bytes": 21}],
    }
    assert [goal.is_met for goal in goals(missed)] == [False] * 4


def test_choice_follows_the_rates() -> None:
    slow_link = Rates(link_bytes_per_s=1e6, overlap=0.0)
    assert chosen_path(PREFILL_WORKSPACE, 0, slow_link) == PathName.KEYS
    assert chosen_path(128, 1 << 15, slow_link) == PathName.QUERIES
