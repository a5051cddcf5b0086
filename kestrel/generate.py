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
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import model as forward_model
from .acceptance import Acceptance
from .costs import StepCosts
from .drafter import CallableDrafter, Drafter, NoDraft, PromptLookup, ReferenceText, Resumption, Sources, SuffixDrafter
from .errors import KestrelError
from .memory import available_bytes, require
from .model import MAX_DRAFT, Cancelled, ForwardModel, KVCache
from .planner import Planner, Round, Speculation
from .sampling import Sampling, Settings, TokenLogprobs, check_integer
from .tokenizer import Tokenizer

Prompt = Union[str, Sequence[int], Sequence[Mapping[str, Any]]]
# Called for each committed token with (position, token, float32 [vocab_size] logits row: a view, valid during the call).
Observer = Callable[[int, int, Any], None]
# What drafts may be taken from beside the session: a text, its ids, a Drafter, or a function (tokens so far, most) -> tokens.
DraftFrom = Union[str, Sequence[int], Drafter, Callable[[List[int], int], Sequence[int]]]


@dataclass
class Statistics:
    """What one answer took. forwards counts the passes that committed tokens; prefill_forwards those that only read the prompt.

    cached: prompt tokens that the cache held already. All times in seconds. draft: in lookup; saved: what plain steps would have taken for the tokens of the speculative ones, less what
    these and lookup took, None when no plain step was seen; ledger: the same with the other sign, gains clamped (see planner).
    widths: rounds by rows of their pass, 1 + proposed.
    """

    forwards: int = 0
    tokens: int = 0
    cached: int = 0
    prefill_forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_histogram: List[int] = field(default_factory=list)
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    draft: float = 0.0
    saved: Optional[float] = 0.0
    ledger: float = 0.0
    widths: Dict[int, int] = field(default_factory=dict)
    first_round_tokens: int = 0

    @property
    def forwards_saved(self) -> int:
        """Passes that plain decoding would have made more."""
        return self.tokens - self.forwards

    def count(self, proposed: int, accepted: int, committed: int) -> None:
        """One round that committed so many tokens: `accepted` of `proposed` draft tokens, plus the bonus unless the answer ended before it."""
        self.forwards += 1
        self.tokens += committed
        self.widths[1 + proposed] = self.widths.get(1 + proposed, 0) + 1
        self.proposed += proposed
        self.accepted += accepted
        self.accepted_histogram += [0] * (accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[accepted] += 1


class Generation:
    """An answer in the making: iterate over it for pieces of text; afterwards `text`, `token_ids`, `finish_reason`, `to_json()`.

    Closing it early (`close()`, or letting it go) leaves the cache consistent. Seconds are wall time.
    """

    def __init__(self, model: "Model", prompt_ids: Sequence[int], settings: Settings, acceptance: Acceptance, rounds: Iterator[None],
                 statistics: Statistics, fresh: List[Tuple[str, bool]]):
        self._model, self._settings, self._acceptance, self._rounds = model, settings, acceptance, rounds
        self.prompt_ids = list(prompt_ids)
        self.statistics = statistics
        self.text = ""
        self.spans: List[Tuple[str, bool]] = []  # the last piece, cut by who made it certain: (text, whether by an accepted draft token)
        self._fresh = fresh

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> str:
        while True:
            ended = next(self._rounds, self) is self
            self.spans = self._fresh[:]
            self._fresh.clear()
            piece = "".join(text for text, _ in self.spans)
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
            "text": self.text, "token_ids": self.token_ids, "prompt_tokens": len(self.prompt_ids), "cached_tokens": s.cached, "completion_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason, "forwards": s.forwards, "prefill_forwards": s.prefill_forwards, "proposed": s.proposed,
            "accepted": s.accepted, "accepted_histogram": s.accepted_histogram,
            "forwards_saved": s.forwards_saved,
            "seconds": {"load": s.load, "prefill": s.prefill, "decode": s.decode, "draft": s.draft, "saved": s.saved},
            "tokens_per_second": decoded / s.decode if s.decode > 0 else 0.0,
            "isa": self._model.isa, "threads": self._model.threads,
            "sha256": hashlib.sha256(struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)).hexdigest(),
        }
        if self.logprobs is not None:
            result["logprobs"] = [{"token": p.token, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in self.logprobs]
        return result


def _forward(model: ForwardModel, kv: KVCache, tokens: Sequence[int], wanted: int = 0) -> None:
    """One pass; when a signal cancelled it whose handler then returned, it is made again: the third time whatever comes (a profiler's timer)."""
    for _ in range(2):
        try:
            return model.forward(kv, tokens, wanted)
        except Cancelled:
            pass
    model.forward(kv, tokens, wanted, cancellable=False)


def _rounds(model: "Model", kv: KVCache, prompt: Sequence[int], acceptance: Acceptance, speculation: Speculation,
            sampling: Sampling, chunk: int, statistics: Statistics, observer: Optional[Observer], on_round: Optional[Callable[[Round], None]],
            fresh: List[Tuple[str, bool]]) -> Iterator[None]:
    """Yields after each round, and after each pass of the prompt. `fresh` receives text as in Generation.spans."""
    clock = model.clock
    begin = clock()
    pending = list(prompt[kv.length:])  # decided, not yet in the cache
    speculation.tell(prompt)
    statistics.draft = clock() - begin
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
            most = min(MAX_DRAFT, acceptance.room - 1, chunk - len(pending) if len(pending) > 1 else MAX_DRAFT,
                       kv.capacity - kv.length - len(pending))
            past = kv.length
            draft = speculation.draft(most, past)
            for cut, token in enumerate(draft):
                if not 0 <= token < model.sampled_vocab:  # what can't be sampled can't be right
                    del draft[cut:]
                    break
            with model.lock:  # the logits are read before another thread's pass overwrites them
                began = clock()
                _forward(model, kv, pending + draft, wanted=len(draft) + 1)
                certain += len(pending)
                accepted, goes_on, token = 0, True, -1
                for i in range(len(draft) + 1):
                    position = certain + i
                    token = model.sample(i, sampling, position)
                    if observer is not None:
                        observer(position, token, model.logits(i))
                    goes_on = acceptance.commit(token, None if sampling.logprobs is None else model.logprobs(i, token, sampling.logprobs))
                    drafted = i < len(draft) and token == draft[i]
                    text = acceptance.take_text()
                    if text:
                        fresh.append((text, drafted))
                    accepted += drafted
                    if not goes_on or not drafted:
                        break
            # no bonus when the last token of an answer was drafted
            committed = draft[:accepted] if drafted else draft[:accepted] + [token]
            certain += len(committed) - 1
            kv.rewind(certain)
            seconds = clock() - began
            first = statistics.forwards == 0
            statistics.count(len(draft), accepted, len(committed))
            done = speculation.count(committed, accepted, len(draft) + 1, past, seconds, len(pending) > 1)
            pending = committed[-1:]
            statistics.draft += speculation.looked
            statistics.ledger, statistics.saved = speculation.ledger, speculation.saved(past)
            if on_round is not None:
                on_round(done)
            if first:
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
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # of all seconds, those that choose how much to draft among them

    @classmethod
    def load(cls, path: Any, threads: Optional[int] = None, isa: Optional[str] = None, ctx: Optional[int] = None, chunk: int = 256,
             kv_type: Optional[str] = None, fit: bool = True, use_mmap: bool = True, prefill_threads: Optional[int] = None) -> "Model":
        """Maps a packed file and makes it ready.

        threads: of decoding and verifying; default, the big cores that this process may use. prefill_threads: of passes with more than 33 rows;
        default, as threads. isa: default, $KESTREL_ISA or the best here. ctx: most positions of prompt
        and answer together (default: the model's, or as many as memory has room for). chunk: most prompt tokens of one pass. kv_type: "f16", "f32" or "int8" (default: f16, f32 for f32 weights).
        use_mmap: see PackedModel. fit: refuse what this machine's memory has no room for. KestrelError: bad file, impossible isa, too little memory.
        """
        begin = time.perf_counter()
        check_integer("chunk", chunk, 1, 4096, "1 to 4096")
        packed = forward_model.PackedModel(path, use_mmap)
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
        self = cls(packed, threads, isa, max_rows=int(chunk) + MAX_DRAFT, kv_type=kv_type, sampled_vocab=tokenizer.size, prefill_threads=prefill_threads)
        self.tokenizer, self.chunk, self.costs = tokenizer, int(chunk), StepCosts()
        template = packed.text("chat_template")
        try:
            self.chat_template = template.decode() if template is not None else None
        except UnicodeDecodeError as error:
            raise KestrelError(f"{packed.path}: chat_template: not UTF-8 at byte {error.start}") from None
        limit = self.config.max_position_embeddings
        if ctx is not None:
            check_integer("ctx", ctx, 1, limit, f"1 to {limit} (the model's)")
        available = available_bytes() if fit else None
        self.ctx = int(ctx or 0) or self.longest_ctx(available) or 1
        require(self.footprint(self.ctx), available, packed.path)
        self.load_seconds = time.perf_counter() - begin
        return self

    def encode(self, prompt: Prompt) -> List[int]:
        """Token ids of a text (BOS if the model's prompts have one), of chat messages ({"role", "content"}), or the ids themselves."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, bos=True)
        if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__len__") or not hasattr(prompt, "__getitem__") or isinstance(prompt, Mapping):
            raise KestrelError(f"prompt: expected a text, messages or token ids, found {type(prompt).__name__}")
        if len(prompt) and isinstance(prompt[0], Mapping):
            from .chat import encode_chat

            return encode_chat(self.tokenizer, self.chat_template, prompt)  # type: ignore[arg-type]
        for i in prompt:
            check_integer("prompt: token id", i, 0, self.config.vocab_size - 1, f"0 to {self.config.vocab_size - 1}")
        return [int(i) for i in prompt]  # type: ignore[arg-type]

    def generate(self, prompt: Prompt, max_tokens: int = 128, draft: Union[int, str, Drafter] = "auto", chunk: Optional[int] = None,
                 draft_from: Optional[DraftFrom] = None, observer: Optional[Observer] = None, on_round: Optional[Callable[[Round], None]] = None,
                 kv: Optional[KVCache] = None, cached: int = 0, **settings: Any) -> Generation:
        """Answers; the result is iterable (pieces of text) and depends on neither draft, chunk nor threads, to the last bit.

        prompt: text, messages or ids. draft: "auto" (as much as pays, within the planner's ledger), "off" or 0, the number of tokens to guess
        in every round (up to 32), or a Drafter that is asked in every round. draft_from: what to draft from beside the session: the text that
        is being edited (or its ids), a Drafter, a function of (tokens so far, most). on_round: called with the Round of each pass.
        kv: a cache of this model to use instead of a new one; it holds the first `cached` tokens of the prompt (0: it is empty). settings: the fields of `Settings`: min_tokens, temperature, top_k, top_p,
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
        speculation = self._speculation(draft, draft_from, len(ids))
        chunk = self.chunk if chunk is None else chunk
        check_integer("chunk", chunk, 1, self.max_rows, f"1 to {self.max_rows}")
        if kv is None:
            kv = self.new_kv(len(ids) + max_tokens)
        elif kv.length != cached or cached >= len(ids) or kv.capacity < len(ids) + max_tokens:
            held = f"a cache of {cached} of the prompt's {len(ids)} tokens" if cached else "an empty cache"
            raise KestrelError(f"kv: expected {held} for {len(ids) + max_tokens} positions, found length {kv.length}, capacity {kv.capacity}")
        end_ids = () if wanted.ignore_end else self.config.eos_token_ids
        sampling = Sampling(replace(wanted, max_tokens=max_tokens), self.sampled_vocab, ids, end_ids)
        acceptance = Acceptance(self.tokenizer.stream(continues=True), end_ids, wanted.stop, max_tokens, wanted.min_tokens, sampling)
        statistics = Statistics(load=self.load_seconds, cached=kv.length)
        fresh: List[Tuple[str, bool]] = []
        rounds = _rounds(self, kv, ids, acceptance, speculation, sampling, chunk, statistics, observer, on_round, fresh)
        return Generation(self, ids, wanted, acceptance, rounds, statistics, fresh)

    def _speculation(self, draft: Union[int, str, Drafter], draft_from: Optional[DraftFrom], prompt_tokens: int) -> Speculation:
        """What drafts for one request; KestrelError for a `draft` that is none of off, auto, 0 to 32, a Drafter, or a `draft_from` it can't use."""
        own = hasattr(draft, "extend") and hasattr(draft, "propose")
        text = str(draft)
        most = MAX_DRAFT if own or text == "auto" else 0 if text == "off" else int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1
        if isinstance(draft, bool) or not 0 <= most <= MAX_DRAFT:
            raise KestrelError(f"draft: expected off, auto or 0 to {MAX_DRAFT}, found {draft!r}")
        if draft_from is not None and (own or not most):
            raise KestrelError(f"draft_from: expected draft auto or 1 to {MAX_DRAFT} with it, found {'a Drafter' if own else text}")
        drafters: List[Drafter] = []
        if draft_from is not None:
            if isinstance(draft_from, str):
                draft_from = self.tokenizer.encode(draft_from)
            if hasattr(draft_from, "extend") and hasattr(draft_from, "propose"):
                drafters.append(draft_from)  # type: ignore[arg-type]
            elif callable(draft_from):
                drafters.append(CallableDrafter(draft_from))
            elif isinstance(draft_from, Sequence) and len(draft_from):
                drafters.append(ReferenceText(draft_from, skip=prompt_tokens))
            else:
                raise KestrelError(f"draft_from: expected a text, its ids, a Drafter or a function, found {draft_from!r}")
        if text == "auto":
            return Planner(Sources([*drafters, SuffixDrafter(), Resumption()]), most, self.costs, self.clock)
        drafter = draft if own else NoDraft() if not most else Sources([*drafters, PromptLookup()]) if drafters else PromptLookup()
        return Speculation(drafter, most, self.costs, self.clock)  # type: ignore[arg-type]
