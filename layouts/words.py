"""Numbers and rows as text for messages and tables. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, shortened: `0, 2..5`."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}")
    return ", ".join(parts)


def align(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows of texts as lines with aligned columns; the columns in `right` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = set(right)
    return [
        "  ".join(
            f"{text:>{width}}" if index in flush else f"{text:{width}}"
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
