"""`python -m kvweave keys`: makes and shows the keys with which nodes encrypt their control channel."""

from __future__ import annotations

import argparse
import socket

from layouts.errors import listed
from layouts.words import align
from transport.control.keys import ALLOWED_FOLDER, PUBLIC_SUFFIX, SECRET_FILE, NodeKeys, create_keys


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the actions of `keys` and their options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    new = actions.add_parser("new", help="make a key pair", description="Make the key pair of a node.")
    new.add_argument("directory", metavar="DIR", help="where to; a directory without keys, or a new one")
    new.add_argument("--name", default=socket.gethostname().partition(".")[0], help="for people (%(default)s)")
    new.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="an address or network at which this node answers, such as 10.0.0.5; may be repeated; "
        "leave it out for a node that only asks",
    )
    show = actions.add_parser("show", help="list who is allowed", description="List the public keys in a directory.")
    show.add_argument("directory", metavar="DIR", help="the key directory of a node")


def run(options: argparse.Namespace) -> int:
    """Carries out the action. Raises ConfigError for directories and names that cannot work."""
    return _new(options) if options.action == "new" else _show(options)


def _new(options: argparse.Namespace) -> int:
    keys = create_keys(options.directory, options.name, options.host)
    print(
        f"{keys.directory / SECRET_FILE}  the secret: stays on this node\n"
        f"{keys.directory / (keys.own.name + PUBLIC_SUFFIX)}  the public key: copy it into the folder "
        f"{ALLOWED_FOLDER}/ of the nodes that may talk to this one\n"
        f'Set "keys_dir": "{keys.directory.resolve()}" in kv_connector_extra_config.'
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    keys = NodeKeys.load(options.directory)
    rows = [(key.name, key.public.decode(), listed(key.hosts) or "only asks") for key in keys.allowed]
    lines = align(rows)
    print(
        "\n".join(["this node:", f"  {lines[0]}", f"allowed: {len(lines) - 1}", *(f"  {line}" for line in lines[1:])])
    )
    return 0
