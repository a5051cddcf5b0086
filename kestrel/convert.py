# SPDX-License-Identifier: Apache-2.0
"""Checkpoint -> packed file, block by block: memory stays bounded by one block, whatever the model's size."""
from __future__ import annotations

import json
import os
from typing import Callable, Dict, Iterator, Tuple

import numpy as np

from . import _native
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import KestrelError
from .pack import WEIGHT_TYPES, Matrix, write_packed

_BLOCK_BYTES = 8 << 20  # float32 bytes of one block of rows


def _check_kernels(config: ModelConfig, source: str) -> None:
    """What the file format allows but the kernels don't."""
    if config.head_dim % 8 or not 8 <= config.head_dim <= 512:
        raise KestrelError(f"{source}: head_dim: expected a multiple of 8 up to 512, found {config.head_dim}")


def row_blocks(checkpoint: Checkpoint, matrix: Matrix) -> Iterator[Tuple[int, np.ndarray]]:
    """The rows of a packed matrix in blocks of whole panels (the last may be shorter): (first row, float32 [rows, k])."""
    shapes = checkpoint.expected_shapes()
    step = max(_native.PANEL, _BLOCK_BYTES // (4 * matrix.k) // _native.PANEL * _native.PANEL)
    for begin in range(0, matrix.n, step):
        end = min(begin + step, matrix.n)
        parts, at = [], 0
        for name in matrix.sources:  # rows of several tensors may meet inside one block
            rows = shapes[name][0]
            low, high = max(begin - at, 0), min(end - at, rows)
            if low < high:
                parts.append(checkpoint.rows(name, low, high))
            at += rows
        yield begin, parts[0] if len(parts) == 1 else np.concatenate(parts)


def convert(source: str, destination: str, weights: str = "int8",
            progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Converts a Hugging Face folder or a GGUF file to one packed file.

    weights: "int8" (groups of 32 along k, absmax scales in f16) or "f32". The bytes written depend on source and weights alone.
    KestrelError for anything wrong with the source, before or without leaving a file at `destination`.
    """
    if weights not in WEIGHT_TYPES:
        raise KestrelError(f"weights: expected {' or '.join(WEIGHT_TYPES)}, found {weights!r}")
    if os.path.isdir(destination):
        raise KestrelError(f"{destination}: expected a file name, found a folder")
    folder = os.path.dirname(os.path.abspath(destination))
    if not os.path.isdir(folder):
        raise KestrelError(f"{destination}: the folder {folder} does not exist")
    checkpoint = Checkpoint.open(source)
    _check_kernels(checkpoint.config, checkpoint.source)
    tokenizer_config = {k: v for k, v in checkpoint.tokenizer_config.items() if k != "chat_template"}  # Checkpoint has decided which one counts
    text: Dict[str, bytes] = {"tokenizer.json": checkpoint.tokenizer_json,
                              "tokenizer_config.json": json.dumps(tokenizer_config, sort_keys=True).encode()}
    if checkpoint.chat_template is not None:
        text["chat_template"] = checkpoint.chat_template.encode()
    write_packed(destination, checkpoint.config, weights, checkpoint.fingerprint, text, checkpoint.tensor,
                 lambda matrix: row_blocks(checkpoint, matrix), progress)
