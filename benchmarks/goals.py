"""What a benchmark is measured against: one line per goal, and whether all are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its bound, `relation` saying on which side of the bound it has to be."""

    name: str
    value: float
    relation: Literal["<=", ">="]
    bound: float

    @property
    def is_met(self) -> bool:
        """Whether the value is on the right side; a value that could not be measured (NaN) is not."""
        return self.value <= self.bound if self.relation == "<=" else self.value >= self.bound

    def __str__(self) -> str:
        verdict = "ok" if self.is_met else "MISSED"
        return f"{verdict:6} {self.name}: {self.value:.4g} (goal {self.relation} {self.bound:g})"


def report_goals(goals: Iterable[Goal]) -> int:
    """Prints a line per goal; returns 0 when all are met, else 1."""
    goals = list(goals)
    for goal in goals:
        print(goal)
    missed = sum(not goal.is_met for goal in goals)
    print(f"{len(goals) - missed} goals met, {missed} missed")
    return 1 if missed else 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and spread of repeated measurements, in their own unit."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.least:.4g} .. {self.most:.4g}]"
