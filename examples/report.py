"""The demo's table and verdict: what moved for each request, and whether the texts are equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.completions import Answer, Ask
from examples.metrics import LoadNumbers

FLOAT32_BYTES = 4
TEXT_WIDTH = 34
HEADINGS = (
    ("prompt", "tokens"),
    ("D had", "tokens"),
    ("blocks", "listed"),
    ("blocks", "real"),
    ("empty", "skipped"),
    ("moved", "bytes"),
    ("payload", "bytes"),
    ("move", "ms"),
    ("first token", "ms"),
    ("equal", ""),
    ("text", ""),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a request, what moved for it, and the two texts."""

    ask: Ask
    answer: Answer
    load: LoadNumbers
    plain_text: str

    @property
    def is_equal(self) -> bool:
        """Whether plain vLLM wrote the same text."""
        return self.answer.text == self.plain_text

    def problems(self, token_bytes: int) -> list[str]:
        """What keeps this row from being right; `token_bytes` is one token's KV, from the model's shape."""
        load, num_tokens = self.load, self.ask.prompt.num_tokens
        found = []
        if not self.is_equal:
            found.append(f"texts differ: {self.answer.text!r}, plain vLLM: {self.plain_text!r}")
        if self.answer.num_prompt_tokens != num_tokens:
            found.append(f"D counted {self.answer.num_prompt_tokens} prompt tokens")
        # vLLM computes the last prompt token in any case, so that one may stay behind.
        if load.tokens_local + load.tokens_loaded < num_tokens - 1:
            known = f"{load.tokens_local} tokens local, {load.tokens_loaded} loaded"
            found.append(f"{known}, so D prefilled itself (outcomes: {', '.join(load.outcomes) or 'none'})")
        if not load.bytes_moved == load.bytes_payload == load.tokens_loaded * token_bytes:
            expected = f"{load.tokens_loaded} tokens x {token_bytes} bytes"
            found.append(f"{load.bytes_moved} bytes moved for a payload of {load.bytes_payload}, expected {expected}")
        return found


def kv_bytes_per_token(checkpoint: Path) -> int:
    """Float32 keys and values of one token over all layers and KV heads, from the model's configuration."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return 2 * int(heads) * int(config["head_dim"]) * FLOAT32_BYTES


def format_table(rows: Sequence[Row]) -> str:
    """The rows under two lines of headings, columns as wide as their widest cell."""
    lines = [tuple(top for top, _ in HEADINGS), tuple(below for _, below in HEADINGS), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True))
        + f"  {line[-1]}".rstrip()
        for line in lines
    )


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, as text."""
    load, first_token_s = row.load, row.answer.first_token_s
    shown = repr(row.answer.text)
    return (
        f"{row.ask.prompt.num_tokens}",
        f"{load.tokens_local}",
        f"{load.blocks_listed}",
        f"{load.blocks_real}",
        f"{load.blocks_empty}",
        f"{load.bytes_moved:,}",
        f"{load.bytes_payload:,}",
        f"{load.transfer_s * 1e3:.1f}",
        "not streamed" if first_token_s is None else f"{first_token_s * 1e3:.0f}",
        "yes" if row.is_equal else "NO",
        shown if len(shown) <= TEXT_WIDTH else f"{shown[: TEXT_WIDTH - 4]}...{shown[-1]}",
    )


def print_verdict(rows: Sequence[Row], token_bytes: int) -> int:
    """Print the sums and every problem; 0 when there is none, else 1."""
    num_equal = sum(row.is_equal for row in rows)
    moved = sum(row.load.bytes_moved for row in rows)
    payload = sum(row.load.bytes_payload for row in rows)
    skipped = sum(row.load.blocks_empty for row in rows)
    print(f"{num_equal} of {len(rows)} texts equal to plain vLLM")
    print(f"{moved:,} bytes moved, {payload:,} bytes of payload; {skipped} empty blocks skipped")
    problems = [
        f"request {number} ({row.ask.prompt.num_tokens} tokens): {problem}"
        for number, row in enumerate(rows, start=1)
        for problem in row.problems(token_bytes)
    ]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0
