# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, by the `tokenizers` library on the checkpoint's own tokenizer.json.

Two things are done here and not by the library. Special tokens in text are text unless the caller says otherwise, so
that nobody ends a turn by writing `<|im_end|>`. And decoding goes through bytes, token by token: a streamed text is
the one-shot text by construction, and a token costs the same wherever it stands.
"""
from __future__ import annotations

import codecs
import json
import re
import threading
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from .errors import KestrelError
from .vocabulary import build_from_gguf

__all__ = ["Tokenizer", "StreamDecoder", "build_from_gguf"]


def _byte_alphabet() -> Dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(sorted(set(range(256)) - set(printable)))})
    return table


class _Decoding(NamedTuple):
    """How a token becomes bytes: byte-level, or SentencePiece's word mark with `<0xNN>` byte tokens."""

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""  # the character that stands for a space
    drop_first: bool = False  # the first token loses it instead
    strip: int = 0  # spaces taken off the start of the text


def _decoding(decoder: Optional[Mapping[str, Any]], file: str) -> _Decoding:
    steps = decoder.get("decoders", []) if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    result, fused = _Decoding(), False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            result = result._replace(byte_level=True)
        elif kind == "ByteFallback":
            result = result._replace(byte_fallback=True)
        elif kind == "Metaspace":
            result = result._replace(space=step["replacement"], drop_first=step.get("prepend_scheme") != "never")
        elif kind == "Replace" and step.get("content") == " " and len(step["pattern"].get("String", "")) == 1:
            result = result._replace(space=step["pattern"]["String"])
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step.get("content") == " " and step.get("stop") == 0:
            result = result._replace(strip=step["start"])
        else:
            raise KestrelError(f"{file}: decoder: expected byte-level or SentencePiece steps, found {kind}")
    return result


class Tokenizer:
    """One checkpoint's tokenizer.

    Attributes: size (int, one more than the highest id; logits from there on are padding), special_tokens
    ({text: id}), special_ids (frozenset of int), bos_token, eos_token, unk_token, pad_token (str or None),
    bos_token_id (int or None), adds_bos (bool: a plain prompt begins with BOS).
    """

    @classmethod
    def from_bytes(cls, tokenizer_json: bytes, tokenizer_config: Optional[Mapping[str, Any]] = None,
                   file: str = "tokenizer.json") -> "Tokenizer":
        """From the bytes of tokenizer.json and the parsed tokenizer_config.json; KestrelError names `file`."""
        return cls(tokenizer_json, tokenizer_config or {}, file)

    def __init__(self, tokenizer_json: bytes, tokenizer_config: Mapping[str, Any], file: str):
        self._library = _load(tokenizer_json, file)
        try:
            json.dumps(tokenizer_config, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise KestrelError(f"{file}: tokenizer_config: not valid Unicode: a lone surrogate") from None
        self._lock = threading.Lock()  # around `encode_special_tokens`, a switch on the shared object
        decoder = self._library.decoder
        self._decoding = _decoding(json.loads(decoder.__getstate__()) if decoder is not None else None, file)
        for name in ("bos", "eos", "unk", "pad"):
            token = tokenizer_config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            setattr(self, f"{name}_token", token if isinstance(token, str) else None)
        self._mark_special(tokenizer_config)
        self._added = self._library.get_added_tokens_decoder()
        self.special_tokens: Dict[str, int] = {
            t.content: i for i, t in self._added.items() if t.special and t.content}
        self.special_ids: FrozenSet[int] = frozenset(self.special_tokens.values())
        self._special_pattern = _pattern(t for t in self._added.values() if t.special and t.content)
        self.size: int = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.size:
            raise KestrelError(f"{file}: the vocabulary is empty")
        self.bos_token_id: Optional[int] = self._id(self.bos_token)
        self.adds_bos: bool = self._adds_bos(tokenizer_config.get("add_bos_token"))
        self._bytes: Dict[int, bytes] = {}
        self._alphabet = _byte_alphabet()

    bos_token: Optional[str]
    eos_token: Optional[str]
    unk_token: Optional[str]
    pad_token: Optional[str]

    def _id(self, token: Optional[str]) -> Optional[int]:
        return None if token is None else self._library.token_to_id(token)

    def _mark_special(self, config: Mapping[str, Any]) -> None:
        """Tokens that tokenizer_config calls special are, even where tokenizer.json forgot to say so."""
        from tokenizers import AddedToken

        named = [self.bos_token, self.eos_token, self.unk_token, self.pad_token]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = config.get(key)
            named += more.values() if isinstance(more, Mapping) else more if isinstance(more, list) else []
        contents = [t.get("content") if isinstance(t, Mapping) else t for t in named]
        names = {c for c in contents if isinstance(c, str)}
        self._library.add_special_tokens([
            AddedToken(t.content, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip,
                       normalized=t.normalized, special=True)
            for t in self._library.get_added_tokens_decoder().values() if t.content in names and not t.special])

    def _adds_bos(self, configured: Any) -> bool:
        if self.bos_token_id is None:
            return False
        if isinstance(configured, bool):
            return configured
        return self._library.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]

    def encode(self, text: str, special: bool = False, bos: bool = False) -> List[int]:
        """Token ids of `text`.

        special: special tokens written in the text become their ids (else they are cut up like any text).
        bos: begin with BOS if this checkpoint's prompts do (`adds_bos`) and the text has not brought it along.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise KestrelError(f"text: not valid Unicode at character {error.start}: a lone surrogate") from None
        with self._lock:
            self._library.encode_special_tokens = not special
            ids = self._library.encode(text, add_special_tokens=False).ids
        if bos and self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def split_special(self, text: str) -> List[Tuple[str, Optional[int]]]:
        """`text` cut at special tokens: (token, id) for those, (piece, None) for what lies between."""
        parts: List[Tuple[str, Optional[int]]] = []
        at = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > at:
                parts.append((text[at:match.start()], None))
            token = match.group()
            token = token if token in self.special_tokens else token.strip()  # lstrip, rstrip
            parts.append((token, self.special_tokens[token]))
            at = match.end()
        if at < len(text):
            parts.append((text[at:], None))
        return parts

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for (a part of a character, sometimes); empty for a padding id."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self._token_bytes(token_id)
        return raw

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8")
        token = self._library.id_to_token(token_id) if 0 <= token_id < self.size else None
        if token is None:
            return b""
        if self._decoding.byte_level:
            if all(c in self._alphabet for c in token):
                return bytes(self._alphabet[c] for c in token)
            return token.encode("utf-8")
        if self._decoding.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._decoding.space:
            token = token.replace(self._decoding.space, " ")
        return token.encode("utf-8")

    def decode(self, ids: Iterable[int], special: bool = False, continues: bool = False) -> str:
        """Text of `ids`; see `StreamDecoder` for the two switches. Bytes that are not UTF-8 become U+FFFD."""
        stream = StreamDecoder(self, special, continues)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, special: bool = False, continues: bool = False) -> "StreamDecoder":
        """A new `StreamDecoder` of this tokenizer."""
        return StreamDecoder(self, special, continues)


class StreamDecoder:
    """Token ids in, text out as soon as it is certain: the pieces joined are `Tokenizer.decode` of all the ids.

    special: special tokens appear as their text (else as nothing). continues: the ids follow on from other text, so a
    SentencePiece-style tokenizer keeps the space before the first word (else the text begins here, and loses it).
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False, continues: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        decoding = tokenizer._decoding
        self._drop_first = decoding.drop_first and not continues
        self._strip = 0 if continues else decoding.strip

    def push(self, token_id: int) -> str:
        """The text that this token completes: possibly empty, never half a character."""
        t = self._tokenizer
        if token_id in t.special_ids and not self._special:
            return ""
        raw = t.token_bytes(token_id)
        if self._drop_first:
            self._drop_first = False
            if token_id not in t._added:
                raw = raw.replace(b" ", b"")
        return self._strip_start(self._utf8.decode(raw))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never came whole."""
        return self._strip_start(self._utf8.decode(b"", final=True))

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


def _pattern(tokens: Iterable[Any]) -> "re.Pattern[str]":
    """Leftmost, longest match of any of the tokens, with the white space that lstrip and rstrip let them swallow."""
    ordered = sorted(tokens, key=lambda t: -len(t.content))
    whole = [(r"\s*" if t.lstrip else "") + re.escape(t.content) + (r"\s*" if t.rstrip else "") for t in ordered]
    return re.compile("|".join(whole) or "(?!)")


def _load(tokenizer_json: bytes, file: str) -> Any:
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):
            library.model.dropout = None  # a training aid: with it, ids would be a matter of luck
        library.encode("")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise KestrelError(f"{file}: not a tokenizer: {str(error)[:200]}") from None
    return library
