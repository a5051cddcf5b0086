"""A Hugging Face folder as the GGUF file that llama.cpp's converter would write: names, row order, gains, rope factors.

Imports nothing of kestrel, so that its reader is not tested by its own tables. Source: llama.cpp, convert_hf_to_gguf.py
(tensor names of gguf-py, LlamaModel.permute, Gemma3Model.norm_shift, generate_extra_tensors for rope_freqs) at the end of 2025.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from . import llama

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "phi3": "phi3"}


def write_gguf(folder: Path, path: Path) -> None:
    """Writes `path`, float32. The vocabulary is a list of placeholders."""
    import gguf

    config, weights = llama.load(folder)
    kind = config["model_type"]
    gemma = kind == "gemma3_text"
    heads = config["num_attention_heads"]
    kv_heads, d = config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads
    w = gguf.GGUFWriter(str(path), ARCHITECTURES[kind])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(d)
    w.add_value_length(d)
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    scaling = config.get("rope_scaling") or {}
    w.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    if scaling.get("type", scaling.get("rope_type")) == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling.get("rope_type") == "llama3":
        plain = llama.inverse_frequencies({**config, "rope_scaling": None}, d)
        w.add_tensor("rope_freqs.weight", (plain / llama.inverse_frequencies(config, d)).astype(np.float32))
    if gemma or kind == "phi3":
        w.add_sliding_window(config["sliding_window"])
    if gemma:  # the pattern is the architecture's; a small test model needs its own
        w.add_key_value("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"], gguf.GGUFValueType.UINT32)
    w.add_token_list([f"t{i}" for i in range(config["vocab_size"])])

    def permute(x, n):
        return x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    for name, x in weights.items():
        if gemma and x.ndim == 1:
            x = x + 1
        if kind in ("llama", "mistral") and ".self_attn.q_proj." in name:
            x = permute(x, heads)
        if kind in ("llama", "mistral") and ".self_attn.k_proj." in name:
            x = permute(x, kv_heads)
        stem, _, ending = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stem = f"blk.{layer}." + {**NAMES, **(GEMMA_NORMS if gemma else NORMS)}[part]
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
        w.add_tensor(f"{stem}.{ending}", np.ascontiguousarray(x, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
