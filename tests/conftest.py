"""The exhaustive marker, and the number of cases that laws and grids were checked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

CASES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: the whole domain of a law or grid (minutes; `make test-exhaustive`)"
    )
    config.stash[CASES] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out exhaustive tests unless the marker expression asks for them by name."""
    if "exhaustive" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cases = config.stash[CASES]
    if cases:
        counts = ", ".join(f"{number:,} {kind}" for kind, number in sorted(cases.items()))
        terminalreporter.write_line(f"cases checked: {counts}")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Call it with a kind, and a number if not one, of cases checked; the sums are printed at the end."""
    cases: Counter[str] = Counter()

    def add(kind: str, number: int = 1) -> None:
        cases[kind] += number

    yield add
    request.config.stash[CASES].update(cases)
