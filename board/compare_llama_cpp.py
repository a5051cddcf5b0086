#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kestrel beside llama.cpp on the same machine, in one run: prefill and decode in tokens per second.

    python board/compare_llama_cpp.py --kestrel MODEL.kestrel --gguf FILE.gguf [--threads 1 2] [--json]

Needs the package llama-cpp-python (built from source for this CPU). Each engine and thread count gets a process of its
own that loads once, warms up, and then takes turns with the others, one measurement each, so that a change of clock
or load meets all of them alike. Medians and the span from slowest to fastest are shown.

Prefill: --prompt-tokens tokens of text.txt from an empty cache, in one call. Decode: --tokens greedy tokens after the
first --decode-past tokens of it, one at a time, no speculation; end ids do not stop either engine.

    --quantize SOURCE.gguf   first write FILE.gguf: SOURCE as pure Q8_0, by llama.cpp's own quantiser
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "tests" / "golden" / "text.txt"


class LlamaCpp:
    """llama.cpp through its C interface: the default batch sizes and attention path, greedy choice by argmax."""

    def __init__(self, path: str, threads: int, capacity: int):
        import llama_cpp
        import numpy as np

        self.c, self.np = llama_cpp, np
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = capacity, threads, threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def encode(self, text: str) -> list:
        raw = text.encode()
        ids = (self.c.llama_token * (len(raw) + 8))()
        count = self.c.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), False, False)
        return list(ids[:count])

    def _step(self, ids: list) -> int:
        """Feed ids, return the greedy next one."""
        tokens = (self.c.llama_token * len(ids))(*ids)
        if self.c.llama_decode(self.context, self.c.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        row = self.c.llama_get_logits_ith(self.context, -1)
        return int(self.np.ctypeslib.as_array(row, (self.vocab_size,)).argmax())

    def prefill(self, ids: list) -> float:
        """Seconds from an empty cache to the first token."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)
        start = time.perf_counter()
        self._step(ids)
        return time.perf_counter() - start

    def decode(self, ids: list, tokens: int) -> float:
        """Seconds of `tokens` steps of one token each, after ids."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)
        token = self._step(ids)
        start = time.perf_counter()
        for _ in range(tokens):
            token = self._step([token])
        return time.perf_counter() - start


class Kestrel:
    """kestrel as a user meets it: `generate`, with text, stopping rules and all, speculation off."""

    def __init__(self, path: str, threads: int, capacity: int):
        try:
            from kestrel import Model
        except ImportError:  # a source tree that is not installed
            sys.path.insert(0, str(ROOT))
            from kestrel import Model

        self.model = Model.load(path, threads=threads)

    def encode(self, text: str) -> list:
        return self.model.encode(text)

    def prefill(self, ids: list) -> float:
        """Seconds from an empty cache to the first token."""
        return self.model.generate(ids, max_tokens=1, draft="off", ignore_end=True).run().statistics.prefill

    def decode(self, ids: list, tokens: int) -> float:
        """Seconds of `tokens` steps of one token each, after ids."""
        answer = self.model.generate(ids, max_tokens=tokens + 1, draft="off", ignore_end=True).run()
        assert answer.statistics.forwards == tokens + 1
        return answer.statistics.decode


ENGINES = {"kestrel": Kestrel, "llama.cpp": LlamaCpp}


def worker(engine: str, path: str, threads: int, args) -> None:
    """Reads `prefill` or `decode` from stdin, answers each with the seconds it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not mix with the answers
    capacity = max(args.prompt_tokens, args.decode_past + args.tokens) + 8
    model = ENGINES[engine](path, threads, capacity)
    ids = model.encode(TEXT.read_text())
    needed = max(args.prompt_tokens, args.decode_past)
    ids = (ids * (needed // len(ids) + 1))[:needed]

    tasks = {"prefill": lambda: model.prefill(ids[:args.prompt_tokens]),
             "decode": lambda: model.decode(ids[:args.decode_past], args.tokens)}
    tasks["decode"]()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(tasks[line.strip()](), file=answers, flush=True)


def quantize(source: str, target: str) -> None:
    """Q8_0 everywhere (the head too), also from a file that is quantised already."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize, params.pure = True, True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"{source}: llama.cpp cannot quantise it")


def measure(args) -> list:
    """One dictionary per engine and thread count, with the tokens per second of every repeat."""
    sources = [(name, path) for name, path in (("kestrel", args.kestrel), ("llama.cpp", args.gguf)) if path]
    rows = []
    for threads in args.threads:
        for engine, path in sources:
            forwarded = [f"--prompt-tokens={args.prompt_tokens}", f"--decode-past={args.decode_past}",
                         f"--tokens={args.tokens}"]
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", engine, path, str(threads), *forwarded], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if args.verbose else subprocess.DEVNULL)
            rows.append({"engine": engine, "threads": threads, "prefill": [], "decode": [], "process": process})
    try:
        for row in rows:
            if row["process"].stdout.readline().strip() != "ready":
                raise SystemExit(f"{row['engine']}: did not start; --verbose shows why")
        for turn in range(args.repeats):
            for kind, tokens in (("prefill", args.prompt_tokens), ("decode", args.tokens)):
                for row in rows:
                    time.sleep(0.05)  # the last one's idle threads stop spinning
                    print(kind, file=row["process"].stdin, flush=True)
                    answer = row["process"].stdout.readline()
                    if not answer:
                        raise SystemExit(f"{row['engine']}: stopped; --verbose shows why")
                    row[kind].append(tokens / float(answer))
            print(f"turn {turn + 1} of {args.repeats}", file=sys.stderr)
    finally:
        for row in rows:
            process = row.pop("process")
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kestrel", metavar="MODEL.kestrel")
    parser.add_argument("--gguf", metavar="FILE.gguf")
    parser.add_argument("--quantize", metavar="SOURCE.gguf")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-past", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "FILE", "THREADS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        engine, path, threads = args.worker
        return worker(engine, path, int(threads), args)
    if args.quantize:
        quantize(args.quantize, args.gguf)
    if not (args.kestrel or args.gguf):
        parser.error("give --kestrel, --gguf or both")
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"load average {load:.1f}: something else runs here, and engines whose threads spin (llama.cpp with OpenMP) "
              "suffer most; repeat when the machine is quiet", file=sys.stderr)
    rows = measure(args)
    for row in rows:
        for kind in ("prefill", "decode"):
            row[kind] = {"median": median(row[kind]), "slowest": min(row[kind]), "fastest": max(row[kind]),
                         "all": row[kind]}
    if args.json:
        print(json.dumps({"unit": "tokens per second", "prompt_tokens": args.prompt_tokens,
                          "decode_past": args.decode_past, "tokens": args.tokens, "load_average_before": load,
                          "rows": rows}))
        return None
    print(f"{'engine':<10} {'threads':>7} {f'prefill {args.prompt_tokens}':>24} {f'decode {args.tokens}':>24}")
    for row in rows:
        shown = ["{median:.1f} ({slowest:.1f}-{fastest:.1f})".format(**row[kind]) for kind in ("prefill", "decode")]
        print(f"{row['engine']:<10} {row['threads']:>7} {shown[0]:>24} {shown[1]:>24}")
    return None


if __name__ == "__main__":
    main()
