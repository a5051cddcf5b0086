#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a wheel says of itself against what is in it; and whether pip finds wheels for all it depends on.

    python3 cross/check_wheel.py WHEEL...               tag, metadata, library (pyelftools), auditwheel's word
    python3 cross/check_wheel.py --resolve WHEEL...     also: pip resolves it on its platform from wheels only, for each Python of PYTHONS

One line a wheel (and a Python); exit code 1 when anything is wrong. Needs cross/requirements.txt.
"""
from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_elf  # noqa: E402

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
OLDEST_GLIBC = 17       # manylinux2014


def platforms(libc: str, minor: int, machine: str) -> List[str]:
    """Platform tags that pip may choose from on a board with glibc 2.<minor> or musl 1.<minor>, newest first."""
    if libc == "musl":
        return [f"musllinux_1_{n}_{machine}" for n in range(minor, 0, -1)]
    return [f"manylinux_2_{n}_{machine}" for n in range(minor, OLDEST_GLIBC - 1, -1)] + [f"manylinux2014_{machine}"]


def parts(wheel: Path) -> Tuple[str, int, str]:
    """(libc, its minor version, machine) in a wheel's name."""
    found = re.match(r"kestrel-[^-]+-py3-none-(manylinux_2|musllinux_1)_(\d+)_(\w+)\.whl$", wheel.name)
    if not found:
        raise ValueError(f"{wheel.name}: expected kestrel-VERSION-py3-none-manylinux_2_N_MACHINE.whl or musllinux_1_N")
    return "musl" if found[1].startswith("musl") else "glibc", int(found[2]), found[3]


def auditwheel(wheel: Path, libc: str, minor: int, machine: str) -> List[str]:
    """What auditwheel objects to: the library needs more than the tag says.

    One objection is none: musl's libc is needed by its own name, libc.so, which musl's loader takes for itself on every distribution
    (ldso/dynlink.c); auditwheel expects the name that Alpine's compiler puts there, libc.musl-<machine>.so.1.
    """
    with tempfile.TemporaryDirectory() as nothing:     # the host's own libraries say nothing of a board's
        done = subprocess.run([sys.executable, "-m", "auditwheel", "show", "--json", "--ldpaths", nothing, str(wheel)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        return [f"auditwheel: {' '.join((done.stdout + done.stderr).split())[-300:]}"]
    tag = said["sym_tag"] if libc == "musl" and set(said["external_libs"]) <= {"libc.so"} else said["overall_tag"]
    found = re.match(r"(many|musl)linux_\d_(\d+)_(\w+)$", tag)
    if not found or (found[1] == "musl") != (libc == "musl") or int(found[2]) > minor or found[3] != machine:
        return [f"auditwheel says {tag}" + (f", needs {', '.join(said['external_libs'])}" if said["external_libs"] else "")]
    return []


def check(wheel: Path) -> Tuple[List[str], str]:
    """(faults as sentences, one line of facts)."""
    libc, minor, machine = parts(wheel)
    bad: List[str] = []
    with zipfile.ZipFile(str(wheel)) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        folder_name = next(n for n in names if n.endswith(".dist-info/WHEEL"))
        about = email.message_from_bytes(archive.read(folder_name))
        metadata = email.message_from_bytes(archive.read(folder_name[:-5] + "METADATA"))
        if about["Root-Is-Purelib"] != "false":
            bad.append(f"Root-Is-Purelib is {about['Root-Is-Purelib']}, expected false")
        tag = wheel.name[:-4].split("-", 2)[2]
        if about.get_all("Tag") != [tag]:
            bad.append(f"its WHEEL says {about.get_all('Tag')}, its name {tag}")
        if metadata["Requires-Python"] != ">=3.9":
            bad.append(f"Requires-Python is {metadata['Requires-Python']}, expected >=3.9")
        absent = {"kestrel/libkestrel.so", "kestrel/_kestrel_cffi.py"} - set(names)
        if absent:
            return bad + [f"lacks {', '.join(sorted(absent))}"], wheel.name
        data = archive.read("kestrel/libkestrel.so")
        if str(Path(__file__).resolve().parent.parent).encode() in data:
            bad.append("its library holds the path of the folder that it was built in")
        library = check_elf.read(Path(archive.extract("kestrel/libkestrel.so", folder)))
        installed = sum(i.file_size for i in archive.infolist())
    bad += [f"its library {fault}" for fault in check_elf.faults(library)]
    if library.machine != machine:
        bad.append(f"its library is for {library.machine}")
    if (library.glibc == (0, 0)) != (libc == "musl"):
        bad.append("its library is of the other libc")
    if library.glibc > (2, minor):
        bad.append(f"its library asks for glibc {library.glibc[0]}.{library.glibc[1]}")
    bad += auditwheel(wheel, libc, minor, machine)
    floor = f"glibc {library.glibc[0]}.{library.glibc[1]}" if libc == "glibc" else "musl"
    return bad, (f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} KB, {installed / 1e3:.0f} KB installed, library {len(data) / 1e3:.0f} KB for {floor}, "
                 f"segments aligned to {library.load_align // 1024}K, sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]}")


def resolve(wheel: Path, python: str) -> Tuple[bool, str]:
    """(pip can install it on its platform from wheels only, what it would take or pip's last words)."""
    with tempfile.TemporaryDirectory() as folder:
        cmd = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--dry-run", "--ignore-installed", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", python, "--target", folder, "--report", str(Path(folder, "report"))]
        cmd += [a for p in platforms(*parts(wheel)) for a in ("--platform", p)]
        done = subprocess.run(cmd + [str(wheel)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
            return False, (lines or [done.stdout.strip()[-200:]])[-1]
        taken = [item["metadata"] for item in json.loads(Path(folder, "report").read_text())["install"]]
        return True, ", ".join(sorted(f"{m['name']} {m['version']}" for m in taken if m["name"] != "kestrel"))


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("wheel", type=Path, nargs="+")
    ap.add_argument("--resolve", action="store_true")
    a = ap.parse_args()
    wrong = False
    for wheel in a.wheel:
        bad, facts = check(wheel)
        print(facts if not bad else f"{wheel.name}: {'; '.join(bad)}", flush=True)
        wrong = wrong or bool(bad)
        with ThreadPoolExecutor(4) as pool:     # pip waits for the network
            for python, (fine, said) in zip(PYTHONS, pool.map(lambda p: resolve(wheel, p), PYTHONS)) if a.resolve else ():
                print(f"  Python {python}: {said if fine else 'NOT RESOLVED: ' + said}", flush=True)
                wrong = wrong or not fine
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
