"""The engines that are compared: with which connector, on which pool, in which environment."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

GIB = 1 << 30

_OURS = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_connector_module_path": "mooncake.vllm",
    "kv_connector_extra_config": {"decline_slow_loads": False},  # they are what is measured
}
_IN_TREE = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"lookup_async": True},
}


class Configuration(NamedTuple):
    """`pool`: the name of the pool it is in ("" for none).  `gives`: memory, too.  `reads`: prompts that the engine
    of this name saved, never its own.  `package`: whose `mooncake` it imports."""

    name: str
    what: str
    transfer: dict[str, Any] | None = None
    pool: str = ""
    gives: bool = True
    reads: str = ""
    package: str = "ours"
    block_size: int | None = None


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration("none", "no connector"),
        Configuration("offload", "vLLM's OffloadingConnector", {"kv_connector": "OffloadingConnector"}),
        Configuration("ours", "mooncake.vllm, memory of its own", _OURS, "ours"),
        Configuration("other", "mooncake.vllm, from the memory of the engine `ours`", _OURS, "ours", False, "ours"),
        Configuration("server", "mooncake.vllm, memory of a mooncake_client", _OURS, "server", False),
        Configuration("in-tree", "vLLM's MooncakeStoreConnector on this package", _IN_TREE, "in-tree"),
        Configuration("peer", "the same on the peer's package, pinned, blocks of 128", _IN_TREE, "peer",
                      package="peer", block_size=128),
        Configuration("peer16", "the same on the peer's package as it is", _IN_TREE, "peer16", package="peer"),
    )
}  # fmt: skip


def arguments(configuration: Configuration, number: int, options: Any) -> dict[str, Any]:
    """Of vllm.LLM; `number` tells engines of one run apart."""
    found: dict[str, Any] = {
        "model": options.model,
        "max_model_len": max(*options.lengths, options.cold_length) + 512,
        "max_num_batched_tokens": options.batched_tokens,
        "max_num_seqs": options.streams + 8,
        "kv_cache_memory_bytes": int(options.kv_gib * GIB),
        "enforce_eager": not options.compiled,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if options.device == "cpu":
        found |= {"dtype": "float32", "block_size": 32, "distributed_executor_backend": "uni"}
    else:
        # Its share of the card is given in bytes; this is only what vLLM wants to be free at the start.
        found |= {"dtype": "bfloat16", "load_format": options.load_format, "gpu_memory_utilization": 0.1}
        if options.compiled:
            found["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if configuration.block_size:
        found["block_size"] = configuration.block_size
    if configuration.transfer:
        transfer = {"kv_role": "kv_both", **configuration.transfer}
        extra = dict(transfer.get("kv_connector_extra_config", {}))
        if configuration.name == "offload":
            extra["cpu_bytes_to_use"] = int(options.pool_gib * GIB)
        elif "lookup_async" in extra:
            extra["lookup_rpc_port"] = number  # two engines of one host with the same are wired to each other
        extra |= options.extra.get(configuration.name, {})
        if extra:
            transfer["kv_connector_extra_config"] = extra
        found["kv_transfer_config"] = transfer
    return found


def environment(
    configuration: Configuration, pool_file: Path | None, log_settings: Path, options: Any
) -> dict[str, str]:
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_CONFIG_PATH": str(log_settings),
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        found |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if pool_file is not None:
        found |= {"MOONCAKE_CONFIG_PATH": str(pool_file), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
    if configuration.package == "peer":
        here = str(Path(__file__).parents[2] / "src")
        kept = [
            path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path and os.path.abspath(path) != here
        ]
        found["PYTHONPATH"] = os.pathsep.join([str(options.peer), *kept])
        if configuration.block_size:  # its best: everything that it copies from or to is pinned
            found["MC_STORE_PIN_MEMORY_MAX_BYTES"] = str(int(options.pool_gib * GIB) + GIB)
    return found


def pool_file(folder: Path, configuration: Configuration, port: int, options: Any) -> Path:
    size = int(options.pool_gib * GIB) if configuration.gives else 0
    path = folder / f"pool-{configuration.name}.json"
    path.write_text(
        json.dumps({
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "protocol": "tcp",
            "device_name": "",
            "mode": "embedded" if size else "standalone-store",
            "global_segment_size": size,
            "local_buffer_size": 64 << 20,
        })
    )  # fmt: skip
    return path


def kv_bytes(model: str, device: str) -> int:
    """Bytes of KV cache a token takes."""
    config = json.loads((Path(model) / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = 4 if device == "cpu" else 2
    return 2 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * int(head) * width


def log_settings(folder: Path, *, trace: bool) -> Path:
    """vLLM's log as it is by default, and with `trace` what our connector says of each request and load."""
    level = "DEBUG" if trace else "INFO"
    path = folder / "log.json"
    path.write_text(
        json.dumps({
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"}},
            "handlers": {"stream": {"class": "logging.StreamHandler", "formatter": "line"}},
            "loggers": {
                "vllm": {"handlers": ["stream"], "level": "INFO", "propagate": False},
                "vllm.mooncake": {"level": level},
                "mooncake": {"handlers": ["stream"], "level": level, "propagate": False},
            },
        })
    )  # fmt: skip
    return path
