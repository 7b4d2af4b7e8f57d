"""What differs never meets in the pool, what is the same always does, and what is not supported is refused by name."""

import dataclasses
import shutil
from types import SimpleNamespace as Names

import pytest

from mooncake.errors import ConfigError
from mooncake.vllm import versions
from mooncake.vllm.identity import Identity, ranks, refuse_unsupported
from mooncake.vllm.settings import Settings
from mooncake.vllm.shards import cut_of
from tests.connector.test_weights import make, tensors


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    sliding_window: int | None = None


@dataclasses.dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1


@dataclasses.dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 1024


@dataclasses.dataclass
class ChunkedLocalAttentionSpec:
    block_size: int = 16


@dataclasses.dataclass
class MambaSpec:
    block_size: int = 16
    mamba_cache_mode: str = "align"


def configs(folder, **changes):
    """(vLLM's configuration, its KV cache's), with `changes` of "part.field"."""
    config = Names(
        model_config=Names(
            model=str(folder), revision=None, code_revision=None, dtype="torch.bfloat16", quantization=None,
            hf_overrides={}, disable_sliding_window=False,
        ),
        cache_config=Names(
            cache_dtype="auto", block_size=16, prefix_caching_hash_algo="sha256", calculate_kv_scales=False
        ),
        load_config=Names(load_format="auto", download_dir=None),
        parallel_config=Names(
            tensor_parallel_size=2, pipeline_parallel_size=1, rank=0, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=None,
    )  # fmt: skip
    spec = changes.pop("spec", FullAttentionSpec())
    for name, value in changes.items():
        part, field = name.split("__")
        setattr(getattr(config, f"{part}_config"), field, value)
    return config, Names(kv_cache_groups=[Names(kv_cache_spec=spec)], num_blocks=10)


@pytest.fixture(autouse=True)
def states(monkeypatch):
    """A vLLM that says where states of Mamba layers are."""
    monkeypatch.setattr(versions, "saves_states", lambda: True)


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "model", tensors())
    return tmp_path / "model"


def head(folder, settings=None, layout="HNC", backends=("FLASH_ATTN",), group=0, **changes):
    settings = settings or Settings()
    config, cache = configs(folder, **changes)
    spec = cache.kv_cache_groups[0].kv_cache_spec
    tensor, _ = ranks(config)
    cut = cut_of(config, spec, tensor, settings.shared_tp)
    return Identity(config, settings, list(backends)).key_head(group, spec, layout, cut.first, cut.total)


def test_everything_that_decides_the_bytes_is_in_the_key(folder, tmp_path):
    make(tmp_path / "other", tensors(2))
    heads = [
        head(folder),
        head(tmp_path / "other"),
        head(folder, Settings(cache_prefix="mine")),
        head(folder, Settings(weights_id="v2")),
        head(folder, layout="NHC"),
        head(folder, backends=["TRITON_ATTN"]),
        head(folder, model__dtype="torch.float16"),
        head(folder, model__quantization="fp8"),
        head(folder, model__revision="v2"),
        head(folder, model__hf_overrides={"rope_theta": 5}),
        head(folder, cache__cache_dtype="fp8"),
        head(folder, group=1),
        head(folder, spec=FullAttentionSpec(block_size=32)),
        head(folder, spec=SlidingWindowSpec()),
        head(folder, spec=SlidingWindowSpec(sliding_window=512)),
        head(folder, spec=MLAAttentionSpec()),
        head(folder, cache__prefix_caching_hash_algo="sha256_cbor"),
        head(folder, spec=FullAttentionSpec(head_size=64)),
        head(folder, parallel__tensor_parallel_size=4),
        head(folder, parallel__rank=1),
        head(folder, load__load_format="dummy"),
    ]
    assert len(set(heads)) == len(heads)


def test_the_same_model_in_another_folder_has_the_same_keys(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert head(tmp_path / "elsewhere") == head(folder)
    assert head(folder, load__download_dir="/cache") == head(folder)


def test_ranks_with_the_same_cache_share_it(folder):
    mla = {"spec": MLAAttentionSpec()}
    assert head(folder, parallel__rank=1, **mla) == head(folder, **mla)
    assert head(folder, parallel__tensor_parallel_size=8, parallel__rank=7, **mla) == head(folder, **mla)


def test_unreadable_weights(tmp_path):
    (tmp_path / "file.safetensors").mkdir()
    with pytest.raises(ConfigError, match="set weights_id in kv_connector_extra_config"):
        head(tmp_path)
    assert head(tmp_path, Settings(weights_id="mine"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spec": ChunkedLocalAttentionSpec()}, "a KV cache of kind ChunkedLocalAttentionSpec"),
        ({"spec": MambaSpec(mamba_cache_mode="all")}, "mamba_cache_mode all"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ({"cache__calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
)
def test_what_is_not_supported_is_named(folder, changes, sentence):
    refuse_unsupported(*configs(folder))
    with pytest.raises(ConfigError, match=f"does not support {sentence}"):
        refuse_unsupported(*configs(folder, **changes))


def test_all_groups_are_looked_at(folder):
    config, cache = configs(folder)
    for spec in (SlidingWindowSpec(), MambaSpec(), MLAAttentionSpec()):
        cache.kv_cache_groups.append(Names(kv_cache_spec=spec))
    refuse_unsupported(config, cache)
    cache.kv_cache_groups[1].enable_kv_transfer = False
    cache.kv_cache_groups.append(Names(kv_cache_spec=ChunkedLocalAttentionSpec()))
    with pytest.raises(ConfigError, match=r"HiSparse .*; a KV cache of kind Chunked"):
        refuse_unsupported(config, cache)


def test_states_need_a_vllm_that_tells_of_them(folder, monkeypatch):
    monkeypatch.setattr(versions, "saves_states", lambda: False)
    with pytest.raises(ConfigError, match="Mamba layers with this version of vLLM"):
        refuse_unsupported(*configs(folder, spec=MambaSpec()))
