# SPDX-License-Identifier: Apache-2.0
"""kestrel bench: what the lines say, what is run for them, and that the probe reads every byte. No time is judged."""
from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import subprocess
import sys
from statistics import median

import numpy as np
import pytest

from kestrel import _native
from kestrel import bench as bench_module
from kestrel._native import ffi, lib
from kestrel.bench import CHUNK, Plan, bench, bytes_per_token, markdown, read_probe, weights_region
from kestrel.cli import build_parser
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel, matrices, vectors
from kestrel.toy import CONFIG, write_toy

TINY = Plan(threads=(1, 2), depths=(0, 40), widths=(1, 4), samples=2, prefill=9, decode=3, buffer=1 << 16)
LONG = TINY._replace(prefill=300)  # two passes
KINDS = ("bandwidth", "prefill", "decode", "verify")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("bench") / "toy.kestrel")
    write_toy(path)
    return path


def kestrel(*args):
    return subprocess.run([sys.executable, "-m", "kestrel", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


# --- the probe -------------------------------------------------------------------------------------------------------------

def words_sum(raw):
    """Sum of the 64-bit little-endian words, the last one filled with zeros, modulo 2^64."""
    padded = np.concatenate([raw, np.zeros(-len(raw) % 8, np.uint8)])
    return int(np.add.reduce(padded.view("<u8"), dtype=np.uint64))


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_the_probe_reads_every_byte_and_no_other(path, threads):
    model = ForwardModel(path, threads=threads, max_rows=1)
    raw = np.random.default_rng(1).integers(0, 256, (5 << 20) + 64, np.uint8)
    for size in (1, 7, 8, 9, 127, 128, 129, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) - 3, 5 << 20):
        for offset in (0, 1, 13):
            part = raw[offset:offset + size]
            seconds, total = read_probe(model, ffi.from_buffer("uint8_t[]", part), size)
            assert total == words_sum(part), (size, offset)
            assert seconds > 0


@pytest.mark.parametrize("missing", range(5))
def test_the_probe_refuses_what_is_missing(path, missing):
    model, data = ForwardModel(path, threads=1, max_rows=1), ffi.new("uint8_t[]", 8)
    seconds, total = ffi.new("double *", -1.0), ffi.new("uint64_t *", 7)
    args = [model._handle, data, 8, seconds, total]
    args[missing] = 0 if missing == 2 else ffi.NULL
    assert lib.kestrel_read_probe(*args) == lib.KESTREL_E_ARGUMENT
    assert (seconds[0], total[0]) == (-1.0, 7)
    with pytest.raises(KestrelError, match="probe of 0 bytes"):
        read_probe(model, data, 0)


def test_the_weights_region_is_all_matrices_and_nothing_else(path):
    packed = PackedModel(path)
    model = ForwardModel(packed, threads=2, max_rows=1)
    arrays = [packed.array(m.name) for m in matrices(packed.config)]
    address, size = weights_region(packed)
    assert size == sum(len(a) for a in arrays)
    assert read_probe(model, address, size)[1] == sum(words_sum(a) for a in arrays) % (1 << 64)


# --- what a token reads ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("weights, element", [("int8", 2), ("f32", 4)])
def test_bytes_per_token(tmp_path, tied, weights, element):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    write_toy(str(tmp_path / "m"), weights, config=config)
    packed = PackedModel(str(tmp_path / "m"))
    kv = ForwardModel(packed, threads=1, max_rows=1).new_kv(10)
    read = [m for m in matrices(config) if tied or m.name != "embedding"]  # an untied embedding is one row
    expected = sum(_native.packed_bytes(weights, m.n, m.k) for m in read) + 4 * sum(v.size for v in vectors(config, False))
    assert bytes_per_token(packed, kv, 0) == expected
    assert bytes_per_token(packed, kv, 2.5) - expected == 2.5 * config.num_hidden_layers * 2 * config.kv_size * element


# --- what is run -------------------------------------------------------------------------------------------------------------

class Spy:
    """Every pass of every model: (threads, positions before, rows, rows with logits); every cache that was made."""

    def __init__(self, monkeypatch):
        self.passes, self.caches = [], []
        forward, new_kv = ForwardModel.forward, ForwardModel.new_kv

        def spying_forward(model, kv, tokens, wanted=0, **more):
            self.passes.append((model.threads, kv.length, len(tokens), wanted))
            return forward(model, kv, tokens, wanted, **more)

        def spying_new_kv(model, *args, **more):
            self.caches.append(new_kv(model, *args, **more))
            return self.caches[-1]

        monkeypatch.setattr(ForwardModel, "forward", spying_forward)
        monkeypatch.setattr(ForwardModel, "new_kv", spying_new_kv)


def test_each_sample_is_the_pass_it_says(path, monkeypatch):
    spy = Spy(monkeypatch)
    monkeypatch.setattr(bench_module.Runs, "warm_up", lambda *args: spy.passes.append("warm"))
    bench(path, LONG)
    assert spy.passes[0] == (2, 0, 40, 1)  # the deepest cache
    assert spy.passes[1:3] == ["warm"] * 2
    one_round = []
    for threads, depth in itertools.product((1, 2), (0, 40)):
        one_round += [(threads, depth, CHUNK, 0), (threads, depth + CHUNK, 300 - CHUNK, 1)]
        one_round += [(threads, depth + i, 1, 1) for i in range(3)]
        one_round += [(threads, depth, width, width) for width in (1, 4, 4, 1, 1, 4, 4, 1)]
    assert spy.passes[3:] == one_round * 2


def test_warming_up_runs_everything_and_ends(path, monkeypatch):
    spy = Spy(monkeypatch)
    model = ForwardModel(path, threads=1)
    kv = model.new_kv(400)
    bench_module.Runs(model).warm_up(kv, LONG, 300)
    kinds = [p[2:] for p in spy.passes]
    assert kinds[:4] == [(CHUNK, 0), (300 - CHUNK, 1), (1, 1), (4, 4)]
    assert kinds[4:] == [(1, 1)] * len(kinds[4:]) and len(kinds[4:]) in range(3 * 3, 3 * 8 + 1, 3)
    assert kv.length == 0


def test_every_cache_has_its_depth_before_and_after(path, monkeypatch):
    """Shallow caches are the beginning of the deep one: the same bytes as their own prefill."""
    spy = Spy(monkeypatch)
    bench(path, TINY._replace(depths=(300, 0, 7)))
    caches = list(spy.caches)
    assert sorted(kv.length for kv in caches) == [0, 7, 300]
    model = ForwardModel(path, threads=1, isa="portable")
    runs = bench_module.Runs(model)
    for kv in caches:
        own = model.new_kv(310)
        if kv.length:
            runs.fill(own, kv.length)
        assert own.export() == kv.export()


# --- what the lines say --------------------------------------------------------------------------------------------------------

def check_lines(rows, threads, depths, widths, samples, prefill, decode, prefill_depths):
    by = {(r["kind"], r["threads"], r["depth"], r.get("of"), r.get("width"), r.get("tokens")): r for r in rows}
    assert len(by) == len(rows)
    expected = {("bandwidth", t, None, of, None, None) for t in range(1, max(threads) + 1) for of in ("weights", "buffer")}
    expected |= {("prefill", t, d, None, None, prefill) for t in threads for d in prefill_depths}
    expected |= {("decode", t, d, None, None, decode) for t in threads for d in depths}
    expected |= {("verify", t, d, None, w, None) for t in threads for d in depths for w in widths}
    assert set(by) == expected
    units = {"bandwidth": "GB/s", "prefill": "tokens/s", "decode": "tokens/s", "verify": "s"}
    counts = {"bandwidth": 3 * samples, "prefill": samples, "decode": samples, "verify": 4 * samples}
    for r in rows:
        assert r["unit"] == units[r["kind"]] and len(r["samples"]) == counts[r["kind"]] and min(r["samples"]) > 0
        assert r["median"] == median(r["samples"]) and {r["slowest"], r["fastest"]} == {min(r["samples"]), max(r["samples"])}
        assert (r["slowest"] <= r["fastest"]) == (r["kind"] != "verify") or r["slowest"] == r["fastest"]
        assert (r["weights"], r["kv_type"], r["source"], r["isa"]) == ("int8", "f16", "toy, seed 1", _native.choose_isa(None))
        if r["kind"] == "verify":
            assert r["ratio"] == r["median"] / by["verify", r["threads"], r["depth"], None, 1, None]["median"]
        if r["kind"] == "decode":
            assert r["bandwidth"] == max(b["median"] for b in rows if b["kind"] == "bandwidth" and b["threads"] <= r["threads"])
            assert r["bandwidth_fraction"] == pytest.approx(r["bytes_per_token"] * r["median"] / 1e9 / r["bandwidth"], rel=1e-12)
    shallow, deep = (by["decode", threads[0], d, None, None, decode]["bytes_per_token"] for d in (depths[0], depths[-1]))
    assert deep - shallow == (depths[-1] - depths[0]) * CONFIG.num_hidden_layers * 2 * CONFIG.kv_size * 2
    assert [KINDS.index(r["kind"]) for r in rows] == sorted(KINDS.index(r["kind"]) for r in rows)


def test_json_lines(tmp_path):
    """Through the program; depths without room are left out and said so."""
    path = str(tmp_path / "toy.kestrel")
    write_toy(path, config=dataclasses.replace(CONFIG, max_position_embeddings=128))
    done = kestrel("bench", path, "--json", "--threads", "2", "1", "2", "--depths", "33", "0", "120", "5000", "--widths", "4", "2", "--samples", "2",
                   "--prefill", "12", "--decode", "3", "--buffer", "2", "--brief")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["kind"], r["when"]) for r in lines if r not in lines[1:-2]] == [("telemetry", "before"), ("telemetry", "during"), ("telemetry", "after")]
    rows = lines[1:-2]
    check_lines(rows, (1, 2), (0, 33, 120), (1, 2, 4), 2, 12, 3, prefill_depths=(0, 33))
    assert all(r["model"] == "toy.kestrel" for r in rows)
    assert {r["bytes"] for r in rows if r.get("of") == "buffer"} == {2 << 20}
    notes = [line for line in done.stderr.splitlines() if "left out" in line]
    assert len(notes) == 2
    assert notes[0].startswith("kestrel: prefill at depth 120: left out") and "128" in notes[0]
    assert notes[1].startswith("kestrel: depth 5000: left out")


def test_tables_show_every_measurement(path):
    rows = bench(path, TINY)
    check_lines([{**r} for r in rows], (1, 2), (0, 40), (1, 4), 2, 9, 3, prefill_depths=(0, 40))
    text = markdown(rows)
    assert text.startswith(f"toy.kestrel: int8 weights, f16 cache, {_native.choose_isa(None)};")
    tables = [[line.strip("| ").split(" | ") for line in block.splitlines()] for block in text.split("\n\n")[1:]]
    assert [len(t) for t in tables] == [2 + 2, 2 + 4, 2 + 4]
    assert all(len(line) == len(t[0]) for t in tables for line in t)
    for r in rows:
        if r["kind"] == "verify":
            line = next(line for line in tables[2] if line[:2] == [str(r["threads"]), str(r["depth"])])
            assert line[2].startswith(f"{1e3 * r['median']:.2f} (") if r["width"] == 1 else line[3] == f"{r['ratio']:.2f}"
        else:
            table = tables[0 if r["kind"] == "bandwidth" else 1]
            assert any(line[0] == str(r["threads"]) and any(c.startswith(f"{r['median']:.1f} (") for c in line[1:]) for line in table)


def test_defaults_are_the_products(path):
    assert inspect.signature(Model.load).parameters["chunk"].default == CHUNK
    assert build_parser().parse_args(["generate", path]).chunk == CHUNK
    assert Plan().buffer >= 256 << 20  # no cache holds it
    spied = bench(path, TINY._replace(threads=(), depths=(0,), widths=(), samples=1))
    model = Model.load(path)
    assert {(r["isa"], r["kv_type"]) for r in spied} == {(model.isa, model.kv_type)}
    assert {r["threads"] for r in spied if r["kind"] == "decode"} == {model.threads}
    assert {r["width"] for r in spied if r["kind"] == "verify"} == {1}


def test_another_cache_type(path):
    rows = bench(path, TINY._replace(samples=1, threads=(1,)), kv_type="f32")
    f16 = bench(path, TINY._replace(samples=1, threads=(1,)))
    assert {r["kv_type"] for r in rows} == {"f32"}
    one, two = (next(r for r in x if r["kind"] == "decode" and r["depth"] == 40)["bytes_per_token"] for x in (rows, f16))
    assert one - two == (40 + 2) * CONFIG.num_hidden_layers * 2 * CONFIG.kv_size * 2


def test_progress_counts_rounds(path):
    seen = []
    bench(path, TINY, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_synthetic_models_are_made_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KESTREL_CACHE", str(tmp_path))
    args = ["bench", "--synthetic", "1x64x64x2x1x32x300", "--json", "--threads", "1", "--depths", "0", "--widths", "1", "--samples", "1", "--prefill", "4",
            "--decode", "2", "--buffer", "1", "--brief"]
    done = kestrel(*args)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["kind"] for line in done.stdout.splitlines()] == ["telemetry", "bandwidth", "bandwidth", "prefill", "decode", "verify", "telemetry", "telemetry"]
    kept = list(tmp_path.iterdir())
    assert [p.suffix for p in kept] == [".kestrel"]
    before = kept[0].stat().st_mtime_ns
    assert kestrel(*args).returncode == 0
    assert kept[0].stat().st_mtime_ns == before


# --- bad input -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, word", [({"threads": (0,)}, "threads"), ({"threads": (257,)}, "threads"), ({"depths": (-1,)}, "depths"), ({"widths": (0,)}, "widths"),
                                          ({"widths": (CHUNK + 33,)}, "widths"), ({"samples": 0}, "samples"), ({"prefill": 0}, "prefill"),
                                          ({"decode": 0}, "decode")])
def test_numbers_out_of_range_are_refused(path, change, word):
    with pytest.raises(KestrelError, match=f"^{word}: expected"):
        bench(path, TINY._replace(**change))


@pytest.mark.parametrize("args, word", [
    ((), "expected a model or --synthetic"), (("{path}", "--synthetic", "135m"), "not both"), (("{path}", "--kv-type", "int3"), "kv type"),
    (("{path}", "--depths", "-1"), "depths"), (("{path}", "--widths", "0"), "widths"), (("--synthetic", "9b"), "shape"), (("{path}.missing",), "missing")])
def test_bad_input_is_one_line(path, args, word):
    done = kestrel("bench", *(a.format(path=path) for a in args))
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and word in lines[0]
