"""The other end of a transfer over UCX, in a process of its own; forked where torch is loaded already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.transport.source_process import content
from transport import Memory, Segments, Transfer, TransferState, UcxTransport, ucx_reader, ucx_source

SIZE = 16 << 20
TRANSPORT_MODULES = ucx_reader, ucx_source  # imported before any process is forked, because that takes long

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def finish(transfer: Transfer, timeout_s: float = 60.0) -> TransferState:
    deadline = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    return transfer.poll()


def every_second(source: int, target: int, piece: int) -> Segments:
    """Every second piece of SIZE bytes, from and to the same place in two buffers."""
    start = np.arange(0, SIZE, 2 * piece, dtype=np.int64)
    return Segments.of(source + start, target + start, piece)


class Other:
    """A running process."""

    def __init__(self, work: Any, *arguments: object) -> None:
        self.pipe, there = _processes.Pipe()
        self.process = _processes.Process(target=work, args=(there, *arguments), daemon=True)
        self.process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.join(10)

    def end(self) -> None:
        """Kill it, whatever state it is in."""
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class Source(Other):
    """A process that offers `content(SIZE, seed)` until `pipe` is closed."""

    def __init__(self, seed: int) -> None:
        super().__init__(_offer, seed)
        self.content = content(SIZE, seed)
        self.endpoint, self.address = self.pipe.recv()


class RestlessReader(Other):
    """A process that reads from a source again and again."""

    def __init__(self, endpoint: bytes, address: int, piece: int) -> None:
        super().__init__(_read_on, endpoint, address, piece)
        assert self.pipe.recv() == "reading"


def _offer(pipe: Connection, seed: int) -> None:
    buffer = content(SIZE, seed)
    with UcxTransport() as transport:
        transport.register([Memory(int(buffer.ctypes.data), SIZE)])
        pipe.send((transport.endpoint(), int(buffer.ctypes.data)))
        pipe.poll(None)


def _read_on(pipe: Connection, endpoint: bytes, address: int, piece: int) -> None:
    buffer = np.zeros(SIZE, np.uint8)
    with UcxTransport() as transport:
        transport.register([Memory(int(buffer.ctypes.data), SIZE)])
        peer = transport.attach(endpoint)
        pipe.send("reading")
        while True:
            with transport.read(peer, every_second(address, int(buffer.ctypes.data), piece)) as transfer:
                finish(transfer)
