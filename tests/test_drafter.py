# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup against its plain statement, and its cost."""
from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.drafter import NoDraft, PromptLookup

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
