# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's chat template, rendered as transformers renders it, in a sandbox; and a conversation as token ids.

A template is a program from a stranger and the messages are text from another: the first can't reach out of the
sandbox, the second can't write special tokens.
"""
from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence

from .errors import KestrelError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_MAX_CHARACTERS = 16 << 20  # of a rendered prompt, and of any string a template multiplies up
_compiled: Dict[str, Any] = {}


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; to us it is only a scope."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Refuses underscored names, which could shadow Python's own."""

        def __init__(*args: Any, **values: Any) -> None:
            jinja2.utils.Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **values).items():
                args[0][name] = value

        def __setitem__(self, name: Any, value: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace can't hold {name!r}")
            super().__setitem__(name, value)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for one, other in ((left, right), (right, left)):
                    if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                        if len(one) * other > _MAX_CHARACTERS:
                            raise SecurityError("a repetition too large")
            elif operator == "**" and isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > 1 << 16:
                    raise SecurityError("a power too large")
            elif operator == "%" and isinstance(left, str) and re.search(r"\d{5}|\*", left):
                raise SecurityError("a formatted width too large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        import datetime

        return datetime.datetime.now().strftime(pattern)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)  # not the class, a way to its attributes
    return environment


def render(template: Optional[str], messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
           **variables: Any) -> str:
    """The conversation as one string.

    messages: [{"role": str, "content": str, ...}, ...]; variables: bos_token, eos_token, tools and whatever else the
    template reads (None leaves a name undefined, as transformers does). KestrelError: no template, a template that
    does not compile, fails, refuses the messages, or tries to leave the sandbox.
    """
    if template is None:
        raise KestrelError("chat: the model has no chat template; use a plain prompt")
    _check(messages)
    try:
        compiled = _compiled.get(template)
        if compiled is None:
            _compiled.clear()
            compiled = _compiled[template] = _environment().from_string(template)
        names = {k: v for k, v in variables.items() if v is not None}
        names = {"tools": None, "documents": None, "messages": messages, **names}
        names = _apply(str, names)  # plain data only: nothing with methods of its own gets in
        pieces, length = [], 0
        for piece in compiled.generate(add_generation_prompt=bool(add_generation_prompt), **names):
            pieces.append(piece)
            length += len(piece)
            if length > _MAX_CHARACTERS:
                raise KestrelError(f"chat template: more than {_MAX_CHARACTERS} characters")
        return "".join(pieces)
    except KestrelError:
        raise
    except Exception as error:  # whatever a template can raise, it is the template's fault
        raise KestrelError(f"chat template: {type(error).__name__}: {str(error)[:300]}") from None


def _check(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise KestrelError(f"messages: expected a list, found {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise KestrelError(f"messages[{i}]: expected an object with a role")


def encode_chat(tokenizer: "Tokenizer", template: Optional[str], messages: Sequence[Mapping[str, Any]],
                add_generation_prompt: bool = True, **variables: Any) -> List[int]:
    """Token ids of the conversation.

    Special tokens that the template writes become their ids; the same characters inside a message stay text. Exactly
    one BOS at the start if the template writes one or the tokenizer adds one. Errors as `render`.
    """
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    names.update(variables)

    def rendered(with_messages: Any, **others: Any) -> str:
        return render(template, with_messages, add_generation_prompt, **{**names, **others})

    plain = rendered(messages)
    mark = _unused_character(plain, template or "", repr((messages, variables)))
    guard = _guard(tokenizer.special_tokens, template or "", mark)
    guarded = rendered(_apply(guard, messages), **_apply(guard, variables))
    parts = tokenizer.split_special(guarded)
    expected = [i for _, i in parts if i is not None]
    # When no message wrote a special token, the library does the whole; it keeps count of where the text begins.
    ids = tokenizer.encode(plain, special=True) if guarded.replace(mark, "") == plain else []
    if not ids or [i for i in ids if i in tokenizer.special_ids] != expected:
        ids = []
        for text, special_id in parts:
            ids += tokenizer.encode(text.replace(mark, "")) if special_id is None else [special_id]
    if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def _unused_character(*texts: str) -> str:
    """A private-use character that occurs nowhere in the texts."""
    used = set().union(*texts)
    return next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)


def _guard(special_tokens: Mapping[str, int], template: str, mark: str) -> Callable[[str], str]:
    """A function that puts `mark` into a string wherever a special token stands or could come to stand.

    That is after each character a special token begins with: a template that cuts something out of a message can't
    join the halves of a token either. What the template itself looks for (`'</think>' in content`) is left whole.
    """
    if not special_tokens:
        return lambda text: text
    firsts = "".join(sorted({token[0] for token in special_tokens}))
    literals = {a or b for a, b in re.findall(r"'([^'\n]{2,})'|\"([^\"\n]{2,})\"", template)}
    kept = "|".join(re.escape(t) for t in sorted(literals, key=len, reverse=True) if t[0] in firsts) or "(?!)"
    first = re.compile(f"({kept})|[{re.escape(firsts)}]")
    special = re.compile("|".join(re.escape(t) for t in sorted(special_tokens, key=len, reverse=True)))

    def guard(text: str) -> str:
        text = first.sub(lambda m: m.group() if m.group(1) else m.group() + mark, text)
        return special.sub(lambda m: m.group()[0] + mark + m.group()[1:], text)  # in a literal, or one itself

    return guard


def _apply(function: Callable[[str], str], value: Any) -> Any:
    """A copy of `value`, plain JSON data, with the function applied to every string in it, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_apply(function, k): _apply(function, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_apply(function, v) for v in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise KestrelError(f"chat: expected plain data (text, numbers, lists, objects), found {type(value).__name__}")
