"""Reads a model's attention sizes from its Hugging Face `config.json`. Knows the file's keys and nothing of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layouts.advise import ModelShape
from layouts.errors import ConfigError, config_error


def read_model_config(path: str | Path, element_bytes: int) -> ModelShape:
    """The shape of the model in a `config.json`, or in a folder with one.

    Args:
        path: the file or folder.
        element_bytes: bytes of one element of the KV cache.

    Raises:
        ConfigError: the file cannot be read, is no JSON object, or lacks a size.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model config {file}: {error.strerror}; allowed: a config.json or its folder") from None
    except ValueError as error:
        raise ConfigError(f"model config {file}: no JSON ({error}); allowed: a model's config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model config {file}: got {type(config).__name__}; allowed: a JSON object")
    text_config = config.get("text_config")
    return _shape(text_config if isinstance(text_config, dict) else config, element_bytes)


def _shape(config: Mapping[str, Any], element_bytes: int) -> ModelShape:
    num_layers, num_query_heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rope_dim = _size(config, "qk_rope_head_dim")
        return ModelShape(
            num_layers=num_layers,
            num_kv_heads=1,
            entry_bytes=(_size(config, "kv_lora_rank") + rope_dim) * element_bytes,
            mla=True,
            num_query_heads=num_query_heads,
            key_dim=_size(config, "qk_nope_head_dim") + rope_dim,
            value_dim=_size(config, "v_head_dim"),
        )
    if config.get("head_dim") is not None:
        head_dim = _size(config, "head_dim")
    else:
        head_dim = _size(config, "hidden_size") // num_query_heads
    has_kv_heads = config.get("num_key_value_heads") is not None
    return ModelShape(
        num_layers=num_layers,
        num_kv_heads=_size(config, "num_key_value_heads") if has_kv_heads else num_query_heads,
        entry_bytes=2 * head_dim * element_bytes,
        mla=False,
        num_query_heads=num_query_heads,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        raise config_error(
            f"model config key {key}",
            got=repr(value),
            allowed="an integer of at least 1",
            remedy="Pass a complete config.json, or --kv-heads, --layers and --head-dim instead of it.",
        )
    return value
