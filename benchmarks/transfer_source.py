"""The source process of `benchmarks.transfer`: offers memory to readers until its standard input closes.

Reads one line of JSON from standard input, {"host", "staging_bytes", "sizes"}, and answers with one line: the address
of each of the caches, filled so that every 8 bytes tell their offset, and what readers need, by way of transport.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import IO

import torch

from transport import create_transport
from transport.data_plane import DataPlane, ReadOptions
from transport.regions import memory_of

TRANSPORTS = ("cma", "nixl")


def own_stdout() -> IO[str]:
    """Standard output for this program alone: what libraries print there goes to standard error from now on."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def main() -> None:
    """Serve one reader."""
    answers = own_stdout()
    order = json.loads(sys.stdin.readline())
    caches = [torch.arange(size // 8, dtype=torch.int64) for size in order["sizes"]]
    options = ReadOptions(staging_bytes=order["staging_bytes"])
    planes: dict[str, DataPlane] = {}
    for name in TRANSPORTS:
        plane = DataPlane([[create_transport(name)]], options, order["host"])
        plane.start(memory_of(caches))
        planes[name] = plane
    answer = {
        "pid": os.getpid(),
        "addresses": [cache.data_ptr() for cache in caches],
        "offers": {name: base64.b64encode(plane.serve()).decode() for name, plane in planes.items()},
    }
    print(json.dumps(answer), file=answers, flush=True)
    sys.stdin.read()
    for plane in planes.values():
        plane.close()


if __name__ == "__main__":
    main()
