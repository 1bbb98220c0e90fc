"""The soak of `python -m tests.chaos.soak`, in the size of a gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import soak


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_bounded_soak(tmp_path: Path) -> None:
    """Every request right or rightly failed within its bound, every block and lease back."""
    report = soak(tmp_path, num_requests=120, num_blows=4, seed=4)
    print(*report.lines(), sep="\n")
    assert not report.problems
    assert report.blows.total() == 4
