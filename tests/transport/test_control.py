"""Control channel: every request ends, whatever the peer or the network does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import zmq

from layouts import ConfigError
from transport import PeerSilent, ProtocolError
from transport.control import ControlClient, ControlServer, client, messages
from transport.control.messages import Ok, Refused, Release, Renew, Reply, Request, decode_reply, encode


def _answer(request: Request) -> Reply:
    if request.capability == "boom":
        raise KeyError("boom")
    if request.capability == "bad":
        raise ProtocolError("this cannot be")
    return Ok(lease_s=float(len(request.capability)))


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", 0, _answer)
    server.start()
    yield server
    server.close()


@pytest.fixture
def asker() -> Iterator[ControlClient]:
    asker = ControlClient()
    asker.start()
    yield asker
    asker.close()


def _ask(asker: ControlClient, server: ControlServer, capability: str = "cap") -> Reply:
    return asker.request(server.address, Renew(capability, "load"), 5.0).result(6.0)


def _raw(server: ControlServer, *frames: bytes, patience_ms: int = 20_000) -> Reply | None:
    """Send frames as they are; None when no answer comes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect("tcp://{}:{}".format(*server.address))
        dealer.send_multipart(frames)
        return decode_reply(dealer.recv_multipart()[-1]) if dealer.poll(patience_ms) else None


def test_request_and_reply(asker: ControlClient, server: ControlServer) -> None:
    assert _ask(asker, server) == Ok(3.0)
    assert server.address[1] > 0


def test_many_requests_meet_their_own_replies(asker: ControlClient, server: ControlServer) -> None:
    calls = [(n, asker.request(server.address, Renew("c" * n, "load"), 5.0)) for n in range(1, 65)]
    for n, future in calls:
        assert future.result(6.0) == Ok(float(n))


@pytest.mark.parametrize(
    ("capability", "detail"), [("boom", "KeyError"), ("bad", "this cannot be")], ids=["ours", "theirs"]
)
def test_handler_exception_is_answered(
    asker: ControlClient, server: ControlServer, capability: str, detail: str
) -> None:
    reply = _ask(asker, server, capability)
    assert isinstance(reply, Refused) and reply.cause == "malformed" and detail in reply.detail
    assert _ask(asker, server) == Ok(3.0)


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ((b"seq", b""), "malformed"),
        ((b"seq", b"\x01garbage"), "malformed"),
        ((b"seq", b"\x07garbage"), "version"),
        ((b"garbage",), "version"),
        ((b"", b"", b"", b""), "malformed"),
        ((b"e" * 1000, encode(Release("cap", "load"))), "malformed"),
        ((b"seq", b"\x01" + bytes(messages.MAX_REQUEST_BYTES)), "malformed"),
    ],
)
def test_garbage_is_answered_and_survived(
    asker: ControlClient, server: ControlServer, frames: tuple[bytes, ...], cause: str
) -> None:
    reply = _raw(server, *frames)
    assert isinstance(reply, Refused) and reply.cause == cause
    assert _ask(asker, server) == Ok(3.0)


def test_oversized_frame_cuts_only_its_connection(asker: ControlClient, server: ControlServer) -> None:
    assert _raw(server, b"seq", bytes(3 * messages.MAX_REQUEST_BYTES), patience_ms=500) is None
    assert _ask(asker, server) == Ok(3.0)


def test_tcp_junk_and_port_scan(asker: ControlClient, server: ControlServer) -> None:
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b"\xff" * 10):
        with socket.create_connection(server.address) as scan:
            scan.sendall(junk)
    assert _ask(asker, server) == Ok(3.0)


def test_a_dead_peer_delays_nobody(asker: ControlClient, server: ControlServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, never speaks
        silent = [asker.request(mute.getsockname(), Renew("cap", "load"), 0.5) for _ in range(20)]
        refused = asker.request(("127.0.0.1", 1), Renew("cap", "load"), 0.5)
        begin = time.monotonic()
        for _ in range(50):
            assert _ask(asker, server) == Ok(3.0)
        assert time.monotonic() - begin < 0.5
        for future in (*silent, refused):
            with pytest.raises(PeerSilent, match="no answer within"):
                future.result(5.0)


def test_unusable_address_fails_its_future(asker: ControlClient, server: ControlServer) -> None:
    for address in (("no such host ", 5), ("127.0.0.1", 70_000)):
        with pytest.raises(PeerSilent):
            asker.request(address, Renew("cap", "load"), 1.0).result(3.0)
    assert _ask(asker, server) == Ok(3.0)


def test_late_reply_answers_nobody(asker: ControlClient) -> None:
    gate = threading.Event()

    def slow(request: Request) -> Reply:
        if request.capability == "slow":
            gate.wait(5.0)
        return Ok(float(len(request.capability)))

    server = ControlServer("127.0.0.1", 0, slow)
    server.start()
    try:
        late = asker.request(server.address, Renew("slow", "load"), 0.2)
        good = asker.request(server.address, Renew("ab", "load"), 5.0)
        with pytest.raises(PeerSilent):
            late.result(3.0)
        gate.set()
        assert good.result(5.0) == Ok(2.0)
    finally:
        gate.set()
        server.close()


def test_restart_on_the_same_port(asker: ControlClient, server: ControlServer) -> None:
    assert _ask(asker, server) == Ok(3.0)
    server.close()
    with pytest.raises(PeerSilent):
        asker.request(server.address, Renew("cap", "load"), 0.2).result(3.0)
    seen: list[Request] = []
    again = ControlServer(*server.address, lambda request: seen.append(request) or Ok())
    again.start()
    try:
        assert asker.request(again.address, Renew("new", "load"), 5.0).result(6.0) == Ok()
        assert seen == [Renew("new", "load")]  # nothing stale was delivered
    finally:
        again.close()


def test_close_ends_pending_calls_and_is_idempotent(asker: ControlClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        future = asker.request(mute.getsockname(), Renew("cap", "load"), 60.0)
        asker.close()
        asker.close()
        with pytest.raises(PeerSilent, match="closed"):
            future.result(0.1)
        with pytest.raises(RuntimeError, match="start"):
            asker.request(mute.getsockname(), Renew("cap", "load"), 1.0)


def test_client_restarts(asker: ControlClient, server: ControlServer) -> None:
    asker.close()
    asker.start()
    asker.start()
    assert _ask(asker, server) == Ok(3.0)


def test_cancelled_future_is_left_alone(asker: ControlClient, server: ControlServer) -> None:
    futures = [asker.request(server.address, Renew("cap", "load"), 5.0) for _ in range(50)]
    for future in futures:
        future.cancel()
    assert all(future.cancelled() or future.result(5.0) == Ok(3.0) for future in futures)
    assert _ask(asker, server) == Ok(3.0)


def test_raising_callback_is_survived(asker: ControlClient, server: ControlServer) -> None:
    def callback(future: Future[Reply]) -> None:
        raise RuntimeError("in a callback")

    asker.request(server.address, Renew("cap", "load"), 5.0).add_done_callback(callback)
    assert _ask(asker, server) == Ok(3.0)


def test_unreadable_reply_is_a_protocol_error(asker: ControlClient) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        future = asker.request(("127.0.0.1", port), Renew("cap", "load"), 5.0)
        identity, sequence, _ = router.recv_multipart()
        router.send_multipart([identity, b"\xff" * 8, encode(Ok())])
        router.send_multipart([identity, sequence, b"\x01junk"])
        with pytest.raises(ProtocolError, match="answered badly"):
            future.result(5.0)


def test_idle_links_are_dropped(asker: ControlClient, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "IDLE_S", 0.05)
    assert _ask(asker, server) == Ok(3.0)
    deadline = time.monotonic() + 3.0
    while asker._loop._links and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not asker._loop._links
    assert _ask(asker, server) == Ok(3.0)


def test_an_unexpected_error_fails_the_calls_and_the_client_goes_on(
    asker: ControlClient, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client, "decode_reply", lambda frame: 1 / 0)
        with pytest.raises(PeerSilent):
            _ask(asker, server)
    assert _ask(asker, server) == Ok(3.0)


def test_port_taken_names_the_port(server: ControlServer) -> None:
    host, port = server.address
    with pytest.raises(ConfigError, match=f"port {port}"):
        ControlServer(host, port, _answer).start()


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "0", "::", "[::]", "::ffff:0.0.0.0", "0x0", "::0"])
def test_wildcards_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="wildcard"):
        ControlServer(host, 0, _answer).start()


def test_foreign_and_impossible_addresses_are_refused() -> None:
    for host, port in (("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 65_536)):
        with pytest.raises(ConfigError):
            ControlServer(host, port, _answer).start()


def test_host_names_and_ipv6(asker: ControlClient) -> None:
    for host in ("localhost", "::1"):
        server = ControlServer(host, 0, _answer)
        try:
            server.start()
        except ConfigError:
            assert host == "::1"  # this machine has no IPv6
            continue
        assert server.address[0] == (host if host != "localhost" else "127.0.0.1")
        assert _ask(asker, server) == Ok(3.0)
        server.close()


def test_server_close_is_quick_idempotent_and_frees_the_port(server: ControlServer) -> None:
    begin = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - begin < 1.0
    server.start()
    server.close()


def test_idle_threads_use_no_cpu(asker: ControlClient, server: ControlServer) -> None:
    assert _ask(asker, server) == Ok(3.0)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1
