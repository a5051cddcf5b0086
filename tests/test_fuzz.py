# SPDX-License-Identifier: Apache-2.0
"""Files from outside, damaged where it hurts: an answer or one line, never a crash, a hang, a huge allocation or half a file.

Each example goes the whole way: open, convert, load, read a text, answer. KESTREL_FUZZ is the number of examples of each test (default 12); a nightly run takes
thousands. While an example runs the process may not grow by more than 1 GiB, so that a length believed too early is a MemoryError here.
"""
from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import struct
from pathlib import Path

import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.generate import Model

pytestmark = pytest.mark.native_only
FUZZ = settings(max_examples=int(os.environ.get("KESTREL_FUZZ", 12)), deadline=None, suppress_health_check=list(HealthCheck))
CUTS = json.loads((Path(__file__).resolve().parent / "data" / "vocabulary_ids.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def bounded(grow=1 << 30, seconds=60):
    """At most `grow` bytes more of address space, and an end to a hang."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def hung(*_):
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (size + grow, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer_or_one_line(path, packed=None):
    """Converts `path` (or takes `packed` as it is), loads, reads, answers; whatever is wrong must be one line of KestrelError."""
    target = packed or str(path) + ".kestrel"
    try:
        with bounded():
            if packed is None:
                convert(str(path), target, "int8", calibrate="")
            model = Model.load(target, threads=1, ctx=None, chunk=8)
            ids = model.encode("Hello <|im_end|> wörld 12")
            if model.chat_template is not None:
                model.encode([{"role": "user", "content": "hi <|im_end|>"}])
            model.generate([i for i in ids if i < model.config.vocab_size] or [0], max_tokens=2, draft=0).run()
    except KestrelError as error:
        assert str(error).isprintable() and len(str(error)) <= 1000, str(error)
    finally:
        left = [p.name for p in Path(target).parent.glob(Path(target).name + ".*")]
        if packed is None and os.path.exists(target):
            os.unlink(target)
    assert left == []  # nothing half-written


ODD = st.sampled_from([None, True, False, 0, -1, 1, 2, 3, 7, 63, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 64, 10 ** 400, 0.5, -0.0, 1e-320, 1e308,
                       float("nan"), float("inf"), "", "x", "<unk>", "\ud800", "a\nb", "é" * 3, "9" * 5000, [], [[]], {}, {"a": 1}, [None] * 3, ["x"] * 40])


def damaged(draw, value):
    """A copy of JSON-like data with up to three of its places replaced, removed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        at = value
        while True:
            if not at:
                break
            key = draw(st.sampled_from(list(at)[:60] if isinstance(at, dict) else range(min(len(at), 60))))
            inner = at[key]
            if isinstance(inner, (dict, list)) and inner and draw(st.integers(0, 3)):
                at = inner
                continue
            how = draw(st.sampled_from(["odd", "odd", "odd", "remove", "double"]))
            if how == "remove":
                del at[key]
            elif how == "double" and isinstance(at, list):
                at.append(copy.deepcopy(inner))
            else:
                at[key] = copy.deepcopy(draw(ODD))  # sampled_from gives the same object each time
            break
    return value


def spoiled(draw, raw, end=None):
    """Bytes with some changed, cut off, taken out or put in, within [0, end)."""
    raw, end = bytearray(raw), end or len(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(end, len(raw)) - 1)))
        how = draw(st.sampled_from(["set", "set", "set", "cut", "out", "in"]))
        if how == "set" and raw:
            raw[at] = draw(st.sampled_from([0, 1, 9, 34, 48, 57, 91, 123, 125, 127, 128, 200, 255]))
        elif how == "cut":
            del raw[at:]
        elif how == "out":
            del raw[at:at + draw(st.integers(1, 9))]
        else:
            raw[at:at] = draw(st.binary(min_size=1, max_size=9))
    return bytes(raw)


def dumped(value):
    return json.dumps(value).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place where each example makes its checkpoint anew."""
    return tmp_path_factory.mktemp("fuzz")


def fresh(folder, name):
    target = folder / name
    shutil.rmtree(str(target), ignore_errors=True)
    shutil.copytree(str(toy.GOLDEN / name), str(target), ignore=shutil.ignore_patterns("golden.npz"))
    return target


def test_a_message_is_one_line_of_bounded_length_whatever_it_quotes():
    assert str(KestrelError("a\nb\x1b[2J\u202e\ud800 é")) == "a b\\x1b[2J\\u202e\\ud800 é"
    long = str(KestrelError("file: " + "x" * 10 ** 6 + " is missing"))
    assert len(long) <= 1000 and long.startswith("file: xxx") and long.endswith("x is missing")


@pytest.mark.parametrize("name", ["tiny-tied", "tiny-gemma3", "tiny-phi3"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@FUZZ
@given(data=st.data())
def test_case_28_json_files_of_a_folder(folder, name, file, data):
    path = fresh(folder, name)
    if data.draw(st.booleans()):
        (path / file).write_bytes(dumped(damaged(data.draw, json.loads((path / file).read_text()))))
    else:
        (path / file).write_bytes(spoiled(data.draw, (path / file).read_bytes()))
    answer_or_one_line(path)


@FUZZ
@given(data=st.data())
def test_case_28_safetensors_headers_and_data(folder, data):
    path = fresh(folder, "tiny-tied") / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans()):
        header = dumped(damaged(data.draw, json.loads(raw[8:8 + size])))
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size:])
    else:
        path.write_bytes(spoiled(data.draw, raw, 8 + size))
    answer_or_one_line(path.parent)


@FUZZ
@given(data=st.data())
def test_case_37_shard_indexes(folder, data):
    path = fresh(folder, "tiny-tied")
    os.rename(str(path / "model.safetensors"), str(path / "part.safetensors"))
    raw = (path / "part.safetensors").read_bytes()
    names = [n for n in json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")]) if n != "__metadata__"]
    index = {"metadata": {"total_size": 5}, "weight_map": {n: "part.safetensors" for n in names}}
    (path / "model.safetensors.index.json").write_bytes(dumped(damaged(data.draw, index)))
    answer_or_one_line(path)


@FUZZ
@given(data=st.data())
def test_case_28_packed_headers(folder, data):
    """The metadata is JSON within JSON: both are damaged."""
    raw = Path(toy.packed("tiny-tied")).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    key = data.draw(st.sampled_from(["config", "weights", "text", None, "bytes"]))
    if key == "bytes":
        changed = spoiled(data.draw, raw, 8 + size)
    else:
        if key is None:
            header = damaged(data.draw, header)
        else:
            header["__metadata__"][key] = json.dumps(damaged(data.draw, json.loads(header["__metadata__"][key])))
        body = dumped(header)
        body += b" " * (-(8 + len(body)) % 64)
        changed = len(body).to_bytes(8, "little") + body + raw[8 + size:]
    path = folder / "damaged.kestrel"
    path.write_bytes(changed)
    answer_or_one_line(path, packed=str(path))


@FUZZ
@given(data=st.data())
def test_case_28_packed_text(folder, data):
    """tokenizer.json, tokenizer_config.json and the template inside a packed file, of the same length."""
    source = Path(toy.packed("tiny-tied"))
    raw = source.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8:8 + size])[data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "chat_template"]))]
    begin, end = (8 + size + n for n in entry["data_offsets"])
    text = bytearray(raw[begin:end])
    for _ in range(data.draw(st.integers(1, 6))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(list(b'\x00 "{}[]:,0919eE-\\%\xff\x80#')))
    path = folder / "text.kestrel"
    path.write_bytes(raw[:begin] + bytes(text) + raw[end:])
    answer_or_one_line(path, packed=str(path))


# --- GGUF, written here: a writer that refuses nothing ---

def _value(value):
    """(type, bytes) of a GGUF value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 1 << 32 else (11, struct.pack("<q", max(-(1 << 63), min((1 << 63) - 1, value))))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return 8, struct.pack("<Q", len(raw)) + raw
    if isinstance(value, list):
        pairs = [_value(v) for v in value]
        kind = pairs[0][0] if pairs else 4
        return 9, struct.pack("<IQ", kind, len(pairs)) + b"".join(raw for _, raw in pairs)
    return 4, struct.pack("<I", 0)


def gguf_bytes(fields, tensors, patch=None):
    """A GGUF file; tensors: [[name, type, [sizes, innermost first], float32 bytes]]."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, value in fields.items():
        raw = key.encode()
        kind, body = _value(value)
        out += struct.pack("<Q", len(raw)) + raw + struct.pack("<I", kind) + body
    at, blobs = 0, b""
    for name, kind, sizes, raw in tensors:
        encoded = str(name).encode("utf-8", "surrogatepass")
        out += struct.pack("<Q", len(encoded)) + encoded + struct.pack("<I", len(sizes)) + b"".join(struct.pack("<Q", n) for n in sizes) + struct.pack("<IQ", kind, at)
        blob = raw + bytes(-len(raw) % 32)
        blobs, at = blobs + blob, at + len(blob)
    return out + bytes(-len(out) % 32), blobs


def small_gguf():
    """(fields, tensors) of a one-layer Llama with a SentencePiece vocabulary."""
    import numpy as np

    vocabulary = CUTS["sentencepiece_fields"]
    n, rng = len(vocabulary["tokenizer.ggml.tokens"]), np.random.default_rng(3)
    fields = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 16, "llama.feed_forward_length": 24,
              "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.attention.key_length": 8, "llama.attention.value_length": 8,
              "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 8, "llama.vocab_size": n,
              "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", **vocabulary}
    shapes = {"token_embd.weight": (n, 16), "output_norm.weight": (16,), "blk.0.attn_norm.weight": (16,), "blk.0.ffn_norm.weight": (16,),
              "blk.0.attn_q.weight": (16, 16), "blk.0.attn_k.weight": (8, 16), "blk.0.attn_v.weight": (8, 16), "blk.0.attn_output.weight": (16, 16),
              "blk.0.ffn_gate.weight": (24, 16), "blk.0.ffn_up.weight": (24, 16), "blk.0.ffn_down.weight": (16, 24)}
    return fields, [[name, 0, list(reversed(shape)), rng.standard_normal(shape).astype("<f4").tobytes()] for name, shape in shapes.items()]


FIELDS, TENSORS = small_gguf()


def test_the_undamaged_gguf_answers(folder):
    path = folder / "good.gguf"
    path.write_bytes(b"".join(gguf_bytes(FIELDS, TENSORS)))
    convert(str(path), str(path) + ".kestrel", "int8", calibrate="")
    assert len(Model.load(str(path) + ".kestrel").generate("Hello", max_tokens=3, ignore_end=True).run().token_ids) == 3


@FUZZ
@given(data=st.data())
def test_case_28_gguf_fields(folder, data):
    """Values of other types and sizes, missing and doubled ones; the vocabulary's arrays among them."""
    fields = dict(FIELDS)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(FIELDS)))
        if isinstance(fields.get(key), list) and data.draw(st.booleans()):
            items = list(fields[key])
            at = data.draw(st.integers(0, len(items) - 1))
            how = data.draw(st.sampled_from(["odd", "remove", "double"]))
            if how == "odd":
                odd = data.draw(ODD)
                items[at] = odd if type(odd) is type(items[at]) else items[at // 2]
            elif how == "remove":
                del items[at:at + data.draw(st.sampled_from([1, 500]))]
            else:
                items.append(items[at])
            fields[key] = items
        elif data.draw(st.booleans()):
            fields.pop(key, None)
        else:
            odd = data.draw(ODD)
            fields[key] = odd if not isinstance(odd, (dict, type(None))) and not (isinstance(odd, list) and any(not isinstance(v, str) for v in odd)) else 5
    path = folder / "fields.gguf"
    path.write_bytes(b"".join(gguf_bytes(fields, TENSORS)))
    answer_or_one_line(path)


@FUZZ
@given(data=st.data())
def test_case_28_gguf_tensors(folder, data):
    """Names, types, ranks, sizes."""
    tensors = [list(t) for t in TENSORS]
    for _ in range(data.draw(st.integers(1, 2))):
        t = data.draw(st.sampled_from(tensors))
        how = data.draw(st.sampled_from(["name", "type", "sizes", "rank", "remove", "double"]))
        if how == "name":
            t[0] = data.draw(st.sampled_from([u[0] for u in tensors] + ["", "x", "blk.9.attn_q.weight", "output.weight", "rope_freqs.weight"]))
        elif how == "type":
            t[1] = data.draw(st.sampled_from([0, 1, 2, 3, 6, 7, 8, 10, 12, 14, 15, 16, 20, 24, 28, 30, 34, 39, 40, 99, (1 << 32) - 1]))
        elif how == "sizes":
            t[2] = [data.draw(st.sampled_from([0, 1, 15, 16, 17, 32, 256, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])) for _ in t[2]]
        elif how == "rank":
            t[2] = (t[2] * 5)[:data.draw(st.integers(0, 6))]
        elif how == "remove" and len(tensors) > 1:
            tensors.remove(t)
        else:
            tensors.append(list(t))
    path = folder / "tensors.gguf"
    path.write_bytes(b"".join(gguf_bytes(FIELDS, tensors)))
    answer_or_one_line(path)


@FUZZ
@given(data=st.data())
def test_case_28_gguf_bytes(folder, data):
    """Counts, lengths and offsets, wherever a byte or eight of them stand."""
    header, blobs = gguf_bytes(FIELDS, TENSORS)
    raw = bytearray(header)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(4, len(raw) - 8) | st.integers(4, 400))
        raw[at:at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])))
    else:
        raw = bytearray(spoiled(data.draw, bytes(raw)))
    path = folder / "bytes.gguf"
    path.write_bytes(bytes(raw) + blobs)
    answer_or_one_line(path)
