#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""int4 weights beside llama.cpp's Q4_0 of the same float weights: mean KL against the float model, weights alone and as each engine runs.

    python board/compare_quality.py SOURCE.gguf [--folder DIR] [--text FILE] [--seed N] [--json]

Needs the packages llama-cpp-python and gguf. SOURCE may lie on a 4-bit grid (small models are published so), on which a format of that
grid would win for nothing: so the float reference is SOURCE's layers plus noise, uniform within half a step of a 4-bit grid with a
minimum (a 32-group's range / 15) to either side, from a seed. Both are made from that file: Q4_0 by llama.cpp's own quantiser (its
default mixture: the tied embedding gets more bits), int4 by `kestrel convert`. Rows of the result:

    weights only   both files' weights as float32, run by kestrel in float32: only their rounding differs
    as it runs     each engine on its own file: int8 activations and llama.cpp's arithmetic, or kestrel's, come on top

Text: `kestrel quality`'s own, or FILE. All its tokens in one context.
"""
from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kestrel import _native  # noqa: E402
from kestrel.cores import default_threads  # noqa: E402
from kestrel.convert import convert  # noqa: E402
from kestrel.generate import Model  # noqa: E402
from kestrel.pack import Matrix, PackedModel, write_packed  # noqa: E402
from kestrel.quality import default_text, quality  # noqa: E402

ROWS = 64


def dither(source: str, target: str, seed: int) -> None:
    """`source` as float32, its layers' matrices with noise."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for i, tensor in enumerate(reader.tensors):
        x = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if x.ndim == 2 and tensor.name.startswith("blk."):
            groups = x.reshape(-1, 32)
            step = (groups.max(1) - groups.min(1)) / np.float32(15)
            noise = np.random.Generator(np.random.PCG64([seed, i])).random(groups.shape, np.float32) - np.float32(0.5)
            x = (groups + noise * step[:, None]).reshape(x.shape)
        writer.add_tensor(tensor.name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.lru_cache(maxsize=None)
def _quiet() -> Any:
    """A log for llama.cpp that drops everything; kept, because llama.cpp keeps it."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def quantize(source: str, target: str) -> None:
    """Q4_0 with llama.cpp's defaults."""
    import llama_cpp

    llama_cpp.llama_log_set(_quiet(), ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"{source}: llama.cpp cannot quantise it")


def widen(source: str, target: str) -> None:
    """A packed model with the same weights as float32."""
    p = PackedModel(source)

    def blocks(m: Matrix):
        raw, weight = p.array(m.name), _native.ffi.new("kestrel_weight *")
        weight.type, weight.n, weight.k, weight.data = _native.TYPES[p.stored_type(m.name)], m.n, m.k, _native.ffi.from_buffer("uint8_t[]", raw)
        for begin in range(0, m.n, 512):
            yield begin, np.stack([_native.unpack_row(weight[0], r) for r in range(begin, min(begin + 512, m.n))])

    text = {name: p.text(name) for name in ("tokenizer.json", "tokenizer_config.json", "chat_template") if p.text(name) is not None}
    write_packed(target, p.config, "f32", p.source, p.calibration, text, lambda v: p.vector(v.name), blocks)  # type: ignore[arg-type]


def llama_cpp_quality(path: str, reference: str, text: str) -> Dict[str, Any]:
    """As `kestrel quality`, of llama.cpp's logits."""
    import llama_cpp

    llama_cpp.llama_log_set(_quiet(), ctypes.c_void_p(0))
    p = Model.load(reference)
    ids = p.encode(text)[:p.ctx]
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = len(ids)
    params.n_threads = params.n_threads_batch = default_threads()
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"{path}: llama_decode failed")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    kv, found = p.new_kv(len(ids), ROWS), []
    for at in range(0, len(ids) - 1, ROWS):
        rows = ids[at:at + ROWS]
        p.forward(kv, rows, wanted=len(rows))
        for i in range(min(len(rows), len(ids) - 1 - at)):
            theirs = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at + i), shape=(vocab,)).copy()
            found.append(_native.compare(p.logits(i), theirs, ids[at + i + 1]))
    kl = sorted(x[0] for x in found)
    return {"mean_kl": sum(kl) / len(kl), "p99_kl": kl[len(kl) * 99 // 100], "argmax_agreement": sum(x[3] for x in found) / len(found),
            "positions": len(found)}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("source")
    ap.add_argument("--folder", help="keep what is made here (about 2 GB for a model of 135M)")
    ap.add_argument("--text", metavar="FILE")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    text = Path(a.text).read_text(encoding="utf-8") if a.text else default_text()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(a.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        at = lambda name: str(folder / name)  # noqa: E731
        steps = [("float.gguf", lambda t: dither(a.source, t, a.seed)), ("q4_0.gguf", lambda t: quantize(at("float.gguf"), t)),
                 ("float.kestrel", lambda t: convert(at("float.gguf"), t, "f32")), ("q4_0.kestrel", lambda t: convert(at("q4_0.gguf"), t, "f32")),
                 ("int4.kestrel", lambda t: convert(at("float.gguf"), t, "int4")), ("int4-f32.kestrel", lambda t: widen(at("int4.kestrel"), t))]
        for name, make in steps:
            if not os.path.exists(at(name)):
                print(f"{name} ...", file=sys.stderr, flush=True)
                make(at(name))
        rows: List[Dict[str, Any]] = []
        for what, weights, result in (
                ("weights only", "Q4_0", lambda: quality(at("q4_0.kestrel"), at("float.kestrel"), text)),
                ("weights only", "int4", lambda: quality(at("int4-f32.kestrel"), at("float.kestrel"), text)),
                ("as it runs", "Q4_0", lambda: llama_cpp_quality(at("q4_0.gguf"), at("float.kestrel"), text)),
                ("as it runs", "int4", lambda: quality(at("int4.kestrel"), at("float.kestrel"), text))):
            rows.append({"what": what, "weights": weights, **result()})
            row = rows[-1]
            if a.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{what:13} {weights}: mean KL {row['mean_kl']:.4f}, p99 {row['p99_kl']:.3f}, argmax agrees {row['argmax_agreement']:.3f}, "
                      f"{row['positions']} positions", flush=True)
        for i in (0, 2):
            if not a.json:
                print(f"{rows[i]['what']}: int4's mean KL is {rows[i + 1]['mean_kl'] / rows[i]['mean_kl']:.3f} of Q4_0's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
