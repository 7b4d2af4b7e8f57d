"""Which versions of vLLM are supported, and everything in which they differ for the connector.

0.25.1: no block tables in SchedulerOutput (they are kept here), block hashes that begin at random unless PYTHONHASHSEED
is set, and no way to save or load the states of Mamba layers.  0.32: hit sources, block tables and states in
SchedulerOutput, and the manager of the KV cache.
"""

import logging
import os
import re
from collections.abc import Sequence
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


def saves_states() -> bool:
    """Whether vLLM says which blocks hold states of Mamba layers, and counts local hits so that these can be loaded."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__


def computes_behind_a_prefix(config: Any) -> bool:
    """Whether the rest of a prompt can be computed behind tokens that were loaded; said in the log if not.

    On CPUs without AMX vLLM cannot for models with one latent head (MLA).  It turns chunked prefill and prefix caching
    off for them, and the kernel does not attend to what is loaded all the same: the answer would be another one.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and config.model_config.use_mla):
        return True
    if config.scheduler_config.enable_chunked_prefill:
        return True
    logger.warning(
        "Nothing is loaded from other instances: on this CPU vLLM computes prompts of models with one latent head "
        "(MLA) only as a whole"
    )
    return False


def hit_source(name: str = "HOST") -> Any:
    """What vLLM's metrics shall call what a connector brings (HOST: from the pool); None where it does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[name]


def own_address() -> str:
    """How other hosts reach this one: VLLM_HOST_IP, else as vLLM finds it."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def head_axis(dimensions: int) -> int:
    """Where a KV cache tensor of so many dimensions has its heads: [block, head, token, content] with 0.32, and
    [..., token, head, content] with 0.25.1."""
    return -3 if dimensions == 4 else -2


class BlockTables:
    """The block tables of requests, as they are while a step's metadata is built."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._state: Any = None
        self._mirror: dict[str, tuple[list[int], ...]] = {}

    def update(self, output: Any) -> None:
        """`output`: the SchedulerOutput of the step."""
        if hasattr(output, "kv_connector_block_state"):
            self._state = output.kv_connector_block_state
            return
        for request_id in output.finished_req_ids:
            self._mirror.pop(request_id, None)
        for request in output.scheduled_new_reqs:
            self._mirror[request.req_id] = tuple(map(list, request.block_ids))
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._mirror[request_id] = tuple(map(list, new)) if new else self._none()
            elif new:
                for table, blocks in zip(self._mirror.setdefault(request_id, self._none()), new, strict=True):
                    table.extend(blocks)

    def get(self, request_id: str) -> tuple[list[int], ...]:
        """Block ids, by group, of a request that the step schedules.  With 0.25.1 those that have left a group's window
        before this step are still there, though they may be another request's by now."""
        if self._state is None:
            return self._mirror.get(request_id) or self._none()
        return self._state.get_block_ids(request_id) or self._none()

    def states(self, output: Any) -> dict[str, list[tuple[int, int, int]]]:
        """By request, (group, block id, tokens) of blocks that hold a layer's state behind so many tokens after this
        step; none with 0.25.1."""
        state = output.kv_connector_block_state
        return state.boundary_state_offloads if state is not None else {}

    def _none(self) -> tuple[list[int], ...]:
        return tuple([] for _ in range(self._groups))


class Allocations:
    """Takes back what vLLM gave a request whose load is over, so that the request starts anew."""

    def __init__(self) -> None:
        self._manager: Any = None  # vLLM's KVCacheManager, which 0.25.1 does not tell
        self.pool: Any = None  # its BlockPool

    def bind(self, pool: Any, manager: Any = None) -> None:
        self.pool = pool
        self._manager = manager

    def release(self, request: Any, tables: Sequence[list[Any]]) -> None:
        """Free all of its blocks; `tables`: vLLM's own lists of them, by group."""
        request.num_computed_tokens = 0
        if self._manager is not None:
            self._manager.free(request)
            return
        for table in tables:
            self.pool.free_blocks(reversed(table.copy()))
            table.clear()
        # vLLM still counts blocks of it as cached, and so gives it none of those that are.
        request.skip_reading_prefix_cache = True

    def unloaded(self, request: Any, tokens: int) -> None:
        """What a load was to bring behind the first `tokens` did not come."""
        if self._manager is not None:
            self._manager.record_blocks_for_zeroing(request.request_id, tokens)
