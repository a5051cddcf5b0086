# SPDX-License-Identifier: Apache-2.0
"""What a model is: hyper-parameters under their Hugging Face names, and the table of architectures.

A new architecture is a new entry in `ARCHITECTURES` (its tensors, their shapes, what it refuses), not a new reader.
"""
from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, Mapping, Optional, Tuple

from .errors import KestrelError

_LIMIT = 1 << 24  # no real model has a larger count of anything; a larger number is a broken or hostile file


@dataclass(frozen=True)
class TensorSpec:
    """One weight: Hugging Face name, GGUF name, shape as names of `ModelConfig` attributes.

    `permuted`: llama.cpp's converter interleaves the halves of each head_dim rows.
    """

    name: str
    gguf: str
    shape: Tuple[str, ...]
    permuted: bool = False


@dataclass(frozen=True)
class Architecture:
    """What the readers need to know about one architecture, as data."""

    model_type: str  # config.json `model_type`
    gguf: str  # GGUF `general.architecture`, and the prefix of its keys
    hidden_act: Tuple[str, ...]
    required: Mapping[str, Any]  # config.json keys with the only value that is implemented (absent or null passes)
    embedding: TensorSpec
    layer: Tuple[TensorSpec, ...]  # names below `model.layers.N.` and `blk.N.`
    norm: TensorSpec
    head: TensorSpec  # absent when tie_word_embeddings
    buffers: Tuple[str, ...] = ()  # endings of names that old checkpoints carry and no one reads


_LLAMA = Architecture(
    model_type="llama",
    gguf="llama",
    hidden_act=("silu",),
    required={"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
    embedding=TensorSpec("model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    layer=(
        TensorSpec("input_layernorm.weight", "attn_norm.weight", ("hidden_size",)),
        TensorSpec("self_attn.q_proj.weight", "attn_q.weight", ("q_size", "hidden_size"), permuted=True),
        TensorSpec("self_attn.k_proj.weight", "attn_k.weight", ("kv_size", "hidden_size"), permuted=True),
        TensorSpec("self_attn.v_proj.weight", "attn_v.weight", ("kv_size", "hidden_size")),
        TensorSpec("self_attn.o_proj.weight", "attn_output.weight", ("hidden_size", "q_size")),
        TensorSpec("post_attention_layernorm.weight", "ffn_norm.weight", ("hidden_size",)),
        TensorSpec("mlp.gate_proj.weight", "ffn_gate.weight", ("intermediate_size", "hidden_size")),
        TensorSpec("mlp.up_proj.weight", "ffn_up.weight", ("intermediate_size", "hidden_size")),
        TensorSpec("mlp.down_proj.weight", "ffn_down.weight", ("hidden_size", "intermediate_size")),
    ),
    norm=TensorSpec("model.norm.weight", "output_norm.weight", ("hidden_size",)),
    head=TensorSpec("lm_head.weight", "output.weight", ("vocab_size", "hidden_size")),
    buffers=(".self_attn.rotary_emb.inv_freq",),
)

ARCHITECTURES: Dict[str, Architecture] = {a.model_type: a for a in (_LLAMA,)}

# rope_type -> its parameters, each with its least value. "default" has none and becomes None.
_ROPE_PARAMETERS: Dict[str, Dict[str, float]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "llama3": {"factor": 1.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0, "original_max_position_embeddings": 1},
}
_ROPE_IGNORED = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}


class _Source:
    """A mapping read from outside, with the file and the file's own spelling of each key for the messages."""

    def __init__(self, values: Mapping[str, Any], file: str, spelling: Optional[Mapping[str, str]] = None):
        if not isinstance(values, Mapping):
            raise KestrelError(f"{file}: expected an object, found {type(values).__name__}")
        self.values, self.file, self.spelling = values, file, spelling or {}

    def fail(self, key: str, expected: str, found: Any) -> KestrelError:
        text = "nothing" if found is None else repr(found)
        text = text if len(text) <= 80 else text[:77] + "..."
        return KestrelError(f"{self.file}: {self.spelling.get(key, key)}: expected {expected}, found {text}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: Optional[int] = None, low: int = 1, high: int = _LIMIT) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, default: Optional[float] = None, low: float = 0.0, above: bool = True) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            good = good and math.isfinite(float(value)) and (value > low if above else value >= low)
        except OverflowError:
            good = False
        # float32 is what the kernels read: anything it can't hold would become Inf or 0 there
        if not good or (value != 0 and not 1e-37 < abs(value) < 3e38):
            raise self.fail(key, f"a number {'above' if above else 'from'} {low:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, "true or false", value)
        return value

    def token_ids(self, key: str, vocab_size: int) -> Tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, (list, tuple)) else [value]
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
                raise self.fail(key, f"token ids from 0 to {vocab_size - 1}", value)
        return tuple(ids)


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of one model, Hugging Face names. Sizes in elements, positions in tokens.

    rope_scaling is None, or {"rope_type": "linear", "factor"}, or {"rope_type": "llama3", "factor",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}. eos_token_ids is the union of
    config.json's and generation_config.json's, in that order, possibly empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Optional[Dict[str, Any]]
    tie_word_embeddings: bool
    bos_token_id: Optional[int]
    eos_token_ids: Tuple[int, ...]
    pad_token_id: Optional[int]

    @property
    def q_size(self) -> int:
        """Rows of q_proj: num_attention_heads * head_dim (not always hidden_size)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj and of v_proj: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    def tensors(self) -> Dict[str, Tuple[TensorSpec, str, Tuple[int, ...]]]:
        """Every weight of the model: Hugging Face name -> (spec, GGUF name, shape), in the order of the forward pass."""
        arch = ARCHITECTURES[self.architecture]
        table: Dict[str, Tuple[TensorSpec, str, Tuple[int, ...]]] = {}

        def add(spec: TensorSpec, prefix: str = "", gguf_prefix: str = "") -> None:
            shape = tuple(getattr(self, axis) for axis in spec.shape)
            table[prefix + spec.name] = (spec, gguf_prefix + spec.gguf, shape)

        add(arch.embedding)
        for n in range(self.num_hidden_layers):
            for spec in arch.layer:
                add(spec, f"model.layers.{n}.", f"blk.{n}.")
        add(arch.norm)
        if not self.tie_word_embeddings:
            add(arch.head)
        return table

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Optional[Mapping[str, Any]] = None,
                file: str = "config.json") -> "ModelConfig":
        """From the parsed config.json and generation_config.json; `file` is named in errors (KestrelError)."""
        return cls._read(_Source(config, file), generation_config)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tied: bool, file: str = "GGUF") -> "ModelConfig":
        """From a GGUF file's key-value pairs; `tied` says that the file has no tensor `output.weight`."""
        name = fields.get("general.architecture")
        arch = next((a for a in ARCHITECTURES.values() if a.gguf == name), None)
        if arch is None:
            supported = ", ".join(a.gguf for a in ARCHITECTURES.values())
            raise KestrelError(f"{file}: general.architecture: expected one of {supported}, found {name!r}")
        spelling = {
            "vocab_size": f"{name}.vocab_size", "hidden_size": f"{name}.embedding_length",
            "intermediate_size": f"{name}.feed_forward_length", "num_hidden_layers": f"{name}.block_count",
            "num_attention_heads": f"{name}.attention.head_count",
            "num_key_value_heads": f"{name}.attention.head_count_kv", "head_dim": f"{name}.attention.key_length",
            "max_position_embeddings": f"{name}.context_length",
            "rms_norm_eps": f"{name}.attention.layer_norm_rms_epsilon", "rope_theta": f"{name}.rope.freq_base",
            "bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id",
        }
        values = {hf: fields[key] for hf, key in spelling.items() if key in fields}
        values["model_type"] = arch.model_type
        values["tie_word_embeddings"] = tied
        if "vocab_size" not in values and isinstance(fields.get("tokenizer.ggml.tokens"), list):
            values["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
        # llama.cpp ends a reply at any of the three
        ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        values["eos_token_id"] = [i for i in ends if i is not None]
        old = fields.get(f"{name}.rope.scale_linear", 0)  # 2023's spelling
        scaling = fields.get(f"{name}.rope.scaling.type", "linear" if old else "none")
        if scaling != "none":
            values["rope_scaling"] = {"rope_type": scaling, "factor": fields.get(f"{name}.rope.scaling.factor") or old}
        config = cls._read(_Source(values, file, spelling), None)
        for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
            if fields.get(key, config.head_dim) != config.head_dim:
                raise KestrelError(f"{file}: {key}: expected {config.head_dim} (head_dim), found {fields[key]!r}")
        if fields.get(f"{name}.expert_count"):
            raise KestrelError(f"{file}: {name}.expert_count: mixture of experts is not supported")
        return config

    @classmethod
    def _read(cls, s: _Source, generation_config: Optional[Mapping[str, Any]]) -> "ModelConfig":
        arch = ARCHITECTURES.get(s.get("model_type")) if isinstance(s.get("model_type"), str) else None
        if arch is None:
            raise s.fail("model_type", "one of " + ", ".join(ARCHITECTURES), s.get("model_type"))
        quantization = s.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise s.fail("quantization_config", "an unquantised checkpoint (BF16, F16 or F32)", method or quantization)
        act = s.get("hidden_act") or arch.hidden_act[0]
        if act not in arch.hidden_act:
            raise s.fail("hidden_act", " or ".join(arch.hidden_act), act)
        for key, only in arch.required.items():
            if s.get(key) is not None and s.get(key) != only:
                raise s.fail(key, json.dumps(only), s.get(key))

        hidden_size = s.integer("hidden_size")
        heads = s.integer("num_attention_heads", high=1 << 14)
        kv_heads = s.integer("num_key_value_heads", default=heads, high=1 << 14)
        if heads % kv_heads:
            raise s.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if s.get("head_dim") is None and hidden_size % heads:
            raise s.fail("hidden_size", f"a multiple of num_attention_heads ({heads}), or a head_dim", hidden_size)
        head_dim = s.integer("head_dim", default=hidden_size // heads, high=1 << 14)
        if head_dim % 2:
            raise s.fail("head_dim", "an even number (rope turns pairs)", head_dim)
        rope_theta, rope_scaling = _rope(s)
        vocab_size = s.integer("vocab_size")
        eos = s.token_ids("eos_token_id", vocab_size)
        if generation_config is not None:
            beside = os.path.join(os.path.dirname(s.file), "generation_config.json")
            eos += _Source(generation_config, beside).token_ids("eos_token_id", vocab_size)
        bos = s.token_ids("bos_token_id", vocab_size)
        pad = s.get("pad_token_id")
        pad_known = isinstance(pad, int) and not isinstance(pad, bool) and 0 <= pad < vocab_size  # -1 is common: none
        return cls(
            architecture=arch.model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=s.integer("intermediate_size"),
            num_hidden_layers=s.integer("num_hidden_layers", high=1 << 12),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=s.integer("max_position_embeddings", default=2048),
            rms_norm_eps=s.number("rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=s.boolean("tie_word_embeddings", default=False),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            pad_token_id=pad if pad_known else None,
        )

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives the equal object back (floats keep every bit)."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, file: str = "config") -> "ModelConfig":
        """Inverse of `to_json`; a packed file comes from outside too, so it passes the same checks."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise KestrelError(f"{file}: config: not JSON: {error}") from None
        s = _Source(values, file)
        names = {f.name for f in fields(cls)}
        for key in sorted(names.symmetric_difference(values)):
            raise KestrelError(f"{file}: config: {'missing' if key in names else 'unknown'} key {key!r}")
        config = cls._read(_Source(
            {**{k: v for k, v in s.values.items() if k not in ("architecture", "eos_token_ids")},
             "model_type": values["architecture"], "eos_token_id": values["eos_token_ids"]}, file,
            {"model_type": "architecture", "eos_token_id": "eos_token_ids"}), None)
        return config


def _rope(s: _Source) -> Tuple[float, Optional[Dict[str, Any]]]:
    """(rope_theta, normalised rope_scaling or None) from either spelling; both at once must agree."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        value = s.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise s.fail(key, "an object", value)
        found.append((key, _rope_scaling(s, key, value)))
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise s.fail("rope_scaling", "the same as rope_parameters", s.get("rope_scaling"))
    nested = s.get("rope_parameters") or {}
    top = s.get("rope_theta")
    if top is not None and nested.get("rope_theta") not in (None, top):
        raise s.fail("rope_theta", f"{nested['rope_theta']!r} as in rope_parameters", top)
    theta = _Source({"rope_theta": nested.get("rope_theta", top)}, s.file, s.spelling)
    return theta.number("rope_theta", default=10000.0), found[0][1] if found else None


def _rope_scaling(s: _Source, key: str, value: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    kinds = {str(value[k]) for k in ("rope_type", "type") if value.get(k) is not None} or {"default"}
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in _ROPE_PARAMETERS:
        raise s.fail(f"{key}.rope_type", "one of " + ", ".join(_ROPE_PARAMETERS), " and ".join(sorted(kinds)))
    parameters = _ROPE_PARAMETERS[kind]
    r = _Source(value, f"{s.file}: {key}")
    result: Dict[str, Any] = {"rope_type": kind}
    for name, least in parameters.items():
        if isinstance(least, int):
            result[name] = r.integer(name, low=least)
        else:
            result[name] = r.number(name, low=least, above=least == 0.0)
    for name, given in value.items():
        if name == "partial_rotary_factor" and given == 1:
            continue
        if name not in parameters and name not in _ROPE_IGNORED and given is not None:
            raise r.fail(name, f"nothing (rope_type {kind} has no such parameter)", given)
    if kind == "llama3" and result["high_freq_factor"] <= result["low_freq_factor"]:
        raise r.fail("high_freq_factor", f"more than low_freq_factor ({result['low_freq_factor']})",
                     result["high_freq_factor"])
    return None if kind == "default" else result
