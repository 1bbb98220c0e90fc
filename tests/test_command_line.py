"""`python -m kvweave plan`, `volume` and `advise`: what they print, draw and refuse."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest

import kvweave
from layouts import ParallelLayout, plan_transfer
from layouts.explain import draw_table, label, plan_tables

ISSUE_EXAMPLE = split(
    "plan --source tp=8,pcp=2,dcp=8,block=16,interleave=16 --target tp=4,dcp=2,block=32 --tokens 150 --mla"
)
V3B = split("plan --source tp=4,dcp=4,block=4,interleave=4 --target block=8 --tokens 50 --start 24 --mla")
V7 = split("plan --source tp=4,dcp=4,interleave=16 --target tp=2,dcp=2,interleave=16 --tokens 37 --mla")
ADVISE = split("advise --gpus 8 --memory-gib 60 --context 131072 --concurrency 4")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert kvweave.main(arguments) == 0
    return capsys.readouterr().out


def refusal_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with, at exit code 2."""
    try:
        code: object = kvweave.main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1 and captured.err.startswith("python -m kvweave")
    return captured.err


def test_plan_says_who_sends_what_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *V3B)
    assert "50 tokens, of which the target has 24: 7 runs in 4 messages, 29,952 bytes." in out
    assert re.search(r"rank 2 \(shard 2\) +-> rank 0 \(shard 0\) +0 +0 +8 +2 +9,216 +24\.\.27,40\.\.43", out)
    assert "shard 0 (rank 0) | 0..3 [kept]   | 16..19 [kept] | 32..35 [0] | 48..49 [0]" in out
    assert "\x1b" not in out


def test_plan_names_the_ranks_that_take_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert "source ranks with no token to give: 3 (they release their blocks too)" in output_of(capsys, *V7)
    replicas = split("plan --source tp=4 --target tp=1 --tokens 5 --mla")
    assert re.search(r"replicas that nobody reads: source ranks (\d[.\d, ]*) \(they", output_of(capsys, *replicas))
    needless = split("plan --source tp=1 --target tp=4,dcp=4,interleave=16 --tokens 17 --mla")
    assert "target ranks that need nothing: 2..3 (nobody waits for them)" in output_of(capsys, *needless)


def test_both_pcp_meanings_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *ISSUE_EXAMPLE)
    older = output_of(capsys, *[argument.replace("dcp=8", "dcp=8,pcp_shards_kv=1") for argument in ISSUE_EXAMPLE])
    assert "rank 8 (shard 1) " in out
    assert "rank 8 (shard 8) " in older
    assert "source ranks with no token to give: 10..15" in older


REPLICAS = split("--source tp=2,dcp=2,interleave=16 --target tp=4,dcp=2,interleave=16 --mla")


@pytest.mark.parametrize(
    ("asked", "said", "moved"),
    [
        ((), "share (auto)", 73_728),
        (("--replicas", "share"), "share", 73_728),
        (("--replicas", "fetch"), "fetch", 147_456),
    ],
)
def test_replicas_fetch_or_share(
    capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], said: str, moved: int
) -> None:
    explanation = (
        f"Replicas: {said}. Between the nodes fetch moves 147,456 bytes; share moves 73,728, "
        "and 73,728 inside the target node. The connector fetches today."
    )
    out = output_of(capsys, "plan", *REPLICAS, "--tokens", "64", *asked)
    assert explanation in out and f"in 4 messages, {moved:,} bytes" in out
    assert ("Inside the target node" in out) == ("share" in said)
    if "share" in said:
        assert re.search(r"rank 0 \(shard 0\) +-> rank 2 \(shard 0\) +0 +0 +16 +1 +18,432 +32\.\.47", out)
        assert re.search(r"rank 2 \(shard 0\) +-> rank 0 \(shard 0\) +0 +0 +16 +1 +18,432 +32\.\.47", out)
    priced = output_of(capsys, "volume", *REPLICAS, "--tokens", "64", *asked).splitlines()
    assert priced[3] == explanation
    assert priced[-1].split()[:3] == ["64", "1", f"{moved:,}"]


def test_replicas_that_read_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *split("plan --source tp=1 --target tp=8 --tokens 16 --mla"))
    assert "target ranks that get everything from their replicas: 1..7" in out
    assert re.search(r"rank 0 \(shard 0\) +-> ranks 1\.\.7 \(shard 0\) +0 +0 +16 +1 +129,024 +0\.\.15", out)
    assert "Replicas: nothing to share at the target" in output_of(capsys, *V3B)


def test_layouts_that_vllm_does_not_start_get_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    note = "Note: vLLM 0.32 does not start the source: with pcp=2 it starts dcp 1, 2, 16, and never pcp_shards_kv."
    assert note in output_of(capsys, *ISSUE_EXAMPLE)
    assert "Note:" not in output_of(capsys, *[each.replace("dcp=8", "dcp=16") for each in ISSUE_EXAMPLE])


def test_help_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (
        ("advise", "without it give --layers, and --kv-heads or --mla"),
        ("plan", "layouts that vLLM itself does not start are accepted too"),
        ("volume", "each one fetches its own copy (what the connector does)"),
    ):
        with pytest.raises(SystemExit, match="0"):
            kvweave.main([command, "--help"])
        assert words in " ".join(capsys.readouterr().out.split())


def test_plan_in_color_paints_both_tables_alike() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, dcp=2, mla=True), ParallelLayout(mla=True), 0, 4)
    source, target = plan_tables(plan, 8)
    painted = [re.findall(r"\x1b\[38;5;(\d+)m[^\x1b]*\[(\d)\]", "\n".join(draw_table(table, color=True, width=90)))
               for table in (source, target)]  # fmt: skip
    assert set(painted[0]) == set(painted[1])
    assert len(set(painted[0])) == 2


def test_tables_show_each_position_where_the_arithmetic_puts_it() -> None:
    source, target = ParallelLayout(tp=4, dcp=4, mla=True, block_tokens=8), ParallelLayout(tp=6, dcp=3, mla=True)
    for table, own in zip(plan_tables(plan_transfer(source, target, 10, 100), 50), (source, target), strict=True):
        seen = []
        for piece in table.pieces:
            for token in range(piece.num_tokens):
                position = piece.position + token
                place = (piece.shard, piece.block, piece.slot + token)
                assert own.interleave.locate(position) == place
                assert piece.source_shard == source.interleave.owner(position)
                assert piece.moved == (position >= 10)
                seen.append(position)
        assert sorted(seen) == list(range(100))


def test_tables_break_where_the_terminal_ends() -> None:
    table = plan_tables(plan_transfer(ParallelLayout(), ParallelLayout(), 0, 200), 8)[0]
    lines = draw_table(table, color=False, width=60)
    assert max(map(len, lines[1:])) <= 60
    assert all(any(f"block {block}" in line for line in lines) for block in range(8))
    assert lines[-1] == "... and 5 more blocks per shard"


@pytest.mark.parametrize(
    ("positions", "sizes", "text"),
    [
        ([0], [16], "0..15"),
        ([0, 16], [16, 4], "0..19"),
        ([0, 2, 4], [1, 1, 1], "0,2,4"),
        (range(0, 64, 4), [1] * 16, "0,4,..,60 (16 tokens)"),
    ],
)
def test_labels_are_short(positions: list[int], sizes: list[int], text: str) -> None:
    assert label(positions, sizes) == text


def test_plan_of_many_tokens_is_quick_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *split("plan --source tp=8,dcp=8 --target tp=4,dcp=4 --mla --tokens 300000"))
    assert len(out) < 20_000
    assert "300,000 tokens" in out


def test_plan_draws_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, head in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        assert f"drawn: {tmp_path / name}" in output_of(capsys, *V3B, "--png", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(head)


def test_pictures_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, message in (("plan.txt", r"allowed: a name ending in \.png"), ("no/plan.png", "No such file")):
        assert kvweave.main([*V3B, "--png", str(tmp_path / name)]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_drawing_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_matplotlib(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "layouts.commands.drawing", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert kvweave.main([*V3B, "--png", "plan.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_commands_without_a_picture_need_no_matplotlib() -> None:
    code = f"import sys, kvweave; kvweave.main({V3B!r}); print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False False\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "kvweave", *ISSUE_EXAMPLE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_volume_prices_lengths_and_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    pair = split("volume --source tp=4,dcp=4 --target tp=4,dcp=4 --mla --tokens 16x2,64")
    lines = [line.split() for line in output_of(capsys, *pair).splitlines()[-3:]]
    assert lines[0] == ["16", "2", "18,432", "4", "0", "4", "4", "4,608", "300.0", "%"]
    assert lines[1] == ["64", "1", "73,728", "4", "0", "4", "4", "18,432", "0.0", "%"]
    assert lines[2] == ["all", "3", "110,592", "12", "0", "12", "12", "9,216", "100.0", "%"]


def test_advise_names_rules_layouts_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *ADVISE, "--mla", "--layers", "61", "--tp", "8")
    assert "70,272 bytes of KV cache per token and copy" in out
    assert out.count("rule:") == 2
    assert "--tensor-parallel-size 8" in out
    assert re.search(r"^ +1,048,576 +68\.62! ", out, re.MULTILINE)
    assert "Q is cheaper from 8.9 tokens of context per new token" in out


def test_advise_reads_a_model_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = output_of(capsys, *ADVISE, "--model-config", str(tmp_path))
    assert out == output_of(capsys, *ADVISE, "--kv-heads", "8", "--layers", "80")
    assert "327,680 bytes of KV cache" in out


PAIR = ("plan", "--tokens", "9", "--target", "tp=1", "--source")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAIR, "tp=0"], "--source tp: got '0'; allowed: an integer from 1 to 65536"),
        ([*PAIR, "tp=x"], "--source tp: got 'x'; allowed: an integer from 1 to 65536"),
        ([*PAIR, "tp"], "--source tp: got ''; allowed: an integer"),
        ([*PAIR, "tpx=1"], "--source key: got 'tpx'; allowed: tp, pcp, dcp, pp, block, interleave, pcp_shards_kv"),
        ([*PAIR, "tp=1,tp=2"], "got tp twice; allowed: each key once"),
        ([*PAIR, "pcp=2,pcp_shards_kv=2"], "--source pcp_shards_kv: got '2'; allowed: an integer from 0 to 1"),
        ([*PAIR, "tp=65536"], "ranks: got 65536; allowed: up to 4096"),
        ([*PAIR, "tp=3"], "tp with num_kv_heads=8: got 3"),
        ([*PAIR, "tp=8,dcp=8"], "with --mla the layout works"),
        ([*PAIR, "tp=4,dcp=3", "--mla"], "the divisors of tp, 1, 2, 4"),
        ([*PAIR, "tp=2,dcp=2,block=16,interleave=3", "--mla"], "the divisors of block_tokens, 1, 2, 4, 8, 16"),
        ([*PAIR, "pp=2"], "pp with num_layers=1: got 2"),
        ([*PAIR, "tp=1", "--start", "10"], "got 10, 9; allowed: 0 <= start <= stop"),
        ([*PAIR, "tp=1", "--tokens", "0"], "argument --tokens: got '0'; allowed: an integer from 1 to 16777216"),
        ([*PAIR, "tp=1", "--kv-heads", "8", "--mla"], "not allowed with argument"),
        ([*PAIR, "tp=1", "--dtype", "int3"], "choose from"),
        ([*PAIR, "tp=1", "--replicas", "steal"], "choose from"),
        (split("plan --mla --tokens 9 --source tp=1 --target tp=512"), "got 261,632 exchanges between target ranks"),
        (["plan", "--source", "tp=1", "--tokens", "9"], "required: --target"),
        (["volume", "--source", "tp=1", "--target", "tp=1", "--tokens", "5y"], "allowed: N or NxCOUNT"),
        (["volume", "--source", "tp=1", "--target", "tp=1", "--tokens", "5x0"], "got '5x0'"),
        (ADVISE, "allowed: --model-config FILE, or --layers with --kv-heads or --mla"),
        ([*ADVISE, "--mla"], "got no --layers"),
        ([*ADVISE, "--model-config", "x", "--mla"], "allowed: either of them"),
        ([*ADVISE, "--model-config", "x"], "model config x: No such file"),
        ([*ADVISE, "--mla", "--layers", "9", "--tp", "16"], "tp with 8 cards: got 16; allowed: 1 to 8"),
        ([*ADVISE, "--mla", "--layers", "9", "--memory-gib", "nan"], "got 'nan'; allowed: a number above 0"),
        ([*ADVISE, "--mla", "--layers", "999", "--memory-gib", "1"], "context: got 131072; allowed: up to"),
        (["fold"], "choose from"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments_end_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refusal_of(capsys, *arguments)
