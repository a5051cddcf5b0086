# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests of the engine, packed by this source tree.

`packed` takes the random checkpoints of tests/golden; `scripted` makes a model whose next token is a function of the last one,
so that a test can say what is generated and where a token ends.
"""
from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Dict, Sequence, Tuple

import numpy as np

GOLDEN = Path(__file__).resolve().parent / "golden"
ALPHABET = [bytes([c]) for c in b"abcdefghij"]     # ten tokens for a Script
TINY = ("tiny-llama3", "tiny-tied", "tiny-untied")
OTHERS = ("tiny-biased", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3", "tiny-phi3", "tiny-yarn")  # the other architectures, one each


@functools.lru_cache(maxsize=None)
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="kestrel-toy-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def checkpoint(name: str, **changes) -> Path:
    """A copy of tests/golden/<name> with some keys of config.json changed (None takes a key out, also of generation_config.json)."""
    target = Path(tempfile.mkdtemp(dir=str(_scratch())), name)
    shutil.copytree(str(GOLDEN / name), str(target), ignore=shutil.ignore_patterns("golden.npz"))
    for file in ("config.json", "generation_config.json"):
        config = json.loads((target / file).read_text())
        for key, value in changes.items():
            if value is None:
                config.pop(key, None)
            elif file == "config.json" or key in config:
                config[key] = value
        _write_json(target / file, config)
    return target


@functools.lru_cache(maxsize=None)
def _packed(name: str, weights: str, changes: Tuple) -> str:
    from kestrel.convert import convert

    source = checkpoint(name, **{k: json.loads(v) for k, v in changes}) if changes else GOLDEN / name
    path = str(_scratch() / f"{name}-{weights}-{abs(hash(changes))}.kestrel")
    convert(str(source), path, weights)
    return path


def packed(name: str = "tiny-tied", weights: str = "int8", **changes) -> str:
    """Path of tests/golden/<name>, packed; `changes` to its config.json as in `checkpoint`."""
    return _packed(name, weights, tuple(sorted((k, json.dumps(v)) for k, v in changes.items())))


def long_toy(weights: str = "int8") -> str:
    """tiny-tied (4 heads on 2 kv heads) with room for 4,096 positions and no end id."""
    return packed("tiny-tied", weights, max_position_embeddings=4096, eos_token_id=None)


def write_safetensors(path: Path, tensors: Dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, str(path))


def _byte_alphabet() -> Dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    table.update({b: chr(0x100 + i) for i, b in enumerate(sorted(set(range(256)) - set(printable)))})
    return table


class Script:
    """A packed model that says `tokens` one after the other, then the first again, and so on.

    Attributes: path, ids (id of each of `tokens`), start (the id whose successor is the first), end (the end id, last of `ids`
    when ends). Token pieces are bytes and must differ from each other.
    """

    def __init__(self, tokens: Sequence[bytes], ends: bool = True, extra_ends: Sequence[int] = ()):
        from kestrel.convert import convert

        folder = Path(tempfile.mkdtemp(dir=str(_scratch())))
        alphabet = _byte_alphabet()
        vocabulary = {"<|end|>": 0, "<|start|>": 1}
        for byte in range(256):
            vocabulary[alphabet[byte]] = len(vocabulary)
        for piece in tokens:
            vocabulary.setdefault("".join(alphabet[b] for b in piece), len(vocabulary))
        self.vocab_size = len(vocabulary)
        self.start, self.end = 1, 0
        self.ids = [vocabulary["".join(alphabet[b] for b in piece)] for piece in tokens]
        assert len(set(self.ids)) == len(tokens), "a token occurs twice: its successor would not be certain"
        if ends:
            self.ids.append(self.end)
        order = [self.start] + self.ids
        after = {a: b for a, b in zip(order, order[1:] + order[1:2])}
        n = self.vocab_size
        hidden, d, inner = -(-n // 8) * 8, 8, 8
        embedding = np.eye(n, hidden, dtype=np.float32)
        head = np.zeros((n, hidden), np.float32)
        for token in range(n):
            head[after.get(token, self.start), token] = 1
        zeros = {"q_proj": (d, hidden), "k_proj": (d, hidden), "v_proj": (d, hidden), "o_proj": (hidden, d)}
        at = "model.layers.0."
        tensors = {at + f"self_attn.{k}.weight": np.zeros(s, np.float32) for k, s in zeros.items()}
        tensors.update({at + f"mlp.{k}_proj.weight": np.zeros((inner, hidden), np.float32) for k in ("gate", "up")})
        tensors.update({at + "mlp.down_proj.weight": np.zeros((hidden, inner), np.float32)})
        tensors.update({name: np.ones(hidden, np.float32)
                        for name in (at + "input_layernorm.weight", at + "post_attention_layernorm.weight", "model.norm.weight")})
        tensors.update({"model.embed_tokens.weight": embedding, "lm_head.weight": head})
        write_safetensors(folder / "model.safetensors", tensors)
        _write_json(folder / "config.json", {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": d, "vocab_size": n, "tie_word_embeddings": False, "max_position_embeddings": 4096,
            "eos_token_id": [self.end, *extra_ends]})
        _write_json(folder / "tokenizer.json", {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [{"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
                             for t, i in (("<|end|>", 0), ("<|start|>", 1))],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}})
        _write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>"})
        self.path = str(folder / "script.kestrel")
        convert(str(folder), self.path, "int8", calibrate="")


class Known:
    """A drafter that knows the whole answer: proposes `rights[round]` right tokens, then `wrongs` wrong ones.

    rights: a number for every round, or a list of one per round (the last goes on). Tokens wrong by one, modulo vocab_size.
    """

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], rights=32, wrongs: int = 0, vocab_size: int = 300):
        self._sequence, self._known = [*prompt, *answer], 0
        self._rights, self._wrongs, self._vocab_size = rights, wrongs, vocab_size
        self.asked = []

    def extend(self, tokens):
        assert self._sequence[self._known:self._known + len(tokens)] == list(tokens), "told another answer than the plain one"
        self._known += len(tokens)

    def propose(self, most):
        rights = self._rights if isinstance(self._rights, int) else self._rights[min(len(self.asked), len(self._rights) - 1)]
        self.asked.append(most)
        right = self._sequence[self._known:self._known + rights]
        following = self._sequence[self._known + len(right):self._known + len(right) + self._wrongs]
        following += [0] * (self._wrongs - len(following))
        return (right + [(t + 1) % self._vocab_size for t in following])[:most]


class Fixed:
    """A drafter that always proposes the same tokens, however many were asked for."""

    def __init__(self, tokens):
        self._tokens = list(tokens)

    def extend(self, tokens):
        pass

    def propose(self, most):
        return list(self._tokens)
