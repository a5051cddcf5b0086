# SPDX-License-Identifier: Apache-2.0
"""`kestrel bench` as a whole: what the board is, cold start, thread counts, the measurements under watch, where speculation pays.

Rows in the order they are made, each a line of JSON: telemetry (before), start, choice, what `bench` measures, speculation, telemetry (during, after).
"""
from __future__ import annotations

import os
import time
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from . import telemetry
from .bench import CHUNK, Plan, Runs, bench, checked
from .boundary import boundary
from .cores import choose_cores
from .model import MAX_DRAFT, ForwardModel
from .pack import PackedModel
from .startup import startup
from .workloads import Workload, builtin_workloads

_CHOICE_ROUNDS = 3
_CHOICE_DECODE, _CHOICE_PREFILL = 16, 64  # tokens of a sample
_ENOUGH = 0.97       # of the best: fewer threads that reach it are preferred
_SPECULATION = 48    # tokens of an answer
_KINDS = ("rewrite code", "story")  # text that is copied with changes, and ordinary text


class Watch:
    """Reads the board beside the samples and keeps the extremes."""

    def __init__(self, root: str = "/"):
        self._root = root
        self.hottest: Dict[str, float] = {}
        self.slowest: Dict[str, int] = {}
        self.fastest: Dict[str, int] = {}
        self.throttled: List[str] = []

    def look(self) -> Dict[str, Any]:
        """`telemetry.moving`, remembered."""
        found = telemetry.moving(self._root)
        for zone, degrees in found["temperatures"].items():
            self.hottest[zone] = max(degrees, self.hottest.get(zone, degrees))
        for cluster in found["clusters"]:
            name, mhz = cluster["name"], cluster["mhz"]
            if mhz is not None:
                self.slowest[name], self.fastest[name] = min(mhz, self.slowest.get(name, mhz)), max(mhz, self.fastest.get(name, mhz))
        self.throttled += [text for text in found["throttling"]["now"] if text not in self.throttled]
        return found

    def row(self) -> Dict[str, Any]:
        """Of kind "telemetry": hottest by zone, MHz seen by cluster, what held the clocks down."""
        return {"kind": "telemetry", "when": "during", "temperatures": self.hottest, "throttled": self.throttled,
                "mhz": {name: [self.slowest[name], self.fastest[name]] for name in self.slowest}}


def choose_threads(packed: PackedModel, kv_type: Optional[str], counts: Sequence[int]) -> List[Dict[str, Any]]:
    """Two rows of kind "choice", for decode and prefill: tokens/s by thread count, each count in turn, and the fewest threads that come
    within 3 % of the best."""
    runs = {t: Runs(ForwardModel(packed, threads=t, max_rows=CHUNK + MAX_DRAFT, kv_type=kv_type)) for t in counts}  # type: ignore[arg-type]
    room = packed.config.max_position_embeddings
    tokens = {"decode": min(_CHOICE_DECODE, room), "prefill": min(_CHOICE_PREFILL, room)}
    samples: Dict[str, Dict[int, List[float]]] = {"decode": {}, "prefill": {}}
    kv = runs[counts[0]].model.new_kv(max(tokens.values()))
    for turn in range(1 + _CHOICE_ROUNDS):
        for t, run in runs.items():
            time.sleep(0.01)  # the last model's workers stop spinning
            for phase, sample in (("prefill", run.prefill), ("decode", run.decode)):
                speed = sample(kv, tokens[phase])
                if turn:
                    samples[phase].setdefault(t, []).append(speed)
    rows = []
    for phase, found in samples.items():
        speeds = {t: median(values) for t, values in found.items()}
        best = max(speeds.values())
        rows.append({"kind": "choice", "phase": phase, "threads": min(t for t, s in speeds.items() if s >= _ENOUGH * best),
                     "by_threads": {str(t): s for t, s in speeds.items()}, "samples": {str(t): values for t, values in found.items()}, "unit": "tokens/s"})
    return rows


def _two_kinds() -> List[Workload]:
    """One prompt each of the report's own."""
    works = {w.name: w for w in builtin_workloads()}
    return [works[name]._replace(dialogues=works[name].dialogues[:1]) for name in _KINDS]


def measure(path: str, plan: Plan, kv_type: Optional[str] = None, brief: bool = False, text: bool = True,
            progress: Callable[[int, int], None] = lambda done, total: None, note: Callable[[str], None] = lambda text: None, root: str = "/") -> Iterator[Dict[str, Any]]:
    """Yields the rows. brief: `bench`'s own and telemetry alone. text: the model answers in words, so speculation can be measured."""
    config = PackedModel(path).config  # a bad file, or a plan that can't be, is said first; nothing stays mapped, or it could not become cold
    checked(plan, kv_type, config.max_position_embeddings, lambda text: None)
    before = telemetry.snapshot(root, path)
    yield {"kind": "telemetry", "when": "before", "path": os.path.abspath(path), **before}
    for said in telemetry.advice(before):
        note(said)
    if not brief:
        yield from startup(path, min(plan.samples, 3), note)
    packed, watch = PackedModel(path), Watch(root)
    if not brief and not plan.threads:
        cores = choose_cores()
        choice = choose_threads(packed, kv_type, range(1, min(cores.threads, 8) + 1))
        yield from choice
        plan = plan._replace(threads=sorted({cores.threads, *(row["threads"] for row in choice)}))
    yield from bench(packed, plan, kv_type, progress, note, watch.look)
    if text and not brief:
        yield from boundary(path, _two_kinds(), _SPECULATION, 1, plan.threads[-1] if plan.threads else None, kv_type, note=note)
    watch.look()
    yield watch.row()
    yield {"kind": "telemetry", "when": "after", **telemetry.snapshot(root, path)}
