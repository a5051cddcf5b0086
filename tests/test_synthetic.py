# SPDX-License-Identifier: Apache-2.0
"""Synthetic models: the same file every time, weights that are what they say, numbers that stay finite through all layers."""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kestrel import _native, synthetic
from kestrel._native import ffi
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel, matrices, vectors
from kestrel.synthetic import cached_synthetic, shape_config, write_synthetic

SMALL = "2x72x200x3x1x24x300"  # hangs over a panel (vocabulary), over a group (hidden, mlp)


def rows_of(packed, matrix):
    """float32 [n, k]: what the kernels compute with."""
    weight = ffi.new("kestrel_weight *")
    raw = packed.array(matrix.name)
    weight.type, weight.n, weight.k, weight.data = _native.TYPES[packed.weight_type], matrix.n, matrix.k, ffi.from_buffer(raw)
    return np.array([_native.unpack_row(weight[0], r) for r in range(matrix.n)])


def written(folder, name, *args):
    path = folder / name
    write_synthetic(str(path), *args)
    return path


def test_the_file_depends_on_its_arguments_alone(tmp_path):
    first = written(tmp_path, "a", SMALL, "int8", 1).read_bytes()
    assert written(tmp_path, "b", SMALL, "int8", 1).read_bytes() == first
    code = f"from kestrel.synthetic import write_synthetic; write_synthetic({str(tmp_path / 'c')!r}, {SMALL!r}, 'int8', 1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "c").read_bytes() == first
    assert written(tmp_path, "d", SMALL, "int8", 2).read_bytes() != first


def test_weights_are_the_same_on_every_machine(tmp_path):
    """Digest over all float32 weights; made by this test on x86-64 with numpy 2.4.6, seed 1. Also run as emulated aarch64."""
    packed = PackedModel(str(written(tmp_path, "f32", SMALL, "f32", 1)))
    digest = hashlib.sha256()
    for m in matrices(packed.config):
        digest.update(rows_of(packed, m).tobytes())
    for v in vectors(packed.config, False):
        digest.update(packed.vector(v.name).tobytes())
    assert digest.hexdigest() == "e2ea77ffe925feb9c5b07aa67378123112243d34acf8fb73d0b00541f699d597"


def test_int8_is_the_f32_file_quantised(tmp_path):
    exact = PackedModel(str(written(tmp_path, "f32", SMALL, "f32", 1)))
    packed = PackedModel(str(written(tmp_path, "int8", SMALL, "int8", 1)))
    assert (packed.weight_type, exact.weight_type) == ("int8", "f32")
    for m in matrices(packed.config):
        a, b = rows_of(exact, m), rows_of(packed, m)
        for begin in range(0, m.k, _native.GROUP):
            x, y = a[:, begin:begin + _native.GROUP], b[:, begin:begin + _native.GROUP]
            step = np.abs(x).max(axis=1, keepdims=True) / 127
            assert (np.abs(x - y) <= 0.6 * step).all() and step.min() > 0, m.name  # half a step, and the scale's rounding to f16


def test_matrices_differ_and_their_rows_repeat_late(tmp_path):
    packed = PackedModel(str(written(tmp_path, "f32", SMALL, "f32", 1)))
    a, b = (rows_of(packed, m) for m in matrices(packed.config) if m.name.endswith("qkv"))
    assert not np.array_equal(a, b)
    assert len(np.unique(a, axis=0)) == len(a)


def test_a_matrix_longer_than_what_is_hashed_repeats_it(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_BLOCK", 5 * 8 * 72)
    packed = PackedModel(str(written(tmp_path, "int8", SMALL, "int8", 1)))
    embedding = rows_of(packed, matrices(packed.config)[0])
    assert len(embedding) == 300
    assert np.array_equal(embedding[40:], embedding[:-40])
    assert len(np.unique(embedding, axis=0)) == 40


def assert_finite_and_alive(path, positions):
    """Every position's logits and cache lie in a plain range: f16 ends at 65504."""
    model = ForwardModel(str(path), threads=2)
    c = model.config
    kv = model.new_kv(positions)
    ids = [(i * 7919 + 13) % c.vocab_size for i in range(positions)]
    for at in range(0, positions, 16):
        model.forward(kv, ids[at:at + 16], wanted=len(ids[at:at + 16]))
        for i in range(len(ids[at:at + 16])):
            assert 1 < model.logits(i).std() < 30
    cache = np.frombuffer(kv.export(), np.float16).astype(np.float32).reshape(c.num_hidden_layers, -1)
    largest = np.abs(cache).max(axis=1)
    assert largest.min() > 1 and largest.max() < 100


def test_numbers_stay_in_range_through_many_layers(tmp_path):
    assert_finite_and_alive(written(tmp_path, "deep", "40x128x320x4x2x32x700", "int8", 1), 40)


@pytest.mark.native_only  # 140 MB and 30 layers: nothing that emulation would show differently
def test_numbers_stay_in_range_at_a_real_shape(tmp_path):
    assert_finite_and_alive(written(tmp_path, "135m", "135m", "int8", 1), 40)


def test_it_answers(tmp_path):
    model = Model.load(str(written(tmp_path, "small", SMALL, "int8", 3)), threads=1)
    plain = model.generate("hello", max_tokens=12, draft="off").run()
    assert len(plain.token_ids) == 12 and max(plain.token_ids) < 257
    assert model.generate("hello", max_tokens=12, draft=4).run().token_ids == plain.token_ids


@pytest.mark.parametrize("shape, parameters", [("135m", 134515008), ("0.5b", 494032768 - 24 * (896 + 2 * 128)), ("1.5b", 1543714304 - 28 * (1536 + 2 * 256))])
def test_named_shapes_have_the_published_number_of_parameters(shape, parameters):
    """As the model cards' safetensors metadata count them, Qwen2.5's biases of q, k and v taken off."""
    config = shape_config(shape)
    assert sum(m.n * m.k for m in matrices(config)) + sum(v.size for v in vectors(config, False)) == parameters


@pytest.mark.parametrize("shape, word", [
    ("7b", "expected 135m"), ("", "expected 135m"), ("1x2x3", "expected 135m"), ("1x64x64x2x1x32x-300", "expected 135m"), ("0x64x64x2x1x32x300", "num_hidden_layers"),
    ("1x64x64x2x1x32x256", "vocabulary"), ("1x64x64x3x2x32x300", "num_key_value_heads"), ("1x64x64x2x1x30x300", "head_dim"),
    ("1x64x64x2x1x1024x300", "head_dim"), ("1x64x64x2x1x32x99999999", "vocab_size")])
def test_impossible_shapes_are_refused_before_anything_is_written(tmp_path, shape, word):
    with pytest.raises(KestrelError, match=word) as caught:
        write_synthetic(str(tmp_path / "x"), shape)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", (-1, 1 << 32))
def test_impossible_seeds_are_refused(tmp_path, seed):
    with pytest.raises(KestrelError, match="seed"):
        write_synthetic(str(tmp_path / "x"), SMALL, "int8", seed)


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(KestrelError, match="does not exist"):
        write_synthetic(str(tmp_path / "missing" / "x"), SMALL)


def test_the_cache_is_made_once_and_again_when_it_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("KESTREL_CACHE", str(tmp_path / "cache"))
    path = cached_synthetic(SMALL)
    assert Path(path).parent == tmp_path / "cache"
    whole, made = Path(path).read_bytes(), os.stat(path).st_mtime_ns
    assert cached_synthetic(SMALL) == path
    assert os.stat(path).st_mtime_ns == made
    assert cached_synthetic(SMALL, seed=2) != path
    Path(path).write_bytes(whole[:1000])
    assert cached_synthetic(SMALL) == path
    assert Path(path).read_bytes() == whole
    write_synthetic(path, "1x64x64x2x1x32x300")  # a whole file, of another shape
    cached_synthetic(SMALL)
    assert Path(path).read_bytes() == whole
