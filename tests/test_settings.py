# SPDX-License-Identifier: Apache-2.0
"""Every setting of an answer: refused when impossible, honoured otherwise, and the same bytes whatever is drafted.

KESTREL_EXAMPLES=5000 python -m pytest tests/test_settings.py -k random_settings is the nightly size of the property test.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import struct

import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record import Record
from test_cli import kestrel, refused
from test_sample import changed, sample

from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.sampling import MOST_LOGPROBS, Settings
from kestrel.toy import CONFIG, write_toy

EMULATED = bool(os.environ.get("ARM_PYTHON"))
EXAMPLES = int(os.environ.get("KESTREL_EXAMPLES") or (25 if EMULATED else 250))
END_IDS = (40, 99, 174, 300)  # often near the top of the toy's logits; 300 is padding of the vocabulary


@functools.lru_cache(maxsize=None)
def path():
    file = str(toy._scratch() / "settings.kestrel")
    write_toy(file, config=dataclasses.replace(CONFIG, eos_token_ids=END_IDS))
    return file


@functools.lru_cache(maxsize=None)
def model(threads=2):
    return Model.load(path(), threads=threads, chunk=512)


# --- refused --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, value", [
    ("max_tokens", 0), ("max_tokens", True), ("max_tokens", "5"), ("min_tokens", -1), ("min_tokens", 129), ("min_tokens", 1.0), ("temperature", "1"),
    ("temperature", None), ("temperature", True), ("top_k", True), ("top_p", "x"), ("repetition_penalty", 0), ("repetition_penalty", -1.5),
    ("repetition_penalty", math.nan), ("repetition_penalty", math.inf), ("repetition_penalty", 1e7), ("presence_penalty", math.nan),
    ("presence_penalty", -1.1e6), ("frequency_penalty", math.inf), ("frequency_penalty", "0"), ("logit_bias", [1, 2]), ("logit_bias", None),
    ("logit_bias", {-1: 0}), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: math.nan}), ("logit_bias", {5: -math.inf}), ("logit_bias", {5: "x"}),
    ("logit_bias", {True: 1.0}), ("logprobs", -1), ("logprobs", MOST_LOGPROBS + 1), ("logprobs", True), ("logprobs", 1.5), ("stop", [""]), ("stop", 5),
    ("stop", [5]), ("stop", ""), ("stop", b"x"), ("stop", None), ("ignore_end", "no"), ("ignore_end", 1)])
def test_impossible_settings(name, value):
    with pytest.raises(KestrelError, match=f"^{name}: expected ") as error:
        Settings(**{name: value})
    assert "\n" not in str(error.value)
    with pytest.raises(KestrelError, match=f"^{name}: expected "):
        model().generate("abc", **{name: value})


def test_settings_that_this_model_can_not_honour():
    """Case 12: refused, not ignored."""
    for options, words in (({"logit_bias": {257: 1.0}}, "logit_bias: token id 257: expected 0 to 256"),
                           ({"logit_bias": {1 << 30: 1.0}}, "logit_bias: token id 1073741824")):
        with pytest.raises(KestrelError, match=words):
            model().generate("abc", **options)
    narrow = Model.load(path(), threads=1, ctx=10)
    with pytest.raises(KestrelError, match="min_tokens: 3 prompt tokens leave 7 in a context of 10, found 8"):
        narrow.generate("abc", min_tokens=8)
    assert len(narrow.generate("abc", min_tokens=7).run().token_ids) == 7
    with pytest.raises(TypeError, match="mirostat"):
        model().generate("abc", mirostat=2)


def test_numbers_of_numpy_are_numbers():
    options = dict(max_tokens=np.int64(9), min_tokens=np.int32(2), temperature=np.float32(0.5), top_k=np.int64(20), seed=np.uint64(7),
                   repetition_penalty=np.float64(1.25), logit_bias={np.int64(65): np.float32(0.5)}, logprobs=np.int8(1))
    plain = {k: v.item() if k != "logit_bias" else {65: 0.5} for k, v in options.items()}
    assert Record(model(), "abc", **options).answer() == Record(model(), "abc", **plain).answer()


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1


# --- honoured: against the statement of test_sample, from the model's own logits ----------------------------------------------------------

REPEATING = "abcab abcab abcab abc"
HONOURED = {
    "repetition": {"repetition_penalty": 1.4, "ignore_end": True}, "presence": {"presence_penalty": 2.5, "ignore_end": True},
    "frequency": {"frequency_penalty": 0.8, "ignore_end": True},
    "rewarded": {"presence_penalty": -1.5, "frequency_penalty": -0.5, "repetition_penalty": 0.9, "ignore_end": True},
    "bias": {"logit_bias": {65: 4.0, 99: -1e6, 40: 2.5}, "ignore_end": True}, "min_tokens": {"min_tokens": 17},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {32: 3.0, 98: 1.5}, "min_tokens": 9}}


@pytest.mark.parametrize("draft", ["off", "auto", "wrong"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("name", HONOURED)
def test_tokens_are_chosen_from_changed_logits(name, temperature, draft):
    """Case 12: counts are of committed tokens only, whatever was drafted and rejected in between."""
    wanted = Settings(max_tokens=24, temperature=temperature, seed=3, **HONOURED[name])
    rows, answer = [], []

    def observe(position, token, logits):
        row = logits[:257].copy()
        expected = changed(row, wanted, prompt, answer, END_IDS)
        assert token == sample(expected, position, temperature=temperature, seed=3), len(answer)
        rows.append((row, expected))
        answer.append(token)

    prompt = model().encode(REPEATING)
    drafter = toy.Fixed([65, 66, 65, 65]) if draft == "wrong" else draft
    generation = model().generate(prompt, draft=drafter, observer=observe, **dataclasses.asdict(wanted)).run()
    assert generation.token_ids == answer and len(rows) >= max(1, wanted.min_tokens)
    assert any(row.tobytes() != expected.tobytes() for row, expected in rows)


def test_every_setting_changes_the_answer():
    """Else the test above and the one of random settings would compare the plain answer with itself."""
    plain = {end: model().generate(REPEATING, max_tokens=24, ignore_end=end).run().token_ids for end in (False, True)}
    answers = {name: model().generate(REPEATING, max_tokens=24, **options).run().token_ids for name, options in HONOURED.items()}
    assert [name for name, ids in answers.items() if ids == plain[HONOURED[name].get("ignore_end", False)]] == []


@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6, 7, 11, 12, 13, 40])
def test_end_ids_and_min_tokens(min_tokens):
    """The script's end id comes every sixth token. While it can't be chosen, all others tie and the lowest id goes on: the start again."""
    script = toy.Script([bytes([c]) for c in b"abcde"])
    scripted = Model.load(script.path, threads=1)
    expected, after = [], dict(zip([script.start] + script.ids, script.ids + [script.start]))
    last = script.start
    while last != script.end and len(expected) < 40:
        last = after[last]
        if last == script.end and len(expected) < min_tokens:
            last = script.start
        expected.append(last)
    for k in (0, 1, 3, 32):
        record = Record(scripted, [script.start], draft=toy.Known([script.start], expected, k), max_tokens=40, min_tokens=min_tokens)
        assert (record.ids, record.reason) == (expected, "stop" if min_tokens < 40 else "length")


@pytest.mark.parametrize("min_tokens, text", [(0, "ab"), (3, "ab"), (4, "abcdeab"), (8, "abcdeab"), (9, "abcdeabcdeab")])
def test_stop_strings_and_min_tokens(min_tokens, text):
    """The stop string is complete with the 4th, 9th, 14th token; one that began before min_tokens counts when its end comes after."""
    script = toy.Script([bytes([c]) for c in b"abcde"], ends=False)
    scripted = Model.load(script.path, threads=1)
    order = script.ids * 8
    for k in (0, 2, 32):
        drafter = toy.Known(order[-1:], order, k)
        record = Record(scripted, order[-1:], draft=drafter, max_tokens=30, min_tokens=min_tokens, stop=["cd"])
        assert (record.text, record.reason) == (text, "stop")


# --- log-probabilities -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("draft", ["off", "auto", "right"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 3, "seed": 4}, {"temperature": 0.7, **HONOURED["all"]}], ids=["greedy", "seeded", "all"])
def test_logprobs_are_the_models_own(options, draft):
    """Case 13, against float64, before every setting."""
    prompt = model().encode(REPEATING)
    plain = model().generate(prompt, max_tokens=20, draft=0, **options).run()
    drafter = toy.Known(prompt, plain.token_ids, 5, 1) if draft == "right" else draft
    rows = []
    generation = model().generate(prompt, max_tokens=20, draft=drafter, logprobs=4, observer=lambda p, t, logits: rows.append(logits[:257].copy()), **options)
    generation.run()
    assert generation.token_ids == plain.token_ids and plain.logprobs is None
    assert [p.token for p in generation.logprobs] == plain.token_ids
    for row, p in zip(rows, generation.logprobs):
        wide = row.astype(np.float64)
        stated = wide - wide.max() - math.log(math.fsum(np.exp(wide - wide.max())))
        assert p.logprob == pytest.approx(stated[p.token], abs=1e-12)
        best = sorted(range(257), key=lambda i: (-row[i], i))[:4]
        assert [i for i, _ in p.top] == best and [v for _, v in p.top] == pytest.approx(list(stated[best]), abs=1e-12)


def test_logprobs_in_json():
    answer = model().generate("abc", max_tokens=6, logprobs=2, ignore_end=True).run()
    result = json.loads(json.dumps(answer.to_json()))
    assert result["logprobs"] == [{"token": p.token, "logprob": p.logprob, "top": [[i, v] for i, v in p.top]} for p in answer.logprobs]
    assert len(result["logprobs"]) == 6 and all(len(p["top"]) == 2 for p in result["logprobs"])
    bare = model().generate("abc", max_tokens=6, logprobs=0, ignore_end=True).run()
    assert [p.top for p in bare.logprobs] == [[]] * 6 and [p.logprob for p in bare.logprobs] == [p.logprob for p in answer.logprobs]
    assert "logprobs" not in model().generate("abc", max_tokens=6).run().to_json()


# --- off == on ---------------------------------------------------------------------------------------------------------------------

PROMPTS = (REPEATING, "xyz", " word" * 12, "def f(a):\n    return a\n\ndef f(a, b):\n", "日本語 émoji 😀 日本語", "A")
amounts = st.sampled_from([0.0, 0.4, 1.5, -0.7]) | st.floats(-3, 3)
requests = st.fixed_dictionaries({
    "max_tokens": st.integers(1, 24), "temperature": st.sampled_from([0.0, 0.0, 0.6, 1.3, 4.0]), "top_k": st.sampled_from([0, 0, 1, 5, 60]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.4]), "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5]), "seed": st.integers(0, 2 ** 64 - 1),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.15, 1.8, 0.8]), "presence_penalty": amounts, "frequency_penalty": amounts,
    "logit_bias": st.dictionaries(st.integers(0, 256), st.floats(-8, 8), max_size=6), "logprobs": st.sampled_from([None, 0, 1, 7, 100]),
    "ignore_end": st.booleans()})


class Observed(Record):
    """A Record that compares the log-probabilities too, by their exact representation."""

    def answer(self):
        g = self.generation
        usage = len(g.prompt_ids), len(g.token_ids), g.to_json()["completion_tokens"]
        return super().answer() + (repr(g.logprobs), usage)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(PROMPTS), requests, st.data())
def test_random_settings(prompt, options, data):
    """Off == on in ids, text, logprobs, finish reason, usage, logits and cache; whatever the drafts, the chunk, the threads; streamed or not."""
    ids = model().encode(prompt)
    options["min_tokens"] = data.draw(st.just(0) | st.integers(0, options["max_tokens"]))
    text = model().generate(ids, draft=0, **options).run().text
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 4)), max_size=3)) if text else []
    options["stop"] = [text[min(a, len(text) - 1):][:n] for a, n in cuts]
    plain = Observed(model(), ids, draft=0, chunk=512, **options)
    assert plain.statistics.proposed == 0 and len(plain.ids) >= min(options["min_tokens"], options["max_tokens"])
    wrongs, most = data.draw(st.integers(0, 4)), model().sampled_vocab
    known = toy.Known(ids, plain.ids, data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)), wrongs, most)
    fixed = toy.Fixed(data.draw(st.lists(st.integers(-1, 330), max_size=20)))
    for draft in (known, data.draw(st.sampled_from(["auto", 1, 3, 16, 32, fixed]))):
        chunk, threads = data.draw(st.sampled_from([1, 2, 7, 64, 512])), data.draw(st.integers(1, 3))
        assert Observed(model(threads), ids, draft=draft, chunk=chunk, **options).answer() == plain.answer()
    # the context's edge, not streamed
    narrow = Model.load(path(), threads=1, ctx=len(ids) + options["max_tokens"])
    known = toy.Known(ids, plain.ids, 32, wrongs, most)
    whole = narrow.generate(ids, draft=known, **{**options, "max_tokens": options["max_tokens"] + 50}).run()
    assert (whole.token_ids, whole.text, whole.finish_reason, repr(whole.logprobs)) == (plain.ids, plain.text, plain.reason, repr(plain.generation.logprobs))


# --- the command line ------------------------------------------------------------------------------------------------------------------

@pytest.mark.native_only
def test_options_of_the_command_line():
    options = dict(min_tokens=4, repetition_penalty=1.3, presence_penalty=0.25, frequency_penalty=-0.5, logprobs=3)
    bias = {65: 2.5, 99: -100.0}
    expected = model().generate("abcabc", max_tokens=15, logit_bias=bias, **options).run().to_json()
    args = [a for k, v in options.items() for a in ("--" + k.replace("_", "-"), v)] + [a for i, b in bias.items() for a in ("--logit-bias", f"{i}={b}")]
    code, out, err = kestrel("generate", path(), "--prompt", "abcabc", "--max-tokens", 15, "--json", *args)
    assert (code, err) == (0, b"")
    result = json.loads(out)
    assert {k: result[k] for k in ("text", "token_ids", "finish_reason", "logprobs")} == {k: expected[k] for k in ("text", "token_ids", "finish_reason", "logprobs")}


@pytest.mark.native_only
@pytest.mark.parametrize("args, words", [
    (["--min-tokens", "-1"], "min_tokens: expected"), (["--min-tokens", "6"], "min_tokens: expected an integer from 0 to max_tokens (5)"),
    (["--repetition-penalty", "0"], "repetition_penalty: expected"), (["--presence-penalty", "nan"], "presence_penalty: expected"),
    (["--logprobs", "1"], "--logprobs: only with --json"), (["--logprobs", "101", "--json"], "logprobs: expected"), (["--logit-bias", "x"], "expected ID=BIAS"),
    (["--logit-bias", "5"], "expected ID=BIAS"), (["--logit-bias", "5=inf"], "logit_bias: expected"), (["--logit-bias", "999=1"], "token id 999"),
    (["--logit-bias", "5=1", "--logit-bias", "5=2"], "given twice"), (["--frequency-penalty", "x"], "--frequency-penalty")])
def test_impossible_options_of_the_command_line(args, words):
    refused("generate", path(), "--prompt", "abc", "--max-tokens", 5, *args, words=words)


# --- everywhere ------------------------------------------------------------------------------------------------------------------------

# Of `digest()` below, x86-64 AVX2 host, gcc 12, numerics version 1. Every machine, compiler and instruction set must give it.
GOLDEN = "baeec1815c3ddbbe41e9b8027b76eb91d0ea507ef1a6d79f5c3027bfcb3ad85f"


def digest():
    seen = hashlib.sha256()
    for options in ({}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}, {"temperature": 0.7, **HONOURED["all"]}, HONOURED["rewarded"]):
        generation = model().generate(REPEATING, max_tokens=24, logprobs=5, **options).run()
        for p in generation.logprobs:
            seen.update(struct.pack("<id5i5d", p.token, p.logprob, *(i for i, _ in p.top), *(v for _, v in p.top)))
    return seen.hexdigest()


def test_the_same_bytes_everywhere():
    assert digest() == GOLDEN
