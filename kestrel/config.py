# SPDX-License-Identifier: Apache-2.0
"""What a model is: hyper-parameters under their Hugging Face names, read from either source and checked."""
from __future__ import annotations

import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .architecture import ARCHITECTURES, Architecture, TensorSpec
from .errors import KestrelError
from .fields import Fields
from .rope import read_rope

_LAYER_TYPES = ("full_attention", "sliding_attention")


class Tensor(NamedTuple):
    """One weight of a model: what the architecture says of it, its GGUF name, its shape, the packed tensor that it is part of."""

    spec: TensorSpec
    gguf: str
    shape: Tuple[int, ...]
    packed: str


def _turn_ends(fields: Mapping[str, Any]) -> List[int]:
    """Ids of the control tokens that end a turn by their name: GGUF files of Gemma, Phi-3 and others name only the end of a text, and llama.cpp knows these too."""
    tokens, types = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []
    return [i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == 3 and token in ("<end_of_turn>", "<|end|>", "<|eot_id|>", "<|im_end|>")]


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of one model, Hugging Face names. Sizes in elements, positions in tokens.

    rope_scaling is None, or {"rope_type": "linear", "factor"}, or {"rope_type": "llama3", "factor",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, or {"rope_type": "yarn", "factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}, or {"rope_type": "factors", "factors"}.
    rope_local_base_freq: the unscaled rope base of sliding layers, None where it is rope_theta too. eos_token_ids is the union of
    config.json's and generation_config.json's, in that order, possibly empty. layer_types: "full_attention" or "sliding_attention" for each
    layer, empty when none slides (sliding_window is None then). query_pre_attn_scalar: queries are scaled by its -1/2th power; None: head_dim.
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
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Optional[int] = None
    layer_types: Tuple[str, ...] = ()
    rope_local_base_freq: Optional[float] = None
    query_pre_attn_scalar: Optional[float] = None

    @property
    def q_size(self) -> int:
        """Rows of q_proj: num_attention_heads * head_dim (not always hidden_size)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj and of v_proj: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of q_proj, k_proj and v_proj together."""
        return self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        """Rows of gate_proj and up_proj together."""
        return 2 * self.intermediate_size

    @property
    def embedding_multiplier(self) -> float:
        """What an embedding row is multiplied by on its way in."""
        return math.sqrt(self.hidden_size) if ARCHITECTURES[self.architecture].embedding_times_sqrt_hidden else 1.0

    def slides(self, layer: int) -> bool:
        """Whether the layer attends to the last `sliding_window` positions only, its own included."""
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    def tensors(self) -> Dict[str, Tensor]:
        """Every weight of the model by its Hugging Face name, in the order of the forward pass."""
        arch = ARCHITECTURES[self.architecture]
        table: Dict[str, Tensor] = {}

        def add(spec: TensorSpec, prefix: str = "", gguf_prefix: str = "", packed_prefix: str = "") -> None:
            if not spec.when or getattr(self, spec.when):
                shape = tuple(getattr(self, axis) for axis in spec.shape)
                table[prefix + spec.name] = Tensor(spec, gguf_prefix + spec.gguf, shape, packed_prefix + spec.packed)

        add(arch.embedding)
        for n in range(self.num_hidden_layers):
            for spec in arch.layer:
                add(spec, f"model.layers.{n}.", f"blk.{n}.", f"layers.{n}.")
        add(arch.norm)
        if not self.tie_word_embeddings:
            add(arch.head)
        return table

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Optional[Mapping[str, Any]] = None,
                file: str = "config.json") -> "ModelConfig":
        """From the parsed config.json and generation_config.json; `file` is named in errors (KestrelError)."""
        s = Fields(config, file)
        arch = next((a for a in ARCHITECTURES.values() if a.multimodal and a.multimodal == s.get("model_type")), None)
        if arch is not None:  # what the wrapper says of the tokens counts for the text inside
            text = Fields(s.get("text_config"), f"{file}: text_config").values
            shared = {k: s.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config") if s.get(k) is not None}
            s = Fields({"model_type": arch.model_type, **text, **shared}, f"{file}: text_config")
        arch = arch or _architecture(s)
        return cls._read(Fields({**arch.defaults, **s.values}, s.file), arch, generation_config, os.path.dirname(file))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tied: bool, file: str = "GGUF", tensors: Collection[str] = (),
                  rope_factors: Optional[Sequence[float]] = None) -> "ModelConfig":
        """From a GGUF file's key-value pairs; `tied` says that the file has no tensor `output.weight`.

        tensors: names of the file's tensors, for what only they tell (biases). rope_factors: its `rope_freqs.weight`.
        """
        name = fields.get("general.architecture")
        arch = next((a for a in ARCHITECTURES.values() if a.gguf == name), None)
        if arch is None:
            supported = ", ".join(dict.fromkeys(a.gguf for a in ARCHITECTURES.values()))
            raise KestrelError(f"{file}: general.architecture: expected one of {supported}, found {name!r}")
        spelling = {
            "vocab_size": f"{name}.vocab_size", "hidden_size": f"{name}.embedding_length",
            "intermediate_size": f"{name}.feed_forward_length", "num_hidden_layers": f"{name}.block_count",
            "num_attention_heads": f"{name}.attention.head_count",
            "num_key_value_heads": f"{name}.attention.head_count_kv", "head_dim": f"{name}.attention.key_length",
            "max_position_embeddings": f"{name}.context_length",
            "rms_norm_eps": f"{name}.attention.layer_norm_rms_epsilon", "rope_theta": f"{name}.rope.freq_base",
            "bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id",
            "sliding_window": f"{name}.attention.sliding_window", "sliding_window_pattern": f"{name}.attention.sliding_window_pattern", "rope_local_base_freq": f"{name}.rope.freq_base_swa",
            "final_logit_softcapping": f"{name}.final_logit_softcapping", "attn_logit_softcapping": f"{name}.attn_logit_softcapping",
        }
        values = {hf: fields[key] for hf, key in spelling.items() if key in fields}
        if values.get("sliding_window") == 0:  # llama.cpp's converter writes it for none
            del values["sliding_window"]
        values["model_type"] = arch.model_type
        values["tie_word_embeddings"] = tied
        if "vocab_size" not in values and isinstance(fields.get("tokenizer.ggml.tokens"), list):
            values["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
        # llama.cpp ends a reply at any of the three
        ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        values["eos_token_id"] = [i for i in ends if i is not None] + _turn_ends(fields)
        old = fields.get(f"{name}.rope.scale_linear", 0)  # 2023's spelling
        scaling = fields.get(f"{name}.rope.scaling.type", "linear" if old else "none")
        if scaling != "none":
            values["rope_scaling"] = {"rope_type": scaling, "factor": fields.get(f"{name}.rope.scaling.factor") or old}
            if scaling == "yarn":
                values["rope_scaling"]["original_max_position_embeddings"] = fields.get(f"{name}.rope.scaling.original_context_length")
        if rope_factors is not None:
            if "rope_scaling" in values:
                raise KestrelError(f"{file}: rope_freqs.weight: expected none beside {name}.rope.scaling.type")
            values["rope_scaling"] = {"rope_type": "factors", "factors": list(rope_factors)}
        for when in {spec.when for spec in arch.layer if spec.when}:
            values[when] = any(f"blk.0.{spec.gguf}" in tensors for spec in arch.layer if spec.when == when)
        if arch.model_type == "gemma3_text" and values.get("num_hidden_layers") == 62:  # 27B: llama.cpp's own rule, the file has no key for it
            values["query_pre_attn_scalar"] = 168
        config = cls._read(Fields(values, file, spelling), arch, None, "")
        for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
            if fields.get(key, config.head_dim) != config.head_dim:
                raise KestrelError(f"{file}: {key}: expected {config.head_dim} (head_dim), found {fields[key]!r}")
        if fields.get(f"{name}.expert_count"):
            raise KestrelError(f"{file}: {name}.expert_count: mixture of experts is not supported")
        return config

    @classmethod
    def _read(cls, s: Fields, arch: Architecture, generation_config: Optional[Mapping[str, Any]], folder: str) -> "ModelConfig":
        quantization = s.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise s.fail("quantization_config", "an unquantised checkpoint (BF16, F16 or F32)", method or quantization)
        for key in ("hidden_act", "hidden_activation"):
            if (s.get(key) or arch.hidden_act[0]) not in arch.hidden_act:
                raise s.fail(key, " or ".join(arch.hidden_act), s.get(key))
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
        rope = read_rope(s, head_dim, arch.rope_theta, arch.rope_local_base_freq)
        layers = s.integer("num_hidden_layers", high=1 << 12)
        window, layer_types = _windows(s, arch, layers)
        scalar = s.number("query_pre_attn_scalar", default=head_dim)
        known = {spec.when for spec in arch.layer}
        vocab_size = s.integer("vocab_size")
        eos = s.token_ids("eos_token_id", vocab_size)
        if generation_config is not None:
            beside = os.path.join(folder, "generation_config.json")
            eos += Fields(generation_config, beside).token_ids("eos_token_id", vocab_size)
        bos = s.token_ids("bos_token_id", vocab_size)
        pad = s.get("pad_token_id")
        pad_known = isinstance(pad, int) and not isinstance(pad, bool) and 0 <= pad < vocab_size  # -1 is common: none
        return cls(
            architecture=arch.model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=s.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=s.integer("max_position_embeddings", default=2048),
            rms_norm_eps=s.number("rms_norm_eps", default=1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tie_word_embeddings=s.boolean("tie_word_embeddings", default=False),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            pad_token_id=pad if pad_known else None,
            hidden_act=arch.hidden_act[0],
            attention_bias=s.boolean("attention_bias", default=False) if "attention_bias" in known else False,
            mlp_bias=s.boolean("mlp_bias", default=False) if "mlp_bias" in known else False,
            sliding_window=window,
            layer_types=layer_types,
            rope_local_base_freq=rope.local_base_freq,
            query_pre_attn_scalar=None if scalar == head_dim else scalar,
        )

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives the equal object back (floats keep every bit). What has its default is left out."""
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return json.dumps({k: v for k, v in asdict(self).items() if k not in defaults or v != defaults[k]}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, file: str = "config") -> "ModelConfig":
        """Inverse of `to_json`; a packed file comes from outside too, so it passes the same checks."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise KestrelError(f"{file}: config: not JSON: {error}") from None
        s = Fields(values, file)
        for key in sorted({f.name for f in fields(cls) if f.default is MISSING} - set(values)):
            raise KestrelError(f"{file}: config: missing key {key!r}")
        for key in sorted(set(values) - {f.name for f in fields(cls)}):
            raise KestrelError(f"{file}: config: unknown key {key!r}")
        s = Fields({**{k: v for k, v in s.values.items() if k not in ("architecture", "eos_token_ids")}, "use_sliding_window": True,
                    "model_type": values["architecture"], "eos_token_id": values["eos_token_ids"]}, file,
                   {"model_type": "architecture", "eos_token_id": "eos_token_ids"})
        return cls._read(s, _architecture(s), None, "")


def _architecture(s: Fields) -> Architecture:
    kind = s.get("model_type")
    arch = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if arch is None:
        raise s.fail("model_type", "one of " + ", ".join(ARCHITECTURES), kind)
    return arch


def _windows(s: Fields, arch: Architecture, layers: int) -> Tuple[Optional[int], Tuple[str, ...]]:
    """(sliding_window, layer_types) as ModelConfig holds them: None and () when no layer slides."""
    if not arch.sliding or s.get("sliding_window") is None or (
            arch.sliding == "from max_window_layers" and not s.boolean("use_sliding_window", default=False)):
        return None, ()
    window = s.integer("sliding_window")
    types = s.get("layer_types")
    if arch.sliding == "all":
        types = [_LAYER_TYPES[1]] * layers
    elif types is None and arch.sliding == "pattern":
        pattern = s.integer("sliding_window_pattern", default=6)
        types = [_LAYER_TYPES[(i + 1) % pattern != 0] for i in range(layers)]
    elif types is None:
        first = s.integer("max_window_layers", default=28, low=0)
        types = [_LAYER_TYPES[i >= first] for i in range(layers)]
    if not isinstance(types, (list, tuple)) or len(types) != layers or not all(t in _LAYER_TYPES for t in types):
        raise s.fail("layer_types", f"{layers} of {' or '.join(_LAYER_TYPES)}", types)
    return (window, tuple(types)) if _LAYER_TYPES[1] in types else (None, ())
