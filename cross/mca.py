#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a core's scheduling model says of a kernel's hot loop: cycles per 64 int8 MACs and share of the model's peak.

    python3 cross/mca.py csrc/matmul_neon_dotprod.c FUNCTION [--core n1] [--loops] [--show] [-- further compiler arguments]

The unit is compiled with the flags csrc/build.py gives it. Cores: a53 a55 a72 n1 (also for A76, A78: Pi 5, RK3588, Orin)
n2 v2. Of FUNCTION the innermost loop with the most multiplies is taken, with --loops every one that multiplies. The models assume L1 hits: they bound prefill
and many-row kernels and say nothing of a decode step that waits for DRAM; the in-order ones (a53, a55) only rank.
Needs gcc-aarch64-linux-gnu and llvm (llvm-mca 15 or newer; -mcpu=cortex-a76 there would be the A57's model).
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_aarch64 import load_csrc_build  # noqa: E402


class Core(NamedTuple):
    mca: List[str]
    smlal: float                # peak int8 MACs a cycle by smull/smlal + sadalp
    sdot: Optional[float]
    smmla: Optional[float]


CORES = {
    "a53": Core(["-mcpu=cortex-a53"], 4, None, None),
    "a55": Core(["-mcpu=cortex-a55"], 5.3, 16, None),
    "a72": Core(["-mcpu=cortex-a72"], 8, None, None),
    "n1": Core(["-mcpu=neoverse-n1", "-dispatch=4"], 8, 32, None),
    "n2": Core(["-mcpu=neoverse-n2"], 10.7, 32, 64),
    "v2": Core(["-mcpu=neoverse-v2"], 16, 64, 128),
}
MACS = {"smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8, "sdot": 16, "smmla": 32}
ITERATIONS = 500


def instructions(lines: List[str]) -> List[str]:
    return [re.sub(r"\s*//.*$", "", line) for line in lines if re.match(r"^\s+[a-z]", line)]


def mnemonics(code: List[str]) -> List[str]:
    return [line.split()[0] for line in code]


def macs(code: List[str]) -> int:
    return sum(MACS.get(mnemonic, 0) for mnemonic in mnemonics(code))


def hot_loops(assembly: List[str], function: str, source: str) -> List[List[str]]:
    """The innermost loops of `function` with int8 multiplies, as instructions, most multiplies first."""
    start = next((i for i, line in enumerate(assembly) if line.startswith(function + ":")), None)
    if start is None:
        raise SystemExit(f"{function}: not in the assembly of {source} (static and inlined?)")
    size = re.compile(r"\s*\.size\s+" + re.escape(function) + r"\b")
    body = assembly[start:next(i for i in range(start, len(assembly)) if size.match(assembly[i]))]
    labels = {line.split(":")[0]: i for i, line in enumerate(body) if re.match(r"^\.L\S+:", line)}
    loops = []
    for i, line in enumerate(body):
        jump = re.match(r"^\s+(?:b\.?\w*|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.L\S+)", line)
        if jump and labels.get(jump[1], i) < i:
            loops.append((labels[jump[1]], i))

    def holds_another(i: int, j: int) -> bool:
        return any(i <= p and q <= j and (p, q) != (i, j) and macs(instructions(body[p:q + 1])) for p, q in loops)

    inner = [instructions(body[i:j + 1]) for i, j in loops if not holds_another(i, j)]
    hot = sorted((code for code in inner if macs(code)), key=macs, reverse=True)
    if not hot:
        raise SystemExit(f"{function}: no loop with an int8 multiply")
    return hot


def llvm_mca() -> str:
    names = ["llvm-mca"] + [f"llvm-mca-{v}" for v in range(30, 14, -1)]
    newest = next((n for n in names[1:] if shutil.which(n)), None) or shutil.which(names[0])
    if not newest:
        raise SystemExit("no llvm-mca: install llvm")
    return newest


def judged(code: List[str], core: Core, name: str, mca: str) -> str:
    result = subprocess.run([mca, "-mtriple=aarch64", "-mattr=+dotprod,+i8mm"] + core.mca + [f"-iterations={ITERATIONS}"],
                            input="\n".join(code) + "\n", stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    total = re.search(r"Total Cycles:\s+(\d+)", result.stdout)
    if not total:
        raise SystemExit(result.stderr[:400])
    cycles, n = int(total[1]) / ITERATIONS, macs(code)
    kind = next((k for k in ("smmla", "sdot") if k in mnemonics(code)), "smlal")
    peak = getattr(core, kind)
    share = f"{100 * n / cycles / peak:.0f}% of the model's peak {peak} MAC/cycle" if peak else "no such instruction on this core"
    return (f"{kind} on {name}: {len(code)} instructions, {n} MACs, {cycles:.2f} cycles an iteration; "
            f"{len(code) * 64 / n:.2f} instructions and {cycles * 64 / n:.2f} cycles per 64 MACs; {share}; "
            f"stack accesses in the loop: {sum('[sp' in line for line in code)}")


def main() -> int:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("source")
    ap.add_argument("function")
    ap.add_argument("--core", default="n1", choices=sorted(CORES))
    ap.add_argument("--cc", default="aarch64-linux-gnu-gcc")
    ap.add_argument("--mca", help="llvm-mca to use (default: the newest installed)")
    ap.add_argument("--loops", action="store_true", help="every such loop: a kernel has one for each number of rows")
    ap.add_argument("--show", action="store_true", help="print the loop")
    a = ap.parse_args(argv[:cut])

    build = load_csrc_build()
    flags, _ = build.flags_of([a.cc], "aarch64")
    isa = build.isa_of(Path(a.source).name)
    cmd = [a.cc, "-O3"] + build.NUMERICS + build.COMMON + flags[isa] + ["-S", "-o", "-", a.source] + argv[cut + 1:]
    done = subprocess.run(cmd, stdout=subprocess.PIPE, universal_newlines=True)
    if done.returncode:
        return 1
    loops = hot_loops(done.stdout.splitlines(), a.function, a.source)
    for code in loops if a.loops else loops[:1]:
        if a.show:
            print("\n".join(code))
        print(f"{a.function} {judged(code, CORES[a.core], a.core, a.mca or llvm_mca())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
