"""The secret that prefill and decode nodes share so that nobody else can make `kv_transfer_params`.

Knows bytes and one file, not what is signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layouts.errors import config_error
from transport.control.secrets import read_secret

VARIABLE = "KVWEAVE_SECRET_FILE"
LABEL = "kvweave-params-1"
MIN_SECRET_BYTES = 32
_REMEDY = "Make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to all nodes."


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """At least MIN_SECRET_BYTES bytes that only the nodes of one cluster know."""

    secret: bytes = field(repr=False)

    @classmethod
    def from_environment(cls) -> SharedSecret | None:
        """The secret in the file that KVWEAVE_SECRET_FILE names; None when it names none.

        Raises:
            ConfigError: the file is missing, too short, or can be read by others than its owner.
        """
        name = os.environ.get(VARIABLE, "")
        return cls.read(Path(name)) if name else None

    @classmethod
    def read(cls, path: Path) -> SharedSecret:
        """Read a secret file; white space around the secret, such as a line end, does not count."""
        secret = read_secret(path, f"{VARIABLE} names it. {_REMEDY}").strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise config_error(
                f"secret in {path} ({VARIABLE})",
                got=f"{len(secret)} bytes",
                allowed=f"at least {MIN_SECRET_BYTES}",
                remedy=_REMEDY,
            )
        return cls(secret)

    def sign(self, values: Sequence[str | int]) -> str:
        """HMAC-SHA256 of the values and of what they are (LABEL), as 64 hexadecimal digits.

        As JSON the values have one reading: no two lists of them give the same bytes.
        """
        text = json.dumps([LABEL, *values], separators=(",", ":"))
        return hmac.new(self.secret, text.encode("ascii"), hashlib.sha256).hexdigest()

    def has_signed(self, values: Sequence[str | int], signature: object) -> bool:
        """Whether `signature`, which may be anything, is that of these values; takes as long for any."""
        text = signature if isinstance(signature, str) and signature.isascii() else ""
        return hmac.compare_digest(self.sign(values), text)
