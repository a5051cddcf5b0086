# SPDX-License-Identifier: Apache-2.0
"""A small model made from a seed, with a byte-level tokenizer: nothing to download, the same bytes on every machine.

Sizes are chosen to meet the edges: an odd vocabulary, an intermediate size that is no multiple of a group, three query heads to a kv head.
"""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Dict, Iterator, Tuple

import numpy as np

from .config import ModelConfig
from .pack import Matrix, Vector, write_packed

CONFIG = ModelConfig(
    architecture="llama", vocab_size=323, hidden_size=96, intermediate_size=150, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
    tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(), pad_token_id=None)
_SMALL = replace(CONFIG, hidden_size=48, intermediate_size=104, num_hidden_layers=2, num_attention_heads=4)
# One small model for each of the other architectures, with all that it has. Windows below and above a span of keys.
OTHERS: Dict[str, ModelConfig] = {
    "llama with biases": replace(_SMALL, attention_bias=True, mlp_bias=True),
    "mistral": replace(_SMALL, architecture="mistral", tie_word_embeddings=False, sliding_window=150, layer_types=("sliding_attention",) * 2),
    "qwen2": replace(_SMALL, architecture="qwen2", rope_theta=1e6),
    "qwen3": replace(_SMALL, architecture="qwen3", head_dim=24, rope_theta=1e6),
    "gemma3": replace(_SMALL, architecture="gemma3_text", num_key_value_heads=1, hidden_act="gelu_pytorch_tanh", sliding_window=70, rope_theta=1e6,
                      rope_local_base_freq=1e4, query_pre_attn_scalar=24.0, layer_types=("sliding_attention", "full_attention")),
    "phi3": replace(_SMALL, architecture="phi3", tie_word_embeddings=False),
}


def uniform(seed: int, stream: int, count: int) -> np.ndarray:
    """float64 [count] in [-1, 1), exact multiples of 2^-23: SplitMix64 (Steele et al. 2014) over (seed, stream, index)."""
    x = np.arange(count, dtype=np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) % (1 << 64))
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float64) * 2.0 ** -23 - 1.0


def tokenizer_json() -> Dict[str, Any]:
    """A byte-level BPE tokenizer without merges: id = byte, in the order of the byte-level alphabet; 256 is `<|end|>`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable}
    symbols.update({b: chr(256 + i) for i, b in enumerate(others)})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True}],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": {symbols[b]: b for b in range(256)}, "merges": []},
    }


def text_files() -> Dict[str, bytes]:
    """The text files of a packed model that has this tokenizer."""
    return {"tokenizer.json": json.dumps(tokenizer_json(), ensure_ascii=False).encode(),
            "tokenizer_config.json": json.dumps({"add_bos_token": False}).encode()}


def write_toy(path: str, weight_type: str = "int8", seed: int = 1, config: ModelConfig = CONFIG) -> None:
    """Writes a packed model with the shapes of `config` and random weights. The file depends on the arguments alone."""
    def matrix(stream: int, n: int, k: int, gain: float) -> np.ndarray:
        return (uniform(seed, stream, n * k) * (gain * (3.0 / k) ** 0.5)).astype(np.float32).reshape(n, k)

    def blocks(m: Matrix) -> Iterator[Tuple[int, np.ndarray]]:
        stream = 1 + sum(ord(c) << 8 * (i % 6) for i, c in enumerate(m.name))
        # queries and keys large enough that attention looks somewhere; an embedding of unit rows
        gain = 6.0 if m.name == "embedding" else 3.0 if m.name.endswith("qkv") else 1.0
        yield 0, matrix(stream, m.n, m.k, gain)

    def vector(v: Vector) -> np.ndarray:
        if v.name == "embedding_scale":
            return np.full(v.size, config.embedding_multiplier, np.float32)
        stream = sum(ord(c) << 8 * (i % 6) for i, c in enumerate(v.name))
        return ((0.0 if v.name.endswith("_bias") else 1.0) + 0.25 * uniform(seed, stream, v.size)).astype(np.float32)

    write_packed(path, config, weight_type, f"toy, seed {seed}", "off", text_files(), vector, blocks)
