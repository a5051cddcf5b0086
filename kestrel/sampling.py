# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of its answer, checked in one place, and the part of it that looks at the tokens so far.

A setting that can't be honoured is refused in one line, never ignored. What the numbers do to the logits stands at kestrel_sampling in kestrel.h.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ._native import ffi
from .errors import KestrelError

MOST_LOGPROBS = 100
LARGEST = 1e6  # of temperature, penalties and biases


def check_integer(name: str, value: Any, low: int, high: int, expected: str) -> None:
    """KestrelError unless `value` is an integer from `low` to `high`, numpy's among them."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise KestrelError(f"{name}: expected {expected}, found {value!r}")


def _number(name: str, value: Any, low: float, high: float, expected: str, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high or (above and value == low):
        raise KestrelError(f"{name}: expected {expected}, found {value!r}")


@dataclass(frozen=True)
class Settings:
    """Everything that may change an answer besides model and prompt. KestrelError names the setting that is impossible.

    max_tokens: at most so many. min_tokens: no end id or stop string ends the answer within its first min_tokens tokens.
    temperature: 0 is greedy. top_k (0: off), top_p, min_p: what may be drawn. seed: 0 to 2^64 - 1; a draw is keyed by (seed, position).
    repetition_penalty: divides positive and multiplies other logits of tokens in prompt or answer (CTRL, transformers); 1 is off.
    presence_penalty, frequency_penalty: subtracted from a token's logit once, and once for each time, if it is in the answer (OpenAI).
    logit_bias: {token id: added to its logit}, after the penalties. Each -1e6 to 1e6.
    logprobs: None, or n: keep the natural log-probability of each token and of the n best (0 to 100), of the model's own distribution:
    before penalties, bias, temperature and all other settings.
    stop: strings that end the answer (of several the one complete first) and are not part of it. ignore_end: go on past end ids.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: Optional[int] = None
    stop: Union[str, Sequence[str]] = ()
    ignore_end: bool = False

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1, 1 << 62, "an integer from 1 to 2^62")
        check_integer("min_tokens", self.min_tokens, 0, self.max_tokens, f"an integer from 0 to max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0, LARGEST, "0 to 1e6")
        check_integer("top_k", self.top_k, 0, (1 << 31) - 1, "an integer from 0")
        _number("top_p", self.top_p, 0, 1, "above 0, up to 1", above=True)
        _number("min_p", self.min_p, 0, 1, "0 to 1")
        check_integer("seed", self.seed, 0, (1 << 64) - 1, "an integer from 0 to 2^64 - 1")
        _number("repetition_penalty", self.repetition_penalty, 0, LARGEST, "above 0, up to 1e6", above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -LARGEST, LARGEST, "-1e6 to 1e6")
        if not isinstance(self.logit_bias, Mapping):
            raise KestrelError(f"logit_bias: expected {{token id: bias}}, found {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0, (1 << 31) - 1, "token ids from 0")
            _number("logit_bias", bias, -LARGEST, LARGEST, f"-1e6 to 1e6 for token id {token}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS, f"None or an integer from 0 to {MOST_LOGPROBS}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        try:
            stops = tuple(self.stop)
        except TypeError:
            stops = (None,)
        if not all(isinstance(s, str) and s for s in stops):
            raise KestrelError(f"stop: expected strings that are not empty, found {self.stop!r}")
        if not isinstance(self.ignore_end, bool):
            raise KestrelError(f"ignore_end: expected True or False, found {self.ignore_end!r}")


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one position, under the model's own distribution: of the token chosen, and of the best ones
    (id, logprob), logit descending, id ascending."""

    token: int
    logprob: float
    top: List[Tuple[int, float]]


class Sampling:
    """Settings as the library takes them, for one answer: `ForwardModel.sample` reads `native`, `commit` alone advances it.

    prompt: ids that the repetition penalty counts as seen. end_ids: can't be chosen until min_tokens are committed. Ids >= sampled_vocab
    can't be chosen anyway; a bias on one is refused. changes_logits: some token may be chosen from other logits than the model's own.
    """

    def __init__(self, settings: Settings = Settings(), sampled_vocab: int = (1 << 31) - 1, prompt: Sequence[int] = (), end_ids: Collection[int] = ()):
        s = self.native = ffi.new("kestrel_sampling *")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            setattr(s, name, float(getattr(settings, name)))
        s.top_k, s.seed = int(settings.top_k), int(settings.seed)
        for token in settings.logit_bias:
            if token >= sampled_vocab:
                raise KestrelError(f"logit_bias: token id {token}: expected 0 to {sampled_vocab - 1}")
        if settings.logprobs is not None and settings.logprobs > sampled_vocab:
            raise KestrelError(f"logprobs: expected 0 to {sampled_vocab} (the model's tokens), found {settings.logprobs}")
        excluded = sorted(i for i in set(end_ids) if i < sampled_vocab) if settings.min_tokens else []
        self._bias_ids = ffi.new("int32_t[]", [int(i) for i in settings.logit_bias])
        self._bias = ffi.new("double[]", [float(b) for b in settings.logit_bias.values()])
        self._excluded = ffi.new("int32_t[]", excluded)
        s.bias_ids, s.bias, s.n_bias = self._bias_ids, self._bias, len(self._bias)
        s.excluded_ids, s.n_excluded = self._excluded, len(excluded)
        self.logprobs = settings.logprobs
        self._not_yet = settings.min_tokens  # tokens before the end ids may be chosen
        repeats = settings.repetition_penalty != 1.0
        self._counting = repeats or settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0
        self._index: Dict[int, int] = {}  # id -> its place in the lists of ids seen
        if self._counting:
            room = min(sampled_vocab, len(prompt) + settings.max_tokens)
            self._seen_ids, self._seen_counts = ffi.new("int32_t[]", room), ffi.new("int32_t[]", room)
            s.seen_ids, s.seen_counts = self._seen_ids, self._seen_counts
        if repeats:
            for token in prompt:
                if token < sampled_vocab:
                    self._place(token)
        self.changes_logits = bool(self._counting or s.n_bias or excluded)

    def _place(self, token: int) -> int:
        at = self._index.setdefault(token, len(self._index))
        if at == self.native.n_seen:
            self._seen_ids[at] = token
            self.native.n_seen = at + 1
        return at

    def commit(self, token: int) -> None:
        """The answer has one more token."""
        if self._not_yet:
            self._not_yet -= 1
            if not self._not_yet:
                self.native.n_excluded = 0
        if self._counting:
            self._seen_counts[self._place(token)] += 1
