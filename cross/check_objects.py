#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Disassemble every object: no instruction that a core of its class lacks, and each variant holds its own.

    python3 cross/check_objects.py [--cc aarch64-linux-gnu-gcc]...      (default: $CC's machine)

Builds with each compiler (incrementally) and reads the objects with the matching objdump, the library with pyelftools. A baseline or neon object
with dot products, matrix multiplies, LSE atomics or SVE fails; so does a variant object without its instruction, a
library that takes a transcendental function or a soft fmaf from libm, whose segments are aligned to less than
64 KiB, or that asks for an executable stack. Prints one line per object; exits 1 on the first compiler that fails.
"""
from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional, Pattern, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_elf  # noqa: E402
from build_aarch64 import load_csrc_build  # noqa: E402

Line = Tuple[str, str]   # mnemonic, operands

_LSE = r"(ld|st)(add|clr|eor|set|smax|smin|umax|umin)(a|l|al)?[bh]?|swp(a|l|al)?[bh]?|casp?(a|l|al)?[bh]?"
_DOT = r"[us]dot|usdot|sudot|bfdot"
_MATRIX = r"smmla|ummla|usmmla|bfmmla"
_LATER = r"sqrdml[as]h|fcmla|fcadd|fjcvtzs|ldap[u]?r[bh]?|fmlal2?|fmlsl2?|bfmlal[bt]"    # 8.1 RDM, 8.3, fp16 widening
SVE = re.compile(r"\b[zp]\d+\b[./]")
HALF = re.compile(r"\.[48]h\b|\bh\d+\b")            # half arithmetic is 8.2; conversions are 8.0
HALF_OPS = re.compile(r"f(add|sub|mul|mla|mls|div|max|min|abs|neg|sqrt|cm\w+|rint\w|addp|maxnm\w*|minnm\w*)$")
EVEX = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b")

# forbidden mnemonics by architecture and instruction set (None: the baseline)
FORBIDDEN: Dict[str, Dict[Optional[str], str]] = {
    "aarch64": {
        None: "|".join((_LSE, _DOT, _MATRIX, _LATER)), "neon": "|".join((_LSE, _DOT, _MATRIX, _LATER)),
        "neon_dotprod": "|".join((_MATRIX, r"usdot|sudot|bfdot|fmlal2?|fmlsl2?|bfmlal[bt]|fcmla|fcadd|fjcvtzs")),
        "neon_i8mm": r"bfdot|bfmmla|bfmlal[bt]|fmlal2?|fmlsl2?",
    },
    "x86_64": {None: r"vpdp\w+", "avx2": r"vpdp\w+", "avx512": r"vpdp\w+", "avx512_vnni": r"vpdpbuuds?|vpdpbssds?"},
}
# what a variant is for: mnemonics of which it must hold one; the first row whose op matches counts
REQUIRED: Dict[str, List[Tuple[str, str]]] = {
    "neon": [(r"matmul", r"smull2?|smlal2?"), (r"", r"f(mla|mul|add|max|cvt\w+)|scvtf|ld1|st1")],
    "neon_dotprod": [(r"", r"sdot")],
    "neon_i8mm": [(r"", r"smmla")],
    "avx2": [(r"matmul", r"vpmaddubsw|vpmaddwd"), (r"", r"v\w+ps|v\w+dq2ps|vp\w+")],
    "avx512": [(r"", r"v\w+")],
    "avx512_vnni": [(r"", r"vpdpbusd")],
}


def tool(machine: str, name: str) -> str:
    """The binutils of a machine: <machine>-objdump, <architecture>-linux-gnu-objdump, or the plain one for this host's."""
    architecture = machine.split("-")[0]
    names = [f"{machine}-{name}", f"{architecture}-linux-gnu-{name}"] + ([name] if architecture == platform.machine() else [])
    found = next((path for path in map(shutil.which, names) if path), None)
    if not found:
        raise SystemExit(f"none of {', '.join(names)} found: install binutils for {architecture}")
    return found


def output(cmd: List[str]) -> str:
    return subprocess.run(cmd, stdout=subprocess.PIPE, check=True, universal_newlines=True).stdout


def disassembly(objdump: str, path: Path) -> List[Line]:
    lines = []
    for text in output([objdump, "-d", "--no-show-raw-insn", str(path)]).splitlines():
        found = re.match(r"\s+[0-9a-f]+:\s+(?:(?:lock|rep\w*|notrack|bnd)\s+)*([a-z][\w.]*)\s*(.*)", text)
        if found:
            lines.append((found[1], found[2].split("//")[0]))
    return lines


def faults(architecture: str, name: str, isa: Optional[str], code: List[Line]) -> List[str]:
    """What is wrong with one object's code, as sentences."""
    if architecture not in FORBIDDEN:
        return []
    bad: List[str] = []
    banned: Pattern = re.compile(f"(?:{FORBIDDEN[architecture][isa]})$")
    for mnemonic, operands in code:
        if banned.match(mnemonic):
            bad.append(f"holds {mnemonic}")
        if architecture == "aarch64" and SVE.search(operands):
            bad.append(f"holds SVE ({mnemonic} {operands.strip()})")
        if architecture == "aarch64" and HALF_OPS.match(mnemonic) and HALF.search(operands):
            bad.append(f"holds half-precision arithmetic ({mnemonic} {operands.strip()})")
        if architecture == "x86_64" and isa in (None, "avx2") and EVEX.search(operands):
            bad.append(f"holds AVX-512 ({mnemonic} {operands.strip()})")
    if isa:
        wanted = next(pattern for op, pattern in REQUIRED[isa] if name.startswith(op))
        if not any(re.match(f"(?:{wanted})$", mnemonic) for mnemonic, _ in code):
            bad.append(f"has none of {wanted}: the variant is not what its name says")
        if isa == "avx512" and not any(EVEX.search(operands) for _, operands in code):
            bad.append("has no AVX-512 register: the variant is not what its name says")
    return sorted(set(bad))


def check(cc: Optional[str]) -> int:
    csrc_build = load_csrc_build()
    try:
        done = csrc_build.build(cc=cc, target="lib", quiet=True)
    except csrc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    objdump = tool(done.machine, "objdump")
    wrong = 0
    for unit, path in sorted(done.objects.items()):
        code = disassembly(objdump, path)
        found = faults(done.architecture, unit.source.stem, unit.isa, code) if code else ["has no code"]
        wrong += bool(found)
        print(f"{done.machine} {path.name:32} {unit.isa or 'baseline':14} {len(code):6} instructions  "
              + ("; ".join(found) if found else "ok"))
    found = check_elf.faults(check_elf.read(done.library))
    wrong += bool(found)
    print(f"{done.machine} {done.library.name:32} {'library':14} {'':19}  " + ("; ".join(found) if found else "ok"))
    return 1 if wrong else 0


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--cc", action="append", help="may be given several times")
    a = ap.parse_args()
    return max([check(cc) for cc in (a.cc or [None])])


if __name__ == "__main__":
    sys.exit(main())
