# SPDX-License-Identifier: Apache-2.0
"""The headers of the two file formats we read, checked before anything in them is believed.

Sources: the format section of the safetensors README; docs/gguf.md of ggml.
Both functions only read the header: no tensor's bytes, and no allocation larger than the header itself.
"""
from __future__ import annotations

import json
import os
import stat
import struct
from typing import Any, BinaryIO, Dict, NamedTuple, Tuple

from .errors import KestrelError

# Bytes per element; the format's sub-byte types are not in it and so are refused by name.
SAFETENSORS_DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
_MAX_HEADER = 100_000_000  # the format's own limit


class TensorEntry(NamedTuple):
    """Where one tensor lies: dtype name, shape, absolute byte range [begin, end) in the file."""

    dtype: str
    shape: Tuple[int, ...]
    begin: int
    end: int


def _read_ahead(file: BinaryIO, on: bool) -> None:
    """Off while a beginning is read: the small pages of readahead would stand where a mapping could have huge ones."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NORMAL if on else os.POSIX_FADV_RANDOM)


def open_file(path: str) -> Tuple[BinaryIO, int]:
    """(binary file, size in bytes), or KestrelError: missing, unreadable, no regular file, empty, or a Git-LFS pointer."""
    try:
        if os.path.isdir(path):
            raise KestrelError(f"{path}: expected a file, found a folder")
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise KestrelError(f"{path}: expected a regular file, found a pipe, socket or device")
        file = open(path, "rb")
    except OSError as error:
        raise KestrelError(f"{path}: {error.strerror or error}") from None
    size = os.fstat(file.fileno()).st_size
    _read_ahead(file, False)
    start = file.read(24)
    file.seek(0)
    _read_ahead(file, True)
    reason = None
    if not start:
        reason = "the file is empty"
    elif start.startswith(b"version https://git-lfs"):
        reason = "this is a Git-LFS pointer, not the file itself (run `git lfs pull` where it came from)"
    if reason:
        file.close()
        raise KestrelError(f"{path}: {reason}")
    return file, size


def _distinct(pairs: Any) -> Dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def read_safetensors_header(path: str) -> Tuple[Dict[str, TensorEntry], Dict[str, str]]:
    """({tensor name: TensorEntry}, metadata) of a safetensors file; KestrelError with one line when it is malformed.

    Guaranteed on return: every dtype is one of SAFETENSORS_DTYPES, end - begin is exactly the shape's bytes, and
    the tensors cover the data section of the file without hole or overlap.
    """
    file, size = open_file(path)
    with file:
        _read_ahead(file, False)
        if size < 8:
            raise KestrelError(f"{path}: expected at least 8 bytes, found {size}")
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise KestrelError(f"{path}: header length {length} is more than the file holds ({size - 8} bytes)")
        if length > _MAX_HEADER:
            raise KestrelError(f"{path}: header length {length} is more than the format allows ({_MAX_HEADER})")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise KestrelError(f"{path}: the header is not JSON: {str(error)[:100]}") from None
    if not isinstance(header, dict):
        raise KestrelError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise KestrelError(f"{path}: __metadata__: expected strings under string keys")

    base, data = 8 + length, size - 8 - length
    entries = {name: _safetensors_entry(path, name, value, base, data) for name, value in header.items()}
    at, before = base, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            kind = "overlaps" if entry.begin < at else f"leaves a hole of {entry.begin - at} bytes after"
            raise KestrelError(f"{path}: {name}: {kind} {before}")
        at, before = entry.end, name
    if at != size:
        raise KestrelError(f"{path}: {size - at} bytes after the last tensor ({before}) belong to none")
    return entries, metadata


def _safetensors_entry(path: str, name: str, value: Any, base: int, data: int) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise KestrelError(f"{path}: {name}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise KestrelError(f"{path}: {name}: dtype {str(dtype)[:40]!r} is not supported")
    if not _sizes(shape) or len(shape) > 8:
        raise KestrelError(f"{path}: {name}: shape: expected up to 8 sizes, found {str(shape)[:80]}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise KestrelError(f"{path}: {name}: data_offsets: expected [begin, end], found {str(offsets)[:80]}")
    if offsets[1] > data:
        raise KestrelError(f"{path}: {name}: ends at byte {offsets[1]} of the data, of which the file holds {data}"
                           " (truncated?)")
    expected = SAFETENSORS_DTYPES[dtype]
    for n in shape:
        expected *= n
    if offsets[1] - offsets[0] != expected:
        raise KestrelError(f"{path}: {name}: {dtype} {shape} takes {expected} bytes, found {offsets[1] - offsets[0]}")
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in value)


# GGUF value types 0..12 without 8 (string) and 9 (array)
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _GGUFHeader:
    """Bounded little-endian reads from the start of a GGUF file."""

    def __init__(self, path: str, file: BinaryIO, size: int):
        self.path, self.file, self.left = path, file, size

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise KestrelError(f"{self.path}: the header is truncated, or a length in it is wrong")
        self.left -= count
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise KestrelError(f"{self.path}: a string in the header is not UTF-8") from None

    def count(self, least: int) -> int:
        """A count of items that take at least `least` bytes each, so that it is bounded by the file."""
        n = self.number("Q")
        if n * least > self.left:
            raise KestrelError(f"{self.path}: the header counts {n} items, more than the file can hold")
        return n

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            item = self.number("I")
            if item == 8:
                return [self.string() for _ in range(self.count(8))]
            if item in _GGUF_SCALARS:
                code = _GGUF_SCALARS[item]
                n = self.count(struct.calcsize("<" + code))
                return list(struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize("<" + code))))
            raise KestrelError(f"{self.path}: arrays of value type {item} are not supported")
        if kind not in _GGUF_SCALARS:
            raise KestrelError(f"{self.path}: unknown value type {kind}")
        return self.number(_GGUF_SCALARS[kind])


def read_gguf_header(path: str) -> Tuple[Dict[str, Any], Dict[str, Tuple[int, Tuple[int, ...], int]], int]:
    """(key-value fields, {tensor name: (ggml type, shape, absolute begin)}, file size in bytes) of a GGUF file.

    Shapes are in numpy order (rows first). Sizes in bytes are not known here: they belong to the ggml type.
    GGUF 2 and 3, little-endian.
    """
    file, size = open_file(path)
    with file:
        h = _GGUFHeader(path, file, size)
        if h.take(min(4, size)) != b"GGUF":
            raise KestrelError(f"{path}: not a GGUF file")
        version = h.number("I")
        if version not in (2, 3):
            raise KestrelError(f"{path}: GGUF version: expected 2 or 3 (little-endian), found {version}")
        tensor_count, field_count = h.count(24), h.count(13)
        fields: Dict[str, Any] = {}
        for _ in range(field_count):
            key = h.string()
            if key in fields:
                raise KestrelError(f"{path}: key {key!r} occurs twice")
            fields[key] = h.value(h.number("I"))
        found = []
        for _ in range(tensor_count):
            name, rank = h.string(), h.number("I")
            if rank > 4:
                raise KestrelError(f"{path}: {name}: expected up to 4 axes, found {rank}")
            shape = tuple(reversed([h.number("Q") for _ in range(rank)]))
            found.append((name, h.number("I"), shape, h.number("Q")))
        alignment = fields.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20:
            raise KestrelError(f"{path}: general.alignment: expected 8 to 1048576, found {alignment!r}")
        base = -(-(size - h.left) // alignment) * alignment
    tensors: Dict[str, Tuple[int, Tuple[int, ...], int]] = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            raise KestrelError(f"{path}: tensor {name!r} occurs twice")
        tensors[name] = (kind, shape, base + offset)
    return fields, tensors, size
