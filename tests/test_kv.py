# SPDX-License-Identifier: Apache-2.0
"""The cache's types, int8 above all: what a position holds depends on itself alone, and a pass's bits on nothing but the tokens."""
from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
from truth import EVERY_MODEL, Paths, Truths, assert_same, cut

from kestrel import _native
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import KV_TYPES, ForwardModel, kv_position_bytes
from kestrel.pack import PackedModel
from kestrel.quality import default_text, quality

LENGTH = 420  # three spans and a bit


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return Paths(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def truths(paths):
    return Truths(paths, LENGTH, "int8")


@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("threads", [1, *(pytest.param(n, marks=pytest.mark.native_only) for n in (2, 3)), 4])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_int8_rows_are_the_same_for_every_width_thread_and_instruction_set(truths, name, threads, isa):
    truth = truths[name]
    model = ForwardModel(truth.path, threads=threads, isa=isa, max_rows=512, kv_type="int8")
    assert model.isa == isa and model.threads == threads
    for width in (1, 2, 3, 5, 8, 16, 33):
        assert_same(model, truth, 240, cut(40, width))
    assert_same(model, truth, 120, cut(16, 4))
    assert_same(model, truth, 0, cut(LENGTH, 150))


def test_int8_caches_together_rewound_and_with_dead_rows(truths):
    """Rows past the length hold other tokens, then integers of -128 with scales of NaN: no trace."""
    truth = truths["toy-int8"]
    model = ForwardModel(truth.path, threads=2, max_rows=64, kv_type="int8")
    for base in (0, 100, 250):
        kv = model.new_kv(LENGTH)
        kv.append(truth.raw(0, base), base)
        model.forward(kv, [(t + 7) % truth.vocab_size for t in truth.ids[base:base + 50]])
        kv.rewind(base)
        assert_same(model, truth, base, [5, 1], kv)
        kv.rewind(base)
        head = b"\x80" * model.config.head_dim + np.float32("nan").tobytes()
        kv.append(head * (60 * kv.position_bytes // len(head)), 60)
        kv.rewind(base)
        assert_same(model, truth, base, [1, 33], kv)


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_int8_positions_are_the_rounded_ones_of_a_float_cache(truths, name):
    """Layer 0's K and V depend on no attention: absmax / 127 of one position of one head, half to even, in numpy's float32."""
    truth = truths[name]
    model = ForwardModel(truth.path, threads=1, kv_type="f32", max_rows=LENGTH)
    c = model.config
    kv = model.new_kv(LENGTH)
    model.forward(kv, truth.ids)
    exact = np.frombuffer(kv.export(), np.float32).reshape(c.num_hidden_layers, LENGTH, 2, c.num_key_value_heads, c.head_dim)[0]
    most = np.abs(exact).max(axis=-1)
    assert (most > 1e-30).all()
    found = truth.kv[0].reshape(LENGTH, 2, c.num_key_value_heads, c.head_dim + 4)
    assert np.array_equal(np.ascontiguousarray(found[..., c.head_dim:]).view(np.float32)[..., 0], most / np.float32(127))
    rounded = np.rint(exact * (np.float32(127) / most)[..., None])
    assert np.array_equal(found[..., :c.head_dim].view(np.int8), rounded)
    assert np.abs(rounded).max() == 127


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_memory_is_what_the_type_says(paths, kv_type):
    model = ForwardModel(paths["toy-int8"], threads=1, kv_type=kv_type)
    c = model.config
    element, scale = {"f16": (2, 0), "f32": (4, 0), "int8": (1, 4)}[kv_type]
    row = c.head_dim * element + scale
    assert kv_position_bytes(c, kv_type) == 2 * c.num_hidden_layers * c.num_key_value_heads * row
    for capacity, slots in ((1, 128), (128, 128), (129, 256), (LENGTH, 512)):
        assert model.kv_bytes(capacity) == 2 * c.num_hidden_layers * c.num_key_value_heads * slots * row
    kv = model.new_kv(LENGTH)
    model.forward(kv, [1, 2, 3])
    assert kv.position_bytes == kv_position_bytes(c, kv_type) and len(kv.export()) == 3 * kv.position_bytes


def test_unknown_type_is_one_line(paths):
    with pytest.raises(KestrelError, match="^kv type: expected f16, f32, int8, found 'int3'$"):
        ForwardModel(paths["toy-int8"], kv_type="int3")


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_speculation_and_chunks_do_not_show(paths, kv_type):
    model = Model.load(paths["toy-int8"], threads=2, kv_type=kv_type)
    prompt = "one two three one two three one two "
    answers = set()
    for chunk in (1, 7, 64):
        for draft in ("off", 1, 4, 16):
            answers.add(tuple(model.generate(prompt, max_tokens=48, draft=draft, chunk=chunk, ignore_end=True).run().token_ids))
    assert len(answers) == 1


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_key_that_is_not_finite_is_reported(paths, tmp_path, kv_type):
    """One K element of layer 0 is 3e38 times a normed input: it overflows for some tokens. No query looks at that element, V stays finite and
    the other keys give finite scores: the scores of NaN alone would be passed over.
    """
    path = str(tmp_path / "poisoned")
    shutil.copyfile(paths["toy-f32"], path)
    packed = PackedModel(path)
    c = packed.config
    half, group = c.head_dim // 2, c.num_attention_heads // c.num_key_value_heads
    seen_by = [head * c.head_dim + element for head in range(group) for element in (4, 4 + half)]  # rope mixes the two halves
    with open(path, "r+b") as file:
        for row in seen_by + [c.q_size + 4]:
            panel = packed._entries["layers.0.qkv"].begin + row // 8 * _native.packed_bytes("f32", 8, c.hidden_size)
            for column in range(c.hidden_size):
                file.seek(panel + column * 32 + row % 8 * 4)
                file.write(np.float32(3e38 if row >= c.q_size and column == 0 else 0).tobytes())
    model = ForwardModel(path, threads=1, kv_type=kv_type)
    gain = np.array(packed.vector("layers.0.attention_norm"))
    size = []
    for token in range(250):
        x = _native.unpack_row(model._native_config.embedding, token).astype(np.float64)
        size.append(abs(x[0] / np.sqrt((x ** 2).mean() + c.rms_norm_eps) * gain[0]) * 3e38 / np.finfo(np.float32).max)
    finite, infinite = [t for t in range(64) if size[t] < 0.9], [t for t in range(250) if size[t] > 1.01]
    assert len(finite) >= 10 and len(infinite) >= 10
    model.forward(model.new_kv(64), finite)
    for token in infinite:
        kv = model.new_kv(8)
        with pytest.raises(KestrelError, match="NaN or Inf at layer 0, row 2 of the pass"):
            model.forward(kv, [finite[0], finite[1], token])
        assert kv.length == 0


@pytest.mark.native_only
def test_command_line_takes_the_type(paths, root):
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "kestrel", "generate", paths["toy-int8"], "--prompt", "abc", "--max-tokens", "8", *arguments],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, cwd=str(root))

    for kv_type in KV_TYPES:
        done = run("--kv", kv_type)
        model = Model.load(paths["toy-int8"], kv_type=kv_type)
        assert (done.returncode, done.stdout) == (0, model.generate("abc", max_tokens=8).run().text + "\n"), done.stderr
    refused = run("--kv", "int3")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "int3" in refused.stderr


@pytest.mark.native_only
def test_quality_measures_the_type(paths):
    """Against itself in f32 the same weights differ by the cache's rounding alone: int8 more than f16, neither much."""
    text = "A short text, to be read by the byte. " * 5
    kl = {t: quality(paths["toy-f32"], paths["toy-f32"], text, kv_type=t)["mean_kl"] for t in KV_TYPES}
    assert kl["f32"] == 0
    assert 0 < kl["f16"] < kl["int8"] < 0.05


@pytest.mark.native_only
def test_quality_of_the_real_model_with_int8_keys_and_values(real_model):
    """The whole built-in text gives 0.0056 with int8 and 0.0044 with f16; a quarter of it is enough for a bound."""
    text = default_text()[:1500]
    result = quality(str(real_model.int8), str(real_model.f32), text, kv_type="int8")
    assert result["positions"] > 250
    assert result["mean_kl"] < 0.012 and result["argmax_agreement"] > 0.9
