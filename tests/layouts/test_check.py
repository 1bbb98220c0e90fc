"""`python -m layouts.check`: what it prints, and that the reference finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import layouts.check
from layouts import ParallelLayout, Route, Span, TransferPlan, plan_transfer
from layouts.check import main
from layouts.reference import find_fault


def test_the_command_counts_pairs() -> None:
    command = [sys.executable, "-m", "layouts.check", "--pairs", "20", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20 passed, 0 failed\n", "")


def test_failures_are_counted_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(layouts.check, "find_fault", lambda plan: "wrong" if plan.start else None)
    assert main(["--pairs", "30"]) == 1
    printed = capsys.readouterr()
    passed, failed = (int(part.split()[0]) for part in printed.out.split(", "))
    assert passed + failed == 30 and failed > 5
    assert len(printed.err.splitlines()) == 5 and all(line.endswith(": wrong") for line in printed.err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "0"], "got '0'; allowed: an integer from 1 to 10000000"),
        (["--pairs", "many"], "got 'many'"),
        (["--seed", "-1"], "got '-1'; allowed: an integer from 0"),
        (["--pears", "1"], "unrecognized arguments: --pears 1"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


class Unchecked(TransferPlan):
    """A plan that may be wrong."""

    def __post_init__(self) -> None:
        pass


def wrong(plan: TransferPlan, *routes: Route) -> str | None:
    return find_fault(Unchecked(plan.source, plan.target, plan.start, plan.stop, routes, plan.salt))


def test_the_reference_finds_faults() -> None:
    layout = ParallelLayout(tp=4, dcp=2, mla=True, num_layers=2, block_tokens=4)
    plan = plan_transfer(layout, replace(layout, tp=2), 8, 40)
    first, *others = plan.routes
    assert wrong(plan, *plan.routes) is None
    assert "gets position" in str(wrong(plan, *others))
    assert "2 times" in str(wrong(plan, *plan.routes, first))
    assert "are not those of the source" in str(wrong(plan, replace(first, layers=Span(0, 3)), *others))
    assert "is not in source block" in str(wrong(plan, replace(first, source_rank=1), *others))
    assert "is not in target block" in str(wrong(plan, replace(first, target_rank=1), *others))
    assert "outside 8 .. 39" in str(wrong(plan, *plan_transfer(plan.source, plan.target, 0, 40).routes))


def test_the_reference_finds_an_uneven_spread() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, mla=True), ParallelLayout(), 0, 64)
    whole = replace(plan.routes[0], runs=np.concatenate([route.runs for route in plan.routes]))
    assert wrong(plan, whole) == "replicas give from 0 to 64 entries"
