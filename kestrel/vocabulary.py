# SPDX-License-Identifier: Apache-2.0
"""The vocabulary inside a GGUF file, rewritten as the `tokenizer.json` it was made from.

Two kinds (`tokenizer.ggml.model`): byte-level BPE (gpt2), whose merges the file lists, and SentencePiece's BPE (llama),
whose merges follow from the tokens' scores. How byte-level text is cut before merging is known to GGUF by a name alone
(`tokenizer.ggml.pre`); the table below says what each name means, after llama.cpp's src/llama-vocab.cpp and the
tokenizer.json files that the names stand for. A name that is not in it is refused: a wrong cut gives other ids with the
same text, and nothing would show it.
"""
from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from .errors import KestrelError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(regex: str) -> Dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


class _Pre(NamedTuple):
    """The cut, whether a whole piece that is a token skips the merges, whether BOS is added unless said otherwise, a normal form."""

    cut: Tuple[Dict[str, Any], ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: Any = None


def _regex(*patterns: str, **how: Any) -> _Pre:
    """Each pattern cuts the pieces that those before it left."""
    return _Pre((*map(_split, patterns), {**_BYTE_LEVEL, "use_regex": False}), **how)


# the alternatives that the newer patterns share: contractions, words, (digits,) punctuation, white space
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"


def _cased(after: str, digits: str) -> str:
    """A word ends where its case changes; `after` may follow it."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (f"{lead}[{_UPPER}]*[{_LOWER}]+{after}|{lead}[{_UPPER}]+[{_LOWER}]*{after}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


_GPT2 = _Pre((_BYTE_LEVEL,))
_DIGITS = _Pre(({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL))
_LLAMA3 = _regex(_WORDS + r"\p{N}{1,3}|" + _REST, ignore_merges=True, add_bos=True)
_QWEN2 = _regex(_WORDS + r"\p{N}|" + _REST, normalizer={"type": "NFC"})
_DEFAULT = _regex(r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", r"\p{N}+", "[0-9][0-9][0-9]")
_PRE = {
    "default": _DEFAULT, "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS,
    "llama-bpe": _LLAMA3, "llama-v3": _LLAMA3, "llama3": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _LLAMA3._replace(ignore_merges=False),
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": _regex(_cased("", r"\p{N}"), ignore_merges=True),
    "gpt-4o": _regex(_cased(_CONTRACTION + "?", r"\p{N}{1,3}")),
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
_MARK = "\u2581"  # SentencePiece's stand-in for a space


def build_from_gguf(fields: Mapping[str, Any], file: str = "GGUF") -> Tuple[bytes, Dict[str, Any]]:
    """(bytes of a tokenizer.json, tokenizer_config as a dict) from a GGUF file's key-value pairs.

    tokenizer_config has bos_token, eos_token, unk_token and pad_token (those that are set) and add_bos_token (bool).
    KestrelError names the key when the vocabulary can't be rewritten.
    """
    model = fields.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise KestrelError(f"{file}: tokenizer.ggml.model: expected gpt2 (byte-level BPE) or llama (SentencePiece), found {str(model)[:40]!r}")
    tokens = _strings(fields, "tokenizer.ggml.tokens", file)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise KestrelError(f"{file}: tokenizer.ggml.tokens: token {twice!r} occurs twice")
    types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise KestrelError(f"{file}: tokenizer.ggml.token_type: expected one for each of {len(tokens)} tokens")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(fields, vocab, file)
    else:
        tokenizer, add_bos = _sentencepiece(fields, tokens, vocab, types, file), True
    config: Dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    config["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", add_bos))
    # Phi-3's tokenizer.json lets the tokens of its turns swallow the white space after them
    keeps_space = {config.get(f"{name}_token") for name in ("bos", "unk", "pad")} | {"<|endoftext|>"}
    swallows = model == "llama" and fields.get("general.architecture") == "phi3"
    tokenizer["added_tokens"] = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "normalized": False, "special": types[i] != _USER_DEFINED,
         "rstrip": swallows and types[i] == _CONTROL and token not in keeps_space}
        for i, token in enumerate(tokens) if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    return json.dumps(tokenizer, ensure_ascii=False).encode("utf-8"), config


def _tokenizer_json(vocab: Mapping[str, int], merges: List[List[str]], **parts: Any) -> Dict[str, Any]:
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
             "byte_fallback": False, "ignore_merges": False, **parts.pop("model"), "vocab": vocab, "merges": merges}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
            **parts, "model": model}


def _byte_level(fields: Mapping[str, Any], vocab: Mapping[str, int], file: str) -> Tuple[Dict[str, Any], bool]:
    """(tokenizer.json, whether prompts begin with BOS) of a byte-level BPE."""
    name = fields.get("tokenizer.ggml.pre")
    pre = _PRE.get(name) if isinstance(name, str) else None
    if pre is None:
        raise KestrelError(f"{file}: tokenizer.ggml.pre: expected one of {', '.join(_PRE)}, found {str(name)[:40]!r}")
    merges: List[List[str]] = []
    for merge in _strings(fields, "tokenizer.ggml.merges", file):
        cut = merge.find(" ", 1)  # a token may itself begin with a space
        pair = [merge[:cut], merge[cut + 1:]]
        if cut < 0 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise KestrelError(f"{file}: tokenizer.ggml.merges: {merge[:80]!r} does not join two tokens into a third")
        merges.append(pair)
    return _tokenizer_json(vocab, merges, normalizer=pre.normalizer, pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre.cut)},
                           decoder=_BYTE_LEVEL, model={"ignore_merges": pre.ignore_merges}), pre.add_bos


def _sentencepiece(fields: Mapping[str, Any], tokens: List[str], vocab: Mapping[str, int], types: List[int], file: str) -> Dict[str, Any]:
    """tokenizer.json of a SentencePiece BPE: any two neighbours that make a token may join, the token of the highest score first."""
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(s, float) and s == s for s in scores):
        raise KestrelError(f"{file}: tokenizer.ggml.scores: expected a number for each of {len(tokens)} tokens")
    unknown_id = fields.get("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else 0)
    if not isinstance(unknown_id, int) or not 0 <= unknown_id < len(tokens):
        raise KestrelError(f"{file}: tokenizer.ggml.unknown_token_id: expected 0 to {len(tokens) - 1}, found {str(unknown_id)[:40]}")
    parts = {token for token, kind in zip(tokens, types) if kind in (_NORMAL, _USER_DEFINED, _UNUSED)}  # text can become these, and no others
    merges: List[List[str]] = []
    for i in sorted((i for i, token in enumerate(tokens) if len(token) > 1 and token in parts), key=lambda i: (-scores[i], i)):
        token = tokens[i]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += sorted(([a, b] for a, b in pairs if a in parts and b in parts), key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": _MARK}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _MARK})
    decoders: List[Dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer_json(vocab, merges, normalizer={"type": "Sequence", "normalizers": normalizers}, decoder={"type": "Sequence", "decoders": decoders},
                           model={"unk_token": tokens[unknown_id], "fuse_unk": True, "byte_fallback": any(kind == _BYTE for kind in types)})


def _strings(fields: Mapping[str, Any], key: str, file: str) -> List[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise KestrelError(f"{file}: {key}: expected an array of strings, found {type(value).__name__}")
    return value
