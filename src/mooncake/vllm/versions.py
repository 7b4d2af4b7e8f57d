"""Which versions of vLLM are supported, and everything in which they differ for the connector.

0.25.1: no block tables in SchedulerOutput (they are kept here), and block hashes that begin at random unless
PYTHONHASHSEED is set.  0.32: hit sources, block tables in SchedulerOutput.
"""

import logging
import os
import re
from typing import Any

from mooncake.errors import ConfigError

logger = logging.getLogger("vllm.mooncake")

SUPPORTED = re.compile(r"0\.25\.1|0\.32\.\d+")


def check_version(version: str) -> None:
    """Raise ConfigError unless this version of vLLM is supported."""
    if not SUPPORTED.fullmatch(version.partition("+")[0]):
        raise ConfigError(
            f"mooncake.vllm supports vLLM 0.25.1 and 0.32.x, but this is {version}; use one of those, or vLLM's own "
            "MooncakeStoreConnector (leave kv_connector_module_path out)"
        )


def share_block_hashes(algorithm: str) -> None:
    """Make this process's block hashes begin as those of every other one.  Called before vLLM draws their seed.

    vLLM 0.25.1 starts each process at a random number, with which no instance finds another's blocks.  Not done for
    the xxhash kinds, whose seed must stay secret.
    """
    from vllm.v1.core import kv_cache_utils

    if hasattr(kv_cache_utils, "resolve_none_hash_seed") or os.environ.get("PYTHONHASHSEED"):
        return
    if algorithm.startswith("sha256"):
        os.environ["PYTHONHASHSEED"] = "0"
    else:
        logger.warning(
            "Block hashes of kind %s begin at random in every process: set PYTHONHASHSEED to the same number on all "
            "instances, or none finds the others' blocks",
            algorithm,
        )


def hit_source() -> Any:
    """What vLLM's metrics shall call tokens from the pool; None where it does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


class BlockTables:
    """The block tables of requests, as they are while a step's metadata is built."""

    def __init__(self) -> None:
        self._state: Any = None
        self._mirror: dict[str, list[int]] = {}

    def update(self, output: Any) -> None:
        """`output`: the SchedulerOutput of the step."""
        if hasattr(output, "kv_connector_block_state"):
            self._state = output.kv_connector_block_state
            return
        for request_id in output.finished_req_ids:
            self._mirror.pop(request_id, None)
        for request in output.scheduled_new_reqs:
            self._mirror[request.req_id] = list(request.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._mirror[request_id] = list(new[0]) if new else []
            elif new:
                self._mirror.setdefault(request_id, []).extend(new[0])

    def get(self, request_id: str) -> list[int]:
        """Block ids of a request that the step schedules; of its only KV cache group."""
        if self._state is None:
            return self._mirror.get(request_id, [])
        table = self._state.get_block_ids(request_id)
        return table[0] if table else []
