# SPDX-License-Identifier: Apache-2.0
"""The packed file: one safetensors container that is mapped and used as it lies.

Tensors: `embedding`, `head` (absent when tied), `embedding_scale` (see `vectors`), `final_norm`, `layers.N.{attention_norm, mlp_norm, qkv, o, gate_up, down}`,
where the architecture has them `layers.N.{qkv, o, gate_up, down}_bias`, `layers.N.{q_norm, k_norm, attention_post_norm, mlp_post_norm}`, and the
text files `tokenizer.json`, `tokenizer_config.json`, `chat_template` as U8. A matrix is U8 in the panel layout of csrc/kernels.h;
a vector is F32. The data section and every tensor begin at a multiple of 64 bytes: the header is padded with spaces, norms with
zeros, text with spaces (its true length stands in the metadata). `__metadata__`: format, format_version, numerics_version,
config (JSON), calibration (sha256 of the ids, or off), weights (JSON: name -> type, group, n, k, panel, scale), text (JSON: name -> length), source (fingerprint).
"""
from __future__ import annotations

import contextlib
import json
import mmap
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from . import _native
from .config import ModelConfig
from .container import open_file, read_safetensors_header
from .destination import new_file
from .errors import KestrelError
from .parallel import in_order

FORMAT = "kestrel"
WEIGHT_TYPES = ("int8", "int4", "f32")
_ALIGNMENT = 64
_READ_AHEAD = 16 << 20  # bytes asked for at once
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name
_TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template")


class Matrix(NamedTuple):
    """A packed weight: `rows` are the source tensors whose rows follow one another in it."""

    name: str
    sources: Tuple[str, ...]
    n: int
    k: int


class Vector(NamedTuple):
    """A packed vector of float32: a norm's gain or a matmul's bias, from `sources` one after the other, or `embedding_scale` (none)."""

    name: str
    sources: Tuple[str, ...]
    size: int


def _packed_tensors(config: ModelConfig, axes: int) -> Dict[str, Tuple[Tuple[str, ...], int, int]]:
    """Packed name -> (sources, rows in all, columns), of the tensors with so many axes."""
    table: Dict[str, Tuple[Tuple[str, ...], int, int]] = {}
    for name, t in config.tensors().items():
        if len(t.shape) == axes:
            sources, rows, columns = table.get(t.packed, ((), 0, t.shape[-1]))
            table[t.packed] = (sources + (name,), rows + t.shape[0], columns)
    return table


def stored_type(name: str, weight_type: str) -> str:
    """The type of one matrix of a model with `weight_type` weights: int4's embedding and head are int8."""
    return "int8" if weight_type == "int4" and name in ("embedding", "head") else weight_type


class Rounding(NamedTuple):
    """What int4's rounding of one matrix knows of its inputs, see _native.pack."""

    importance: np.ndarray
    feedback: np.ndarray


def matrices(config: ModelConfig) -> List[Matrix]:
    """Every matrix of the packed file, in the order of the forward pass, the head last."""
    return [Matrix(name, *m) for name, m in _packed_tensors(config, 2).items()]


def vectors(config: ModelConfig, folded: bool) -> List[Vector]:
    """Every vector of the packed file, in the order of the forward pass, then `embedding_scale`: what an embedding row is multiplied by on its
    way in, for an architecture that does so and to undo the fold of a tied head."""
    table = [Vector(name, sources, size) for name, (sources, size, _) in _packed_tensors(config, 1).items()]
    if config.embedding_multiplier != 1 or (folded and config.tie_word_embeddings):
        table.append(Vector("embedding_scale", (), config.hidden_size))
    return table


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _weight_entry(matrix: Matrix, weight_type: str) -> Dict[str, Any]:
    kind = stored_type(matrix.name, weight_type)
    entry: Dict[str, Any] = {"type": kind, "n": matrix.n, "k": matrix.k, "panel": _native.PANEL}
    if kind != "f32":
        entry.update(group=_native.GROUP, scale="f16")
    return entry


def write_packed(path: str, config: ModelConfig, weight_type: str, source: str, calibration: str, text: Dict[str, bytes],
                 vector: Callable[[Vector], np.ndarray], blocks: Callable[[Matrix], Iterator[Tuple[int, np.ndarray]]],
                 progress: Callable[[int, int], None] = lambda done, total: None,
                 rounding: Callable[[Matrix], Optional[Rounding]] = lambda matrix: None) -> None:
    """Writes a packed file; nothing stands under `path` until it is whole (renamed into place after fsync).

    calibration: sha256 of the token ids that the fold was made from, or "off". vector(one of `vectors`) -> float32 [size]; blocks(matrix) -> (first row, float32 [rows, k], or uint8
    [panels, bytes of one] that are packed already) with rows ascending and blocks beginning at multiples of 8. progress(bytes done, bytes in all). rounding(int4 matrix) -> what to round by.
    """
    table, small = matrices(config), vectors(config, calibration != "off")
    entries: Dict[str, Any] = {}
    offset = 0

    def place(name: str, dtype: str, shape: List[int], size: int) -> None:
        nonlocal offset
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size

    for v in small:
        size = _padded(4 * v.size)
        place(v.name, "F32", [size // 4], size)
    for m in table:
        size = _native.packed_bytes(stored_type(m.name, weight_type), m.n, m.k)
        place(m.name, "U8", [size], size)
    for name, raw in text.items():
        place(name, "U8", [_padded(len(raw))], _padded(len(raw)))
    metadata = {
        "format": FORMAT, "format_version": str(_native.FORMAT_VERSION), "numerics_version": str(_native.NUMERICS_VERSION),
        "config": config.to_json(), "source": source, "calibration": calibration,
        "weights": json.dumps({m.name: _weight_entry(m, weight_type) for m in table}, separators=(",", ":"), sort_keys=True),
        "text": json.dumps({name: len(raw) for name, raw in text.items()}, separators=(",", ":"), sort_keys=True),
    }
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (_padded(8 + len(header)) - 8 - len(header))

    with new_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for v in small:
            raw = np.ascontiguousarray(vector(v), np.float32).tobytes()
            if len(raw) != 4 * v.size:
                raise ValueError(f"{v.name}: {len(raw) // 4} numbers, expected {v.size}")
            file.write(raw + bytes(_padded(len(raw)) - len(raw)))
        for m in table:
            kind = stored_type(m.name, weight_type)
            _write_matrix(file, m, kind, blocks(m), rounding(m) if kind == "int4" else None)
            progress(min(file.tell() - 8 - len(header), offset), offset)
        for raw in text.values():
            file.write(raw + b" " * (_padded(len(raw)) - len(raw)))


def _write_matrix(file: Any, m: Matrix, weight_type: str, blocks: Iterator[Tuple[int, np.ndarray]], rounding: Optional[Rounding]) -> None:
    """Panels are independent, so each block is packed as a matrix of its own and appended."""
    def pack(at: Tuple[int, np.ndarray]) -> Tuple[int, int, np.ndarray]:
        row, block = at
        if block.dtype == np.uint8:
            return row, min(len(block) * _native.PANEL, m.n - row), np.ascontiguousarray(block)
        packed = np.empty(_native.packed_bytes(weight_type, len(block), m.k), np.uint8)
        _native.pack(weight_type, len(block), 0, np.ascontiguousarray(block, np.float32), packed, *(rounding or ()))
        return row, len(block), packed

    expected = 0
    for row, rows, packed in in_order(pack, blocks):
        if row != expected or row % _native.PANEL:
            raise ValueError(f"{m.name}: block at row {row}, expected {expected}")
        file.write(packed.data)
        expected += rows
    if expected != m.n:
        raise ValueError(f"{m.name}: {expected} rows, expected {m.n}")


def _mapped(file: Any, size: int) -> mmap.mmap:
    """The file's own pages, read and mapped in large pieces: what a pass touches is in no order that the kernel's readahead would see through.

    Huge pages where the file system's cache has them (ext4 from Linux 6.16, xfs) and the file is not yet in it: decoding took 0.88 of the time.
    MADV_POPULATE_READ (madvise(2)) reads by page faults, so in huge ones: 130 of 135 MB; MADV_WILLNEED fills the cache with small ones: 64.
    """
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_WILLNEED"):
        for advice in (_POPULATE_READ, mmap.MADV_WILLNEED):  # the second: kernels without the first (Linux before 5.14)
            with contextlib.suppress(OSError):
                for at in range(0, size, _READ_AHEAD):
                    mapped.madvise(advice, at, min(_READ_AHEAD, size - at))
                break
    return mapped


def _read(file: Any, size: int, path: str) -> mmap.mmap:
    """Memory of our own (whole pages, so as aligned as a mapping) with the file's bytes."""
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    at = 0
    while at < size:
        count = file.readinto(view[at:at + _READ_AHEAD])
        if not count:
            raise KestrelError(f"{path}: expected {size} bytes, found {at}: the file changes while it is being read")
        at += count
    return memory


class PackedModel:
    """A packed file, checked and mapped read-only.

    use_mmap False: read into memory of this process instead, at the price of its size: for storage that is slow to read at random or may go
    away. A mapped file must stay as it is while in use, as a program's own file must: when something truncates it, reading beyond its new end is a
    SIGBUS (mmap(2)). Replacing it by renaming another over it, as `kestrel convert` does, is harmless.

    Attributes: path, config (ModelConfig), weight_type (one of WEIGHT_TYPES), source (fingerprint of the checkpoint), calibration (sha256 of its ids, or "off"), file_bytes,
    weight_bytes (of all matrices and norms: what one forward pass reads; an embedding that is not the head too, a table of which a pass reads single rows, does not count).
    """

    def __init__(self, path: str, use_mmap: bool = True):
        self.path = os.fspath(path)
        self._entries, metadata = read_safetensors_header(self.path)
        if metadata.get("format") != FORMAT:
            raise KestrelError(f"{self.path}: not a kestrel file; make one with `kestrel convert`")
        for key, ours in (("format_version", _native.FORMAT_VERSION), ("numerics_version", _native.NUMERICS_VERSION)):
            if metadata.get(key) != str(ours):
                raise KestrelError(f"{self.path}: {key}: expected {ours}, found {metadata.get(key)}; convert the checkpoint again")
        self.config = ModelConfig.from_json(metadata.get("config", ""), self.path)
        self.source, self.calibration = metadata.get("source", ""), metadata.get("calibration", "off")
        weights = self._json(metadata, "weights")
        self._text = self._json(metadata, "text")
        self._check(weights)
        file, self.file_bytes = open_file(self.path)
        with file:
            end = max(e.end for e in self._entries.values())
            if self.file_bytes != end:
                raise KestrelError(f"{self.path}: expected {end} bytes, found {self.file_bytes}: the file changes while it is being read")
            self._map = _mapped(file, end) if use_mmap else _read(file, end, self.path)
        self._buffer = np.frombuffer(self._map, np.uint8)
        self._buffer.flags.writeable = False
        table = () if self.config.tie_word_embeddings else ("embedding",)
        self.weight_bytes = sum(e.end - e.begin for name, e in self._entries.items() if name not in self._text and name not in table)

    def _json(self, metadata: Dict[str, str], key: str) -> Dict[str, Any]:
        try:
            value = json.loads(metadata.get(key, ""))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise KestrelError(f"{self.path}: metadata {key!r}: expected a JSON object")
        return value

    def _check(self, weights: Dict[str, Any]) -> None:
        table = {m.name: m for m in matrices(self.config)}
        kinds = {str(w.get("type")) if isinstance(w, dict) else "" for w in weights.values()}
        of_model = [t for t in WEIGHT_TYPES if kinds == {stored_type(name, t) for name in table}]
        if not of_model:
            raise KestrelError(f"{self.path}: weights: expected those of one type of {', '.join(WEIGHT_TYPES)}, found {sorted(kinds)}")
        self.weight_type: str = of_model[0]
        expected: Dict[str, Tuple[str, int]] = {}
        for name, m in table.items():
            if weights.get(name) != _weight_entry(m, self.weight_type):
                raise KestrelError(f"{self.path}: {name}: expected {_weight_entry(m, self.weight_type)}, found {weights.get(name)}")
            expected[name] = ("U8", _native.packed_bytes(self.stored_type(name), m.n, m.k))
        self._sizes = {v.name: v.size for v in vectors(self.config, self.calibration != "off")}
        for name, size in self._sizes.items():
            expected[name] = ("F32", _padded(4 * size))
        for name, length in self._text.items():
            if name not in _TEXT or isinstance(length, bool) or not isinstance(length, int) or length < 0:
                raise KestrelError(f"{self.path}: text {name!r}: unknown, or not a length")
            expected[name] = ("U8", _padded(length))
        for name in sorted(set(expected) ^ set(self._entries)):
            raise KestrelError(f"{self.path}: tensor {name} is {'missing' if name in expected else 'not expected'}")
        for name, (dtype, size) in expected.items():
            e = self._entries[name]
            if e.dtype != dtype or e.end - e.begin != size or e.begin % _ALIGNMENT:
                raise KestrelError(f"{self.path}: {name}: expected {dtype} of {size} bytes at a multiple of {_ALIGNMENT}, "
                                   f"found {e.dtype} of {e.end - e.begin} bytes at {e.begin}")

    def stored_type(self, name: str) -> str:
        """The type of one matrix: "int8", "int4" or "f32"."""
        return stored_type(name, self.weight_type)

    def has(self, name: str) -> bool:
        """Whether the file has that tensor: biases, some norms and `embedding_scale` are there or not."""
        return name in self._entries

    def array(self, name: str) -> np.ndarray:
        """Bytes of a tensor as they lie in the mapped file: uint8, read-only."""
        e = self._entries[name]
        return self._buffer[e.begin:e.end]

    def vector(self, name: str) -> np.ndarray:
        """A norm's gain, a bias or `embedding_scale`: float32 [size], read-only, in the mapped file."""
        return self.array(name).view(np.float32)[:self._sizes[name]]

    def text(self, name: str) -> Optional[bytes]:
        """`tokenizer.json`, `tokenizer_config.json` or `chat_template` as stored; None when the file has none."""
        return self.array(name)[:self._text[name]].tobytes() if name in self._text else None
