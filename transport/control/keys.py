"""Key files of the control channel: the secret this node speaks with, and whom it speaks to.

A key directory holds `node.secret` (this node's CURVE key pair, mode 0600) and `allowed/*.key` (public keys of other
nodes). Files are TOML, keys in Z85. Knows files and keys; sockets are the business of the server and the client.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct

from layouts import ConfigError
from layouts.errors import config_error, listed
from transport.control.secrets import read_secret

logger = logging.getLogger(__name__)

SECRET_FILE = "node.secret"
ALLOWED_FOLDER = "allowed"
PUBLIC_SUFFIX = ".key"
MAX_KEY_FILE_BYTES = 1 << 16

Network = IPv4Network | IPv6Network
Stamp = tuple[tuple[str, int, int], ...]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
_Key = Annotated[str, Meta(min_length=40, max_length=40)]


class _PublicFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a public key file, which is copied to peers."""

    name: _Name
    public_key: _Key
    hosts: list[str] = []


class _SecretFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of node.secret; the public key follows from the secret one."""

    name: _Name
    secret_key: _Key
    hosts: list[str] = []


_File = TypeVar("_File", _PublicFile, _SecretFile)


@dataclass(frozen=True, slots=True)
class PeerKey:
    """The public key of a node (Z85), and the networks in which it answers: none for a node that only asks."""

    name: str
    public: bytes
    hosts: tuple[Network, ...] = ()

    def precision_for(self, host: str) -> int:
        """Prefix length of the narrowest network that holds this numeric address; -1 when none does."""
        address = ip_address(host)
        return max((network.prefixlen for network in self.hosts if address in network), default=-1)


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The keys of one node: its own pair, and the public keys of `others` as of the time that `stamp` tells."""

    directory: Path
    own: PeerKey
    secret: bytes = field(repr=False)
    others: tuple[PeerKey, ...] = ()
    stamp: Stamp = ()

    @classmethod
    def load(cls, directory: str | Path) -> NodeKeys:
        """Read a key directory. Raises ConfigError for what is missing, malformed or readable by others."""
        if not zmq.has("curve"):
            raise ConfigError("keys are configured, but this pyzmq has no CURVE; install the pyzmq wheel from PyPI")
        path = Path(directory) / SECRET_FILE
        content = _parse(read_secret(path, "Make keys with: python -m kvweave keys new DIR"), _SecretFile, path)
        public = _public_of(content.secret_key, path)
        own = PeerKey(content.name, public, _networks(content.hosts, path))
        return cls(Path(directory), own, content.secret_key.encode()).refreshed()

    @property
    def allowed(self) -> tuple[PeerKey, ...]:
        """Who may ask this node and be asked by it. Its own key is one: whoever has the secret is this node."""
        return (self.own, *self.others)

    def allows(self, public: bytes) -> bool:
        """Whether a peer with this public key (Z85) may connect."""
        return any(key.public == public for key in self.allowed)

    def key_at(self, host: str) -> PeerKey:
        """The key that whoever answers at this numeric address must have: the narrowest network decides.

        Raises:
            ConfigError: no allowed key lists this host, or several do alike.
        """
        precision = max(key.precision_for(host) for key in self.allowed)
        matches = [key for key in self.allowed if key.precision_for(host) == precision >= 0]
        if len({key.public for key in matches}) != 1:
            raise config_error(
                f"key of the node at {host}",
                got=listed(key.name for key in matches) or "none",
                allowed=f"one of the keys in {self.directory / ALLOWED_FOLDER}, the one whose `hosts` list {host}",
                remedy="Copy the node's public key file there, and write its address into `hosts`.",
            )
        return matches[0]

    def refreshed(self) -> NodeKeys:
        """These keys with the others as they are on disk now: the same object if nothing changed.

        Raises:
            ConfigError: a file in `allowed` is no public key.
        """
        folder = self.directory / ALLOWED_FOLDER
        stamp = _stamp(folder)
        if stamp == self.stamp:
            return self
        return replace(self, others=tuple(_read_public(folder / name) for name, _, _ in stamp), stamp=stamp)

    def refreshed_or_same(self) -> NodeKeys:
        """As `refreshed`, in a running node: a bad file is logged, and who was allowed before stays so."""
        try:
            return self.refreshed()
        except ConfigError as error:
            logger.error("the allowed keys stay as they were: %s", error)
            return self


def load_keys(directory: str) -> NodeKeys | None:
    """The keys in a directory; None, which means no encryption, where none is named."""
    return NodeKeys.load(directory) if directory else None


def create_keys(directory: str | Path, name: str, hosts: Sequence[str]) -> NodeKeys:
    """Make a key pair: `node.secret` with mode 0600, `NAME.key` to copy to peers, and an empty `allowed`.

    Raises:
        ConfigError: a directory that holds keys already or cannot be written, a name or host of the wrong form.
    """
    folder, (public, secret) = Path(directory), (key.decode() for key in zmq.curve_keypair())
    where = folder / f"{name}{PUBLIC_SUFFIX}"
    content = _validated({"name": name, "public_key": public, "hosts": list(hosts)}, _PublicFile, where)
    networks = _networks(content.hosts, where)
    try:
        (folder / ALLOWED_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(folder / SECRET_FILE, _SecretFile(name, secret, content.hosts), 0o600)
        _write_new(where, content, 0o644)
    except FileExistsError as error:
        raise config_error(
            "key directory",
            got=f"{error.filename}, which exists",
            allowed="a directory without keys",
            remedy="Keys are never overwritten: name another directory.",
        ) from error
    except OSError as error:
        raise ConfigError(f"key directory {folder} cannot be written: {error.strerror}") from error
    return NodeKeys(folder, PeerKey(name, public.encode(), networks), secret.encode())


def _stamp(folder: Path) -> Stamp:
    """Names, times (ns) and sizes of the public key files: changes when one of them does."""
    try:
        with os.scandir(folder) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(PUBLIC_SUFFIX)]
    except OSError as error:
        if not folder.exists():
            return ()
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    return tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in files))


def _read_public(path: Path) -> PeerKey:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"public key {path} cannot be read: {error.strerror}") from error
    content = _parse(data, _PublicFile, path)
    _public_of(content.public_key, path)
    return PeerKey(content.name, content.public_key.encode(), _networks(content.hosts, path))


def _parse(data: bytes, kind: type[_File], path: Path) -> _File:
    try:
        return _validated(msgspec.toml.decode(data), kind, path)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error


def _validated(content: object, kind: type[_File], path: Path) -> _File:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise config_error(
            f"key file {path}",
            got=error,
            allowed=f"the fields {listed(kind.__struct_fields__)}; a name of letters, digits, '.', '_' and '-'",
            remedy="Key files are made by: python -m kvweave keys new DIR",
        ) from error


def _public_of(key: str, path: Path) -> bytes:
    """The public key of a secret one (both in Z85); also tells whether any text is a key at all."""
    try:
        return zmq.curve_public(key.encode("ascii"))
    except (zmq.ZMQError, UnicodeEncodeError) as error:
        raise ConfigError(f"{path}: the key in it is no CURVE key in Z85; was the file edited?") from error


def _networks(hosts: Sequence[str], path: Path) -> tuple[Network, ...]:
    try:
        return tuple(ip_network(host) for host in hosts)
    except ValueError as error:
        raise config_error(
            f"hosts of {path}",
            got=error,
            allowed="numeric addresses and networks, such as 10.0.0.5 or 10.0.0.0/16",
            remedy="Write what a name stands for: names are not looked up here.",
        ) from error


def _write_new(path: Path, content: Struct, mode: int) -> None:
    lines = [f"{field} = {json.dumps(value)}\n" for field, value in msgspec.structs.asdict(content).items()]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)
        file.writelines(lines)
