"""The launch scripts: which vLLM command line and environment the variables become. vLLM itself is a stand-in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Runs the script's own piece of Python, and prints arguments and environment where vLLM would start.
STAND_IN = f"""#!/usr/bin/env bash
if [[ "$1" == - ]]; then exec {sys.executable} "$@"; fi
exec {sys.executable} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))' "$@"
"""


def launch(script: str, tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), **variables}
    command = [str(EXAMPLES / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def launched(script: str, tmp_path: Path, **variables: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options with their values, and the environment, of the vLLM that the script starts."""
    done = launch(script, tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = re.findall(r"(--[a-z-]+)(?:\n((?!--).*))?", "\n".join(arguments[2:]))
    return dict(options), environment


def transfer_config(options: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(options["--kv-transfer-config"])
    return config


def test_decode_node_with_every_layout_knob(tmp_path: Path) -> None:
    knobs = {"TP": "2", "PCP": "2", "DCP": "4", "PP": "1", "BLOCK_SIZE": "32", "INTERLEAVE": "8"}
    options, environment = launched(
        "launch_decode.sh",
        tmp_path,
        **knobs,
        **{"MODEL": "/m", "DEVICE": "cpu", "LEASE_S": "7.5", "KV_PORT": "77", "MAX_MODEL_LEN": "99"},
        **{"EXTRA_CONFIG": '{"open_timeout_s": 3}', "EXTRA_ARGS": "--seed 5"},
    )
    assert options["--tensor-parallel-size"] == options["--prefill-context-parallel-size"] == "2"
    assert (options["--decode-context-parallel-size"], options["--block-size"]) == ("4", "32")
    assert (options["--cp-kv-cache-interleave-size"], options["--seed"]) == ("8", "5")
    assert (options["--max-model-len"], options["--enforce-eager"]) == ("99", "")
    assert transfer_config(options) == {
        "kv_connector": "WeaveConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host": "127.0.0.1",
            "port": 77,
            "transport": "nixl",
            "lease_s": 7.5,
            "open_timeout_s": 3,
        },
    }
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")


def test_prefill_node_on_a_gpu_gets_no_cpu_settings(tmp_path: Path) -> None:
    options, environment = launched("launch_prefill.sh", tmp_path, MODEL="/m", DEVICE="cuda", KV_CACHE_GB="2")
    assert options["--kv-cache-memory-bytes"] == str(2 * 1024**3)
    assert options["--cp-kv-cache-interleave-size"] == options["--block-size"] == "16"
    assert "--enforce-eager" not in options and "--max-model-len" not in options
    assert transfer_config(options)["kv_role"] == "kv_producer"
    assert not any(name.startswith(("VLLM", "OMP")) for name in environment)


@pytest.mark.parametrize(
    ("variables", "arguments", "complaint"),
    [
        ({}, [], "MODEL is not set"),
        ({"MODEL": "/m"}, ["--port"], "unexpected argument '--port'"),
        ({"MODEL": "/m", "DEVICE": "tpu"}, [], "DEVICE is 'tpu'; allowed: cpu, cuda"),
        ({"MODEL": "/m", "EXTRA_CONFIG": "{"}, [], "EXTRA_CONFIG"),
        ({"MODEL": "/m", "KV_PORT": "http"}, [], "'http'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, variables: dict[str, str], arguments: list[str], complaint: str) -> None:
    done = launch("launch_prefill.sh", tmp_path, *arguments, **variables)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("error: ") and complaint in done.stderr


def test_help_lists_every_variable(tmp_path: Path) -> None:
    shown = launch("launch_decode.sh", tmp_path, "--help").stdout
    source = (EXAMPLES / "launch_common.sh").read_text()
    variables = set(re.findall(r"\$\{([A-Z_]+):=", source)) | {"MODEL"}
    assert len(variables) > 20
    assert [name for name in sorted(variables) if not re.search(rf"\b{name}\b", shown)] == []
