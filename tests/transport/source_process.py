"""A process that offers a buffer through NIXL until its standard input ends; run by test_nixl.py.

Prints one line: endpoint (hex) and address. Byte i of the buffer is (i * 7 + seed) mod 251 + 1, never 0.
"""

from __future__ import annotations

import sys

import numpy as np

from transport import Memory, NixlTransport


def content(num_bytes: int, seed: int) -> np.ndarray:
    return ((np.arange(num_bytes, dtype=np.int64) * 7 + seed) % 251 + 1).astype(np.uint8)


def main() -> None:
    num_bytes, seed = int(sys.argv[1]), int(sys.argv[2])
    buffer = content(num_bytes, seed)
    with NixlTransport() as transport:
        transport.register([Memory(buffer.ctypes.data, num_bytes)])
        print(transport.endpoint().hex(), buffer.ctypes.data, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
