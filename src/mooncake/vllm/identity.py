"""Under which keys an engine's blocks lie in the pool: everything that decides what their bytes are and mean.

A key is `vllm/<fingerprint>/<shard and rank>/<group>/<hash of the tokens up to the block's end>`.  vLLM's hash covers
tokens, cache salt, multimodal inputs and a LoRA adapter's name; the fingerprint covers the rest.  Engines that differ
in any of it never meet; names of folders, hosts and requests are not in it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mooncake.errors import ConfigError
from mooncake.vllm import versions
from mooncake.vllm.groups import holds_states, span_of
from mooncake.vllm.settings import Settings
from mooncake.vllm.weights import model_fingerprint

FORMAT = 2  # of values in the pool; another one is another key
_NOT_IN_VALUES = (
    "page_size_padded", "block_stride_alignment",  # bytes between blocks
    "num_kv_heads", "num_head_slots", "max_tp_shards",  # of a rank: the layout has those of the shard
)  # fmt: skip


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError, by name, for what this connector cannot do."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    reasons = []
    for group in kv_cache_config.kv_cache_groups:
        try:
            span_of(group.kv_cache_spec)
        except ConfigError as error:
            reasons.append(str(error))
        if not getattr(group, "enable_kv_transfer", True):
            reasons.append("HiSparse (KV cache groups that are not transferred)")
        if holds_states(group.kv_cache_spec) and not versions.saves_states():
            reasons.append("Mamba layers with this version of vLLM (use 0.32)")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} {getattr(parallel, name)}")
    if getattr(cache, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales (each engine would store with scales of its own)")
    if reasons:
        raise ConfigError(f"mooncake.vllm.MooncakeStoreConnector does not support {'; '.join(dict.fromkeys(reasons))}")


class Identity:
    """What is the same for all keys of an engine.  Raises ConfigError when the weights cannot be told."""

    def __init__(self, vllm_config: Any, settings: Settings, backends: list[str]) -> None:
        cache = vllm_config.cache_config
        self._pipeline = ranks(vllm_config)[1]
        self._parts = {
            "format": FORMAT,
            "prefix": settings.cache_prefix,
            "weights": settings.weights_id or _weights(vllm_config.model_config, vllm_config.load_config),
            "model": _model(vllm_config.model_config),
            "cache": [str(cache.cache_dtype), str(cache.prefix_caching_hash_algo)],
            "draft": _draft(vllm_config, settings),
            "attention": backends,
            "pipeline": vllm_config.parallel_config.pipeline_parallel_size,
        }

    def key_head(self, group: int, spec: Any, layout: str, shard: int, shards: int) -> str:
        """How the keys of a group's blocks begin, for one of the shards that they are cut into.  `layout`: the order of
        a value's bytes."""
        text = json.dumps(self._parts | {"layout": layout, "specs": _specs(spec)}, sort_keys=True, default=str)
        fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"vllm/{fingerprint}/h{shard}of{shards}pp{self._pipeline}/g{group}/"


def key_identity(heads: Collection[str]) -> str:
    """Two hexadecimal numbers, equal in engines that find each other's blocks: of how the keys of all workers begin,
    and of what block hashes are chained from.  Called where hashes are made; neither can be told from its number."""
    from vllm.v1.core import kv_cache_utils

    keys = hashlib.blake2b("\n".join(sorted(heads)).encode(), digest_size=8).hexdigest()
    seed = hashlib.blake2b(kv_cache_utils.NONE_HASH, digest_size=4, key=b"mooncake").hexdigest()
    return f"{keys} {seed}"


def ranks(vllm_config: Any) -> tuple[int, int]:
    """(tensor parallel, pipeline parallel) rank of this worker."""
    parallel = vllm_config.parallel_config
    rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    return rank % parallel.tensor_parallel_size, rank // parallel.tensor_parallel_size


def attention_backends(vllm_config: Any) -> list[str]:
    """Names of what reads and writes the KV cache, each of which may keep it in an order of its own."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = []
    for backend in get_current_attn_backends(vllm_config):
        name = backend.get_name()
        names.append(f"{name} {_cpu_kind(vllm_config)}" if name == "CPU_ATTN" else name)
    return sorted(names)


def _cpu_kind(vllm_config: Any) -> str:
    """On CPUs the order of a block's keys follows the instruction set."""
    from vllm.v1.attention.backends import cpu_attn

    model = vllm_config.model_config
    return str(cpu_attn._get_attn_isa(model.dtype, vllm_config.cache_config.block_size, model.get_head_size()))


def _weights(model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        return "dummy"
    try:
        return model_fingerprint(_local(model.model, model.revision, load.download_dir))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the files of {model.model} cannot be read to tell its weights from others ({error}); set weights_id in "
            "kv_connector_extra_config to a text that is the same for the same weights only"
        ) from None


def _local(name: str, revision: str | None, download_dir: str | None) -> Path:
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))


def _model(model: Any) -> dict[str, Any]:
    overrides = model.hf_overrides
    return {
        "revision": model.revision,
        "code_revision": model.code_revision,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "overrides": model.hf_config.to_json_string() if callable(overrides) else overrides,
        "disable_sliding_window": model.disable_sliding_window,
    }


def _specs(spec: Any) -> dict[str, Any]:
    specs = getattr(spec, "kv_cache_specs", {"": spec})
    return {
        name: [type(each).__name__, {
            f.name: str(getattr(each, f.name)) for f in dataclasses.fields(each) if f.name not in _NOT_IN_VALUES
        }]
        for name, each in specs.items()
    }  # fmt: skip


def _draft(vllm_config: Any, settings: Settings) -> Any:
    """A speculator whose layers lie in the same KV cache."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return [speculative.method]
    same = draft.model == vllm_config.model_config.model
    weights = settings.weights_id if same and settings.weights_id else _weights(draft, vllm_config.load_config)
    return [speculative.method, weights, _model(draft)]
