"""The Llama forward pass in numpy, written from the papers and in float64.

A second opinion beside transformers, for machines without torch, and the
place to try mutations: change one entry of `config` or one weight, run again
and see how far the logits move. Imports nothing of kestrel.

Sources: Llama (arXiv 2302.13971), RoPE (2104.09864), GQA (2305.13245); the
frequency rules of `linear` and `llama3` from transformers' modeling_rope_utils.
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


def inverse_frequencies(config: dict, head_dim: int) -> np.ndarray:
    """Radians per position for each of the head_dim/2 pairs, [head_dim/2]."""
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
    raise ValueError(f"rope type {kind}")


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE over halves: pair i of a head is (i, i + d/2). x [m, heads, d]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


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
    m = len(ids)
    angle = np.arange(m)[:, None, None] * inverse_frequencies(config, d)
    cos, sin = np.cos(angle), np.sin(angle)
    future = np.triu(np.ones((m, m), bool), 1)

    x = weights["model.embed_tokens.weight"][np.asarray(ids)]
    hidden = [x]
    for layer in range(config["num_hidden_layers"]):
        w = {k: weights[f"model.layers.{layer}.{k}.weight"] for k in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
        h = rms_norm(x, w["input_layernorm"], eps)
        q = rotate((h @ w["self_attn.q_proj"].T).reshape(m, heads, d), cos, sin)
        k = rotate((h @ w["self_attn.k_proj"].T).reshape(m, kv_heads, d), cos, sin)
        v = (h @ w["self_attn.v_proj"].T).reshape(m, kv_heads, d)
        out = np.empty((m, heads, d))
        for head in range(heads):
            group = head // (heads // kv_heads)
            score = np.where(future, -np.inf, q[:, head] @ k[:, group].T / np.sqrt(d))
            p = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, group]
        x = x + out.reshape(m, heads * d) @ w["self_attn.o_proj"].T
        h = rms_norm(x, w["post_attention_layernorm"], eps)
        gate = h @ w["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        hidden.append(x)
    x = rms_norm(x if rows is None else x[rows], weights["model.norm.weight"], eps)
    head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    return {"logits": x @ head.T, "hidden_states": hidden}


def load(folder) -> tuple:
    """(config, weights) of a Hugging Face folder with one model.safetensors."""
    folder = Path(folder)
    return json.loads((folder / "config.json").read_text()), read_safetensors(folder / "model.safetensors")
