# SPDX-License-Identifier: Apache-2.0
"""How fast a packed model runs here, and how near that is to what the memory allows.

Four kinds of measurement: `bandwidth` (a read-only probe on the model's own threads), `prefill` and `decode` at several depths, and
`verify`, the cost of a pass of w rows with the logits of all of them, relative to w = 1. Everything is measured in rounds: each round
takes its turn at every thread count, depth and width, so that a change of clock or load meets all alike. All samples are kept.
"""
from __future__ import annotations

import os
import time
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _native
from ._native import ffi, lib
from .cores import default_threads
from .errors import KestrelError
from .model import KV_TYPES, MAX_DRAFT, ForwardModel, KVCache
from .sampling import Sampling
from .pack import PackedModel, matrices
from .telemetry import marks, moving

CHUNK = 256        # rows of a prefill pass: the product's default
BUFFER = 256 << 20  # bytes of the probe's own buffer: more than any cache holds
_PROBES = 3        # probes of each region in a round: each is short
_VERIFY_STEPS = 4  # passes of each width in a round
_PAUSE = 0.01      # seconds in which the last model's workers stop spinning and sleep


class Plan(NamedTuple):
    """What to measure. depths: positions in the cache before; widths: rows of a verify pass; prefill, decode: tokens of one sample."""

    threads: Sequence[int] = ()  # empty: the product's default
    depths: Sequence[int] = (0, 512, 2048)
    widths: Sequence[int] = (1, 2, 3, 4, 5, 8, 16)
    samples: int = 5
    prefill: int = 512
    decode: int = 32
    buffer: int = BUFFER


def read_probe(model: ForwardModel, address: Any, size: int) -> Tuple[float, int]:
    """Reads `size` bytes at a cffi address with all threads of the model. Returns (wall seconds, sum of the 64-bit words mod 2^64)."""
    seconds, total = ffi.new("double *"), ffi.new("uint64_t *")
    with model.lock:
        _native.check(lib.kestrel_read_probe(model._handle, address, size, seconds, total), f"probe of {size} bytes")
    return seconds[0], total[0]


def weights_region(packed: PackedModel) -> Tuple[Any, int]:
    """(cffi address, bytes) of all matrices as they lie in the mapped file, one after the other."""
    pointers = [(ffi.from_buffer("uint8_t[]", packed.array(m.name)), packed.array(m.name).nbytes) for m in matrices(packed.config)]
    begin = min((p for p, _ in pointers), key=lambda p: int(ffi.cast("uintptr_t", p)))
    end = max(int(ffi.cast("uintptr_t", p)) + size for p, size in pointers)
    return begin, end - int(ffi.cast("uintptr_t", begin))


def bytes_per_token(packed: PackedModel, kv: KVCache, positions: float) -> float:
    """Bytes that a decoded token reads: every weight once (of an untied embedding one row: nothing), and K and V of `positions` positions."""
    return packed.weight_bytes + kv.position_bytes * positions


class Runs:
    """Single samples of one model at one thread count; each leaves the cache as it was."""

    def __init__(self, model: ForwardModel):
        self.model, self._greedy = model, Sampling()
        vocab = model.config.vocab_size
        self._ids = [(i * 7919 + 13) % vocab for i in range(4096)]

    def tokens(self, begin: int, count: int) -> List[int]:
        """Ids for positions [begin, begin + count): the same whenever a position is met again."""
        return [self._ids[i % len(self._ids)] for i in range(begin, begin + count)]

    def fill(self, kv: KVCache, count: int) -> None:
        """Appends `count` positions in passes of CHUNK rows; of the last one the next token is chosen."""
        ids = self.tokens(kv.length, count)
        for at in range(0, count, CHUNK):
            last = at + CHUNK >= count
            self.model.forward(kv, ids[at:at + CHUNK], wanted=int(last))
            if last:
                self.model.sample(0, self._greedy, kv.length)

    def prefill(self, kv: KVCache, count: int) -> float:
        """Tokens a second."""
        depth = kv.length
        begin = time.perf_counter()
        self.fill(kv, count)
        seconds = time.perf_counter() - begin
        kv.rewind(depth)
        return count / seconds

    def decode(self, kv: KVCache, count: int) -> float:
        """Tokens a second of greedy decoding, one pass a token."""
        depth, model, greedy = kv.length, self.model, self._greedy
        token = self.tokens(depth, 1)[0]
        begin = time.perf_counter()
        for _ in range(count):
            model.forward(kv, (token,), wanted=1)
            token = model.sample(0, greedy, kv.length)
        seconds = time.perf_counter() - begin
        kv.rewind(depth)
        return count / seconds

    def verify(self, kv: KVCache, width: int) -> float:
        """Seconds of one pass of `width` rows, logits of all of them."""
        depth = kv.length
        ids = self.tokens(depth, width)
        begin = time.perf_counter()
        self.model.forward(kv, ids, wanted=width)
        seconds = time.perf_counter() - begin
        kv.rewind(depth)
        return seconds

    def warm_up(self, kv: KVCache, plan: Plan, prefill: int) -> None:
        """A prefill, every width once, then decoding until three runs agree within 2 % (eight at most)."""
        if prefill:
            self.prefill(kv, prefill)
        for width in plan.widths:
            self.verify(kv, width)
        runs: List[float] = []
        while len(runs) < 3 or (max(runs[-3:]) > 1.02 * min(runs[-3:]) and len(runs) < 8):
            runs.append(self.decode(kv, plan.decode))


def checked(plan: Plan, kv_type: Optional[str], limit: int, note: Callable[[str], None]) -> Plan:
    """The plan without repetitions, with width 1, and without depths that the context has no room for. KestrelError: a number out of its range."""
    if kv_type is not None and kv_type not in KV_TYPES:
        raise KestrelError(f"kv type: expected one of {', '.join(KV_TYPES)}, found {kv_type!r}")
    for name, values, least, most in (("threads", plan.threads, 1, 256), ("depths", plan.depths, 0, 1 << 24),
                                      ("widths", plan.widths, 1, CHUNK + MAX_DRAFT), ("samples", (plan.samples,), 1, 10000),
                                      ("prefill", (plan.prefill,), 1, 1 << 24), ("decode", (plan.decode,), 1, 1 << 24), ("buffer", (plan.buffer,), 8, 1 << 40)):
        for value in values:
            if not least <= value <= most:
                raise KestrelError(f"{name}: expected {least} to {most}, found {value}")
    widths = sorted({1, *plan.widths})
    room = max(plan.decode, widths[-1])
    depths = sorted(set(plan.depths))
    for depth in depths:
        if depth + room > limit:
            note(f"depth {depth}: left out, {room} tokens more do not fit in the model's context of {limit}")
        elif depth + plan.prefill > limit:
            note(f"prefill at depth {depth}: left out, {plan.prefill} tokens more do not fit in the model's context of {limit}")
    return plan._replace(threads=sorted(set(plan.threads) or {default_threads()}), widths=widths,
                         depths=[d for d in depths if d + room <= limit])


def _probe_threads(threads: Sequence[int]) -> List[int]:
    """Thread counts for the probe: on some boards fewer threads read faster than all."""
    most = max(threads)
    return sorted({*range(1, min(most, 8) + 1), *threads})


def bench(path: Any, plan: Plan = Plan(), kv_type: Optional[str] = None, progress: Callable[[int, int], None] = lambda done, total: None,
          note: Callable[[str], None] = lambda text: None, look: Callable[[], Dict[str, Any]] = moving) -> List[Dict[str, Any]]:
    """Measures a packed model (a path, or a PackedModel) as the plan says, with the product's own defaults.

    One dictionary a measurement: kind, threads, depth, width or tokens, median, samples, unit, and what was measured (model, source,
    weights, kv_type, isa). A bandwidth (GB/s) says what was read: `of` weights or buffer. A decode has bytes_per_token, bandwidth and
    bandwidth_fraction: its bytes a second over the best median that the probe reached with as many threads or fewer. A verify (s) has
    ratio: its median over that of width 1. marks: what spoiled samples of a row, as `telemetry.marks` says; mhz: {cluster: clock, the least seen right
    after a sample}. look() -> `telemetry.moving`. progress(rounds done, in all); note(text) says what was left out. KestrelError: bad input.
    """
    import numpy as np

    packed = path if isinstance(path, PackedModel) else PackedModel(path)
    limit = packed.config.max_position_embeddings
    plan = checked(plan, kv_type, limit, note)
    runs = {t: Runs(ForwardModel(packed, threads=t, max_rows=CHUNK + MAX_DRAFT, kv_type=kv_type)) for t in plan.threads}  # type: ignore[arg-type]
    most = runs[plan.threads[-1]]
    probes = {t: runs[t].model if t in runs else ForwardModel(packed, threads=t, max_rows=1) for t in _probe_threads(plan.threads)}  # type: ignore[arg-type]
    buffer = np.full(plan.buffer, 1, np.uint8)  # written, so that it is memory and not the one page of zeros
    regions = {"weights": weights_region(packed), "buffer": (ffi.from_buffer("uint8_t[]", buffer), buffer.nbytes)}

    # One cache a depth for all thread counts (a row's bits do not depend on them); the deepest is filled, the others are its beginning.
    prefill = {d: plan.prefill if d + plan.prefill <= limit else 0 for d in plan.depths}
    caches: Dict[int, KVCache] = {}
    for depth in reversed(plan.depths):
        kv = caches[depth] = most.model.new_kv(depth + max(prefill[depth], plan.decode, plan.widths[-1]))
        if depth and len(caches) == 1:
            most.fill(kv, depth)
        elif depth:
            kv.append(caches[plan.depths[-1]].export(0, depth), depth)

    samples: Dict[Tuple[Any, ...], List[float]] = {}

    fresh: List[Tuple[Any, ...]] = []  # rows with samples since the last look at the board
    spoiled: Dict[Tuple[Any, ...], List[str]] = {}
    clocks: Dict[Tuple[Any, ...], Dict[str, int]] = {}
    last = look()

    def keep(value: float, *key: Any) -> None:
        samples.setdefault(key, []).append(value)
        fresh.append(key)

    def look_again() -> None:
        nonlocal last
        now = look()
        found = marks(last, now)
        for key in dict.fromkeys(fresh):
            spoiled[key] = list(dict.fromkeys(spoiled.get(key, []) + found))
            for cluster in now["clusters"]:
                if cluster["mhz"] is not None:
                    seen = clocks.setdefault(key, {})
                    seen[cluster["name"]] = min(cluster["mhz"], seen.get(cluster["name"], cluster["mhz"]))
        fresh.clear()
        last = now

    for t in plan.threads:
        for depth in plan.depths[:1]:
            time.sleep(_PAUSE)
            runs[t].warm_up(caches[depth], plan, prefill[depth])
    for model in probes.values():
        for region in regions.values():
            read_probe(model, *region)
    for done in range(plan.samples):
        progress(done, plan.samples)
        for t, model in probes.items():
            time.sleep(_PAUSE)
            for _ in range(_PROBES):
                for of, (address, size) in regions.items():
                    keep(size / read_probe(model, address, size)[0] / 1e9, "bandwidth", t, of)
            look_again()
        for t in plan.threads:
            time.sleep(_PAUSE)
            for depth in plan.depths:
                kv = caches[depth]
                if prefill[depth]:
                    keep(runs[t].prefill(kv, prefill[depth]), "prefill", t, depth, prefill[depth])
                    look_again()
                keep(runs[t].decode(kv, plan.decode), "decode", t, depth, plan.decode)
                look_again()
                for turn in range(_VERIFY_STEPS):
                    for i in range(len(plan.widths)):  # another width is the first one each time
                        width = plan.widths[(i + turn) % len(plan.widths)]
                        keep(runs[t].verify(kv, width), "verify", t, depth, width)
                look_again()
    progress(plan.samples, plan.samples)

    about = {"model": os.path.basename(packed.path), "source": packed.source, "weights": packed.weight_type, "kv_type": most.model.kv_type,
             "isa": most.model.isa}
    results: List[Dict[str, Any]] = []
    for key in sorted(samples, key=lambda k: (("bandwidth", "prefill", "decode", "verify").index(k[0]), *k[1:])):
        kind, t = key[:2]
        row: Dict[str, Any] = {"kind": kind, "threads": t, "depth": None if kind == "bandwidth" else key[2]}
        middle = median(samples[key])
        if kind == "bandwidth":
            row.update(of=key[2], bytes=regions[key[2]][1], unit="GB/s")
        elif kind == "verify":
            row.update(width=key[3], unit="s", ratio=middle / median(samples[kind, t, key[2], 1]))
        else:
            row.update(tokens=key[3], unit="tokens/s")
        if kind == "decode":
            read = bytes_per_token(packed, caches[key[2]], key[2] + (key[3] + 1) / 2)
            best = max(median(s) for k, s in samples.items() if k[0] == "bandwidth" and k[1] <= t)
            row.update(bytes_per_token=read, bandwidth=best, bandwidth_fraction=read * middle / 1e9 / best)
        row.update(median=middle, slowest=min(samples[key]), fastest=max(samples[key]), samples=samples[key], marks=spoiled[key], mhz=clocks.get(key, {}), **about)
        if kind == "verify":
            row.update(slowest=row["fastest"], fastest=row["slowest"])
        results.append(row)
    return results


def markdown(results: Sequence[Dict[str, Any]]) -> str:
    """The measurements of `bench` as tables for people: medians, in brackets slowest to fastest."""
    first = results[0]

    def shown(row: Dict[str, Any], scale: float = 1.0, digits: int = 1) -> str:
        return f"{row['median'] * scale:.{digits}f} ({row['slowest'] * scale:.{digits}f}..{row['fastest'] * scale:.{digits}f})"

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
        return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]

    by = {(r["kind"], r["threads"], r["depth"], r.get("of") or r.get("width")): r for r in results}
    lines = [f"{first['model']}: {first['weights']} weights, {first['kv_type']} cache, {first['isa']}; "
             "median (slowest..fastest)", ""]
    threads = sorted({r["threads"] for r in results if r["kind"] == "bandwidth"})
    lines += table(["threads", "read weights, GB/s", "read buffer, GB/s"],
                   [[str(t)] + [shown(by["bandwidth", t, None, of]) for of in ("weights", "buffer")] for t in threads])
    decodes = [r for r in results if r["kind"] == "decode"]
    tokens = next((r["tokens"] for r in results if r["kind"] == "prefill"), 0)
    rows = []
    for r in decodes:
        prefill = by.get(("prefill", r["threads"], r["depth"], None))
        rows.append([str(r["threads"]), str(r["depth"]), shown(prefill) if prefill else "-", shown(r), f"{100 * r['bandwidth_fraction']:.0f} %"])
    if rows:
        lines += table(["threads", "depth", f"prefill {tokens}, tokens/s" if tokens else "prefill", "decode, tokens/s", "of bandwidth"], rows)
    widths = sorted({r["width"] for r in results if r["kind"] == "verify"})
    curve = [[str(r["threads"]), str(r["depth"]), shown(by["verify", r["threads"], r["depth"], 1], 1e3, 2)]
             + [f"{by['verify', r['threads'], r['depth'], w]['ratio']:.2f}" for w in widths[1:]] for r in decodes]
    if curve:
        lines += table(["threads", "depth", "c(1), ms"] + [f"c({w})/c(1)" for w in widths[1:]], curve)
    return "\n".join(lines[:-1])
