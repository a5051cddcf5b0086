# SPDX-License-Identifier: Apache-2.0
"""Drafters: guess the next tokens cheaply, from what is already known. A wrong guess costs time, never correctness."""
from __future__ import annotations

from typing import Dict, List, Protocol, Sequence, Tuple


class Drafter(Protocol):
    """One request's drafter. It is told every token of prompt and answer once, in order, and asked for a continuation of them."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that are now certain."""

    def propose(self, most: int) -> List[int]:
        """Up to `most` tokens that may follow the last certain one; empty when there is no good guess."""


class PromptLookup:
    """Prompt lookup (Saxena 2023): the continuation of an earlier occurrence of the last tokens.

    The longest of `sizes` that matches wins, then the newest occurrence. Per token: one dictionary entry and one look-up for each size,
    whatever the history's length. A continuation that reaches the end of the history goes on with its own guesses (a loop).
    """

    def __init__(self, sizes: Sequence[int] = (8, 5, 3, 2)):
        self._sizes = tuple(sorted(sizes, reverse=True))
        self._history: List[int] = []
        self._after: Dict[Tuple[int, ...], int] = {}  # n-gram -> index of the token after its newest occurrence
        self._match = 0  # where the longest match of the history's end goes on; 0: no match

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        history, after = self._history, self._after
        for token in tokens:
            history.append(token)
            end = len(history)
            self._match = 0
            for size in self._sizes:
                if size > end:
                    continue
                key = tuple(history[end - size:])
                earlier = after.get(key, 0)
                after[key] = end
                self._match = self._match or earlier

    def propose(self, most: int) -> List[int]:
        """See Drafter."""
        if not self._match or most < 1:
            return []
        draft = self._history[self._match:self._match + most]
        period = len(self._history) - self._match
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        return draft


class NoDraft:
    """Plain decoding: the draft is always empty."""

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, most: int) -> List[int]:
        """See Drafter."""
        return []
