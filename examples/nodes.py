"""Child processes that serve HTTP: start them, wait until they answer, stop them and everything they started.

Knows nothing about vLLM but the environment that lets several vLLM nodes share a small CPU-only host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

POLL_S = 0.5
STOP_GRACE_S = 15.0
LOCALHOST = "127.0.0.1"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# For several nodes on one small CPU-only host: no core pinning (they would all pin the same cores), one
# OpenMP thread per worker, and no attempt to look a local model up on a hub.
CPU_NODE_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class NodeFailed(RuntimeError):
    """A node ended or did not answer in time. The message holds the log's path and its last lines."""


class Node:
    """One server process with its own process group and log file.

    `command` and `env` (added to this process' environment; None removes a variable) say what to start,
    `url` is the base address it serves, `health_path` what must answer 200 once it is ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str | None],
        log_path: Path,
        *,
        url: str,
        health_path: str = "/health",
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.env = dict(env)
        self.log_path = log_path
        self.url = url.rstrip("/")
        self.health_path = health_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the node was started and its first process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the first process, which is also the id of the node's process group."""
        if self._process is None:
            raise NodeFailed(f"{self.name} was not started; call start() first")
        return self._process.pid

    def start(self) -> None:
        """Start the process in a group of its own. A running node is left alone, a stopped one restarted."""
        if self.running:
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float) -> None:
        """Return once the health address answers 200; NodeFailed when the process ends or time is up."""
        wait_all_ready([self], timeout)

    def is_healthy(self) -> bool:
        """Whether the health address answers 200 now."""
        try:
            with urllib.request.urlopen(self.url + self.health_path, timeout=2.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ended(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the process to end by itself; whether it has."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the first process to end (SIGTERM), then kill what is left of its group. Idempotent."""
        if self.running:
            self._signal_first(signal.SIGTERM)
            self.wait_ended(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the whole process group at once, as a crash would. Idempotent."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def log_tail(self, num_lines: int = 25) -> str:
        """The last lines of the node's log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(lines[-num_lines:])

    def failure(self, reason: str) -> NodeFailed:
        """The error that tells what happened to this node and where to look."""
        return NodeFailed(
            f"{self.name} {reason}\n--- last lines of {self.log_path} ---\n{self.log_tail()}\n"
            f"--- whole log: {self.log_path} ---"
        )

    def _environment(self) -> dict[str, str]:
        merged: dict[str, str | None] = {**os.environ, **self.env}
        return {name: value for name, value in merged.items() if value is not None}

    def _signal_first(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def wait_all_ready(
    nodes: Sequence[Node],
    timeout: float,
    report: Callable[[float, Sequence[Node]], None] = lambda elapsed_s, waiting: None,
) -> None:
    """Wait until every node is healthy; NodeFailed when one ends or `timeout` seconds have passed.

    `report(elapsed_s, nodes still waited for)` is called about twice a second.
    """
    began = time.monotonic()
    waiting = list(nodes)
    while waiting:
        for node in waiting:
            if not node.running:
                raise node.failure("ended while it was starting")
        waiting = [node for node in waiting if not node.is_healthy()]
        elapsed_s = time.monotonic() - began
        report(elapsed_s, waiting)
        if waiting and elapsed_s > timeout:
            raise waiting[0].failure(f"did not answer {waiting[0].health_path} within {timeout:.0f} s")
        if waiting:
            waiting[0].wait_ended(POLL_S)


def stop_all(nodes: Sequence[Node], grace_s: float = STOP_GRACE_S) -> None:
    """Stop all nodes together: SIGTERM to each, one common period of grace, then SIGKILL to the groups."""
    for node in nodes:
        if node.running:
            node._signal_first(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for node in nodes:
        node.wait_ended(max(0.0, deadline - time.monotonic()))
    for node in nodes:
        node.kill()


@contextlib.contextmanager
def running(
    nodes: Sequence[Node],
    timeout: float,
    report: Callable[[float, Sequence[Node]], None] = lambda elapsed_s, waiting: None,
) -> Iterator[None]:
    """Context in which all nodes run and are healthy. They are stopped on every way out."""
    try:
        for node in nodes:
            node.start()
        wait_all_ready(nodes, timeout, report)
        yield
    finally:
        with uninterrupted():
            stop_all(nodes)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context in which signals to end are ignored, so that an impatient second Ctrl-C leaves no node behind.

    Signals are handled by the main thread only; in another thread there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_ports(count: int) -> list[int]:
    """Ports of this host that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((LOCALHOST, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP leave through SystemExit: `finally` blocks then stop nodes as on Ctrl-C."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


class ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a new line, at most one every `every_s` seconds."""

    def __init__(self, stream: IO[str] = sys.stdout, every_s: float = 10.0) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._every_s = 0.0 if self._live else every_s
        self._shown_at = float("-inf")

    def show(self, text: str) -> None:
        """Show `text`, unless the last line is too recent."""
        now = time.monotonic()
        if now - self._shown_at >= self._every_s:
            self._shown_at = now
            self._write(text)

    def finish(self, text: str) -> None:
        """Show `text` for good."""
        self._write(text)
        if self._live:
            self._stream.write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._live else f"{text}\n")
        self._stream.flush()
