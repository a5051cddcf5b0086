# SPDX-License-Identifier: Apache-2.0
"""checkpoint.py and container.py, GGUF: the same checkpoint as the folder's, and one line for everything that is broken."""
from __future__ import annotations

import random
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import error_of, folder, weights, write_gguf

from kestrel.checkpoint import Checkpoint
from kestrel.container import read_gguf_header
from kestrel.errors import KestrelError


@pytest.mark.parametrize("untied", [False, True])
def test_gguf_is_the_same_checkpoint_as_the_folder(tmp_path, untied):
    truth = weights(untied)
    g = Checkpoint.open(str(write_gguf(tmp_path / "m.gguf", truth)))
    f = Checkpoint.open(str(folder(tmp_path / "hf", truth, config={"tie_word_embeddings": not untied})))
    assert g.names() == f.names() and g.expected_shapes() == f.expected_shapes()
    for name in g.names():
        assert np.array_equal(g.tensor(name), truth[name]), name
    assert g.config.head_dim == 32 and g.config.tie_word_embeddings is not untied and g.config.eos_token_ids == (2,)
    assert g.chat_template is None and g.fingerprint != f.fingerprint  # permuted: other bytes


def test_gguf_rows_of_permuted_tensors(tmp_path):
    truth = weights()
    g = Checkpoint.open(str(write_gguf(tmp_path / "m.gguf", truth)))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        rows = truth[name].shape[0]
        for start, stop in [(0, 1), (0, rows), (5, 6), (15, 17), (16, 48), (31, 33), (33, 64), (rows - 1, rows)]:
            assert np.array_equal(g.rows(name, start, stop), truth[name][start:stop])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_types(tmp_path, kind):
    import gguf

    truth, q = weights(), gguf.GGMLQuantizationType[kind]
    g = Checkpoint.open(str(write_gguf(tmp_path / "m.gguf", truth, kind)))
    for name in g.names():
        a = truth[name]
        if a.ndim == 2:  # quantised row by row, so the permutation does not matter here
            a = gguf.quants.dequantize(gguf.quants.quantize(a, q), q)
        assert np.array_equal(g.tensor(name), a), name


def test_quantised_gguf_without_the_package(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "q.gguf", weights(), "Q8_0")
    plain = write_gguf(tmp_path / "f.gguf", weights())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'kestrel[gguf]'" in error_of(path)
    Checkpoint.open(str(plain)).tensor("model.norm.weight")  # plain floats take no package


def test_gguf_tensors_are_named(tmp_path):
    truth = weights()
    assert "blk.1.ffn_up.weight" in error_of(write_gguf(tmp_path / "a.gguf", truth, skip=["model.layers.1.mlp.up_proj.weight"]))
    assert "blk.0.attn_z.bias" in error_of(write_gguf(tmp_path / "b.gguf", {**truth, "blk.0.attn_z.bias": np.zeros(8, np.float32)}))
    factors = Checkpoint.open(str(write_gguf(tmp_path / "c.gguf", {**truth, "rope_freqs.weight": np.arange(1, 17, dtype=np.float32)})))
    assert factors.config.rope_scaling == {"rope_type": "factors", "factors": [float(i) for i in range(1, 17)]}
    for wrong in (np.ones(15, np.float32), np.zeros(16, np.float32), np.full(16, np.nan, np.float32), np.ones((16, 2), np.float32), np.ones(16, np.float16)):
        assert "rope" in error_of(write_gguf(tmp_path / "c.gguf", {**truth, "rope_freqs.weight": wrong}))
    assert "longrope" in error_of(write_gguf(tmp_path / "c.gguf", {**truth, "rope_factors_long.weight": np.ones(16, np.float32)}))
    wrong = {**truth, "model.norm.weight": np.ones(63, np.float32)}
    message = error_of(write_gguf(tmp_path / "d.gguf", wrong))
    assert "[64]" in message and "[63]" in message
    truth["model.layers.0.self_attn.q_proj.weight"][9, 9] = np.nan
    c = Checkpoint.open(str(write_gguf(tmp_path / "e.gguf", truth)))
    with pytest.raises(KestrelError, match=r"q_proj.weight: not a finite number at \[9, 9\]"):
        c.tensor("model.layers.0.self_attn.q_proj.weight")


def test_split_gguf_is_refused(tmp_path):
    assert "split" in error_of(write_gguf(tmp_path / "m-00001-of-00002.gguf", weights()))


def test_gguf_without_a_vocabulary_has_no_tokenizer(tmp_path):
    c = Checkpoint.open(str(write_gguf(tmp_path / "m.gguf", weights(), more={"tokenizer.chat_template": "{{ x }}"})))
    assert c.chat_template == "{{ x }}"
    with pytest.raises(KestrelError, match="tokenizer.ggml.model"):
        c.tokenizer_json


def _gguf_start(version=3, tensors=0, fields=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


@pytest.mark.parametrize("raw, words", [
    (b"GGUF", "truncated"), (_gguf_start(1), "version"), (b"GGUF\x00\x00\x00\x03" + bytes(16), "version"),
    (_gguf_start(tensors=1 << 60), "counts"), (_gguf_start(fields=1 << 63), "counts"),
    (_gguf_start(fields=1) + struct.pack("<Q", 1 << 62) + bytes(32), "truncated"),
    (_gguf_start(fields=1) + struct.pack("<Q", 1) + b"\xff" + bytes(32), "UTF-8"),
    (_gguf_start(fields=1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(32), "value type 99"),
    (_gguf_start(fields=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 50) + bytes(32), "counts"),
    (_gguf_start(fields=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + bytes(32), "arrays of value type 9"),
    (_gguf_start(fields=2) + struct.pack("<Q1sIB", 1, b"k", 7, 1) * 2 + bytes(32), "twice"),
    (_gguf_start(fields=1) + struct.pack("<Q17sII", 17, b"general.alignment", 4, 0) + bytes(32), "alignment"),
    (_gguf_start(tensors=1) + struct.pack("<Q1sI", 1, b"t", 9) + bytes(64), "axes"),
])
def test_broken_gguf_headers(tmp_path, raw, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    message = error_of(path)
    assert message.startswith(str(path)) and words in message


def test_gguf_truncated_anywhere_is_one_line(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", weights(), "Q8_0")
    whole = path.read_bytes()
    rng = random.Random(2)
    for size in [len(whole) - 1, *(rng.randrange(4, len(whole)) for _ in range(30)), *range(4, 400, 13)]:
        path.write_bytes(whole[:size])
        assert str(path) in error_of(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fuzzed_gguf_headers(data, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    seed = base / "seed.gguf"
    if not seed.exists():
        write_gguf(seed, weights())
    raw = bytearray(seed.read_bytes())
    _, tensors, _ = read_gguf_header(str(seed))
    end = min(begin for _, _, begin in tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, end - 1))] = data.draw(st.sampled_from([0, 1, 2, 9, 32, 127, 128, 255]))
    path = base / "fuzz.gguf"
    path.write_bytes(bytes(raw))
    try:
        c = Checkpoint.open(str(path))
        for name in c.names():
            c.tensor(name)
    except KestrelError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def test_real_gguf(real_gguf):
    """SmolLM2-135M-Instruct, Q4_1: the file as it is published."""
    c = Checkpoint.open(str(real_gguf))
    assert len(c.names()) == 272 and c.config.tie_word_embeddings and c.config.head_dim == 64
    assert c.fingerprint == "2931ee690bf204862b65a0262f2909147911b0972ffeb0f75f1118fb3f9bfc3e"
    assert c.chat_template.startswith("{% for message in messages %}")
    q = c.tensor("model.layers.29.self_attn.q_proj.weight")
    assert q.shape == (576, 576) and np.array_equal(c.rows("model.layers.29.self_attn.q_proj.weight", 70, 71), q[70:71])


@pytest.mark.native_only
def test_real_gemma_gguf_types(gemma_gguf):
    """Gemma 3 270M, Q4_K_M: one tensor of each type it holds, against the gguf package's own reader (its offsets, its dequantisation)."""
    import gguf

    c = Checkpoint.open(str(gemma_gguf))
    by_gguf = {t.gguf: name for name, t in c.config.tensors().items()}
    seen = {}
    for t in gguf.GGUFReader(str(gemma_gguf)).tensors:
        if seen.setdefault(t.tensor_type.name, t.name) == t.name:
            rows = min(len(t.data), 40)
            expected = gguf.quants.dequantize(t.data[:rows], t.tensor_type).reshape((rows,) + c.expected_shapes()[by_gguf[t.name]][1:])
            assert np.array_equal(c.rows(by_gguf[t.name], 0, rows), expected), t.name
    assert set(seen) == {"F32", "Q8_0", "Q5_0", "Q4_K", "Q6_K"}
