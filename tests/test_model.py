# SPDX-License-Identifier: Apache-2.0
"""The pass: the bits of a row depend on its own tokens and weights, never on the pass it came in. Everything here is equality."""
from __future__ import annotations

import shutil

import numpy as np
import pytest
from truth import EVERY_MODEL, MODELS, Paths, Truths, assert_same, cut, started
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel import _native
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import ForwardModel, Row
from kestrel.pack import PackedModel

# 9 spans of 128 keys and a bit: every width straddles blocks, spans, and the waves in which few tiles share out spans
LENGTH = 1170
WIDTHS = [*range(1, 34), 64, 512]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return Paths(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def truths(paths):
    return Truths(paths, LENGTH)


@pytest.fixture(scope="module")
def models(paths):
    class Models(dict):
        def __missing__(self, name):
            return self.setdefault(name, ForwardModel(paths[name], threads=2, max_rows=512))

    return Models()


@pytest.mark.parametrize("name, width", [
    pytest.param(name, width, marks=[] if name == "toy-int8" and width in (2, 4, 5, 17, 33) else pytest.mark.native_only)
    for name in MODELS for width in WIDTHS])
def test_a_row_is_the_same_in_a_pass_of_any_width(models, truths, name, width):
    """Case 2."""
    model, truth = models[name], truths[name]
    if width > 33:
        assert_same(model, truth, 0, cut(LENGTH, width))
    else:  # both ends: the first span's edge, and from 1000 on two more, beyond the first wave of spans
        assert_same(model, truth, 0, cut(140, width))
        assert_same(model, truth, 1000, cut(LENGTH - 1000, width))


@pytest.mark.native_only
def test_every_split_in_two_or_three(models, truths):
    model, truth = models["toy-int8"], truths["toy-int8"]
    for begin, length in ((0, 40), (1010, 24)):
        for first in range(1, length):
            assert_same(model, truth, begin, [first, length - first])
    for first in range(1, 11):
        for second in range(1, 12 - first):
            assert_same(model, truth, 124, [first, second, 12 - first - second] if first + second < 12 else [first, second])


@pytest.mark.native_only
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_splits(models, truths, data):
    name = data.draw(st.sampled_from(MODELS))
    begin = data.draw(st.sampled_from([0, 96, 127, 1000, 1023]))
    sizes, left = [], min(LENGTH - begin, 150)
    while left:
        sizes.append(min(left, data.draw(st.integers(1, 80))))
        left -= sizes[-1]
    assert_same(models[name], truths[name], begin, sizes)


@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("name, threads", [pytest.param(n, t, marks=[] if (n, t) == ("toy-int8", 4) else pytest.mark.native_only)
                                           for n in MODELS for t in (1, 2, 3, 4)])
def test_threads_and_instruction_sets(truths, name, threads, isa):
    truth = truths[name]
    model = ForwardModel(truth.path, threads=threads, isa=isa, max_rows=512)
    assert model.isa == isa and model.threads == threads
    for width in (1, 2, 5, 16, 33):
        assert_same(model, truth, 1010, cut(33, width))
    assert_same(model, truth, 90, cut(46, 4))
    assert_same(model, truth, 896, cut(LENGTH - 896, 512))


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_several_caches_in_one_pass(models, truths, name):
    """Rows of four caches at four positions together: each as if alone."""
    model, truth = models[name], truths[name]
    begins, counts = (0, 126, 1023, 640), (3, 5, 1, 4)
    caches = [started(model, truth, begin) for begin in begins]
    rows = [Row(kv, begin + i, truth.ids[begin + i], _native.WANT_LOGITS) for kv, begin, count in zip(caches, begins, counts) for i in range(count)]
    logits = model.step(rows)["logits"]
    expected = np.concatenate([truth.logits[begin:begin + count] for begin, count in zip(begins, counts)])
    assert logits.tobytes() == expected.tobytes()
    for kv, begin, count in zip(caches, begins, counts):
        assert kv.length == begin + count
        assert kv.export() == truth.raw(0, begin + count)


def test_wants_of_each_row(models, truths):
    """Logits and candidates of just the rows that ask, in row order; candidates: logit descending, id ascending."""
    model, truth = models["toy-int8"], truths["toy-int8"]
    wants = [0, 1, 2, 3, 0, 2, 1, 3, 2]
    kv = started(model, truth, 30)
    result = model.step([Row(kv, 30 + i, truth.ids[30 + i], want) for i, want in enumerate(wants)], candidates=7)
    logits = [30 + i for i, w in enumerate(wants) if w & 1]
    assert result["logits"].tobytes() == truth.logits[logits].tobytes()
    for row, at in enumerate(30 + i for i, w in enumerate(wants) if w & 2):
        order = np.argsort(-truth.logits[at], kind="stable")[:7]
        np.testing.assert_array_equal(result["candidate_ids"][row], order)
        np.testing.assert_array_equal(result["candidate_logits"][row], truth.logits[at][order])


# --- cache -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", EVERY_MODEL)
def test_export_and_import_go_on_the_same(models, truths, name):
    model, truth = models[name], truths[name]
    source = started(model, truth, 0)
    for begin in range(0, 300, 100):
        model.forward(source, truth.ids[begin:begin + 100])
    for begin, middle, end in ((0, 1, 260), (0, 31, 33), (0, 127, 129), (0, 200, 300)):
        kv = model.new_kv(LENGTH)
        kv.append(source.export(begin, middle), middle - begin)
        kv.append(source.export(middle, end), end - middle)
        assert kv.length == end and kv.export() == truth.raw(0, end)
        assert_same(model, truth, end, [5, 1], kv)
    assert source.export(17, 17) == b""


def test_export_and_import_refuse_what_is_not_there(models, truths):
    model, truth = models["toy-int8"], truths["toy-int8"]
    kv = model.new_kv(200)
    kv.append(truth.raw(0, 20), 20)
    for begin, end in ((-1, 5), (6, 5), (0, 21)):
        with pytest.raises(ValueError):
            kv.export(begin, end)
    with pytest.raises(ValueError):
        kv.append(truth.raw(20, 30), 9)
    with pytest.raises(ValueError):
        kv.append(truth.raw(0, 181), 181)
    assert kv.length == 20 and kv.export() == truth.raw(0, 20)


@pytest.mark.native_only
def test_rewind_to_every_point_and_go_on(models, truths):
    model, truth = models["toy-int8"], truths["toy-int8"]
    for base in (0, 100, 1010):
        for length in range(base, base + 34):
            kv = started(model, truth, base + 34)
            kv.rewind(length)
            kv.rewind(length)
            assert kv.length == length
            assert_same(model, truth, length, [4, 3], kv)
    kv = started(model, truth, 10)
    for wrong in (11, -1):
        with pytest.raises(KestrelError):
            kv.rewind(wrong)
    assert kv.length == 10


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_dead_rows_never_matter(models, truths, name):
    """Positions past the length are filled with other tokens' rows, then with NaN, and forgotten: no trace."""
    model, truth = models[name], truths[name]
    kv = started(model, truth, 120)
    for at in range(120, 160):
        model.forward(kv, [(t + 7) % truth.vocab_size for t in truth.ids[at:at + 17]], wanted=17)
        kv.rewind(at)
        assert_same(model, truth, at, [1], kv)
    not_a_number = (np.float32("nan") if kv.kv_type == "f32" else np.float16("nan")).tobytes()
    kv.append(not_a_number * (200 * kv.position_bytes // len(not_a_number)), 200)
    kv.rewind(160)
    assert_same(model, truth, 160, [1, 2, 33, 64], kv)


# --- what is refused changes nothing -------------------------------------------------------------------------------------

def test_refused_rows_change_nothing(models, truths):
    model, truth = models["toy-int8"], truths["toy-int8"]
    kv, other = started(model, truth, 50), started(model, truth, 20)
    t = truth.ids
    rows = {
        "a position left out": [Row(kv, 51, t[51])],
        "a position again": [Row(kv, 49, t[49])],
        "positions not ascending": [Row(kv, 50, t[50]), Row(kv, 50, t[50])],
        "rows of a cache apart": [Row(kv, 50, t[50]), Row(other, 20, t[20]), Row(kv, 51, t[51])],
        "second cache wrong": [Row(kv, 50, t[50]), Row(other, 21, t[21])],
        "token below 0": [Row(kv, 50, -1)],
        "token past the vocabulary": [Row(kv, 50, t[50]), Row(kv, 51, truth.vocab_size)],
        "an unknown want": [Row(kv, 50, t[50], 4)],
        "no row": [],
        "too many rows": [Row(kv, 50 + i, t[50 + i]) for i in range(513)],
    }
    for what, bad in rows.items():
        with pytest.raises(KestrelError):
            model.step(bad)
        assert (kv.length, other.length) == (50, 20), what
    with pytest.raises(KestrelError):
        model.step([Row(kv, 50, t[50], _native.WANT_CANDIDATES)], candidates=0)
    with pytest.raises(KestrelError):
        model.step([Row(kv, 50, t[50], _native.WANT_CANDIDATES)], candidates=truth.vocab_size + 1)
    assert_same(model, truth, 50, [2], kv)
    assert_same(model, truth, 20, [2], other)


@pytest.mark.native_only
def test_capacity_is_a_wall(models, truths):
    model, truth = models["toy-int8"], truths["toy-int8"]
    for capacity in (1, 31, 32, 33, 128, 129):
        kv = model.new_kv(capacity)
        kv.append(truth.raw(0, capacity - 1), capacity - 1)
        with pytest.raises(KestrelError):
            model.forward(kv, truth.ids[capacity - 1:capacity + 1], wanted=2)
        assert kv.length == capacity - 1
        assert_same(model, truth, capacity - 1, [1], kv)
        with pytest.raises(KestrelError):
            model.forward(kv, truth.ids[capacity:capacity + 1])
        assert kv.export() == truth.raw(0, capacity)
    kv = model.new_kv(100, max_rows=4)
    with pytest.raises(KestrelError):
        model.forward(kv, truth.ids[:5])
    assert_same(model, truth, 0, [4, 4], kv)


def test_impossible_caches_are_refused(models):
    for capacity in (0, -1, 1 << 25):
        with pytest.raises(KestrelError):
            models["toy-int8"].new_kv(capacity)


def test_threads_out_of_range_are_refused(paths):
    for threads in (-1, 257):
        with pytest.raises(KestrelError):
            ForwardModel(paths["toy-int8"], threads=threads)


# --- NaN and Inf -----------------------------------------------------------------------------------------------------------

def poisoned(path, target, tensor, row, value):
    """A copy of a packed file in which one weight of `tensor`'s row (int8: its first scale) is `value`."""
    shutil.copyfile(path, target)
    packed = PackedModel(path)
    entry, c = packed._entries[tensor], packed.config
    k = {"o": c.q_size, "down": c.intermediate_size}.get(tensor.rsplit(".", 1)[-1], c.hidden_size)
    if entry.dtype == "F32":
        at, raw = entry.begin + 4 * row, np.float32(value).tobytes()
    elif packed.weight_type == "f32":
        at, raw = entry.begin + row // 8 * _native.packed_bytes("f32", 8, k) + row % 8 * 4, np.float32(value).tobytes()
    else:
        panel = _native.packed_bytes("int8", 8, k)
        at, raw = entry.begin + row // 8 * panel + row % 8 * 2, np.float16(value).tobytes()
    with open(target, "r+b") as file:
        file.seek(at)
        file.write(raw)
    return target


# tensor, row (rows of qkv: 96 of q, 32 of k, 32 of v), what the message names
POISON = [("embedding", 5, "layer 0"), ("layers.1.attention_norm", 7, "layer 1"), ("layers.1.qkv", 3, "layer 1"), ("layers.1.qkv", 100, "layer 1"),
          ("layers.1.qkv", 140, "layer 1"), ("layers.2.o", 9, "layer 2"), ("layers.0.o", 95, "layer 0"), ("final_norm", 3, "logits"),
          # the sum after the MLP is first looked at by the norm that follows it
          ("layers.1.mlp_norm", 7, "layer 1"), ("layers.1.gate_up", 3, "layer 1"), ("layers.1.gate_up", 299, "layer 1"), ("layers.0.down", 2, "layer 0"),
               ("layers.2.down", 2, "layer 2")]


@pytest.mark.parametrize("weights, value", [("int8", "nan")] + [
    pytest.param(w, v, marks=pytest.mark.native_only) for w, v in (("int8", "inf"), ("int8", "-inf"), ("f32", "nan"), ("f32", "inf"))])
@pytest.mark.parametrize("tensor, row, where", POISON)
def test_not_finite_weights_are_an_error_not_a_token(paths, tmp_path, weights, value, tensor, row, where):
    path = poisoned(paths[f"toy-{weights}"], str(tmp_path / "poisoned"), tensor, row, float(value))
    model = Model.load(path, threads=2)
    answer = model.generate([5, 6, 5, 7], max_tokens=4, draft=4)
    with pytest.raises(KestrelError) as error:
        answer.run()
    assert "NaN or Inf at " in str(error.value) and path in str(error.value) and "\n" not in str(error.value)
    assert answer.token_ids == [] and answer.text == ""


@pytest.mark.native_only
@pytest.mark.parametrize("weights", ["int8", "f32"])
@pytest.mark.parametrize("tensor, row, where", POISON)
def test_the_layer_with_the_bad_weight_is_named(paths, tmp_path, weights, tensor, row, where):
    path = poisoned(paths[f"toy-{weights}"], str(tmp_path / "poisoned"), tensor, row, float("nan"))
    model = ForwardModel(path, threads=1)
    kv = model.new_kv(8)
    with pytest.raises(KestrelError) as error:
        model.forward(kv, [5, 6], wanted=1)
    assert f"NaN or Inf at {where}, row " in str(error.value)
    assert kv.length == 0


def test_only_the_row_that_met_it_is_named(paths, tmp_path):
    """A bad embedding row of token 5: the pass that has it says which row, one without it goes on."""
    model = ForwardModel(poisoned(paths["toy-int8"], str(tmp_path / "poisoned"), "embedding", 5, float("nan")))
    kv = model.new_kv(16)
    with pytest.raises(KestrelError, match="layer 0, row 2 of the pass"):
        model.forward(kv, [6, 7, 5, 8])
    assert kv.length == 0
    model.forward(kv, [6, 7, 8])
    assert kv.length == 3
