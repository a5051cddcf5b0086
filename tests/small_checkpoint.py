# SPDX-License-Identifier: Apache-2.0
"""A two-layer checkpoint in both formats, for the tests of their readers."""
from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from kestrel.checkpoint import Checkpoint
from kestrel.errors import KestrelError

CONFIG = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2,
}
LAYER = {  # HF name -> (GGUF name, shape)
    "input_layernorm.weight": ("attn_norm.weight", (64,)), "post_attention_layernorm.weight": ("ffn_norm.weight", (64,)),
    "self_attn.q_proj.weight": ("attn_q.weight", (128, 64)), "self_attn.k_proj.weight": ("attn_k.weight", (64, 64)),
    "self_attn.v_proj.weight": ("attn_v.weight", (64, 64)), "self_attn.o_proj.weight": ("attn_output.weight", (64, 128)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", (96, 64)), "mlp.up_proj.weight": ("ffn_up.weight", (96, 64)),
    "mlp.down_proj.weight": ("ffn_down.weight", (64, 96)),
}
SHAPES = {"model.embed_tokens.weight": (24, 64), "model.norm.weight": (64,)}
SHAPES.update({f"model.layers.{n}.{name}": shape for n in range(2) for name, (_, shape) in LAYER.items()})
GGUF_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
              "lm_head.weight": "output.weight"}
GGUF_NAMES.update({f"model.layers.{n}.{name}": f"blk.{n}.{gguf}" for n in range(2) for name, (gguf, _) in LAYER.items()})


def weights(untied=False):
    """{name: float32 array} of a two-layer model, each value exact in BF16."""
    rng = np.random.default_rng(7)
    shapes = {**SHAPES, "lm_head.weight": (24, 64)} if untied else SHAPES
    return {name: rng.integers(-128, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def bf16(a):
    return (np.ascontiguousarray(a, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def encode(tensors, dtype="F32", metadata=None):
    """safetensors bytes, written here so that the reader is not tested by a library's idea of what may be written."""
    header, blobs, at = {}, [], 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, a in tensors.items():
        raw = {"F32": lambda: a.astype("<f4"), "F16": lambda: a.astype("<f2"), "BF16": lambda: bf16(a),
               "F64": lambda: a.astype("<f8")}[dtype]().tobytes()
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def folder(path, tensors=None, dtype="F32", config=None, **files):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (path / "model.safetensors").write_bytes(encode(weights() if tensors is None else tensors, dtype))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def error_of(path):
    with pytest.raises(KestrelError) as error:
        Checkpoint.open(str(path))
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


def permuted(w, heads):
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path, tensors, quantized=None, more=None, skip=()):
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(24)
    writer.add_eos_token_id(2)
    for key, value in (more or {}).items():
        {str: writer.add_string, int: writer.add_uint32}[type(value)](key, value)
    for name, a in tensors.items():
        if name in skip:
            continue
        if name.endswith("q_proj.weight"):
            a = permuted(a, 4)
        elif name.endswith("k_proj.weight"):
            a = permuted(a, 2)
        a = np.ascontiguousarray(a)
        if a.ndim == 1 or quantized is None:
            writer.add_tensor(GGUF_NAMES.get(name, name), a)
        else:
            kind = gguf.GGMLQuantizationType[quantized]
            writer.add_tensor(GGUF_NAMES.get(name, name), gguf.quants.quantize(a, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
