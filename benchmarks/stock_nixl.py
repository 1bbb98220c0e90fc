"""NIXL used as its own documentation and vLLM's NixlConnector use it, to compare with.

Descriptors of all pieces are prepared beforehand, and a read picks some by number.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.regions import Memory
from transport.segments import Segments

CONNECTOR_THREADS = 4
"""What vLLM's NixlConnector has by default; NIXL's own default is 0."""


def timed_read(
    memory: Sequence[Memory], source: bytes, segments: Segments, *, merge: bool = False, num_threads: int = 0
) -> float:
    """Seconds that a new agent with the defaults of NIXL's Python interface takes to read `segments`.

    `source`: metadata of the agent to read from. Starting, connecting and preparing descriptors do not count. The agent
    is gone afterwards, because its progress thread spins on a core. `merge`: let NIXL join neighbours in the list.
    """
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent("stock-reader", api.nixl_agent_config(num_threads=num_threads))
    agent.register_memory([(stretch.address, stretch.num_bytes, 0, "") for stretch in memory], "DRAM")
    peer = agent.add_remote_agent(source)
    ends = [
        agent.prep_xfer_dlist(name, np.stack([addresses, segments.length, np.zeros_like(addresses)], axis=1), "DRAM")
        for name, addresses in (("NIXL_INIT_AGENT", segments.target), (peer, segments.source))
    ]
    _read(agent, ends, 1, merge)  # connects
    began = time.perf_counter()
    _read(agent, ends, len(segments), merge)
    return time.perf_counter() - began


def _read(agent: Any, ends: Sequence[Any], count: int, merge: bool) -> None:
    numbers = np.arange(count, dtype=np.int32)
    handle = agent.make_prepped_xfer("READ", ends[0], numbers, ends[1], numbers, skip_desc_merge=not merge)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"read of a stock NIXL agent ended as {state}")
