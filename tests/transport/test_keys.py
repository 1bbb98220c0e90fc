"""Key files and encrypted control channels: who has no allowed key gets nothing, and every file fault has its words."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

import kvweave
from layouts import ConfigError
from transport import PeerSilent
from transport.control import ControlClient, ControlServer
from transport.control.keys import NodeKeys, PeerKey, create_keys, load_keys
from transport.control.messages import Ok, Refused, Renew, Reply, Request, encode

LOOPBACK = ["127.0.0.0/8", "::1"]


def _allow(keys: NodeKeys, *others: NodeKeys) -> NodeKeys:
    """Copy public key files as a user does, and read the directory again."""
    for other in others:
        shutil.copy(other.directory / f"{other.own.name}.key", keys.directory / "allowed")
    return NodeKeys.load(keys.directory)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[NodeKeys, NodeKeys]:
    """A prefill and a decode node that allow each other."""
    prefill, decode = create_keys(tmp_path / "p", "prefill", LOOPBACK), create_keys(tmp_path / "d", "decode", [])
    return _allow(prefill, decode), _allow(decode, prefill)


@pytest.fixture
def stack() -> ExitStack:
    with ExitStack() as stack:
        yield stack


def _serve(stack: ExitStack, keys: NodeKeys | None, asked: list[Request] | None = None) -> ControlServer:
    def answer(request: Request) -> Reply:
        if asked is not None:
            asked.append(request)
        return Ok(1.0)

    server = ControlServer("127.0.0.1", 0, answer, keys)
    server.start()
    stack.callback(server.close)
    return server


def _asker(stack: ExitStack, keys: NodeKeys | None) -> ControlClient:
    asker = ControlClient(keys)
    asker.start()
    stack.callback(asker.close)
    return asker


def _ask(asker: ControlClient, server: ControlServer, timeout_s: float = 5.0) -> Reply:
    return asker.request(server.address, Renew("cap", "load"), timeout_s).result(timeout_s + 1)


def test_allowed_peers_talk(stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]) -> None:
    server, asker = _serve(stack, pair[0]), _asker(stack, pair[1])
    for _ in range(3):
        assert _ask(asker, server) == Ok(1.0)


def test_what_travels_is_encrypted(stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]) -> None:
    """A relay in between sees no byte of a message; without keys it does, so the check can fail."""
    for keys, visible in ((pair, False), ((None, None), True)):
        server = _serve(stack, keys[0])
        relay = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        future = _asker(stack, keys[1]).request(relay.getsockname(), Renew("capability", "load"), 5.0)
        seen = _relay_until(relay, server.address, future.done)
        assert future.result(1.0) == Ok(1.0)
        assert (b"capability" in seen) is visible


def _relay_until(relay: socket.socket, address: tuple[str, int], is_over: Callable[[], bool]) -> bytes:
    near, _ = relay.accept()
    seen = b""
    with near, socket.create_connection(address) as far:
        near.setblocking(False)
        far.setblocking(False)
        deadline = time.monotonic() + 5.0
        while not is_over() and time.monotonic() < deadline:
            for source, sink in ((near, far), (far, near)):
                try:
                    data = source.recv(65536)
                except BlockingIOError:
                    continue
                seen += data
                sink.sendall(data)
            time.sleep(0.001)
    return seen


def _strangers(tmp_path: Path, prefill: NodeKeys) -> dict[str, NodeKeys | None]:
    stranger = _allow(create_keys(tmp_path / "s", "stranger", []), prefill)
    impostor = NodeKeys(stranger.directory, prefill.own, stranger.secret, stranger.others, stranger.stamp)
    return {"no key": None, "a key that is not allowed": stranger, "an allowed key without its secret": impostor}


@pytest.mark.parametrize("who", ["no key", "a key that is not allowed", "an allowed key without its secret"])
def test_who_is_not_allowed_gets_nothing(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys], tmp_path: Path, who: str
) -> None:
    asked: list[Request] = []
    server = _serve(stack, pair[0], asked)
    with pytest.raises(PeerSilent):
        _ask(_asker(stack, _strangers(tmp_path, pair[0])[who]), server, 0.5)
    assert asked == []
    assert _ask(_asker(stack, pair[1]), server) == Ok(1.0)


def test_a_stranger_reads_not_even_a_refusal(stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]) -> None:
    server = _serve(stack, pair[0])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect("tcp://{}:{}".format(*server.address))
        dealer.send_multipart([b"seq", encode(Renew("cap", "load"))])
        assert dealer.poll(300) == 0


def test_a_server_with_another_key_is_not_trusted(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys], tmp_path: Path
) -> None:
    """Somebody at the prefill node's address, with keys of his own that welcome everybody who comes."""
    asked: list[Request] = []
    impostor = _allow(create_keys(tmp_path / "i", "impostor", LOOPBACK), pair[1])
    for keys in (impostor, None):
        with pytest.raises(PeerSilent, match="does it allow the key"):
            _ask(_asker(stack, pair[1]), _serve(stack, keys, asked), 0.5)
    assert asked == []


def test_no_key_for_a_host_is_said_at_once(stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]) -> None:
    with pytest.raises(PeerSilent, match=r"key of the node at 192\.0\.2\.1: got none"):
        _asker(stack, pair[1]).request(("192.0.2.1", 9), Renew("cap", "load"), 30.0).result(2.0)


def test_a_key_is_allowed_and_taken_back_while_the_server_runs(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys], tmp_path: Path
) -> None:
    server = _serve(stack, pair[0])
    late = _allow(create_keys(tmp_path / "late", "late", []), pair[0])
    with pytest.raises(PeerSilent):
        _ask(_asker(stack, late), server, 0.3)
    _allow(pair[0], late)
    assert _ask(_asker(stack, late), server) == Ok(1.0)
    (pair[0].directory / "allowed" / "late.key").unlink()
    with pytest.raises(PeerSilent):
        _ask(_asker(stack, late), server, 0.3)


def test_a_bad_file_changes_nothing_in_a_running_server(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys], caplog: pytest.LogCaptureFixture
) -> None:
    server = _serve(stack, pair[0])
    (pair[0].directory / "allowed" / "new.key").write_text("half a fi")
    assert _ask(_asker(stack, pair[1]), server) == Ok(1.0)
    assert "stay as they were" in caplog.text


def test_a_key_that_was_taken_back_and_given_again_works_again(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]
) -> None:
    """ZeroMQ gives a connection up for good when its handshake fails, also one that was idle."""
    first, asker = _serve(stack, pair[0]), _asker(stack, pair[1])
    assert _ask(asker, first) == Ok(1.0)
    first.close()
    (pair[0].directory / "allowed" / "decode.key").unlink()
    second = ControlServer(*first.address, lambda request: Ok(2.0), pair[0])
    second.start()
    stack.callback(second.close)
    time.sleep(1.0)  # the idle connection tries to come back by itself, and is refused
    _allow(pair[0], pair[1])
    with suppress(PeerSilent):
        _ask(asker, second, 1.0)
    assert _ask(asker, second) == Ok(2.0)


def test_one_pair_of_keys_can_serve_a_whole_cluster(stack: ExitStack, tmp_path: Path) -> None:
    cluster = create_keys(tmp_path, "cluster", LOOPBACK)
    assert _ask(_asker(stack, cluster), _serve(stack, cluster)) == Ok(1.0)


def test_strangers_knocking_without_end_keep_nobody_out(
    stack: ExitStack, pair: tuple[NodeKeys, NodeKeys], tmp_path: Path
) -> None:
    server = _serve(stack, pair[0])
    stranger = _strangers(tmp_path, pair[0])["a key that is not allowed"]
    knocking = [_asker(stack, stranger).request(server.address, Renew("c", "l"), 30.0) for _ in range(10)]
    begin = time.monotonic()
    assert _ask(_asker(stack, pair[1]), server) == Ok(1.0)
    assert time.monotonic() - begin < 2.0
    assert not any(future.done() for future in knocking)


# Key files


def test_files_and_their_modes(tmp_path: Path) -> None:
    keys = create_keys(tmp_path / "keys", "n-1", ["10.0.0.5", "fd00::/64"])
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in keys.directory.iterdir()}
    assert modes == {"node.secret": "0o600", "n-1.key": "0o644", "allowed": "0o700"}
    assert NodeKeys.load(keys.directory) == keys
    assert keys.secret.decode() not in repr(keys)
    assert keys.secret not in (keys.directory / "n-1.key").read_bytes()
    assert load_keys("") is None


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    before = create_keys(tmp_path, "one", [])
    with pytest.raises(ConfigError, match="never overwritten"):
        create_keys(tmp_path, "two", [])
    assert NodeKeys.load(tmp_path) == before


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda secret: secret.unlink(), "No such file.*python -m kvweave keys new"),
        (lambda secret: secret.chmod(0o640), r"mode of .*got 0640; allowed: 0600 or 0400.*chmod 600"),
        (lambda secret: secret.chmod(0o604), "got 0604"),
        (lambda secret: secret.write_text(""), "missing required field"),
        (lambda secret: secret.write_bytes(b"\xff"), "no TOML file"),
        (lambda secret: secret.write_bytes(bytes(1 << 17)), "up to 65536 bytes"),
        (lambda secret: _edit(secret, "secret_key", "secret"), "unknown field `secret`"),
        (lambda secret: _edit(secret, 'secret_key = "', 'secret_key = "x'), "length <= 40"),
        (lambda secret: secret.write_text(f'name = "n"\nsecret_key = "{"~" * 40}"'), "no CURVE key in Z85"),
        (lambda secret: _edit(secret, '"n"', '"n/../n"'), "a name of letters"),
        (lambda secret: _edit(secret, "hosts = []", 'hosts = ["prefill-1"]'), "numeric addresses and networks"),
        (lambda secret: _edit(secret, "hosts = []", 'hosts = ["10.0.0.1/8"]'), "host bits set"),
    ],
)
def test_a_secret_file_that_cannot_work(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    create_keys(tmp_path, "n", [])
    spoil(tmp_path / "node.secret")
    with pytest.raises(ConfigError, match=message):
        NodeKeys.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field `name`"),
        ('name = "n"\npublic_key = "short"', "length >= 40"),
        (f'name = "n"\npublic_key = "{"#" * 40}"', "no CURVE key in Z85"),
        (f'name = "n"\npublic_key = "{"é" * 40}"', "no CURVE key in Z85"),
        (f'name = "n"\nsecret_key = "{"a" * 40}"', "unknown field `secret_key`"),
    ],
)
def test_an_allowed_file_that_cannot_work(tmp_path: Path, text: str, message: str) -> None:
    create_keys(tmp_path, "n", [])
    (tmp_path / "allowed" / "bad.key").write_text(text)
    with pytest.raises(ConfigError, match=message):
        NodeKeys.load(tmp_path)


def test_a_missing_allowed_folder_allows_only_oneself(tmp_path: Path) -> None:
    create_keys(tmp_path, "n", [])
    (tmp_path / "allowed").rmdir()
    keys = NodeKeys.load(tmp_path)
    assert [key.name for key in keys.allowed] == ["n"]


def test_the_narrowest_network_names_the_key(tmp_path: Path) -> None:
    keys = create_keys(tmp_path / "n", "n", [])
    others = [
        create_keys(tmp_path / name, name, hosts)
        for name, hosts in (("any", ["0.0.0.0/0"]), ("pool", ["10.0.0.0/16", "fd00::/8"]), ("one", ["10.0.0.5"]))
    ]
    keys = _allow(keys, *others)
    found = {host: keys.key_at(host).name for host in ("10.0.0.5", "10.0.0.6", "10.1.0.5", "fd00::7")}
    assert found == {"10.0.0.5": "one", "10.0.0.6": "pool", "10.1.0.5": "any", "fd00::7": "pool"}
    with pytest.raises(ConfigError, match=r"got none; allowed: .*`hosts` list ::2"):
        keys.key_at("::2")
    ambiguous = _allow(keys, create_keys(tmp_path / "two", "two", ["10.0.0.5"]))
    with pytest.raises(ConfigError, match="got one, two"):
        ambiguous.key_at("10.0.0.5")


def test_keys_of_a_peer_are_compared_whole() -> None:
    own = PeerKey("n", b"a" * 40)
    keys = NodeKeys(Path(), own, b"s" * 40, (PeerKey("m", b"b" * 40),))
    assert [keys.allows(key) for key in (b"a" * 40, b"b" * 40, b"c" * 40, b"b" * 39, b"")] == [True, True] + [False] * 3


# python -m kvweave keys


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = kvweave.main(["keys", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_keys_new_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prefill, decode = str(tmp_path / "p"), str(tmp_path / "d")
    code, out = _run(capsys, "new", prefill, "--name", "prefill-1", "--host", "10.0.0.5", "--host", "10.0.0.6")
    assert code == 0 and "prefill-1.key" in out and "keys_dir" in out
    assert _run(capsys, "new", decode, "--name", "decode-1")[0] == 0
    shutil.copy(tmp_path / "p" / "prefill-1.key", tmp_path / "d" / "allowed")
    code, out = _run(capsys, "show", decode)
    public = NodeKeys.load(prefill).own.public.decode()
    assert code == 0 and f"prefill-1  {public}  10.0.0.5/32, 10.0.0.6/32" in out
    assert NodeKeys.load(decode).secret.decode() not in out


def test_the_name_is_the_machine_s_unless_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _run(capsys, "new", str(tmp_path))[0] == 0
    assert NodeKeys.load(tmp_path).own.name == socket.gethostname().partition(".")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: ACTION"),
        (("new",), "required: DIR"),
        (("new", "{}", "--name", "a b"), "a name of letters"),
        (("new", "{}", "--host", "prefill-1"), "numeric addresses and networks"),
        (("new", "/proc/keys_here"), "cannot be written"),
        (("show", "{}"), "No such file"),
    ],
)
def test_bad_arguments_end_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, text = _run(capsys, *[argument.format(tmp_path) for argument in arguments])
    assert code == 2 and message in text and text.count("\n") == 1
    assert not (tmp_path / "node.secret").exists()


def test_refused_is_not_silence(stack: ExitStack, pair: tuple[NodeKeys, NodeKeys]) -> None:
    """Errors of allowed peers are answered as without keys."""
    server = ControlServer("127.0.0.1", 0, lambda request: Refused("unknown"), pair[0])
    server.start()
    stack.callback(server.close)
    assert _ask(_asker(stack, pair[1]), server) == Refused("unknown")
    assert os.listdir(pair[0].directory / "allowed") == ["decode.key"]
