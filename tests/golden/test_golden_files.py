"""The golden files are whole, agree with a float64 statement of the model, and notice mistakes."""
from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from golden import make_golden  # noqa: E402
from reference import llama  # noqa: E402

PROVENANCE = json.loads((HERE / "provenance.json").read_text())
TINY = sorted(make_golden.TINY)
# Ten times what float32 costs (README.md), hundreds of times less than the least mistake.
TOLERANCE = 1e-3


def test_every_file_is_the_one_that_was_made():
    found = {p.relative_to(HERE).as_posix() for p in HERE.rglob("*")
             if p.suffix in (".npz", ".safetensors", ".txt", ".json") and p.name != "provenance.json"}
    assert found == set(PROVENANCE["sha256"])
    for name, digest in PROVENANCE["sha256"].items():
        assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", TINY)
def test_transformers_agrees_with_float64(name):
    config, weights = llama.load(HERE / name)
    golden = np.load(HERE / name / "golden.npz")
    exact = llama.forward(config, weights, golden["ids"])
    assert golden["logits"].dtype == np.float32
    assert np.abs(exact["logits"] - golden["logits"]).max() < TOLERANCE
    assert np.abs(np.stack(exact["hidden_states"]) - golden["hidden_states"]).max() < TOLERANCE
    assert golden["logits"].std() > 1
    if "long_ids" in golden:
        assert golden["long_rows"].max() >= 1100
        long = llama.forward(config, weights, golden["long_ids"], golden["long_rows"])
        assert np.abs(long["logits"] - golden["long_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_greedy_continues_with_the_best_logit(name):
    config, weights = llama.load(HERE / name)
    golden = np.load(HERE / name / "golden.npz")
    ids = np.concatenate([golden["ids"], golden["greedy_ids"]])
    logits = llama.forward(config, weights, ids)["logits"][len(golden["ids"]) - 1:-1]
    assert golden["greedy_margins"].min() > TOLERANCE  # else float32 alone could choose another id
    np.testing.assert_array_equal(logits.argmax(-1), golden["greedy_ids"])


@pytest.mark.parametrize("name", TINY)
def test_every_mistake_shows(name):
    config, weights = llama.load(HERE / name)
    golden = np.load(HERE / name / "golden.npz")
    mistakes = make_golden.mutations(config, weights)
    assert set(mistakes) == set(PROVENANCE[name]["mutations_max_abs"])
    for what, (c, w) in mistakes.items():
        moved = np.abs(llama.forward(c, w, golden["ids"])["logits"] - golden["logits"]).max()
        assert moved > 100 * TOLERANCE, what


def test_smollm2_arrays_fit_together():
    g = np.load(HERE / "smollm2.npz")
    assert g["window_top_logits"].shape == (3, 112, 256) and g["window_top_logits"].dtype == np.float32
    assert g["long_positions"].max() == len(g["text_ids"]) - 1
    for part in ("window", "long"):
        best = g[f"{part}_top_logits"]
        assert (np.diff(best, axis=-1) <= 0).all()
        assert (g[f"{part}_logsumexp"] > best[..., 0]).all()
        inside = np.exp(best.astype(np.float64) - g[f"{part}_logsumexp"][..., None]).sum(-1)
        assert (inside < 1).all() and inside.mean() > 0.9
    for (window, row), logits in zip(g["full_rows"], g["full_logits"]):
        ids, best, total = (
            (g["window_top_ids"][window, row], g["window_top_logits"][window, row], g["window_logsumexp"][window, row])
            if window >= 0 else (g["long_top_ids"][-1], g["long_top_logits"][-1], g["long_logsumexp"][-1]))
        np.testing.assert_array_equal(np.argsort(-logits, kind="stable")[:256], ids)
        np.testing.assert_array_equal(logits[ids], best)
        assert np.log(np.exp(logits.astype(np.float64)).sum()) == pytest.approx(total, abs=1e-9)
