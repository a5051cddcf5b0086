# SPDX-License-Identifier: Apache-2.0
"""Suffix automaton: every substring of a token sequence as a path, built online in amortised constant time a token."""
from __future__ import annotations

from typing import Dict, List

_COUNTED = 16  # states of the suffix chain whose counts a token raises: longest first, so what is left out are the shortest contexts


class SuffixAutomaton:
    """Suffix automaton (Blumer et al. 1985) with frequencies, over tokens told one after the other.

    A state stands for substrings that occur at the same places; at most two states a token. `count` is how often a state's substrings
    occurred (exact but for contexts deeper than 16 on the suffix chain of a loop, where it is too small).
    """

    def __init__(self) -> None:
        self._length = [0]  # of the longest substring of the state
        self._link = [-1]   # state of its longest suffix that occurs elsewhere too
        self._next: List[Dict[int, int]] = [{}]
        self._count = [0]
        self._last = 0

    @property
    def states(self) -> int:
        """How many states there are: what the memory goes by."""
        return len(self._length)

    @property
    def match(self) -> int:
        """Length of the longest suffix of what was told that occurred before."""
        return self._length[self._link[self._last]] if self._last else 0

    def append(self, token: int) -> None:
        """Takes the next token."""
        length, link, following, count = self._length, self._link, self._next, self._count
        state, p = len(length), self._last
        length.append(length[p] + 1)
        following.append({})
        count.append(0)
        while p >= 0 and token not in following[p]:
            following[p][token] = state
            p = link[p]
        if p < 0:
            link.append(0)
        else:
            q = following[p][token]
            if length[q] == length[p] + 1:
                link.append(q)
            else:
                clone = state + 1
                link.append(clone)
                length.append(length[p] + 1)
                link.append(link[q])
                following.append(following[q].copy())
                count.append(count[q])
                while p >= 0 and following[p].get(token) == q:
                    following[p][token] = clone
                    p = link[p]
                link[q] = clone
        self._last = state
        for _ in range(_COUNTED):
            if state <= 0:
                break
            count[state] += 1
            state = link[state]

    def continuation(self, most: int, least_share: float) -> List[int]:
        """Up to `most` tokens that followed the longest match, at each step the most frequent one.

        Ends where the product of the chosen tokens' shares of what followed falls below `least_share`. At the end of what was told it
        goes on from the longest suffix that occurred before (a loop).
        """
        link, following, count = self._link, self._next, self._count
        state = link[self._last]
        tokens: List[int] = []
        share = 1.0
        while state > 0 and len(tokens) < most:
            options = following[state]
            if not options:
                state = link[state]
                continue
            if len(options) == 1:
                (token, state), = options.items()
            else:
                best = total = 0
                token = target = -1
                for option, reached in options.items():
                    n = count[reached]
                    total += n
                    if n >= best:  # of equals the one that was first seen last
                        best, token, target = n, option, reached
                share *= best / total if total else 0.0
                if share < least_share:
                    break
                state = target
            tokens.append(token)
        return tokens
