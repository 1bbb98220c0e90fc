"""The vLLM KV connector. `connector.WeaveConnector` needs vllm; everything else here runs without it."""

from __future__ import annotations

from typing import Any

__all__ = ["WeaveConnector"]


def __getattr__(name: str) -> Any:
    if name == "WeaveConnector":
        from connector.connector import WeaveConnector

        return WeaveConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
