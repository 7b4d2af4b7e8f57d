"""Writes a small random model whose words are "w0" to "w1023".

Runs in the vLLM environment: `python tiny_model.py FOLDER [KIND]`.  Every token id is a word, so prompts can be any
ids; the weights are large enough that an answer depends on the whole prompt and a wrong block shows.

KIND: llama       4 layers of full attention, 4 KiB of KV cache a token (the default)
      hybrid      the same, but every second layer sees a window of 100 tokens
      window      the same, but all layers do
      latent      DeepSeek-V2's attention: one latent head for all
      states      LFM2: 2 layers of full attention, 2 of short convolutions that keep a state
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WORDS = 1024
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 256, 4, 2, 64, 512
WINDOW = 100  # tokens
LATENT, NOPE, ROPE = 512, 64, 64  # of the latent head, of a head without and with rotation
SPREAD = 0.08


def attention() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    }


def latent_attention() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (HEADS * (NOPE + ROPE), HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm": (LATENT,),
        "self_attn.kv_b_proj": (HEADS * (NOPE + NOPE), LATENT),
        "self_attn.o_proj": (HIDDEN, HEADS * NOPE),
    }


def perceptron() -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }


def lfm2_layer(layer: int) -> dict[str, tuple[int, ...]]:
    if layer % 2:
        mixer = attention()
        mixer["self_attn.out_proj"] = mixer.pop("self_attn.o_proj")
        mixer |= {"self_attn.q_layernorm": (HEAD,), "self_attn.k_layernorm": (HEAD,)}
    else:
        mixer = {"conv.in_proj": (3 * HIDDEN, HIDDEN), "conv.conv": (HIDDEN, 1, 3), "conv.out_proj": (HIDDEN, HIDDEN)}
    return mixer | {
        "feed_forward.w1": (INNER, HIDDEN),
        "feed_forward.w3": (INNER, HIDDEN),
        "feed_forward.w2": (HIDDEN, INNER),
        "operator_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }


def weights(kind: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        """Norms are ones, and all else is random."""
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return random.normal(0, SPREAD if len(shape) == 2 else 0.5, shape).astype(np.float32)

    norm = "model.embedding_norm" if kind == "states" else "model.norm"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (WORDS, HIDDEN), norm: (HIDDEN,)}
    shapes["lm_head"] = (WORDS, HIDDEN)
    for layer in range(LAYERS):
        if kind == "states":
            parts = lfm2_layer(layer)
        else:
            parts = (latent_attention() if kind == "latent" else attention()) | perceptron()
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    if kind == "states":
        del shapes["lm_head"]  # it is the embedding
    return {f"{name}.weight": values(shape) for name, shape in shapes.items()}


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

SLIDING, FULL = "sliding_attention", "full_attention"
CHANGES = {
    "llama": {},
    "hybrid": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * (LAYERS // 2)},
    "window": {"sliding_window": WINDOW, "layer_types": [SLIDING] * LAYERS},
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": 4,  # in none of the layers
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": NOPE,
    },
    "states": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", FULL] * (LAYERS // 2),
        "conv_dim": HIDDEN,
        "conv_L_cache": 3,
        "block_dim": HIDDEN,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
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
    kind = sys.argv[2] if len(sys.argv) > 2 else "llama"
    save_file(weights(kind), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | CHANGES[kind]))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))


if __name__ == "__main__":
    main()
