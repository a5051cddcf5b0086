# SPDX-License-Identifier: Apache-2.0
"""The only loop: known tokens + draft -> one pass -> accept -> bonus -> rewind -> text.

Prefill is a pass with many known tokens, plain decoding one whose draft is empty.
"""
from __future__ import annotations

import hashlib
import json
import struct
import time
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

from . import model as forward_model
from .acceptance import Acceptance
from .drafter import Drafter, NoDraft, PromptLookup
from .errors import KestrelError
from .model import MAX_DRAFT, Cancelled, ForwardModel, KVCache
from .sampling import Sampling, Settings, TokenLogprobs
from .tokenizer import Tokenizer

AUTO_DRAFT = 4

Prompt = Union[str, Sequence[int], Sequence[Mapping[str, Any]]]
# Called for each committed token with (position, token, float32 [vocab_size] logits row: a view, valid during the call).
Observer = Callable[[int, int, Any], None]


@dataclass
class Statistics:
    """What one answer took. forwards counts the passes that committed tokens; prefill_forwards those that only read the prompt."""

    forwards: int = 0
    prefill_forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_histogram: List[int] = field(default_factory=list)
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    draft: float = 0.0
    first_round_tokens: int = 0

    def count(self, proposed: int, accepted: int) -> None:
        """One round: `accepted` of `proposed` draft tokens, plus the bonus."""
        self.forwards += 1
        self.proposed += proposed
        self.accepted += accepted
        self.accepted_histogram += [0] * (accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[accepted] += 1


class Generation:
    """An answer in the making: iterate over it for pieces of text; afterwards `text`, `token_ids`, `finish_reason`, `to_json()`.

    Closing it early (`close()`, or letting it go) leaves the cache consistent. Seconds are wall time.
    """

    def __init__(self, model: "Model", prompt_ids: Sequence[int], settings: Settings, acceptance: Acceptance, rounds: Iterator[None],
                 statistics: Statistics):
        self._model, self._settings, self._acceptance, self._rounds = model, settings, acceptance, rounds
        self.prompt_ids = list(prompt_ids)
        self.statistics = statistics
        self.text = ""

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> str:
        while True:
            ended = next(self._rounds, self) is self
            piece = self._acceptance.take_text()
            self.text += piece
            if piece:
                return piece
            if ended:
                raise StopIteration

    def close(self) -> None:
        """Ends the answer here; what was committed stays."""
        self._rounds.close()

    def run(self) -> "Generation":
        """Generates to the end."""
        for _ in self:
            pass
        return self

    @property
    def token_ids(self) -> List[int]:
        """Committed tokens, an end id included."""
        return self._acceptance.token_ids

    @property
    def finish_reason(self) -> Optional[str]:
        """"stop", "length", or None when the answer was abandoned."""
        return self._acceptance.finish_reason

    @property
    def logprobs(self) -> Optional[List[TokenLogprobs]]:
        """One entry for each of token_ids; None unless asked for."""
        return self._acceptance.logprobs if self._settings.logprobs is not None else None

    def to_json(self) -> Dict[str, Any]:
        """The object that `kestrel generate --json` prints; "logprobs" when asked for."""
        s = self.statistics
        decoded = len(self.token_ids) - s.first_round_tokens
        result = {
            "text": self.text, "token_ids": self.token_ids, "prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason, "forwards": s.forwards, "prefill_forwards": s.prefill_forwards, "proposed": s.proposed,
            "accepted": s.accepted, "accepted_histogram": s.accepted_histogram,
            "seconds": {"load": s.load, "prefill": s.prefill, "decode": s.decode, "draft": s.draft},
            "tokens_per_second": decoded / s.decode if s.decode > 0 else 0.0,
            "isa": self._model.isa, "threads": self._model.threads,
            "sha256": hashlib.sha256(struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)).hexdigest(),
        }
        if self.logprobs is not None:
            result["logprobs"] = [{"token": p.token, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in self.logprobs]
        return result


def _forward(model: ForwardModel, kv: KVCache, tokens: Sequence[int], wanted: int = 0) -> None:
    """One pass; when a signal cancelled it whose handler then returned, it is made again."""
    while True:
        try:
            return model.forward(kv, tokens, wanted)
        except Cancelled:
            continue


def _rounds(model: ForwardModel, kv: KVCache, prompt: Sequence[int], acceptance: Acceptance, drafter: Drafter, draft_most: int,
            sampling: Sampling, chunk: int, statistics: Statistics, observer: Optional[Observer]) -> Iterator[None]:
    """Yields after each round, and after each pass of the prompt."""
    clock = time.perf_counter
    begin = clock()
    pending = list(prompt)  # decided, not yet in the cache
    drafter.extend(pending)
    certain = kv.length
    try:
        while True:
            if len(pending) > chunk:
                _forward(model, kv, pending[:chunk])
                certain = kv.length
                del pending[:chunk]
                statistics.prefill_forwards += 1
                yield
                continue
            looked = clock()
            most = min(draft_most, acceptance.room - 1, chunk - len(pending) if len(pending) > 1 else draft_most,
                       kv.capacity - kv.length - len(pending))
            draft = list(drafter.propose(most))[:most] if most > 0 else []
            for cut, token in enumerate(draft):
                if not 0 <= token < model.sampled_vocab:  # what can't be sampled can't be right
                    del draft[cut:]
                    break
            statistics.draft += clock() - looked
            with model.lock:  # the logits are read before another thread's pass overwrites them
                _forward(model, kv, pending + draft, wanted=len(draft) + 1)
                certain += len(pending)
                accepted, goes_on, token = 0, True, -1
                for i in range(len(draft) + 1):
                    position = certain + i
                    token = model.sample(i, sampling, position)
                    if observer is not None:
                        observer(position, token, model.logits(i))
                    goes_on = acceptance.commit(token, None if sampling.logprobs is None else model.logprobs(i, token, sampling.logprobs))
                    if not goes_on or i == len(draft) or token != draft[i]:
                        break
                    accepted += 1
            committed = draft[:accepted] + [token]
            if not goes_on and accepted < len(draft) and token == draft[accepted]:
                accepted += 1  # the last token was drafted too, only nothing follows it
                committed = draft[:accepted]
            certain += len(committed) - 1
            kv.rewind(certain)
            pending = committed[-1:]
            statistics.count(len(draft), accepted)
            drafter.extend(committed)
            if statistics.first_round_tokens == 0:
                statistics.first_round_tokens = len(committed)
                statistics.prefill = clock() - begin
                begin = clock()
            else:
                statistics.decode = clock() - begin
            yield
            if not goes_on:
                return
    finally:
        kv.rewind(min(certain, kv.length))


class Model(ForwardModel):
    """A packed model that answers.

        from kestrel import Model
        model = Model.load("smollm2-135m-int8.kestrel")
        for piece in model.generate("Once upon a time", max_tokens=64, draft=4):
            print(piece, end="")
    """

    tokenizer: Tokenizer
    chat_template: Optional[str]
    load_seconds: float

    @classmethod
    def load(cls, path: Any, threads: Optional[int] = None, isa: Optional[str] = None, ctx: Optional[int] = None, chunk: int = 256,
             kv_type: Optional[str] = None) -> "Model":
        """Maps a packed file and makes it ready.

        threads: default, the CPUs this process may use. isa: default, $KESTREL_ISA or the best here. ctx: most positions of prompt
        and answer together (default: the model's). chunk: most prompt tokens of one pass. kv_type: "f16", "f32" or "int8" (default: f16, f32 for f32 weights).
        KestrelError: bad file, impossible isa.
        """
        begin = time.perf_counter()
        if not isinstance(chunk, int) or not 1 <= chunk <= 4096:
            raise KestrelError(f"chunk: expected 1 to 4096, found {chunk!r}")
        packed = forward_model.PackedModel(path)
        raw = packed.text("tokenizer.json")
        if raw is None:
            raise KestrelError(f"{packed.path}: no tokenizer.json in the file")
        try:
            config = json.loads(packed.text("tokenizer_config.json") or b"{}")
        except (ValueError, RecursionError) as error:
            raise KestrelError(f"{packed.path}: tokenizer_config.json: not JSON: {error}") from None
        if not isinstance(config, dict):
            raise KestrelError(f"{packed.path}: tokenizer_config.json: expected an object, found {type(config).__name__}")
        tokenizer = Tokenizer.from_bytes(raw, config, packed.path)
        self = cls(packed, threads, isa, max_rows=chunk + MAX_DRAFT, kv_type=kv_type, sampled_vocab=tokenizer.size)
        self.tokenizer, self.chunk = tokenizer, chunk
        template = packed.text("chat_template")
        self.chat_template = template.decode() if template is not None else None
        limit = self.config.max_position_embeddings
        if ctx is not None and not 1 <= ctx <= limit:
            raise KestrelError(f"ctx: expected 1 to {limit} (the model's), found {ctx}")
        self.ctx = ctx or limit
        self.load_seconds = time.perf_counter() - begin
        return self

    def encode(self, prompt: Prompt) -> List[int]:
        """Token ids of a text (BOS if the model's prompts have one), of chat messages ({"role", "content"}), or the ids themselves."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, bos=True)
        if len(prompt) and isinstance(prompt[0], Mapping):
            from .chat import encode_chat

            return encode_chat(self.tokenizer, self.chat_template, prompt)  # type: ignore[arg-type]
        ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise KestrelError(f"prompt: token id {i}: expected 0 to {self.config.vocab_size - 1}")
        return ids

    def generate(self, prompt: Prompt, max_tokens: int = 128, draft: Union[int, str, Drafter] = "auto", chunk: Optional[int] = None,
                 observer: Optional[Observer] = None, kv: Optional[KVCache] = None, **settings: Any) -> Generation:
        """Answers; the result is iterable (pieces of text) and depends on neither draft, chunk nor threads, to the last bit.

        prompt: text, messages or ids. draft: "off" or 0, the number of tokens to guess (up to 32), "auto", or a Drafter of your own.
        kv: an empty cache of this model to use instead of a new one. settings: the fields of `Settings`: min_tokens, temperature, top_k, top_p,
        min_p, seed, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, logprobs, stop, ignore_end.
        """
        wanted = Settings(max_tokens=max_tokens, **settings)
        ids = self.encode(prompt)
        if not ids:
            raise KestrelError("prompt: empty, and this model has no BOS to begin with")
        room = self.ctx - len(ids)
        if room < 1:
            raise KestrelError(f"prompt: {len(ids)} tokens leave no room in a context of {self.ctx}")
        if wanted.min_tokens > room:
            raise KestrelError(f"min_tokens: {len(ids)} prompt tokens leave {room} in a context of {self.ctx}, found {wanted.min_tokens}")
        max_tokens = min(max_tokens, room)
        drafter, most = make_drafter(draft)
        chunk = chunk or self.chunk
        if not isinstance(chunk, int) or not 1 <= chunk <= self.max_rows:
            raise KestrelError(f"chunk: expected 1 to {self.max_rows}, found {chunk}")
        if kv is None:
            kv = self.new_kv(len(ids) + max_tokens)
        elif kv.length or kv.capacity < len(ids) + max_tokens:
            raise KestrelError(f"kv: expected an empty cache for {len(ids) + max_tokens} positions, found length {kv.length}, capacity {kv.capacity}")
        end_ids = () if wanted.ignore_end else self.config.eos_token_ids
        sampling = Sampling(replace(wanted, max_tokens=max_tokens), self.sampled_vocab, ids, end_ids)
        acceptance = Acceptance(self.tokenizer.stream(continues=True), end_ids, wanted.stop, max_tokens, wanted.min_tokens, sampling)
        statistics = Statistics(load=self.load_seconds)
        rounds = _rounds(self, kv, ids, acceptance, drafter, most, sampling, chunk, statistics, observer)
        return Generation(self, ids, wanted, acceptance, rounds, statistics)


def make_drafter(draft: Union[int, str, Drafter]) -> "tuple[Drafter, int]":
    """(drafter, longest draft) for the `draft` argument; KestrelError when it is none of off, auto, 0 to 32, a Drafter."""
    if hasattr(draft, "extend") and hasattr(draft, "propose"):
        return draft, MAX_DRAFT  # type: ignore[return-value]
    text = str(draft)
    most = 0 if text == "off" else AUTO_DRAFT if text == "auto" else int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1
    if isinstance(draft, bool) or not 0 <= most <= MAX_DRAFT:
        raise KestrelError(f"draft: expected off, auto or 0 to {MAX_DRAFT}, found {draft!r}")
    return (PromptLookup(), most) if most else (NoDraft(), 0)
