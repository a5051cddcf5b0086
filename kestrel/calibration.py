# SPDX-License-Identifier: Apache-2.0
"""The activation-aware fold: per input channel, range moves from the activations into the weights before both are quantised.

For the inputs of q/k/v, of gate/up, of down and of the head: s = sqrt(max|x| / max|w|) per channel; x is divided by s (in the norm's
gain, or in up's rows), the weight's column multiplied by it. Exact arithmetic is unchanged, run time too; int8 errors shrink because a
group's scale no longer follows one loud channel. Source: SmoothQuant (Xiao et al. 2022), equation 4, alpha 0.5, here with groups.

int4's rounding also asks for the inputs' second moments: csrc/round_int4.c says what for.

The maxima come from kestrel's own forward pass, which has the same bits on every machine, and s is rounded to a grid of powers of
2^(1/2), so that a conversion gives the same file everywhere.
"""
from __future__ import annotations

import math
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _native
from .config import ModelConfig
from .model import ForwardModel
from .pack import Rounding
from .parallel import in_order

_ROWS = 64
_SILENT = 0.01  # of the mean square of all channels: what a silent one counts
_SQRT_HALF = 0.70710678118654752440


class Ranges(NamedTuple):
    """float32 maxima of |x| by input channel: qkv and gate_up [layers, hidden_size], down [layers, intermediate_size], head [hidden_size]."""

    qkv: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    head: np.ndarray


class Moments:
    """Second moments of the inputs of each layer's matmuls, in blocks of FEEDBACK channels: `sums` float32 [blocks, FEEDBACK, FEEDBACK], all
    layers' one after the other (kestrel_output.input_moments), over `tokens` rows."""

    def __init__(self, config: ModelConfig):
        widths = {"qkv": config.hidden_size, "o": config.q_size, "gate_up": config.hidden_size, "down": config.intermediate_size}
        self._place: Dict[str, Tuple[int, int]] = {}
        self._blocks = self.tokens = 0
        for kind, k in widths.items():
            self._place[kind] = (self._blocks, k)
            self._blocks += -(-k // _native.FEEDBACK)
        self.sums = np.zeros((config.num_hidden_layers * self._blocks, _native.FEEDBACK, _native.FEEDBACK), np.float32)

    def rounding(self, layer: int, kind: str, folded: Optional[np.ndarray]) -> Rounding:
        """What int4's rounding of a matrix goes by; `folded`: the factors that its columns are multiplied by, its inputs divided by."""
        first, k = self._place[kind]
        blocks, kp = -(-k // _native.FEEDBACK), -(-k // _native.GROUP) * _native.GROUP
        scale = np.zeros(blocks * _native.FEEDBACK, np.float32)
        scale[:k] = 1 if folded is None else np.float32(1) / folded
        scale = scale.reshape(blocks, _native.FEEDBACK)
        at = layer * self._blocks + first
        moments = self.sums[at:at + blocks] / np.float32(self.tokens) * scale[:, :, None] * scale[:, None, :]
        importance = moments.diagonal(axis1=1, axis2=2).reshape(-1)[:kp]
        # channels that the text left silent count a little: another text may wake them
        least = np.float32(_SILENT * math.fsum(importance.tolist()) / k) or np.float32(1)
        return Rounding(importance + least, np.concatenate(list(in_order(_native.feedback, np.ascontiguousarray(moments)[:, None]))))


def default_text() -> str:
    """Licence text, C and Python source, prose, questions and JSON; none of it is in the text that `kestrel quality` measures."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration.txt"), encoding="utf-8") as file:
        return file.read()


def input_ranges(model: ForwardModel, ids: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None,
                 moments: Optional[Moments] = None) -> Ranges:
    """Runs `ids` as one context and gives each channel's largest magnitude; adds to `moments`."""
    c = model.config
    layers, h, n = c.num_hidden_layers, c.hidden_size, c.intermediate_size
    flat = np.zeros(layers * (2 * h + n) + h, np.float32)
    kv = model.new_kv(len(ids), _ROWS)
    for at in range(0, len(ids), _ROWS):
        rows = ids[at:at + _ROWS]
        model.forward(kv, rows, wanted=len(rows), input_maxima=flat, input_moments=None if moments is None else moments.sums)
        if moments is not None:
            moments.tokens += len(rows)
        progress(at + len(rows), len(ids))
    table = flat[:-h].reshape(layers, 2 * h + n)
    return Ranges(table[:, :h], table[:, h:2 * h], table[:, 2 * h:], flat[-h:])


def factors(x_max: np.ndarray, w_max: np.ndarray) -> np.ndarray:
    """float32, the shape of x_max: sqrt(x_max / w_max) rounded to a power of 2^(1/2), the median exponent made 0; 1 where either is 0."""
    live = (x_max > 0) & (w_max > 0)
    ratio = np.where(live, x_max, np.float32(1)).astype(np.float64) / np.where(live, w_max, np.float32(1))
    mantissa, exponent = np.frexp(ratio)  # ratio = s^2 = 2^j to the nearest j
    j = np.where(mantissa >= _SQRT_HALF, exponent, exponent - 1)
    j = j - int(np.sort(j[live])[np.count_nonzero(live) // 2]) if live.any() else j
    j = np.clip(np.where(live, j, 0), -24, 24)
    return np.where(j % 2 == 0, np.ldexp(1.0, j // 2), np.ldexp(np.float64(1.4142135381698608), j // 2)).astype(np.float32)
