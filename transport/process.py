"""Who a process is: its host, its number and when it started, so that others on that host can see it end.

The kernel gives numbers out again; a start time tells the old process from the new one. Nothing here moves bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from transport.endpoint import Label

_Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]


class Process(Struct, frozen=True, forbid_unknown_fields=True):
    """A process; `host` is its `host_identity`, `start_time` in clock ticks since boot."""

    host: Label
    pid: _Number
    start_time: _Number

    @classmethod
    def current(cls) -> Process:
        """The one that asks."""
        return cls(host_identity(), os.getpid(), start_time(os.getpid()))

    @property
    def is_near(self) -> bool:
        """Whether it can be watched from here."""
        return self.host == host_identity()

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended; never of one that is not near."""
        return self.is_near and start_time(self.pid) != self.start_time


def host_identity() -> str:
    """Return what all processes have in common that know each other by their numbers: boot id and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it does not run (man 5 proc_pid_stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
