# SPDX-License-Identifier: Apache-2.0
"""The table of architectures: which tensors a model has, what they become in the packed file, and what its config may say.

A new architecture is a new entry here, not a new reader and not a new step: the one step in csrc/forward.c takes biases, gains of the
query and key heads, norms behind a block, windows and rope tables as data that may be there or not.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, Mapping, Optional, Tuple


@dataclass(frozen=True)
class TensorSpec:
    """One weight: Hugging Face name, GGUF name, shape as names of `ModelConfig` attributes, and what it is part of when packed.

    Tensors of one layer with the same `packed` name lie one after the other in it. permuted: llama.cpp's converter interleaves the halves of
    each head_dim rows. minus_one: Hugging Face's file holds the gain less 1 (GGUF the gain). when: the tensor is there only if this
    attribute of the config is true.
    """

    name: str
    gguf: str
    shape: Tuple[str, ...]
    packed: str
    permuted: bool = False
    minus_one: bool = False
    when: str = ""


@dataclass(frozen=True)
class Architecture:
    """What the readers need to know about one architecture, as data."""

    model_type: str  # config.json `model_type`
    gguf: str  # GGUF `general.architecture`, and the prefix of its keys
    layer: Tuple[TensorSpec, ...]  # names below `model.layers.N.` and `blk.N.`
    hidden_act: Tuple[str, ...] = ("silu",)
    required: Mapping[str, Any] = field(default_factory=dict)  # config.json keys with the only value that is implemented (absent or null passes)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config.json keys that published configs leave out
    rope_theta: float = 10000.0
    rope_local_base_freq: Optional[float] = None  # rope base of sliding layers where it differs from the others'
    # which layers attend to `sliding_window` keys only: "" none, "all", "from max_window_layers" (if use_sliding_window), "pattern" (all but
    # every sliding_window_pattern-th); `layer_types` says it layer by layer where "all" does not
    sliding: str = ""
    embedding_times_sqrt_hidden: bool = False
    embedding: TensorSpec = TensorSpec("model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size"), "embedding")
    norm: TensorSpec = TensorSpec("model.norm.weight", "output_norm.weight", ("hidden_size",), "final_norm")
    head: TensorSpec = TensorSpec("lm_head.weight", "output.weight", ("vocab_size", "hidden_size"), "head")  # absent when tie_word_embeddings
    buffers: Tuple[str, ...] = ()  # endings of names that old checkpoints carry and no one reads
    multimodal: str = ""  # model_type of a config.json that holds this one's config as `text_config` beside other modalities
    multimodal_names: Tuple[Tuple[str, str], ...] = ()  # beginnings of its tensor names -> ours; "" for those that text does not need

    def text_name(self, name: str) -> str:
        """A tensor's name as a text-only checkpoint has it; "" for a tensor of another modality."""
        for begin, ours in self.multimodal_names:
            if name.startswith(begin):
                return ours + name[len(begin):] if ours else ""
        return name


def _matrix(name: str, gguf: str, n: str, k: str, packed: str) -> TensorSpec:
    return TensorSpec(name + ".weight", gguf + ".weight", (n, k), packed)


def _gain(name: str, gguf: str, packed: str, size: str = "hidden_size") -> TensorSpec:
    return TensorSpec(name + ".weight", gguf + ".weight", (size,), packed)


def _biases(matrices: Tuple[TensorSpec, ...], when: str = "") -> Tuple[TensorSpec, ...]:
    """A bias for each of `matrices`."""
    return tuple(replace(m, name=m.name.replace(".weight", ".bias"), gguf=m.gguf.replace(".weight", ".bias"), shape=m.shape[:1],
                         packed=m.packed + "_bias", when=when) for m in matrices)


_INPUT_NORM = _gain("input_layernorm", "attn_norm", "attention_norm")
_QKV = (_matrix("self_attn.q_proj", "attn_q", "q_size", "hidden_size", "qkv"), _matrix("self_attn.k_proj", "attn_k", "kv_size", "hidden_size", "qkv"),
        _matrix("self_attn.v_proj", "attn_v", "kv_size", "hidden_size", "qkv"))
_QKV_PERMUTED = (replace(_QKV[0], permuted=True), replace(_QKV[1], permuted=True), _QKV[2])
_QK_NORM = (_gain("self_attn.q_norm", "attn_q_norm", "q_norm", "head_dim"), _gain("self_attn.k_norm", "attn_k_norm", "k_norm", "head_dim"))
_O = (_matrix("self_attn.o_proj", "attn_output", "hidden_size", "q_size", "o"),)
_MLP_NORM = _gain("post_attention_layernorm", "ffn_norm", "mlp_norm")
_GATE_UP = (_matrix("mlp.gate_proj", "ffn_gate", "intermediate_size", "hidden_size", "gate_up"),
            _matrix("mlp.up_proj", "ffn_up", "intermediate_size", "hidden_size", "gate_up"))
_DOWN = (_matrix("mlp.down_proj", "ffn_down", "hidden_size", "intermediate_size", "down"),)
_ROTARY_BUFFERS = (".self_attn.rotary_emb.inv_freq",)
_WHOLE_ROPE = {"partial_rotary_factor": 1.0}


def _gemma_gains(*specs: TensorSpec) -> Tuple[TensorSpec, ...]:
    return tuple(replace(s, minus_one=True) if len(s.shape) == 1 else s for s in specs)


_TABLE = (
    Architecture(  # Touvron et al. 2023; also TinyLlama, SmolLM2 and Llama 3
        model_type="llama", gguf="llama", required=_WHOLE_ROPE, buffers=_ROTARY_BUFFERS,
        layer=(_INPUT_NORM, *_QKV_PERMUTED, *_biases(_QKV_PERMUTED + _O, "attention_bias"), *_O, _MLP_NORM, *_GATE_UP,
               *_biases(_GATE_UP + _DOWN, "mlp_bias"), *_DOWN)),
    Architecture(  # Jiang et al. 2023. Its GGUF files call themselves llama and know no window
        model_type="mistral", gguf="llama", required=_WHOLE_ROPE, sliding="all", buffers=_ROTARY_BUFFERS,
        layer=(_INPUT_NORM, *_QKV_PERMUTED, *_O, _MLP_NORM, *_GATE_UP, *_DOWN)),
    Architecture(  # Qwen2 and Qwen2.5 (arXiv 2407.10671)
        model_type="qwen2", gguf="qwen2", required=_WHOLE_ROPE, sliding="from max_window_layers",
        layer=(_INPUT_NORM, *_QKV, *_biases(_QKV), *_O, _MLP_NORM, *_GATE_UP, *_DOWN)),
    Architecture(  # arXiv 2505.09388
        model_type="qwen3", gguf="qwen3", required=_WHOLE_ROPE, sliding="from max_window_layers", defaults={"head_dim": 128},
        layer=(_INPUT_NORM, *_QKV, *_biases(_QKV + _O, "attention_bias"), *_QK_NORM, *_O, _MLP_NORM, *_GATE_UP, *_DOWN)),
    Architecture(  # arXiv 2503.19786; defaults: transformers' Gemma3TextConfig
        model_type="gemma3_text", gguf="gemma3", hidden_act=("gelu_pytorch_tanh",), sliding="pattern", rope_theta=1e6, rope_local_base_freq=1e4,
        required={**_WHOLE_ROPE, "attention_bias": False, "final_logit_softcapping": None, "attn_logit_softcapping": None,
                  "use_bidirectional_attention": False},
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
                  "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
                  "pad_token_id": 0},
        embedding_times_sqrt_hidden=True, norm=_gemma_gains(Architecture.norm)[0],
        layer=_gemma_gains(
            _INPUT_NORM, *_QKV, *_QK_NORM, *_O, _gain("post_attention_layernorm", "post_attention_norm", "attention_post_norm"),
            _gain("pre_feedforward_layernorm", "ffn_norm", "mlp_norm"), *_GATE_UP, *_DOWN,
            _gain("post_feedforward_layernorm", "post_ffw_norm", "mlp_post_norm")),
        multimodal="gemma3",
        multimodal_names=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model."),
                          ("vision_tower.", ""), ("multi_modal_projector.", ""), ("model.vision_tower.", ""), ("model.multi_modal_projector.", ""))),
    Architecture(  # arXiv 2404.14219: q, k, v and gate, up are one tensor each, in the packed file's order
        model_type="phi3", gguf="phi3", required={**_WHOLE_ROPE, "attention_bias": False}, sliding="all",
        layer=(_INPUT_NORM, _matrix("self_attn.qkv_proj", "attn_qkv", "qkv_size", "hidden_size", "qkv"), *_O, _MLP_NORM,
               _matrix("mlp.gate_up_proj", "ffn_up", "gate_up_size", "hidden_size", "gate_up"), *_DOWN)),
)
ARCHITECTURES: Dict[str, Architecture] = {a.model_type: a for a in _TABLE}
