"""The picture of `benchmarks.transfer`: speed of every way, case by case, one panel for each network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.transfer_reader import Row

COLORS = {
    "raw": "#9aa0a6",
    "memcpy": "#d0d3d6",
    "stock": "#c9b458",
    "blocks": "#b07d2b",
    "cma": "#1b7f5c",
    "nixl": "#2b6cb0",
}
LABELS = {
    "raw": "NIXL, pieces of 1 MiB",
    "memcpy": "copy within a process",
    "stock": "stock NIXL, the case's own pieces",
    "blocks": "block by block (NixlConnector's way)",
    "cma": "kvweave, cma",
    "nixl": "kvweave, nixl",
}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write a PNG of horizontal bars, GB/s; ways that are not in COLORS are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    networks = list(dict.fromkeys(row.network for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(6 * len(networks), 1 + 0.9 * len(cases)), squeeze=False, sharey=True
    )
    for panel, network in zip(panels[0], networks, strict=True):
        ways = [way for way in COLORS if any((row.network, row.way) == (network, way) for row in rows)]
        height = 0.8 / max(1, len(ways))
        for number, way in enumerate(ways):
            found = {row.case: row for row in rows if (row.network, row.way) == (network, way)}
            speeds = [_speed(found[case]) if case in found else 0.0 for case in cases]
            places = [position + (number - (len(ways) - 1) / 2) * height for position in range(len(cases))]
            panel.barh(places, speeds, height, color=COLORS[way], label=LABELS[way])
        panel.set_title(f"network: {network}")
        panel.set_xlabel("GB/s (median)")
        panel.set_yticks(range(len(cases)), cases)
        panel.legend(fontsize=7)
    panels[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _speed(row: Row) -> float:
    return row.num_bytes / statistics.median(row.seconds) / 1e9
