# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: what a config may say about them, and the frequencies that follow (Su et al. 2021).

Scalings: linear (Chen et al. 2023, position interpolation), llama3 (Meta's Llama 3.1 reference code; transformers'
`_compute_llama3_parameters`), yarn (Peng et al. 2023; transformers' `_compute_yarn_parameters`), factors (a GGUF file's `rope_freqs.weight`: each frequency has a divisor of its own).
"""
from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional

import numpy as np

from . import _native
from .fields import Fields

# rope_type -> its parameters, each with its least value. "default" has none and becomes None.
_PARAMETERS: Dict[str, Dict[str, float]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "llama3": {"factor": 1.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0, "original_max_position_embeddings": 1},
    "yarn": {"factor": 1.0, "original_max_position_embeddings": 1, "attention_factor": 0.0, "beta_fast": 0.0, "beta_slow": 0.0},
    "factors": {},
}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # where absent
_IGNORED = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}


class Rope(NamedTuple):
    """rope_theta, the normalised rope_scaling or None, and the base of sliding layers where it differs (never scaled)."""

    theta: float
    scaling: Optional[Dict[str, Any]]
    local_base_freq: Optional[float]


def read_rope(s: Fields, head_dim: int, theta: float, local_base_freq: Optional[float]) -> Rope:
    """From either spelling; both at once must agree. theta, local_base_freq: the architecture's defaults."""
    nested = s.get("rope_parameters")
    if local_base_freq is None:
        return _one(s, head_dim, theta)
    local: Any = s.get("rope_local_base_freq")
    if isinstance(nested, Mapping) and any(isinstance(v, Mapping) for v in nested.values()):  # one set for each kind of layer
        kinds = {}
        for kind in ("full_attention", "sliding_attention"):
            part = nested.get(kind) or {}
            kinds[kind] = _one(Fields({"rope_parameters": part}, f"{s.file}: rope_parameters: {kind}"), head_dim,
                               theta if kind == "full_attention" else local_base_freq)
        if kinds["sliding_attention"].scaling is not None:
            raise s.fail("rope_parameters.sliding_attention.rope_type", "default", kinds["sliding_attention"].scaling["rope_type"])
        return Rope(kinds["full_attention"].theta, kinds["full_attention"].scaling, kinds["sliding_attention"].theta)
    rope = _one(s, head_dim, theta)
    if (rope.scaling or {}).get("rope_type") == "yarn":  # its attention factor would reach the sliding layers too
        raise s.fail("rope_scaling.rope_type", "one of default, linear, llama3 beside a rope_local_base_freq", "yarn")
    return rope._replace(local_base_freq=Fields({"rope_local_base_freq": local}, s.file, s.spelling).number(
        "rope_local_base_freq", default=local_base_freq, low=1.0, above=False))


def _one(s: Fields, head_dim: int, default: float) -> Rope:
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        value = s.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise s.fail(key, "an object", value)
        found.append((key, _scaling(s, key, value, head_dim)))
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise s.fail("rope_scaling", "the same as rope_parameters", s.get("rope_scaling"))
    nested = s.get("rope_parameters") or {}
    top = s.get("rope_theta")
    if top is not None and nested.get("rope_theta") not in (None, top):
        raise s.fail("rope_theta", f"{nested['rope_theta']!r} as in rope_parameters", top)
    theta = Fields({"rope_theta": nested.get("rope_theta", top)}, s.file, s.spelling)
    return Rope(theta.number("rope_theta", default=default), found[0][1] if found else None, None)


def _scaling(s: Fields, key: str, value: Mapping[str, Any], head_dim: int) -> Optional[Dict[str, Any]]:
    kinds = {str(value[k]) for k in ("rope_type", "type") if value.get(k) is not None} or {"default"}
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in _PARAMETERS:
        raise s.fail(f"{key}.rope_type", "one of " + ", ".join(_PARAMETERS), " and ".join(sorted(kinds)))
    parameters = _PARAMETERS[kind]
    r = Fields(value, f"{s.file}: {key}")
    result: Dict[str, Any] = {"rope_type": kind}
    if kind == "factors":
        factors = value.get("factors")
        if not isinstance(factors, (list, tuple)) or len(factors) != head_dim // 2:
            raise r.fail("factors", f"{head_dim // 2} numbers (head_dim / 2)", factors)
        result["factors"] = [Fields({"factors": f}, r.file).number("factors") for f in factors]
        return result
    if kind == "yarn":
        given = {**_YARN, "original_max_position_embeddings": s.get("max_position_embeddings"), **{k: v for k, v in value.items() if v is not None}}
        given.setdefault("attention_factor", _yarn_attention_factor(r.number("factor", low=1.0, above=False)))
        if given.pop("truncate", True) is not True:
            raise r.fail("truncate", "true", value["truncate"])
        value, r = given, Fields(given, r.file)
    for name, least in parameters.items():
        if isinstance(least, int):
            result[name] = r.integer(name, low=least)
        else:
            result[name] = r.number(name, low=least, above=least == 0.0)
    for name, given in value.items():
        if name == "partial_rotary_factor" and given == 1:
            continue
        if name not in parameters and name not in _IGNORED and given is not None:
            raise r.fail(name, f"nothing (rope_type {kind} has no such parameter)", given)
    if kind == "llama3" and result["high_freq_factor"] <= result["low_freq_factor"]:
        raise r.fail("high_freq_factor", f"more than low_freq_factor ({result['low_freq_factor']})",
                     result["high_freq_factor"])
    return None if kind == "default" else result


def _yarn_attention_factor(factor: float) -> float:
    return 0.1 * _native.ln(factor) + 1.0


def attention_factor(scaling: Optional[Dict[str, Any]]) -> float:
    """What cosines and sines of queries and of keys are multiplied by; a step multiplies the queries by its square instead."""
    return scaling["attention_factor"] if scaling is not None and scaling["rope_type"] == "yarn" else 1.0


def _yarn(theta: float, head_dim: int, scaling: Dict[str, Any], inv_freq: np.ndarray) -> np.ndarray:
    def dimension(turns: float) -> float:  # the pair that turns so often within the original context
        return head_dim * _native.ln(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * _native.ln(theta))

    low, high = max(math.floor(dimension(scaling["beta_fast"])), 0), min(math.ceil(dimension(scaling["beta_slow"])), head_dim - 1)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / span, np.float32(0), np.float32(1))
    keep = np.float32(1) - ramp
    return (inv_freq / np.float32(scaling["factor"])) * (np.float32(1) - keep) + inv_freq * keep


def inverse_frequencies(theta: float, head_dim: int, scaling: Optional[Dict[str, Any]]) -> np.ndarray:
    """float32 [head_dim / 2]: radians a position of each pair. Only exactly rounded operations, in float32 as in transformers."""
    inv_freq = _native.rope_inv_freq(theta, head_dim)
    if scaling is None:
        return inv_freq
    if scaling["rope_type"] == "factors":
        return inv_freq / np.array(scaling["factors"], np.float32)
    if scaling["rope_type"] == "yarn":
        return _yarn(theta, head_dim, scaling, inv_freq)
    factor = np.float32(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * (inv_freq / factor) + smooth * inv_freq
    result = np.where(wavelength > np.float32(original / low), inv_freq / factor, inv_freq)
    medium = (wavelength >= np.float32(original / high)) & (wavelength <= np.float32(original / low))
    return np.where(medium, blended, result).astype(np.float32)
