"""The demo's reading of counters, its verdict and its table; the demo as a whole needs real nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from examples.completions import Answer, Ask
from examples.metrics import LoadMeter, LoadNumbers, load_numbers, read_counters
from examples.prompts import Prompt
from examples.report import Row, format_table, kv_bytes_per_token, print_verdict

PAGE = """
# TYPE vllm:kvweave_loads counter
vllm:kvweave_loads_total{{engine="0",outcome="done",cause=""}} {loads}
vllm:kvweave_loads_total{{engine="0",outcome="failed",cause="silent"}} 0.0
# TYPE vllm:kvweave_tokens_loaded counter
vllm:kvweave_tokens_loaded_total{{engine="0",model_name="m"}} {tokens}
vllm:kvweave_tokens_loaded_total{{engine="1",model_name="m"}} 2.0
# TYPE vllm:kvweave_transfer_seconds counter
vllm:kvweave_transfer_seconds_total{{engine="0"}} {seconds}
# TYPE vllm:other counter
vllm:other_total 5.0
"""
TOKEN_BYTES = 100
LOAD = LoadNumbers(("done",), 64, 36, 2, 4, 1, 3600, 3600, 0.002)
ROW = Row(Ask(Prompt("text", 100)), Answer("Paris.", 100, 0.25), LOAD, "Paris.")


def test_meter_gives_differences_once_a_load_is_counted_and_the_numbers_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.metrics.SETTLE_S", 60.0)
    pages = [
        PAGE.format(loads=1.0, tokens=10.0, seconds=0.5),
        PAGE.format(loads=1.0, tokens=10.0, seconds=0.5),
        PAGE.format(loads=2.0, tokens=10.0, seconds=0.75),
        PAGE.format(loads=2.0, tokens=43.0, seconds=0.75),
        PAGE.format(loads=2.0, tokens=43.0, seconds=0.75),
    ]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=pages.pop(0)))
    with httpx.Client(transport=transport) as client:
        meter = LoadMeter(client, "http://d")
        meter.begin()
        load = meter.finish()
    assert (load.outcomes, load.tokens_loaded, load.transfer_s) == (("done",), 33, 0.25)
    assert pages == []


def test_counters_are_summed_over_engines_and_absent_ones_are_zero() -> None:
    counters = read_counters(PAGE.format(loads=1.0, tokens=10.0, seconds=0.5))
    assert counters["vllm:kvweave_tokens_loaded_total", ""] == 12.0
    assert counters["vllm:kvweave_loads_total", "failed/silent"] == 0.0
    assert not any(name.startswith("vllm:other") for name, _ in counters)
    assert load_numbers({}) == LoadNumbers((), 0, 0, 0, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (replace(ROW, plain_text="Lyon."), "texts differ: 'Paris.', plain vLLM: 'Lyon.'"),
        (replace(ROW, answer=Answer("Paris.", 99, None)), "D counted 99 prompt tokens"),
        (replace(ROW, load=replace(LOAD, tokens_local=34)), "D prefilled itself (outcomes: done)"),
        (replace(ROW, load=replace(LOAD, bytes_moved=4000)), "4000 bytes moved for a payload of 3600"),
        (replace(ROW, load=replace(LOAD, tokens_loaded=37)), "expected 37 tokens x 100 bytes"),
    ],
)
def test_every_kind_of_problem_fails_the_demo(row: Row, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_verdict([ROW, row], TOKEN_BYTES) == 1
    assert problem in capsys.readouterr().out


def test_good_rows_pass_also_when_the_last_token_stayed_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shorter = replace(ROW, load=replace(LOAD, tokens_loaded=35, bytes_moved=3500, bytes_payload=3500))
    assert print_verdict([ROW, shorter], TOKEN_BYTES) == 0
    assert "2 of 2 texts equal" in capsys.readouterr().out


def test_table_shows_every_row_in_columns() -> None:
    lines = format_table([ROW, replace(ROW, answer=Answer("x" * 99, 100, None))]).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["100", "64", "2", "4", "1", "3,600", "3,600", "2.0", "250", "yes", "'Paris.'"]
    assert lines[3].endswith("...'") and " NO " in lines[3] and "not streamed" in lines[3]


def test_bytes_per_token_come_from_the_models_shape(tmp_path: Path) -> None:
    shape = '{"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}'
    (tmp_path / "config.json").write_text(shape)
    assert kv_bytes_per_token(tmp_path) == 46080
