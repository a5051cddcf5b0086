# SPDX-License-Identifier: Apache-2.0
"""Where an answer ends: token limits, end ids and stop strings, wherever in a draft they fall."""
from __future__ import annotations

import json

import pytest
import toy
from record import Record, toy_model
from toy import ALPHABET

from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.generate import Model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_model(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("draft", [0, 1, 4, 32])
def test_max_tokens_and_the_end_of_the_context(model, draft):
    """Case 4: the draft is longer than the room left."""
    ids = model.encode(" word" * 20)
    plain = Record(model, ids, draft=0, max_tokens=40)
    for room in (1, 2, 3, 5, 33):
        short = Record(model, ids, draft=draft or 0, max_tokens=room)
        assert (short.ids, short.reason) == (plain.ids[:room], "length")
        right = Record(model, ids, draft=toy.Known(ids, plain.ids), max_tokens=room)
        assert right.answer() == short.answer()
        narrow = Model.load(model.packed.path, threads=1, ctx=len(ids) + room)
        answer = narrow.generate(ids, draft=draft, max_tokens=1000).run()
        assert (answer.token_ids, answer.finish_reason) == (plain.ids[:room], "length")


def test_a_prompt_that_fills_the_context_is_refused(model):
    narrow = Model.load(model.packed.path, threads=1, ctx=10)
    with pytest.raises(KestrelError, match="prompt: 10 tokens leave no room in a context of 10"):
        narrow.generate([1] * 10)
    assert len(narrow.generate([1] * 9, max_tokens=5).run().token_ids) == 1


def test_no_end_id_configured():
    """Case 3."""
    model = Model.load(toy.packed("tiny-tied", eos_token_id=None, bos_token_id=None, pad_token_id=None))
    assert model.config.eos_token_ids == ()
    answer = model.generate("abc", max_tokens=30).run()
    assert len(answer.token_ids) == 30 and answer.finish_reason == "length"


def answers_of(script, max_tokens=40, **options):
    """The same request plain and with drafts that know what comes, beyond the end too; all must be one answer."""
    model = Model.load(script.path, threads=1)
    beyond = (script.ids + [script.start] * (script.end in script.ids)) * 10
    plain = Record(model, [script.start], draft=0, max_tokens=max_tokens, **options)
    for k in (1, 2, 3, 5, 32):
        drafted = Record(model, [script.start], draft=toy.Known([script.start], beyond, k), max_tokens=max_tokens, **options)
        assert drafted.answer() == plain.answer(), k
        if k == 32:
            assert drafted.statistics.forwards < max(2, plain.statistics.forwards // 2 + 1)
    return plain


@pytest.mark.parametrize("length", range(1, 10))
def test_end_id_inside_an_accepted_draft(length):
    """Case 5: ids, text, cache and accounting stop there, wherever in the draft it lies."""
    script = toy.Script(ALPHABET[:length])
    plain = answers_of(script)
    assert plain.ids == script.ids and plain.ids[-1] == script.end
    assert plain.text == "abcdefghij"[:length] and plain.reason == "stop"


def test_every_id_of_an_end_list():
    for at in range(10):
        script = toy.Script(ALPHABET, extra_ends=[toy.Script(ALPHABET).ids[at]])
        plain = answers_of(script)
        assert plain.ids == script.ids[:at + 1] and plain.text == "abcdefghij"[:at] and plain.reason == "stop"


def test_ends_known_to_generation_config_only(tmp_path):
    folder = toy.checkpoint("tiny-tied", eos_token_id=None)
    endless = str(tmp_path / "endless")
    convert(str(folder), endless)
    ids = Model.load(endless).generate("abc", max_tokens=30).run().token_ids
    end = next(t for t in ids[3:] if t not in ids[:3])
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [300, end]}))
    convert(str(folder), str(tmp_path / "ends"))
    answer = Model.load(str(tmp_path / "ends")).generate("abc", max_tokens=30).run()
    assert answer.token_ids == ids[:ids.index(end) + 1] and answer.finish_reason == "stop"
    going_on = Model.load(str(tmp_path / "ends")).generate("abc", max_tokens=30, ignore_end=True).run()
    assert going_on.token_ids == ids and going_on.finish_reason == "length"


WORDS = [b"one ", b"tw", b"o<", b"en", b"d>", b" three", b"<e", b"nd", b"!", b"five\n"]
WHOLE = b"".join(WORDS).decode()


def test_every_stop_string_of_the_text():
    """Case 6: inside a token, over two, three, more; each with and without drafts, streamed and joined."""
    script = toy.Script(WORDS)
    stops = {WHOLE[i:i + n] for n in (1, 2, 3, 5, 6, 9) for i in range(len(WHOLE) - n + 1)}
    assert "<end>" in stops and len(stops) > 100
    model = Model.load(script.path, threads=1)
    for stop in sorted(stops):
        end = WHOLE.index(stop) + len(stop)
        committed = next(i + 1 for i in range(len(WORDS)) if len(b"".join(WORDS[:i + 1])) >= end)
        for draft in (0, toy.Known([script.start], script.ids * 2)):
            record = Record(model, [script.start], draft=draft, max_tokens=40, stop=[stop])
            assert (record.text, record.reason, record.ids) == (WHOLE[:end - len(stop)], "stop", script.ids[:committed]), stop


@pytest.mark.parametrize("stops, expected", [
    (["<end>", "o<"], "one tw"), (["<end>", "<e"], "one two"), (["!", " three", "zzz"], "one two<end>"), (["<end>\n", "end>!"], WHOLE),
    (["five\n\n"], WHOLE), (["five\n"], WHOLE[:-5]), (["<enemy", "<end?"], WHOLE)])
def test_several_stop_strings_and_false_prefixes(stops, expected):
    plain = answers_of(toy.Script(WORDS), stop=stops)
    assert plain.text == expected
    assert plain.reason == "stop"


def test_a_single_stop_string_may_be_a_plain_text():
    model = Model.load(toy.Script(WORDS).path)
    assert model.generate([1], stop="<end>").run().text == "one two"


def test_a_stop_string_in_the_prompt_does_not_count():
    script = toy.Script(WORDS)
    model = Model.load(script.path)
    assert model.generate([*script.ids[:5], script.start], stop=["<end>"]).run().text == "one two"


# Bytes of a text cut where no reader would: emoji of four bytes, CJK of three, an accent of two
CHARACTERS = "a😀你好🎉é漢.𠜎"
PIECES = [b"a\xf0", b"\x9f\x98", b"\x80\xe4", b"\xbd\xa0", b"\xe5\xa5", b"\xbd", b"\xf0\x9f", b"\x8e", b"\x89\xc3", b"\xa9\xe6\xbc", b"\xa2.\xf0\xa0",
          b"\x9c\x8e"]


def test_characters_cut_over_tokens():
    """Case 15: no U+FFFD, nothing doubled, stream = whole."""
    assert b"".join(PIECES).decode() == CHARACTERS
    plain = answers_of(toy.Script(PIECES))
    assert plain.text == CHARACTERS
    assert all(piece in CHARACTERS for piece in plain.pieces)


def test_an_answer_that_ends_inside_a_character():
    script = toy.Script(PIECES)
    for n in range(1, len(PIECES)):
        plain = answers_of(script, max_tokens=n)
        assert plain.text == b"".join(PIECES[:n]).decode("utf-8", "replace")
        assert plain.reason == "length"


def test_stop_strings_of_characters_cut_over_tokens():
    script = toy.Script(PIECES)
    for i, character in enumerate(CHARACTERS):
        assert answers_of(script, stop=[character]).text == CHARACTERS[:i]


def test_padded_vocabulary_is_never_sampled():
    """Case 35: tiny-untied has logits for 384 ids and a tokenizer of 320."""
    model = Model.load(toy.packed("tiny-untied", eos_token_id=None))
    assert model.config.vocab_size == 384 and model.sampled_vocab == model.tokenizer.size == 320
    best = []
    answer = model.generate("abc", max_tokens=200, temperature=5.0, seed=1, observer=lambda position, token, logits: best.append(int(logits.argmax())))
    ids = answer.run().token_ids
    assert max(ids) < 320 and len(ids) == 200
    assert max(best) >= 320  # they would have been chosen
