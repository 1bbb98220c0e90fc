"""The speed benchmark: what it computes, its goals one by one, and what it prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_speed
from benchmarks.plan_speed import (
    INTERLEAVES,
    LENGTHS,
    LONG,
    REPLICATED,
    SOURCE,
    TARGET,
    TOKEN_BYTES,
    Caches,
    Spread,
    Timing,
    goals,
    main,
    measure,
    segment_sizes,
)
from layouts import ParallelLayout, plan_transfer, plan_volume


def quick(num_tokens: int, interleave_tokens: int, repetitions: int, target: ParallelLayout = TARGET) -> Timing:
    """A row that meets every goal."""
    return Timing(
        num_tokens=num_tokens,
        interleave_tokens=interleave_tokens,
        num_target_ranks=target.num_ranks,
        num_runs=num_tokens // interleave_tokens,
        num_segments=61 * num_tokens // interleave_tokens,
        segment_bytes=num_tokens * 61 * TOKEN_BYTES,
        plan_ms=Spread(4.0, 3.0, 9.0),
        lowered_ms=Spread(90.0, 80.0, 99.0) if interleave_tokens == 64 else None,
        peak_bytes=60 * num_tokens // interleave_tokens,
    )


ROWS = [quick(n, tokens, 7) for tokens in INTERLEAVES for n in LENGTHS] + [quick(LONG, 1, 7, REPLICATED)]


@pytest.mark.parametrize("interleave_tokens", INTERLEAVES)
def test_sizes_and_segments_are_those_of_the_plan(interleave_tokens: int) -> None:
    source, target = (replace(layout, interleave_tokens=interleave_tokens, num_layers=3) for layout in (SOURCE, TARGET))
    plan = plan_transfer(source, target, 0, 1000)
    volume = plan_volume(plan)
    runs_of_all_layers, num_bytes = segment_sizes(plan)
    assert (runs_of_all_layers, num_bytes) == (3 * volume.num_runs, volume.num_entries * TOKEN_BYTES)
    num_segments, lowered_bytes = Caches.of(source, target, 1000).lower(plan)
    assert lowered_bytes == num_bytes
    assert 0.8 * volume.num_segments <= num_segments <= volume.num_segments  # blocks may touch by chance


def test_a_row() -> None:
    row = measure(1000, 64, 7)
    assert (row.num_tokens, row.interleave_tokens, row.num_target_ranks, row.num_runs) == (1000, 64, 4, 16)
    assert (row.num_segments, row.segment_bytes) == (16 * 61, 1000 * 61 * TOKEN_BYTES)
    assert row.lowered_ms is not None
    assert 0 < row.plan_ms.least <= row.plan_ms.median <= row.plan_ms.most
    assert row.bytes_per_run >= 48
    wide = measure(1000, 64, 7, REPLICATED)
    assert (wide.num_target_ranks, wide.num_runs, wide.num_segments) == (32, 16, 8 * 16 * 61)


def test_goals_are_missed_one_by_one() -> None:
    assert all(goal.is_met for goal in goals(ROWS))
    for index, changes, name in (
        (2, {"plan_ms": Spread(5.1, 3.0, 9.0)}, "plan and segment sizes, 32,768 tokens, I=1"),
        (12, {"plan_ms": Spread(5.1, 3.0, 9.0)}, "plan and segment sizes, 32,768 tokens, I=64"),
        (14, {"lowered_ms": Spread(151.0, 3.0, 999.0)}, "plan and 999,424 segments with addresses"),
        (4, {"peak_bytes": 91 * LONG}, "memory per run, 1,048,576 runs against 131,072"),
        (14, {"plan_ms": Spread(11.0, 3.0, 20.0)}, "time of 32 times the tokens in half the runs"),
        (15, {"plan_ms": Spread(6.1, 3.0, 20.0)}, "time of 8 times the ranks in the same runs"),
    ):
        rows = list(ROWS)
        rows[index] = replace(rows[index], **changes)
        missed = [goal.name for goal in goals(rows) if not goal.is_met]
        assert len(missed) == 1 and missed[0].startswith(name)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_speed, "measure", quick)
    file = tmp_path / "speed.json"
    assert main(["--check", "--json", str(file), "--repetitions", "9"]) == 0
    out = capsys.readouterr().out
    assert out.count("goal <=") == len(goals(ROWS)) and "MISSED" not in out
    assert "repetitions  9" in out and "4.00 (3.00..9.00)" in out
    found = json.loads(file.read_text())
    assert set(found) == {"configuration", "goals", "rows"} and len(found["rows"]) == len(ROWS)
    assert found["rows"][0]["plan_ms"] == {"median": 4.0, "least": 3.0, "most": 9.0}
    monkeypatch.setattr(
        plan_speed, "measure", lambda *sizes: replace(quick(*sizes), plan_ms=Spread(200.0, 200.0, 200.0))
    )
    assert main(["--check"]) == 1
    assert "200.00 ms   goal <= 150 ms         MISSED" in capsys.readouterr().out
    assert main([]) == 0
