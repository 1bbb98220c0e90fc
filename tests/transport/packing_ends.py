"""The two ends of packed reads within one process: a cache that is read from, and one that is read into."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from transport import Memory, MemoryTransport, Segments, Transfer
from transport.base import MemoryMap
from transport.control import ControlClient
from transport.memory import Fault
from transport.packing import Packer
from transport.staging import Staging
from transport.unpacking import Unpacker

SIZE = 1 << 20
SLICE = 64 << 10


class Source:
    """A cache that others read from, with its packer."""

    def __init__(self, size: int = SIZE, num_slices: int = 4, hold_s: float = 30.0) -> None:
        self.buffer = np.random.default_rng(1).integers(0, 256, size).astype(np.uint8)
        self.address = int(self.buffer.ctypes.data)
        self.staging = Staging(num_slices * SLICE, SLICE)
        self.transport = MemoryTransport()
        self.transport.start()
        self.transport.register([Memory(self.address, size), self.staging.memory])
        self.packer = Packer("127.0.0.1", self.staging, [Memory(self.address, size)], hold_s=hold_s)
        self.packer.start()

    def close(self) -> None:
        self.transport.close()
        self.packer.close()


class Target:
    """A cache that is read into."""

    def __init__(self, client: ControlClient, size: int = SIZE, num_slices: int = 4) -> None:
        self.buffer = np.random.default_rng(2).integers(0, 256, size).astype(np.uint8)
        self.address = int(self.buffer.ctypes.data)
        self.staging = Staging(num_slices * SLICE, SLICE)
        self.client = client
        self.transport = MemoryTransport()
        self.transport.start()
        self.transport.register([Memory(self.address, size), self.staging.memory])
        self.woken = threading.Event()
        self.copier = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.transport.close()
        self.copier.shutdown()

    def unpacker(self, timeout_s: float = 10.0) -> Unpacker:
        memory = MemoryMap([Memory(self.address, len(self.buffer))])
        return Unpacker(self.client, self.staging, memory, self.woken.set, self.copier, timeout_s=timeout_s)

    def read(
        self,
        source: Source,
        pattern: Segments,
        timeout_s: float = 10.0,
        faults: tuple[Fault, ...] = (),
        path: str = "gather and scatter",
    ) -> Transfer:
        """Read offsets of the source's buffer to offsets of one's own; the n-th slice takes the n-th fault."""
        self.transport._faults.extend(faults)
        segments = Segments(pattern.source + source.address, pattern.target + self.address, pattern.length)
        peer = self.transport.attach(source.transport.endpoint())
        packer = source.packer.address if "gather" in path else None
        return self.unpacker(timeout_s).read(self.transport, peer, packer, segments, scatters="scatter" in path)
