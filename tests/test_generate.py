# SPDX-License-Identifier: Apache-2.0
"""The loop: whatever is drafted, however a prompt is cut and whenever it ends, the answer is the one of plain decoding."""
from __future__ import annotations

import hashlib
import json
import random

import pytest
import toy
from record import PROMPTS, Record, toy_model

from kestrel.errors import KestrelError
from kestrel.generate import Model

native_only = pytest.mark.native_only  # the loop is Python: a few of its tests on ARM, all of them natively
DRAFTS = (0, "off", "auto", 1, 3, 4, 7, 15, 16, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_model(tmp_path_factory.mktemp("toy"))


SAMPLING = {"greedy": {}, "seeded": {"temperature": 2.0, "seed": 11}, "cut": {"temperature": 3.0, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 5}}


# --- drafts, chunks, threads ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt, sampling", [pytest.param(p, s, marks=[] if (p, s) in (("code", "greedy"), ("prose", "cut")) else native_only)
                                              for p in PROMPTS for s in SAMPLING])
def test_drafts_change_nothing(model, prompt, sampling):
    options = dict(max_tokens=40, **SAMPLING[sampling])
    plain = Record(model, PROMPTS[prompt], draft=0, **options)
    assert plain.statistics.forwards == len(plain.ids) == 40 and plain.statistics.proposed == 0
    for draft in DRAFTS[1:]:
        assert Record(model, PROMPTS[prompt], draft=draft, **options).answer() == plain.answer(), draft


@native_only
def test_greedy_and_seeded_answers_differ(model):
    """Else the test above would compare the same thing three times."""
    answers = [tuple(Record(model, "x y z", max_tokens=20, **s).ids) for s in SAMPLING.values()]
    answers += [tuple(Record(model, "x y z", max_tokens=20, temperature=2.0, seed=seed).ids) for seed in (12, 13)]
    assert len(set(answers)) == 5


@native_only
@pytest.mark.parametrize("draft", [1, 4, 7, 16])
def test_the_real_model_with_drafts(real_model_int8, draft):
    """Case 1 and case 14 on real weights; the drafts must have been accepted now and then, else this shows nothing."""
    model = Model.load(str(real_model_int8))
    for prompt, options in ((" word" * 48, {}), ([{"role": "user", "content": "Repeat exactly: " + PROMPTS["code"]}], {}),
                            ("The story of the fox. The fox", {"temperature": 0.9, "seed": 3, "top_p": 0.95})):
        plain = Record(model, prompt, draft="off", max_tokens=32, **options)
        drafted = Record(model, prompt, draft=draft, max_tokens=32, **options)
        assert drafted.answer() == plain.answer()
        if not options:
            assert drafted.statistics.accepted >= 3 and drafted.statistics.forwards < plain.statistics.forwards


@native_only
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_chunks_change_nothing(model, sampling):
    prompt = PROMPTS["code"] * 3  # 207 tokens
    options = dict(max_tokens=12, **SAMPLING[sampling])
    plain = Record(model, prompt, draft=0, chunk=512, **options)
    assert plain.statistics.prefill_forwards == 0
    for chunk in (1, 2, 7, 33, 64, 206, 207, 208):
        for draft in (0, 4):
            assert Record(model, prompt, draft=draft, chunk=chunk, **options).answer() == plain.answer(), (chunk, draft)


@native_only
def test_long_context(model):
    """1,150 tokens: answers straddle a span's edge."""
    ids = [(7 * i * i + i // 3) % 256 for i in range(1142)]
    plain = Record(model, ids, draft=0, max_tokens=24)
    for draft, chunk in ((4, 512), (16, 100), (32, 64), (1, 1)):
        assert Record(model, ids, draft=draft, chunk=chunk, max_tokens=24).answer() == plain.answer()


# --- drafters of every quality ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("k, sampling", [pytest.param(k, s, marks=[] if (k, s) == (4, "seeded") else native_only)
                                         for k in (1, 3, 4, 7, 15, 16, 32) for s in ("greedy", "seeded")])
def test_every_accept_count(model, k, sampling):
    """Case 8 and case 10: r right tokens, then k - r wrong ones, every round: r are accepted, one more is the pass's own."""
    ids = model.encode(PROMPTS["prose"])
    options = dict(max_tokens=70, **SAMPLING[sampling])
    plain = Record(model, ids, draft=0, **options)
    for right in range(k + 1):
        drafter = toy.Known(ids, plain.ids, right, k - right, model.sampled_vocab)
        drafted = Record(model, ids, draft=drafter, **options)
        assert drafted.answer() == plain.answer()
        s = drafted.statistics
        assert s.forwards == -(-70 // (right + 1))
        full = 70 // (right + 1)  # rounds that were not cut by max_tokens
        assert s.accepted_histogram[right] >= full - 1
        assert s.accepted in (70 - s.forwards, 70 - s.forwards + 1)  # the last token may have been drafted, with no bonus after it


@native_only
def test_accept_counts_that_change_from_round_to_round(model):
    ids = model.encode(PROMPTS["prose"])
    plain = Record(model, ids, draft=0, max_tokens=64)
    for start in range(5):
        rights = [(start + 3 * i) % 6 for i in range(64)]
        assert Record(model, ids, draft=toy.Known(ids, plain.ids, rights, 2, model.sampled_vocab), max_tokens=64).answer() == plain.answer()


def test_accounting(model):
    """Rounds that accept 0, 2 and 4 of 4: 3 forwards, 9 tokens, 6 forwards saved."""
    ids = model.encode(PROMPTS["prose"])
    plain = Record(model, ids, draft=0, max_tokens=9)

    class FourOfThem(toy.Known):
        def propose(self, most):
            right = (0, 2, 4)[len(self.asked)]
            self._rights, self._wrongs = right, 4 - right
            return super().propose(most)

    result = Record(model, ids, draft=FourOfThem(ids, plain.ids, vocab_size=model.sampled_vocab), max_tokens=9).generation.to_json()
    assert result["forwards"] == 3 and result["completion_tokens"] == 9
    assert result["forwards_saved"] == plain.statistics.forwards - result["forwards"] == 6
    assert (result["proposed"], result["accepted"], result["accepted_histogram"]) == (12, 6, [1, 0, 1, 0, 1])


@native_only
@pytest.mark.parametrize("tokens", [[0], [1 << 20], [-1], [5, -1, 5], [330], list(range(100)), [1 << 40], [7] * 1000], ids=str)
def test_hostile_drafters(tokens):
    """Ids outside the vocabulary, more tokens than were asked for: no effect, no error, no write past the cache."""
    model = Model.load(toy.packed("tiny-untied", eos_token_id=None), threads=1, chunk=16)
    plain = Record(model, [5, 9, 5, 9, 5], draft=0, max_tokens=20)
    assert Record(model, [5, 9, 5, 9, 5], draft=toy.Fixed(tokens), max_tokens=20).answer() == plain.answer()
    full = Model.load(toy.packed("tiny-untied", eos_token_id=None), threads=1, chunk=16, ctx=12)
    assert full.generate([5, 9, 5, 9, 5], draft=toy.Fixed(tokens), max_tokens=20).run().token_ids == plain.ids[:7]


def test_a_drafter_that_gives_a_tuple(model):
    class Tuple(toy.Fixed):
        def propose(self, most):
            return tuple(super().propose(most))

    assert Record(model, "abc", draft=Tuple([1, 1 << 30]), max_tokens=8).answer() == Record(model, "abc", draft=0, max_tokens=8).answer()


@native_only
def test_an_earlier_request_never_drafts_the_next(model):
    """Case 7."""
    fresh = Model.load(model.packed.path, threads=2, chunk=512)
    alone = Record(fresh, "zq", draft=4, max_tokens=10)
    Record(model, "zq" * 30 + alone.text * 5, draft=4, max_tokens=10)
    again = Record(model, "zq", draft=4, max_tokens=10)
    assert again.answer() == alone.answer()
    for name in ("forwards", "proposed", "accepted", "accepted_histogram"):
        assert getattr(again.statistics, name) == getattr(alone.statistics, name)


# --- draft auto: time chooses how much, never what ----------------------------------------------------------------------------

def in_time(path, pass_seconds, look_seconds=lambda: 0.0):
    """A model for which a pass of w rows takes pass_seconds(w), and each look at the clock look_seconds()."""
    timed, now = Model.load(path, threads=1, chunk=512), [0.0]
    forward = timed.forward

    def clock():
        now[0] += look_seconds()
        return now[0]

    def timed_forward(kv, tokens, wanted=0):
        forward(kv, tokens, wanted)
        now[0] += pass_seconds(len(tokens))

    timed.clock, timed.forward = clock, timed_forward
    return timed


@native_only
@pytest.mark.parametrize("sampling", SAMPLING)
def test_any_clock_gives_the_same_answer(model, sampling):
    options = dict(max_tokens=60, **SAMPLING[sampling])
    widths = set()
    for prompt in PROMPTS.values():
        plain = Record(model, prompt, draft="off", **options)
        for seed in range(6):
            rng = random.Random(seed)
            timed = in_time(model.packed.path, lambda rows: rng.choice([0.0, 1.0, rng.random(), 1.0 + 0.1 * rows, 20.0 * rng.random()]),
                            lambda: rng.choice([0.0, 0.0, 1e-6, 1e-3, 0.3 * (rng.random() < 0.02)]))
            source = (None, prompt, toy.Known(model.encode(prompt), plain.ids, 5, 1))[seed % 3]
            automatic = Record(timed, prompt, draft="auto", draft_from=source, **options)
            assert automatic.answer() == plain.answer(), seed
            widths |= set(automatic.statistics.widths)
    assert len(widths) > 4  # else it was plain decoding all the time


@native_only
def test_auto_uses_what_it_is_given(model):
    """The whole answer as the text to follow: its rounds are few, its drafts come from there, and grow."""
    ids = model.encode(PROMPTS["prose"])
    plain = Record(model, ids, draft=0, max_tokens=200)
    for source in (plain.ids, toy.Known(ids, plain.ids), lambda tokens, most: plain.ids[len(tokens) - len(ids):][:most]):
        timed = in_time(model.packed.path, lambda rows: 1.0 + 0.02 * rows)
        rounds = []
        followed = Record(timed, ids, draft="auto", draft_from=source, max_tokens=200, on_round=rounds.append)
        assert followed.answer() == plain.answer()
        s = followed.statistics
        assert s.forwards == len(rounds) < 30 and s.tokens == 200 and s.forwards_saved == 200 - s.forwards
        assert [r.accepted for r in rounds] == [r.accepted for r in rounds if r.accepted in (0, r.width - 1)]
        assert {r.source for r in rounds if r.width > 1} <= {"text", "own", "suffix", "resume"} and max(r.width for r in rounds) == 33
        assert sum(s.widths.values()) == s.forwards and sum((w - 1) * n for w, n in s.widths.items()) == s.proposed
        assert s.saved == pytest.approx(199 * 1.02 - s.decode, abs=1e-6)
        assert rounds[-1].ledger == s.ledger < 0


def test_a_fixed_length_takes_the_longest_match(model):
    ids = model.encode(PROMPTS["prose"])
    plain = Record(model, ids, draft=0, max_tokens=40)
    followed = Record(model, ids, draft=4, draft_from=plain.ids, max_tokens=40)
    assert followed.answer() == plain.answer() and followed.statistics.forwards == 8
    assert set(followed.statistics.widths) <= {1, 2, 3, 4, 5}


def test_spans_say_what_was_drafted(model):
    """Pieces are cut by who made them certain; together they are the piece."""
    ids = model.encode(PROMPTS["prose"])
    plain = Record(model, ids, draft=0, max_tokens=40)
    answer = model.generate(ids, draft=toy.Known(ids, plain.ids, 3, 1, model.sampled_vocab), max_tokens=40)
    drafted = bonus = ""
    for piece in answer:
        assert "".join(text for text, _ in answer.spans) == piece and all(text for text, _ in answer.spans)
        drafted += "".join(text for text, accepted in answer.spans if accepted)
        bonus += "".join(text for text, accepted in answer.spans if not accepted)
    assert len(drafted) + len(bonus) == len(answer.text) and drafted and bonus
    script = toy.Script(toy.ALPHABET)
    answer = Model.load(script.path).generate([script.start], draft=toy.Known([script.start], script.ids, 2, 1), max_tokens=9)
    assert [answer.spans for _ in answer] == [[("a", True), ("b", True), ("c", False)], [("d", True), ("e", True), ("f", False)],
                                              [("g", True), ("h", True), ("i", False)]]


@pytest.mark.parametrize("options, words", [
    ({"draft": "off", "draft_from": "abc"}, "draft_from: expected draft auto or 1 to 32 with it, found off"),
    ({"draft": 0, "draft_from": "abc"}, "draft_from: expected draft auto"), ({"draft": toy.Fixed([1]), "draft_from": "abc"}, "found a Drafter"),
    ({"draft_from": ""}, "draft_from: expected a text"), ({"draft_from": 5}, "draft_from: expected a text"), ({"draft_from": []}, "draft_from: expected")])
def test_impossible_sources(model, options, words):
    with pytest.raises(KestrelError, match=words):
        model.generate("abc", **options)


# --- arguments ----------------------------------------------------------------------------------------------------------------

@native_only
@pytest.mark.parametrize("options, words", [
    ({"draft": "x"}, "draft: expected"), ({"draft": -1}, "draft: expected"), ({"draft": 33}, "draft: expected"), ({"draft": True}, "draft: expected"),
    ({"draft": "\u0663"}, "draft: expected"), ({"draft": None}, "draft: expected"), ({"draft": 1.5}, "draft: expected"),
    ({"max_tokens": 0}, "max_tokens: expected"), ({"max_tokens": -1}, "max_tokens: expected"), ({"max_tokens": 1.5}, "max_tokens: expected"),
    ({"chunk": 0}, "chunk: expected"), ({"chunk": -1}, "chunk: expected"), ({"chunk": 1 << 20}, "chunk: expected"), ({"chunk": 2.5}, "chunk: expected"),
    ({"temperature": -1.0}, "temperature: expected"), ({"top_p": 0.0}, "top_p: expected"), ({"top_k": -1}, "top_k: expected"),
    ({"min_p": 2.0}, "min_p: expected"), ({"seed": -1}, "seed: expected"), ({"stop": [""]}, "stop: expected")])
def test_impossible_arguments(model, options, words):
    with pytest.raises(KestrelError, match=words) as error:
        model.generate("abc", **options)
    assert "\n" not in str(error.value)


@native_only
@pytest.mark.parametrize("name", ["threads", "prefill_threads", "ctx", "chunk"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_impossible_arguments_of_load(model, name, value):
    with pytest.raises(KestrelError, match=f"^{name.replace('_', ' ')}: expected 1 to \\d+.*, found {value!r}$"):
        Model.load(model.packed.path, **{name: value})


@native_only
@pytest.mark.parametrize("prompt, words", [
    ([], "empty"), ("", "empty"), ([1, 323], "token id: expected 0 to 322, found 323"), ([-1], "token id: expected 0 to 322, found -1"),
    ([1.5], "token id: expected"), (["a"], "token id: expected"), (5, "prompt: expected a text, messages or token ids, found int"), (None, "found NoneType"),
    (b"abc", "found bytes"), ({"role": "user"}, "found dict"), ("\ud800", "surrogate")])
def test_impossible_prompts(model, prompt, words):
    with pytest.raises(KestrelError, match=words):
        model.generate(prompt)


def test_a_cache_that_does_not_fit_is_refused(model):
    used = model.new_kv(50)
    model.generate("ab", max_tokens=3, kv=used).run()
    for kv in (used, model.new_kv(4)):
        with pytest.raises(KestrelError, match="kv: expected an empty cache"):
            model.generate("ab", max_tokens=3, kv=kv)


def test_json_of_an_answer(model):
    answer = model.generate("abcabcabc", max_tokens=12, draft=4).run()
    result = json.loads(json.dumps(answer.to_json()))
    assert result["token_ids"] == answer.token_ids and result["text"] == answer.text
    assert (result["prompt_tokens"], result["completion_tokens"], result["finish_reason"]) == (9, 12, "length")
    assert result["sha256"] == hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in answer.token_ids)).hexdigest()
    assert set(result["seconds"]) == {"load", "prefill", "decode", "draft", "saved"}
    assert all(v >= 0 for k, v in result["seconds"].items() if k != "saved")
    assert result["isa"] == model.isa and result["threads"] == 2 and result["tokens_per_second"] > 0
    assert result["forwards"] == sum(result["accepted_histogram"])
