"""Writes a small random Llama (4 layers, 4 KiB of KV cache a token) whose words are "w0" to "w1023".

Runs in the vLLM environment: `python tiny_model.py FOLDER`.  Every token id is a word, so prompts can be any ids; the
weights are large enough that an answer depends on the whole prompt and a wrong block shows.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WORDS = 1024
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 256, 4, 2, 64, 512
SPREAD = 0.08


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, SPREAD, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(WORDS, HIDDEN), "model.norm.weight": ones}
    tensors["lm_head.weight"] = matrix(WORDS, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones.copy()
    return tensors


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "truncation": None,
    "padding": None,
    "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(WORDS)}, "unk_token": "w0"},
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "w0",
    "eos_token": "w1",
    "unk_token": "w0",
    "chat_template": "{% for message in messages %}w2 {{ message['content'] }} {% endfor %}w3",
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))


if __name__ == "__main__":
    main()
