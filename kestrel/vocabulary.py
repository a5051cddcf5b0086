# SPDX-License-Identifier: Apache-2.0
"""The vocabulary and merges inside a GGUF file, rewritten as the `tokenizer.json` they were made from.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2). How text is cut before merging is known to GGUF by a name alone
(`tokenizer.ggml.pre`); the table below says what each name means, after llama.cpp's src/llama-vocab.cpp. A name that
is not in it is refused: a wrong cut gives other ids with the same text, and nothing would show it.
"""
from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from .errors import KestrelError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


class _Pre(NamedTuple):
    """The cut, whether a whole piece that is a token skips the merges, and whether BOS is added unless said otherwise."""

    cut: Tuple[Dict[str, Any], ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Pre((_BYTE_LEVEL,))
_DIGITS = _Pre(({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL))
_LLAMA_BPE = _Pre(({"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
                   {**_BYTE_LEVEL, "use_regex": False}), ignore_merges=True, add_bos=True)
_PRE = {"gpt-2": _GPT2, "smollm": _DIGITS, "starcoder": _DIGITS, "llama-bpe": _LLAMA_BPE, "llama3": _LLAMA_BPE}

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type


def build_from_gguf(fields: Mapping[str, Any], file: str = "GGUF") -> Tuple[bytes, Dict[str, Any]]:
    """(bytes of a tokenizer.json, tokenizer_config as a dict) from a GGUF file's key-value pairs.

    tokenizer_config has bos_token, eos_token, unk_token and pad_token (those that are set) and add_bos_token (bool).
    KestrelError names the key when the vocabulary can't be rewritten.
    """
    model, pre_name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise KestrelError(f"{file}: tokenizer.ggml.model: expected gpt2 (byte-level BPE), found {model!r}")
    pre = _PRE.get(pre_name) if isinstance(pre_name, str) else None
    if pre is None:
        raise KestrelError(f"{file}: tokenizer.ggml.pre: expected one of {', '.join(_PRE)}, found {pre_name!r}")
    tokens = _strings(fields, "tokenizer.ggml.tokens", file)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise KestrelError(f"{file}: tokenizer.ggml.tokens: token {twice!r} occurs twice")
    merges: List[List[str]] = []
    for merge in _strings(fields, "tokenizer.ggml.merges", file):
        cut = merge.find(" ", 1)  # a token may itself begin with a space
        pair = [merge[:cut], merge[cut + 1:]]
        if cut < 0 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise KestrelError(f"{file}: tokenizer.ggml.merges: {merge!r} does not join two tokens into a third")
        merges.append(pair)
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise KestrelError(f"{file}: tokenizer.ggml.token_type: expected one for each of {len(tokens)} tokens")
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": types[i] != _USER_DEFINED}
             for i, token in enumerate(tokens) if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.cut)}, "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": pre.ignore_merges, "vocab": vocab, "merges": merges},
    }
    config: Dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    config["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", pre.add_bos))
    return json.dumps(tokenizer, ensure_ascii=False).encode("utf-8"), config


def _strings(fields: Mapping[str, Any], key: str, file: str) -> List[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise KestrelError(f"{file}: {key}: expected an array of strings, found {type(value).__name__}")
    return value
