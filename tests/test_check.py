# SPDX-License-Identifier: Apache-2.0
"""kestrel check: which cells it runs, that it passes here, and that it finds and names what differs."""
from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from kestrel import _native, check
from kestrel.covering import covering_array
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import KV_TYPES
from kestrel.toy import write_toy

FACTORS = ("isa", "kv", "draft", "chunk", "threads", "sampling", "prompt")


def tuples_of(cells, strength):
    return {(some, tuple(cell[i] for i in some)) for cell in cells for some in itertools.combinations(range(len(cells[0])), strength)}


@pytest.mark.parametrize("sizes, strength, most", [((2, 3, 7, 4, 4, 2, 2), 2, 32), ((4, 3, 7, 4, 4, 2, 2), 2, 34), ((2, 3, 7, 4, 4, 2, 2), 3, 130), ((1, 1, 2), 2, 2),
                                                   ((3, 3, 3, 3), 2, 12), ((2, 2), 1, 2), ((5,), 1, 5)])
def test_every_combination_occurs(sizes, strength, most):
    cells = covering_array(sizes, strength)
    assert tuples_of(cells, strength) == tuples_of(list(itertools.product(*map(range, sizes))), strength)
    assert len(cells) == len(set(cells)) <= most


def flat(cells):
    return [(c.isa, q.kv, c.draft, c.chunk, c.threads, q.sampling, q.prompt) for c, q in cells]


def test_the_strengths_lose_no_pair():
    """--quick: each pair of values; the default: each triple, in at most a third of the product; --full: the product."""
    isas = ["portable", "neon", "neon_dotprod"]
    product = flat(check.toy_cells(isas, "product"))
    assert len(product) == len(set(product)) == len(isas) * len(KV_TYPES) * len(check.DRAFTS) * len(check.CHUNKS) * len(check.THREADS) * 4
    triples, pairs = flat(check.toy_cells(isas, "triples")), flat(check.toy_cells(isas, "pairs"))
    assert tuples_of(triples, 3) == tuples_of(product, 3) and len(triples) < len(product) / 3
    assert tuples_of(pairs, 2) == tuples_of(product, 2) and len(pairs) <= 32
    for strength in check.STRENGTHS:
        base, long = check.long_cells(isas, strength)
        assert {base.isa, *(c.isa for c in long)} == {"neon_dotprod"} if strength == "pairs" else set(isas)


@pytest.mark.native_only
def test_here(tmp_path):
    """Through the program: everything equal, the golden digest, and what was run."""
    done = subprocess.run([sys.executable, "-m", "kestrel", "check", "--quick", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and report["strength"] == "pairs" and report["isa"] == _native.isa_names()
    assert report["kernels"] == {isa: _native.variants(isa) for isa in report["isa"]}
    assert set(report["golden_verdict"].values()) == {"as checked in"} and report["golden"]["toy"] == check.GOLDEN["toy"]
    assert report["cells"] == sum(r["cells"] for r in report["rows"]) == len(check.toy_cells(report["isa"], "pairs"))
    assert [line for line in done.stderr.splitlines() if "cells, about" in line] == done.stderr.splitlines()


def test_each_op_gives_what_is_recorded():
    """Every op of the menu under every instruction set here, emulated cores included."""
    for isa in _native.isa_names():
        assert _native.self_test(isa) == check.KERNELS
        assert set(_native.variants(isa)) == set(check.KERNELS)
    assert check.check_kernels(_native.isa_names()) == []


def test_a_wrong_kernel_is_named(monkeypatch, capsys):
    """A recorded digest that differs stands in for a wrong kernel: the op, the instruction set and the variant are named, and the check fails."""
    for name, values in (("DRAFTS", (0, 3)), ("CHUNKS", (64, 512)), ("THREADS", (1, 2))):
        monkeypatch.setattr(check, name, values)
    monkeypatch.setitem(check.KERNELS, "norm", "0" * 16)
    isas = _native.isa_names()
    assert check.main(None, False, "pairs") == 1
    out = capsys.readouterr().out
    for isa in isas:
        assert f"kernel norm under {isa} (variant {_native.variants(isa)['norm']}): self-test gives" in out
    assert out.count("kernel norm") == len(isas) and "kernel rope" not in out and "NOT EQUAL" in out


def test_self_test_refuses_what_it_does_not_know():
    with pytest.raises(KestrelError, match="instruction set"):
        _native.choose_isa("neon_i8mmm")
    out = _native.ffi.new("uint64_t *", 7)
    assert _native.lib.kestrel_self_test(_native.ffi.NULL, b"matmul_int7", out) == _native.lib.KESTREL_E_ARGUMENT
    assert _native.lib.kestrel_self_test(b"sse9", b"norm", out) == _native.lib.KESTREL_E_ISA
    assert _native.lib.kestrel_self_test(_native.ffi.NULL, _native.ffi.NULL, out) == _native.lib.KESTREL_E_ARGUMENT and out[0] == 7


def test_both_strengths_at_once_are_refused():
    done = subprocess.run([sys.executable, "-m", "kestrel", "check", "--quick", "--full"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("kv", KV_TYPES)
def test_a_difference_is_found_and_placed(tmp_path, kv):
    """Another model's answer stands in for a wrong kernel: the row says in which cell and where."""
    paths = [str(tmp_path / name) for name in ("right", "wrong")]
    for seed, path in enumerate(paths, 1):
        write_toy(path, seed=seed)
    right, wrong = (Model.load(path, threads=1, isa="portable", kv_type=kv) for path in paths)
    cell = check.Cell("portable", 0, 64, 1)
    a, b = (check.answer(model, check.OTHER, cell, 4, {}) for model in (right, wrong))
    notes, seen = [], []
    table = check.Table(check.Estimate("toy", 2, 2, notes.append, lambda done, total: seen.append((done, total))))
    table.compare("row", right, a, cell, a)
    assert table.rows[0]["difference"] is None
    table.compare("row", right, a, cell, b)
    row = table.rows[0]
    assert (row["cells"], seen) == (2, [(1, 2), (2, 2)])
    assert row["difference"].startswith(f"{cell}: layer 0, row 0, K of kv head 0, element ")
    # the last layer's last V alone
    size = {"f32": 4, "f16": 2, "int8": 1}[kv]
    damaged = bytearray(a.kv)
    damaged[-1] ^= 1
    c = right.config
    last = c.head_dim - 1 if kv != "int8" else c.head_dim + 3
    assert len(damaged) % size == 0
    assert check.first_difference(right, a, a._replace(kv=bytes(damaged))) == (
        f"layer {c.num_hidden_layers - 1}, row {a.positions - 1}, V of kv head {c.num_key_value_heads - 1}, element {last}")
    assert check.first_difference(right, a, a._replace(ids=a.ids[:-1] + [9999])) == f"token {len(a.ids) - 1}: {a.ids[-1]} and 9999"


def test_a_wrong_golden_digest_fails(monkeypatch, capsys):
    monkeypatch.setattr(check, "DRAFTS", (0, 3))
    monkeypatch.setattr(check, "CHUNKS", (64, 512))
    monkeypatch.setattr(check, "THREADS", (1, 2))
    monkeypatch.setitem(check.GOLDEN, "toy", "0" * 64)
    assert check.main(None, False, "pairs") == 1
    out = capsys.readouterr().out
    assert f"golden toy: b74f94bffe2d23d837814f59331663b9e61631b54b5f5326ccd9781737c7767b (expected {'0' * 64})" in out
    assert "NOT EQUAL" in out.splitlines()[-1]
    assert all(any(line.split() == [op, variant] for line in out.splitlines()) for op, variant in _native.variants(_native.isa_names()[-1]).items())
