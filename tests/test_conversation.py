# SPDX-License-Identifier: Apache-2.0
"""conversation.py: what is kept in the cache from turn to turn, what breaks an answer off, and `kestrel chat` in a pipe and in a terminal."""
from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
import toy
from test_cli import kestrel, refused

from kestrel.conversation import Conversation
from kestrel.errors import KestrelError
from kestrel.generate import Model

pytestmark = pytest.mark.native_only


@pytest.fixture(scope="module")
def path():
    return toy.long_toy()


@pytest.fixture(scope="module")
def model(path):
    return Model.load(path)


@pytest.fixture(scope="module")
def digits(model):
    """A bias that makes answers of digits, which are one token each and the same tokens when they are read again."""
    return {model.encode(str(i))[-1]: 60.0 for i in range(10)}


def say(conversation, text):
    pieces = list(conversation.answer(text))
    assert "".join(pieces) == conversation.generation.text
    return conversation.generation


def test_a_turn_reads_only_what_is_new_and_says_the_same(model, digits):
    settings = dict(max_tokens=12, logit_bias=digits, repetition_penalty=1.3)
    conversation = Conversation(model, "Be brief.", **settings)
    for turn, text in enumerate(("abc", "de f", "x")):
        before = conversation.generation
        g = say(conversation, text)
        fresh = model.generate(conversation.messages[:-1], **settings).run()
        assert (g.prompt_ids, g.token_ids, g.text) == (fresh.prompt_ids, fresh.token_ids, fresh.text) and fresh.statistics.cached == 0
        if turn:  # all that was said before, but for the last token, which no pass has read
            assert g.statistics.cached == len(before.prompt_ids) + len(before.token_ids) - 1
            assert g.prompt_ids[:g.statistics.cached] == (before.prompt_ids + before.token_ids)[:-1]
    assert [m["role"] for m in conversation.messages] == ["system"] + ["user", "assistant"] * 3
    assert g.to_json()["cached_tokens"] == g.statistics.cached > 50


@pytest.mark.parametrize("draft", ["off", "auto", 7])
@pytest.mark.parametrize("chunk", [1, 5, 256])
def test_reuse_shows_in_no_bit(path, model, digits, draft, chunk):
    """Cached or not, chunked or not, drafted or not."""
    small = Model.load(path, chunk=chunk)
    conversation = Conversation(small, max_tokens=20, draft=draft, logit_bias=digits)
    for text in ("count", "again"):
        g = say(conversation, text)
    assert g.statistics.cached and g.token_ids == model.generate(conversation.messages[:-1], max_tokens=20, logit_bias=digits, draft=0).run().token_ids
    assert conversation._kv.export() == _kv_of(model, g)


def _kv_of(model, g):
    kv = model.new_kv(1000)
    model.generate(g.prompt_ids + g.token_ids[:-1], max_tokens=1, kv=kv, draft=0).run()
    return kv.export(0, len(g.prompt_ids) + len(g.token_ids) - 1)


def test_what_does_not_come_back_the_same_is_read_again(model):
    """Text that isn't UTF-8 is other tokens when it is read: the common beginning counts, no more."""
    conversation = Conversation(model, max_tokens=30)
    first = say(conversation, "abc")
    held = (first.prompt_ids + first.token_ids)[:-1]
    second = say(conversation, "d")
    common = next((i for i, (a, b) in enumerate(zip(held, second.prompt_ids)) if a != b), len(held))
    assert second.statistics.cached == common >= len(first.prompt_ids)
    assert second.token_ids == model.generate(conversation.messages[:-1], max_tokens=30).run().token_ids


def test_an_answer_broken_off_stays_as_far_as_it_came(model, digits):
    conversation = Conversation(model, max_tokens=50, logit_bias=digits)
    answer = conversation.answer("abc")
    said = next(answer) + next(answer)
    answer.close()
    assert conversation.messages == [{"role": "user", "content": "abc"}, {"role": "assistant", "content": said}]
    g = say(conversation, "go on")
    assert g.statistics.cached and g.token_ids == model.generate(conversation.messages[:-1], max_tokens=50, logit_bias=digits).run().token_ids


def test_a_question_interrupted_before_its_answer_is_taken_back(model, digits):
    conversation = Conversation(model, max_tokens=9, logit_bias=digits)
    say(conversation, "abc")
    before, real = list(conversation.messages), model.forward

    def interrupted(*args, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    model.forward = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            list(conversation.answer("much longer " * 40))
    finally:
        del model.forward
    assert conversation.messages == before
    g = say(conversation, "d")
    assert g.statistics.cached and g.token_ids == model.generate(conversation.messages[:-1], max_tokens=9, logit_bias=digits).run().token_ids


def test_a_full_context_changes_nothing_and_says_so(path, digits):
    small = Model.load(path, ctx=60)
    conversation = Conversation(small, max_tokens=500, logit_bias=digits)
    g = say(conversation, "a")
    assert conversation.full and len(g.prompt_ids) + len(g.token_ids) == 60
    before = list(conversation.messages)
    with pytest.raises(KestrelError, match=r"the context of 60 positions is full: the conversation has \d+ tokens"):
        list(conversation.answer("b"))
    assert conversation.messages == before
    conversation.clear()
    assert conversation.messages == [] and say(conversation, "a").token_ids == g.token_ids


def test_chat_needs_a_template(tmp_path):
    path = toy.Script([b"a", b"b"]).path
    line = refused("chat", path, stdin=b"hello\n", words="has no chat template")
    assert line == f"kestrel: {path}: the model has no chat template; `kestrel generate` completes a plain prompt\n"
    assert "nothing.kestrel" in refused("chat", tmp_path / "nothing.kestrel")
    assert "not UTF-8 at byte 1" in refused("chat", toy.long_toy(), stdin=b"a\xff\n")


def test_piped_conversation(path, model, digits):
    bias = [a for i in digits for a in ("--logit-bias", f"{i}=60")]
    args = ["chat", path, "--max-tokens", 8, "--system", "S", *bias]
    code, out, err = kestrel(*args, "--json", stdin="abc\n\nd é\r\n/exit\nunread\n".encode())
    assert (code, err) == (0, b"")
    answers = [json.loads(line) for line in out.splitlines()]
    reference = Conversation(model, "S", max_tokens=8, logit_bias=digits)
    expected = [say(reference, text) for text in ("abc", "d é")]
    assert [a["token_ids"] for a in answers] == [g.token_ids for g in expected] and answers[1]["cached_tokens"] == expected[1].statistics.cached > 0
    code, out, err = kestrel(*args, stdin="abc\n/clear\nabc\n/what\n/etc/hosts is a file\nd".encode())
    lines = out.decode().split("\n")
    assert code == 0 and lines[0] == lines[1] == expected[0].text and len(lines) == 5 and lines[4] == ""
    assert err.decode() == "kestrel: /what: no such command; /clear begins a new conversation, /exit or end of input ends, Ctrl-C stops an answer\n"


def test_piped_conversation_past_the_context(path, digits):
    bias = [a for i in digits for a in ("--logit-bias", f"{i}=60")]
    code, out, err = kestrel("chat", path, "--ctx", 60, *bias, stdin=b"a\nb\n/clear\na\n")
    lines, said = out.decode().split("\n"), err.decode().splitlines()
    assert code == 2 and len(lines) == 3 and lines[0] == lines[1] and lines[2] == ""
    assert [line.split(":")[1].strip() for line in said] == ["the context is full", "the context of 60 positions is full", "the context is full"]
    code, out, err = kestrel("chat", path, "--ctx", 60, *bias, "--json", stdin=b"a\nb\n/exit now\nunread\n")
    first, second = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and first["text"] and list(second) == ["error"] and second["error"] == err.decode().splitlines()[1].partition(": ")[2]


class Terminal:
    """`kestrel chat` with a terminal on all three streams."""

    def __init__(self, *args):
        self.fd, inner = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-m", "kestrel", "chat", *map(str, args)], stdin=inner, stdout=inner, stderr=inner,
                                        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(inner)
        self.seen = ""

    def send(self, text):
        os.write(self.fd, text.encode())

    def until(self, text, seconds=60):
        """Output up to and with `text`."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} within {seconds} s after {self.seen[-300:]!r}"
            self.seen += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text


def test_ctrl_c_stops_the_answer_and_not_the_program(path, digits):
    bias = [a for i in digits for a in ("--logit-bias", f"{i}=60")]
    t = Terminal(path, "--max-tokens", 4000, "--draft", "off", *bias)
    try:
        assert "Ctrl-C stops an answer" in t.until("> ")
        for _ in range(60):     # at the prompt: nothing is lost. A signal between the prompt and Python's read() waits for the next one.
            t.send("\x03")
            if select.select([t.fd], [], [], 1)[0]:
                break
        t.until("> ")
        for line in ("abc", "go on"):
            t.send(line + "\n")
            t.until(line + "\r\n")     # the terminal's echo: the answer begins some time after it
            while not any(c.isdigit() for c in t.seen):
                assert select.select([t.fd], [], [], 30)[0]
                t.seen += os.read(t.fd, 1 << 16).decode("utf-8", "replace")
            t.send("\x03")
            assert "kestrel: stopped" in t.until("> ")
        t.send("/exit\n")
        assert t.process.wait(30) == 0
    finally:
        if t.process.poll() is None:
            t.process.send_signal(signal.SIGKILL)
            t.process.wait()
        os.close(t.fd)
