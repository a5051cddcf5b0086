"""Write a Llama GGUF file as a Hugging Face folder, for transformers to read.

    python tests/reference/hf_from_gguf.py FILE.gguf FOLDER

Independent of kestrel on purpose: nothing here imports it, so a mistake in
kestrel's own GGUF reader cannot hide in the reference. Needs the packages
gguf, numpy, safetensors and tokenizers.

Every weight becomes float32 exactly as the block format defines it (the gguf
package dequantises). transformers' own GGUF conversion is not used: it loses
the digit splitter of `tokenizer.ggml.pre = smollm`.
"""
from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; KeyError for one that is unknown."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{int(layer)}.{LAYER_TENSORS[rest]}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, [heads*d, k], from interleaved pairs back to halves.

    llama.cpp's converter puts row 2i + j of a head where Hugging Face has row
    j*d/2 + i, because its rope turns neighbours and Hugging Face's turns halves.
    """
    rows, k = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, k)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, k)


def read_tensors(reader) -> dict:
    """All tensors as float32 under Hugging Face names, q and k un-permuted."""
    from gguf.quants import dequantize

    heads = reader.get_field("llama.attention.head_count").contents()
    kv_heads = reader.get_field("llama.attention.head_count_kv").contents()
    tensors = {}
    for t in reader.tensors:
        weight = dequantize(t.data, t.tensor_type).astype(np.float32, copy=False)
        weight = weight.reshape(tuple(int(n) for n in t.shape[::-1]))
        if t.name.endswith("attn_q.weight"):
            weight = unpermute(weight, heads)
        elif t.name.endswith("attn_k.weight"):
            weight = unpermute(weight, kv_heads)
        tensors[hf_name(t.name)] = np.ascontiguousarray(weight)
    return tensors


def read_config(reader, tied: bool) -> dict:
    def field(name):
        return reader.get_field(name).contents()

    hidden = field("llama.embedding_length")
    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def build_tokenizer(reader):
    """Byte-level BPE from the file's vocabulary and merges; `smollm` splits every digit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if reader.get_field("tokenizer.ggml.pre").contents() != "smollm":
        raise SystemExit("only tokenizer.ggml.pre = smollm is known here")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = [tuple(m.split(" ")) for m in reader.get_field("tokenizer.ggml.merges").contents()]
    types = reader.get_field("tokenizer.ggml.token_type").contents()
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == control])
    return tokenizer


def main(source: str, folder: str) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(reader)
    config = read_config(reader, tied="lm_head.weight" not in tensors)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    build_tokenizer(reader).save(str(out / "tokenizer.json"))
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    named = {k[:-3]: tokens[v] for k, v in ids.items()}
    documents = {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(reader.get_field("tokenizer.chat_template").contents())
    print(f"{out}: {len(tensors)} tensors from {Path(source).name}, sha256",
          hashlib.sha256(Path(source).read_bytes()).hexdigest())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2])
