# SPDX-License-Identifier: Apache-2.0
"""Drafters: guess the next tokens cheaply, from what is already known. A wrong guess costs time, never correctness."""
from __future__ import annotations

from bisect import bisect_right
from typing import Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from .errors import KestrelError
from .suffix import SuffixAutomaton

OWN_MATCH = 8  # a drafter of the user's that gives a plain list is trusted like a match of so many tokens, until it is known better


class Proposal(List[int]):
    """A draft that says where it comes from. source: the drafter's name; match: how many tokens before it spoke for it."""

    __slots__ = ("source", "match")

    def __init__(self, tokens: Sequence[int] = (), source: str = "", match: int = 0):
        super().__init__(tokens)
        self.source, self.match = source, match


class Drafter(Protocol):
    """One request's drafter. It is told every token of prompt and answer once, in order, and asked for a continuation of them."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that are now certain."""

    def propose(self, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow the last certain one; empty when there is no good guess. Any sequence, best a Proposal."""


class PromptLookup:
    """Prompt lookup (Saxena 2023): the continuation of an earlier occurrence of the last tokens.

    The longest of `sizes` that matches wins, then the newest occurrence. Per token: one dictionary entry and one look-up for each size,
    whatever the history's length. A continuation that reaches the end of the history goes on with its own guesses (a loop).
    At most 2 * ceiling entries are kept; the oldest go.
    """

    def __init__(self, sizes: Sequence[int] = (8, 5, 3, 2), ceiling: int = 1 << 16):
        self._sizes = tuple(sorted(sizes, reverse=True))
        self._history: List[int] = []
        self._after: Dict[Tuple[int, ...], int] = {}  # n-gram -> index of the token after its newest occurrence
        self._older: Dict[Tuple[int, ...], int] = {}
        self._ceiling = ceiling
        self._match = 0  # where the longest match of the history's end goes on; 0: no match
        self._size = 0

    @property
    def entries(self) -> int:
        """N-grams kept: what the memory goes by."""
        return len(self._after) + len(self._older)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        history, after, older = self._history, self._after, self._older
        for token in tokens:
            history.append(token)
            end = len(history)
            match = 0
            for size in self._sizes:
                if size > end:
                    continue
                key = tuple(history[end - size:])
                if not match:
                    match = after.get(key, 0) or older.get(key, 0)
                    self._size = size
                after[key] = end
            self._match = match
            if len(after) >= self._ceiling:
                older, after = after, {}
                self._older, self._after = older, after

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        if not self._match or most < 1:
            return Proposal()
        draft = Proposal(self._history[self._match:self._match + most], "lookup", self._size)
        period = len(self._history) - self._match
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        return draft


class SuffixDrafter:
    """The longest match in the whole session, continued by frequency (after SuffixDecoding, Oliaro et al. 2024).

    The draft grows with the match: at most 4 tokens and 2 a matched one. Memory is bounded by `ceiling` states: when an automaton is half
    full, a second one begins beside it and takes over when the first is full, so that no token ever waits for a rebuild.
    """

    def __init__(self, ceiling: int = 1 << 16, least_share: float = 0.25):
        self._ceiling, self._least_share = ceiling, least_share
        self._automaton = SuffixAutomaton()
        self._next: Optional[SuffixAutomaton] = None

    @property
    def states(self) -> int:
        """States kept: what the memory goes by; at most 2 * ceiling."""
        return self._automaton.states + (self._next.states if self._next else 0)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        for token in tokens:
            self._automaton.append(token)
            if self._next is not None:
                self._next.append(token)
                if self._automaton.states >= self._ceiling - 2:
                    self._automaton, self._next = self._next, None
            elif self._automaton.states >= self._ceiling // 2:
                self._next = SuffixAutomaton()

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        match = self._automaton.match
        if not match:
            return Proposal()
        return Proposal(self._automaton.continuation(min(most, 4 + 2 * match), self._least_share), "suffix", match)


class Resumption:
    """Copying with small changes: after tokens that differ in the middle of a copy of earlier text, that text from there on.

    A copy begins where the last 3 tokens occurred before (their newest place) and counts from 8 tokens on; up to 3 tokens that differ are
    taken for as many of its own. Proposes after such tokens only: an undisturbed copy is for the others to see. Per token a look-up and
    an entry; at most 2 * ceiling entries are kept, the oldest go.
    """

    _SIZE = 3
    _COPY = 8
    _LOST = 3
    _TRUST = 1  # the match it claims: one in two is right, until the request shows more

    def __init__(self, ceiling: int = 1 << 16) -> None:
        self._history: List[int] = []
        self._after: Dict[Tuple[int, ...], int] = {}  # 3 tokens -> index of the token after their newest occurrence
        self._older: Dict[Tuple[int, ...], int] = {}
        self._ceiling = ceiling
        self._at = 0    # where the copied text goes on, but for lost tokens; 0: no copy
        self._run = 0   # tokens copied
        self._lost = 0  # tokens that differed since

    @property
    def entries(self) -> int:
        """3-grams kept: what the memory goes by."""
        return len(self._after) + len(self._older)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        history, size = self._history, self._SIZE
        for token in tokens:
            if self._at:
                following = self._at + self._lost
                if following < len(history) and history[following] == token:
                    self._at, self._run, self._lost = following + 1, self._run + 1, 0
                elif self._run < self._COPY or self._lost == self._LOST:
                    self._at = self._run = self._lost = 0
                else:
                    self._lost += 1
            history.append(token)
            end = len(history)
            if end < size:
                continue
            key, after = tuple(history[-size:]), self._after
            if not self._at:
                self._at = after.get(key, 0) or self._older.get(key, 0)
                self._run = size if self._at else 0
            after[key] = end
            if len(after) >= self._ceiling:
                self._older, self._after = after, {}

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        if not self._lost or most < 1:
            return Proposal()
        at = self._at + self._lost
        return Proposal(self._history[at:at + most], "resume", self._TRUST)


class ReferenceText:
    """A text that the answer follows, with changes: the one being edited, say.

    Follows the text from its beginning. After a token that differs it finds its place again by the longest match of the last tokens in
    the text, of equal ones the nearest onwards; until there is one it takes the token for one put in another's place.
    skip: tokens told first (the prompt's) that are no part of the answer. KestrelError: a text of more than MOST tokens (its index takes
    about 1 KB a token).
    """

    MOST = 1 << 16

    _SIZES = (8, 4, 2, 1)
    _LOST = 4   # tokens of another text after which nothing is proposed
    _NEAR = 32  # a single token is a match only so near

    def __init__(self, text: Sequence[int], skip: int = 0):
        if len(text) > self.MOST:
            raise KestrelError(f"draft_from: expected a text of at most {self.MOST} tokens, found {len(text)}")
        self._text, self._skip = list(text), skip
        self._at, self._match = 0, 0  # where the text goes on, how many tokens agreed before
        self._lost = 0  # tokens since the one that differed: the text goes on so much later, if they stand for as many of its own
        self._recent: List[int] = []
        self._ends: Dict[Tuple[int, ...], List[int]] = {}  # n-gram -> where it ends, ascending
        for end in range(1, len(self._text) + 1):
            for size in self._SIZES:
                if size <= end:
                    self._ends.setdefault(tuple(self._text[end - size:end]), []).append(end)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        skipped = min(self._skip, len(tokens))
        self._skip -= skipped
        for token in tokens[skipped:]:
            self._recent = (self._recent + [token])[-self._SIZES[0]:]
            if not self._lost and self._at < len(self._text) and self._text[self._at] == token:
                self._at += 1
                self._match += 1
            else:
                self._find()

    def _find(self) -> None:
        for size in self._SIZES:
            ends = self._ends.get(tuple(self._recent[-size:]), ()) if size <= len(self._recent) else ()
            if ends:
                i = bisect_right(ends, self._at)
                end = ends[i] if i < len(ends) else ends[-1]
                if size > 1 or 0 < end - self._at <= self._NEAR:
                    self._at, self._match, self._lost = end, size, 0
                    return
        self._match = 0
        self._lost += 1

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        if self._lost > self._LOST:
            return Proposal()
        at = self._at + self._lost
        return Proposal(self._text[at:at + most], "text", self._match) if most > 0 else Proposal()


class CallableDrafter:
    """A drafter from a function: continue(tokens so far, most) -> tokens. The list is the drafter's own and grows; don't change it."""

    def __init__(self, function: Callable[[List[int], int], Sequence[int]]):
        self._function = function
        self._tokens: List[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._tokens += tokens

    def propose(self, most: int) -> Sequence[int]:
        """See Drafter."""
        return self._function(self._tokens, most)


class NoDraft:
    """Plain decoding: the draft is always empty."""

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        return Proposal()


class Sources:
    """Several drafters as one. `proposals` gives what each has; `propose` the one with the longest match, of equals the first drafter's."""

    def __init__(self, drafters: Sequence[Drafter]):
        self._drafters = tuple(drafters)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        for drafter in self._drafters:
            drafter.extend(tokens)

    def proposals(self, most: int) -> List[Proposal]:
        """Of each drafter that has a guess."""
        found = []
        for drafter in self._drafters:
            guess = drafter.propose(most)
            if len(guess):
                found.append(as_proposal(guess, most))
        return found

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        return max(self.proposals(most), key=lambda p: p.match, default=Proposal())


def as_proposal(found: Sequence[int], most: int) -> Proposal:
    """A copy of at most `most` tokens of what a drafter gave; a plain sequence is one of the user's own."""
    if isinstance(found, Proposal):
        return Proposal(found[:most], found.source, found.match)
    return Proposal(list(found)[:most], "own", OWN_MATCH)
