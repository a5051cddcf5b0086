# SPDX-License-Identifier: Apache-2.0
"""A conversation: messages, and a cache that keeps what they have in common with the next prompt. `converse` is its loop in a terminal or a pipe."""
from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Iterator, List, Optional

from .errors import KestrelError
from .generate import Generation, Model
from .model import KVCache

_COMMANDS = "/clear begins a new conversation, /exit or end of input ends, Ctrl-C stops an answer"


class Conversation:
    """Messages with one model. Each prompt is the whole conversation by the model's template; only what the cache doesn't hold yet is read.

    Attributes: messages ([{"role", "content"}], the system message first), generation (the last answer's, for its statistics).
    settings: as of `Model.generate`. KestrelError: the model has no chat template.
    """

    def __init__(self, model: Model, system: Optional[str] = None, **settings: Any):
        if model.chat_template is None:
            raise KestrelError(f"{model.packed.path}: the model has no chat template; `kestrel generate` completes a plain prompt")
        self._model, self._settings = model, settings
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._kv: Optional[KVCache] = None
        self.generation: Optional[Generation] = None
        self.clear()

    def clear(self) -> None:
        """Forgets what was said; the system message stays."""
        self.messages: List[Dict[str, str]] = list(self._system)
        self._held: List[int] = []  # the tokens whose keys and values the cache holds

    @property
    def full(self) -> bool:
        """Whether the last answer ended because the context did."""
        g = self.generation
        return g is not None and g.finish_reason == "length" and len(g.prompt_ids) + len(g.token_ids) >= self._model.ctx

    def answer(self, text: str) -> Iterator[str]:
        """Says `text` and yields the answer's pieces. An answer that is broken off (closed, interrupted) stays as far as it came; one that never began takes
        `text` back with it. KestrelError: the template refuses the messages, or the context is full (nothing is changed then)."""
        self.messages.append({"role": "user", "content": text})
        try:
            generation = self.generation = self._begin()
        except BaseException:
            self.messages.pop()
            raise
        try:
            yield from generation
        finally:
            generation.close()
            assert self._kv is not None
            self._held = (generation.prompt_ids + generation.token_ids)[:self._kv.length]
            if generation.token_ids:
                self.messages.append({"role": "assistant", "content": generation.text})
            else:
                self.messages.pop()

    def _begin(self) -> Generation:
        model = self._model
        ids = model.encode(self.messages)
        if len(ids) >= model.ctx:
            raise KestrelError(f"the context of {model.ctx} positions is full: the conversation has {len(ids)} tokens; /clear begins a new one")
        if self._kv is None:
            self._kv = model.new_kv(model.ctx)
        common = 0
        for a, b in zip(self._held, ids[:-1]):  # the last token must be read anew: its logits are not kept
            if a != b:
                break
            common += 1
        self._held = self._held[:common]
        self._kv.rewind(common)
        return model.generate(ids, kv=self._kv, cached=common, **self._settings)


def converse(conversation: Conversation, report: Optional[Callable[[Any], None]], note: Callable[[str], None]) -> int:
    """Reads messages until the input ends, one a line, and prints the answers as they come (or gives each, whole, to `report` as an object; {"error"} for a
    message that can't be answered). The exit code: 2 when there was such a message and the input is no terminal, else 0.

    In a terminal a line may be edited and Ctrl-C stops the answer, not the program; so it does in a pipe while an answer is being made.
    """
    if sys.stdin is None:
        raise KestrelError("stdin: closed")
    terminal = sys.stdin.isatty()
    code = 0
    if terminal:
        note(_COMMANDS)
    for line in _lines(terminal):
        command = line.strip()
        if not command:
            continue
        word = command.split()[0]
        if word in ("/exit", "/quit"):
            break
        if word == "/clear":
            conversation.clear()
        elif command.startswith("/") and " " not in command and command.count("/") == 1:
            note(f"{command}: no such command; {_COMMANDS}")
        elif not _answer(conversation, line, report, note) and not terminal:
            code = 2
    return code


def _answer(conversation: Conversation, line: str, report: Optional[Callable[[Any], None]], note: Callable[[str], None]) -> bool:
    """Whether the message could be answered."""
    said = False
    try:
        for piece in conversation.answer(line):
            if report is None:
                print(piece, end="", flush=True)
            said = True
        if report is not None and conversation.generation is not None:
            report(conversation.generation.to_json())
    except KestrelError as error:
        if report is not None:
            report({"error": str(error)})
        elif said:
            print(flush=True)
        note(str(error))
        return False
    except KeyboardInterrupt:
        note("stopped")
    if report is None:
        print(flush=True)
    if conversation.full:
        note("the context is full: the answer ends here; /clear begins a new conversation")
    return True


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of standard input without their ends. In a terminal Ctrl-C throws away the line that is being written."""
    if not terminal:
        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                yield raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise KestrelError(f"stdin: line {number}: not UTF-8 at byte {error.start}") from None
        return
    try:
        import readline  # noqa: F401  # input() edits lines when it is there
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(flush=True)
            return
