"""Which part of a group's blocks a worker holds, and what it is called in keys.

A rank of tensor parallelism holds the heads of attention that are its own; ranks beyond the number of heads hold what
others hold, and with MLA all hold the same.  `shared_tp` cuts values finer, so that instances of other sizes find them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mooncake.errors import ConfigError
from mooncake.vllm.groups import holds_states, layer_specs
from mooncake.vllm.versions import head_axis


class Cut(NamedTuple):
    """A worker holds shards `first` to `first + held - 1` of `total`, cut along heads; it stores them unless another
    worker, which holds the same, does."""

    first: int
    held: int
    total: int
    stores: bool


def cut_of(vllm_config: Any, spec: Any, rank: int, shared_tp: int) -> Cut:
    """Of a group with this specification, for a tensor parallel rank.  Raises ConfigError."""
    size: int = vllm_config.parallel_config.tensor_parallel_size
    if shared_tp % size:
        raise ConfigError(
            f"shared_tp {shared_tp} in kv_connector_extra_config is no multiple of the tensor parallel size {size}; it "
            "must be the largest size of the instances that share"
        )
    if replicated(spec):
        return Cut(0, 1, 1, stores=rank == 0)
    specs = layer_specs(spec)
    heads = {getattr(each, "num_kv_heads", 0) for each in specs}
    if holds_states(spec) or len(heads) > 1 or any(_is_latent(each) for each in specs):
        if shared_tp > size:
            raise ConfigError(
                "shared_tp works neither with Mamba layers nor with different numbers of heads in one group"
            )
        return Cut(rank, 1, size, stores=True)
    total = _total_heads(vllm_config, specs[0], size)
    if size >= total:  # a head each, and several ranks have the same one
        same = size // total
        return Cut(rank // same, 1, total, stores=rank % same == 0)
    wanted = min(max(shared_tp, size), total)
    if wanted % size or total % wanted:
        raise ConfigError(
            f"{total} heads of attention cannot be cut into {wanted} equal shards (shared_tp {shared_tp})"
        )
    held = wanted // size
    return Cut(rank * held, held, wanted, stores=True)


def _total_heads(vllm_config: Any, spec: Any, size: int) -> int:
    """Of all ranks together, each counted once."""
    heads: int = spec.num_kv_heads
    if heads > 1 or size == 1:
        return heads * size
    shards = getattr(spec, "max_tp_shards", None) or vllm_config.model_config.get_total_num_kv_heads()
    return min(size, int(shards))


def replicated(spec: Any) -> bool:
    """Whether all ranks of tensor parallelism hold the same."""
    return all(_is_latent(each) for each in layer_specs(spec))


def _is_latent(spec: Any) -> bool:
    return type(spec).__name__ == "MLAAttentionSpec"


def narrowed(caches: Mapping[str, Any], spec: Any, index: int, count: int) -> dict[str, Any]:
    """Part `index` of `count` of a group's tensors, cut along their heads.  Raises ConfigError."""
    if count == 1:
        return dict(caches)
    specs = getattr(spec, "kv_cache_specs", {})
    found = {}
    for name, cache in caches.items():
        heads = specs.get(name, spec).num_kv_heads
        axis = head_axis(cache.ndim)
        if cache.shape[axis] != heads:
            raise ConfigError(
                f"layer {name} has a KV cache of shape {tuple(cache.shape)}, in which its {heads} heads are not found; "
                "leave shared_tp out"
            )
        found[name] = cache.narrow(axis, index * heads // count, heads // count)
    return found
