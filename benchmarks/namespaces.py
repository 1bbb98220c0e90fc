"""Two hosts on one machine: network namespaces joined by a virtual cable, which can be slow or lose packets.

Needs root, and the commands ip, tc and iptables (Debian packages iproute2 and iptables).
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.213.77.1", "10.213.77.2")


class NotPermitted(RuntimeError):
    """This machine does not let us make namespaces, or lacks a command for it."""


@dataclass(frozen=True, slots=True)
class Cable:
    """Two namespaces and the names of the devices that join them; end i has the address ADDRESSES[i]."""

    namespaces: tuple[str, str]
    devices: tuple[str, str]

    def inside(self, end: int) -> list[str]:
        """What to put in front of a command that is to run at one end."""
        return ["ip", "netns", "exec", self.namespaces[end]]

    def cap(self, bit_s: int) -> None:
        """Let each end send at most so much."""
        for end, device in enumerate(self.devices):
            shape = ["tbf", "rate", f"{bit_s}bit", "burst", "256kb", "latency", "50ms"]
            _run(*self.inside(end), "tc", "qdisc", "add", "dev", device, "root", *shape)

    def lose(self, probability: float) -> None:
        """Drop packets that arrive at either end."""
        for end in range(2):
            pick = ["-m", "statistic", "--mode", "random", "--probability", str(probability)]
            _run(*self.inside(end), "iptables", "-A", "INPUT", *pick, "-j", "DROP")

    def num_lost(self) -> int:
        """Packets dropped so far."""
        listings = [_run(*self.inside(end), "iptables", "-nvxL", "INPUT") for end in range(2)]
        return sum(int(line.split()[0]) for text in listings for line in text.splitlines() if " DROP " in line)


@contextmanager
def cable() -> Iterator[Cable]:
    """Context in which two joined namespaces exist.

    Raises:
        NotPermitted: with the reason.
    """
    missing = [tool for tool in ("ip", "tc", "iptables") if shutil.which(tool) is None]
    if missing:
        raise NotPermitted(f"needs {', '.join(missing)}; install iproute2 and iptables")
    tag = uuid.uuid4().hex[:6]
    joined = Cable((f"kvw-{tag}-0", f"kvw-{tag}-1"), (f"kvw{tag}0", f"kvw{tag}1"))
    try:
        for namespace in joined.namespaces:
            _run("ip", "netns", "add", namespace)
        ends = [["name", name, "netns", of] for name, of in zip(joined.devices, joined.namespaces, strict=True)]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for end, (device, address) in enumerate(zip(joined.devices, ADDRESSES, strict=True)):
            _run(*joined.inside(end), "ip", "address", "add", f"{address}/24", "dev", device)
            for name in ("lo", device):
                _run(*joined.inside(end), "ip", "link", "set", name, "up")
        yield joined
    finally:
        for namespace in joined.namespaces:  # its end of the cable goes with it
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"not permitted here: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
