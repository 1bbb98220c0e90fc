"""Addresses of the control channel: where to bind and where to connect, in the words of ZeroMQ."""

from __future__ import annotations

import ipaddress
import socket

from layouts import ConfigError

Address = tuple[str, int]


def url_of(address: Address) -> str:
    """Return the ZeroMQ URL of a (host, port) pair; IPv6 literals get their brackets."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bindable_address(host: str, port: int) -> Address:
    """Resolve `host` to the numeric address to bind; ConfigError for names without one and for wildcards.

    A wildcard is refused because the same address is advertised to peers, who could not connect to it.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"control port is {port}; allowed are 0 (any free port) to 65535")
    if host.strip("[]") in ("", "*"):
        raise ConfigError(_wildcard(host))
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"control host {host!r} has no address ({error}); set `host` to an address of this machine"
        ) from error
    number = str(resolved[0][4][0])
    if _is_wildcard(number):
        raise ConfigError(_wildcard(host))
    return number, port


def _is_wildcard(number: str) -> bool:
    """Also IPv4's wildcard in the clothes of IPv6, ::ffff:0.0.0.0."""
    address = ipaddress.ip_address(number)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def _wildcard(host: str) -> str:
    return (
        f"control host is the wildcard {host!r}; it is advertised to peers, so set `host` to an address "
        "of this machine that they can reach"
    )
