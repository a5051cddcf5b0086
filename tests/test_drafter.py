# SPDX-License-Identifier: Apache-2.0
"""Drafters against their plain statements, and their cost and memory."""
from __future__ import annotations

import random
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.drafter import OWN_MATCH, CallableDrafter, NoDraft, PromptLookup, Proposal, ReferenceText, Resumption, Sources, SuffixDrafter, as_proposal
from kestrel.errors import KestrelError
from kestrel.suffix import SuffixAutomaton

SIZES = (8, 5, 3, 2)


def stated(history, most, sizes=SIZES):
    """The longest size whose last n tokens occurred before, their newest occurrence, what followed it, around a loop if need be."""
    for n in sizes:
        if len(history) < n + 1:
            continue
        tail = history[-n:]
        for begin in range(len(history) - n - 1, -1, -1):
            if history[begin:begin + n] == tail:
                draft = list(history)
                while len(draft) < len(history) + most:
                    draft.append(draft[begin + n + len(draft) - len(history)])
                return draft[len(history):]
    return []


@pytest.mark.native_only
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 32), st.data())
def test_proposals_are_as_stated(history, most, data):
    drafter, at = PromptLookup(SIZES), 0
    while at < len(history):  # told in pieces of any size
        size = data.draw(st.integers(1, len(history) - at))
        drafter.extend(history[at:at + size])
        at += size
    assert drafter.propose(most) == stated(history, most)
    assert drafter.propose(most) == stated(history, most)  # asking changes nothing


@pytest.mark.native_only
def test_proposals_all_along_a_random_history():
    rng = random.Random(2)
    history, drafter = [], PromptLookup(SIZES)
    hits = 0
    for _ in range(600):
        history.append(rng.randrange(6))
        drafter.extend(history[-1:])
        expected = stated(history, 4)
        hits += bool(expected)
        assert drafter.propose(4) == expected
    assert hits > 300


def test_longest_match_wins_then_the_newest():
    #                    long match        newer, shorter match
    history = [1, 2, 3, 4, 5, 60, 9, 9, 9, 4, 5, 70, 8, 8, 1, 2, 3, 4, 5]
    drafter = PromptLookup((5, 2))
    drafter.extend(history)
    assert drafter.propose(1) == [60]
    shorter = PromptLookup((2,))
    shorter.extend(history)
    assert shorter.propose(2) == [70, 8]


def test_a_loop_goes_on_past_the_history():
    drafter = PromptLookup()
    drafter.extend([7, 7, 7])
    assert drafter.propose(5) == [7] * 5
    drafter.extend([1, 2, 3, 1, 2, 3])
    assert drafter.propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_known_nothing_proposed():
    for history in ([], [1], [1, 2], [1, 2, 3, 4]):
        drafter = PromptLookup()
        drafter.extend(history)
        assert drafter.propose(8) == []
    drafter = NoDraft()
    drafter.extend([1, 1, 1, 1])
    assert drafter.propose(8) == []


def test_two_drafters_share_nothing():
    a, b = PromptLookup(), PromptLookup()
    a.extend([1, 2, 3, 1, 2])
    b.extend([1, 2])
    assert a.propose(1) == [3] and b.propose(1) == []


@pytest.mark.native_only
def test_a_token_costs_the_same_after_fifty_thousand():
    """Case 16. Medians of 500 tokens each, early and late; a look through the history would take a thousand times longer late."""
    rng = random.Random(3)
    drafter = PromptLookup()

    def median(count):
        times = []
        for _ in range(count):
            token = [rng.randrange(200)]
            begin = time.perf_counter()
            drafter.extend(token)
            drafter.propose(4)
            times.append(time.perf_counter() - begin)
        return sorted(times)[count // 2]

    drafter.extend([rng.randrange(200) for _ in range(500)])
    early = median(500)
    drafter.extend([rng.randrange(200) for _ in range(50_000)])
    assert median(500) < 10 * early + 1e-5


# --- suffix automaton ----------------------------------------------------------------------------------------------------

def occurrences(history, part):
    return [i for i in range(len(history) - len(part) + 1) if history[i:i + len(part)] == part]


def longest_match(history):
    """Length of the longest suffix that occurs before too."""
    return next((n for n in range(len(history) - 1, 0, -1) if len(occurrences(history, history[-n:])) > 1), 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_automaton_finds_the_longest_match_and_the_most_frequent_continuation(history):
    automaton = SuffixAutomaton()
    for token in history:
        automaton.append(token)
    n = longest_match(history)
    assert automaton.match == n
    assert automaton.states <= max(2 * len(history), 2)
    found = automaton.continuation(1, 0.0)
    if not n:
        assert found == []
        return
    followers = [history[i + n] for i in occurrences(history, history[-n:]) if i + n < len(history)]
    counts = {token: followers.count(token) for token in followers}
    # frequencies are exact unless the chain of suffixes is longer than what is counted, as in a loop
    if len(set(history)) > 2 and len(history) < 16:
        assert counts[found[0]] == max(counts.values())
    assert found[0] in counts


def test_frequency_decides_and_its_share_ends_the_draft():
    history = [9, 1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 6, 9, 1, 2]
    drafter = SuffixDrafter()
    drafter.extend(history)
    found = drafter.propose(4)
    assert found[0] == 6 and (found.source, found.match) == ("suffix", longest_match(history))
    even = SuffixDrafter(least_share=0.6)  # after 1 came 2, 3, 4 and 5, once each
    even.extend([1, 2, 1, 3, 1, 4, 1, 5, 1])
    assert even.propose(4) == [] and even.propose(4).match == 1


def test_a_longer_match_gives_a_longer_draft():
    lengths = []
    for n in (1, 2, 5, 12):
        drafter = SuffixDrafter()
        drafter.extend([*range(100, 100 + n), *range(200, 260), 0, *range(100, 100 + n)])
        assert drafter.propose(32).match == n
        assert drafter.propose(32) == list(range(200, 200 + len(drafter.propose(32))))
        assert drafter.propose(3) == [200, 201, 202]
        lengths.append(len(drafter.propose(32)))
    assert lengths == [6, 8, 14, 28]


def test_a_loop_goes_on_in_the_automaton():
    drafter = SuffixDrafter()
    drafter.extend([7] * 20)
    assert drafter.propose(30) == [7] * 30
    drafter.extend([1, 2, 3] * 8)
    assert drafter.propose(7) == [1, 2, 3, 1, 2, 3, 1]


# --- cost and memory ------------------------------------------------------------------------------------------------------

def text_like(count, seed=4):
    """Phrases drawn with a long tail: repeats of every length."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(49000) for _ in range(rng.randint(1, 7))] for _ in range(3000)]
    tokens = []
    while len(tokens) < count:
        tokens += phrases[min(int(rng.paretovariate(0.6)) - 1, len(phrases) - 1)]
    return tokens[:count]


def lines_run(work):
    """Lines of Python that a call runs: a cost that no load of the machine changes."""
    count = [0]

    def trace(frame, event, argument):
        count[0] += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count[0]


@pytest.mark.native_only
@pytest.mark.parametrize("kind", [SuffixDrafter, PromptLookup, Resumption])
@pytest.mark.parametrize("make", [text_like, lambda n: [5] * n, lambda n: [i * i % 7 for i in range(n)]], ids=["text", "one token", "a loop"])
def test_a_token_takes_as_many_steps_after_32k(kind, make):
    """Case 16, by counting."""
    tokens = make(32_000)

    def work(part):
        for token in part:
            drafter.extend([token])
            drafter.propose(16)

    drafter = kind()
    drafter.extend(tokens[:1000])
    early = lines_run(lambda: work(tokens[1000:1300]))
    drafter.extend(tokens[1300:31_700])
    late = lines_run(lambda: work(tokens[31_700:]))
    assert late < 3 * early and late < 300 * 400


@pytest.mark.native_only
@pytest.mark.parametrize("make", [text_like, lambda n: list(range(n)), lambda n: [5] * n], ids=["text", "all different", "one token"])
def test_memory_has_a_ceiling(make):
    tokens = make(20_000)
    suffix, lookup, resumption = SuffixDrafter(ceiling=1024), PromptLookup(ceiling=1024), Resumption(ceiling=1024)
    most_states = most_entries = most_grams = switched = 0
    for token in tokens:
        before = suffix.states
        suffix.extend([token])
        lookup.extend([token])
        resumption.extend([token])
        most_grams = max(most_grams, resumption.entries)
        switched += suffix.states < before
        most_states, most_entries = max(most_states, suffix.states), max(most_entries, lookup.entries)
    assert most_states <= 2 * 1024 and most_entries <= 2 * 1024 + 4 and most_grams <= 2 * 1024
    if make is not text_like:
        return
    assert switched > 10 and most_states > 1024
    for drafter in (suffix, lookup):  # what is recent is still known
        drafter.extend([*range(100_000, 100_020), 1, *range(100_000, 100_010)])
        assert drafter.propose(5) == list(range(100_010, 100_015))


def test_oldest_matches_go_first():
    suffix, lookup = SuffixDrafter(ceiling=256), PromptLookup(ceiling=256)
    for drafter in (suffix, lookup):
        drafter.extend([1, 2, 3, 4, 5, 6, 7, 8, 9])
        drafter.extend(range(1000, 2000))
        drafter.extend([1, 2, 3, 4, 5])
        assert drafter.propose(4) == []


# --- a text to follow ----------------------------------------------------------------------------------------------------

TEXT = list(range(100, 160))


def told(*parts, text=TEXT, skip=0):
    drafter = ReferenceText(text, skip)
    for part in parts:
        drafter.extend(part)
    return drafter


def test_a_text_is_followed_from_its_beginning():
    assert told().propose(4) == TEXT[:4]
    following = told(TEXT[:7]).propose(4)
    assert following == TEXT[7:11] and (following.source, following.match) == ("text", 7)
    assert told(TEXT).propose(4) == [] and told(TEXT[:58]).propose(4) == TEXT[58:]


@pytest.mark.parametrize("change, expected", [
    ([1], 11),                      # one token in another's place: goes on after it
    ([1, 2, *TEXT[11:13]], 13),     # two for one: found again by the tokens that follow
    ([1, *TEXT[10:12]], 12),        # one put in
    ([*TEXT[14:16]], 16),           # four left out
    ([1, 2, 3, *TEXT[40:44]], 44),  # a part moved up
    ([*TEXT[2:6]], 6),              # back to an earlier part
])
def test_a_text_is_found_again_after_a_change(change, expected):
    assert told(TEXT[:10], change).propose(3) == TEXT[expected:expected + 3]


def test_of_equal_places_the_nearest_onwards():
    text = [7, 8, 1, 7, 8, 2, 7, 8, 3, 7, 8, 4]
    assert told([7, 8, 1, 99, 7, 8], text=text).propose(1) == [2]
    assert told([7, 8, 1, 7, 8, 2, 99, 98, 7, 8], text=text).propose(1) == [3]


def test_another_text_is_not_drafted_for_long():
    assert [len(told(TEXT[:10], [1] * n).propose(3)) for n in range(7)] == [3, 3, 3, 3, 3, 0, 0]
    assert told(TEXT[:10], [1] * 20, TEXT[30:32]).propose(3) == TEXT[32:35]


def test_a_text_too_long_is_refused():
    with pytest.raises(KestrelError, match="draft_from: expected a text of at most 65536 tokens, found 65537"):
        ReferenceText([1] * 65537)
    assert ReferenceText([1] * 65536).propose(2) == [1, 1]


def test_the_prompt_is_no_part_of_the_answer():
    for parts in ([TEXT[:20]], [TEXT[:12], TEXT[12:20]], [TEXT[:20], TEXT[:3]]):
        drafter = told(*parts, skip=20)
        assert drafter.propose(2) == (TEXT[3:5] if len(parts) == 2 and len(parts[1]) == 3 else TEXT[:2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 6), max_size=60), st.integers(0, 8), st.integers(0, 10))
def test_any_text_and_any_answer(text, answer, most, skip):
    """What is proposed is a part of the text, however it was told."""
    whole = told(answer, text=text, skip=skip)
    pieces = told(*([token] for token in answer), text=text, skip=skip)
    found = whole.propose(most)
    assert found == pieces.propose(most) and len(found) <= most
    assert found == [] or occurrences(text, list(found))


# --- a copy with changes -------------------------------------------------------------------------------------------------

def resumed(*parts):
    drafter = Resumption()
    for part in ([*TEXT, 0], *parts):
        drafter.extend(part)
    return drafter


@pytest.mark.parametrize("change, expected", [
    ([], []), ([7], TEXT[21:25]), ([7, 8], TEXT[22:26]), ([7, 8, 9], TEXT[23:27]), ([7, 8, 9, 10], []), ([7, *TEXT[21:23]], []),
    ([7, *TEXT[21:23], 8], TEXT[24:28]), ([7, 8, *TEXT[22:30], 9], TEXT[31:35])])
def test_a_copy_goes_on_after_a_change(change, expected):
    found = resumed(TEXT[:20], change).propose(4)
    assert found == expected and (not expected or (found.source, found.match) == ("resume", 1))


def test_a_short_match_is_no_copy():
    assert resumed(TEXT[:7], [7]).propose(4) == [] and resumed(TEXT[:8], [7]).propose(4) == TEXT[9:13]
    assert resumed(TEXT[50:60], [7]).propose(4) == TEXT[:4][:0] + [*TEXT[50:54]]  # past its end comes what followed it
    assert resumed(TEXT[:20], [7]).propose(0) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120), st.integers(1, 9))
def test_what_is_resumed_stood_there_before(history, most):
    whole, pieces = Resumption(), Resumption()
    whole.extend(history)
    for token in history:
        pieces.extend([token])
    found = whole.propose(most)
    assert found == pieces.propose(most) and len(found) <= most
    assert found == [] or occurrences(history, list(found))


# --- several as one -----------------------------------------------------------------------------------------------------

class Says:
    def __init__(self, found):
        self._found, self.told = found, []

    def extend(self, tokens):
        self.told += tokens

    def propose(self, most):
        return self._found


def test_the_longest_match_wins_then_the_first():
    a, b, c = Says(Proposal([1], "a", 3)), Says(Proposal([2], "b", 5)), Says(Proposal([3], "c", 5))
    sources = Sources([a, b, c, Says(Proposal()), NoDraft()])
    sources.extend([7, 8])
    assert a.told == b.told == c.told == [7, 8]
    assert [p.source for p in sources.proposals(4)] == ["a", "b", "c"]
    assert sources.propose(4) == [2] and sources.propose(4).source == "b"
    assert Sources([NoDraft()]).propose(4) == []


def test_a_plain_sequence_is_ones_own_proposal():
    given_list = [1, 2, 3, 4]
    for found in (given_list, tuple(given_list), range(1, 5)):
        proposal = as_proposal(found, 3)
        assert proposal == [1, 2, 3] and (proposal.source, proposal.match) == ("own", OWN_MATCH)
    own = Proposal(given_list, "mine", 2)
    cut = as_proposal(own, 3)
    assert cut == [1, 2, 3] and (cut.source, cut.match) == ("mine", 2) and own == given_list  # the drafter's own list is left alone


def test_a_function_as_drafter():
    asked = []

    def after(tokens, most):
        asked.append((list(tokens), most))
        return [tokens[-1] + 1] * most

    drafter = CallableDrafter(after)
    drafter.extend([1, 2])
    drafter.extend([5])
    assert drafter.propose(2) == [6, 6] and asked == [([1, 2, 5], 2)]
