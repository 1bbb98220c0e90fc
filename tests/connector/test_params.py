"""What clients carry: read strictly, signed where there is a secret, and followed only to peers that are allowed."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.allowed import AllowedPeers
from connector.errors import BadParams, ForgedParams
from connector.params import TransferParams
from connector.signing import SharedSecret
from layouts import ConfigError

PARAMS = TransferParams("ab" * 16, "10.0.0.5", 5600, "cd" * 16, 37)
SECRET, OTHER_SECRET = SharedSecret(b"s" * 32), SharedSecret(b"o" * 32)
FIELDS = ("capability", "host", "port", "incarnation", "num_tokens")


def test_params_survive_the_client() -> None:
    assert TransferParams.parse(json.loads(json.dumps(PARAMS.to_dict()))) == PARAMS
    assert TransferParams.parse(json.loads(json.dumps(PARAMS.to_dict(SECRET))), SECRET) == PARAMS


def test_nothing_but_these_fields_travels() -> None:
    marks = {"do_remote_prefill", "do_remote_decode"}
    assert set(PARAMS.to_dict()) == {*FIELDS, *marks}
    assert set(PARAMS.to_dict(SECRET)) == {*FIELDS, *marks, "signature"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capability", "ab" * 15),
        ("capability", "AB" * 16),
        ("capability", "ab" * 16 + "\n"),
        ("capability", 7),
        ("host", "prefill-1"),
        ("host", "10.0.0.5:80"),
        ("host", "010.0.0.5"),
        ("host", None),
        ("port", 0),
        ("port", 65536),
        ("port", "5600"),
        ("port", True),
        ("port", 5600.0),
        ("incarnation", ""),
        ("incarnation", ["cd" * 16]),
        ("num_tokens", 0),
        ("num_tokens", -1),
        ("num_tokens", 10**30),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(BadParams, match=f"kv_transfer_params.{field} is .*; allowed"):
        TransferParams.parse(PARAMS.to_dict() | {field: value})


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BadParams, match=field):
        TransferParams.parse({name: value for name, value in PARAMS.to_dict().items() if name != field})


# Signatures


def test_the_signature_is_this_one() -> None:
    """Both sides of a cluster must agree while they are updated, so the bytes are fixed."""
    text = f'["kvweave-params-1","{"ab" * 16}","10.0.0.5",5600,"{"cd" * 16}",37]'
    expected = hmac.new(b"s" * 32, text.encode(), hashlib.sha256).hexdigest()
    assert PARAMS.to_dict(SECRET)["signature"] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"capability": "ac" * 16},
        {"host": "10.0.0.6"},
        {"port": 5601},
        {"incarnation": "ce" * 16},
        {"num_tokens": 38},
        {"signature": ""},
        {"signature": "é" * 64},
        {"signature": None},
        {"signature": ["0" * 64]},
        {"signature": "0" * 64},
    ],
    ids=str,
)
def test_what_is_changed_on_the_way_is_forged(changes: dict[str, Any]) -> None:
    with pytest.raises(ForgedParams, match="another secret"):
        TransferParams.parse(PARAMS.to_dict(SECRET) | changes, SECRET)


def test_unsigned_and_otherwise_signed_params_are_forged() -> None:
    with pytest.raises(ForgedParams, match="not signed"):
        TransferParams.parse(PARAMS.to_dict(), SECRET)
    with pytest.raises(ForgedParams, match="another secret"):
        TransferParams.parse(PARAMS.to_dict(OTHER_SECRET), SECRET)


def test_a_node_without_the_secret_takes_signed_params() -> None:
    """So that the secret can be given to one node after the other: prefill nodes first."""
    assert TransferParams.parse(PARAMS.to_dict(SECRET)) == PARAMS


@given(st.lists(st.text(max_size=3) | st.integers(0, 99), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_no_two_lists_of_values_are_signed_alike(ours: list[str | int], theirs: list[str | int]) -> None:
    assert (SECRET.sign(ours) == SECRET.sign(theirs)) is (ours == theirs)


# The secret's file


def _secret_file(tmp_path: Path, content: bytes = b"s" * 32 + b"\n", mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_secret_comes_from_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, secret in (("", None), (str(_secret_file(tmp_path)), SECRET)):
        monkeypatch.setenv("KVWEAVE_SECRET_FILE", value)
        assert SharedSecret.from_environment() == secret
    monkeypatch.delenv("KVWEAVE_SECRET_FILE")
    assert SharedSecret.from_environment() is None
    assert "ssss" not in repr(SECRET)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "No such file.*KVWEAVE_SECRET_FILE names it.*openssl rand"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: _secret_file(folder, b""), "got 0 bytes; allowed: at least 32"),
        (lambda folder: _secret_file(folder, b" " * 40), "got 0 bytes"),
        (lambda folder: _secret_file(folder, b"s" * 31 + b"\n"), "got 31 bytes"),
        (lambda folder: _secret_file(folder, bytes(1 << 17)), "up to 65536 bytes"),
        (lambda folder: _secret_file(folder, mode=0o644), r"mode of .*got 0644.*chmod 600"),
        (lambda folder: _secret_file(folder, mode=0o660), "got 0660"),
    ],
)
def test_a_secret_file_that_cannot_work(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SharedSecret.read(make(tmp_path))


# Allowed peers


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("private", ("127.0.0.1", "10.9.9.9", "172.31.0.1", "192.168.1.1", "::1", "fd00::1", "::ffff:10.0.0.1"),
         ("8.8.8.8", "172.32.0.1", "169.254.169.254", "fe80::1", "2001:db8::1", "::ffff:8.8.8.8", "0.0.0.0", "::")),
        ("any", ("8.8.8.8", "2001:db8::1", "::ffff:8.8.8.8"), ()),
        ("10.0.0.0/16, fd00::/64", ("10.0.255.1", "::ffff:10.0.0.1", "fd00::1"), ("10.1.0.1", "127.0.0.1", "fd01::1")),
        ("private,203.0.113.7", ("203.0.113.7", "10.0.0.1"), ("203.0.113.8",)),
        ("::1", ("::1",), ("127.0.0.1", "::2")),
    ],
)  # fmt: skip
def test_whom_a_list_allows(text: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    allowed = AllowedPeers.parse(text)
    assert all(allowed.allow(host) for host in inside)
    assert not any(allowed.allow(host) for host in outside)


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = itertools.count()

    def resolve(name: str, *rest: object, **options: object) -> list[Any]:
        next(lookups)
        assert name == "prefill-1"
        return [(0, 0, 0, "", ("203.0.113.7", 0)), (0, 0, 0, "", ("2001:db8::7", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    allowed = AllowedPeers.parse("10.0.0.1,prefill-1")
    assert [allowed.allow(host) for host in ("203.0.113.7", "2001:db8::7", "203.0.113.8")] == [True, True, False]
    assert next(lookups) == 1


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1,", "10.0.0.1/8", "10.0.0.0/33", "no such host", "Private /8", "a" * 300]
)
def test_a_list_that_cannot_work(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_peers: got .*; allowed: a comma-separated list"):
        AllowedPeers.parse(text)


def test_localhost_is_a_name() -> None:
    assert AllowedPeers.parse("localhost").allow("127.0.0.1")
