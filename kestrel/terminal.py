# SPDX-License-Identifier: Apache-2.0
"""What every command says and reads in the same way: notes and progress on stderr, JSON on stdout, numbers of options."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Callable, List


def positive(text: str) -> int:
    """An option's integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer from 1, found {text[:40]}")
    return value


def print_json(value: Any) -> None:
    """One line on stdout."""
    print(json.dumps(value, ensure_ascii=False))


def note(text: str) -> None:
    """One line on stderr."""
    print(f"kestrel: {text}", file=sys.stderr)


def progress_bar(unit: str, what: str, scale: bool = True) -> Callable[[int, int], None]:
    """progress(done, total) on stderr; nothing when stderr is not a terminal."""
    if not sys.stderr.isatty():
        return lambda done, total: None
    from tqdm import tqdm

    bar: List[Any] = []

    def update(done: int, total: int) -> None:
        if not bar:
            bar.append(tqdm(total=total, unit=unit, unit_scale=scale, desc=what, leave=False, file=sys.stderr))
        bar[0].update(done - bar[0].n)
        if done >= total:
            bar[0].close()

    return update
