# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as others publish it - a Hugging Face folder or a GGUF file - read exactly, one tensor at a time.

Both readers give the same picture: Hugging Face tensor names and row order, float32 values, the tokenizer's files.
Everything is checked against the config when the checkpoint is opened; tensor data is only read when asked for.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from .architecture import ARCHITECTURES
from .config import ModelConfig
from .container import TensorEntry, open_file, read_gguf_header, read_safetensors_header
from .errors import KestrelError
from .vocabulary import build_from_gguf

__all__ = ["Checkpoint", "TensorEntry", "read_safetensors_header"]

_BLOCK_BYTES = 1 << 20  # float32 bytes converted, checked and hashed at a time


class _Stored(NamedTuple):
    """One tensor in its file: `shape` in elements, `row_bytes` for each of shape[0] rows, `kind` as its file calls it."""

    path: str
    kind: Any
    shape: Tuple[int, ...]
    begin: int
    row_bytes: int


class Checkpoint:
    """Common to both readers. Use `Checkpoint.open(path)`.

    Attributes: config (ModelConfig), source (str, the path as given, for messages), tokenizer_config (dict),
    chat_template (str or None). Names are Hugging Face's, e.g. `model.layers.0.self_attn.q_proj.weight`;
    `lm_head.weight` exists only when the embedding is not tied.
    """

    config: ModelConfig
    source: str
    tokenizer_config: Dict[str, Any]
    chat_template: Optional[str]

    @staticmethod
    def open(path: str) -> "Checkpoint":
        """Open a Hugging Face folder or a GGUF file; KestrelError when anything about it is not as it must be."""
        path = os.fspath(path)
        if os.path.isdir(path):
            return _HuggingFaceFolder(path)
        file, _ = open_file(path)
        with file:
            magic = file.read(4)
        if magic == b"GGUF":
            return _GGUFFile(path)
        hint = " (give the folder that holds it)" if path.endswith(".safetensors") else ""
        raise KestrelError(f"{path}: expected a Hugging Face folder or a GGUF file{hint}")

    def __init__(self, source: str, config: ModelConfig):
        self.source, self.config = source, config
        self._tensors = config.tensors()
        self._shapes = {name: t.shape for name, t in self._tensors.items()}
        self._stored: Dict[str, _Stored] = {}
        self._fingerprint: Optional[str] = None

    def expected_shapes(self) -> Dict[str, Tuple[int, ...]]:
        """{name: shape} of every tensor the config calls for, in the order of the forward pass."""
        return dict(self._shapes)

    def names(self) -> List[str]:
        """Names of all tensors, in the order of the forward pass."""
        return list(self._shapes)

    @property
    def tokenizer_json(self) -> bytes:
        """The bytes of a `tokenizer.json`."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over each tensor's name, stored type, shape and stored bytes; the same however it is sharded.

        Reads the whole checkpoint once, streamed.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name in self.names():
                t = self._stored[name]
                digest.update(f"{name} {t.kind} {list(t.shape)}\n".encode())
                with open(t.path, "rb") as file:
                    for begin, end in _blocks(t, 0, t.shape[0]):
                        digest.update(_raw(t, file, begin, end))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as a new C-contiguous float32 array of its full shape.

        Exact for F32, F16 and BF16; a quantised GGUF type gives what llama.cpp dequantises to. KestrelError names
        the tensor when it holds NaN or Inf.
        """
        return self.rows(name, 0, self._shapes[name][0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of `tensor(name)`, without reading the others: float32 (stop - start, ...)."""
        t = self._stored[name]
        result = np.empty((stop - start,) + t.shape[1:], np.float32)
        with open(t.path, "rb") as file:
            for begin, end in _blocks(t, start, stop):
                block = result[begin - start:end - start]
                block[...] = self._read_block(name, t, file, begin, end)
                if not np.isfinite(block).all():
                    bad = [int(i) for i in np.argwhere(~np.isfinite(block))[0]]
                    bad[0] += begin
                    raise KestrelError(f"{self.source}: {name}: not a finite number at {bad}")
        return result

    def _read_block(self, name: str, t: _Stored, file: BinaryIO, begin: int, end: int) -> np.ndarray:
        return self._to_float32(t, _raw(t, file, begin, end)).reshape((-1,) + t.shape[1:])

    def _to_float32(self, t: _Stored, raw: bytes) -> np.ndarray:
        return _FLOATS[t.kind](raw)

    def _check_shape(self, name: str, path: str, found: Tuple[int, ...]) -> None:
        expected = self._shapes[name]
        if found != expected:
            raise KestrelError(f"{path}: {name}: expected shape {list(expected)}, found {list(found)}")


def _bf16(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


_FLOATS = {
    "F32": lambda raw: np.frombuffer(raw, "<f4"),
    "F16": lambda raw: np.frombuffer(raw, "<f2").astype(np.float32),
    "BF16": _bf16,
}


def _blocks(t: _Stored, start: int, stop: int) -> Iterator[Tuple[int, int]]:
    """Rows [start, stop) as ranges of about _BLOCK_BYTES each."""
    row_elements = 1
    for n in t.shape[1:]:
        row_elements *= n
    step = max(1, _BLOCK_BYTES // max(1, 4 * row_elements))
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)


def _raw(t: _Stored, file: BinaryIO, begin: int, end: int) -> bytes:
    """The stored bytes of rows [begin, end)."""
    file.seek(t.begin + begin * t.row_bytes)
    count = (end - begin) * t.row_bytes
    raw = file.read(count)
    if len(raw) != count:  # the header was checked when the file was opened: it changed since
        raise KestrelError(f"{t.path}: the file ended while it was being read")
    return raw


def _read_json(path: str) -> Dict[str, Any]:
    file, size = open_file(path)
    with file:
        if size > 64 << 20:
            raise KestrelError(f"{path}: expected a small JSON file, found {size} bytes")
        try:
            value = json.loads(file.read().decode("utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # JSON can write half a character (a lone surrogate), which is no text
        except (ValueError, RecursionError) as error:
            raise KestrelError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise KestrelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class _HuggingFaceFolder(Checkpoint):
    """config.json, model.safetensors (or its shards), tokenizer.json and what goes with them."""

    def __init__(self, path: str):
        config_file, generation = os.path.join(path, "config.json"), os.path.join(path, "generation_config.json")
        super().__init__(path, ModelConfig.from_hf(
            _read_json(config_file), _read_json(generation) if os.path.exists(generation) else None, config_file))
        self._find_tensors()
        config_file = self._file("tokenizer_config.json")
        self.tokenizer_config = _read_json(config_file) if os.path.exists(config_file) else {}
        self.chat_template = self._find_chat_template()

    def _file(self, name: str) -> str:
        return os.path.join(self.source, name)

    @property
    def tokenizer_json(self) -> bytes:
        file, _ = open_file(self._file("tokenizer.json"))
        with file:
            return file.read()

    def _find_chat_template(self) -> Optional[str]:
        path = self._file("chat_template.jinja")
        if os.path.exists(path):
            file, _ = open_file(path)
            with file:
                try:
                    return file.read().decode("utf-8")
                except UnicodeDecodeError:
                    raise KestrelError(f"{path}: not UTF-8") from None
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # [{"name", "template"}, ...]: transformers takes the one named default
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise KestrelError(f"{self._file('tokenizer_config.json')}: chat_template: expected a string or a list of "
                               f"named templates, found {type(template).__name__}")
        return template

    def _shards(self) -> Dict[str, Optional[List[str]]]:
        """{file name: names the index gives it, or None for the single file}."""
        if os.path.exists(self._file("model.safetensors")):
            return {"model.safetensors": None}
        index = self._file("model.safetensors.index.json")
        if not os.path.exists(index):
            other = [n for n in sorted(os.listdir(self.source)) if n.endswith((".bin", ".pth", ".safetensors", ".gguf"))]
            raise KestrelError(f"{self.source}: expected model.safetensors or model.safetensors.index.json, found "
                               + (", ".join(other[:5]) or "no weights"))
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise KestrelError(f"{index}: weight_map: expected an object of tensor names")
        shards: Dict[str, Optional[List[str]]] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard:
                raise KestrelError(f"{index}: {name}: expected the name of a file beside it, found {shard!r}")
            if not os.path.exists(self._file(shard)):
                raise KestrelError(f"{index}: {name}: shard {shard} is missing")
            shards.setdefault(shard, []).append(name)  # type: ignore[union-attr]
        return shards

    def _find_tensors(self) -> None:
        expected = self._shapes
        arch = ARCHITECTURES[self.config.architecture]
        tied_head = None
        for shard, promised in self._shards().items():
            path = self._file(shard)
            entries, _ = read_safetensors_header(path)
            for name in promised or ():
                if name not in entries:
                    raise KestrelError(f"{path}: {name}: the index places it here, but it is missing")
            for stored_name, entry in entries.items():
                name = arch.text_name(stored_name)
                if not name or name.endswith(arch.buffers):
                    continue
                if name in self._stored or (promised is not None and stored_name not in promised):
                    raise KestrelError(f"{path}: {name}: the index does not place it here")
                stored = _stored_floats(path, name, entry)
                if self.config.tie_word_embeddings and name == arch.head.name:
                    tied_head = stored
                    continue
                if name not in expected:
                    raise KestrelError(f"{path}: {name}: unexpected tensor (a {self.config.architecture} model "
                                       f"of {self.config.num_hidden_layers} layers has none of that name)")
                self._check_shape(name, path, entry.shape)
                self._stored[name] = stored
        for name in expected:
            if name not in self._stored:
                note = " (tie_word_embeddings is false)" if name == arch.head.name else ""
                raise KestrelError(f"{self.source}: {name}: missing tensor{note}")
        # Some writers store the tied head twice. A copy is dropped; a different one means the config is wrong.
        if tied_head is not None and not _same_bytes(tied_head, self._stored[arch.embedding.name]):
            raise KestrelError(f"{tied_head.path}: {arch.head.name}: differs from {arch.embedding.name}, "
                               "but tie_word_embeddings is true")

    def _read_block(self, name: str, t: _Stored, file: BinaryIO, begin: int, end: int) -> np.ndarray:
        block = super()._read_block(name, t, file, begin, end)
        return block + np.float32(1) if self._tensors[name].spec.minus_one else block


def _stored_floats(path: str, name: str, entry: TensorEntry) -> _Stored:
    if entry.dtype not in _FLOATS:
        raise KestrelError(f"{path}: {name}: expected dtype BF16, F16 or F32, found {entry.dtype}")
    if not entry.shape or 0 in entry.shape:
        raise KestrelError(f"{path}: {name}: expected a tensor with elements, found shape {list(entry.shape)}")
    return _Stored(path, entry.dtype, entry.shape, entry.begin, (entry.end - entry.begin) // entry.shape[0])


def _same_bytes(a: _Stored, b: _Stored) -> bool:
    if (a.kind, a.shape) != (b.kind, b.shape):
        return False
    with open(a.path, "rb") as file_a, open(b.path, "rb") as file_b:
        return all(_raw(a, file_a, *rows) == _raw(b, file_b, *rows) for rows in _blocks(a, 0, a.shape[0]))


# ggml types read without the gguf package: type -> (name in _FLOATS, bytes per element)
_GGML_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_ROPE_FACTORS = "rope_freqs.weight"


class _GGUFFile(Checkpoint):
    """llama.cpp's one-file format; the package `gguf` dequantises its block types."""

    def __init__(self, path: str):
        fields, tensors, size = read_gguf_header(path)
        if re.search(r"-\d{5}-of-\d{5}\.gguf$", path) or fields.get("split.count", 1) not in (0, 1):
            raise KestrelError(f"{path}: split GGUF files are not supported; join them with llama-gguf-split --merge")
        heads = [a.head.gguf for a in ARCHITECTURES.values() if a.gguf == fields.get("general.architecture")]
        tied = not any(head in tensors for head in heads)
        factors = self._rope_factors(path, tensors.pop(_ROPE_FACTORS), size) if _ROPE_FACTORS in tensors else None
        super().__init__(path, ModelConfig.from_gguf(fields, tied, path, tensors, factors))
        self.fields = fields
        by_gguf = {t.gguf: name for name, t in self._tensors.items()}
        for gguf, (kind, shape, begin) in tensors.items():
            name = by_gguf.get(gguf)
            if name is None:
                note = " (a rope scaling by the length of the context, longrope)" if gguf.startswith("rope_factors_") else ""
                raise KestrelError(f"{path}: {gguf}: unexpected tensor{note}")
            self._check_shape(name, path, shape)
            row_bytes = self._row_bytes(gguf, kind, shape)
            if begin + row_bytes * shape[0] > size:
                raise KestrelError(f"{path}: {gguf}: ends at byte {begin + row_bytes * shape[0]}, but the file has {size} "
                                   "(truncated?)")
            self._stored[name] = _Stored(path, _GGML_FLOATS.get(kind, (kind,))[0], shape, begin, row_bytes)
        for name, t in self._tensors.items():
            if name not in self._stored:
                raise KestrelError(f"{path}: {t.gguf}: missing tensor")
        self._tokenizer: Optional[Tuple[bytes, Dict[str, Any]]] = None
        template = self.fields.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None

    @staticmethod
    def _rope_factors(path: str, stored: Tuple[int, Tuple[int, ...], int], size: int) -> List[float]:
        """What the frequencies are divided by: llama.cpp's converter works Llama 3's scaling out and keeps the result alone."""
        kind, shape, begin = stored
        if kind != 0 or len(shape) != 1 or not 1 <= shape[0] <= 256 or begin + 4 * shape[0] > size:
            raise KestrelError(f"{path}: {_ROPE_FACTORS}: expected up to 256 F32 numbers, found ggml type {kind}, shape {list(shape)}")
        with open(path, "rb") as file:
            return _FLOATS["F32"](_raw(_Stored(path, "F32", shape, begin, 4), file, 0, shape[0])).tolist()

    @property
    def tokenizer_json(self) -> bytes:
        return self._built_tokenizer()[0]

    @property
    def tokenizer_config(self) -> Dict[str, Any]:  # type: ignore[override]
        return self._built_tokenizer()[1]

    def _built_tokenizer(self) -> Tuple[bytes, Dict[str, Any]]:
        if self._tokenizer is None:
            self._tokenizer = build_from_gguf(self.fields, self.source)
        return self._tokenizer

    def _quants(self) -> Any:
        try:
            import gguf
        except ImportError:
            raise KestrelError(f"{self.source}: its weights are quantised: reading them takes the package gguf "
                               "(pip install 'kestrel[gguf]')") from None
        return gguf

    def _row_bytes(self, name: str, kind: int, shape: Tuple[int, ...]) -> int:
        if kind in _GGML_FLOATS:
            elements, size = 1, _GGML_FLOATS[kind][1]
        else:
            gguf = self._quants()
            try:
                elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise KestrelError(f"{self.source}: {name}: unknown ggml type {kind}") from None
        row = 1
        for n in shape[1:]:
            row *= n
        if row % elements:
            raise KestrelError(f"{self.source}: {name}: rows of {row} elements, not a multiple of the type's {elements}")
        return row // elements * size

    def _to_float32(self, t: _Stored, raw: bytes) -> np.ndarray:
        if t.kind in _FLOATS:
            return _FLOATS[t.kind](raw)
        gguf = self._quants()
        kind = gguf.GGMLQuantizationType(t.kind)
        try:
            return gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(-1, t.row_bytes), kind)
        except NotImplementedError:
            raise KestrelError(f"{t.path}: the package gguf cannot dequantise {kind.name}") from None

    def _read_block(self, name: str, t: _Stored, file: BinaryIO, begin: int, end: int) -> np.ndarray:
        if not self._tensors[name].spec.permuted:
            return super()._read_block(name, t, file, begin, end)
        # llama.cpp's rope turns neighbours, Hugging Face's the two halves of a head, so its converter interleaves the
        # halves: Hugging Face row (head, half, i) lies at (head, i, half).
        d = self.config.head_dim
        first, last = begin // d * d, -(-end // d) * d  # whole heads
        heads = super()._read_block(name, t, file, first, last)
        row = np.arange(begin, end)
        head, within = row // d, row % d
        half, i = within // (d // 2), within % (d // 2)
        return heads[head * d + 2 * i + half - first]
