# SPDX-License-Identifier: Apache-2.0
"""Checked reading of a mapping that comes from outside: each value has a type and a range, each error one line."""
from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Tuple

from .errors import KestrelError

_LIMIT = 1 << 24  # no real model has a larger count of anything; a larger number is a broken or hostile file


class Fields:
    """A mapping read from outside, with the file and the file's own spelling of each key for the messages."""

    def __init__(self, values: Mapping[str, Any], file: str, spelling: Optional[Mapping[str, str]] = None):
        if not isinstance(values, Mapping):
            raise KestrelError(f"{file}: expected an object, found {type(values).__name__}")
        self.values, self.file, self.spelling = values, file, spelling or {}

    def fail(self, key: str, expected: str, found: Any) -> KestrelError:
        """The error that names file and key, what was expected and what was found."""
        text = "nothing" if found is None else repr(found)
        text = text if len(text) <= 80 else text[:77] + "..."
        return KestrelError(f"{self.file}: {self.spelling.get(key, key)}: expected {expected}, found {text}")

    def get(self, key: str) -> Any:
        """The value as it stands, None where there is none."""
        return self.values.get(key)

    def integer(self, key: str, default: Optional[int] = None, low: int = 1, high: int = _LIMIT) -> int:
        """An integer from low to high; null counts as absent."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, default: Optional[float] = None, low: float = 0.0, above: bool = True) -> float:
        """A finite number above `low` (or from it on) that float32 can hold."""
        value = self.values.get(key)
        value = default if value is None else value
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            good = good and math.isfinite(float(value)) and (value > low if above else value >= low)
        except OverflowError:
            good = False
        # float32 is what the kernels read: anything it can't hold would become Inf or 0 there
        if not good or (value != 0 and not 1e-37 < abs(value) < 3e38):
            raise self.fail(key, f"a number {'above' if above else 'from'} {low:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, "true or false", value)
        return value

    def token_ids(self, key: str, vocab_size: int) -> Tuple[int, ...]:
        """One id or a list of ids below vocab_size; () when absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, (list, tuple)) else [value]
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
                raise self.fail(key, f"token ids from 0 to {vocab_size - 1}", value)
        return tuple(ids)
