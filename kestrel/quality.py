# SPDX-License-Identifier: Apache-2.0
"""How far a packed model is from a reference: KL divergence, argmax agreement and perplexity on the same text."""
from __future__ import annotations

import math
import os
from typing import Any, Callable, Dict, List, Optional

from . import _native
from .errors import KestrelError
from .generate import Model

WINDOW = 2048  # tokens of one context
_ROWS = 64     # rows whose logits are held at a time, of each model


def default_text() -> str:
    """Licence text, Python source and prose, about 1,600 tokens."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "quality.txt"), encoding="utf-8") as file:
        return file.read()


def quality(model: str, reference: str, text: Optional[str] = None,
            progress: Callable[[int, int], None] = lambda done, total: None, kv_type: Optional[str] = None) -> Dict[str, Any]:
    """Compares two packed files, token by token on `text` (default: a built-in one); `reference` has f32 weights. kv_type: of the model's cache (default: its own).

    Returns mean_kl, p99_kl (KL(reference || model), nats), argmax_agreement (fraction), perplexity, perplexity_reference, positions.
    """
    q, p = Model.load(model, kv_type=kv_type), Model.load(reference)
    if p.packed.weight_type != "f32":
        raise KestrelError(f"{reference}: expected a reference packed with --weights f32, found {p.packed.weight_type} weights")
    if q.config.vocab_size != p.config.vocab_size:
        raise KestrelError(f"{model}: vocabulary of {q.config.vocab_size}, but {reference} has {p.config.vocab_size}")
    ids = p.encode(default_text() if text is None else text)
    if len(ids) < 2:
        raise KestrelError(f"text: expected at least 2 tokens, found {len(ids)}")
    window = min(WINDOW, p.ctx, q.ctx)
    divergence: List[float] = []
    nll = nll_reference = 0.0
    agree = 0
    for begin in range(0, len(ids) - 1, window):
        inputs = ids[begin:begin + window]
        caches = [(m, m.new_kv(len(inputs), _ROWS)) for m in (p, q)]
        for at in range(0, len(inputs), _ROWS):
            rows = inputs[at:at + _ROWS]
            for m, kv in caches:
                m.forward(kv, rows, wanted=len(rows))
            for i in range(min(len(rows), len(ids) - 1 - begin - at)):
                kl, a, b, same = _native.compare(p.logits(i), q.logits(i), ids[begin + at + i + 1])
                divergence.append(kl)
                nll, nll_reference, agree = nll + a, nll_reference + b, agree + same
            progress(begin + at + len(rows), len(ids))
    n = len(divergence)
    return {"mean_kl": sum(divergence) / n, "p99_kl": sorted(divergence)[min(n - 1, n * 99 // 100)], "argmax_agreement": agree / n,
            "perplexity": math.exp(nll / n), "perplexity_reference": math.exp(nll_reference / n), "positions": n}
