"""Real vLLM with context parallelism on CPU gives the tokens of plain vLLM on one rank."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1300)]

REPOSITORY = Path(__file__).parents[2]
VOCAB_SIZE = 512
HEAD_SIZE = 32
MAX_BATCHED_TOKENS = 64
"""Less than the longest prompts, so that they are prefilled in chunks beside decodes."""


@dataclass(frozen=True)
class Layout:
    """Flags of one engine; `flags` are arguments of vllm.LLM."""

    kv_heads: int
    flags: dict[str, int] = field(default_factory=dict)


LAYOUT = Layout(
    2,
    {
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "block_size": 8,
        "cp_kv_cache_interleave_size": 8,
    },
)
"""The layout in which everything is at work. tests/nodes runs the others."""


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def workload() -> list[list[list[int]]]:
    """Prompts around block edges in a batch of six, the same again (prefix hits), and the same made longer."""
    edges = prompts([1, 15, 16, 17, 33, 130], seed=1)
    longer = [ids + more for ids, more in zip(edges, prompts([3, 1, 40, 16, 7, 2], seed=2), strict=True)]
    return [edges, edges, longer, prompts([3, 31, 32, 64, 65, 200], seed=3)]


def plugin_path(directory: Path) -> Path:
    """A directory that makes vLLM find the plugin, also where the project is not installed."""
    metadata = directory / "plugins" / "kvweave_attention_under_test-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvweave-attention-under-test\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvweave_attention = attention.vllm.plugin:register\n"
    )
    return metadata.parent


def run(
    directory: Path, layout: Layout, plugins: str | None = None, **engine: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs a node to its end; its report is in `directory`/output.json."""
    task = {
        "model": str(write_tiny_llama(directory / "model", num_kv_heads=layout.kv_heads, head_size=HEAD_SIZE)),
        "engine": {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "max_num_seqs": 8,
            **layout.flags,
            **engine,
        },
        "rounds": workload(),
        "max_tokens": 10,
        "output": str(directory / "output.json"),
    }
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less to start
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join([str(plugin_path(directory)), str(REPOSITORY)]),
    }
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    command = [sys.executable, str(Path(__file__).with_name("vllm_node.py")), json.dumps(task)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


def report_of(directory: Path, layout: Layout, plugins: str | None = None) -> dict[str, Any]:
    done = run(directory, layout, plugins)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads((directory / "output.json").read_text())
    return report


def test_tokens_equal_plain_vllm_and_each_rank_computes_a_part(tmp_path: Path) -> None:
    report = report_of(tmp_path / "sharded", LAYOUT)
    plain = report_of(tmp_path / "plain", Layout(LAYOUT.kv_heads, {"block_size": 32}), plugins="")
    assert report["tokens"] == plain["tokens"]
    for rank in report["ranks"]:
        assert rank["page_shape"][1:] == [LAYOUT.kv_heads, LAYOUT.flags["block_size"], 2 * HEAD_SIZE]
        assert rank["most_rows"] < MAX_BATCHED_TOKENS
