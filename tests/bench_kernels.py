# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks through the Python door (pytest-benchmark), not collected by a plain `pytest`:

    python -m pytest tests/bench_kernels.py --benchmark-columns=min,median,iqr,rounds

Each instruction set usable here takes its turn (portable code is the specification: left out); single thread, except the probe. The kernels alone, without Python, are timed by
`checkasm --bench`; what a user meets by `kestrel bench`. A figure counts only beside others of the same run.
"""
from __future__ import annotations

import numpy as np
import pytest

from kestrel import _native
from kestrel._native import ffi
from kestrel.bench import read_probe
from kestrel.model import ForwardModel
from kestrel.sampling import Sampling, Settings
from kestrel.synthetic import write_synthetic

SHAPE = "2x576x1536x9x3x64x2048"  # two layers of SmolLM2-135M: weights that stay in the cache, so that kernels show and memory doesn't
DEPTHS = (0, 1024)
WIDTHS = (1, 2, 4, 5, 8, 16, 64, 256)
VOCAB = 151936


@pytest.fixture(scope="module", params=("int8", "int4"))
def path(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("kernels") / "model.kestrel")
    write_synthetic(path, SHAPE, request.param)
    return path


@pytest.fixture(scope="module", params=[i for i in _native.isa_names() if i != "portable"] or ["portable"])
def model(request, path):
    return ForwardModel(path, threads=1, isa=request.param, max_rows=max(WIDTHS))


@pytest.fixture(scope="module", params=DEPTHS)
def cache(request, model):
    """A cache that holds `request.param` positions."""
    kv = model.new_kv(max(DEPTHS) + max(WIDTHS))
    for at in range(0, request.param, 256):
        model.forward(kv, range(at, at + 256))
    return kv


@pytest.mark.parametrize("width", WIDTHS)
def test_step(benchmark, model, cache, width):
    """A pass of `width` rows, logits of all of them."""
    depth, ids = cache.length, list(range(width))
    benchmark.group = f"step, {model.packed.weight_type}, depth {depth}, {width} rows"

    def run():
        model.forward(cache, ids, wanted=width)
        cache.rewind(depth)

    benchmark(run)
    assert np.isfinite(model.logits(width - 1)).all()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}], ids=["greedy", "seeded"])
def test_sample(benchmark, settings):
    """The choice of a token from a large vocabulary."""
    benchmark.group = "after the logits"
    logits = np.random.default_rng(1).normal(0, 3, VOCAB).astype(np.float32)
    sampling, work, token = Sampling(Settings(**settings)), ffi.new("uint64_t[]", VOCAB), ffi.new("int32_t *")
    row = ffi.from_buffer("float[]", logits)
    status = benchmark(_native.lib.kestrel_sample, row, VOCAB, sampling.native, 7, work, ffi.NULL, token)
    assert status == 0 and logits[token[0]] >= np.sort(logits)[-40]


def test_compare(benchmark):
    """One position of `kestrel quality`."""
    benchmark.group = "after the logits"
    p, q = np.random.default_rng(1).normal(0, 3, (2, VOCAB)).astype(np.float32)
    assert benchmark(_native.compare, p, q, 7)[0] > 0


@pytest.mark.parametrize("weights", ("int8", "int4", "f32"))
def test_pack(benchmark, weights):
    """256 rows of 1536: what a conversion does to every weight."""
    benchmark.group = "pack"
    rows = np.random.default_rng(1).normal(0, 0.02, (256, 1536)).astype(np.float32)
    packed = np.zeros(_native.packed_bytes(weights, *rows.shape), np.uint8)
    benchmark(_native.pack, weights, len(rows), 0, rows, packed)
    assert packed.any()


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("megabytes", (1, 16, 256))
def test_read_probe(benchmark, path, threads, megabytes):
    """The yardstick of `kestrel bench`, from a size that a core's cache holds to one that none does."""
    benchmark.group = f"read {megabytes} MiB"
    probing = ForwardModel(path, threads=threads, max_rows=1)
    data = np.full(megabytes << 20, 1, np.uint8)
    _, total = benchmark(read_probe, probing, ffi.from_buffer("uint8_t[]", data), data.nbytes)
    assert total == (megabytes << 17) * 0x0101010101010101 % (1 << 64)
