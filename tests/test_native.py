# SPDX-License-Identifier: Apache-2.0
"""The door to the library: C and cffi see the same layout, a library that doesn't belong is refused, arrays are checked."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import toy

from kestrel import _native
from kestrel._native import ffi, lib
from kestrel.errors import KestrelError

STRUCTS = ("kestrel_weight", "kestrel_layer", "kestrel_config", "kestrel_row", "kestrel_output", "kestrel_sampling", "kestrel_comparison")


def test_layout_is_the_same_for_compiler_and_cffi():
    expected, names = [], []
    for struct in STRUCTS:
        expected.append(ffi.sizeof(struct))
        names.append(f"sizeof {struct}")
        for field, entry in ffi.typeof(struct).fields:
            expected.append(entry.offset)
            names.append(f"{struct}.{field}")
    assert dict(zip(names, _native.layout())) == dict(zip(names, expected))
    assert len(_native.layout()) == len(expected)


def test_layout_covers_every_struct_of_the_header(root):
    header = (root / "csrc" / "kestrel.h").read_text()
    assert tuple(re.findall(r"typedef struct (\w+) \{", header)) == STRUCTS


def test_layout_writes_no_more_than_asked():
    values = ffi.new("int64_t[]", [-1] * 4)
    assert lib.kestrel_layout(values, 3) == len(_native.layout())
    assert list(values) == _native.layout()[:3] + [-1]


def run_python(code, folder):
    """Python in `folder`, whose modules come before all others."""
    return subprocess.run([sys.executable, "-c", code], cwd=str(folder), env=dict(os.environ, PYTHONPATH=str(folder)), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


def package_copy(root, folder):
    shutil.copytree(str(root / "kestrel"), str(folder / "kestrel"), ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "kestrel"


def test_another_abi_is_refused(root, tmp_path):
    native = package_copy(root, tmp_path) / "_native.py"
    text, count = re.subn(r"^_ABI = (\d+)$", lambda m: f"_ABI = {int(m[1]) + 1}", native.read_text(), flags=re.M)
    assert count == 1
    native.write_text(text)
    code = ("import kestrel.errors\ntry:\n import kestrel._native\nexcept kestrel.errors.KestrelError as error:\n"
            " print(error)\nelse:\n print('loaded')")
    done = run_python(code, tmp_path)
    assert re.fullmatch(r"\S*libkestrel\.so: ABI \d+, expected \d+: build and package do not belong together\n", done.stdout), done
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_missing_or_broken_library_is_one_line(root, tmp_path, content):
    library = package_copy(root, tmp_path) / "libkestrel.so"
    library.unlink()
    if content is not None:
        library.write_bytes(content)
    done = run_python("import kestrel.errors\ntry:\n import kestrel._native\nexcept kestrel.errors.KestrelError as e:\n print(e)", tmp_path)
    assert done.stdout.startswith(str(library)) and done.stdout.count("\n") == 1, done


# --- instruction sets --------------------------------------------------------------------------------------------------

def test_isa_names():
    names = _native.isa_names()
    assert names[0] == "portable" and len(set(names)) == len(names)
    assert {"x86_64": "avx2", "aarch64": "neon"}[os.uname().machine] in names
    assert _native.choose_isa(None) in names


def test_each_isa_runs_its_own_variants():
    """Under portable nothing but portable runs; a newer set never falls behind an older one."""
    assert set(_native.variants("portable").values()) == {"portable"}
    best = _native.variants(_native.isa_names()[-1])
    assert best["matmul_int8"] != "portable"
    for isa in _native.isa_names():
        assert set(_native.variants(isa).values()) <= set(_native.isa_names())


def test_an_impossible_isa_is_one_line(monkeypatch):
    for impossible in ("sparc", "neon_i8mm", "", "PORTABLE", "portable "):
        if impossible in _native.isa_names() or not impossible:
            continue
        with pytest.raises(KestrelError, match="not available on this CPU; available: portable"):
            _native.choose_isa(impossible)
        monkeypatch.setenv("KESTREL_ISA", impossible)
        with pytest.raises(KestrelError, match="not available on this CPU"):
            _native.choose_isa(None)
        assert _native.choose_isa("portable") == "portable"  # an argument wins over the environment
    monkeypatch.setenv("KESTREL_ISA", "portable")
    assert _native.choose_isa(None) == "portable"


@pytest.mark.parametrize("isa", ["sparc", "neon_i8mm", "avx512_vnni", "neon_dotprod"])
def test_case_20_impossible_isa_exits_2(isa):
    """A real process, a real exit code: never a signal. On a CPU that has the set it must run."""
    for command in (["generate", toy.packed(), "--prompt", "a", "--max-tokens", "1"], ["info", toy.packed()]):
        done = subprocess.run([sys.executable, "-m", "kestrel", *command], env=dict(os.environ, KESTREL_ISA=isa), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)
        if isa in _native.isa_names():
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 2
            assert done.stdout == "" and done.stderr.count("\n") == 1
            assert done.stderr.startswith(f"kestrel: instruction set '{isa}': not available on this CPU; available: portable")


# --- arrays and numbers ------------------------------------------------------------------------------------------------

def test_arrays_are_checked():
    good = np.zeros((4, 8), np.float32)
    pointer = _native.array(good, "float32", (4, -1), "x")
    assert ffi.typeof(pointer) == ffi.typeof("float[]") and len(pointer) == 32
    readonly = good.copy()
    readonly.flags.writeable = False
    for bad, words in ((good.astype(np.float64), "found float64"), (good[0], r"found float32 \[8\]"), (good[:3], r"found float32 \[3, 8\]"),
                       (np.asfortranarray(good), "C-contiguous"), (good[:, ::2].repeat(2, 1)[:, ::-1], "C-contiguous"), ("text", "found")):
        with pytest.raises(ValueError, match=words):
            _native.array(bad, "float32", (4, 8), "x")
    _native.array(readonly, "float32", (4, 8), "x")
    with pytest.raises(ValueError, match="writable"):
        _native.array(readonly, "float32", (4, 8), "x", writable=True)


def test_a_pointer_keeps_its_array():
    pointer = _native.array(np.full(1000, 3.5, np.float32), "float32", (-1,), "x")
    for _ in range(20):
        np.full(1000, 1.0, np.float32)
    assert all(value == 3.5 for value in pointer)


def test_packing_refuses_what_does_not_fit():
    rows = np.zeros((8, 40), np.float32)
    size = _native.packed_bytes("int8", 8, 40)
    assert size % 64 == 0
    for bad_rows, bad_dst, row0, n in ((rows, np.zeros(size - 64, np.uint8), 0, 8), (rows.astype(np.float64), np.zeros(size, np.uint8), 0, 8),
                                       (rows, np.zeros(size, np.int8), 0, 8)):
        with pytest.raises(ValueError):
            _native.pack("int8", n, row0, bad_rows, bad_dst)
    two = np.zeros(_native.packed_bytes("int8", 16, 40), np.uint8)
    for row0, count in ((4, 8), (16, 8), (0, 4), (-8, 8)):  # not at a panel, past the end, half a panel that ends nothing, before the start
        with pytest.raises(KestrelError, match="argument outside its range"):
            _native.pack("int8", 16, row0, rows[:count], two)
    for n, k in ((0, 8), (8, 0), (-1, 8), (1 << 40, 8), (8, 1 << 40)):
        with pytest.raises(ValueError):
            _native.packed_bytes("int8", n, k)


def test_status_codes_have_words():
    texts = [_native.status_text(code) for code in range(9)]
    assert len(set(texts)) == 9 and "unknown status" not in texts
    assert _native.status_text(99) == _native.status_text(-1) == "unknown status"


def test_rope_frequencies():
    """theta^(-2i/d) rounded once: against float64, within half a unit in the last place of float32 and a little."""
    for theta, d in ((10000.0, 64), (1e6, 128), (500000.0, 80), (1.5, 8), (8e6, 256)):
        exact = theta ** (-np.arange(0, d, 2) / d)
        got = _native.rope_inv_freq(theta, d)
        assert got.dtype == np.float32 and got[0] == 1
        assert (np.abs(got - exact) <= 0.5000001 * np.spacing(got).astype(np.float64)).all()
    for theta, d in ((0.0, 64), (-1.0, 64), (float("nan"), 64), (float("inf"), 64), (1e4, 0), (1e4, 7)):
        with pytest.raises(KestrelError):
            _native.rope_inv_freq(theta, d)
