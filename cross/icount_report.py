#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Join executed-instruction counts with the disassembly: per function the total and the commonest instructions.

    python3 cross/icount_report.py BINARY COUNTS.txt [LOAD_BASE] [--top N]

BINARY is what was counted: libkestrel.so, or the checkasm harness (linked at a fixed address: LOAD_BASE 0, the default).
For the library LOAD_BASE is the start of its first line in /proc/self/maps (hex), printed by the emulated program.
"""
from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
from typing import Dict


def counts_of(path: str) -> Dict[int, int]:
    with open(path) as lines:
        fields = (line.split(None, 2) for line in lines)
        return {int(f[0], 16): int(f[1]) for f in fields}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("binary")
    ap.add_argument("counts")
    ap.add_argument("base", nargs="?", default="0", type=lambda s: int(s, 16))
    ap.add_argument("--top", type=int, default=12)
    ap.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    a = ap.parse_args()
    count = counts_of(a.counts)
    total: collections.Counter = collections.Counter()
    mix: Dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    function = "?"
    text = subprocess.run([a.objdump, "-d", "--no-show-raw-insn", a.binary], stdout=subprocess.PIPE, check=True,
                          universal_newlines=True).stdout
    for line in text.splitlines():
        head = re.match(r"^([0-9a-f]+) <(.+)>:", line)
        if head:
            function = head[2]
            continue
        body = re.match(r"^\s+([0-9a-f]+):\s+(\S+)", line)
        n = count.get(a.base + int(body[1], 16), 0) if body else 0
        if n:
            total[function] += n
            mix[function][body[2]] += n
    if not total:
        print(f"none of {len(count)} counted addresses lies in {a.binary}: wrong LOAD_BASE?", file=sys.stderr)
        return 1
    for name, n in total.most_common(a.top):
        print(f"{n:14} {name}  " + " ".join(f"{op}:{c}" for op, c in mix[name].most_common(8)))
    print(f"{sum(total.values()):14} in {a.binary}, {sum(count.values())} in the whole run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
