# SPDX-License-Identifier: Apache-2.0
"""What a built libkestrel.so asks of the machine that loads it, read with pyelftools: the same on every host, no binutils needed."""
from __future__ import annotations

import re
from pathlib import Path
from typing import List, NamedTuple, Set, Tuple

# 64 KiB: loads on kernels with 4K, 16K (Pi 5) and 64K pages
PAGE = 65536
# libm's results differ between machines; a call of fmaf means that fusing went to software
LIBM = re.compile(r"^(exp|exp2|exp10|expm1|log|log2|log10|log1p|pow|sin|cos|tan|sincos|asin|acos|atan|atan2|sinh|cosh|tanh|"
                  r"erf|erfc|lgamma|tgamma|cbrt|hypot|fma)f?$")
LIBRARIES = re.compile(r"lib(c|m|pthread)\.so(\.6|\.0)?$|ld-linux-(aarch64|x86-64)\.so\.\d$")


class Library(NamedTuple):
    """machine: aarch64 or x86_64. glibc: newest symbol version asked for, (0, 0) for none (musl)."""
    machine: str
    needed: Tuple[str, ...]
    undefined: Tuple[str, ...]
    glibc: Tuple[int, int]
    load_align: int             # of the segment with the least
    executable_stack: bool
    search_path: str            # RPATH or RUNPATH, "" for none


def read(path: Path) -> Library:
    """Reads a shared library's headers; ValueError when it is none."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with open(str(path), "rb") as file:
            elf = ELFFile(file)
            segments = list(elf.iter_segments())
            stack = [s["p_flags"] & 1 for s in segments if s["p_type"] == "PT_GNU_STACK"]
            dynamic = next(s for s in segments if s["p_type"] == "PT_DYNAMIC")
            tags = list(dynamic.iter_tags())
            symbols = elf.get_section_by_name(".dynsym")
            undefined = sorted({s.name for s in symbols.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name})
            versions: Set[Tuple[int, int]] = {(0, 0)}
            needs = elf.get_section_by_name(".gnu.version_r")
            for _, wanted in needs.iter_versions() if needs else ():
                for version in wanted:
                    found = re.match(r"GLIBC_(\d+)\.(\d+)", version.name)
                    if found:
                        versions.add((int(found[1]), int(found[2])))
            return Library({"EM_AARCH64": "aarch64", "EM_X86_64": "x86_64"}.get(elf["e_machine"], elf["e_machine"]),
                           tuple(t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"), tuple(undefined), max(versions),
                           min(s["p_align"] for s in segments if s["p_type"] == "PT_LOAD"), any(stack) or not stack,
                           "".join(getattr(t, "rpath", "") + getattr(t, "runpath", "") for t in tags))
    except (ELFError, StopIteration) as error:
        raise ValueError(f"{path}: no shared library in ELF: {error}")


def faults(library: Library) -> List[str]:
    """What would keep the library from loading on some board, or its bits from being the same there; as sentences."""
    bad = [f"takes {symbol} from libm" for symbol in library.undefined if LIBM.match(symbol)]
    bad += [f"takes the outlined atomic {symbol}" for symbol in library.undefined if symbol.startswith("__aarch64_")]
    bad += [f"needs {name}" for name in library.needed if not LIBRARIES.match(name)]
    if library.load_align < PAGE:
        bad.append(f"has a LOAD segment aligned to {library.load_align}, expected {PAGE} or more")
    if library.executable_stack:
        bad.append("asks for an executable stack")
    if library.search_path:
        bad.append(f"looks for libraries in {library.search_path}")
    return bad
