# SPDX-License-Identifier: Apache-2.0
"""What a packed model is, what would run it here, and what memory it takes against what there is."""
from __future__ import annotations

from typing import Any, Dict, Optional

from . import _native
from .generate import Model
from .memory import Footprint, available_bytes, mib
from .model import KV_TYPES, kv_position_bytes


def info(path: str, ctx: Optional[int] = None, kv_type: Optional[str] = None) -> Dict[str, Any]:
    """The object that `kestrel info --json` prints; bytes unless a name says otherwise.

    memory: what `generate` would need at `ctx` (default: the model's, or as much as fits), by cache type, and the longest context that fits.
    KestrelError: bad file, ctx out of the model's range.
    """
    model = Model.load(path, ctx=ctx, kv_type=kv_type, fit=False)
    packed, c = model.packed, model.config
    available = available_bytes()
    fits = {kind: model.longest_ctx(available, kind) for kind in KV_TYPES}
    at = model.ctx if ctx is not None else max(1, min(model.ctx, fits[model.kv_type]))
    return {
        "path": packed.path, "architecture": c.architecture, "weights": packed.weight_type, "file_bytes": packed.file_bytes,
        "weight_bytes": packed.weight_bytes, "kv_bytes_per_token": kv_position_bytes(c, model.kv_type),
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size, "max_position_embeddings": c.max_position_embeddings, "source": packed.source,
        "chat_template": model.chat_template is not None, "isa": model.isa, "isa_available": _native.isa_names(),
        "kernels": _native.variants(model.isa), "threads": model.threads,
        "memory": {"available": available, "ctx": at, "kv_type": model.kv_type, "weights": packed.file_bytes, "scratch": model.footprint(at).scratch,
                   "kv": {kind: model.kv_bytes(at, kv_type=kind) for kind in KV_TYPES}, "longest_ctx": fits},
    }


def footprint(found: Dict[str, Any]) -> Footprint:
    """Of the cache type asked for, from what `info` found."""
    m = found["memory"]
    return Footprint(m["weights"], m["kv"][m["kv_type"]], m["scratch"], m["ctx"])


def text(found: Dict[str, Any]) -> str:
    """The same for people."""
    m = found["memory"]
    kernels = ", ".join(f"{op} {name}" for op, name in found["kernels"].items() if name != "portable")
    caches = ", ".join(f"{kind} {mib(size)}" for kind, size in m["kv"].items())
    available = "unknown" if m["available"] is None else mib(max(m["available"], 0))
    longest = ", ".join(f"{kind} {n}" for kind, n in m["longest_ctx"].items())
    return "\n".join((
        f"{found['path']}: {found['architecture']}, {found['weights']} weights, {found['file_bytes'] / 1e6:.1f} MB",
        f"  {found['num_hidden_layers']} layers, hidden {found['hidden_size']}, {found['num_attention_heads']} heads on {found['num_key_value_heads']} kv heads of "
        f"{found['head_dim']}, mlp {found['intermediate_size']}, vocabulary {found['vocab_size']}, context {found['max_position_embeddings']}, "
        f"{'with a' if found['chat_template'] else 'no'} chat template",
        f"  read per token: {found['weight_bytes'] / 1e6:.1f} MB of weights; cache: {found['kv_bytes_per_token'] / 1024:.1f} KiB a position ({m['kv_type']})",
        f"  memory at {m['ctx']} positions: {mib(footprint(found).total)} of {available} available: weights {mib(m['weights'])}, scratch {mib(m['scratch'])}, cache {caches}",
        f"  longest context that fits: {longest}",
        f"  here: {found['isa']} of {', '.join(found['isa_available'])} ({kernels or 'portable kernels'}), {found['threads']} threads"))
