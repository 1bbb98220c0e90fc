"""A transfer plan in words and tables: who sends what to whom, and where each token lies before and after.

Makes text and the pieces that a drawing is made of; draws no pictures and reads no command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layouts.interleave import Interleave
from layouts.parallel import Placement
from layouts.plan import TransferPlan
from layouts.routes import Route
from layouts.sharing import SharedPlan
from layouts.words import align, counted, ranges

_SHOWN_RANKS = 6
"""Ranks of a shard that its name lists."""

_SHOWN_SPANS = 2
"""Spans of positions a label names before it goes on with the last one."""

ANSI_COLORS = (208, 32, 71, 204, 141, 178, 38, 167, 106, 245)
"""Terminal colors (of 256) of source shards, in turn, close to those of the drawing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive positions in consecutive slots of one block, from one source shard.

    Not `moved` are those the target has already.
    """

    position: int
    num_tokens: int
    shard: int
    block: int
    slot: int
    source_shard: int
    moved: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Where the first positions of a request lie on one side: shards by blocks.

    `blocks` are the blocks shown, of `num_blocks` that the block table lists. `names` has a label per shard.
    """

    title: str
    names: tuple[str, ...]
    block_tokens: int
    num_blocks: int
    blocks: range
    pieces: tuple[Piece, ...]

    def cell(self, shard: int, block: int) -> tuple[Piece, ...]:
        """The pieces in one block, by slot; none when it is empty."""
        found = (piece for piece in self.pieces if (piece.shard, piece.block) == (shard, block))
        return tuple(sorted(found, key=lambda piece: piece.slot))


def plan_tables(plan: TransferPlan, max_blocks: int) -> tuple[Table, Table]:
    """The tables of source and target, each with at most `max_blocks` blocks per shard.

    Pieces of both carry the source shard they are on or come from: the color that lets the eye follow them.
    """
    giver = plan.source.interleave
    return (
        _table("source", plan.source, giver, plan, max_blocks),
        _table("target", plan.target, giver, plan, max_blocks),
    )


def describe(placement: Placement) -> str:
    """One line with the sizes of a layout."""
    interleave, heads = placement.interleave, placement.holdings[0].heads
    return (
        f"{counted(placement.num_ranks, 'rank')}, {counted(interleave.num_shards, 'shard')}, "
        f"blocks of {interleave.block_tokens} tokens, interleave {interleave.interleave_tokens}, "
        f"virtual block {interleave.virtual_block_tokens} tokens, "
        f"{heads.size} of {counted(placement.num_kv_heads, 'KV head')} per rank"
    )


def describe_routes(plan: TransferPlan | SharedPlan, entry_bytes: int) -> list[str]:
    """One line per route between the nodes; `entry_bytes` is what one token of one head in one layer takes."""
    whole, rows = _whole(plan), [_HEADLINE]
    for route in crossing(plan):
        to = f"-> {_named(whole.target, [route.target_rank])}"
        rows.append((_named(whole.source, [route.source_rank]), to, *_route_cells(route, 1, entry_bytes)))
    return align(rows, right=(4, 5, 6))


def describe_exchanges(shared: SharedPlan, entry_bytes: int) -> list[str]:
    """One line for what a target rank gives to all its replicas; bytes are those to all of them."""
    takers: dict[tuple[int, int], list[Route]] = {}
    for route in shared.exchanges:
        takers.setdefault((route.source_rank, id(route.runs)), []).append(route)
    rows, target = [_HEADLINE], shared.plan.target
    for (giver, _), routes in sorted(takers.items()):
        to = f"-> {_named(target, [route.target_rank for route in routes])}"
        rows.append((_named(target, [giver]), to, *_route_cells(routes[0], len(routes), entry_bytes)))
    return align(rows, right=(4, 5, 6))


def describe_idle(plan: TransferPlan | SharedPlan) -> list[str]:
    """Which ranks take no part in the routes between the nodes, and why."""
    lines, routes, plan = [], crossing(plan), _whole(plan)
    read, reading = {route.source_rank for route in routes}, {route.target_rank for route in routes}
    read_shards = {plan.source.holdings[rank].shard for rank in read}
    idle = [rank for rank in range(plan.source.num_ranks) if rank not in read]
    replicas = [rank for rank in idle if plan.source.holdings[rank].shard in read_shards]
    empty = [rank for rank in idle if plan.source.holdings[rank].shard not in read_shards]
    if replicas:
        lines.append(f"replicas that nobody reads: source ranks {ranges(replicas)} (they release their blocks too)")
    if empty:
        lines.append(f"source ranks with no token to give: {ranges(empty)} (they release their blocks too)")
    needless = [rank for rank, tokens in enumerate(plan.num_tokens_to) if tokens == 0]
    if needless:
        lines.append(f"target ranks that need nothing: {ranges(needless)} (nobody waits for them)")
    filled = [rank for rank in plan.readers if rank not in reading]
    if filled:
        lines.append(f"target ranks that get everything from their replicas: {ranges(filled)}")
    return lines or ["every source rank is read, every target rank reads"]


def draw_table(table: Table, *, color: bool, width: int) -> list[str]:
    """A table as text of at most `width` columns (but at least one block wide).

    Each cell lists positions, and at the target the source shard they come from; `color` adds terminal colors.
    """
    name_width = max(map(len, table.names))
    lines, columns, used = [f"{table.title}:"], list[_Column](), 0
    for column in [_column(table, block) for block in table.blocks]:
        if columns and name_width + 1 + used + column.width + 3 > width:
            lines += _draw_columns(table.names, columns, color)
            columns, used = [], 0
        columns.append(column)
        used += column.width + 3
    lines += _draw_columns(table.names, columns, color)
    hidden = table.num_blocks - len(table.blocks)
    return [*lines, f"... and {counted(hidden, 'more block')} per shard"] if hidden else lines


def label(positions: npt.ArrayLike, num_tokens: npt.ArrayLike) -> str:
    """Pieces by their first positions and sizes, in order and shortened: `0..15`, or `0,4,..,60 (16 tokens)`."""
    firsts, sizes = np.asarray(positions, dtype=np.int64), np.asarray(num_tokens, dtype=np.int64)
    opens = np.concatenate([[True], firsts[:-1] + sizes[:-1] != firsts[1:]])
    closes = np.concatenate([opens[1:], [True]])
    starts, ends = firsts[opens], (firsts + sizes - 1)[closes]
    shown = range(len(starts)) if len(starts) <= _SHOWN_SPANS + 1 else (*range(_SHOWN_SPANS), len(starts) - 1)
    spans = [f"{starts[i]}..{ends[i]}" if ends[i] > starts[i] else str(starts[i]) for i in shown]
    if len(spans) < len(starts):
        spans[-1] = f"..,{spans[-1]} ({int(sizes.sum()):,} tokens)"
    return ",".join(spans)


def crossing(plan: TransferPlan | SharedPlan) -> tuple[Route, ...]:
    """The routes between the nodes."""
    return plan.reads if isinstance(plan, SharedPlan) else plan.routes


def _whole(plan: TransferPlan | SharedPlan) -> TransferPlan:
    return plan.plan if isinstance(plan, SharedPlan) else plan


_HEADLINE: tuple[str, ...] = ("from", "to", "heads", "layers", "tokens", "runs", "bytes", "positions")


def _named(placement: Placement, ranks: Sequence[int]) -> str:
    """Ranks of one shard, with it."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} (shard {placement.holdings[ranks[0]].shard})"


def _route_cells(route: Route, num_takers: int, entry_bytes: int) -> tuple[str, ...]:
    return (
        ranges(range(*route.heads)),
        ranges(range(*route.layers)),
        f"{route.num_tokens:,}",
        f"{len(route.runs):,}",
        f"{route.num_entries * num_takers * entry_bytes:,}",
        label(route.runs["position"], route.runs["num_tokens"]),
    )


def _table(end: str, placement: Placement, giver: Interleave, plan: TransferPlan, max_blocks: int) -> Table:
    own = placement.interleave
    num_blocks = own.num_virtual_blocks(plan.stop)
    blocks = range(min(num_blocks, max_blocks))
    stop = min(plan.stop, len(blocks) * own.virtual_block_tokens)
    names = []
    for shard in range(own.num_shards):
        holders = [rank for rank, holding in enumerate(placement.holdings) if holding.shard == shard]
        text = ranges(holders) if len(holders) <= _SHOWN_RANKS else f"{holders[0]} and {len(holders) - 1} others"
        names.append(f"shard {shard} (rank{'s' if len(holders) > 1 else ''} {text})")
    title = f"{end}, {describe(placement)}"
    return Table(title, tuple(names), own.block_tokens, num_blocks, blocks, _pieces(own, giver, plan.start, stop))


def _pieces(own: Interleave, giver: Interleave, start: int, stop: int) -> tuple[Piece, ...]:
    """The positions 0 .. stop-1 on one side, cut where either side cuts and at `start`."""
    cuts = [np.arange(0, stop, step, dtype=np.int64) for step in {own.run_tokens, giver.run_tokens}]
    positions = np.unique(np.concatenate([*cuts, np.arange(start, min(start + 1, stop))]))
    columns = (
        positions,
        np.diff(positions, append=stop),
        *own.locate(positions),
        giver.owner(positions),
        positions >= start,
    )
    return tuple(Piece(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, slots=True)
class _Column:
    """One block as text: for each shard lines of (text, color number)."""

    title: str
    cells: tuple[list[tuple[str, int | None]], ...]

    @property
    def width(self) -> int:
        return max(len(self.title), *(len(text) for cell in self.cells for text, _ in cell))


def _column(table: Table, block: int) -> _Column:
    return _Column(f"block {block}", tuple(_cell_lines(table.cell(shard, block)) for shard in range(len(table.names))))


def _cell_lines(pieces: tuple[Piece, ...]) -> list[tuple[str, int | None]]:
    groups: dict[tuple[bool, int], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.moved, piece.source_shard), []).append(piece)
    lines: list[tuple[str, int | None]] = []
    for (moved, source_shard), group in groups.items():
        text = label([piece.position for piece in group], [piece.num_tokens for piece in group])
        lines.append((f"{text} [{source_shard}]", source_shard) if moved else (f"{text} [kept]", None))
    return lines or [("empty", None)]


def _draw_columns(names: tuple[str, ...], columns: Sequence[_Column], color: bool) -> list[str]:
    """Some blocks side by side, under a line with their numbers."""
    name_width = max(map(len, names))
    head = " " * (name_width + 1) + "".join(f"| {column.title:{column.width}} " for column in columns)
    rule = "-" * (name_width + 1) + "".join("+" + "-" * (column.width + 2) for column in columns)
    lines = [head.rstrip(), rule]
    for shard, name in enumerate(names):
        for row in range(max(len(column.cells[shard]) for column in columns)):
            line = f"{'' if row else name:{name_width}} "
            for column in columns:
                text, shade = column.cells[shard][row] if row < len(column.cells[shard]) else ("", None)
                line += f"| {_paint(f'{text:{column.width}}', shade if color else None)} "
            lines.append(line.rstrip())
    return lines


def _paint(text: str, shade: int | None) -> str:
    if shade is None:
        return text
    return f"\x1b[38;5;{ANSI_COLORS[shade % len(ANSI_COLORS)]}m{text}\x1b[0m"
