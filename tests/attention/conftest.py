"""The exhaustive marker, and the number of cases that the paths were checked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest

CASES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive: the whole domain of a law (minutes; `make test-exhaustive`)")
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
        terminalreporter.write_line(f"attention of requests checked against float64, by path: {counts}")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Iterator[Callable[[Mapping[str, int]], None]]:
    """Call it with the number of requests checked by path; the sums are printed at the end of the session."""
    cases: Counter[str] = Counter()
    yield cases.update
    request.config.stash[CASES].update(cases)
