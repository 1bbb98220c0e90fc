"""Prints what an installed distribution needs here, one requirement a line, ready for `pip install -r`.

Run by the environment's own Python. Markers are evaluated for it, extras of the distribution itself are off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Collection, Iterable

from packaging.requirements import Requirement


def select(requirements: Iterable[str], leave_out: Collection[str]) -> list[str]:
    """The requirements whose marker holds here, minus the distributions in `leave_out`; without markers."""
    selected = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name in leave_out:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            selected.append(str(requirement))
    return selected


def main() -> int:
    """Print the requirements of the distribution named on the command line."""
    parser = argparse.ArgumentParser(description="Print the requirements of an installed distribution.")
    parser.add_argument("distribution")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args()
    for line in select(importlib.metadata.requires(options.distribution) or [], options.leave_out):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
