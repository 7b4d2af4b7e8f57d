"""What an engine must be told to use a pool on this host, or to hand KV cache straight to another engine: its JSON
texts, variables and command line, as `mooncake up` prints them and the demo, the benchmarks and the tests pass them.

The JSON texts carry the safe extras of vLLM's connectors: a block that cannot be loaded is computed again instead of
failing the request, looking keys up does not hold the scheduler, and every instance has a lookup port of its own (two
with the same one are wired to each other).
"""

import json
from pathlib import Path
from typing import Any

from mooncake.cli.loopback import HOST

LOCAL_BUFFER_SIZE = 64 << 20  # bytes
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"  # kv_role: prefill, decode, an engine that does all

# Seconds that a decode waits for its prefill, and that a prefill keeps blocks that nobody fetches.  vLLM's own 480 keep
# the blocks of a lost half for eight minutes; a request that waits longer than this is computed by decode itself.
ABORT_LIMIT = 60

# What `python -m` runs.  `vllm serve` does not find its own distribution when that is the one for CPUs.
API_SERVER = "vllm.entrypoints.openai.api_server"


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


# ------------------------------------------------------------ variables


def pool_environment(config: Path) -> dict[str, str]:
    """The variables that vLLM's connector reads; the addresses keep everything on the loopback interface."""
    return {
        "MOONCAKE_CONFIG_PATH": str(config),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": HOST,
        "VLLM_HOST_IP": HOST,
    }


def p2p_environment(bootstrap_port: int | None, abort_limit: int = ABORT_LIMIT) -> dict[str, str]:
    """The variables of MooncakeConnector.

    `bootstrap_port`: where a producer says who it is; another one for every producer of a host, None for a consumer.
    """
    environment = {"VLLM_HOST_IP": HOST, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(abort_limit)}
    if bootstrap_port is not None:
        environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap_port)
    return environment


def cpu_environment() -> dict[str, str]:
    """The variables of any vLLM on CPUs that shares its machine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Threads that spin while they wait for each other take four times as long where cores are shared.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the worker live in the engine's process: starts sooner
        "VLLM_HOST_IP": HOST,
    }


# ------------------------------------------------------------ the JSON text for --kv-transfer-config


def transfer_config(lookup_port: int, role: str = BOTH) -> str:
    """KV cache through the pool.  `lookup_port` must be another one for every instance."""
    return _text(_store_connector(role, lookup_port))


def own_store_config(role: str = BOTH, **extra: object) -> str:
    """KV cache through the pool by this package's own connector; `extra` are its settings."""
    return json.dumps(_own_store_connector(role, **extra), separators=(",", ":"))


# Of mooncake.vllm: its own connector, and vLLM's made to run on CPUs as well.
OWN, IN_TREE = "MooncakeConnector", "InTreeMooncakeConnector"


def p2p_config(role: str, workers: int | None = None, *, connector: str = OWN) -> str:
    """KV cache straight from producer to consumer.  `workers`: threads that send."""
    return _text(_p2p_connector(role, workers, connector))


def p2p_and_pool_config(
    role: str, lookup_port: int, *, pool_first: bool = False, connector: str = OWN, own_store: bool = False
) -> str:
    """Both: a producer hands over what it computed and saves it, and loads from the pool what is there.

    A consumer takes its prompt from whichever connector comes first and has any of it.  `own_store`: this package's
    connector to the pool, not vLLM's.
    """
    store_role = BOTH if role == PRODUCER else role
    store = _own_store_connector(store_role) if own_store else _store_connector(store_role, lookup_port)
    connectors = [_p2p_connector(role, None, connector), store]
    if pool_first:
        connectors.reverse()
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return _text(multi)


def _p2p_connector(role: str, workers: int | None, connector: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"mooncake_protocol": "tcp"}
    if workers is not None:
        extra["num_workers"] = workers
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "mooncake.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def _own_store_connector(role: str, **extra: object) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_module_path": "mooncake.vllm",
        "kv_role": role,
        **({"kv_connector_extra_config": extra} if extra else {}),
    }


def _store_connector(role: str, lookup_port: int) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"lookup_rpc_port": lookup_port, "lookup_async": True},
    }


def _text(connector: dict[str, Any]) -> str:
    """The policy belongs to the outermost connector; inside of MultiConnector nobody reads it."""
    return json.dumps({**connector, "kv_load_failure_policy": "recompute"}, separators=(",", ":"))


# ------------------------------------------------------------ the command line


def cpu_engine_arguments(
    model: Path, name: str, port: int, *, max_model_len: int, block_size: int, kv_cache_size: int, transfer: str = ""
) -> list[str]:
    """Arguments of vLLM's API server on CPUs.

    `block_size` in tokens, a multiple of 32; `kv_cache_size` in bytes; `transfer`: one of the JSON texts above.
    """
    return [
        *("--model", str(model), "--served-model-name", name),
        *("--host", HOST, "--port", str(port), "--uvicorn-log-level", "warning"),
        *("--dtype", "float32", "--max-model-len", str(max_model_len), "--block-size", str(block_size)),
        *("--kv-cache-memory-bytes", str(kv_cache_size)),
        *("--enforce-eager", "--distributed-executor-backend", "uni"),
        *(("--kv-transfer-config", transfer) if transfer else ()),
    ]
