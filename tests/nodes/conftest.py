"""Nodes shared by the tests of a module: started when first needed, a few at a time, always stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.nodes import stop_all, wait_all_ready
from tests.nodes.cluster import READY_TIMEOUT_S, Layout, VllmNode, make_node
from tests.tiny_model import write_tiny_llama

MAX_ALIVE = 4
HEAD_SIZE = 32


class Farm:
    """Starts nodes by name, keeps the most recently used ones alive."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._alive: dict[str, VllmNode] = {}

    def model(self, kv_heads: int) -> Path:
        path = self._directory / f"tiny-{kv_heads}-kv-heads"
        return path if path.exists() else write_tiny_llama(path, num_kv_heads=kv_heads, head_size=HEAD_SIZE)

    def get(self, *layouts: Layout | tuple[str, Layout]) -> list[VllmNode]:
        """Ready nodes for the layouts, in order; ("plain", layout) is a node of plain vLLM."""
        wanted = {self._name(layout): layout for layout in layouts}
        fresh = [self._make(name, layout) for name, layout in wanted.items() if name not in self._alive]
        self._make_room(set(wanted))
        for node in fresh:
            node.node.start()
            self._alive[node.node.name] = node
        wait_all_ready([node.node for node in fresh], READY_TIMEOUT_S)
        for name in wanted:
            self._alive[name] = self._alive.pop(name)
        return [self._alive[self._name(layout)] for layout in layouts]

    def stop(self, *nodes: VllmNode) -> None:
        stop_all([node.node for node in nodes])
        for node in nodes:
            del self._alive[node.node.name]

    def close(self) -> None:
        stop_all([node.node for node in self._alive.values()])

    def _make(self, name: str, layout: Layout | tuple[str, Layout]) -> VllmNode:
        plain = isinstance(layout, tuple)
        flags = layout[1] if isinstance(layout, tuple) else layout
        role = None if plain else "kv_both"
        return make_node(name, self.model(flags.kv_heads), flags, self._directory / "logs", role=role)

    def _make_room(self, wanted: set[str]) -> None:
        idle = [name for name in self._alive if name not in wanted]
        for name in idle[: max(0, len(self._alive.keys() | wanted) - MAX_ALIVE)]:
            self.stop(self._alive[name])

    def _name(self, layout: Layout | tuple[str, Layout]) -> str:
        kind, flags = layout if isinstance(layout, tuple) else ("weave", layout)
        return f"{kind}-h{flags.kv_heads}-tp{flags.tp}-pcp{flags.pcp}-dcp{flags.dcp}-b{flags.block}-i{flags.interleave}"


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(tmp_path_factory.mktemp("nodes"))
    try:
        yield farm
    finally:
        farm.close()
