# SPDX-License-Identifier: Apache-2.0
"""checkpoint.py, folders of safetensors: exact reading, and one line for everything that is broken."""
from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import CONFIG, SHAPES, encode, error_of, folder, weights

from kestrel.checkpoint import Checkpoint, read_safetensors_header
from kestrel.errors import KestrelError


# --- what is read ---


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_folder_is_read_exactly(tmp_path, dtype):
    truth = weights()
    c = Checkpoint.open(str(folder(tmp_path, dtype=dtype)))
    assert c.config.hidden_size == 64 and c.source == str(tmp_path)
    assert c.expected_shapes() == SHAPES and set(c.names()) == set(truth) and c.names()[0] == "model.embed_tokens.weight"
    for name in c.names():
        a = c.tensor(name)
        assert a.dtype == np.float32 and a.flags.c_contiguous and a.flags.writeable
        assert np.array_equal(a, truth[name])
    assert np.array_equal(c.rows("model.embed_tokens.weight", 5, 9), truth["model.embed_tokens.weight"][5:9])


@pytest.mark.parametrize("dtype, width", [("F16", "<u2"), ("BF16", "<u2")])
def test_every_finite_half_is_exact(tmp_path, dtype, width):
    """Case 37: BF16 and F16 read exactly."""
    """All 65,536 bit patterns but NaN and Inf, subnormals and signed zeros included, against a statement in float64."""
    def value(bits):
        e_bits, m_bits = (5, 10) if dtype == "F16" else (8, 7)
        sign, e, m = bits >> 15, bits >> m_bits & (1 << e_bits) - 1, bits & (1 << m_bits) - 1
        bias = (1 << e_bits - 1) - 1
        size = m * 2.0 ** (1 - bias - m_bits) if e == 0 else (1 + m * 2.0 ** -m_bits) * 2.0 ** (e - bias)
        return -size if sign else size

    top = (1 << (5 if dtype == "F16" else 8)) - 1
    shift = 10 if dtype == "F16" else 7
    patterns = [b for b in range(1 << 16) if b >> shift & top != top]
    count = -(-len(patterns) // 64) * 64
    patterns += [0] * (count - len(patterns))
    raw = np.array(patterns, width)
    truth = np.array([value(b) for b in patterns], np.float64)
    path = folder(tmp_path, dtype=dtype, config={"vocab_size": count // 64},
                  tensors={**weights(), "model.embed_tokens.weight": np.zeros((count // 64, 64), np.float32)})
    entry = read_safetensors_header(str(path / "model.safetensors"))[0]["model.embed_tokens.weight"]
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(entry.begin)
        file.write(raw.tobytes())
    found = Checkpoint.open(str(path)).tensor("model.embed_tokens.weight").reshape(-1)
    assert np.array_equal(found.astype(np.float64), truth)
    assert np.array_equal(np.signbit(found), np.signbit(truth))


def test_written_by_the_safetensors_package(tmp_path):
    from safetensors.numpy import save_file

    path, truth = folder(tmp_path), weights(untied=True)
    save_file(truth, str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    c = Checkpoint.open(str(path))
    assert c.names()[-1] == "lm_head.weight"
    for name, a in truth.items():
        assert np.array_equal(c.tensor(name), a)
    assert read_safetensors_header(str(path / "model.safetensors"))[1] == {"format": "pt"}


def test_shards_follow_the_weight_map_whatever_their_names(tmp_path):
    """Case 37."""
    whole = Checkpoint.open(str(folder(tmp_path / "whole")))
    path, truth = folder(tmp_path / "shards"), weights()
    (path / "model.safetensors").unlink()
    names = sorted(truth)
    place = {name: ["odd name.safetensors", "b.weights", "c.safetensors"][i % 3] for i, name in enumerate(names)}
    for shard in set(place.values()):
        (path / shard).write_bytes(encode({n: truth[n] for n in names if place[n] == shard}))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": place}))
    c = Checkpoint.open(str(path))
    assert all(np.array_equal(c.tensor(n), truth[n]) for n in names)
    assert c.fingerprint == whole.fingerprint

    (path / "b.weights").rename(path / "elsewhere")
    assert "b.weights is missing" in error_of(path)
    (path / "elsewhere").rename(path / "b.weights")
    (path / "c.safetensors").write_bytes(encode({n: truth[n] for n in names[5:] if place[n] == "c.safetensors"}))
    assert names[2] in error_of(path) and place[names[2]] == "c.safetensors"
    for bad in ("../whole/model.safetensors", "/etc/passwd", "", 7):
        index.write_text(json.dumps({"weight_map": {**place, names[0]: bad}}))
        assert names[0] in error_of(path)
    for bad in ({}, [], None):
        index.write_text(json.dumps({"weight_map": bad}))
        assert "weight_map" in error_of(path)


def test_fingerprint_sees_one_bit_and_not_the_place(tmp_path):
    path = folder(tmp_path)
    one = Checkpoint.open(str(path)).fingerprint
    assert len(one) == 64 and one == Checkpoint.open(str(path)).fingerprint
    truth = weights()
    (path / "model.safetensors").write_bytes(encode(dict(reversed(list(truth.items()))), metadata={"format": "pt"}))
    assert Checkpoint.open(str(path)).fingerprint == one
    truth["model.norm.weight"][3] = np.nextafter(truth["model.norm.weight"][3], np.float32(9))
    (path / "model.safetensors").write_bytes(encode(truth))
    assert Checkpoint.open(str(path)).fingerprint != one


def test_memory_is_bounded_by_one_tensor_and_by_rows(tmp_path):
    vocab = 1 << 16  # an embedding of 16 MB in float32, 8 MB in BF16
    path = folder(tmp_path, {**weights(), "model.embed_tokens.weight": np.ones((vocab, 64), np.float32)}, "BF16",
                  {"vocab_size": vocab})
    c = Checkpoint.open(str(path))
    tracemalloc.start()
    try:
        c.rows("model.embed_tokens.weight", 100, 1124)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.reset_peak()
        c.tensor("model.embed_tokens.weight")
        assert tracemalloc.get_traced_memory()[1] < (16 + 4) << 20  # itself and the block being converted
    finally:
        tracemalloc.stop()


# --- the files beside the weights ---


def test_text_files(tmp_path):
    path = folder(tmp_path, tokenizer__json="{}", tokenizer_config__json=json.dumps({"chat_template": "from the config"}),
                  generation_config__json=json.dumps({"eos_token_id": [5, 2], "temperature": 0.6}))
    c = Checkpoint.open(str(path))
    assert c.tokenizer_json == b"{}" and c.chat_template == "from the config" and c.config.eos_token_ids == (2, 5)
    (path / "chat_template.jinja").write_text("from the fïle\n", encoding="utf-8")
    assert Checkpoint.open(str(path)).chat_template == "from the fïle\n"
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "chat_template.jinja" in error_of(path)


def test_chat_template_lists_and_none(tmp_path):
    path = folder(tmp_path)
    assert Checkpoint.open(str(path)).chat_template is None and Checkpoint.open(str(path)).tokenizer_config == {}
    for templates, expected in [
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], None), (None, None),
    ]:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert Checkpoint.open(str(path)).chat_template == expected
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 7}))
    assert "chat_template" in error_of(path)


def test_missing_tokenizer_is_an_error_when_it_is_asked_for(tmp_path):
    c = Checkpoint.open(str(folder(tmp_path)))
    with pytest.raises(KestrelError, match="tokenizer.json"):
        c.tokenizer_json


# --- tensors that are not as the config says ---


def test_tied_head(tmp_path):
    truth = weights()
    copy = {**truth, "lm_head.weight": truth["model.embed_tokens.weight"]}
    c = Checkpoint.open(str(folder(tmp_path, copy)))
    assert "lm_head.weight" not in c.names() and len(c.names()) == len(truth)
    copy["lm_head.weight"] = -truth["model.embed_tokens.weight"]
    assert "lm_head.weight" in error_of(folder(tmp_path, copy)) and "tie_word_embeddings" in error_of(tmp_path)


def test_untied_without_head_names_it(tmp_path):
    """Case 31."""
    message = error_of(folder(tmp_path, config={"tie_word_embeddings": False}))
    assert "lm_head.weight" in message and "missing" in message and str(tmp_path) in message


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_each_missing_tensor_is_named(tmp_path, name):
    truth = weights()
    del truth[name]
    message = error_of(folder(tmp_path, truth))
    assert name in message and "missing" in message


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias",
                                  "model.layers.0.self_attn.q_norm.weight", "extra"])
def test_each_unexpected_tensor_is_named(tmp_path, name):
    message = error_of(folder(tmp_path, {**weights(), name: np.zeros(4, np.float32)}))
    assert name in message and "unexpected" in message


def test_old_rotary_buffers_are_no_weights(tmp_path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    assert set(Checkpoint.open(str(folder(tmp_path, {**weights(), **more}))).names()) == set(SHAPES)


def test_wrong_shape_names_expected_and_found(tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    message = error_of(folder(tmp_path, {**weights(), name: np.zeros((128, 64), np.float32)}))
    assert name in message and "[64, 64]" in message and "[128, 64]" in message


def test_other_dtypes_are_named(tmp_path):
    assert "F64" in error_of(folder(tmp_path, dtype="F64"))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_names_the_tensor(tmp_path, dtype, value):
    name, truth = "model.layers.1.mlp.down_proj.weight", weights()
    truth[name][3, 17] = value
    c = Checkpoint.open(str(folder(tmp_path, truth, dtype)))
    with pytest.raises(KestrelError, match=r"down_proj.weight: not a finite number at \[3, 17\]"):
        c.tensor(name)
    with pytest.raises(KestrelError, match=r"\[3, 17\]"):
        c.rows(name, 2, 5)
    c.rows(name, 4, 9)


# --- paths and files that are none ---


def test_paths(tmp_path):
    assert "missing" in error_of(tmp_path / "missing") and "No such file" in error_of(tmp_path / "missing")
    assert "config.json" in error_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no weights" in error_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in error_of(tmp_path) and "model.safetensors" in error_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(encode(weights()))
    assert "give the folder" in error_of(tmp_path / "model.safetensors")
    (tmp_path / "some.txt").write_text("hello")
    assert "some.txt" in error_of(tmp_path / "some.txt")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_broken_json_files_are_named(tmp_path, name, content):
    path = folder(tmp_path)
    (path / name).write_text(content)
    assert name in error_of(path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 538090408\n"
GOOD = encode({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float32)})


def header(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**keys):
    return header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **keys}}, bytes(8))


BROKEN = {
    "empty": (b"", "empty"),
    "lfs pointer": (LFS, "Git-LFS"),
    "short": (b"\x01\x02\x03", "8 bytes"),
    "header longer than the file": (struct.pack("<Q", 1 << 40) + b"{}", "header length"),
    "header length 2**64-1": (b"\xff" * 8 + b"{}", "header length"),
    "html": (b"<!DOCTYPE html><html><body>not found</body></html>", "header length"),
    "not json": (header(b"{'a': 1}"), "not JSON"),
    "not utf-8": (header(b"\xff\xfe{}"), "not JSON"),
    "deep json": (header(b"[" * 200000), "not JSON"),
    "a list": (header([]), "object"),
    "twice": (header(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
              "twice"),
    "truncated data": (GOOD[:-1], "truncated"),
    "more data": (GOOD + b"x", "1 bytes after"),
    "no data": (GOOD[:-40], "truncated"),
    "overlap": (header({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                        "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}}, bytes(12)), "overlaps"),
    "hole": (header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                     "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}}, bytes(12)), "hole"),
    "hole at start": (header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}}, bytes(12)), "hole"),
    "shape and bytes": (one(shape=[3]), "12 bytes"),
    "offsets reversed": (one(data_offsets=[8, 0]), "data_offsets"),
    "offsets negative": (one(data_offsets=[-8, 0]), "data_offsets"),
    "offsets of three": (one(data_offsets=[0, 8, 8]), "data_offsets"),
    "offsets text": (one(data_offsets="08"), "data_offsets"),
    "offsets float": (one(data_offsets=[0, 8.0]), "data_offsets"),
    "shape negative": (one(shape=[-2]), "shape"),
    "shape bool": (one(shape=[True, 2]), "shape"),
    "shape product beyond 64 bits": (one(shape=[1 << 62, 1 << 62, 0]), "0 bytes"),
    "shape of many axes": (one(shape=[1] * 9), "shape"),
    "dtype": (one(dtype="F4"), "F4"),
    "dtype number": (one(dtype=7), "dtype"),
    "entry is a number": (header({"a": 7}), "dtype, shape and data_offsets"),
    "metadata": (header({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors_is_one_line(tmp_path, case):
    raw, words = BROKEN[case]
    file = folder(tmp_path) / "model.safetensors"
    file.write_bytes(raw)
    with pytest.raises(KestrelError) as error:
        read_safetensors_header(str(file))
    assert str(error.value).startswith(str(file)) and words in str(error.value) and "\n" not in str(error.value)
    assert str(file) in error_of(tmp_path)


def test_header_beyond_the_formats_limit_is_not_read(tmp_path):
    file = tmp_path / "large.safetensors"
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", 200_000_000))
        f.truncate(300_000_000)  # a sparse file: nothing is stored
    tracemalloc.start()
    try:
        with pytest.raises(KestrelError, match="more than the format allows"):
            read_safetensors_header(str(file))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_good_header(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(GOOD)
    entries, metadata = read_safetensors_header(str(file))
    start = len(GOOD) - 40
    assert entries == {"a": ("F32", (2, 3), start, start + 24), "b": ("F32", (4,), start + 24, start + 40)} and metadata == {}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fuzzed_safetensors_headers(data, tmp_path_factory):
    """Either a KestrelError or a result that keeps the function's promise: nothing else ever comes out."""
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "digit"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            raw[at:at + 1] = data.draw(st.sampled_from([b"0", b"9", b"-", b"e", b"[", b"]", b"{", b"}", b'"', b","]))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif len(raw) > 1:
            del raw[at:]
            raw = raw or bytearray(b"x")
    _promise_holds(tmp_path_factory.getbasetemp() / "fuzz.safetensors", bytes(raw))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.fixed_dictionaries({
    "dtype": st.sampled_from(["U8", "F32", "BF16", "I64", "F99"]), "shape": st.lists(st.integers(-1, 4), max_size=3),
    "data_offsets": st.lists(st.integers(-1, 20), min_size=2, max_size=2)}), max_size=3), st.integers(0, 40))
def test_random_safetensors_headers(tmp_path_factory, entries, size):
    _promise_holds(tmp_path_factory.getbasetemp() / "random.safetensors", header(entries, bytes(size)))


def _promise_holds(file, raw):
    file.write_bytes(raw)
    try:
        entries, metadata = read_safetensors_header(str(file))
    except KestrelError as error:
        assert str(file) in str(error)
        return
    at = 8 + int.from_bytes(raw[:8], "little")
    sizes = {"U8": 1, "I8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8, "U16": 2, "I16": 2, "U32": 4,
             "I32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
    for dtype, shape, begin, end in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        assert begin == at and end - begin == sizes[dtype] * int(np.prod(shape, dtype=object))
        at = end
    assert at == len(raw) and isinstance(metadata, dict)


def test_checkpoint_truncated_anywhere_is_one_line(tmp_path):
    path = folder(tmp_path)
    whole = (path / "model.safetensors").read_bytes()
    rng = random.Random(1)
    for size in [len(whole) - 1, *(rng.randrange(1, len(whole)) for _ in range(20))]:
        (path / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors" in error_of(path)


def test_file_that_shrinks_after_opening(tmp_path):
    path = folder(tmp_path)
    c = Checkpoint.open(str(path))
    os.truncate(path / "model.safetensors", 9000)
    with pytest.raises(KestrelError, match="ended while"):
        for name in c.names():
            c.tensor(name)
