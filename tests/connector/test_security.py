"""Two engines with keys, signed params and allowed peers: what is right is loaded, everything else prefills locally."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvweave
from connector.config import WeaveConfig
from connector.prompt import digest
from connector.reception import Reception
from connector.signing import SharedSecret
from layouts import ConfigError, ParallelLayout
from tests.connector.engines import Node, cache_format, content, decode_node, offer, prefill_node, wait_for
from transport.control import ControlClient
from transport.control.keys import NodeKeys, create_keys
from transport.control.messages import Describe, Description, PlacementInfo, Refused, Renew

SOURCE = ParallelLayout(tp=2, dcp=2, num_kv_heads=1, interleave_tokens=4, block_tokens=4, num_layers=2)
TARGET = ParallelLayout(num_kv_heads=1, block_tokens=8, num_layers=2)
TOKENS = list(range(9))
SECRET = SharedSecret(b"s" * 32)


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _allow(keys: NodeKeys, other: NodeKeys) -> NodeKeys:
    shutil.copy(other.directory / f"{other.own.name}.key", keys.directory / "allowed")
    return NodeKeys.load(keys.directory)


def _ends(target: Node, source: Node, params: dict[str, Any]) -> dict[str, float]:
    """Present params with their prompt; the load's outcome and cause, after all its bytes are right if it has any."""
    kv = content(1, len(TOKENS), SOURCE)
    source.caches.write([0, 1], kv)
    assert target.consumer is not None
    target.consumer.on_new_request("r", params, len(TOKENS), lambda n: digest(TOKENS, n))
    matched: list[int] = []

    def has_answer() -> bool:
        assert target.consumer is not None
        found, _ = target.consumer.get_num_new_matched_tokens("r", 0)
        matched.extend([] if found is None else [found])
        return bool(matched)

    wait_for(has_answer, source, target)
    if matched[0]:
        target.consumer.update_state_after_alloc("r", [[0, 1]], matched[0])
        wait_for(lambda: "r" in target.received, source, target)
        assert matched[0] == 8 and target.caches.holds([0, 1], kv, 0, 8)
    return {key: value for key, value in target.counters.take().items() if key.startswith("loads|")}


@pytest.mark.parametrize("transport", ["memory/direct", "memory/pack"])
def test_with_keys_and_signed_params_all_bytes_arrive(nodes: ExitStack, tmp_path: Path, transport: str) -> None:
    prefill, decode = create_keys(tmp_path / "p", "prefill", ["127.0.0.1"]), create_keys(tmp_path / "d", "decode", [])
    source = prefill_node(SOURCE, transport, keys=_allow(prefill, decode))
    nodes.callback(source.close)
    target = decode_node(TARGET, transport, keys=_allow(decode, prefill), secret=SECRET)
    nodes.callback(target.close)
    assert _ends(target, source, offer(source, "p", [0, 1], TOKENS, SECRET)) == {"loads|loaded|": 1}


@pytest.mark.parametrize(
    ("signed_with", "changes"),
    [(None, {}), (SharedSecret(b"o" * 32), {}), (SECRET, {"num_tokens": 8})],
    ids=["unsigned", "another secret", "changed"],
)
def test_forged_params_are_not_followed(
    nodes: ExitStack, signed_with: SharedSecret | None, changes: dict[str, Any]
) -> None:
    source = prefill_node(SOURCE, "memory")
    nodes.callback(source.close)
    target = decode_node(TARGET, "memory", secret=SECRET)
    nodes.callback(target.close)
    params = offer(source, "p", [0, 1], TOKENS, signed_with) | changes
    assert _ends(target, source, params) == {"loads|local_prefill|forbidden": 1}
    assert source.producer is not None and source.producer.num_open_leases == 1


def test_without_an_allowed_key_nothing_is_answered(nodes: ExitStack, tmp_path: Path) -> None:
    prefill = create_keys(tmp_path / "p", "prefill", ["127.0.0.1"])
    stranger = create_keys(tmp_path / "s", "stranger", [])
    source = prefill_node(SOURCE, "memory", keys=prefill)
    nodes.callback(source.close)
    for keys in (None, _allow(stranger, prefill)):
        target = decode_node(TARGET, "memory", keys=keys, config=WeaveConfig(open_timeout_s=1))
        nodes.callback(target.close)
        assert _ends(target, source, offer(source, "p", [0, 1], TOKENS)) == {"loads|local_prefill|silent": 1}


def test_only_allowed_peers_are_contacted_and_private_ones_by_default(nodes: ExitStack) -> None:
    source = prefill_node(SOURCE, "memory")
    nodes.callback(source.close)
    foreign = {"host": "203.0.113.7"}
    for allowed, changes, end in (
        ("private", {}, "loaded|"),
        ("private", foreign, "local_prefill|forbidden"),
        ("10.0.0.0/8, ::1", {}, "local_prefill|forbidden"),
        ("10.0.0.1,localhost", {}, "loaded|"),
    ):
        target = decode_node(TARGET, "memory", config=WeaveConfig(allowed_peers=allowed))
        nodes.callback(target.close)
        assert _ends(target, source, offer(source, "p", [0, 1], TOKENS) | changes) == {f"loads|{end}": 1}
    assert WeaveConfig().allowed_peers == "private"


def test_a_configuration_that_names_no_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed_peers"):
        WeaveConfig.from_extra_config({"allowed_peers": ""})


def test_the_doctor_meets_a_prefill_and_a_decode_node(
    nodes: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = create_keys(tmp_path, "cluster", ["127.0.0.1"])
    source = prefill_node(SOURCE, "memory", keys=keys)
    nodes.callback(source.close)
    assert source.producer is not None
    params = offer(source, "p", [0, 1], TOKENS)
    reception = Reception("127.0.0.1", 0, keys)
    nodes.callback(reception.close)
    reception.start(cache_format(TARGET), PlacementInfo.from_placement(TARGET.placement), [])
    addresses = [f"127.0.0.1:{port}" for port in (params["port"], reception.address[1])]
    kvweave.main(["doctor", *addresses, "--keys-dir", str(keys.directory)])
    out = capsys.readouterr().out
    assert "open leases   1\n" in out and "open leases   0\n" in out
    assert f"version       {kvweave.__version__}\n" in out and params["incarnation"] in out
    assert params["capability"] not in out


def test_a_reception_describes_and_does_nothing_else(nodes: ExitStack) -> None:
    reception, asker = Reception("127.0.0.1", 0), ControlClient()
    reception.start(cache_format(TARGET), PlacementInfo.from_placement(TARGET.placement), ["nixl"])
    asker.start()
    nodes.callback(asker.close)
    nodes.callback(reception.close)
    description = asker.request(reception.address, Describe(), 5.0).result(6.0)
    assert isinstance(description, Description) and description.transports == ["nixl"]
    refused = asker.request(reception.address, Renew("cap", "load"), 5.0).result(6.0)
    assert isinstance(refused, Refused) and refused.cause == "unknown"
