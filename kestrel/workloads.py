# SPDX-License-Identifier: Apache-2.0
"""Workloads: prompts by kind of text, for the boundary report."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .errors import KestrelError

_MOST = 64 << 20  # bytes of a file of prompts


class Workload(NamedTuple):
    """Prompts of one kind. dialogues: the user's turns of each; drafter: None (the session's own), "wrong" or "right" (always)."""

    name: str
    dialogues: Sequence[Tuple[str, ...]]
    drafter: Optional[str] = None


def _workloads(records: Sequence[Tuple[str, Any]]) -> List[Workload]:
    """Records (where they stand, value) in Spec-Bench's form: category and turns; one workload a category, in order of appearance."""
    found: Dict[Tuple[str, Optional[str]], List[Tuple[str, ...]]] = {}
    seen: Dict[Tuple[str, ...], str] = {}
    for where, record in records:
        if not isinstance(record, dict):
            raise KestrelError(f"{where}: expected an object with category and turns, found {type(record).__name__}")
        category, turns = record.get("category"), record.get("turns")
        if not isinstance(category, str) or not category.strip():
            raise KestrelError(f"{where}: category: expected a text, found {category!r:.60}")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise KestrelError(f"{where}: turns: expected a list of texts, found {turns!r:.60}")
        drafter = record.get("drafter")
        if drafter not in (None, "wrong", "right"):
            raise KestrelError(f"{where}: drafter: expected wrong, right or nothing, found {drafter!r:.60}")
        dialogue = tuple(turns)
        if dialogue in seen:  # a prompt seen before would not be fresh
            raise KestrelError(f"{where}: expected a prompt of its own, found the one of {seen[dialogue]}")
        seen[dialogue] = where
        found.setdefault((category, drafter), []).append(dialogue)
    return [Workload(name, dialogues, drafter) for (name, drafter), dialogues in found.items()]


def builtin_workloads() -> List[Workload]:
    """The eight kinds of the report and the drafter that is always right, from workloads.json."""
    path = Path(__file__).with_name("workloads.json")
    return _workloads([(f"{path.name}: {i}", record) for i, record in enumerate(json.loads(path.read_text(encoding="utf-8")))])


def read_workloads(path: str) -> List[Workload]:
    """A *.jsonl file in Spec-Bench's form (question_id, category, turns; a record a line), or a folder of such. KestrelError: bad file."""
    try:
        files = sorted(str(p) for p in Path(path).iterdir() if p.suffix == ".jsonl") if os.path.isdir(path) else [path]
        if not files:
            raise KestrelError(f"{path}: expected *.jsonl files, found none")
        records: List[Tuple[str, Any]] = []
        for name in files:
            if os.path.getsize(name) > _MOST:
                raise KestrelError(f"{name}: expected at most {_MOST} bytes of prompts, found {os.path.getsize(name)}")
            with open(name, "rb") as file:
                for number, line in enumerate(file, 1):
                    where = f"{name}: line {number}"
                    if not line.strip():
                        continue
                    try:
                        records.append((where, json.loads(line.decode("utf-8"))))
                    except (ValueError, RecursionError) as error:
                        raise KestrelError(f"{where}: not JSON: {error}") from None
    except OSError as error:
        raise KestrelError(f"{error.filename or path}: {error.strerror or error}") from None
    if not records:
        raise KestrelError(f"{path}: expected prompts, found none")
    return _workloads(records)


def every(workloads: Sequence[Workload], n: int) -> List[Workload]:
    """Every n-th dialogue of each workload, the first one always: a shorter report over the same kinds of text."""
    return [work._replace(dialogues=work.dialogues[::n]) for work in workloads]
