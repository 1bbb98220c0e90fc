"""`python -m kvweave doctor`: asks one or two nodes who they are, and whether the second could read from the first.

Sees what a control port tells to everybody who may ask. Touches no memory and needs no lease.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from layouts import Placement, plan_transfer, plan_volume
from layouts.commands.options import MAX_TOKENS, integer, positive
from layouts.errors import config_error, listed
from layouts.explain import describe, describe_routes
from layouts.words import align, counted
from transport.control.address import Address
from transport.control.client import ControlClient
from transport.control.keys import load_keys
from transport.control.messages import CacheFormat, Describe, Description, Refused
from transport.errors import PeerSilent, ProtocolError

NUM_ROUND_TRIPS = 5
MAX_ROUTE_LINES = 20


class _Unwell(Exception):
    """What is wrong with a node, in words for the reader."""


@dataclass(frozen=True, slots=True)
class _Node:
    """What a node said of itself; `round_trip_s` is the median of a few questions."""

    name: str
    said: Description
    placement: Placement
    round_trip_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor`."""
    parser.add_argument("node", metavar="HOST:PORT", help="control port of a node")
    parser.add_argument("reader", metavar="HOST:PORT", nargs="?", help="control port of a node that is to read from it")
    parser.add_argument(
        "--keys-dir", default="", metavar="DIR", help="key directory to ask with, where nodes have keys"
    )
    parser.add_argument("--timeout", type=positive, default=5.0, metavar="S", help="seconds to wait for an answer (5)")
    parser.add_argument(
        "--tokens", type=integer(1, MAX_TOKENS), default=1000, metavar="N", help="tokens to price a transfer of (1000)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints what was found; 0 when the nodes answer and fit. Raises ConfigError for addresses and keys."""
    names = [name for name in (options.node, options.reader) if name]
    addresses = [_address_of(name) for name in names]
    keys = load_keys(options.keys_dir)
    nodes = []
    with closing(ControlClient(keys)) as client:
        client.start()
        for name, address in zip(names, addresses, strict=True):
            try:
                nodes.append(_examine(client, name, address, options.timeout))
            except _Unwell as fault:
                print(f"node {name}\n  not reachable: {fault}\n")
            else:
                print("\n".join([f"node {name}", *_about(nodes[-1], encrypted=keys is not None), ""]))
    if len(nodes) < len(names):
        return 1
    return _compare(nodes[0], nodes[1], options.tokens) if len(nodes) == 2 else 0


def _address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise config_error(
            "address of a node",
            got=repr(text),
            allowed="HOST:PORT with a port from 1 to 65535",
            remedy="Write 10.0.0.5:5600, prefill-1:5600 or [fd00::5]:5600.",
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise config_error(
            "address of a node", got=f"{text!r} ({error})", allowed="a host that exists", remedy="Use its number."
        ) from error
    return str(found[0][4][0]), int(port)


def _examine(client: ControlClient, name: str, address: Address, timeout_s: float) -> _Node:
    _knock(address, timeout_s)
    said = _ask(client, address, timeout_s)
    round_trips_s = []
    for _ in range(NUM_ROUND_TRIPS):
        begin = time.monotonic()
        _ask(client, address, timeout_s)
        round_trips_s.append(time.monotonic() - begin)
    try:
        return _Node(name, said, said.placement.to_placement(), statistics.median(round_trips_s))
    except ProtocolError as error:
        raise _Unwell(str(error)) from error


def _knock(address: Address, timeout_s: float) -> None:
    """Tells a port that nobody has from one that does not talk to us."""
    try:
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        raise _Unwell(
            f"no TCP connection ({error.strerror or error}). Is the node up, is this the port that its log calls "
            "`control port open`, is there a firewall? A node that only decodes has one only if its `port` is set"
        ) from error


def _ask(client: ControlClient, address: Address, timeout_s: float) -> Description:
    try:
        reply = client.request(address, Describe(), timeout_s).result()
    except PeerSilent as error:
        raise _Unwell(
            f"it takes connections, but {error}. Either this is no control port, or it has keys and --keys-dir "
            "is missing, or does not have keys"
        ) from error
    except ProtocolError as error:
        raise _Unwell(f"{error}. It may be another version of kvweave") from error
    if isinstance(reply, Description):
        return reply
    answer = f"{reply.cause} ({reply.detail})" if isinstance(reply, Refused) else type(reply).__name__
    raise _Unwell(f"it does not describe itself, but answers {answer}. It may be another version of kvweave")


def _about(node: _Node, *, encrypted: bool) -> Iterator[str]:
    cache = node.said.cache
    rows = [
        ("reachable", f"{node.round_trip_s * 1e3:.2f} ms there and back, {'' if encrypted else 'not '}encrypted"),
        ("version", node.said.version),
        ("incarnation", node.said.incarnation),
        ("layout", describe(node.placement)),
        ("cache format", ", ".join(f"{field}={getattr(cache, field)}" for field in CacheFormat.__struct_fields__)),
        ("transports", listed(node.said.transports)),
        ("open leases", f"{node.said.num_open_leases:,}"),
    ]
    return (f"  {line}" for line in align(rows))


def _compare(source: _Node, reader: _Node, num_tokens: int) -> int:
    """Prints whether and how `reader` can read from `source`; 0 if it can."""
    print(f"from {source.name} to {reader.name}")
    differences = list(_differences(source, reader))
    lines = differences or _transfer(source, reader, num_tokens)
    print("\n".join([f"  {'do not fit' if differences else 'fit'}", *(f"  {line}" for line in lines)]))
    return 1 if differences else 0


def _differences(source: _Node, reader: _Node) -> Iterator[str]:
    """Each field that keeps them apart, with both values."""
    for field in CacheFormat.__struct_fields__:
        ours, theirs = getattr(source.said.cache, field), getattr(reader.said.cache, field)
        if ours != theirs:
            yield f"{field}: {source.name} has {ours}, {reader.name} has {theirs}; they must be equal"
    if not _common_transports(source, reader):
        ours, theirs = listed(source.said.transports), listed(reader.said.transports)
        yield f"transports: {source.name} has {ours}, {reader.name} has {theirs}; one must be common"


def _common_transports(source: _Node, reader: _Node) -> list[str]:
    return [name for name in source.said.transports if name in reader.said.transports]


def _transfer(source: _Node, reader: _Node, num_tokens: int) -> list[str]:
    plan = plan_transfer(source.placement, reader.placement, 0, num_tokens)
    volume, entry_bytes = plan_volume(plan), source.said.cache.head_bytes
    routes = describe_routes(plan, entry_bytes)
    lines = [
        f"{counted(num_tokens, 'token')}: {counted(volume.num_entries * entry_bytes, 'byte')} by "
        f"{counted(volume.num_messages, 'route')}, in {counted(volume.num_segments, 'segment')} at most, "
        f"over {listed(_common_transports(source, reader))}",
        *routes[: MAX_ROUTE_LINES + 1],
    ]
    hidden = len(routes) - 1 - MAX_ROUTE_LINES
    return [*lines, f"... and {counted(hidden, 'more route')}"] if hidden > 0 else lines
