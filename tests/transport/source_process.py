"""A process that offers a buffer through a transport until its standard input ends, and the handle of it for tests.

The process prints one line: endpoint (hex) and address. Byte i of the buffer is (i * 7 + seed) mod 251 + 1, never 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from transport import Memory, create_transport

ROOT = Path(__file__).parents[2]
_PERIOD = 251


def content(num_bytes: int, seed: int) -> np.ndarray:
    once = ((np.arange(_PERIOD) * 7 + seed) % _PERIOD + 1).astype(np.uint8)
    return np.tile(np.tile(once, 4096), -(-num_bytes // (_PERIOD * 4096)))[:num_bytes]


class SourceProcess:
    """A running source. `options` are those of the transport, `command` goes in front (such as `ip netns exec`)."""

    def __init__(
        self,
        kind: str,
        num_bytes: int,
        seed: int,
        *,
        options: Mapping[str, object] = MappingProxyType({}),
        command: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.num_bytes, self.seed = num_bytes, seed
        self.endpoint = b""
        self.address = 0
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__, kind, str(num_bytes), str(seed), json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NIXL_LOG_LEVEL": "WARN", **env},
        )

    @property
    def content(self) -> np.ndarray:
        """What its buffer holds."""
        return content(self.num_bytes, self.seed)

    def wait(self) -> None:
        """Wait for its endpoint; sources start side by side."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if len(words) == 2 and words[1].isdecimal():
                self.endpoint, self.address = bytes.fromhex(words[0]), int(words[1])
                return
        raise AssertionError("the source process did not start")

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    kind, num_bytes, seed, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    buffer = content(num_bytes, seed)
    with create_transport(kind, **options) as transport:
        transport.register([Memory(buffer.ctypes.data, num_bytes)])
        print(transport.endpoint().hex(), buffer.ctypes.data, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
