# SPDX-License-Identifier: Apache-2.0
"""Checkpoint -> packed file, block by block on all cores: memory stays bounded by a few blocks, whatever the model's size."""
from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from . import _native
from .calibration import Moments, Ranges, default_text, factors, input_ranges
from .checkpoint import Checkpoint
from .config import ModelConfig
from .destination import beside, resolved
from .errors import KestrelError
from .model import ForwardModel
from .parallel import in_order
from .pack import WEIGHT_TYPES, Matrix, Rounding, Vector, matrices, write_packed
from .tokenizer import Tokenizer

Progress = Callable[[int, int], None]
_BLOCK_BYTES = 4 << 20  # float32 bytes of one block of rows


def _check_kernels(config: ModelConfig, source: str) -> None:
    """What the file format allows but the kernels don't."""
    if config.head_dim % 8 or not 8 <= config.head_dim <= 512:
        raise KestrelError(f"{source}: head_dim: expected a multiple of 8 up to 512, found {config.head_dim}")


class _Fold:
    """Factors by packed matrix: `columns[name]` multiply its columns, `rows[name]` its rows (1 / the factors of what reads them)."""

    def __init__(self, checkpoint: Checkpoint, ranges: Ranges):
        c = checkpoint.config
        self.columns: Dict[str, np.ndarray] = {}
        self.rows: Dict[str, np.ndarray] = {}
        for m in matrices(c):
            layer, _, kind = m.name.rpartition(".")
            if kind == "o" or (kind == "embedding" and not c.tie_word_embeddings):
                continue
            x = ranges.head if not layer else getattr(ranges, kind)[int(layer.split(".")[1])]
            largest = np.zeros(m.k, np.float32)
            for _, block in row_blocks(checkpoint, m, None):
                np.maximum(largest, np.abs(block).max(axis=0), out=largest)
            self.columns[m.name] = factors(x, largest)
            if kind == "down":
                ones = np.ones(c.intermediate_size, np.float32)
                self.rows[f"{layer}.gate_up"] = np.concatenate([ones, ones / self.columns[m.name]])
        self.head = self.columns["embedding" if c.tie_word_embeddings else "head"]

    def vector(self, name: str, values: np.ndarray) -> np.ndarray:
        """A norm's gain, divided by the factors of the matrix that reads its output; a bias, multiplied by those of its matrix's rows."""
        layer, _, kind = name.rpartition(".")
        if kind == "final_norm":
            return values / self.head
        if kind in ("attention_norm", "mlp_norm"):
            return values / self.columns[layer + (".qkv" if kind == "attention_norm" else ".gate_up")]
        return values * self.rows[name[:-len("_bias")]] if name.endswith("_bias") and name[:-len("_bias")] in self.rows else values


def row_blocks(checkpoint: Checkpoint, matrix: Matrix, fold: Optional[_Fold]) -> Iterator[Tuple[int, np.ndarray]]:
    """The rows of a packed matrix in blocks of whole panels (the last may be shorter): (first row, float32 [rows, k])."""
    shapes = checkpoint.expected_shapes()
    step = max(_native.PANEL, _BLOCK_BYTES // (4 * matrix.k) // _native.PANEL * _native.PANEL)

    def block_at(begin: int) -> Tuple[int, np.ndarray]:
        end = min(begin + step, matrix.n)
        parts, at = [], 0
        for name in matrix.sources:  # rows of several tensors may meet inside one block
            rows = shapes[name][0]
            low, high = max(begin - at, 0), min(end - at, rows)
            if low < high:
                parts.append(checkpoint.rows(name, low, high))
            at += rows
        block = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if fold is not None and matrix.name in fold.columns:
            block *= fold.columns[matrix.name]
        if fold is not None and matrix.name in fold.rows:
            block *= fold.rows[matrix.name][begin:end, None]
        return begin, block

    return in_order(block_at, range(0, matrix.n, step))


def convert(source: str, destination: str, weights: str = "int8", calibrate: Optional[str] = None, progress: Progress = lambda done, total: None,
            calibration_progress: Progress = lambda done, total: None) -> None:
    """Converts a Hugging Face folder or a GGUF file to one packed file.

    weights: "int8", "int4" or "f32". calibrate: a text for the activation-aware fold of int8 and int4 weights, and for int4's rounding
    (default: a built-in one), "" for neither. The bytes written depend on these arguments alone, not on the machine. KestrelError for anything wrong with the source,
    before or without leaving a file at `destination`.
    """
    if weights not in WEIGHT_TYPES:
        raise KestrelError(f"weights: expected {' or '.join(WEIGHT_TYPES)}, found {weights!r}")
    resolved(destination)
    checkpoint = Checkpoint.open(source)
    _check_kernels(checkpoint.config, checkpoint.source)
    tokenizer_config = {k: v for k, v in checkpoint.tokenizer_config.items() if k != "chat_template"}  # Checkpoint has decided which one counts
    text: Dict[str, bytes] = {"tokenizer.json": checkpoint.tokenizer_json,
                              "tokenizer_config.json": json.dumps(tokenizer_config, sort_keys=True).encode()}
    if checkpoint.chat_template is not None:
        text["chat_template"] = checkpoint.chat_template.encode()
    fingerprint = checkpoint.fingerprint

    def write(path: str, kind: str, calibration: str, fold: Optional[_Fold], report: Progress, moments: Optional[Moments] = None) -> None:
        def vector(v: Vector) -> np.ndarray:
            if v.name == "embedding_scale":
                scale = np.full(v.size, checkpoint.config.embedding_multiplier, np.float32)
                return scale / fold.head if fold is not None and checkpoint.config.tie_word_embeddings else scale
            values = np.concatenate([checkpoint.tensor(source) for source in v.sources])
            return values if fold is None else fold.vector(v.name, values)

        def rounding(m: Matrix) -> Optional[Rounding]:
            if moments is None:
                return None
            _, layer, name = m.name.split(".")
            return moments.rounding(int(layer), name, fold.columns.get(m.name) if fold is not None else None)

        write_packed(path, checkpoint.config, kind, fingerprint, calibration, text, vector, lambda m: row_blocks(checkpoint, m, fold), report, rounding)

    if weights == "f32" or calibrate == "":
        write(destination, weights, "off", None, progress)
        return
    ids = _calibration_ids(checkpoint, text["tokenizer.json"], tokenizer_config, calibrate)
    moments = Moments(checkpoint.config) if weights == "int4" else None
    with beside(destination) as plain:
        write(plain, "int8", "off", None, progress)
        ranges = input_ranges(ForwardModel(plain), ids, calibration_progress, moments)
    write(destination, weights, hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest(), _Fold(checkpoint, ranges), progress, moments)


def _calibration_ids(checkpoint: Checkpoint, tokenizer_json: bytes, tokenizer_config: Dict[str, object], text: Optional[str]) -> List[int]:
    tokenizer = Tokenizer.from_bytes(tokenizer_json, tokenizer_config, checkpoint.source)
    ids = tokenizer.encode(default_text() if text is None else text, bos=True)
    ids = [i for i in ids if i < checkpoint.config.vocab_size][:checkpoint.config.max_position_embeddings]
    if not ids:
        raise KestrelError("calibrate: the text has no tokens")
    return ids
