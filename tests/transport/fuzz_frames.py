"""What no engine would send: mutated messages of every type, random bytes, wrong sizes and versions, broken handshakes.

One seed gives one sequence, so that a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from transport.control.messages import MAX_REQUEST_BYTES, PROTOCOL_VERSION, Message, encode

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"%b" + bytes(32)
"""ZMTP 3.1: signature, version, mechanism (20 bytes), as-server, filler."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 4096, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1, -(1 << 63), 0.5, float("nan"), 1e308),
    *("", "x", "x" * 65, "x" * 5000, "\0", "é", b"", b"\0" * 65, [], [[]], [0] * 5000, {}, {"type": "Open"}),
)  # fmt: skip


class Fuzz:
    """An endless source of bad input, made from valid `messages`."""

    def __init__(self, messages: list[Message], seed: int) -> None:
        self._random = random.Random(seed)
        self._messages = messages
        self._kinds: dict[Callable[[], list[bytes]], int] = {
            self._mutated: 40,
            self._restructured: 30,
            self._truncated: 10,
            self._random_bytes: 8,
            self._wrong_version: 8,
            self._odd_envelope: 6,
        }

    def messages_of_frames(self) -> Iterator[tuple[str, list[bytes]]]:
        """(kind, frames of one ZeroMQ message); each of them has to be answered."""
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while True:
            for make in self._random.choices(kinds, weights, k=1000):
                yield make.__name__.strip("_"), make()
            yield "oversized", [b"envelope", self._oversized(MAX_REQUEST_BYTES + 1, 2 * MAX_REQUEST_BYTES)]

    def cut_off(self) -> list[bytes]:
        """A message so long that the server may cut the connection without an answer."""
        return [b"envelope", self._oversized(2 * MAX_REQUEST_BYTES + 1, 3 * MAX_REQUEST_BYTES)]

    def connection(self) -> bytes:
        """What a TCP connection that is no peer's sends."""
        noise = self._random.randbytes(self._random.randrange(400))
        greeting = GREETING % self._random.choice([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", noise[:20]]).ljust(20, b"\0")
        hello = b"\x04\xc8\x05HELLO\x01\x00" + self._random.randbytes(192)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
        huge = b"\x02" + self._random.choice([b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(7) + b"\xff"])
        return self._random.choice(
            [
                *(noise, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + noise, greeting, greeting + noise),
                *(greeting + hello, greeting + hello + noise, greeting + ready + noise, greeting + ready + huge),
                greeting[: self._random.randrange(len(greeting))],
            ]
        )

    def _frame(self) -> bytes:
        return encode(self._random.choice(self._messages))  # type: ignore[arg-type]

    def _mutated(self) -> list[bytes]:
        frame = bytearray(self._frame())
        for _ in range(self._random.choice([1, 1, 1, 2, 5, 20])):
            at = self._random.randrange(len(frame))
            match self._random.randrange(5):
                case 0:
                    frame[at] ^= 1 << self._random.randrange(8)
                case 1:
                    frame[at] = self._random.randrange(256)
                case 2:
                    frame[at:at] = self._random.randbytes(self._random.randrange(1, 9))
                case 3:
                    del frame[at : at + self._random.randrange(1, 9)]
                    frame = frame or bytearray(1)
                case 4:
                    other = self._frame()
                    frame[at:] = other[self._random.randrange(len(other)) :] or b"\0"
        return [b"envelope", bytes(frame)]

    def _restructured(self) -> list[bytes]:
        """A map that decodes, with fields of other types, too many, too few, or nested without end."""
        fields = msgspec.msgpack.decode(self._frame()[1:])
        inner = fields
        while self._random.random() < 0.4 and any(isinstance(value, dict) and value for value in inner.values()):
            inner = self._random.choice([value for value in inner.values() if isinstance(value, dict) and value])
        name = self._random.choice(list(inner))
        match self._random.randrange(5):
            case 0 | 1:
                inner[name] = self._random.choice(ODD_VALUES)
            case 2:
                del inner[name]
            case 3:
                inner[self._random.choice(["more", "", "type", name])] = self._random.choice(ODD_VALUES)
            case 4:
                deep: Any = []
                for _ in range(self._random.choice([2, 50, 300])):
                    deep = [deep]
                inner[name] = deep
        return [b"envelope", bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode(fields)]

    def _truncated(self) -> list[bytes]:
        frame = self._frame()
        return [b"envelope", frame[: self._random.randrange(len(frame))]]

    def _random_bytes(self) -> list[bytes]:
        noise = self._random.randbytes(self._random.choice([0, 1, 5, 50, 500, 5000]))
        nested = bytes((self._random.choice([0x91, 0x81, 0xDC, 0xDD, 0xDF]),)) * self._random.choice(
            [10, 1000, 100_000]
        )
        return [b"envelope", bytes((PROTOCOL_VERSION,)) + self._random.choice([noise, noise, noise, nested])]

    def _wrong_version(self) -> list[bytes]:
        version = self._random.choice([0, PROTOCOL_VERSION + 1, 127, 255, self._random.randrange(256)])
        return [b"envelope", bytes((version,)) + self._frame()[1:]]

    def _odd_envelope(self) -> list[bytes]:
        envelope = [self._random.randbytes(self._random.choice([0, 1, 64, 65, 1000])) for _ in range(4)]
        return [*envelope[: self._random.randrange(5)], self._frame()]

    def _oversized(self, least: int, most: int) -> bytes:
        return (self._frame() + bytes(most))[: self._random.randrange(least, most)]
