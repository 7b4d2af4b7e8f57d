"""Where a worker stands: what vLLM's configuration says of it."""

from typing import Any, NamedTuple

from mooncake.errors import ConfigError
from mooncake.vllm.identity import ranks
from mooncake.vllm.push.routes import Ranks

_SUPPORTED = ("FullAttentionSpec", "MLAAttentionSpec")


class Site(NamedTuple):
    """`heads`: KV heads of the whole model, 1 where every rank has the same.  `hooks`: whether a layer's hook means
    that it is computed for the whole step.  `is_first`: of the workers that share a registry."""

    engine: str
    host: str
    ranks: Ranks
    data_rank: int
    is_first: bool
    registry_host: str
    heads: int
    num_blocks: int
    block_size: int
    hooks: bool


def site_of(vllm_config: Any, kv_cache_config: Any, host: str) -> Site:
    """`host`: how this one is reached."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tensor, pipeline = ranks(vllm_config)
    place = Ranks(tensor, parallel.tensor_parallel_size, pipeline, parallel.pipeline_parallel_size)
    alone = getattr(parallel, "local_engines_only", False)  # a registry for every engine's host, not for all of them
    data_rank = parallel.data_parallel_rank_local if alone else getattr(parallel, "data_parallel_index", 0)
    registry_host = parallel.data_parallel_master_ip
    if alone:
        registry_host = "127.0.0.1"
    elif getattr(parallel, "nnodes_within_dp", 1) > 1:
        registry_host = parallel.master_addr
    return Site(
        engine=vllm_config.kv_transfer_config.engine_id,
        host=host,
        ranks=place,
        data_rank=data_rank or 0,
        is_first=not (tensor or pipeline or data_rank),
        registry_host=registry_host,
        heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        num_blocks=kv_cache_config.num_blocks,
        block_size=vllm_config.cache_config.block_size,
        hooks=vllm_config.speculative_config is None and not getattr(parallel, "enable_dbo", False),
    )


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError, by name, for what this connector cannot do."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    reasons = []
    if len(groups) != 1:
        reasons.append(
            f"{len(groups)} KV cache groups (pass --disable-hybrid-kv-cache-manager; a Mamba hybrid is not supported)"
        )
    for group in groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        for each in {type(spec).__name__ for spec in specs.values()}:
            if each not in _SUPPORTED:
                reasons.append(f"a KV cache of kind {each}")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} {getattr(parallel, name)}")
    if reasons:
        raise ConfigError(f"mooncake.vllm.MooncakeConnector does not support {'; '.join(reasons)}")
