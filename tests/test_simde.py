# SPDX-License-Identifier: Apache-2.0
"""The AVX-512 kernels on a CPU without AVX-512: the same sources compiled with SIMDe's functions in the intrinsics' place
(tests/checkasm/simde/immintrin.h), against portable byte for byte, and as a whole library against the other instruction sets.

This proves the logic, not the hardware's instructions: that the real objects hold them is cross/check_objects.py's part.
Needs the header-only SIMDe (Debian: libsimde-dev).
"""
from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import csrc_build

pytestmark = [pytest.mark.native_only, pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86")]

VARIANTS = [("quantize_rows", "avx512"), ("matmul_int8", "avx512_vnni"), ("matmul_int4", "avx512_vnni"), ("attention_span", "avx512")]
ISAS = ("portable", "avx2", "avx512", "avx512_vnni")

# kernels.c asks cpu.c what there is; the linker puts this in between
HAVE_AVX512 = """#include "kernels.h"
uint32_t __real_kestrel_cpu_isa(void);
uint32_t __wrap_kestrel_cpu_isa(void);
uint32_t __wrap_kestrel_cpu_isa(void) { return __real_kestrel_cpu_isa() | ISA_AVX512 | ISA_AVX512_VNNI; }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory, root):
    """Library and harness in which the AVX-512 variants run on any x86-64-v3 CPU. checkasm: path; package: folder to import kestrel from."""
    folder = tmp_path_factory.mktemp("simde")
    build = csrc_build()
    command = build.compiler()
    probe = subprocess.run(command + ["-E", "-x", "c", "-", "-o", os.devnull], input="#include <simde/x86/avx512.h>\n", stderr=subprocess.PIPE,
                           universal_newlines=True)
    if probe.returncode:
        pytest.fail("simde/x86/avx512.h not found: install SIMDe (Debian: apt-get install libsimde-dev)", pytrace=False)
    baseline = build.flags_of(command, "x86_64")[0][None]
    (folder / "cpu.c").write_text(HAVE_AVX512)
    subprocess.run(command + baseline + ["-fPIC", f"-I{build.CSRC}", "-c", str(folder / "cpu.c"), "-o", str(folder / "cpu.o")], check=True)
    for isa in ("avx512", "avx512_vnni"):  # -O1: at -O3 gcc takes minutes over SIMDe's functions
        build.FLAGS["x86_64"][isa] = [baseline + [f"-I{root}/tests/checkasm/simde", "-Wno-psabi", "-O1", f"-DKESTREL_EMULATED_{isa.upper()}"]]
    build.ROOT = folder
    previous = os.environ.get("LDFLAGS")
    os.environ["LDFLAGS"] = f"-Wl,--wrap=kestrel_cpu_isa {folder}/cpu.o"
    try:
        shutil.copytree(str(root / "kestrel"), str(folder / "kestrel"), ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        done = [build.build(out=folder / "kestrel", target=target, quiet=True) for target in ("lib", "checkasm")]
    except build.BuildError as error:
        pytest.fail(f"csrc/build.py with SIMDe: {error}", pytrace=False)
    finally:
        os.environ.pop("LDFLAGS")
        if previous is not None:
            os.environ["LDFLAGS"] = previous
    return done[1].checkasm, folder


@pytest.mark.parametrize("op, variant", VARIANTS)
def test_emulated_variant_equals_portable(built, op, variant):
    done = subprocess.run([str(built[0]), "--op", op, "--variant", variant], stdout=subprocess.PIPE, universal_newlines=True,
                          env=dict(os.environ, KESTREL_CHECKASM_SMALL="1"))
    assert done.returncode == 0 and done.stdout.endswith("1 passed, 0 failed\n"), done.stdout[-2000:]


def test_every_avx512_variant_is_covered(built, root):
    done = subprocess.run([str(built[0]), "--list"], stdout=subprocess.PIPE, check=True, universal_newlines=True)
    assert [tuple(line.split()) for line in done.stdout.splitlines() if "avx512" in line] == VARIANTS
    assert len(list((root / "csrc").glob("*_avx512*.c"))) == len(VARIANTS) - 1  # one file holds both matmuls


SCRIPT = """
import hashlib, random, sys
from kestrel import _native
from kestrel.model import ForwardModel
from kestrel.toy import write_toy
path = sys.argv[1]
write_toy(path)
rng = random.Random(3)
ids = [rng.randrange(323) for _ in range(300)]
for isa in sys.argv[2:]:
    for kv_type in ("f16", "f32", "int8"):
        for threads, widths in ((1, (1, 5, 33, 64)), (2, (2, 8, 17, 150))):
            for width in widths:
                model = ForwardModel(path, threads=threads, isa=isa, max_rows=150, kv_type=kv_type)
                kv, digest = model.new_kv(300), hashlib.sha256()
                for begin in range(0, 300, width):
                    rows = ids[begin:begin + width]
                    model.forward(kv, rows, wanted=len(rows))
                    digest.update(model._logits[:len(rows)].tobytes())
                digest.update(kv.export())
                print(isa, kv_type, digest.hexdigest(), *sorted(set(_native.variants(isa).values())))
"""


def test_whole_passes_are_the_same_bytes(built):
    """Logits and cache of 300 positions, every kind of cache, odd and even panels, one and two threads."""
    checkasm, folder = built
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(Path(scratch) / "toy"), *ISAS], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, env=dict(os.environ, PYTHONPATH=str(folder)), cwd=scratch)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == len(ISAS) * 3 * 8
    for kv_type in ("f16", "f32", "int8"):
        assert len({row[2] for row in rows if row[1] == kv_type}) == 1, [row for row in rows if row[1] == kv_type]
    assert len({row[2] for row in rows}) == 3
    ran = {row[0]: row[3:] for row in rows}
    assert ran["avx512_vnni"] == ["avx2", "avx512", "avx512_vnni", "portable"] and ran["avx512"] == ["avx2", "avx512", "portable"]
