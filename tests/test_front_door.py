"""The public names and the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvweave


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvweave.main(["version"]) == 0
    assert capsys.readouterr().out == f"kvweave {kvweave.__version__}\n"


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="WeaveConnector"):
        _ = kvweave.Nothing


def test_import_is_light() -> None:
    heavy = "{'vllm', 'torch', 'nixl', 'zmq', 'connector'}"
    code = f"import sys, kvweave; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
