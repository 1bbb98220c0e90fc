"""NIXL used as its own documentation and vLLM's NixlConnector use it, to compare with.

Descriptors of all pieces are prepared once for each peer, and a read picks some by number.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.regions import Memory
from transport.segments import Segments

CONNECTOR_THREADS = 4
"""What vLLM's NixlConnector has by default; NIXL's own default is 0."""


class StockAgent:
    """A NIXL agent with the defaults of NIXL's Python interface that offers `memory`, and reads from other agents."""

    def __init__(self, name: str, memory: Sequence[Memory], num_threads: int = 0) -> None:
        api = importlib.import_module("nixl._api")
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(num_threads=num_threads))
        self._agent.register_memory([(stretch.address, stretch.num_bytes, 0, "") for stretch in memory], "DRAM")

    def metadata(self) -> bytes:
        """What a reading agent needs."""
        return bytes(self._agent.get_agent_metadata())

    def attach(self, metadata: bytes) -> str:
        """Connect to a source; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, peer: str, segments: Segments) -> StockRead:
        """Prepare descriptors for `segments` (source at `peer`, target here)."""
        target, source = (
            self._agent.prep_xfer_dlist(
                name, np.stack([addresses, segments.length, np.zeros_like(addresses)], axis=1), "DRAM"
            )
            for name, addresses in (("NIXL_INIT_AGENT", segments.target), (peer, segments.source))
        )
        return StockRead(self._agent, target, source, len(segments))


class StockRead:
    """A prepared read, which can be carried out again and again."""

    def __init__(self, agent: Any, target: Any, source: Any, num_pieces: int) -> None:
        self._agent, self._target, self._source = agent, target, source
        self._numbers = np.arange(num_pieces, dtype=np.int32)

    def run(self, *, merge: bool) -> None:
        """Read everything and wait. `merge`: let NIXL join neighbours in the list, which is its default."""
        handle = self._agent.make_prepped_xfer(
            "READ", self._target, self._numbers, self._source, self._numbers, skip_desc_merge=not merge
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"read of a stock NIXL agent ended as {state}")
