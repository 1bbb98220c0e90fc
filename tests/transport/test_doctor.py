"""`python -m kvweave doctor`: what it says of nodes that are well, that do not fit, that are silent, old or locked."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import kvweave
from layouts import ParallelLayout
from transport.control import ControlServer
from transport.control.keys import NodeKeys, create_keys
from transport.control.messages import CacheFormat, Describe, Description, Ok, PlacementInfo, Refused, Reply, Request

CACHE = CacheFormat("tiny", "float32", "auto", 2, 4, 256, False, "plain")
SHARDED = ParallelLayout(tp=8, dcp=2, num_kv_heads=4, num_layers=2, interleave_tokens=16)
PLAIN = ParallelLayout(tp=2, num_kv_heads=4, num_layers=2, block_tokens=32)


def _description(layout: ParallelLayout, **changes: Any) -> Description:
    placement = PlacementInfo.from_placement(layout.placement)
    return structs.replace(Description("0.1.0", "ab" * 16, ["cma", "nixl"], CACHE, placement, 3), **changes)


class _Nodes:
    """Control ports that answer Describe; `start` gives the address as one writes it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, reply: Reply | Callable[[Request], Reply], keys: NodeKeys | None = None) -> str:
        def answer(request: Request) -> Reply:
            assert isinstance(request, Describe)
            return reply(request) if callable(reply) else reply

        server = ControlServer("127.0.0.1", 0, answer, keys)
        server.start()
        self._stack.callback(server.close)
        return "{}:{}".format(*server.address)


@pytest.fixture
def nodes() -> _Nodes:
    with ExitStack() as stack:
        yield _Nodes(stack)


def _doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = kvweave.main(["doctor", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_one_node(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    address = nodes.start(_description(SHARDED))
    code, out = _doctor(capsys, address)
    assert code == 0 and f"node {address}\n" in out
    for pattern in (
        r"reachable +\d+\.\d\d ms there and back, not encrypted",
        r"version +0\.1\.0\n",
        rf"incarnation +{'ab' * 16}\n",
        r"layout +8 ranks, 2 shards, blocks of 16 tokens, interleave 16, virtual block 32 tokens, 1 of 4 KV heads per",
        r"cache format +model=tiny, dtype=float32, kv_dtype=auto, num_layers=2, num_kv_heads=4, head_bytes=256, mla=F",
        r"transports +cma, nixl\n",
        r"open leases +3\n",
    ):
        assert re.search(pattern, out), pattern


def test_two_nodes_that_fit(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    source = nodes.start(_description(SHARDED))
    reader = nodes.start(_description(PLAIN, transports=["nixl"]))
    code, out = _doctor(capsys, source, reader)
    assert code == 0 and f"from {source} to {reader}\n  fit\n" in out
    assert f"1,000 tokens: {1000 * 4 * 2 * 256:,} bytes by 8 routes" in out and "over nixl" in out
    assert re.search(r"rank 6 \(shard 0\) +-> rank 1 \(shard 0\) +3 +0\.\.1 +504 ", out)
    assert f"10 tokens: {10 * 4 * 2 * 256:,} bytes" in _doctor(capsys, source, reader, "--tokens", "10")[1]


def test_two_nodes_that_do_not_fit(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    source = nodes.start(_description(SHARDED))
    other = structs.replace(CACHE, dtype="bfloat16", head_bytes=128)
    reader = nodes.start(_description(PLAIN, cache=other, transports=["ucx"]))
    code, out = _doctor(capsys, source, reader)
    assert code == 1 and "do not fit" in out
    assert f"dtype: {source} has float32, {reader} has bfloat16; they must be equal" in out
    assert "head_bytes" in out and "kv_dtype:" not in out
    assert f"transports: {source} has cma, nixl, {reader} has ucx; one must be common" in out


def test_many_routes_are_cut_short(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    wide = ParallelLayout(tp=32, dcp=32, mla=True, num_layers=2)
    cache = structs.replace(CACHE, num_kv_heads=1, mla=True)
    code, out = _doctor(capsys, *[nodes.start(_description(wide, cache=cache))] * 2)
    assert code == 0 and "... and 12 more routes" in out


def test_nobody_there(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = f"127.0.0.1:{gone.getsockname()[1]}"
    well = nodes.start(_description(PLAIN))
    code, out = _doctor(capsys, closed, well)
    assert code == 1
    assert f"node {closed}\n  not reachable: no TCP connection (Connection refused)" in out
    assert f"node {well}\n  reachable" in out and "from" not in out


def test_not_a_control_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        begin = time.monotonic()
        code, out = _doctor(capsys, f"127.0.0.1:{mute.getsockname()[1]}", "--timeout", "0.3")
    assert code == 1 and "it takes connections, but" in out and "gave no answer within 0.3 s" in out
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Refused("version", detail="frame has protocol version 1, spoken here is 2"), "version 1, spoken here is 2"),
        (Refused("malformed", detail="Invalid value 'Describe'"), "another version of kvweave"),
        (Ok(), "answers Ok"),
        (structs.replace(_description(PLAIN), version="x" * 300), "answered badly"),
        (
            structs.replace(
                _description(PLAIN), placement=structs.replace(_description(PLAIN).placement, num_shards=3)
            ),
            "placement of the peer is impossible",
        ),
    ],
    ids=["protocol", "older", "odd", "unreadable", "impossible"],
)
def test_nodes_that_answer_something_else(
    capsys: pytest.CaptureFixture[str], nodes: _Nodes, reply: Reply, message: str
) -> None:
    code, out = _doctor(capsys, nodes.start(reply))
    assert code == 1 and message in out


def test_keys(capsys: pytest.CaptureFixture[str], nodes: _Nodes, tmp_path: Path) -> None:
    keys = create_keys(tmp_path, "cluster", ["127.0.0.1"])
    locked, open_one = nodes.start(_description(PLAIN), keys), nodes.start(_description(PLAIN))
    code, out = _doctor(capsys, locked, "--keys-dir", str(tmp_path))
    assert code == 0 and ", encrypted" in out
    for address, options in ((locked, []), (open_one, ["--keys-dir", str(tmp_path)])):
        code, out = _doctor(capsys, address, *options, "--timeout", "0.3")
        assert code == 1 and "it takes connections, but" in out and "keys" in out


def test_a_name_and_an_ipv6_number_are_addresses(capsys: pytest.CaptureFixture[str], nodes: _Nodes) -> None:
    port = nodes.start(_description(PLAIN)).rpartition(":")[2]
    assert _doctor(capsys, f"localhost:{port}")[0] == 0
    assert "no TCP connection" in _doctor(capsys, f"[::1]:{port}")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: HOST:PORT"),
        (("10.0.0.5",), "address of a node: got '10.0.0.5'; allowed: HOST:PORT with a port from 1 to 65535"),
        (("10.0.0.5:0",), "got '10.0.0.5:0'"),
        (("10.0.0.5:x",), "got '10.0.0.5:x'"),
        ((":5600",), "got ':5600'"),
        (("10.0.0.5:70000",), "got '10.0.0.5:70000'"),
        (("no such host:1",), "a host that exists"),
        (("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"), "unrecognized arguments"),
        (("127.0.0.1:1", "--timeout", "0"), "a number above 0"),
        (("127.0.0.1:1", "--tokens", "0"), "an integer from 1"),
        (("127.0.0.1:1", "--keys-dir", "/nowhere"), "secret file /nowhere/node.secret: got No such file"),
    ],
)
def test_bad_arguments_end_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, text = _doctor(capsys, *arguments)
    assert code == 2 and message in text and text.count("\n") == 1
