"""Pictures of where positions lie; the only module of `layouts` that needs matplotlib, imported when one is asked for.

Draws the tables of `layouts.explain`; computes nothing about layouts.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from layouts.errors import ConfigError, config_error
from layouts.explain import Piece, Table, label

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error

COLORS = (
    "#f4a259",
    "#5b9bd5",
    "#70b77e",
    "#e07a9a",
    "#a58bd0",
    "#e6c84f",
    "#4fc1c0",
    "#c9836b",
    "#9db84a",
    "#9aa5b1",
)
"""Fill colors of source shards, in turn."""

_KEPT, _EMPTY, _EDGE = "#dddddd", "#ffffff", "#444444"
_MAX_SHARDS = 16
_AXIS_CHARACTERS = 140
"""Characters of a label that fit side by side into a table."""
_FORMATS = (".png", ".svg", ".pdf")


def draw_tables(source: Table, target: Table, *, start: int) -> Any:
    """A matplotlib Figure: source table above, target table below, each block as a box of its slots.

    A color is a source shard, in both tables. `start` is the first position moved.
    """
    heights = [min(len(table.names), _MAX_SHARDS) * _row_height(table) + 0.9 for table in (source, target)]
    figure = Figure(figsize=(12, sum(heights) + 1.1), layout="constrained", dpi=110)
    figure.suptitle("Where each position lies before and after the transfer", fontsize=14, fontweight="bold")
    axes = figure.subplots(2, 1, height_ratios=heights)
    for axis, table, verb in zip(axes, (source, target), ("on", "from"), strict=True):
        _draw(axis, table, verb)
    handles = [Patch(facecolor=_EMPTY, edgecolor=_EDGE, hatch="///", label="empty slots: never moved")]
    if start:
        handles.insert(0, Patch(facecolor=_KEPT, edgecolor=_EDGE, label=f"positions below {start}: target has them"))
    handles.insert(0, Patch(facecolor=COLORS[0], edgecolor=_EDGE, label="one color per source shard, in both tables"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure. ConfigError where the file cannot be written or has no known ending."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise config_error(
            "picture file", got=str(path), allowed=f"a name ending in {', '.join(_FORMATS)}", remedy="Rename it."
        )
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(
            f"picture file {path}: {error.strerror or error}; choose a folder that can be written"
        ) from None


def _row_height(table: Table) -> float:
    return 0.42 if len(table.names) > 4 else 0.55


def _draw(axis: Any, table: Table, verb: str) -> None:
    num_shards, num_blocks = min(len(table.names), _MAX_SHARDS), len(table.blocks)
    for shard in range(num_shards):
        for block in table.blocks:
            box = (block + 0.03, shard + 0.1), 0.94, 0.8
            axis.add_patch(Rectangle(*box, fc=_EMPTY, ec="#bbbbbb", hatch="///", lw=0.5))
            for _, group in groupby(table.cell(shard, block), key=lambda piece: (piece.moved, piece.source_shard)):
                _draw_group(axis, list(group), table.block_tokens, num_blocks, verb)
            axis.add_patch(Rectangle(*box, fill=False, ec=_EDGE, lw=1.1))
    axis.set_xlim(0, num_blocks)
    axis.set_ylim(num_shards, 0)
    axis.set_yticks([shard + 0.5 for shard in range(num_shards)], table.names[:num_shards], fontsize=9)
    axis.set_xticks([block + 0.5 for block in table.blocks], [f"block {block}" for block in table.blocks], fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    hidden = table.num_blocks - num_blocks, len(table.names) - num_shards
    more = f"; not drawn: {hidden[0]} more blocks, {hidden[1]} more shards" if any(hidden) else ""
    axis.set_title(_wrapped(table.title) + more, loc="left", fontsize=10.5, pad=8)


def _wrapped(title: str) -> str:
    """A title in which the side stands out."""
    side, _, rest = title.partition(", ")
    return f"{side.upper()}   {rest}"


def _draw_group(axis: Any, pieces: list[Piece], block_tokens: int, num_blocks: int, verb: str) -> None:
    """Pieces of one source shard side by side in a block, each with its label or all with one."""
    slot_width = 0.94 / block_tokens
    for piece in pieces:
        left = piece.block + 0.03 + piece.slot * slot_width
        color = COLORS[piece.source_shard % len(COLORS)] if piece.moved else _KEPT
        size = piece.num_tokens * slot_width, 0.8
        axis.add_patch(Rectangle((left, piece.shard + 0.1), *size, fc=color, ec=_EDGE, lw=0.3))
    slot_characters = slot_width / num_blocks * _AXIS_CHARACTERS
    if all(len(_span([piece])) < piece.num_tokens * slot_characters for piece in pieces):
        for piece in pieces:
            _label_group(axis, [piece], slot_width, slot_characters, verb)
    else:
        _label_group(axis, pieces, slot_width, slot_characters, verb)


def _label_group(axis: Any, pieces: list[Piece], slot_width: float, slot_characters: float, verb: str) -> None:
    """The positions and the source shard, or the positions only, upright if need be, where there is room for them."""
    first, last = pieces[0], pieces[-1]
    num_slots = last.slot + last.num_tokens - first.slot
    span = _span(pieces)
    text = f"{span}\n{verb} shard {first.source_shard}" if first.moved else f"{span}\nkept"
    characters = num_slots * slot_characters
    fitting = [candidate for candidate in (text, span) if max(map(len, candidate.split("\n"))) < characters]
    box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.75} if len(pieces) > 1 else None
    if fitting or characters > 1.5:
        axis.text(
            first.block + 0.03 + (first.slot + num_slots / 2) * slot_width,
            first.shard + 0.5,
            fitting[0] if fitting else span,
            ha="center",
            va="center",
            fontsize=7.5,
            rotation=0 if fitting else 90,
            bbox=box,
        )


def _span(pieces: list[Piece]) -> str:
    return label([piece.position for piece in pieces], [piece.num_tokens for piece in pieces]).partition(" (")[0]
