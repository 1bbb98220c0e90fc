"""Which prefill nodes a decode node may contact: `allowed_peers`, read once. Names are looked up then, never later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from layouts import ConfigError
from layouts.errors import config_error

PRIVATE, ANY = "private", "any"
WORDS = {
    PRIVATE: ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7"),
    ANY: ("0.0.0.0/0", "::/0"),
}
"""Loopback, RFC 1918 and RFC 4193 (ULA). Link-local ones are not: cloud machines have their metadata service there."""

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AllowedPeers:
    """The networks in which prefill nodes may be contacted."""

    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, text: str) -> AllowedPeers:
        """Read a comma-separated list of addresses, networks, names, and the words `private` and `any`.

        Raises:
            ConfigError: an empty list, or a part that is none of these.
        """
        parts = [part.strip() for part in text.split(",")]
        return cls(tuple(network for part in parts for network in _networks(part)))

    def allow(self, host: str) -> bool:
        """Whether the node at this numeric address may be contacted; IPv4 written as IPv6 counts as IPv4."""
        address = _plain(ip_address(host))
        return any(address in network for network in self.networks)


def _networks(part: str) -> Iterator[Network]:
    if part in WORDS:
        yield from map(ip_network, WORDS[part])
    elif "/" in part or _is_number(part):
        yield _network(part)
    else:
        yield from _looked_up(part)


def _is_number(part: str) -> bool:
    try:
        ip_address(part)
    except ValueError:
        return False
    return True


def _network(part: str) -> Network:
    try:
        return ip_network(part)
    except ValueError as error:
        raise _refusal(part, str(error)) from error


def _looked_up(name: str) -> Iterator[Network]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
    except (OSError, UnicodeError) as error:
        raise _refusal(name, str(error)) from error
    if not found:
        raise _refusal(name, "no name")
    for address in {str(entry[4][0]) for entry in found}:
        yield ip_network(_plain(ip_address(address)))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _refusal(part: str, reason: str) -> ConfigError:
    return config_error(
        "kv_connector_extra_config allowed_peers",
        got=f"{part!r} ({reason})",
        allowed="a comma-separated list of addresses, networks, host names, `private` and `any`",
        remedy="Write for example 10.0.0.0/16,prefill-1; `any` lets clients direct this node anywhere.",
    )
