"""Pictures of the attention benchmark. Knows its results, measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = ("#9aa5b1", "#5b9bd5", "#70b77e", "#f4a259", "#e07a9a", "#a58bd0")


def draw(results: dict[str, Any], path: Path) -> None:
    """Decode and prefill times, each configuration's bars beside those of one rank."""
    parts = [(part, results[part]) for part in ("decode", "prefill") if results.get(part)]
    figure = Figure(figsize=(12, 4.2 * len(parts)), layout="constrained", dpi=110)
    for axis, (part, rows) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        _draw_bars(axis, part, rows)
    figure.savefig(path)


def _draw_bars(axis: Any, part: str, rows: Sequence[Any]) -> None:
    names = list(rows[0].samples)
    width = 0.8 / len(names)
    for index, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        places = [row + (index - (len(names) - 1) / 2) * width for row in range(len(rows))]
        medians = [row.samples[name].median for row in rows]
        spread = [
            [row.samples[name].median - row.samples[name].least for row in rows],
            [row.samples[name].most - row.samples[name].median for row in rows],
        ]
        axis.bar(places, medians, width, yerr=spread, color=color, label=name, error_kw={"lw": 0.8})
        chosen = [
            (place, height) for place, height, row in zip(places, medians, rows, strict=True) if row.chosen == name
        ]
        for place, height in chosen:
            axis.annotate("chosen", (place, height), rotation=90, fontsize=7, ha="center", va="bottom")
    labels = [f"{row.new_tokens:,} new\n{row.context_tokens:,} context" for row in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize=8)
    axis.set_yscale("log")
    axis.set_ylabel("ms per layer")
    axis.set_title(part)
    axis.legend(fontsize=8, ncols=3)
