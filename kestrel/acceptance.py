# SPDX-License-Identifier: Apache-2.0
"""Acceptance: one `commit` for every token, drafted or not.

Everything that depends on the answer so far (the draw, end ids, stop strings, limits, the text) advances on commit, one token at a
time, never on a proposal; so nothing of it can tell whether a draft was there.
"""
from __future__ import annotations

from typing import Collection, List, Optional, Sequence

from .errors import KestrelError
from .sampling import Sampling, TokenLogprobs


class StopStrings:
    """Cuts streamed text at the first of some strings. What could be the beginning of one is held back until it is certain."""

    def __init__(self, stops: Sequence[str]):
        if not all(isinstance(s, str) and s for s in stops):
            raise KestrelError(f"stop: expected strings that are not empty, found {list(stops)!r}")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str, may_stop: bool = True) -> str:
        """Text that is now certain to come before any stop string. may_stop: False when one that `text` completes does not count."""
        if not self._stops or self.found:
            return "" if self.found else text
        before, held = len(self._held), self._held + text
        # The occurrence that is complete first wins (of two, the one that began first): the same however the text was cut into pieces.
        # What was complete in the text held back did not count when it came.
        ends = [(at + len(s), at) for at, s in ((held.find(s, max(0, before + 1 - len(s))), s) for s in self._stops) if at >= 0]
        if ends and may_stop:
            self.found, self._held = True, ""
            return held[:min(ends)[1]]
        at = self._growing(held)
        self._held = held[at:]
        return held[:at]

    def _growing(self, text: str) -> int:
        """Where the earliest suffix of `text` begins that is a proper prefix of a stop string; len(text) when there is none."""
        longest = max(len(s) for s in self._stops) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(len(s) > len(text) - at and s.startswith(text[at:]) for s in self._stops):
                return at
        return len(text)

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


class Acceptance:
    """The state of one answer. finish_reason is None while it goes on, then "stop" (an end id or stop string) or "length".

    sampling: told of each token; it keeps end ids from being chosen before min_tokens. logprobs: those given with each token.
    """

    def __init__(self, stream: "object", end_ids: Collection[int], stops: Sequence[str], max_tokens: int, min_tokens: int = 0,
                 sampling: Optional[Sampling] = None):
        self._stream, self._end_ids, self._max_tokens, self._min_tokens = stream, frozenset(end_ids), max_tokens, min_tokens
        self._sampling = sampling
        self._stops = StopStrings(stops)
        self._pieces: List[str] = []
        self.token_ids: List[int] = []
        self.logprobs: List[TokenLogprobs] = []
        self.finish_reason: Optional[str] = None

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - len(self.token_ids)

    def commit(self, token: int, logprobs: Optional[TokenLogprobs] = None) -> bool:
        """Takes the next token. Returns whether the answer goes on."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._sampling is not None:
            self._sampling.commit(token)
        may_stop = len(self.token_ids) > self._min_tokens
        if token in self._end_ids:
            self.finish_reason = "stop"
        else:
            self._pieces.append(self._stops.push(self._stream.push(token), may_stop))
            if self._stops.found:
                self.finish_reason = "stop"
            elif self.room <= 0:
                self.finish_reason = "length"
        if self.finish_reason and not self._stops.found:
            self._pieces.append(self._stops.push(self._stream.flush(), may_stop))
            self._pieces.append(self._stops.flush())
            if self._stops.found:  # half a character, U+FFFD at the end, completed one
                self.finish_reason = "stop"
        return self.finish_reason is None

    def take_text(self) -> str:
        """Text that has become certain since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text
