"""Making the demo's checkpoint: complete or absent, whatever happens; and equal to the GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.checkpoint import CheckpointUnavailable, ensure_checkpoint, find_gguf


def write_model(gguf: Path, folder: Path) -> None:
    (folder / "model").write_text(gguf.name)


def find_fake() -> Path:
    return Path("fake.gguf")


def test_checkpoint_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    assert ensure_checkpoint(target, find_fake, write_model) == target
    assert (target / "model").read_text() == "fake.gguf"

    def refuse(gguf: Path, folder: Path) -> None:
        pytest.fail(f"{gguf} was converted again into {folder}")

    assert ensure_checkpoint(target, find_fake, refuse) == target
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        write_model(gguf, folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_checkpoint(tmp_path / "model", find_fake, fail)
    assert list(tmp_path.iterdir()) == []


def test_second_of_two_makers_keeps_the_first_ones(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write_while_another_finishes(gguf: Path, folder: Path) -> None:
        write_model(gguf, folder)
        target.mkdir()
        (target / "model").write_text("the other's")

    ensure_checkpoint(target, find_fake, write_while_another_finishes)
    assert (target / "model").read_text() == "the other's"
    assert list(tmp_path.iterdir()) == [target]


def test_missing_package_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.checkpoint.PACKAGE", "no_such_package")
    with pytest.raises(CheckpointUnavailable, match="make setup"):
        find_gguf()


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_converted_weights_are_those_of_the_file() -> None:
    """Embeddings and a norm, dequantized by the `gguf` package itself, bit for bit."""
    gguf = pytest.importorskip("gguf")
    safetensors = pytest.importorskip("safetensors.numpy")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
        "blk.29.attn_norm.weight": "model.layers.29.input_layernorm.weight",
    }
    converted = safetensors.load_file(ensure_checkpoint() / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf()).tensors}
    for ours, theirs in names.items():
        expected = gguf.dequantize(tensors[ours].data, tensors[ours].tensor_type)
        np.testing.assert_array_equal(converted[theirs], expected.reshape(converted[theirs].shape))
