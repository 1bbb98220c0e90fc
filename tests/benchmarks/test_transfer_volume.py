"""The volume benchmark: its goals, its files, and its segments against the ones that transports get."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import transfer_volume
from benchmarks.transfer_volume import Comparison, Report, agree, as_json, as_markdown, goals, main
from benchmarks.volume_cases import DISTRIBUTIONS, GQA_8, LENGTHS, MLA_576, MODELS, Overhead, Resharding, price
from layouts import ParallelLayout, Span, plan_transfer, plan_volume, predict_volume
from transport.regions import Region
from transport.segments import lower_route

PANELS = ((4, 16), (8, 64), (16, 128))
"""(CP size, block size) that are drawn."""

REPORT = Report(
    cases=[price(model, *sizes, length) for model in MODELS for sizes in PANELS for length in (1, 16, 1000)],
    overheads=[Overhead(each.name, cp, 64, 3.0, 2.0, 1.5) for each in DISTRIBUTIONS for cp in (1, 8)],
    reshardings=[Resharding(m.name, b, 16, 100, 10) for m in MODELS for b in (16, 64, 128)],
    comparison=Comparison(3, 0, (1.0, 2.0, 4.0), (2.0, 3.0, 9.0)),
    cpu_s=1.0,
)


def test_the_known_case() -> None:
    case = price(MLA_576, 4, 16, 16)
    assert case.content_bytes == 16 * 61 * 1152
    assert (case.blocks_i1, case.blocks_ib, case.empty_blocks_ib) == (4, 1, 3)
    assert case.whole_i1_bytes == 4 * case.content_bytes == case.listed_bytes
    assert case.whole_ib_bytes == case.exact_i1_bytes == case.exact_ib_bytes == case.content_bytes


def test_goals_are_met_and_missed_one_by_one() -> None:
    assert all(goal.met for goal in goals(REPORT))
    slow, wrong = replace(REPORT, cpu_s=61.0), replace(REPORT, comparison=replace(REPORT.comparison, num_different=1))
    for report in (slow, wrong):
        assert [goal.met for goal in goals(report)].count(False) == 1


def test_check_prints_one_line_per_goal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_volume, "measure", lambda: REPORT)
    assert main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(goals(REPORT)) and all(line.startswith("ok ") and "(goal " in line for line in lines)
    monkeypatch.setattr(transfer_volume, "measure", lambda: replace(REPORT, cpu_s=100.0))
    assert main(["--check"]) == 1
    assert "MISS CPU time of the benchmark, s: 100.0 (goal <= 30)" in capsys.readouterr().out


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(transfer_volume, "measure", lambda: REPORT)
    files = ["--json", str(tmp_path / "v.json"), "--markdown", str(tmp_path / "v.md"), "--png-dir", str(tmp_path / "p")]
    assert main(files) == 0
    assert "cp_sizes: (1, 2, 4, 8, 16)" in capsys.readouterr().out
    found = json.loads((tmp_path / "v.json").read_text())
    assert found == json.loads(json.dumps(as_json(REPORT)))
    assert found["formula_ms"] == {"median": 2.0, "minimum": 1.0, "maximum": 4.0}
    assert (tmp_path / "v.md").read_text() == as_markdown(REPORT)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {f"volume_{name}.png" for name in ("short_prompt", "by_length", "by_load", "segments")}


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_volume, "measure", lambda: REPORT)
    assert main(["--json", "no/such/folder.json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_lengths_of_a_distribution_are_fixed_and_within_the_range() -> None:
    for distribution in DISTRIBUTIONS:
        lengths = distribution.lengths
        assert lengths == distribution.lengths == tuple(sorted(lengths))
        assert LENGTHS[0] <= lengths[0] < distribution.median < lengths[-1] <= LENGTHS[-1]


def test_agreement_allows_more_messages_only() -> None:
    one, other = (
        predict_volume(ParallelLayout(), ParallelLayout(), 0, 9),
        predict_volume(ParallelLayout(), ParallelLayout(), 0, 10),
    )
    more = replace(one, ranks=(replace(one.ranks[0], num_messages=2),))
    assert agree(one, one) and agree(one, more)
    assert not agree(more, one) and not agree(one, other)


@pytest.mark.parametrize(("source_i", "target_i", "length"), [(1, 1, 100), (16, 16, 250), (1, 16, 99), (4, 2, 333)])
def test_segments_are_those_that_a_transport_gets(source_i: int, target_i: int, length: int) -> None:
    """With blocks and heads that touch nowhere, as the count assumes."""
    sides = [GQA_8.layout(cp, 16, interleave) for cp, interleave in ((4, source_i), (2, target_i))]
    plan = plan_transfer(*(replace(side, num_layers=2) for side in sides), 0, length)
    regions = {layer: _region(layer) for layer in range(2)}
    scattered = [2 * block for block in range(64)]
    lowered = [lower_route(route, regions, scattered, regions, scattered) for route in plan.routes]
    assert sum(map(len, lowered)) == plan_volume(plan).num_segments
    assert sum(segments.num_bytes for segments in lowered) == plan_volume(plan).num_entries * 512


def _region(layer: int) -> Region:
    """Eight heads of 16 tokens of 512 bytes per block, with a gap after each head."""
    head_stride = 17 * 512
    return Region(
        layer=layer,
        heads=Span(0, 8),
        base=layer << 32,
        num_blocks=200,
        block_tokens=16,
        block_stride=8 * head_stride,
        head_stride=head_stride,
        token_stride=512,
        token_bytes=512,
        page="plain",
        device="cpu",
    )
