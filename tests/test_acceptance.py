# SPDX-License-Identifier: Apache-2.0
"""Stop strings and the commit of one token at a time, by a statement over whole texts and every way of cutting them up."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.acceptance import Acceptance, StopStrings
from kestrel.errors import KestrelError


class Letters:
    """A stream whose token is one character."""

    def push(self, token):
        return chr(token)

    def flush(self):
        return ""


class Pieces:
    """A stream with a text for every token, and one that is left at the end."""

    def __init__(self, texts, left=""):
        self._texts, self._left = texts, left

    def push(self, token):
        return self._texts[token]

    def flush(self):
        return self._left


def stated(text, stops):
    """Text up to the stop string that is complete first (of two that end together, the one that began first), and whether there is one."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[:min(begins)], True
    return text, False


def pushed(pieces, stops):
    cutter, out = StopStrings(stops), []
    for piece in pieces:
        out.append(cutter.push(piece))
        if cutter.found:
            return out, True
    out.append(cutter.flush())
    return out, False


letters = st.text("ab", max_size=12)


@pytest.mark.native_only
@settings(max_examples=400, deadline=None)
@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_as_stated_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0] + cuts, cuts + [len(text)])]
    out, found = pushed(pieces, stops)
    assert ("".join(out), found) == stated(text, stops)


@pytest.mark.native_only
def test_every_short_text_and_every_pair_of_stops():
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)]
    for stops in itertools.combinations(words, 2):
        for n in range(7):
            for text in map("".join, itertools.product("ab", repeat=n)):
                out, found = pushed(text, stops)
                assert ("".join(out), found) == stated(text, stops), (stops, text)


@pytest.mark.native_only
@settings(max_examples=200, deadline=None)
@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_held_back_without_need(text, stops):
    """After each character: what is out is all but the longest end that may still become a stop string."""
    cutter, out = StopStrings(stops), ""
    for i, character in enumerate(text):
        out += cutter.push(character)
        if cutter.found:
            break
        seen = text[:i + 1]
        may_grow = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n:]) and len(s) > n for s in stops)]
        assert out == seen[:len(seen) - max(may_grow)]


def test_a_stop_with_text_on_both_sides_inside_one_piece():
    assert pushed(["one<stop>two"], ["<stop>"]) == (["one"], True)
    assert pushed(["a", "b<st", "op", ">c"], ["<stop>", "x"]) == (["a", "b", "", ""], True)
    assert pushed(["a<st", "ay"], ["<stop>"]) == (["a", "<stay", ""], False)
    assert pushed(["a<sto"], ["<stop>"]) == (["a", "<sto"], False)
    assert pushed(["xyz"], ["z", "yz"]) == (["x"], True)
    assert pushed(["xyz"], ["zz", "y"]) == (["x"], True)


def test_after_the_stop_nothing_more():
    cutter = StopStrings(["b"])
    assert cutter.push("ab") == "a" and cutter.found
    assert cutter.push("c") == "" and cutter.flush() == ""


@settings(max_examples=400, deadline=None)
@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 12), st.data())
def test_stops_that_come_too_early_do_not_count(text, stops, early, data):
    """An occurrence counts when its last character comes after the first `early` ones, wherever it began and however the text is cut."""
    early = min(early, len(text))
    ends = [(end, end - len(s)) for end in range(early + 1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {early})
    cutter, out, at = StopStrings(stops), "", 0
    for cut in cuts + [len(text)]:
        out += cutter.push(text[at:cut], may_stop=at >= early)
        at = cut
        if cutter.found:
            break
    out += cutter.flush()
    assert (out, cutter.found) == ((text[:min(ends)[1]], True) if ends else (text, False))


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [b"a"], [1]])
def test_impossible_stop_strings(stops):
    with pytest.raises(KestrelError):
        StopStrings(stops)


# --- commit ------------------------------------------------------------------------------------------------------------

def commit_all(acceptance, tokens):
    """Tokens committed until the answer ends; text taken after each."""
    texts = []
    for n, token in enumerate(tokens, 1):
        goes_on = acceptance.commit(token)
        texts.append(acceptance.take_text())
        if not goes_on:
            return n, texts
    return None, texts


def test_end_ids_end_the_answer_and_give_no_text():
    for end in (2, 3):
        a = Acceptance(Pieces({1: "x", 2: "END", 3: "END", 5: "y"}), [2, 3], [], 10)
        assert commit_all(a, [1, 5, end, 1]) == (3, ["x", "y", ""])
        assert a.finish_reason == "stop" and a.token_ids == [1, 5, end]


def test_max_tokens():
    a = Acceptance(Letters(), [], [], 3)
    assert [a.room, a.commit(97), a.room, a.commit(98), a.room, a.commit(99), a.room] == [3, True, 2, True, 1, False, 0]
    assert a.finish_reason == "length" and a.take_text() == "abc"


def test_end_id_as_the_last_of_max_tokens_is_a_stop():
    a = Acceptance(Letters(), [99], [], 3)
    assert commit_all(a, [97, 98, 99])[0] == 3
    assert a.finish_reason == "stop"


def test_what_is_held_back_is_released_at_the_end():
    for end_ids, reason in (([99], "stop"), ([], "length")):
        a = Acceptance(Letters(), end_ids, ["bzz"], 3)
        n, texts = commit_all(a, [97, 98, 99])
        assert (n, a.finish_reason) == (3, reason)
        assert texts == (["a", "", "b"] if end_ids else ["a", "", "bc"])


def test_half_a_character_at_the_end_is_flushed():
    a = Acceptance(Pieces({1: "x", 2: ""}, left="\ufffd"), [], [], 2)
    assert commit_all(a, [1, 2]) == (2, ["x", "\ufffd"])
    a = Acceptance(Pieces({1: "x", 2: ""}, left="\ufffd"), [], ["x\ufffd"], 2)
    n, texts = commit_all(a, [1, 2])
    assert "".join(texts) == ""  # the stop string is completed by the flush: nothing of it is emitted


def test_a_stop_string_wins_over_max_tokens_reached_at_once():
    a = Acceptance(Letters(), [], ["b"], 2)
    assert commit_all(a, [97, 98]) == (2, ["a", ""])
    assert a.finish_reason == "stop"


def test_stop_strings_before_min_tokens_do_not_end_the_answer():
    for min_tokens, text in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (5, "abab"), (6, "ababab")):
        a = Acceptance(Letters(), [], ["ab"], 6, min_tokens)
        n, texts = commit_all(a, [97, 98] * 3)
        assert ("".join(texts), n, a.finish_reason) == (text, len(text) + 2 if min_tokens < 6 else 6, "stop" if min_tokens < 6 else "length"), min_tokens


def test_what_is_told_of_each_token():
    class Told(list):
        commit = list.append

    told = Told()
    a = Acceptance(Letters(), [99], [], 9, sampling=told)
    for token in (97, 98):
        a.commit(token, ("of", token))
        assert told == a.token_ids and a.logprobs == [("of", t) for t in told]
    assert not a.commit(99)
    assert told == [97, 98, 99] and len(a.logprobs) == 2
