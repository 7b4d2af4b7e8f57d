"""What an engine must be told to use a pool on this host, as `mooncake up` prints it and the demo passes it.

The flags carry the safe extras of vLLM's connector: a block that cannot be loaded is computed again instead of failing
the request, looking keys up does not hold the scheduler, and every instance has a lookup port of its own (two with the
same one are wired to each other).
"""

import json
from pathlib import Path

from mooncake.cli.loopback import HOST

LOCAL_BUFFER_SIZE = 64 << 20  # bytes


def write_pool_config(path: Path, master_port: int, segment_size: int) -> None:
    """The file that MOONCAKE_CONFIG_PATH names.

    With `segment_size` 0 an engine only uses the pool; else every worker also gives that many bytes to it.
    """
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{HOST}:{master_port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded" if segment_size else "standalone-store",
        "global_segment_size": segment_size,
        "local_buffer_size": LOCAL_BUFFER_SIZE,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def pool_environment(config: Path) -> dict[str, str]:
    """The variables that vLLM's connector reads; the addresses keep everything on the loopback interface."""
    return {
        "MOONCAKE_CONFIG_PATH": str(config),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": HOST,
        "VLLM_HOST_IP": HOST,
    }


def transfer_config(lookup_port: int, role: str = "kv_both") -> str:
    """The JSON text for vLLM's `--kv-transfer-config`.  `lookup_port` must be another one for every instance."""
    return json.dumps(
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_rpc_port": lookup_port, "lookup_async": True},
        },
        separators=(",", ":"),
    )


def own_transfer_config(role: str = "kv_both", **extra: object) -> str:
    """As transfer_config, for this package's own connector; `extra` are its settings."""
    return json.dumps(
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_connector_module_path": "mooncake.vllm",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        },
        separators=(",", ":"),
    )
