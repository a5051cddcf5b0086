# SPDX-License-Identifier: Apache-2.0
"""The packed file: exact quantisation, the same bytes every time, one line for a broken one, nothing left of a conversion that failed."""
from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel import _native
from kestrel._native import ffi
from kestrel.container import read_safetensors_header
from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.model import ForwardModel
from kestrel.pack import PackedModel

GROUP, PANEL = _native.GROUP, _native.PANEL
KESTREL = [sys.executable, "-m", "kestrel"]


# --- quantisation ------------------------------------------------------------------------------------------------------------

def packed_matrix(weight_type, rows):
    """The packed bytes, 64-byte aligned as in a file, and a kestrel_weight that reads them."""
    n, k = rows.shape
    size = _native.packed_bytes(weight_type, n, k)
    room = np.zeros(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    dst = room[begin:begin + size]
    _native.pack(weight_type, n, 0, np.ascontiguousarray(rows, np.float32), dst)
    weight = ffi.new("kestrel_weight *", {"type": _native.TYPES[weight_type], "n": n, "k": k, "data": ffi.from_buffer(dst)})
    return dst, weight, room


def stated(rows):
    """(values int8 [n, kp], scales float16 [n, kp / GROUP]): absmax / 127 rounded to f16, then x / scale, half to even, within 127."""
    n, k = rows.shape
    kp = -(-k // GROUP) * GROUP
    x = np.zeros((n, kp), np.float32)
    x[:, :k] = rows
    groups = x.reshape(n, -1, GROUP)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(wide > 0, groups / wide, np.float32(0))
    return np.clip(np.rint(values), -127, 127).astype(np.int8).reshape(n, kp), scales


def unpanelled(dst, n, k):
    """(values, scales) of a packed int8 matrix by the layout that csrc/kernels.h describes."""
    kp = -(-k // GROUP) * GROUP
    scale_bytes = -(-kp // GROUP * PANEL * 2 // 64) * 64
    values, scales = [], []
    for panel in dst.reshape(-(-n // PANEL), -1):
        assert len(panel) == scale_bytes + kp * PANEL
        scales.append(panel[:kp // GROUP * PANEL * 2].view(np.float16).reshape(-1, PANEL).T)
        assert not panel[kp // GROUP * PANEL * 2:scale_bytes].any()
        values.append(panel[scale_bytes:].view(np.int8).reshape(kp // 4, PANEL, 4).swapaxes(0, 1).reshape(PANEL, kp))
    return np.concatenate(values), np.concatenate(scales)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 27), st.integers(1, 200), st.integers(0, 2 ** 32 - 1), st.sampled_from([1e-9, 1e-4, 0.02, 1.0, 3000.0]))
def test_int8_is_as_stated(n, k, seed, size):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((n, k)) * size).astype(np.float32)
    rows[rng.random((n, k)) < 0.1] = 0
    rows[rng.integers(0, n)] = 0
    dst, weight, _ = packed_matrix("int8", rows)
    values, scales = unpanelled(dst, n, k)
    expected_values, expected_scales = stated(rows)
    np.testing.assert_array_equal(scales[:n], expected_scales)
    np.testing.assert_array_equal(values[:n], expected_values)
    assert not values[n:].any() and not scales[n:].any()  # rows that pad the last panel
    for r in range(n):
        exact = expected_values[r].astype(np.float32) * np.repeat(expected_scales[r].astype(np.float32), GROUP)
        assert _native.unpack_row(weight[0], r).tobytes() == exact[:k].tobytes()


def test_halves_are_rounded_to_even_and_never_reach_minus_128():
    scale = np.float32(0.5)
    x = np.array([127 * scale, 0.25, 0.75, 1.25, -0.25, -0.75, -63.5, 63.25, -63.25], np.float32)
    rows = np.zeros((1, GROUP), np.float32)
    rows[0, :len(x)] = x
    values, scales = unpanelled(packed_matrix("int8", rows)[0], 1, GROUP)
    assert scales[0, 0] == 0.5
    assert values[0, :len(x)].tolist() == [127, 0, 2, 2, 0, -2, -127, 126, -126]
    rng = np.random.default_rng(0)
    for _ in range(200):  # a scale that f16 rounds down would give 127.06: it must stop at 127
        rows[0] = rng.uniform(-1, 1, GROUP)
        rows[0, 0] = -abs(rows[0]).max()
        values, scales = unpanelled(packed_matrix("int8", rows)[0], 1, GROUP)
        assert values.min() >= -127 and abs(values[0]).max() in (126, 127)


@pytest.mark.parametrize("n, k", [(1, 1), (8, 32), (9, 33), (23, 150)])
def test_f32_is_kept_to_the_bit(n, k):
    rows = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    rows[0, 0] = -0.0
    _, weight, _ = packed_matrix("f32", rows)
    for r in range(n):
        assert _native.unpack_row(weight[0], r).tobytes() == rows[r].tobytes()
    for r in (-1, n):
        with pytest.raises(KestrelError):
            _native.unpack_row(weight[0], r)


@pytest.mark.parametrize("weight_type", ["int8", "int4", "f32"])
def test_panels_are_independent(weight_type):
    """Rows packed in blocks, in any order, give the bytes of all at once."""
    rows = np.random.default_rng(3).standard_normal((45, 70)).astype(np.float32)
    whole = packed_matrix(weight_type, rows)[0]
    parts = np.full_like(whole, 0xEE)
    for begin, end in ((40, 45), (8, 16), (0, 8), (16, 40)):
        _native.pack(weight_type, 45, begin, rows[begin:end], parts)
    assert parts.tobytes() == whole.tobytes()


# --- the file ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.native_only  # the digests of test_convert.py hold the bytes on ARM
@pytest.mark.parametrize("weights", ["int8", "f32"])
@pytest.mark.parametrize("name", toy.TINY)
def test_the_same_bytes_every_time(tmp_path, name, weights):
    first = open(toy.packed(name, weights), "rb").read()
    target = tmp_path / "again.kestrel"
    target.write_bytes(b"an older file")
    convert(str(toy.GOLDEN / name), str(target), weights)
    assert target.read_bytes() == first
    moved = tmp_path / "elsewhere"
    shutil.copytree(str(toy.GOLDEN / name), str(moved))
    convert(str(moved), str(target), weights)
    assert target.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.kestrel", "elsewhere"]


@pytest.mark.parametrize("name", toy.TINY)
def test_weights_lie_in_the_file_as_they_were(name):
    """Every row of every matrix of the f32 file is the checkpoint's."""
    from reference.llama import read_safetensors

    source = read_safetensors(toy.GOLDEN / name / "model.safetensors")
    packed = PackedModel(toy.packed(name, "f32"))
    from kestrel.pack import matrices

    for m in matrices(packed.config):
        rows = np.concatenate([source[s] for s in m.sources]).astype(np.float32)
        weight = ffi.new("kestrel_weight *", {"type": _native.F32, "n": m.n, "k": m.k, "data": ffi.from_buffer(packed.array(m.name))})
        got = np.stack([_native.unpack_row(weight[0], r) for r in range(m.n)])
        assert got.tobytes() == rows.tobytes(), m.name


@pytest.mark.parametrize("weights", ["int8", "f32"])
@pytest.mark.parametrize("name", toy.TINY)
def test_everything_begins_at_a_multiple_of_64(name, weights):
    path = toy.packed(name, weights)
    entries, metadata = read_safetensors_header(path)
    assert all(e.begin % 64 == 0 and e.end % 64 == 0 for e in entries.values())
    assert os.path.getsize(path) == max(e.end for e in entries.values())
    assert set(json.loads(metadata["text"])) <= set(entries)
    packed = PackedModel(path)
    for file in ("tokenizer.json",):
        assert packed.text(file) == (toy.GOLDEN / name / file).read_bytes()
    assert ("head" in entries) == (not packed.config.tie_word_embeddings)


def test_the_safetensors_package_reads_it():
    from safetensors.numpy import load_file

    path = toy.packed("tiny-tied", "int8")
    packed, tensors = PackedModel(path), load_file(path)
    assert set(tensors) == set(packed._entries)
    for name, tensor in tensors.items():
        assert tensor.tobytes() == packed.array(name).tobytes()


def test_the_map_is_read_only():
    packed = PackedModel(toy.packed())
    with pytest.raises(ValueError):
        packed.array("embedding")[0] = 1


# --- case 28: broken files --------------------------------------------------------------------------------------------------------

def split(raw):
    """(header as an object, data)."""
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def joined(header, data):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data


def with_header(change):
    def broken(raw):
        header, data = split(raw)
        change(header)
        return joined(header, data)
    return broken


def metadata(**values):
    def change(header):
        for key, value in values.items():
            if value is None:
                del header["__metadata__"][key]
            else:
                header["__metadata__"][key] = value
    return with_header(change)


def inside(key, change):
    def edit(header):
        value = json.loads(header["__metadata__"][key])
        change(value)
        header["__metadata__"][key] = json.dumps(value)
    return with_header(edit)


def renamed(header):
    header["layers.0.q"] = header.pop("layers.0.qkv")


def overlapping(header):
    header["layers.0.o"]["data_offsets"] = header["layers.0.qkv"]["data_offsets"]


def shifted(raw):
    """All tensors begin 8 bytes late: whole, but not aligned."""
    header, data = split(raw)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data


BROKEN = {
    "empty": lambda raw: b"",
    "seven bytes": lambda raw: raw[:7],
    "only a length": lambda raw: raw[:8],
    "half a header": lambda raw: raw[:200],
    "no data": lambda raw: raw[:8 + int.from_bytes(raw[:8], "little")],
    "truncated": lambda raw: raw[:len(raw) // 2],
    "one byte short": lambda raw: raw[:-1],
    "one byte more": lambda raw: raw + b"\0",
    "header longer than the file": lambda raw: (len(raw) + 1).to_bytes(8, "little") + raw[8:],
    "header of 2^63": lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:],
    "header not JSON": lambda raw: joined(b"{not json", raw),
    "header not UTF-8": lambda raw: joined(b'{"\xff": 1}', b""),
    "header a list": lambda raw: joined([], b""),
    "header nested": lambda raw: joined(b"[" * 200_000, b""),
    "git lfs pointer": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 145563776\n",
    "random": lambda raw: bytes(range(256)) * 40,
    "another safetensors file": lambda raw: (toy.GOLDEN / "tiny-tied" / "model.safetensors").read_bytes(),
    "overlapping tensors": with_header(overlapping),
    "not aligned": shifted,
    "other format": metadata(format="other"),
    "no format": metadata(format=None),
    "format version": metadata(format_version="99"),
    "no format version": metadata(format_version=None),
    "numerics version": metadata(numerics_version="0"),
    "no config": metadata(config=None),
    "config not JSON": metadata(config="{"),
    "config a list": metadata(config="[]"),
    "no weights": metadata(weights=None),
    "weights not JSON": metadata(weights="x"),
    "weights a number": metadata(weights="3"),
    "no text": metadata(text=None),
    "weight type": inside("weights", lambda w: w["embedding"].update(type="int3")),
    "two weight types": inside("weights", lambda w: w["embedding"].update(type="f32")),
    "weight group": inside("weights", lambda w: w["embedding"].update(group=7)),
    "weight missing": inside("weights", lambda w: w.pop("layers.0.o")),
    "weight a string": inside("weights", lambda w: w.update(embedding="int8")),
    "shape of another model": inside("config", lambda c: c.update(hidden_size=128)),
    "more layers than tensors": inside("config", lambda c: c.update(num_hidden_layers=3)),
    "fewer layers than tensors": inside("config", lambda c: c.update(num_hidden_layers=1)),
    "millions of layers": inside("config", lambda c: c.update(num_hidden_layers=1 << 40)),
    "a vocabulary of 2^40": inside("config", lambda c: c.update(vocab_size=1 << 40)),
    "negative heads": inside("config", lambda c: c.update(num_attention_heads=-4)),
    "config key missing": inside("config", lambda c: c.pop("rope_theta")),
    "config key unknown": inside("config", lambda c: c.update(surprise=1)),
    "rope_theta a string": inside("config", lambda c: c.update(rope_theta="10000")),
    "rope_theta 0": inside("config", lambda c: c.update(rope_theta=0.0)),
    "eps 0": inside("config", lambda c: c.update(rms_norm_eps=0.0)),
    "eps NaN": inside("config", lambda c: c.update(rms_norm_eps=float("nan"))),
    "end id outside": inside("config", lambda c: c.update(eos_token_ids=[1 << 20])),
    "tensor renamed": with_header(renamed),
    "text unknown": inside("text", lambda t: t.update(surprise=0)),
    "text length negative": inside("text", lambda t: t.update({"tokenizer.json": -1})),
    "text length too large": inside("text", lambda t: t.update({"tokenizer.json": 1 << 40})),
    "text length true": inside("text", lambda t: t.update({"tokenizer.json": True})),
}


def one_line(error, path):
    text = str(error)
    return text.startswith(path) and "\n" not in text and len(text) < 500 + len(path)


@pytest.mark.native_only
@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_one_line(tmp_path, what):
    path = str(tmp_path / "broken.kestrel")
    with open(path, "wb") as file:
        file.write(BROKEN[what](open(toy.packed(), "rb").read()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(KestrelError) as error:
        ForwardModel(path)
    assert one_line(error.value, path), str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB: nothing was believed and allocated


@pytest.mark.native_only
def test_broken_text_files_are_one_line(tmp_path):
    """The header is fine; what a text tensor holds is not."""
    from kestrel.generate import Model

    raw = bytearray(open(toy.packed(), "rb").read())
    entries, _ = read_safetensors_header(toy.packed())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        broken = bytearray(raw)
        broken[entries[name].begin:entries[name].begin + 20] = b"\xff" * 20
        path = str(tmp_path / "broken.kestrel")
        with open(path, "wb") as file:
            file.write(broken)
        with pytest.raises(KestrelError) as error:
            Model.load(path)
        assert one_line(error.value, path)


@pytest.mark.native_only
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fuzzed_headers(tmp_path_factory, data):
    """Bytes of the header changed at random: it opens, or one line says why not."""
    raw = bytearray(open(toy.packed(), "rb").read())
    size = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    path = str(tmp_path_factory.getbasetemp() / "fuzzed.kestrel")
    with open(path, "wb") as file:
        file.write(raw)
    try:
        PackedModel(path)
    except KestrelError as error:
        assert "\n" not in str(error)


@pytest.mark.native_only
@pytest.mark.parametrize("what", ["empty", "truncated", "header longer than the file", "git lfs pointer", "header not JSON", "format version"])
def test_the_command_line_says_it_in_one_line(tmp_path, what):
    path = str(tmp_path / "broken.kestrel")
    with open(path, "wb") as file:
        file.write(BROKEN[what](open(toy.packed(), "rb").read()))
    for command in (["generate", path, "--prompt", "x"], ["info", path]):
        done = subprocess.run(KESTREL + command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"kestrel: {path}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["", "/", "nowhere/nothing.kestrel", "/dev/null"])
def test_no_file_at_all(path):
    with pytest.raises(KestrelError):
        PackedModel(path)


# --- case 27: a conversion that fails leaves nothing -----------------------------------------------------------------------------------

@pytest.mark.native_only
def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the size of a file stands for the full disk: the same errors from the same calls."""
    whole = os.path.getsize(toy.packed("tiny-untied", "f32"))
    for share in (0.1, 0.5, 0.99):
        folder = tmp_path / str(share)
        folder.mkdir()
        code = (f"import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
                f"resource.setrlimit(resource.RLIMIT_FSIZE, ({int(whole * share)}, {int(whole * share)}))\n"
                f"sys.dont_write_bytecode = True\nfrom kestrel.cli import main\nmain({['convert', str(toy.GOLDEN / 'tiny-untied'), str(folder / 'm'), '--weights', 'f32']!r})")
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr == f"kestrel: {folder / 'm'}: File too large\n"
        assert list(folder.iterdir()) == []


@pytest.mark.native_only
@pytest.mark.parametrize("weights", ["int8", "f32"])
def test_a_bad_weight_leaves_nothing(tmp_path, weights):
    folder = toy.checkpoint("tiny-tied")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    last = read_safetensors_header(str(folder / "model.safetensors"))[0]["model.layers.1.mlp.down_proj.weight"]
    raw[last.end - 4:last.end] = np.float32("nan").tobytes()
    (folder / "model.safetensors").write_bytes(raw)
    older = tmp_path / "older.kestrel"
    older.write_bytes(b"what was there before")
    for target in (older, tmp_path / "new.kestrel"):
        with pytest.raises(KestrelError, match="model.layers.1.mlp.down_proj.weight: not a finite number"):
            convert(str(folder), str(target), weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["older.kestrel"]
    assert older.read_bytes() == b"what was there before"


@pytest.mark.native_only
@pytest.mark.parametrize("target", ["missing/m.kestrel", "folder"])
def test_an_impossible_target(tmp_path, target):
    (tmp_path / "folder").mkdir()
    with pytest.raises(KestrelError) as error:
        convert(str(toy.GOLDEN / "tiny-tied"), str(tmp_path / target))
    assert one_line(error.value, str(tmp_path / target))
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.native_only
def test_killed_in_the_middle(tmp_path, real_gguf):
    """kill -9 while it writes: no file under the final name, and the next conversion there takes away what was left."""
    target = tmp_path / "m.kestrel"
    process = subprocess.Popen(KESTREL + ["convert", str(real_gguf), str(target), "--weights", "f32"])
    try:
        for _ in range(3000):
            if any(p.is_file() and p.stat().st_size > 1 << 20 for p in tmp_path.rglob("*")):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    left = [p.name for p in tmp_path.iterdir()]
    assert left and "m.kestrel" not in left
    convert(str(toy.GOLDEN / "tiny-tied"), str(target), "f32")
    assert target.read_bytes() == open(toy.packed("tiny-tied", "f32"), "rb").read()
    assert [p.name for p in tmp_path.iterdir()] == ["m.kestrel"]


@pytest.mark.native_only
def test_case_24_peak_memory(real_model_int8):
    """The mapped file's pages count: so a second copy of the weights would show at once."""
    code = ("import sys, json\nfrom kestrel.generate import Model\nm = Model.load(sys.argv[1], ctx=1024)\n"
            "a = m.generate(' word' * 300, max_tokens=700, ignore_end=True)\na.run()\n"
            "status = open('/proc/self/status').read()\n"
            "print(json.dumps({'peak': int(status.split('VmHWM:')[1].split()[0]) * 1024, 'kv': m.kv_bytes(1000), 'tokens': len(a.token_ids)}))")
    done = subprocess.run([sys.executable, "-c", code, str(real_model_int8)], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    result = json.loads(done.stdout)
    assert result["tokens"] == 700
    assert result["peak"] < os.path.getsize(str(real_model_int8)) + result["kv"] + 100e6


@pytest.mark.native_only
def test_only_a_regular_file_is_replaced(tmp_path):
    """Nothing but a file gives way to the new one; behind a link it is the link's target that does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(str(pipe))
    with pytest.raises(KestrelError) as error:
        convert(str(toy.GOLDEN / "tiny-tied"), str(pipe))
    assert one_line(error.value, f"{pipe}: expected a regular file or a new name")
    assert pipe.is_fifo()
    disk = tmp_path / "disk"
    disk.mkdir()
    link = tmp_path / "link.kestrel"
    link.symlink_to(disk / "m.kestrel")
    convert(str(toy.GOLDEN / "tiny-tied"), str(link), "f32")
    assert link.is_symlink() and (disk / "m.kestrel").read_bytes() == open(toy.packed("tiny-tied", "f32"), "rb").read()
    assert sorted(p.name for p in disk.iterdir()) == ["m.kestrel"]


@pytest.mark.native_only
def test_two_conversions_of_one_name_both_end_whole(tmp_path):
    """Each writes under a name of its own: the file that stands there is one or the other, and the user's own NAME.partial stays his."""
    target, own = tmp_path / "m.kestrel", tmp_path / "m.kestrel.partial"
    own.write_bytes(b"precious")
    kinds = {kind: open(toy.packed("tiny-tied", kind), "rb").read() for kind in ("int8", "f32")}
    nested = []

    def progress(done, total):     # in the middle of the first, the whole of the second
        if not nested:
            nested.append(True)
            convert(str(toy.GOLDEN / "tiny-tied"), str(target), "f32")
            assert target.read_bytes() == kinds["f32"]
    convert(str(toy.GOLDEN / "tiny-tied"), str(target), "int8", progress=progress)
    assert target.read_bytes() == kinds["int8"] and own.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.kestrel", "m.kestrel.partial"]
