"""The forward pass of Llama and its relatives in numpy, written from the papers and in float64.

A second opinion beside transformers, for machines without torch, and the
place to try mutations: change one entry of `config` or one weight, run again
and see how far the logits move. Imports nothing of kestrel.

Sources: Llama (arXiv 2302.13971), RoPE (2104.09864), GQA (2305.13245), Mistral
(2310.06825: windows), YaRN (2309.00071), Qwen2 (2407.10671: biases), Qwen3 (2505.09388: norms of
query and key heads), Gemma 3 (2503.19786: all of it); the frequency rules of `linear` and `llama3` from transformers' modeling_rope_utils.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read_safetensors(path) -> dict:
    """name -> float64 array, from BF16, F16 or F32 (all exact in float64)."""
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[8 + size + begin:8 + size + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
    return tensors


def inverse_frequencies(config: dict, head_dim: int, sliding: bool = False) -> np.ndarray:
    """Radians per position for each of the head_dim/2 pairs, [head_dim/2]."""
    if sliding and config.get("rope_local_base_freq"):
        config = {"rope_theta": config["rope_local_base_freq"]}
    scaling = dict(config.get("rope_scaling") or {})
    scaling.update(config.get("rope_parameters") or {})
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    inv_freq = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq
    if kind == "yarn":
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

        def dimension(turns):
            return head_dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))

        low, high = max(np.floor(dimension(32)), 0), min(np.ceil(dimension(1)), head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return ramp * inv_freq / factor + (1 - ramp) * inv_freq
    raise ValueError(f"rope type {kind}")


def attention_factor(config: dict) -> float:
    """yarn: cosines and sines are multiplied by it."""
    scaling = config.get("rope_scaling") or {}
    return config.get("attention_factor", 0.1 * np.log(scaling["factor"]) + 1) if scaling.get("rope_type") == "yarn" else 1.0


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE over halves: pair i of a head is (i, i + d/2). x [m, heads, d]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def windows(config: dict) -> list:
    """Keys that a row sees in each layer, its own included; None for all."""
    layers, window, kind = config["num_hidden_layers"], config.get("sliding_window"), config["model_type"]
    if kind in ("mistral", "phi3"):
        return [window] * layers
    if kind == "gemma3_text":
        return [window if (i + 1) % config["sliding_window_pattern"] else None for i in range(layers)]
    return [None] * layers


def activation(config: dict, x: np.ndarray) -> np.ndarray:
    if config.get("hidden_activation") == "gelu_pytorch_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))
    return x / (1 + np.exp(-x))


def forward(config: dict, weights: dict, ids, rows=None) -> dict:
    """One pass over token ids [m] from position 0.

    Returns logits [len(rows) or m, vocab_size] and hidden_states, a list of
    num_hidden_layers + 1 arrays [m, hidden_size]: the embedding, then the
    residual stream after each layer, before the final norm.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    d = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    gemma = config["model_type"] == "gemma3_text"
    scale = (config.get("query_pre_attn_scalar") or d) ** -0.5
    m = len(ids)
    distance = np.arange(m)[:, None] - np.arange(m)

    def norm(x, name):
        gain = weights.get(name)
        return x if gain is None else rms_norm(x, gain + 1 if gemma else gain, eps)

    def linear(x, name):
        y = x @ weights[name + ".weight"].T
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    x = weights["model.embed_tokens.weight"][np.asarray(ids)]
    if gemma:
        x = x * config.get("embedding_multiplier", config["hidden_size"] ** 0.5)
    hidden = [x]
    for layer, window in enumerate(windows(config)):
        at = f"model.layers.{layer}."
        angle = np.arange(m)[:, None, None] * inverse_frequencies(config, d, window is not None)
        cos, sin = attention_factor(config) * np.cos(angle), attention_factor(config) * np.sin(angle)
        hidden_from = (distance < 0) | (distance >= (window or m))
        h = norm(x, at + "input_layernorm.weight")
        if at + "self_attn.qkv_proj.weight" in weights:
            qkv = linear(h, at + "self_attn.qkv_proj")
        else:
            qkv = np.concatenate([linear(h, at + f"self_attn.{p}_proj") for p in "qkv"], -1)
        q, k, v = np.split(qkv.reshape(m, heads + 2 * kv_heads, d), [heads, heads + kv_heads], axis=1)
        q = rotate(norm(q, at + "self_attn.q_norm.weight"), cos, sin)
        k = rotate(norm(k, at + "self_attn.k_norm.weight"), cos, sin)
        out = np.empty((m, heads, d))
        for head in range(heads):
            group = head // (heads // kv_heads)
            score = np.where(hidden_from, -np.inf, q[:, head] @ k[:, group].T * scale)
            p = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, group]
        out = linear(out.reshape(m, heads * d), at + "self_attn.o_proj")
        x = x + (norm(out, at + "post_attention_layernorm.weight") if gemma else out)
        h = norm(x, at + ("pre_feedforward_layernorm.weight" if gemma else "post_attention_layernorm.weight"))
        if at + "mlp.gate_up_proj.weight" in weights:
            gate, up = np.split(linear(h, at + "mlp.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = linear(h, at + "mlp.gate_proj"), linear(h, at + "mlp.up_proj")
        out = linear(activation(config, gate) * up, at + "mlp.down_proj")
        x = x + (norm(out, at + "post_feedforward_layernorm.weight") if gemma else out)
        hidden.append(x)
    x = norm(x if rows is None else x[rows], "model.norm.weight")
    head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    return {"logits": x @ head.T, "hidden_states": hidden}


def load(folder) -> tuple:
    """(config, weights) of a Hugging Face folder with one model.safetensors."""
    folder = Path(folder)
    return json.loads((folder / "config.json").read_text()), read_safetensors(folder / "model.safetensors")
