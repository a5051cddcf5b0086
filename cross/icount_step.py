#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Executed instructions of one decoded and one prefilled token, per instruction set: exact, single thread, emulated.

    python3 cross/icount_step.py [MODEL] [--isa neon neon_dotprod neon_i8mm] [--top N] [--json] [--gate [FILE]] [--record [FILE]]

Counts only what runs inside libkestrel.so. Without MODEL the built-in toy is counted (seconds); SmolLM2-135M takes some minutes. A count,
not a time: it says what a change costs, not how fast a board is. --gate fails (exit 1) when a count is more than 2 % above the one recorded in
FILE (cross/icount.json, the toy's); --record writes it anew, for a change that is meant to cost. Counts are a compiler's: with another one than the
recorded --gate says so and compares nothing. Needs what cross/run_emulated.sh needs, and a C compiler for the plugin.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
CPUS = {"portable": "cortex-a72", "neon": "cortex-a72", "neon_dotprod": "cortex-a76", "neon_i8mm": "max,sve=off,pauth-impdef=on"}
PREFILL, DECODE = 64, 4
GATE = 1.02
RECORDED = ROOT / "cross" / "icount.json"

# Runs under the emulator: argv = model or "", prefilled tokens, decoded tokens. Prints the library's load base.
GUEST = """
import os, sys, tempfile
path, prefill, decode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
from kestrel.model import ForwardModel
from kestrel.toy import write_toy
if not path:
    path = os.path.join(tempfile.mkdtemp(), "toy.kestrel")
    write_toy(path)
model = ForwardModel(path, threads=1, max_rows=64)
kv = model.new_kv(256)
tokens = [(7 * i + 3) % 250 for i in range(prefill + decode)]
if prefill:
    model.forward(kv, tokens[:prefill], wanted=1)
for i in range(decode):
    model.forward(kv, tokens[prefill + i:prefill + i + 1], wanted=1)
with open("/proc/self/maps") as maps:
    print(next(line.split("-")[0] for line in maps if line.rstrip().endswith("libkestrel.so")))
"""


def run(arm: Path, tree: Path, plugin: Path, isa: str, arguments: List[str]) -> Tuple[int, Path, str]:
    """(instructions inside the library, counts file, load base in hex) of one emulated run."""
    counts = Path(tempfile.mkstemp(suffix=".counts")[1])
    environment = {**os.environ, "ARM_CPU": CPUS[isa], "PYTHONPATH": str(tree), "KESTREL_ISA": isa,
                   "QARGS": f"-plugin file={plugin},out={counts},nodis"}
    done = subprocess.run([str(arm / "python"), "-c", GUEST, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, cwd=str(tree))
    if done.returncode:
        sys.exit(f"icount_step.py: the emulated run failed: {done.stderr.strip()[-500:]}")
    base = int(done.stdout.split()[-1], 16)
    size = (tree / "kestrel" / "libkestrel.so").stat().st_size + (1 << 20)
    total = 0
    with open(counts) as lines:
        for line in lines:
            address, count = line.split(None, 2)[:2]
            if base <= int(address, 16) < base + size:
                total += int(count)
    return total, counts, hex(base)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", nargs="?", default="")
    ap.add_argument("--isa", nargs="+", default=["neon", "neon_dotprod", "neon_i8mm"], choices=sorted(CPUS))
    ap.add_argument("--top", type=int, default=0, help="also the N functions that execute most, of prefill and decode together")
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--gate", metavar="FILE", nargs="?", const=str(RECORDED))
    ap.add_argument("--record", metavar="FILE", nargs="?", const=str(RECORDED))
    a = ap.parse_args()
    arm = Path(os.environ.get("KESTREL_ARM_PYTHON") or ROOT / "build" / "arm_python").resolve()
    if not (arm / "python").exists():
        subprocess.run(["bash", str(ROOT / "cross" / "arm_python.sh"), str(arm)], check=True, stdout=subprocess.DEVNULL)
    tree = Path(subprocess.run([sys.executable, str(ROOT / "cross" / "build_aarch64.py")], check=True, stdout=subprocess.PIPE,
                               universal_newlines=True).stdout.split()[-1]).resolve()
    plugin = ROOT / "build" / "icount.so"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(plugin), str(ROOT / "cross" / "icount.c")], check=True)
    model = str(Path(a.model).resolve()) if a.model else ""
    name = Path(model).name if model else "toy"
    rows: Dict[str, Dict[str, Any]] = {}
    nothing = run(arm, tree, plugin, a.isa[0], [model, "0", "0"])  # loading: the same code whatever the instruction set
    nothing[1].unlink()
    for isa in a.isa:
        prefill, both = (run(arm, tree, plugin, isa, [model, str(PREFILL), str(d)]) for d in (0, DECODE))
        rows[isa] = {"model": name, "prefill": (prefill[0] - nothing[0]) // PREFILL, "decode": (both[0] - prefill[0]) // DECODE}
        if a.json:
            print(json.dumps({"kind": "icount", "isa": isa, **rows[isa]}), flush=True)
        else:
            print(f"{name}, {isa}: {rows[isa]['decode']} instructions a decoded token, {rows[isa]['prefill']} a prefilled one", flush=True)
        if a.top:
            subprocess.run([sys.executable, str(ROOT / "cross" / "icount_report.py"), str(tree / "kestrel" / "libkestrel.so"), str(both[1]), both[2], "--top", str(a.top)])
        for _, counts, _ in (prefill, both):
            counts.unlink()
    cc = os.environ.get("CROSS_CC", "aarch64-linux-gnu-gcc")
    compiler = subprocess.run([*cc.split(), "--version"], check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.splitlines()[0]
    if a.record:
        Path(a.record).write_text(json.dumps({"compiler": compiler, "counts": rows}, indent=1, sort_keys=True) + "\n")
    if a.gate:
        recorded = json.loads(Path(a.gate).read_text())
        if compiler != recorded["compiler"]:
            print(f"icount_step.py: not compared: compiled by {compiler}, recorded with {recorded['compiler']}", file=sys.stderr)
            return 0
        worse = [f"{isa} {kind}: {rows[isa][kind]}, recorded {recorded['counts'][isa][kind]}" for isa in rows for kind in ("prefill", "decode")
                 if rows[isa][kind] > GATE * recorded["counts"][isa][kind]]
        for line in worse:
            print(f"icount_step.py: more than {round(100 * (GATE - 1))} % above: {line}", file=sys.stderr)
        return 1 if worse else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
