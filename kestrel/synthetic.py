# SPDX-License-Identifier: Apache-2.0
"""Packed models of any shape from a seed, so that speed is measured at sizes that matter on boards without a checkpoint.

The weights are of the toy's kind (toy.py), but hashed and packed once for each width and then repeated panel by panel from another
start in every matrix: 1.6 GB take as long as writing them. What comes out of such a model means nothing; its numbers stay finite.
"""
from __future__ import annotations

import math
import os
import zlib
from typing import Callable, Dict, Iterator, NamedTuple, Tuple

import numpy as np

from . import _native
from .config import ModelConfig
from .errors import KestrelError
from .pack import Matrix, PackedModel, Vector, matrices, stored_type, write_packed
from .toy import text_files, uniform

_BLOCK = 1 << 22  # floats that are hashed for one (width, gain)


def _llama(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int, context: int, theta: float) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=context, rms_norm_eps=1e-6, rope_theta=theta, rope_scaling=None,
        tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


# Sizes of published models (their config.json on Hugging Face); all tie the embedding.
SHAPES: Dict[str, ModelConfig] = {
    "135m": _llama(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5),       # SmolLM2-135M
    "0.5b": _llama(24, 896, 4864, 14, 2, 64, 151936, 32768, 1e6),    # Qwen2.5-0.5B, without its biases
    "1.5b": _llama(28, 1536, 8960, 12, 2, 128, 151936, 32768, 1e6),  # Qwen2.5-1.5B, without its biases
}
_FORM = "LAYERSxHIDDENxMLPxHEADSxKV_HEADSxHEAD_DIMxVOCAB"


def shape_config(shape: str) -> ModelConfig:
    """The config of a named shape, or of seven numbers in the form of `_FORM` (context 4096). KestrelError: neither, or impossible."""
    if shape in SHAPES:
        return SHAPES[shape]
    numbers = shape.split("x")
    if len(numbers) != 7 or not all(n.isascii() and n.isdigit() and 0 < len(n) < 9 for n in numbers):
        raise KestrelError(f"shape: expected {', '.join(SHAPES)} or {_FORM}, found {shape!r}")
    config = _llama(*(int(n) for n in numbers), context=4096, theta=10000.0)
    if config.vocab_size < 257:
        raise KestrelError(f"shape {shape}: vocabulary: expected at least 257 (the tokenizer's), found {config.vocab_size}")
    if config.head_dim % 8 or not 8 <= config.head_dim <= 512:
        raise KestrelError(f"shape {shape}: head_dim: expected a multiple of 8 from 8 to 512, found {config.head_dim}")
    return ModelConfig.from_json(config.to_json(), f"shape {shape}")


class _Panels(NamedTuple):
    """`rows` float32 [8 p, k] and the same packed: uint8 [p, bytes of a panel]."""

    rows: np.ndarray
    packed: np.ndarray


def _panels(seed: int, n: int, k: int, gain: float, weights: str) -> _Panels:
    """Hashed weights of standard deviation gain / sqrt(k), no more than n rows need: a unit row comes out about as large as `gain`."""
    count = min(max(1, _BLOCK // (_native.PANEL * k)), -(-n // _native.PANEL)) * _native.PANEL
    stream = zlib.crc32(f"{k} {gain}".encode())
    rows = (uniform(seed, stream, count * k) * (gain * math.sqrt(3.0 / k))).astype(np.float32).reshape(count, k)
    packed = np.empty(_native.packed_bytes(weights, count, k), np.uint8)
    _native.pack(weights, count, 0, rows, packed)
    return _Panels(rows, packed.reshape(count // _native.PANEL, -1))


def _repeat(panels: _Panels, n: int, start: int) -> Iterator[Tuple[int, np.ndarray]]:
    """Blocks of a matrix with n rows: the panels over and over from `start` on, a last partial one from its rows."""
    row, at = 0, start % len(panels.packed)
    while n - row >= _native.PANEL:
        block = panels.packed[at:at + (n - row) // _native.PANEL]
        yield row, block
        row, at = row + len(block) * _native.PANEL, (at + len(block)) % len(panels.packed)
    if row < n:
        yield row, panels.rows[at * _native.PANEL:at * _native.PANEL + n - row]


def write_synthetic(path: str, shape: str, weights: str = "int8", seed: int = 1, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Writes a packed model of `shape` (see `shape_config`) with the toy's tokenizer. The file depends on shape, weights and seed alone.

    weights: "int8", "int4" or "f32". progress(bytes done, bytes in all). KestrelError: bad shape or seed, or the file can't be written.
    """
    config = shape_config(shape)
    if not 0 <= seed < 1 << 32:
        raise KestrelError(f"seed: expected 0 to {(1 << 32) - 1}, found {seed}")
    made: Dict[Tuple[int, float], _Panels] = {}
    most = {k: max(m.n for m in matrices(config) if m.k == k) for k in {m.k for m in matrices(config)}}

    def blocks(m: Matrix) -> Iterator[Tuple[int, np.ndarray]]:
        # as in the toy: attention that looks somewhere, an embedding that the layers don't drown
        gain = 6.0 if m.name == "embedding" else 3.0 if m.name.endswith("qkv") else 1.0
        if (m.k, gain) not in made:
            made[m.k, gain] = _panels(seed, most[m.k], m.k, gain, stored_type(m.name, weights))
        return _repeat(made[m.k, gain], m.n, zlib.crc32(m.name.encode()))

    def vector(v: Vector) -> np.ndarray:
        return (1.0 + 0.25 * uniform(seed, zlib.crc32(v.name.encode()), v.size)).astype(np.float32)

    write_packed(path, config, weights, _source(shape, seed), "off", text_files(), vector, blocks, progress)


def _source(shape: str, seed: int) -> str:
    return f"synthetic {shape}, seed {seed}"


def cached_synthetic(shape: str, weights: str = "int8", seed: int = 1, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Path of `write_synthetic`'s file in $KESTREL_CACHE (default ~/.cache/kestrel), made unless it is there for this version of kestrel."""
    config = shape_config(shape)
    folder = os.environ.get("KESTREL_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "kestrel")
    path = os.path.join(folder, f"synthetic-{shape}-{weights}-{seed}.kestrel")
    try:
        packed = PackedModel(path)
        if (packed.config, packed.weight_type, packed.source) == (config, weights, _source(shape, seed)):
            return path
    except KestrelError:
        pass  # not there, or of another version
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise KestrelError(f"{folder}: {error.strerror or error}") from None
    write_synthetic(path, shape, weights, seed, progress)
    return path
