#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build libkestrel.so with nothing but a C compiler and the standard library of Python.

    python3 csrc/build.py [--cc CC] [--out DIR] [--sanitize address|address,undefined|thread|undefined]
                          [--target lib|checkasm|all] [--jobs N] [--werror]

The target architecture is what the compiler says (``$CC -dumpmachine``). A file csrc/<op>.c is a baseline
unit; csrc/<op>_<isa>.c is compiled for architectures that have <isa>, with that instruction set's flags on
exactly that object. Objects go to build/<machine>[-sanitize]/, the library to kestrel/ (a cross or sanitizer
build stays in its build folder, unless --out says otherwise). CC and CFLAGS are honoured.
"""
from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CHECKASM = ROOT / "tests" / "checkasm"
LIBRARY = "libkestrel.so"
CFFI_MODULE = "kestrel._kestrel_cffi"

# Per architecture and instruction set: spellings of its flags, the first one that the compiler takes is used.
# None is the baseline. Plain armv8-a: from armv8.1-a on compilers emit LSE atomics, which crash a Pi 4; the
# outlined ones would be chosen at run time in libgcc, out of sight of cross/check_objects.py.
# x86-64-v3 is the floor on x86: without FMA in the hardware fmaf() costs 60 ns an element.
_V3 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
_V3_SPELLINGS = [["-march=x86-64-v3"], _V3, ["-mcpu=x86_64_v3"]]
FLAGS: Dict[str, Dict[Optional[str], List[List[str]]]] = {
    "aarch64": {
        None: [["-march=armv8-a", "-mno-outline-atomics"], ["-march=armv8-a"], ["-mcpu=generic"]],
        "neon": [["-march=armv8-a", "-mno-outline-atomics"], ["-march=armv8-a"], ["-mcpu=generic"]],
        "neon_dotprod": [["-march=armv8.2-a+dotprod"], ["-mcpu=generic+dotprod"]],
        "neon_i8mm": [["-march=armv8.2-a+dotprod+i8mm"], ["-mcpu=generic+dotprod+i8mm"]],
    },
    "x86_64": {
        None: _V3_SPELLINGS,
        "avx2": _V3_SPELLINGS,
        "avx512": [s + _AVX512 for s in _V3_SPELLINGS],
        "avx512_vnni": [s + _AVX512 + ["-mavx512vnni"] for s in _V3_SPELLINGS],
    },
}
ISAS = tuple(isa for table in FLAGS.values() for isa in table if isa)

# One answer everywhere: no contraction, C11 semantics. -fno-math-errno only drops errno (sqrtf becomes one
# instruction). -fno-trapping-math is left out: gcc documents it as allowing transformations, not as value-safe.
NUMERICS = ["-std=c11", "-ffp-contract=off", "-fno-math-errno"]
COMMON = ["-fvisibility=hidden", "-fPIC", "-pthread", "-Wall", "-Wextra"]
# 64 KiB: loads on kernels with 4K, 16K (Pi 5) and 64K pages.
LINK = ["-Wl,-z,max-page-size=65536", "-Wl,-z,noexecstack", "-Wl,-z,relro,-z,now"]
FORBIDDEN = ("-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-freciprocal-math",
             "-ffinite-math-only", "-fno-signed-zeros", "-march=native", "-mcpu=native", "-ffp-contract=fast")


class BuildError(Exception):
    """One message for the person at the terminal (a compiler's own output included)."""


class Unit(NamedTuple):
    source: Path
    isa: Optional[str]      # None: baseline


class Build(NamedTuple):
    machine: str            # as the compiler says it: aarch64-linux-gnu
    architecture: str       # aarch64, x86_64, ...
    folder: Path            # build/<machine>[-sanitize]
    objects: Dict[Unit, Path]
    library: Optional[Path]
    checkasm: Optional[Path]
    missing: Tuple[str, ...]  # instruction sets this compiler can't do


def isa_of(name: str) -> Optional[str]:
    """The instruction set in a unit's file name (``matmul_neon_dotprod.c`` -> ``neon_dotprod``), or None."""
    stem = name[:-2] if name.endswith(".c") else name
    fits = [isa for isa in ISAS if stem.endswith("_" + isa)]
    return max(fits, key=len) if fits else None


def architecture_of(machine: str) -> str:
    first = machine.split("-")[0].lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(first, first)


def units(architecture: str, csrc: Path = CSRC) -> List[Unit]:
    """The translation units of one architecture, sorted by name: the only list of files there is."""
    known = FLAGS.get(architecture, {})
    found = [Unit(path, isa_of(path.name)) for path in sorted(csrc.glob("*.c"))]
    return [unit for unit in found if unit.isa is None or unit.isa in known]


def sources() -> List[Path]:
    """Every file that a build from an sdist needs."""
    return sorted(p for p in CSRC.iterdir() if p.suffix in (".c", ".h", ".py"))


def compiler(cc: Optional[str] = None) -> List[str]:
    text = cc or os.environ.get("CC")
    if text:
        return shlex.split(text)
    for name in ("cc", "gcc", "clang"):
        if any(os.access(os.path.join(d, name), os.X_OK) for d in os.environ.get("PATH", "").split(os.pathsep) if d):
            return [name]
    raise BuildError("no C compiler found: install gcc (Debian: apt-get install gcc libc6-dev) or set CC")


def _capture(cmd: List[str]) -> str:
    try:
        done = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except OSError as error:
        raise BuildError(f"can't run the compiler {shlex.join(cmd)}: {error.strerror}")
    if done.returncode:
        raise BuildError(f"{shlex.join(cmd)} failed: {done.stderr.strip()[:400]}")
    return done.stdout.strip()


def machine_of(cc: List[str]) -> str:
    """The target triple. zig's -dumpmachine refuses the glibc version in its own -target, so a stated target is taken at its word."""
    for flag, value in zip(cc, cc[1:]):
        if flag in ("-target", "--target"):
            return value
    return next((a.split("=", 1)[1] for a in cc if a.startswith("--target=")), None) or _capture(cc + ["-dumpmachine"])


def _takes(cc: List[str], flags: List[str]) -> bool:
    with tempfile.TemporaryDirectory() as tmp:
        probe = Path(tmp, "probe.c")
        probe.write_text("int kestrel_probe;\n")
        cmd = cc + ["-Werror"] + flags + ["-c", str(probe), "-o", str(probe.with_suffix(".o"))]
        return subprocess.run(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def flags_of(cc: List[str], architecture: str) -> Tuple[Dict[Optional[str], List[str]], List[str]]:
    """({isa or None: flags}, instruction sets this compiler can't do)."""
    chosen: Dict[Optional[str], List[str]] = {}
    missing: List[str] = []
    for isa, spellings in FLAGS.get(architecture, {None: [[]]}).items():
        flags = next((f for f in spellings if f in chosen.values() or _takes(cc, f)), None)
        if flags is not None:
            chosen[isa] = flags
        elif isa is None:
            raise BuildError(f"{shlex.join(cc)} takes none of the baseline's flags for {architecture}: "
                             + " or ".join(shlex.join(f) for f in spellings))
        else:
            missing.append(isa)
    return chosen, missing


def _stale(target: Path, stamp: str) -> bool:
    """Older than a source or header of its dependency file, or made by another command or compiler."""
    try:
        made = target.stat().st_mtime_ns
        if target.with_suffix(target.suffix + ".cmd").read_text() != stamp:
            return True
        text = target.with_suffix(".d").read_text().replace("\\\n", " ")
        names = shlex.split(text.split(":", 1)[1])
        return any(os.stat(name).st_mtime_ns > made for name in names)
    except (OSError, IndexError):
        return True


def _run(cmd: List[str]) -> None:
    done = subprocess.run(cmd, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if done.stdout.strip():
        sys.stderr.write(done.stdout)
    if done.returncode:
        raise BuildError(f"failed: {shlex.join(cmd)}")


def _compile(cc: List[str], version: str, source: Path, target: Path, flags: List[str]) -> bool:
    """Compile one unit unless its object is fresh; says whether it had to."""
    cmd = cc + flags + ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
    stamp = json.dumps([version, cmd])
    if not _stale(target, stamp):
        return False
    record = target.with_suffix(target.suffix + ".cmd")
    if record.exists():
        record.unlink()     # a killed compile must not look fresh
    _run(cmd)
    record.write_text(stamp)
    return True


def _link(cmd: List[str], target: Path, inputs: List[Path], version: str, folder: Path) -> bool:
    """Link unless `target` is the very file that the same inputs and command gave last time."""
    stamp = json.dumps([version, cmd, str(target), [str(i) for i in inputs]])
    record = folder / (target.name + ".cmd")
    try:
        made = target.stat().st_mtime_ns
        if record.read_text() == f"{stamp} {made}" and all(i.stat().st_mtime_ns <= made for i in inputs):
            return False
    except OSError:
        pass
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _run(cmd + ["-o", str(fresh)])
        os.replace(str(fresh), str(target))     # a process that maps the old library keeps it
    finally:
        if fresh.exists():
            fresh.unlink()
    record.write_text(f"{stamp} {target.stat().st_mtime_ns}")
    return True


def header_block(header: Path = CSRC / "kestrel.h") -> str:
    """The plain C between the cffi markers of the public header: what the compiler and cffi both read."""
    text = header.read_text()
    begin, end = "/* cffi: begin */", "/* cffi: end */"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise BuildError(f"{header}: expected one block between '{begin}' and '{end}'")
    return text[text.index(begin) + len(begin):text.index(end)]


def emit_cffi(out: Path) -> Path:
    """Write the out-of-line ABI-mode module _kestrel_cffi.py into `out` (needs cffi; no compiler)."""
    import cffi
    ffi = cffi.FFI()
    ffi.set_source(CFFI_MODULE, None)
    try:
        ffi.cdef(header_block())
    except (cffi.CDefError, cffi.FFIError) as error:
        raise BuildError(f"csrc/kestrel.h: cffi can't read the marked block: {error}")
    target = out / (CFFI_MODULE.rpartition(".")[2] + ".py")
    out.mkdir(parents=True, exist_ok=True)
    fresh = out / f".{target.name}.{os.getpid()}"
    with contextlib.redirect_stdout(io.StringIO()):     # it announces the temporary name
        ffi.emit_python_code(str(fresh))
    if target.exists() and target.read_bytes() == fresh.read_bytes():
        fresh.unlink()
    else:
        os.replace(str(fresh), str(target))
    return target


def build(cc: Optional[str] = None, out: Optional[Path] = None, sanitize: Optional[str] = None, target: str = "lib",
          jobs: Optional[int] = None, werror: bool = False, quiet: bool = False) -> Build:
    """Compile what is stale and link; returns where everything is. Raises BuildError."""
    say = (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr))
    command = compiler(cc)
    machine = machine_of(command)
    version = _capture(command + ["--version"]).splitlines()[0]
    architecture = architecture_of(machine)
    cflags = shlex.split(os.environ.get("CFLAGS", ""))
    bad = [f for f in cflags if f in FORBIDDEN]
    if bad:
        raise BuildError(f"CFLAGS holds {bad[0]}: it would change the bits of the answers; take it out")
    isa_flags, missing = flags_of(command, architecture)
    found = units(architecture)
    if not found:
        raise BuildError(f"no C sources in {CSRC}")
    for isa in missing:
        names = [unit.source.name for unit in found if unit.isa == isa]
        if names:
            say(f"{command[0]} ({version}) can't compile {isa}: left out {', '.join(names)}")
    found = [unit for unit in found if unit.isa not in missing]
    have = [f"-DKESTREL_HAVE_{isa.upper()}" for isa in isa_flags if isa and any(u.isa == isa for u in found)]
    checks = ["-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitize}"] if sanitize else []
    # sanitized kernels are checked, not timed: at -O3 gcc takes a minute for one of them
    base = ["-O1" if checks else "-O3"] + cflags + NUMERICS + COMMON + (["-Werror"] if werror else []) + checks + have

    folder = ROOT / "build" / (machine + ("-" + sanitize.replace(",", "-") if sanitize else ""))
    folder.mkdir(parents=True, exist_ok=True)
    native = architecture == architecture_of(platform.machine()) and not sanitize
    out = Path(out).resolve() if out else (ROOT / "kestrel" if native else folder)
    objects = {unit: folder / (unit.source.stem + ".o") for unit in found}
    work = [(unit.source, objects[unit], base + isa_flags[unit.isa]) for unit in found]
    harness: Dict[Path, Path] = {}
    if target in ("checkasm", "all"):
        harness = {path: folder / "checkasm.o.d" / (path.stem + ".o") for path in sorted(CHECKASM.glob("*.c"))}
        if not harness and target == "checkasm":
            raise BuildError(f"no C sources in {CHECKASM}")
        if harness:
            (folder / "checkasm.o.d").mkdir(exist_ok=True)
            # the kernels are what is measured; gcc 12's vectoriser for aarch64 crashes on such a harness at -O3
            plain = ["-O2", "-fno-tree-vectorize", f"-I{CSRC}"]
            work += [(path, obj, base + plain + isa_flags[None]) for path, obj in harness.items()]

    with open(str(folder / "lock"), "w") as lock:   # two test runs may build at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            futures = [pool.submit(_compile, command, version, *item) for item in work]
        made = sum(future.result() for future in futures)
        ldflags = shlex.split(os.environ.get("LDFLAGS", "")) + checks
        tail = ["-pthread", "-lpthread", "-lm"]
        inputs = [str(o) for o in objects.values()]
        library = binary = None
        if target in ("lib", "all"):
            library = out / LIBRARY
            strict = [] if sanitize else ["-Wl,--no-undefined"]
            made += _link(command + ["-shared", f"-Wl,-soname,{LIBRARY}"] + LINK + strict + ldflags + inputs + tail,
                          library, list(objects.values()), version, folder)
        if harness:
            binary = folder / "checkasm"
            made += _link(command + ["-no-pie", "-Wl,-z,noexecstack"] + ldflags + [str(o) for o in harness.values()] + inputs + tail,
                          binary, list(harness.values()) + list(objects.values()), version, folder)
    done = [str(p) for p in (library, binary) if p]
    compiled = " ".join(sorted({unit.isa for unit in found if unit.isa})) or "baseline only"
    say(f"{', '.join(done)}: {machine}, {compiled}" + ("" if made else " (nothing to do)"))
    return Build(machine, architecture, folder, objects, library, binary, tuple(missing))


def main(argv: Optional[List[str]] = None) -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--cc", help="C compiler, with arguments if need be (default: $CC, cc, gcc, clang)")
    ap.add_argument("--out", type=Path, help="folder for libkestrel.so (default: kestrel/)")
    ap.add_argument("--sanitize", choices=("address", "address,undefined", "thread", "undefined"))
    ap.add_argument("--target", choices=("lib", "checkasm", "all"), default="all")
    ap.add_argument("--jobs", type=int)
    ap.add_argument("--werror", action="store_true")
    a = ap.parse_args(argv)
    try:
        if a.target != "checkasm":
            done = build(a.cc, a.out, a.sanitize, "lib", a.jobs, a.werror)
            if not a.sanitize:
                try:
                    emit_cffi(done.library.parent)
                except ImportError:
                    print("cffi can't be imported: _kestrel_cffi.py not written (pip install cffi)", file=sys.stderr)
        # after the library: a harness in the middle of an edit doesn't hold it up
        if a.target == "checkasm" or (a.target == "all" and any(CHECKASM.glob("*.c"))):
            build(a.cc, a.out, a.sanitize, "checkasm", a.jobs, a.werror)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
