# SPDX-License-Identifier: Apache-2.0
"""Answers that are abandoned, that an exception or a signal breaks into, or that are given side by side: the cache stays a prefix, the next answer right."""
from __future__ import annotations

import os
import signal
import threading

import pytest
import toy
from record import PROMPTS, Record, toy_model

native_only = pytest.mark.native_only


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_model(tmp_path_factory.mktemp("toy"))


def assert_cache_is_a_prefix(kv, whole, ids):
    """The cache holds positions of the plain answer and nothing else."""
    assert kv.length <= len(ids)
    size = kv.position_bytes // 3  # of one layer
    layers = [whole[i * len(whole) // 3:][:kv.length * size] for i in range(3)]
    assert kv.export() == b"".join(layers)
    length = kv.length
    kv.rewind(length)
    assert kv.length == length


@native_only
@pytest.mark.parametrize("taken", [0, 1, 2, 5])
@pytest.mark.parametrize("draft", [0, 4, "right"])
def test_an_abandoned_answer(model, taken, draft):
    """Case 9: never started (0), or closed after a few pieces."""
    ids = model.encode(PROMPTS["code"])
    plain = Record(model, ids, draft=0, max_tokens=40)
    kv = model.new_kv(len(ids) + 40)
    answer = model.generate(ids, draft=toy.Known(ids, plain.ids, 3) if draft == "right" else draft, max_tokens=40, kv=kv)
    pieces = [next(answer) for _ in range(taken)]
    answer.close()
    answer.close()
    assert answer.token_ids == plain.ids[:len(answer.token_ids)] and plain.text.startswith("".join(pieces))
    assert answer.finish_reason is None
    assert kv.length == (len(ids) + len(answer.token_ids) - 1 if taken else 0)
    assert_cache_is_a_prefix(kv, plain.cache, ids + answer.token_ids)
    assert list(answer) == []
    assert Record(model, ids, draft=4, max_tokens=40).answer() == plain.answer()


@native_only
@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("k", [0, 4, 32])
def test_an_exception_in_the_observer(model, at, k):
    """Case 9: raised at the n-th token, in the middle of an accepted draft too."""
    ids = model.encode(PROMPTS["code"])
    plain = Record(model, ids, draft=0, max_tokens=20)
    kv = model.new_kv(len(ids) + 20)
    seen = []

    def observer(position, token, logits):
        if len(seen) == at:
            raise RuntimeError("stop here")
        seen.append(token)

    answer = model.generate(ids, draft=toy.Known(ids, plain.ids, k), max_tokens=20, kv=kv, observer=observer)
    with pytest.raises(RuntimeError, match="stop here"):
        answer.run()
    assert seen == answer.token_ids == plain.ids[:at]
    assert_cache_is_a_prefix(kv, plain.cache, ids + answer.token_ids)
    rest = "".join(answer)  # of the committed tokens of that pass
    assert answer.text.endswith(rest) and plain.text.startswith(answer.text) and answer.token_ids == seen
    assert Record(model, ids, draft=4, max_tokens=20).answer() == plain.answer()


@native_only
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_exception_in_on_round(model, at):
    """Case 9: raised between two rounds. What was committed stays, in the cache too."""
    ids = model.encode(PROMPTS["code"])
    plain = Record(model, ids, draft=0, max_tokens=20)
    kv = model.new_kv(len(ids) + 20)
    rounds = []

    def on_round(done):
        if len(rounds) == at:
            raise RuntimeError("stop here")
        rounds.append(done)

    answer = model.generate(ids, draft=toy.Known(ids, plain.ids, 4), max_tokens=20, kv=kv, on_round=on_round)
    with pytest.raises(RuntimeError, match="stop here"):
        answer.run()
    assert answer.token_ids == plain.ids[:len(answer.token_ids)] and len(answer.token_ids) > at
    assert_cache_is_a_prefix(kv, plain.cache, ids + answer.token_ids)
    assert Record(model, ids, draft=4, max_tokens=20).answer() == plain.answer()


@native_only
def test_answers_in_turns(model):
    """Two answers of one model, a piece of each in turn."""
    prompts = list(PROMPTS.values())
    plain = [Record(model, p, draft=0, max_tokens=24).ids for p in prompts]
    answers = [model.generate(p, draft=4, max_tokens=24) for p in prompts]
    going = list(answers)
    while going:
        going = [a for a in going if next(a, None) is not None]
    assert [a.token_ids for a in answers] == plain


def test_answers_in_threads(model):
    prompts = list(PROMPTS.values()) * 2
    plain = [Record(model, p, draft=0, max_tokens=24).ids for p in prompts]
    found = [None] * len(prompts)

    def work(i):
        found[i] = model.generate(prompts[i], draft=4 * (i % 2), max_tokens=24).run().token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == plain


@native_only
def test_a_signal_whose_handler_returns_does_not_end_the_answer(model):
    """A window is resized, a child ends: the pass is made again."""
    ids = [(3 * i) % 256 for i in range(1500)]
    plain = Record(model, ids, draft=0, max_tokens=8)
    seen, going = [], threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))

    def send():
        for _ in range(20):
            if not going.wait(0.01):
                os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        interrupted = Record(model, ids, draft=4, chunk=100, max_tokens=8)
    finally:
        going.set()
        sender.join()
        signal.signal(signal.SIGUSR1, previous)
    assert seen
    assert interrupted.answer() == plain.answer()
