#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the wheels for boards on any Linux host: no Python of the target, no root, no container.

    python3 cross/build.py [--target TAG]... [--out dist] [--cc CC]
    python3 cross/build.py --print-cc --target TAG      the compiler command of a target, for csrc/build.py --cc

TAG: manylinux_2_28_aarch64 (Raspberry Pi OS, Debian 10, Ubuntu 20.04, JetPack 5 and newer), musllinux_1_2_aarch64
(Alpine), manylinux_2_28_x86_64 (needs x86-64-v3); default: all three, compiled by zig, which brings every target's libc.
With --cc one wheel is built by that compiler and tagged by what it asks of glibc: aarch64-linux-gnu-gcc of Debian 12
gives manylinux_2_34. Wheels of the same sources have the same bytes, wherever they are built; their dates are
SOURCE_DATE_EPOCH or the last commit's. Each wheel is checked (cross/check_wheel.py). Their paths go to stdout.

When a tool of cross/requirements.txt is missing, an environment with all of them is made in build/cross_venv.
"""
from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NoReturn, Optional

CROSS = Path(__file__).resolve().parent
ROOT = CROSS.parent
REQUIREMENTS = CROSS / "requirements.txt"
VENV = ROOT / "build" / "cross_venv"
sys.path.insert(0, str(CROSS))
from build_aarch64 import load_csrc_build  # noqa: E402

TARGETS: Dict[str, str] = {     # tag: zig's name
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop(text: str) -> NoReturn:
    say(f"cross/build.py: {text}")
    sys.exit(1)


def missing_tools() -> List[str]:
    """Lines of requirements.txt that the running Python does not meet."""
    from importlib import metadata

    lines = [line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    absent = []
    for line in filter(None, lines):
        name, operator, wanted = re.match(r"([\w-]+)(==|>=)(.+)", line).groups()     # type: ignore[union-attr]
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(line)
            continue
        if operator == "==" and have != wanted:
            absent.append(line)
    return absent


def use_own_environment(absent: List[str]) -> None:
    """Go on in build/cross_venv, made or brought up to date first. Does not return."""
    python, stamp = VENV / "bin" / "python", VENV / "requirements.stamp"
    wanted = REQUIREMENTS.read_text()
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"missing here: {', '.join(absent)}; making {VENV.relative_to(ROOT)} (zig is 100 MB)")
        done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        if done.returncode:
            stop(f"python3 -m venv failed (Debian: apt-get install python3-venv): {done.stdout.strip()[-200:]}")
        quiet = [] if sys.stderr.isatty() else ["-q"]
        if subprocess.run([str(python), "-m", "pip", "install", *quiet, "--disable-pip-version-check", "-r", str(REQUIREMENTS)], stdout=sys.stderr).returncode:
            stop(f"pip could not install {REQUIREMENTS.relative_to(ROOT)}")
        stamp.write_text(wanted)
    elif Path(sys.prefix).resolve() == VENV.resolve():
        stop(f"{VENV} lacks {', '.join(absent)}: remove it")
    os.execv(str(python), [str(python), str(Path(__file__).resolve()), *sys.argv[1:]])


def zig(tag: str) -> str:
    """The compiler command of a target: no debug information, and no path of this machine in what asserts say."""
    return shlex.join([sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[tag], "-g0", f"-ffile-prefix-map={ROOT}=."])


def commit_time() -> str:
    """Seconds of the last commit; 1 January 2020 outside of a git checkout."""
    try:
        done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True)
        return done.stdout.strip() or "1577836800"
    except OSError:
        return "1577836800"


def refuse_half_a_wheel(csrc_build, cc: str) -> None:
    """A wheel holds every kernel of its architecture or is not made."""
    command = csrc_build.compiler(cc)
    architecture = csrc_build.architecture_of(csrc_build.machine_of(command))
    _, missing = csrc_build.flags_of(command, architecture)
    if missing:
        version = csrc_build._capture(command + ["--version"]).splitlines()[0]
        needs = {"neon_dotprod": "gcc 8 or clang 7", "neon_i8mm": "gcc 10 or clang 11", "avx512_vnni": "gcc 8 or clang 6"}
        raise csrc_build.BuildError(f"{command[0]} ({version}) can't compile {', '.join(missing)} "
                                    f"(needs {needs.get(missing[-1], 'a newer compiler')}): take a newer one, or leave out --cc for zig")


def glibc_tag(library: Path) -> str:
    """manylinux tag of the oldest glibc that a library loads on."""
    import check_elf

    found = check_elf.read(library)
    if found.glibc == (0, 0):
        raise ValueError(f"{library}: asks for no version of glibc; for musl leave out --cc")
    return "manylinux_%d_%d_%s" % (*max(found.glibc, (2, 17)), found.machine)


def wheel(csrc_build, tag: Optional[str], cc: str, out: Path) -> Path:
    """Build one wheel; without a tag it is that of the library's own needs."""
    refuse_half_a_wheel(csrc_build, cc)
    os.umask(0o022)     # modes of files are in the archive
    environment = {**os.environ, "CC": cc, "LDFLAGS": "-Wl,-s", "PYTHONHASHSEED": "0",
                   "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time()}
    with tempfile.TemporaryDirectory(prefix="kestrel-wheel-") as folder:
        if tag is None:
            tag = glibc_tag(csrc_build.build(cc=cc, out=Path(folder), target="lib", quiet=True).library)
        # the options of setup.py, in one call: the build stays out of the tree's own build/lib
        cmd = [sys.executable, "setup.py", "-q", "build", "--build-base", f"{folder}/build", "egg_info", "--egg-base", folder,
               "bdist_wheel", "--plat-name", tag, "--bdist-dir", f"{folder}/bdist", "--dist-dir", f"{folder}/dist"]
        done = subprocess.run(cmd, cwd=str(ROOT), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        if done.returncode:
            raise csrc_build.BuildError(f"{shlex.join(cmd)} failed:\n{done.stdout.strip()[-2000:]}")
        made = next(Path(folder, "dist").glob("*.whl"))
        out.mkdir(parents=True, exist_ok=True)
        part = out / f".{made.name}.part"
        shutil.copyfile(str(made), str(part))
        os.replace(str(part), str(out / made.name))
        return out / made.name


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", action="append", choices=sorted(TARGETS), metavar="TAG", help="may be given several times")
    ap.add_argument("--out", type=Path, default=ROOT / "dist")
    ap.add_argument("--cc", help="this compiler instead of zig, for the one target that it has")
    ap.add_argument("--print-cc", action="store_true")
    a = ap.parse_args()
    if a.print_cc and len(a.target or ()) != 1:
        ap.error("--print-cc: expected one --target")
    if a.cc and a.target:
        ap.error("--cc: the compiler says what its target is; leave out --target")
    absent = missing_tools()
    if absent:
        use_own_environment(absent)
    import check_wheel

    csrc_build = load_csrc_build()
    if a.print_cc:
        print(zig(a.target[0]))
        return 0
    work = [(None, f"{a.cc} -g0 -ffile-prefix-map={ROOT}=.")] if a.cc else [(tag, zig(tag)) for tag in a.target or TARGETS]
    bad = 0
    for i, (tag, cc) in enumerate(work, 1):
        say(f"[{i}/{len(work)}] {tag or a.cc}")
        try:
            made = wheel(csrc_build, tag, cc, a.out.resolve())
        except (csrc_build.BuildError, ValueError) as error:
            stop(str(error))
        faults, facts = check_wheel.check(made)
        say(f"  {facts}")
        for fault in faults:
            say(f"  {made.name}: {fault}")
        bad += bool(faults)
        print(made)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
