# SPDX-License-Identifier: Apache-2.0
"""cross/check_elf.py and cross/check_wheel.py: that they see what they are there for (cross/README.md's commands build the real wheels in CI)."""
from __future__ import annotations

import importlib.util
import sys
import zipfile

import pytest

pytestmark = pytest.mark.native_only  # about the host's tools


def module_of(root, name):
    sys.path.insert(0, str(root / "cross"))
    try:
        spec = importlib.util.spec_from_file_location(name, str(root / "cross" / f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def check_elf(root):
    return module_of(root, "check_elf")


@pytest.fixture(scope="module")
def check_wheel(root):
    return module_of(root, "check_wheel")


def test_the_native_library_asks_for_little(check_elf, root):
    """Case 29: pages up to 64K, no executable stack (faults() says both)."""
    library = check_elf.read(root / "kestrel" / "libkestrel.so")
    assert check_elf.faults(library) == []
    assert library.load_align == 65536 and "malloc" in library.undefined and library.glibc >= (2, 17)


@pytest.mark.parametrize("change, said", [
    ({"undefined": ("malloc", "expf")}, "takes expf from libm"), ({"undefined": ("fmaf",)}, "takes fmaf from libm"),
    ({"undefined": ("__aarch64_ldadd4_acq",)}, "takes the outlined atomic __aarch64_ldadd4_acq"), ({"needed": ("libc.so.6", "libgomp.so.1")}, "needs libgomp.so.1"),
    ({"load_align": 4096}, "has a LOAD segment aligned to 4096, expected 65536 or more"), ({"executable_stack": True}, "asks for an executable stack"),
    ({"search_path": "/home/me"}, "looks for libraries in /home/me")])
def test_what_would_not_load_or_not_be_equal_is_found(check_elf, root, change, said):
    assert check_elf.faults(check_elf.read(root / "kestrel" / "libkestrel.so")._replace(**change)) == [said]


def test_a_file_that_is_no_library_is_named(check_elf, tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(b"\x7fELF, not really")
    with pytest.raises(ValueError, match="x.so: no shared library in ELF"):
        check_elf.read(path)


def test_platforms_that_pip_may_choose_from(check_wheel):
    assert check_wheel.platforms("glibc", 19, "aarch64") == ["manylinux_2_19_aarch64", "manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    assert check_wheel.platforms("musl", 2, "aarch64") == ["musllinux_1_2_aarch64", "musllinux_1_1_aarch64"]


def wheel_of(folder, root, tag="manylinux_2_28_x86_64", purelib="false", python=">=3.9", said=None, library=True):
    path = folder / f"kestrel-0.1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(str(path), "w") as archive:
        archive.writestr("kestrel/_kestrel_cffi.py", "")
        if library:
            archive.write(str(root / "kestrel" / "libkestrel.so"), "kestrel/libkestrel.so")
        archive.writestr("kestrel-0.1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: {purelib}\nTag: py3-none-{said or tag}\n")
        archive.writestr("kestrel-0.1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: kestrel\nRequires-Python: {python}\n")
    return path


@pytest.mark.parametrize("change, said", [
    ({}, None), ({"purelib": "true"}, "Root-Is-Purelib is true, expected false"), ({"python": ">=3.8"}, "Requires-Python is >=3.8, expected >=3.9"),
    ({"said": "linux_x86_64"}, "its WHEEL says ['py3-none-linux_x86_64']"), ({"library": False}, "lacks kestrel/libkestrel.so"),
    ({"tag": "manylinux_2_28_aarch64"}, "its library is for x86_64"), ({"tag": "manylinux_2_17_x86_64"}, "its library asks for glibc 2."),
    ({"tag": "musllinux_1_2_x86_64"}, "its library is of the other libc")])
def test_a_wheel_that_is_not_what_it_says(check_wheel, check_elf, root, tmp_path, monkeypatch, change, said):
    monkeypatch.setattr(check_wheel, "auditwheel", lambda *a: [])   # its own environment: build/cross_venv
    # a library of this host, as if made by cross/build.py: no debug information, an old glibc
    here = check_elf.read(root / "kestrel" / "libkestrel.so")
    monkeypatch.setattr(check_wheel.check_elf, "read", lambda path: here._replace(machine="x86_64", glibc=(2, 27)))
    bad, _ = check_wheel.check(wheel_of(tmp_path, root, **change))
    bad = [line for line in bad if "holds the path" not in line]
    assert bad == [] if said is None else any(line.startswith(said) for line in bad), bad


def test_a_wheel_of_another_name_is_refused(check_wheel, tmp_path):
    with pytest.raises(ValueError, match="expected kestrel-VERSION-py3-none-manylinux"):
        check_wheel.parts(tmp_path / "kestrel-0.1.0-cp311-cp311-linux_x86_64.whl")


def test_the_guide_is_made_of_commands_that_exist(root):
    """Each script that a block of cross/README.md starts is there; CI runs the blocks themselves."""
    guide = module_of(root, "guide")
    blocks = guide.blocks((root / "cross" / "README.md").read_text())
    named = {word for block in blocks for word in block.replace("build/elsewhere/", "").split() if word.startswith("cross/")}
    assert len(blocks) >= 5 and {"cross/build.py", "cross/check_wheel.py", "cross/check_objects.py", "cross/run_emulated.sh"} <= named
    assert [name for name in named if not (root / name).exists()] == []


OLD_CC = """#!/bin/sh
case "$*" in
  *-dumpmachine*) echo aarch64-linux-gnu ;;
  *--version*) echo "gcc (Debian) 8.3.0" ;;
  *i8mm*) exit 1 ;;
esac
"""


def test_a_compiler_that_can_not_do_an_instruction_set_is_refused_by_name(root, tmp_path):
    cc = tmp_path / "gcc"
    cc.write_text(OLD_CC)
    cc.chmod(0o755)
    build = module_of(root, "build")
    csrc_build = build.load_csrc_build()
    with pytest.raises(csrc_build.BuildError, match=r"gcc \(gcc \(Debian\) 8.3.0\) can't compile neon_i8mm \(needs gcc 10 or clang 11\): take a newer one, or leave out --cc"):
        build.refuse_half_a_wheel(csrc_build, str(cc))


def test_tools_that_are_missing_or_of_another_version(root, monkeypatch):
    from importlib import metadata

    build = module_of(root, "build")
    have = {"ziglang": "0.17.1", "setuptools": "1.0", "cffi": "1.17"}

    def version(name):
        if name not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(metadata, "version", version)
    assert [line.split("=")[0].rstrip(">") for line in build.missing_tools()] == ["setuptools", "auditwheel", "pyelftools"]
