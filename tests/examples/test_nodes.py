"""Starting, watching and stopping child servers, with Python's own HTTP server as the child."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from examples.nodes import LOCALHOST, Node, NodeFailed, free_ports, running

WAIT_S = 20.0

# Serves HTTP and has a child of its own, as vLLM has; with a third argument it ignores SIGTERM.
SERVER = """
import http.server, os, signal, subprocess, sys, time
if len(sys.argv) > 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(worker.pid))
print("serving", os.environ.get("GREETING"), os.environ.get("UNWANTED"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def server_node(tmp_path: Path, *options: str) -> Node:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SERVER, str(port), str(tmp_path / "worker.pid"), *options]
    env = {"GREETING": "hello", "UNWANTED": None}
    url = f"http://{LOCALHOST}:{port}"
    return Node("server", command, env, tmp_path / "logs" / "server.log", url=url, health_path="/")


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_node_serves_and_stop_takes_its_children_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNWANTED", "x")
    node = server_node(tmp_path)
    with running([node], WAIT_S):
        assert node.running and node.is_healthy()
        worker = int((tmp_path / "worker.pid").read_text())
        assert is_alive(worker) and os.getpgid(worker) == node.pid
        node.start()  # a second start leaves the running one alone
        assert "serving hello None" in node.log_tail()
    assert not node.running and not node.is_healthy()
    wait_until_gone(worker)
    node.stop()


def test_node_restarts_on_the_same_port_after_a_crash(tmp_path: Path) -> None:
    node = server_node(tmp_path)
    for _ in range(2):
        node.start()
        node.wait_ready(WAIT_S)
        node.kill()
        wait_until_gone(int((tmp_path / "worker.pid").read_text()))


def test_node_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    node = server_node(tmp_path, "deaf")
    node.start()
    node.wait_ready(WAIT_S)
    worker = int((tmp_path / "worker.pid").read_text())
    node.stop(grace_s=0.2)
    wait_until_gone(worker)


def test_node_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    node = Node("broken", command, {}, tmp_path / "broken.log", url="http://127.0.0.1:9")
    with (
        pytest.raises(NodeFailed, match=r"broken ended while it was starting(.|\n)*no such model"),
        running([node], WAIT_S),
    ):
        pytest.fail("a broken node became ready")


def test_node_that_never_answers_is_reported_and_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    node = Node("silent", command, {}, tmp_path / "silent.log", url=f"http://{LOCALHOST}:{free_ports(1)[0]}")
    with pytest.raises(NodeFailed, match="silent did not answer /health within 0 s"), running([node], 0.1):
        pytest.fail("a silent node became ready")
    assert not node.running
