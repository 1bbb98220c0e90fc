"""A process that offers a buffer, packed, until its standard input ends; run by test_packing.py.

Prints one line: endpoint (hex), address of the buffer and packer address (hex). The bytes are those of
source_process.py.
"""

from __future__ import annotations

import sys

import msgspec

from tests.transport.source_process import content
from transport import Memory, create_transport
from transport.packing import Packer
from transport.staging import Staging


def main() -> None:
    kind, num_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    buffer = content(num_bytes, seed)
    memory = [Memory(buffer.ctypes.data, num_bytes)]
    staging = Staging(4 << 20, 1 << 20)
    packer = Packer("127.0.0.1", staging, memory)
    with create_transport(kind) as transport:
        transport.register([*memory, staging.memory])
        packer.start()
        address = msgspec.msgpack.encode(packer.address).hex()
        print(transport.endpoint().hex(), buffer.ctypes.data, address, flush=True)
        sys.stdin.read()
        packer.close()


if __name__ == "__main__":
    main()
