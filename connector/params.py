"""The `kv_transfer_params` that travel through clients and proxies: a capability and where to present it.

No block id and no memory address is in them. A client that edits them cannot reach the KV of another prompt; it could
name a host of its own, which `allowed_peers` limits and a signature prevents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from ipaddress import ip_address
from typing import Any

from connector.errors import BadParams, ForgedParams
from connector.jobs import SourceId
from connector.signing import VARIABLE, SharedSecret

_HEX_ID = re.compile(r"[0-9a-f]{32}")
MAX_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a prefill node returns for one request and a decode node receives with it."""

    capability: str
    host: str
    port: int
    incarnation: str
    num_tokens: int

    def __post_init__(self) -> None:
        _check("capability", self.capability, bool(_HEX_ID.fullmatch(self.capability)), "32 hex digits")
        _check("incarnation", self.incarnation, bool(_HEX_ID.fullmatch(self.incarnation)), "32 hex digits")
        _check("host", self.host, _is_numeric(self.host), "a numeric address")
        _check("port", self.port, 0 < self.port < 65536, "1..65535")
        _check("num_tokens", self.num_tokens, 0 < self.num_tokens < MAX_TOKENS, f"1..{MAX_TOKENS - 1}")

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def source(self) -> SourceId:
        return SourceId(self.address, self.incarnation)

    def to_dict(self, secret: SharedSecret | None = None) -> dict[str, Any]:
        """The form in an HTTP response, signed where there is a secret. `do_remote_prefill` is vLLM's own mark: it
        makes vLLM's front end call the connector when it rejects the request, so that the lease is released."""
        signed = {} if secret is None else {"signature": secret.sign(astuple(self))}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "capability": self.capability,
            "host": self.host,
            "port": self.port,
            "incarnation": self.incarnation,
            "num_tokens": self.num_tokens,
            **signed,
        }

    @classmethod
    def parse(cls, params: Mapping[str, Any], secret: SharedSecret | None = None) -> TransferParams:
        """Read params that may come from anybody. Raises `BadParams` naming the first wrong field, and `ForgedParams`
        where there is a secret and they are not signed with it."""
        fields = {"capability": str, "host": str, "port": int, "incarnation": str, "num_tokens": int}
        for name, kind in fields.items():
            value = params.get(name)
            _check(name, value, isinstance(value, kind) and not isinstance(value, bool), f"a {kind.__name__}")
        parsed = cls(**{name: params[name] for name in fields})
        if secret is not None and not secret.has_signed(astuple(parsed), params.get("signature")):
            raise ForgedParams(
                f"kv_transfer_params are {'signed with another secret' if 'signature' in params else 'not signed'}. "
                f"Set {VARIABLE} to the same secret on the prefill node, and pass its params on unchanged."
            )
        return parsed


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """The request is to be prefilled here and decoded elsewhere."""
    return bool(params) and params.get("do_remote_decode") is True  # type: ignore[union-attr]


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """The request was prefilled elsewhere: its params name a lease."""
    return bool(params) and params.get("do_remote_prefill") is True  # type: ignore[union-attr]


def _is_numeric(host: str) -> bool:
    """Names are not accepted: looking one up could stall the transfers of everybody else."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _check(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise BadParams(
            f"kv_transfer_params.{name} is {str(value)[:80]!r}; allowed: {allowed}. "
            "Pass the params of the prefill node's response on unchanged."
        )
