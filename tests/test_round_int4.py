# SPDX-License-Identifier: Apache-2.0
"""int4's rounding: what is stored, which scale is chosen, where errors go, and the same bytes on every machine."""
from __future__ import annotations

import hashlib

import numpy as np
import pytest
import toy

from kestrel import _native
from kestrel._native import ffi
from kestrel.calibration import Moments, input_ranges
from kestrel.errors import KestrelError
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel
from kestrel.toy import uniform

GROUP, PANEL, FEEDBACK = _native.GROUP, _native.PANEL, _native.FEEDBACK


def packed_int4(rows, *rounding):
    """(packed bytes, float32 [n, k] that the kernels compute with)."""
    n, k = rows.shape
    dst = np.empty(_native.packed_bytes("int4", n, k), np.uint8)
    _native.pack("int4", n, 0, rows, dst, *rounding)
    weight = ffi.new("kestrel_weight *", {"type": _native.TYPES["int4"], "n": n, "k": k, "data": ffi.from_buffer(dst)})
    return dst, np.stack([_native.unpack_row(weight[0], r) for r in range(n)])


def unpanelled(dst, n, k):
    """(values int8 [n padded, kp], scales float16 [n padded, kp / GROUP]) by the layout that csrc/kernels.h describes."""
    kp = -(-k // GROUP) * GROUP
    scale_bytes = -(-kp // GROUP * PANEL * 2 // 64) * 64
    values, scales = [], []
    for panel in dst.reshape(-(-n // PANEL), -1):
        assert len(panel) == scale_bytes + kp * PANEL // 2
        scales.append(panel[:kp // GROUP * PANEL * 2].view(np.float16).reshape(-1, PANEL).T)
        two = panel[scale_bytes:].reshape(kp // 8, PANEL, 4)
        halves = np.stack([two & 15, two >> 4], 2).astype(np.int8)  # [8 k, row, half, 4]
        values.append(((halves ^ 8) - 8).swapaxes(0, 1).reshape(PANEL, kp))
    return np.concatenate(values), np.concatenate(scales)


def rows_of(n, k, stream=1):
    x = uniform(11, stream, n * k).astype(np.float32).reshape(n, k)
    return x * x * x * np.float32(0.1)


def moments_of(k, tokens=300):
    """Sums of products of correlated channels, in blocks, and how many tokens they are of; float64 [k, k] of all."""
    x = uniform(5, 3, tokens * k).reshape(tokens, k)
    x[:, 1:] += 0.8 * x[:, :-1]
    x *= np.exp2(3 * uniform(5, 4, k))
    blocks = -(-k // FEEDBACK)
    sums = np.zeros((blocks, FEEDBACK, FEEDBACK), np.float32)
    full = x.T @ x / tokens
    for b in range(blocks):
        part = full[b * FEEDBACK:(b + 1) * FEEDBACK, b * FEEDBACK:(b + 1) * FEEDBACK]
        sums[b, :len(part), :len(part)] = part
    return sums, full


@pytest.mark.parametrize("n, k", [(1, 1), (8, 64), (9, 65), (23, 150), (16, 576)])
def test_what_is_stored_is_what_is_computed_with(n, k):
    rows = rows_of(n, k)
    dst, wide = packed_int4(rows)
    values, scales = unpanelled(dst, n, k)
    assert values.min() >= -8 and values.max() <= 7
    assert not values[n:].any() and not values[:, k:].any() and not scales[n:].any()
    exact = values[:n].astype(np.float32) * np.repeat(scales[:n].astype(np.float32), GROUP, 1)
    assert wide.tobytes() == np.ascontiguousarray(exact[:, :k]).tobytes()


def test_values_on_the_grid_are_kept():
    """Any -8..7 times a scale that f16 holds: the search finds it, whichever sign has the longer side."""
    rows = np.zeros((16, GROUP), np.float32)
    rows[:, :16] = np.arange(-8, 8)
    rows[1::2] *= -1
    rows *= (2.0 ** np.arange(-6, 10, dtype=np.float32))[:, None]
    assert packed_int4(rows)[1].tobytes() == rows.tobytes()
    assert not packed_int4(np.zeros((3, 70), np.float32))[0].any()


def test_the_scale_weighs_what_comes_in():
    """Mean square error, each column counting by its importance: below that of absmax / 7, and each search best by its own measure."""
    rows = rows_of(64, 4 * GROUP)
    importance = np.exp2(6 * uniform(2, 2, rows.shape[1])).astype(np.float32)
    absmax = np.abs(rows.reshape(64, -1, GROUP)).max(-1).astype(np.float32) / 7
    scale = np.repeat(absmax, GROUP, 1)
    plain, weighted = packed_int4(rows)[1], packed_int4(rows, importance, None)[1]
    simple = np.clip(np.rint(rows / scale), -8, 7) * scale

    def error(wide, by):
        return float((((rows - wide).astype(np.float64) ** 2) * by).sum())

    assert error(plain, 1) < 0.8 * error(simple, 1)
    assert error(weighted, importance) < 0.9 * error(plain, importance)
    assert error(plain, 1) < error(weighted, 1)


def test_feedback_lowers_the_error_of_the_outputs():
    """The error that counts is that of rows @ x: lower with feedback, although the weights' own is higher."""
    rows = rows_of(64, 300)
    sums, full = moments_of(300)
    importance = np.zeros(320, np.float32)
    importance[:300] = np.diag(full)
    alone, fed = packed_int4(rows, importance, None)[1], packed_int4(rows, importance, _native.feedback(sums))[1]

    def of_outputs(wide):
        e = (rows - wide).astype(np.float64)
        return float(np.einsum("nk,kl,nl->", e, full, e))

    assert of_outputs(fed) < 0.75 * of_outputs(alone)
    assert ((rows - fed) ** 2).sum() > ((rows - alone) ** 2).sum()


def test_factors_are_those_of_the_inverse():
    """GPTQ's: with U upper and U^T U the inverse of the damped moments, U[i][j] / U[i][i]."""
    sums, full = moments_of(FEEDBACK)
    damped = np.triu(sums[0].astype(np.float64))
    damped = damped + np.triu(damped, 1).T
    damped += 0.01 * np.diag(damped).mean() * np.eye(FEEDBACK)
    u = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(_native.feedback(sums)[0], np.triu(u / np.diag(u)[:, None], 1), rtol=1e-4, atol=1e-6)
    silent = _native.feedback(np.zeros((1, FEEDBACK, FEEDBACK), np.float32))
    assert not silent.any()


def test_panels_are_independent_with_feedback():
    rows = rows_of(45, 200)
    sums, full = moments_of(200)
    rounding = (np.ones(256, np.float32), _native.feedback(sums))
    whole = packed_int4(rows, *rounding)[0]
    parts = np.full_like(whole, 0xEE)
    for begin, end in ((40, 45), (8, 16), (0, 8), (16, 40)):
        _native.pack("int4", 45, begin, np.ascontiguousarray(rows[begin:end]), parts, *rounding)
    assert parts.tobytes() == whole.tobytes()


def test_wrong_arguments():
    rows = rows_of(8, 64)
    dst = np.empty(_native.packed_bytes("int4", 8, 64), np.uint8)
    with pytest.raises(ValueError, match=r"importance: expected float32 \[64\]"):
        _native.pack("int4", 8, 0, rows, dst, np.ones(63, np.float32))
    with pytest.raises(ValueError, match="feedback"):
        _native.pack("int4", 8, 0, rows, dst, np.ones(64, np.float32), np.ones((2, FEEDBACK, FEEDBACK), np.float32))


def test_the_same_bytes_everywhere():
    rows = rows_of(64, 300)
    x = np.rint(uniform(5, 3, 200 * FEEDBACK) * 100).reshape(200, FEEDBACK)  # integers, so that numpy's sums are exact in any order
    x[:, 1:] += x[:, :-1]
    sums = np.tile((x.T @ x).astype(np.float32), (3, 1, 1))
    packed = packed_int4(rows, (1 + np.arange(320) % 5).astype(np.float32), _native.feedback(sums))[0]
    assert hashlib.sha256(packed.tobytes()).hexdigest() == "ae6507f07325a751ddd3bcf7b0e715e3b355f606271c046885aad8d6aa101cc9"


# --- the calibration pass ----------------------------------------------------------------------------------------------------------

def test_moments_are_those_of_the_inputs():
    """The first layer's attention input, restated from the embedding; the maxima bound the diagonals; threads don't show."""
    path, ids = toy.packed("tiny-tied"), [3, 1, 4, 1, 5, 9, 2, 6] * 20
    p = PackedModel(path)
    seen = []
    for threads in (1, 3):
        moments = Moments(p.config)
        ranges = input_ranges(ForwardModel(p, threads=threads), ids, moments=moments)
        seen.append(moments.sums.tobytes())
    assert seen[0] == seen[1] and moments.tokens == len(ids)
    c = p.config
    weight = ffi.new("kestrel_weight *", {"type": _native.TYPES["int8"], "n": c.vocab_size, "k": c.hidden_size, "data": ffi.from_buffer(p.array("embedding"))})
    x = np.stack([_native.unpack_row(weight[0], i) for i in ids]).astype(np.float64)
    if p.has("embedding_scale"):
        x *= p.vector("embedding_scale")
    x = x / np.sqrt((x ** 2).mean(1, keepdims=True) + c.rms_norm_eps) * p.vector("layers.0.attention_norm")
    k = min(c.hidden_size, FEEDBACK)
    np.testing.assert_allclose(np.triu(moments.sums[0][:k, :k]), np.triu((x.T @ x)[:k, :k]), rtol=1e-4, atol=1e-4)
    squares = moments.sums[0].diagonal()[:k]
    largest = ranges.qkv[0][:k].astype(np.float64) ** 2
    assert (squares <= largest * len(ids) * (1 + 1e-5)).all() and (squares >= largest * (1 - 1e-5)).all()


@pytest.mark.parametrize("name", ("tiny-tied", "tiny-untied"))
def test_a_converted_model(name):
    """Layers int4, embedding and head int8; a file that says otherwise is refused; answers don't depend on the settings."""
    p = PackedModel(toy.packed(name, "int4"))
    assert p.weight_type == "int4" and p.stored_type("embedding") == p.stored_type("head") == "int8" and p.stored_type("layers.0.o") == "int4"
    assert len(p.array("layers.0.o")) < 0.6 * len(PackedModel(toy.packed(name)).array("layers.0.o"))
    ids, rows = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], []
    for isa in _native.isa_names():
        for threads, cuts in ((1, (12,)), (2, (1,) * 12), (2, (5, 7)), (1, (3, 9))):
            model = ForwardModel(p, threads=threads, isa=isa)
            kv, digest, at = model.new_kv(16), hashlib.sha256(), 0
            for width in cuts:
                model.forward(kv, ids[at:at + width], wanted=width)
                digest.update(model._logits[:width].tobytes())
                at += width
            rows.append(digest.hexdigest() + hashlib.sha256(kv.export()).hexdigest())
    assert len(set(rows)) == 1


def test_a_file_of_mixed_types_is_refused(tmp_path):
    raw = open(toy.packed("tiny-tied", "int4"), "rb").read()
    broken = raw.replace(b'\\"embedding\\":{\\"group\\":64,\\"k\\"', b'\\"embedding\\":{\\"group\\":46,\\"k\\"', 1)
    assert broken != raw
    (tmp_path / "m").write_bytes(broken)
    with pytest.raises(KestrelError, match="embedding: expected"):
        PackedModel(str(tmp_path / "m"))
