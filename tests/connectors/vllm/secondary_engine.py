"""As driver.py, with vLLM's own offloading to a CPU tier, and the store behind that. Runs under vLLM's Python."""

import os
from typing import Any

import driver


def transfer(options: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - as in driver.py

    return KVTransferConfig(
        kv_connector="KvireOffloadingConnector",
        kv_connector_module_path="kvire.connectors.vllm.secondary",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        engine_id=f"kvire-test-{os.getpid()}",
        kv_connector_extra_config={
            "spec_name": "CopyingSpec",
            "spec_module_path": "secondary_copy",
            "cpu_bytes_to_use": options.pop("cpu_bytes"),
            "secondary_tiers": [
                {"type": "KvireTier", "module_path": "kvire.connectors.vllm.secondary"} | options,
            ],
        },
    )


driver.transfer = transfer
driver.main()
