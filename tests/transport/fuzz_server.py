"""A control port with a real prefill node's leases behind it, in a process of its own: what the fuzzer attacks.

Prints its port and a capability, then serves until its standard input ends.
"""

from __future__ import annotations

import sys

import numpy as np

from connector.lease import Offer
from connector.pace import Pace
from connector.producer import Producer
from connector.stats import Counters
from tests.transport.samples import CACHE, MANIFEST, PLACEMENT
from transport.control import ControlServer
from transport.control.keys import load_keys
from transport.control.messages import Open, Opened

NUM_TOKENS, BLOCKS, LEASE_S = 37, [3, 2, 1], 3600.0


def digest(num_tokens: int) -> bytes:
    return num_tokens.to_bytes(4, "big")


def valid_open(capability: str, load: str) -> Open:
    return Open(capability, load, CACHE, PLACEMENT, NUM_TOKENS, digest(NUM_TOKENS))


def is_right(reply: object) -> bool:
    """Whether this answers `valid_open`."""
    return isinstance(reply, Opened) and (reply.num_tokens, reply.block_ids, reply.lease_s) == (
        *(NUM_TOKENS, [BLOCKS], LEASE_S),
    )


def main(keys_dir: str) -> None:
    producer = Producer("127.0.0.1", 0, LEASE_S, Counters(), Pace())
    producer.start(MANIFEST)
    params = producer.offer(Offer("request", NUM_TOKENS, (np.array(BLOCKS),), digest))
    server = ControlServer("127.0.0.1", 0, producer.answer, load_keys(keys_dir))
    server.start()
    print(server.address[1], params.capability, flush=True)
    sys.stdin.read()
    server.close()
    producer.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
