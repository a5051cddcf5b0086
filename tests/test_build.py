# SPDX-License-Identifier: Apache-2.0
"""csrc/build.py and cross/check_objects.py: what is built from what, and that the check sees what it is there for."""
from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEADER = """\
#include <stdint.h>
/* cffi: begin */
int32_t kestrel_answer(void);
/* cffi: end */
"""
KERNELS = """\
#include "kestrel.h"
#include "answer.h"
__attribute__((visibility("default"))) int32_t kestrel_answer(void) { return ANSWER; }
"""


def module_of(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture()
def small(tmp_path, root):
    """A repository of two units with this build.py, as a module."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "kestrel").mkdir()
    shutil.copy2(str(root / "csrc" / "build.py"), str(tmp_path / "csrc" / "build.py"))
    (tmp_path / "csrc" / "kestrel.h").write_text(HEADER)
    (tmp_path / "csrc" / "answer.h").write_text("#define ANSWER 41\n")
    (tmp_path / "csrc" / "kernels.c").write_text(KERNELS)
    return module_of(tmp_path / "csrc" / "build.py", "small_build")


@pytest.fixture()
def check_objects(root):
    return module_of(root / "cross" / "check_objects.py", "check_objects")


def answer(build, out) -> int:
    """What the library in `out` says, asked through the emitted cffi module in a process of its own."""
    build.emit_cffi(out)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from _kestrel_cffi import ffi; "
            "library = ffi.dlopen(sys.argv[1] + '/libkestrel.so'); print(library.kestrel_answer())")
    return int(subprocess.run([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.native_only
def test_a_changed_header_rebuilds_and_an_unchanged_tree_does_not(small, capfd):
    out = small.ROOT / "kestrel"
    library = small.build().library
    assert library == out / "libkestrel.so" and answer(small, out) == 41
    made = library.stat().st_mtime_ns
    assert small.build().library.stat().st_mtime_ns == made
    assert "(nothing to do)" in capfd.readouterr().err
    header = small.CSRC / "answer.h"
    header.write_text("#define ANSWER 42\n")
    later = made + 10**9
    os.utime(str(header), ns=(later, later))
    small.build()
    assert answer(small, out) == 42


@pytest.mark.native_only
def test_a_failed_compile_leaves_the_library_and_says_which_command(small):
    library = small.build(quiet=True).library
    before = library.read_bytes()
    (small.CSRC / "kernels.c").write_text("#error not today\n")
    with pytest.raises(small.BuildError, match="failed: .*kernels.c"):
        small.build(quiet=True)
    assert library.read_bytes() == before
    assert [p.name for p in library.parent.iterdir()] == ["libkestrel.so"]


@pytest.mark.native_only
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-march=native", "-ffp-contract=fast"])
def test_cflags_that_change_bits_are_refused(small, monkeypatch, flag):
    monkeypatch.setenv("CFLAGS", "-g " + flag)
    with pytest.raises(small.BuildError, match=flag):
        small.build(quiet=True)


@pytest.mark.native_only
def test_cflags_reach_the_compiler(small, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-DANSWER=7")
    (small.CSRC / "answer.h").write_text("")
    small.build(quiet=True)
    assert answer(small, small.ROOT / "kestrel") == 7


@pytest.mark.native_only
def test_no_such_compiler_is_one_line(small):
    done = subprocess.run([sys.executable, str(small.CSRC / "build.py"), "--cc", "no-such-cc"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "can't run the compiler no-such-cc -dumpmachine: No such file or directory\n"


def test_header_without_the_marks_is_refused(small):
    header = small.CSRC / "kestrel.h"
    header.write_text(HEADER.replace("/* cffi: end */", ""))
    with pytest.raises(small.BuildError, match="expected one block"):
        small.header_block()


def test_units_of_each_architecture(root):
    build = module_of(root / "csrc" / "build.py", "csrc_build")
    assert build.isa_of("matmul_neon.c") == "neon"
    assert build.isa_of("matmul_neon_dotprod.c") == "neon_dotprod"
    assert build.isa_of("quantize_rows_avx512_vnni.c") == "avx512_vnni"
    assert build.isa_of("quantize_rows.c") is None
    arm, x86, other = (build.units(a) for a in ("aarch64", "x86_64", "riscv64"))
    baseline = [u for u in arm if u.isa is None]
    assert baseline and baseline == [u for u in x86 if u.isa is None] == other
    assert {u.source.name for u in arm} | {u.source.name for u in x86} == {p.name for p in (root / "csrc").glob("*.c")}
    assert not any("avx" in u.source.name for u in arm) and not any("neon" in u.source.name for u in x86)


# One line of disassembly each, that must be caught in the named object.
@pytest.mark.parametrize("isa, line", [
    (None, ("sdot", "v0.4s, v1.16b, v2.16b")), ("neon", ("sdot", "v0.4s, v1.16b, v2.4b[0]")), ("neon", ("udot", "v0.4s, v1.16b, v2.16b")),
    (None, ("ldaddal", "w0, w1, [x2]")), (None, ("casal", "w0, w1, [x2]")), (None, ("swpa", "x0, x1, [x2]")), ("neon", ("stadd", "x0, [x1]")),
    (None, ("ldapr", "w0, [x0]")), ("neon", ("smmla", "v0.4s, v1.16b, v2.16b")), ("neon_dotprod", ("smmla", "v0.4s, v1.16b, v2.16b")),
    ("neon_i8mm", ("sdot", "z0.s, z1.b, z2.b")), (None, ("fadd", "z0.s, z0.s, z1.s")), ("neon", ("fmla", "v0.8h, v1.8h, v2.8h")),
])
def test_an_instruction_that_its_cores_lack_is_found(check_objects, isa, line):
    own = {None: [], "neon": [("smull", "v0.8h, v1.8b, v2.8b")], "neon_dotprod": [("sdot", "v0.4s, v1.16b, v2.16b")],
           "neon_i8mm": [("smmla", "v0.4s, v1.16b, v2.16b")]}[isa]
    innocent = own + [("ldaxr", "w0, [x1]"), ("fcvtl", "v0.4s, v1.4h"), ("smlal2", "v0.8h, v1.16b, v2.16b"), ("ldp", "x29, x30, [sp]")]
    assert check_objects.faults("aarch64", "matmul", isa, innocent) == []
    assert len(check_objects.faults("aarch64", "matmul", isa, innocent + [line])) == 1


@pytest.mark.parametrize("architecture, isa", [("aarch64", "neon"), ("aarch64", "neon_dotprod"), ("aarch64", "neon_i8mm"),
                                               ("x86_64", "avx2"), ("x86_64", "avx512_vnni")])
def test_a_variant_without_its_instruction_is_found(check_objects, architecture, isa):
    code = [("ldr", "q0, [x0]"), ("ret", "")] if architecture == "aarch64" else [("vmovups", "(%rdi),%ymm0"), ("ret", "")]
    assert "not what its name says" in check_objects.faults(architecture, "matmul", isa, code)[0]


def test_avx512_in_a_baseline_object_is_found(check_objects):
    for line in (("vaddps", "%zmm1,%zmm0,%zmm0"), ("vaddps", "%ymm17,%ymm0,%ymm0"), ("vpdpbusd", "%ymm1,%ymm2,%ymm0")):
        assert check_objects.faults("x86_64", "norm", None, [("vaddps", "%ymm1,%ymm0,%ymm0")]) == []
        assert check_objects.faults("x86_64", "norm", None, [line]) != []


@pytest.mark.native_only
def test_objects_of_this_machine(check_objects, capfd):
    """Every object of the native build, by disassembly (cross/run_emulated.sh does the same for aarch64)."""
    assert check_objects.check(None) == 0, capfd.readouterr().out
    assert "libkestrel.so" in capfd.readouterr().out
