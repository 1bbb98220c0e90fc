"""Our hooks against the base class of whatever vLLM is installed: names, parameters, nothing left abstract."""

from __future__ import annotations

import inspect

import pytest

base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="vLLM is not installed")

from connector.connector import WeaveConnector  # noqa: E402

SLEEP_MODE = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
"""New in the base class of vLLM 0.33."""


def own_hooks() -> list[str]:
    return [
        name for name, member in vars(WeaveConnector).items() if callable(member) or isinstance(member, classmethod)
    ]


@pytest.mark.parametrize("name", [name for name in own_hooks() if not name.startswith("_")])
def test_every_hook_exists_in_the_base_with_the_same_parameters(name: str) -> None:
    theirs = next((vars(kind)[name] for kind in WeaveConnector.__mro__[1:] if name in vars(kind)), None)
    if theirs is None:
        assert name in SLEEP_MODE, f"{name} is no hook of this vLLM: it would never be called"
        return
    ours = inspect.signature(getattr(WeaveConnector, name))
    expected = inspect.signature(getattr(theirs, "__func__", theirs))
    missing = [p for p in expected.parameters if p not in ("self", "cls") and not accepts(ours, p)]
    assert not missing, f"vLLM passes {missing} to {name}"


def accepts(signature: inspect.Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return name in signature.parameters or bool(
        kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    )


def test_nothing_is_left_abstract() -> None:
    assert not inspect.isabstract(WeaveConnector)
    assert issubclass(WeaveConnector, base.SupportsHMA)


def test_both_ways_to_name_the_connector_lead_to_it() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from connector.plugin import register

    register()
    register()
    for module_path in (None, "kvweave"):
        config = KVTransferConfig(
            kv_connector="WeaveConnector", kv_role="kv_both", kv_connector_module_path=module_path
        )
        assert KVConnectorFactory.get_connector_class(config) is WeaveConnector
