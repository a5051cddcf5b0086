# SPDX-License-Identifier: Apache-2.0
"""Each architecture against transformers' float32 results (tests/golden), against its own likely mistakes, and against itself.

Acceptance cases 11 (drafts past a window), 32 (rope scalings, either spelling), 33 (head_dim), 34 (biases, norms of heads, windows by layer).
"""
from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import toy
from reference.to_gguf import write_gguf

from kestrel import _native
from kestrel.checkpoint import Checkpoint
from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel

TOLERANCE = 1e-3  # test_golden.py says why


def golden(name):
    return np.load(toy.GOLDEN / name / "golden.npz")


def logits_of(model, ids, rows=None, chunk=200):
    """float32 [len(rows) or len(ids), vocab] of one sequence from position 0, and its cache."""
    kv, found, ids = model.new_kv(len(ids)), [], [int(i) for i in ids]
    for begin in range(0, len(ids), chunk):
        part = ids[begin:begin + chunk]
        model.forward(kv, part, wanted=len(part))
        found.append(model._logits[:len(part)].copy())
    logits = np.concatenate(found)
    return (logits if rows is None else logits[np.asarray(rows)]), kv.export()


@pytest.mark.parametrize("name", toy.OTHERS)
def test_matches_transformers(name):
    data = golden(name)
    model = ForwardModel(toy.packed(name, "f32"))
    assert np.abs(logits_of(model, data["ids"])[0] - data["logits"]).max() < TOLERANCE


@pytest.mark.native_only
@pytest.mark.parametrize("name", toy.OTHERS)
def test_matches_transformers_over_a_long_context(name):
    """Windows of 12 to 30 keys that by now have left every place of a span behind."""
    data = golden(name)
    assert data["long_rows"].max() >= 1100
    model = ForwardModel(toy.packed(name, "f32"))
    assert np.abs(logits_of(model, data["long_ids"], data["long_rows"])[0] - data["long_logits"]).max() < TOLERANCE


@pytest.mark.native_only
@pytest.mark.parametrize("name", toy.OTHERS)
def test_greedy_ids_match_transformers(name):
    data = golden(name)
    answer = Model.load(toy.packed(name, "f32")).generate([int(i) for i in data["ids"]], max_tokens=len(data["greedy_ids"]), ignore_end=True).run()
    assert answer.token_ids == data["greedy_ids"].tolist()


# --- mistakes: each must show by far more than the tolerance ---------------------------------------------------------

class Mistaken(PackedModel):
    """A packed model of which some vectors are absent or changed."""

    def __init__(self, path, absent=(), changed=None):
        super().__init__(path)
        self._absent, self._changed = absent, changed or {}

    def has(self, name):
        return super().has(name) and not name.endswith(tuple(self._absent))

    def vector(self, name):
        values = super().vector(name)
        for ending, change in self._changed.items():
            if name.endswith(ending):
                values = change(values).astype(np.float32)
        return values


CONFIG_MISTAKES = {
    "rope base x 1.5": lambda c: {"rope_theta": c.rope_theta * 1.5},
    "norm eps x 10": lambda c: {"rms_norm_eps": c.rms_norm_eps * 10},
    "window + 1": lambda c: {"sliding_window": c.sliding_window + 1},
    "window - 1": lambda c: {"sliding_window": c.sliding_window - 1},
    "no window": lambda c: {"layer_types": (), "sliding_window": None},
    "window in the wrong layers": lambda c: {"layer_types": c.layer_types[::-1]},
    "one rope base": lambda c: {"rope_local_base_freq": None},
    "local rope base x 1.5": lambda c: {"rope_local_base_freq": c.rope_local_base_freq * 1.5},
    "rope scaling ignored": lambda c: {"rope_scaling": None},
    "attention factor of 1": lambda c: {"rope_scaling": {**c.rope_scaling, "attention_factor": 1.0}},
    "query scale of head_dim": lambda c: {"query_pre_attn_scalar": None},
    "SiLU": lambda c: {"hidden_act": "silu"},
    "GELU": lambda c: {"hidden_act": "gelu_pytorch_tanh"},
}
VECTOR_MISTAKES = {
    "q/k/v biases missing": {"absent": ["qkv_bias"]},
    "o bias missing": {"absent": [".o_bias"]},
    "gate and up biases missing": {"absent": ["gate_up_bias"]},
    "down bias missing": {"absent": ["down_bias"]},
    "q and k biases swapped": {"changed": {"qkv_bias": lambda b: np.concatenate([b[16:32], b[:16], b[32:]])}},
    "q_norm omitted": {"absent": ["q_norm"]},
    "k_norm omitted": {"absent": ["k_norm"]},
    "q_norm's gain missing": {"changed": {"q_norm": np.ones_like}},
    "k_norm's gain missing": {"changed": {"k_norm": np.ones_like}},
    "norm after attention omitted": {"absent": ["attention_post_norm"]},
    "norm after the MLP omitted": {"absent": ["mlp_post_norm"]},
    "input norm's gain missing": {"changed": {"attention_norm": np.ones_like}},
    "gains as stored": {"changed": {"_norm": lambda g: g - 1}},
    "embedding not scaled": {"absent": ["embedding_scale"]},
}
QK, WINDOW = {"q_norm omitted", "k_norm omitted", "q_norm's gain missing", "k_norm's gain missing"}, {"window + 1", "window - 1", "no window"}
ALL = {"rope base x 1.5", "norm eps x 10", "input norm's gain missing"}
SHOWS = {
    "tiny-biased": ALL | {"q/k/v biases missing", "o bias missing", "gate and up biases missing", "down bias missing", "q and k biases swapped", "GELU"},
    "tiny-mistral": (ALL | WINDOW),
    "tiny-qwen2": ALL | {"q/k/v biases missing", "q and k biases swapped"},
    "tiny-qwen3": ALL | QK,
    "tiny-gemma3": ALL | QK | WINDOW | {"window in the wrong layers", "one rope base", "local rope base x 1.5", "query scale of head_dim", "SiLU",
                                        "norm after attention omitted", "norm after the MLP omitted", "gains as stored", "embedding not scaled"},
    "tiny-phi3": ALL | WINDOW,
    "tiny-yarn": ALL | {"rope scaling ignored", "attention factor of 1"},
}


@pytest.mark.native_only
@pytest.mark.parametrize("name, mistake", [(n, m) for n in toy.OTHERS for m in sorted(SHOWS[n])])
def test_a_mistake_shows(name, mistake):
    packed = Mistaken(toy.packed(name, "f32"), **VECTOR_MISTAKES.get(mistake, {}))
    if mistake in CONFIG_MISTAKES:
        packed.config = dataclasses.replace(packed.config, **CONFIG_MISTAKES[mistake](packed.config))
    data = golden(name)
    assert np.abs(logits_of(ForwardModel(packed), data["ids"])[0] - data["logits"]).max() > 100 * TOLERANCE


def test_no_mistake_is_left_untried():
    assert set().union(*SHOWS.values()) == set(CONFIG_MISTAKES) | set(VECTOR_MISTAKES)


# --- the same bits whatever the settings ---------------------------------------------------------------------------------

@pytest.mark.native_only
@pytest.mark.parametrize("name", toy.OTHERS)
def test_nothing_but_model_and_tokens_shows(name):
    """1,200 positions, windows left behind at every place of a span: one row a pass, odd chunks, threads, instruction sets; cache and logits."""
    ids = golden(name)["long_ids"]
    path = toy.packed(name, "int8")
    rows = [*range(0, 1200, 37), 1199]
    want, cache = logits_of(ForwardModel(path, isa="portable", threads=1), ids, rows)
    for isa in _native.isa_names():
        for threads, chunk in ((1, 256), (2, 33), (3, 7)):
            got, kv = logits_of(ForwardModel(path, isa=isa, threads=threads), ids, rows, chunk)
            assert got.tobytes() == want.tobytes() and kv == cache, (isa, threads, chunk)
    got, kv = logits_of(ForwardModel(path, threads=2), ids[:300], [r for r in rows if r < 300], 1)
    assert got.tobytes() == want[:len(got)].tobytes()


@pytest.mark.native_only
@pytest.mark.parametrize("name, changes", [("tiny-mistral", {"sliding_window": 150}), ("tiny-gemma3", {"sliding_window": 129}), ("tiny-qwen3", {})])
def test_rejected_drafts_leave_nothing_behind_past_the_window(name, changes):
    """Case 11: drafts of right and wrong tokens, rewound again and again, beyond a window that is longer than a span."""
    model = Model.load(toy.packed(name, "int8", max_position_embeddings=4096, eos_token_id=None, **changes), chunk=64)
    prompt = [int(i) for i in golden(name)["long_ids"][:1100]]

    def run(**settings):
        kv = model.new_kv(1300)
        rows = []
        answer = model.generate(prompt, max_tokens=60, ignore_end=True, kv=kv, observer=lambda p, t, logits: rows.append(logits.tobytes()), **settings).run()
        return answer.token_ids, rows, kv.export()

    plain = run(draft=0)
    for rights, wrongs in (([3, 0, 1, 2], 3), (5, 2), (0, 4)):
        assert run(draft=toy.Known(prompt, plain[0], rights, wrongs, 320)) == plain, (rights, wrongs)


# --- sources -------------------------------------------------------------------------------------------------------------

@pytest.mark.native_only
@pytest.mark.parametrize("name", [n for n in (*toy.TINY, *toy.OTHERS) if n != "tiny-mistral"])  # Mistral's GGUF says llama: no window
def test_gguf_gives_the_same_weights(name, tmp_path):
    """Names, row order and gains as llama.cpp's converter writes them; rope factors instead of llama3's rule."""
    write_gguf(toy.GOLDEN / name, tmp_path / "model.gguf")
    folder, gguf = Checkpoint.open(str(toy.GOLDEN / name)), Checkpoint.open(str(tmp_path / "model.gguf"))
    assert folder.names() == gguf.names()
    for tensor in folder.names():
        assert folder.tensor(tensor).tobytes() == gguf.tensor(tensor).tobytes(), tensor
    same = [f.name for f in dataclasses.fields(folder.config)
            if f.name not in ("rope_scaling", "eos_token_ids", "bos_token_id", "pad_token_id", "rms_norm_eps", "query_pre_attn_scalar")]
    assert [getattr(folder.config, f) for f in same] == [getattr(gguf.config, f) for f in same]
    from kestrel.model import rope_tables
    from kestrel.rope import attention_factor

    assert attention_factor(gguf.config.rope_scaling) == attention_factor(folder.config.rope_scaling)
    np.testing.assert_allclose(rope_tables(gguf.config), rope_tables(folder.config), rtol=1e-6)


def test_a_multimodal_gemma3_is_read_for_its_text(tmp_path):
    from safetensors.numpy import save_file

    folder = toy.checkpoint("tiny-gemma3")
    config = json.loads((folder / "config.json").read_text())
    c = Checkpoint.open(str(folder))
    tensors = {n: c.tensor(n) - (1 if c._tensors[n].spec.minus_one else 0) for n in c.names()}
    plain = tmp_path / "plain.kestrel"
    save_file(tensors, str(folder / "model.safetensors"))
    convert(str(folder), str(plain), "f32")
    for prefix in ("language_model.model.", "model.language_model."):
        wrapped = {prefix + k[len("model."):]: v for k, v in tensors.items()}
        wrapped["vision_tower.vision_model.post_layernorm.weight"] = np.ones(7, np.float32)
        save_file(wrapped, str(folder / "model.safetensors"))
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        text = {k: v for k, v in config.items() if k not in (*ids, "architectures")}
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}, **ids}))
        out = tmp_path / "wrapped.kestrel"
        convert(str(folder), str(out), "f32")
        a, b = PackedModel(str(plain)), PackedModel(str(out))
        assert a.config == b.config
        assert all((a.array(n) == b.array(n)).all() for n in a._entries)


def test_rope_of_each_kind_of_layer_in_either_spelling():
    from kestrel.config import ModelConfig

    old = json.loads((toy.GOLDEN / "tiny-gemma3" / "config.json").read_text())
    new = {k: v for k, v in old.items() if not k.startswith("rope_") and k != "sliding_window_pattern"}
    new["rope_parameters"] = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    new["layer_types"] = ["sliding_attention", "full_attention"]
    want = ModelConfig.from_hf({**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert ModelConfig.from_hf(new) == want == ModelConfig.from_json(want.to_json())
    assert want.layer_types == ("sliding_attention", "full_attention") and want.rope_local_base_freq == 1e4 and want.sliding_window == 12
    new["rope_parameters"]["sliding_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(KestrelError, match="sliding_attention"):
        ModelConfig.from_hf(new)


def test_windows_by_layer():
    from kestrel.config import ModelConfig

    qwen = json.loads((toy.GOLDEN / "tiny-qwen2" / "config.json").read_text())
    assert ModelConfig.from_hf(qwen).sliding_window is None and ModelConfig.from_hf(qwen).layer_types == ()
    used = ModelConfig.from_hf({**qwen, "use_sliding_window": True})
    assert (used.sliding_window, used.layer_types) == (16, ("full_attention", "sliding_attention"))
    assert ModelConfig.from_json(used.to_json()) == used
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 2}).sliding_window is None
    gemma = ModelConfig.from_hf({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                                 "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, "eos_token_id": [1, 106]})
    assert (gemma.num_attention_heads, gemma.head_dim, gemma.vocab_size, gemma.eos_token_ids) == (8, 256, 262208, (1, 106))
    assert gemma.layer_types[:6] == ("sliding_attention",) * 5 + ("full_attention",) and gemma.layer_types.count("full_attention") == 5


LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name, parameters, config", [  # config.json as published, what matters of it; parameters: from the model's card
    ("Llama-3.2-1B", 1_235_814_400, dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA_3, tie_word_embeddings=True, attention_bias=False, mlp_bias=False)),
    ("TinyLlama-1.1B", 1_100_048_384, dict(
        model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False)),
    ("Mistral-7B-v0.1", 7_241_732_096, dict(
        model_type="mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False)),
    ("Qwen2.5-0.5B", 494_032_768, dict(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, max_window_layers=24, use_sliding_window=False,
        use_mrope=False, tie_word_embeddings=True)),
    ("Qwen3-0.6B", 596_049_920, dict(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, head_dim=128,
        num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1000000, rope_scaling=None, sliding_window=None, max_window_layers=28,
        use_sliding_window=False, attention_bias=False, tie_word_embeddings=True)),
    ("gemma-3-1b", 999_885_952, dict(
        model_type="gemma3_text", vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, head_dim=256,
        num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None, sliding_window=512,
        sliding_window_pattern=6, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None,
        final_logit_softcapping=None, attention_bias=False)),
    ("Phi-3-mini-4k", 3_821_079_552, dict(
        model_type="phi3", vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, sliding_window=2047, attention_bias=False,
        original_max_position_embeddings=4096, tie_word_embeddings=False)),
])
def test_published_models_have_their_number_of_parameters(name, parameters, config):
    from kestrel.config import ModelConfig
    from kestrel.pack import matrices, vectors

    c = ModelConfig.from_hf(config)
    assert sum(int(np.prod(t.shape)) for t in c.tensors().values()) == parameters
    assert ModelConfig.from_json(c.to_json()) == c
    packed = sum(m.n * m.k for m in matrices(c)) + sum(v.size for v in vectors(c, False) if v.sources)
    assert packed == parameters
