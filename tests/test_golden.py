# SPDX-License-Identifier: Apache-2.0
"""kestrel against results that are not its own: transformers in float32 (tests/golden), a float64 statement (tests/reference)."""
from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import toy
from reference import hf_from_gguf, llama

from kestrel.checkpoint import _GGUFFile
from kestrel.convert import convert
from kestrel.generate import Model
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel

# tests/golden/README.md: the golden values themselves lie up to 1.4e-4 from float64; the least mistake moves logits by 0.43.
TOLERANCE = 1e-3
INT8_MEAN_KL = 0.006


def logits_of(model, ids, rows=None):
    """float32 [len(rows) or len(ids), vocab]: logits of one sequence from position 0, in passes of at most model.max_rows."""
    kv, found, ids = model.new_kv(len(ids)), [], [int(i) for i in ids]
    for begin in range(0, len(ids), 200):
        part = ids[begin:begin + 200]
        model.forward(kv, part, wanted=len(part))
        found.append(model._logits[:len(part)].copy())
    logits = np.concatenate(found)
    return logits if rows is None else logits[np.asarray(rows)]


def golden(name):
    return np.load(toy.GOLDEN / name / "golden.npz")


@pytest.mark.parametrize("name", toy.TINY)
def test_tiny_models_match_transformers(name, emulated):
    data = golden(name)
    model = ForwardModel(toy.packed(name, "f32"))
    logits = logits_of(model, data["ids"])
    assert np.abs(logits - data["logits"]).max() < TOLERANCE
    if "long_ids" in data and not emulated:     # float32 of a long context takes a minute there; test_model.py goes as far with int8
        assert data["long_rows"].max() >= 1100
        assert np.abs(logits_of(model, data["long_ids"], data["long_rows"]) - data["long_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", toy.TINY)
def test_greedy_ids_match_transformers(name):
    data = golden(name)
    model = Model.load(toy.packed(name, "f32"))
    model.sampled_vocab = model.config.vocab_size  # transformers chooses from the padding of the vocabulary too
    answer = model.generate([int(i) for i in data["ids"]], max_tokens=len(data["greedy_ids"]), ignore_end=True).run()
    assert answer.token_ids == data["greedy_ids"].tolist()


@pytest.mark.parametrize("name", toy.TINY)
def test_cached_keys_and_values(name):
    """Each layer's K and V rows, in export's order, from transformers' hidden states and the float64 statement."""
    data = golden(name)
    model = ForwardModel(toy.packed(name, "f32"))
    c, m = model.config, len(data["ids"])
    kv = model.new_kv(m)
    model.forward(kv, [int(i) for i in data["ids"]])
    rows = np.frombuffer(kv.export(), np.float32).reshape(c.num_hidden_layers, m, 2, c.num_key_value_heads, c.head_dim)
    config, weights = llama.load(toy.GOLDEN / name)
    angle = np.arange(m)[:, None, None] * llama.inverse_frequencies(config, c.head_dim)
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."
        h = llama.rms_norm(data["hidden_states"][layer].astype(np.float64), weights[at + "input_layernorm.weight"], config["rms_norm_eps"])
        k = (h @ weights[at + "self_attn.k_proj.weight"].T).reshape(m, c.num_key_value_heads, c.head_dim)
        v = (h @ weights[at + "self_attn.v_proj.weight"].T).reshape(m, c.num_key_value_heads, c.head_dim)
        assert np.abs(rows[layer, :, 0] - llama.rotate(k, np.cos(angle), np.sin(angle))).max() < TOLERANCE
        assert np.abs(rows[layer, :, 1] - v).max() < TOLERANCE


# --- mistakes: each must show by far more than the tolerance ---------------------------------------------------------

def distance(model, name):
    data = golden(name)
    return np.abs(logits_of(model, data["ids"]) - data["logits"]).max()


CONFIG_MISTAKES = {
    "rope base x 1.5": lambda c: {"rope_theta": c.rope_theta * 1.5},
    "norm eps x 10": lambda c: {"rms_norm_eps": c.rms_norm_eps * 10},
    "rope scaling ignored": lambda c: {"rope_scaling": None},
    "rope scaling factor x 2": lambda c: {"rope_scaling": {**c.rope_scaling, "factor": c.rope_scaling["factor"] * 2}},
}


@pytest.mark.parametrize("name, mistake", [(n, m) for n in toy.TINY for m in CONFIG_MISTAKES if n != "tiny-tied" or "scaling" not in m])
def test_a_wrong_setting_shows(name, mistake):
    packed = PackedModel(toy.packed(name, "f32"))
    packed.config = dataclasses.replace(packed.config, **CONFIG_MISTAKES[mistake](packed.config))
    assert distance(ForwardModel(packed), name) > 100 * TOLERANCE


def interleaved(w, c):  # the order of rows in a GGUF file
    return w.reshape(-1, 2, c.head_dim // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


# "by remainder" is no mistake for tiny-llama3, which has as many kv heads as heads
WEIGHT_MISTAKES = {
    "q rows interleaved": {"q_proj": interleaved},
    "k rows interleaved": {"k_proj": interleaved},
    "q and k rows interleaved": {"q_proj": interleaved, "k_proj": interleaved},
    "q heads reversed": {"q_proj": lambda w, c: w.reshape(c.num_attention_heads, c.head_dim, -1)[::-1].reshape(w.shape)},
    "heads to groups by remainder": {"q_proj": lambda w, c: w.reshape(
        c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, c.head_dim, -1).swapaxes(0, 1).reshape(w.shape)},
    "norm gain missing": {"input_layernorm": lambda w, c: np.ones_like(w)},
    "gate and up swapped": {"gate_proj": "up_proj", "up_proj": "gate_proj"},
    "k and v swapped": {"k_proj": "v_proj", "v_proj": "k_proj"},
}


@pytest.mark.parametrize("name, mistake", [(n, m) for n in toy.TINY for m in WEIGHT_MISTAKES if n != "tiny-llama3" or "remainder" not in m])
def test_wrong_weights_show(name, mistake, tmp_path, monkeypatch):
    """The mistake is made between the checkpoint and the packed file, so that what is compared is kestrel's own forward pass."""
    changes, seen = WEIGHT_MISTAKES[mistake], []
    from kestrel.checkpoint import Checkpoint

    real = Checkpoint.rows

    def rows(self, tensor, start, stop):
        if tensor.startswith("model.layers."):
            part = tensor.rsplit(".", 2)[1]
            if part in changes:
                seen.append(tensor)
                if isinstance(changes[part], str):
                    return real(self, tensor.replace(part, changes[part]), start, stop)
                return np.ascontiguousarray(changes[part](real(self, tensor, 0, self.expected_shapes()[tensor][0]), self.config)[start:stop])
        return real(self, tensor, start, stop)

    def tensor(self, name):
        change = changes.get(name.rsplit(".", 2)[1])
        if change is not None and len(self.expected_shapes()[name]) == 1:
            seen.append(name)
            return change(real_tensor(self, name), self.config)
        return real_tensor(self, name)

    real_tensor = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "rows", rows)
    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    path = str(tmp_path / "wrong.kestrel")
    convert(str(toy.GOLDEN / name), path, "f32")
    assert seen
    assert distance(ForwardModel(path), name) > 100 * TOLERANCE


# --- the real model ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    return np.load(toy.GOLDEN / "smollm2.npz")


def top_distance(logits, ids, values):
    return np.abs(np.take_along_axis(logits, ids.astype(np.int64), -1) - values).max()


def log_sum_exp(logits):
    wide = logits.astype(np.float64)
    peak = wide.max(-1)
    return peak + np.log(np.exp(wide - peak[:, None]).sum(-1))


@pytest.mark.native_only
def test_smollm2_matches_transformers(real_model_f32, smollm2):
    """336 positions of three texts, each with its 256 best logits and its logsumexp; argmax everywhere the same."""
    model = ForwardModel(str(real_model_f32))
    for window, (begin, end) in enumerate(smollm2["windows"]):
        logits = logits_of(model, smollm2["text_ids"][begin:end])
        assert top_distance(logits, smollm2["window_top_ids"][window], smollm2["window_top_logits"][window]) < TOLERANCE
        assert np.abs(log_sum_exp(logits) - smollm2["window_logsumexp"][window]).max() < TOLERANCE
        best = smollm2["window_top_logits"][window]
        clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE  # nearer than that, float32 alone may turn two ids round
        assert clear.mean() > 0.98
        np.testing.assert_array_equal(logits.argmax(-1)[clear], smollm2["window_top_ids"][window][clear, 0])
        for row, full in zip(smollm2["full_rows"], smollm2["full_logits"]):
            if row[0] == window:
                assert np.abs(logits[row[1]] - full).max() < TOLERANCE


@pytest.mark.native_only
def test_smollm2_matches_transformers_over_a_long_context(real_model_f32, smollm2):
    """Positions 256 to 1,581 of one sequence: every key block, span and merge of the attention."""
    logits = logits_of(ForwardModel(str(real_model_f32)), smollm2["text_ids"], smollm2["long_positions"])
    assert smollm2["long_positions"].max() > 1500
    assert top_distance(logits, smollm2["long_top_ids"], smollm2["long_top_logits"]) < TOLERANCE
    assert np.abs(log_sum_exp(logits) - smollm2["long_logsumexp"]).max() < TOLERANCE
    assert np.abs(logits[-1] - smollm2["full_logits"][-1]).max() < TOLERANCE


@pytest.mark.native_only
@pytest.mark.parametrize("number", range(3))
def test_smollm2_chats_match_transformers(real_model_f32, number):
    chat = json.loads((toy.GOLDEN / "smollm2_chat.json").read_text())[number]
    assert min(chat["greedy_margins"]) > TOLERANCE
    model = Model.load(str(real_model_f32))
    answer = model.generate(chat["messages"], max_tokens=len(chat["greedy_ids"])).run()
    assert answer.prompt_ids == chat["prompt_ids"]
    assert answer.token_ids == chat["greedy_ids"]
    assert answer.text == chat["greedy_text"].replace("<|im_end|>", "")


@pytest.mark.native_only
def test_int8_is_near_f32(real_model):
    from kestrel.quality import quality

    result = quality(str(real_model.int8), str(real_model.f32), (toy.GOLDEN / "text.txt").read_text())
    assert result["positions"] >= 1000
    assert 0 < result["mean_kl"] <= INT8_MEAN_KL
    assert result["mean_kl"] < result["p99_kl"] < 0.2
    assert result["argmax_agreement"] > 0.95
    assert result["perplexity_reference"] == pytest.approx(15.0335, rel=0.01)  # provenance.json, one sequence; windows may differ
    assert result["perplexity"] == pytest.approx(result["perplexity_reference"], rel=0.02)


@pytest.mark.native_only
def test_folder_and_gguf_give_the_same_file(real_gguf, real_model_f32, tmp_path):
    """The folder is written by an independent reader of GGUF (tests/reference): same weights, bit for bit, in the packed file."""
    hf_from_gguf.main(str(real_gguf), str(tmp_path / "folder"))
    convert(str(tmp_path / "folder"), str(tmp_path / "from_folder.kestrel"), "f32")
    a, b = PackedModel(str(tmp_path / "from_folder.kestrel")), PackedModel(str(real_model_f32))
    names = set(b._entries) - set(b._text)
    assert names == set(a._entries) - set(a._text) and len(names) > 180
    for name in names:
        assert (a.array(name) == b.array(name)).all(), name
    for field in ("rope_theta", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(a.config, field) == getattr(b.config, field), field


@pytest.mark.native_only
def test_gguf_rows_left_permuted_show(real_gguf, smollm2, tmp_path, monkeypatch):
    """llama.cpp's row order of q and k taken as it is: the logits of the real model must be far off."""
    monkeypatch.setattr(_GGUFFile, "_read_block", _GGUFFile.__mro__[1]._read_block)
    path = str(tmp_path / "permuted.kestrel")
    convert(str(real_gguf), path, "int8", calibrate="")
    begin, end = smollm2["windows"][0]
    logits = logits_of(ForwardModel(path), smollm2["text_ids"][begin:end])
    assert top_distance(logits, smollm2["window_top_ids"][0], smollm2["window_top_logits"][0]) > 5
