"""Pictures of `benchmarks.transfer_volume`. Needs matplotlib; draws what it is given and computes no volume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.volume_cases import DISTRIBUTIONS, MODELS, Case, Overhead, Resharding
from layouts.commands.drawing import save
from layouts.words import counted

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    from layouts.errors import ConfigError

    raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error

LISTED, WHOLE_I1, WHOLE_IB, EXACT = "#9aa5b1", "#d1495b", "#edae49", "#00798c"
_NAMES = {
    LISTED: "every listed block",
    WHOLE_I1: "whole blocks, interleave 1",
    WHOLE_IB: "whole blocks, interleave = block size",
    EXACT: "kvweave: exactly the tokens",
}


def draw_all(
    cases: Sequence[Case], overheads: Sequence[Overhead], reshardings: Sequence[Resharding], folder: Path
) -> None:
    """Writes all pictures into an existing folder."""
    figures = {
        "volume_short_prompt": draw_short_prompt(),
        "volume_by_length": draw_by_length(cases),
        "volume_by_load": draw_by_load(overheads),
        "volume_segments": draw_segments(reshardings),
    }
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")


def draw_short_prompt() -> Any:
    """The blocks that 16 tokens touch with blocks of 16 on 4 ranks, and what each scheme ships of them."""
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=110)
    figure.suptitle("A prompt of 16 tokens on 4 ranks with blocks of 16 tokens: what travels", fontweight="bold")
    schemes = (
        ("whole blocks,\ninterleave 1", 1, (16, 16, 16, 16), WHOLE_I1),
        ("whole blocks,\ninterleave 16", 16, (16, 0, 0, 0), WHOLE_IB),
        ("kvweave,\ninterleave 1", 1, (4, 4, 4, 4), EXACT),
        ("kvweave,\ninterleave 16", 16, (16, 0, 0, 0), EXACT),
    )
    for axis, (name, interleave, shipped, color) in zip(figure.subplots(1, 4), schemes, strict=True):
        held = (4, 4, 4, 4) if interleave == 1 else (16, 0, 0, 0)
        for rank in range(4):
            _draw_slots(axis, rank, held[rank], shipped[rank], color)
        num_blocks, num_slots = sum(slots > 0 for slots in shipped), sum(shipped)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel(f"{counted(num_blocks, 'block')}, {num_slots} slots shipped\n16 of them used")
        axis.set_xlim(-0.3, 16.3)
        axis.set_ylim(3.9, -0.2)
        axis.set_xticks([])
        axis.set_yticks([rank + 0.35 for rank in range(4)], [f"rank {rank}" for rank in range(4)])
        axis.tick_params(length=0)
        axis.set_frame_on(False)
    figure.supxlabel("filled: a token, shipped     hatched: padding, shipped     white: empty, stays", fontsize=10)
    return figure


def draw_by_length(cases: Sequence[Case]) -> Any:
    """Bytes over prompt length, relative to the bytes of the tokens, for three node sizes."""
    panels = ((4, 16), (8, 64), (16, 128))
    figure = Figure(figsize=(13, 4.8), layout="constrained", dpi=110)
    figure.suptitle("Short prompts pay for padding: bytes on the wire per byte of KV cache needed", fontweight="bold")
    for axis, (cp, block_tokens) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        shown = [case for case in cases if (case.model, case.cp, case.block_tokens) == ("MLA-576", cp, block_tokens)]
        lengths = [case.num_tokens for case in shown]
        for color, field in ((LISTED, "listed"), (WHOLE_I1, "whole_i1"), (WHOLE_IB, "whole_ib"), (EXACT, "exact_ib")):
            ratios = [getattr(case, f"{field}_bytes") / case.content_bytes for case in shown]
            axis.plot(lengths, ratios, color=color, label=_NAMES[color], lw=3 if color in (LISTED, EXACT) else 1.8)
        axis.set_yscale("log")
        _length_axis(axis)
        axis.set_title(f"{cp} context-parallel ranks, blocks of {block_tokens} tokens", fontsize=11)
        axis.set_yticks([1, 10, 100, 1000], ["1x", "10x", "100x", "1000x"])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_by_load(overheads: Sequence[Overhead]) -> Any:
    """Padding of whole-block schemes for three kinds of load, over context-parallel sizes."""
    figure = Figure(figsize=(13, 4.8), layout="constrained", dpi=110)
    figure.suptitle(
        "Padding that whole-block transfer adds, by kind of load (blocks of 64 tokens; scales differ)",
        fontweight="bold",
    )
    for axis, load in zip(figure.subplots(1, len(DISTRIBUTIONS)), DISTRIBUTIONS, strict=True):
        shown = [row for row in overheads if row.distribution == load.name and row.block_tokens == 64]
        for offset, (color, field) in enumerate(((LISTED, "listed"), (WHOLE_I1, "whole_i1"), (WHOLE_IB, "whole_ib"))):
            extra = [100 * (getattr(row, field) - 1) for row in shown]
            places = [index + 0.27 * (offset - 1) for index in range(len(shown))]
            axis.bar(places, extra, 0.25, color=color, label=_NAMES[color])
        axis.plot([-0.5, len(shown) - 0.5], [0, 0], color=EXACT, lw=4, label=f"{_NAMES[EXACT]} (adds 0 %)")
        axis.set_xticks(range(len(shown)), [f"{row.cp}" for row in shown])
        axis.set_title(f"{load.name}: median prompt {load.median:,} tokens", fontsize=11)
        axis.set_xlabel("context-parallel ranks")
        axis.set_ylabel("padding, % of the bytes needed")
        axis.grid(alpha=0.3, axis="y")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_segments(reshardings: Sequence[Resharding]) -> Any:
    """Number of contiguous pieces on the way from 8 ranks to 4, interleave 1 against block size."""
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=110)
    figure.suptitle("Why the interleave matters: contiguous pieces of a prompt from 8 ranks to 4", fontweight="bold")
    for axis, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        shown = [row for row in reshardings if row.model == model.name]
        fine = [row for row in shown if row.block_tokens == 16]
        lengths, pieces = [row.num_tokens for row in fine], [row.segments_i1 for row in fine]
        axis.plot(lengths, pieces, color=WHOLE_I1, lw=2, label="interleave 1, any block size")
        for block_tokens, style in ((16, ":"), (64, "--"), (128, "-")):
            pieces = [row.segments_ib for row in shown if row.block_tokens == block_tokens]
            axis.plot(lengths, pieces, style, color=EXACT, lw=2, label=f"interleave = block size = {block_tokens}")
        heads = "one latent" if model.mla else f"{model.num_kv_heads} KV heads"
        axis.set_title(f"{model.name}: {heads}, {model.num_layers} layers", fontsize=11)
        axis.set_yscale("log")
        _length_axis(axis)
    figure.axes[0].set_ylabel("pieces (one head, one layer, one stretch of slots)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _length_axis(axis: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xlabel("prompt length, tokens")
    axis.set_xticks([1, 16, 256, 4096, 65536], ["1", "16", "256", "4k", "64k"])
    axis.grid(alpha=0.3)


def _draw_slots(axis: Any, rank: int, held: int, shipped: int, color: str) -> None:
    """One block of 16 slots: tokens, padding that travels, and what stays."""
    for slot in range(16):
        fill = color if slot < held else "white"
        hatch = "////" if held <= slot < shipped else None
        edge = color if slot < shipped else "#cccccc"
        axis.add_patch(Rectangle((slot, rank), 1, 0.7, facecolor=fill, edgecolor=edge, hatch=hatch, lw=0.8))
    axis.add_patch(Rectangle((0, rank), 16, 0.7, fill=False, edgecolor="#444444", lw=1.2))
