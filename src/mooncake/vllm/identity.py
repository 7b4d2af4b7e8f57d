"""Under which keys an engine's blocks lie in the pool: everything that decides what their bytes are and mean.

A key is `vllm/<fingerprint>/<rank>/<hash of the tokens up to the block's end>`.  vLLM's hash covers tokens, cache salt,
multimodal inputs and a LoRA adapter's name; the fingerprint covers the rest.  Engines that differ in any of it never
meet; names of folders, hosts and requests are not in it.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mooncake.errors import ConfigError
from mooncake.vllm.settings import Settings
from mooncake.vllm.weights import model_fingerprint

FORMAT = 1  # of values in the pool; another one is another key
_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError, by name, for what this connector cannot do."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    reasons = []
    if len(kv_cache_config.kv_cache_groups) != 1:
        reasons.append(
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups (pass --disable-hybrid-kv-cache-manager; a Mamba "
            "hybrid is not supported)"
        )
    else:
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        for each in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if type(each).__name__ not in _SUPPORTED_SPECS:
                reasons.append(f"a KV cache of kind {type(each).__name__}")
                break
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} {getattr(parallel, name)}")
    if getattr(cache, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales (each engine would store with scales of its own)")
    if reasons:
        raise ConfigError(f"mooncake.vllm.MooncakeStoreConnector does not support {'; '.join(reasons)}")


def key_head(vllm_config: Any, kv_cache_config: Any, settings: Settings, layout: str, backends: list[str]) -> str:
    """How the keys of this worker begin.  Raises ConfigError when the weights cannot be told."""
    parts = {
        "format": FORMAT,
        "prefix": settings.cache_prefix,
        "weights": settings.weights_id or _weights(vllm_config.model_config, vllm_config.load_config),
        "model": _model(vllm_config.model_config),
        "cache": _cache(vllm_config, kv_cache_config),
        "draft": _draft(vllm_config, settings),
        "layout": layout,
        "attention": backends,
        "parallel": [
            vllm_config.parallel_config.tensor_parallel_size,
            vllm_config.parallel_config.pipeline_parallel_size,
        ],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    tensor, pipeline = ranks(vllm_config)
    if replicated(vllm_config):
        tensor = 0
    return f"vllm/{fingerprint}/tp{tensor}pp{pipeline}/"


def key_identity(heads: list[str]) -> str:
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


def replicated(vllm_config: Any) -> bool:
    """Whether all tensor parallel ranks hold the same KV cache."""
    return bool(vllm_config.model_config.use_mla)


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


def _cache(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    cache, spec = vllm_config.cache_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", {"": spec})
    return {
        "dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "hash": str(cache.prefix_caching_hash_algo),
        "specs": {
            name: [type(each).__name__, {f.name: str(getattr(each, f.name)) for f in dataclasses.fields(each)}]
            for name, each in specs.items()
        },
    }


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
