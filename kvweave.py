"""Front door of kvweave: the public names and the command line `python -m kvweave`.

Importing this module is cheap and needs none of vLLM, torch and NIXL: vLLM imports it in three kinds of
processes when a configuration says `"kv_connector_module_path": "kvweave"`. Public names are looked up on
first use.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector import WeaveConnector
    from layouts import Interleave, ParallelLayout, plan_transfer

__version__ = "0.1.0"
__all__ = ["Interleave", "ParallelLayout", "WeaveConnector", "__version__", "main", "plan_transfer"]

_HOMES = {
    "WeaveConnector": "connector",
    "Interleave": "layouts",
    "ParallelLayout": "layouts",
    "plan_transfer": "layouts",
}


def __getattr__(name: str) -> object:
    """Import a public name from the package it lives in."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its name, its one-line help, its options, and what it does (returns the exit code)."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _no_options(parser: argparse.ArgumentParser) -> None:
    del parser


def _print_version(options: argparse.Namespace) -> int:
    del options
    print(f"kvweave {__version__}")
    return 0


COMMANDS = (Command("version", "print the version", _no_options, _print_version),)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m kvweave`, with one subparser per entry of COMMANDS."""
    parser = argparse.ArgumentParser(
        prog="python -m kvweave",
        description="Moves the KV cache between vLLM prefill and decode nodes that shard it differently.",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors leave with code 2 as argparse does."""
    options = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
