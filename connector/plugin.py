"""vLLM's general plugin entry point: makes `--kv-transfer-config '{"kv_connector": "WeaveConnector", ...}'` known."""

from __future__ import annotations


def register() -> None:
    """Register the connector by name. vLLM may call this several times in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "WeaveConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("WeaveConnector", "connector.connector", "WeaveConnector")
