"""Front door of kvweave: the public names and the command line `python -m kvweave`.

Importing this module is cheap and needs none of vLLM, torch and NIXL: vLLM imports it in three kinds of
processes when a configuration says `"kv_connector_module_path": "kvweave"`. Public names are looked up on
first use.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

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


def _command_in(home: str, name: str, help: str) -> Command:
    """A command whose module, with `add_options` and `run`, is imported when the command line is."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        importlib.import_module(home).add_options(parser)

    def run(options: argparse.Namespace) -> int:
        exit_code: int = importlib.import_module(home).run(options)
        return exit_code

    return Command(name, help, add_options, run)


COMMANDS = (
    _command_in("transport.commands.plan_cost", "plan", "show who sends what to whom between two layouts, and draw it"),
    _command_in("layouts.commands.volume", "volume", "price a pair of layouts: bytes, blocks, messages, segments"),
    _command_in("layouts.commands.advise", "advise", "choose layouts for a model, its cards and its load"),
    _command_in("attention.crossover", "crossover", "show which prefill path is cheapest, and where that changes"),
    _command_in("transport.commands.doctor", "doctor", "ask nodes who they are, and whether two of them fit"),
    _command_in("transport.commands.keys", "keys", "make and show the keys that encrypt the control channel"),
    Command("version", "print the version", _no_options, _print_version),
)


class _OneLineParser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m kvweave`, with one subparser per entry of COMMANDS."""
    parser = _OneLineParser(
        prog="python -m kvweave",
        description="Moves the KV cache between vLLM prefill and decode nodes that shard it differently.",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run, command=command.name)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors end with one line and code 2."""
    options = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    from layouts.errors import ConfigError

    try:
        exit_code = run(options)
        sys.stdout.flush()
        return exit_code
    except ConfigError as error:
        print(f"python -m kvweave {options.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
