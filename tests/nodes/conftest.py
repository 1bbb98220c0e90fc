"""Nodes shared by all tests here: started when first needed, a few at a time, always stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.nodes import stop_all, wait_all_ready
from tests.nodes.cluster import HEAD_SIZE, READY_TIMEOUT_S, Layout, VllmNode, make_node
from tests.tiny_model import write_tiny_llama

MAX_ALIVE = 6


class Farm:
    """Starts nodes by layout and keeps the most recently used ones alive."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._alive: dict[Layout, VllmNode] = {}

    def get(self, *layouts: Layout) -> list[VllmNode]:
        """Ready nodes for the layouts, in order. New ones start side by side."""
        fresh = [layout for layout in dict.fromkeys(layouts) if layout not in self._alive]
        self._make_room(set(layouts), len(fresh))
        for layout in fresh:
            self._alive[layout] = self.make(layout)
            self._alive[layout].node.start()
        wait_all_ready([self._alive[layout].node for layout in fresh], READY_TIMEOUT_S)
        for layout in layouts:
            self._alive[layout] = self._alive.pop(layout)
        return [self._alive[layout] for layout in layouts]

    def make(self, layout: Layout) -> VllmNode:
        """A node of the farm's model that is not started and not owned by the farm."""
        model = self._directory / f"tiny-{layout.kv_heads}-kv-heads"
        if not model.exists():
            write_tiny_llama(model, num_kv_heads=layout.kv_heads, head_size=HEAD_SIZE)
        return make_node(model, layout, self._directory / "logs")

    def stop(self, layout: Layout) -> None:
        stop_all([self._alive.pop(layout).node])

    def kill(self, layout: Layout) -> None:
        """End a node as a crash would."""
        self._alive.pop(layout).node.kill()

    def close(self) -> None:
        stop_all([node.node for node in self._alive.values()])

    def _make_room(self, wanted: set[Layout], num_new: int) -> None:
        idle = [layout for layout in self._alive if layout not in wanted]
        for layout in idle[: max(0, len(self._alive) + num_new - MAX_ALIVE)]:
            self.stop(layout)


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(tmp_path_factory.mktemp("nodes"))
    try:
        yield farm
    finally:
        farm.close()
