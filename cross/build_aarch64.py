#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cross-build for aarch64 and lay out a tree that an emulator or a board can run.

    python3 cross/build_aarch64.py [--cc aarch64-linux-gnu-gcc] [--werror]

Leaves build/<machine>/{libkestrel.so,checkasm,*.o} and build/<machine>/tree/: a copy of the package, the tests and
the board scripts with the aarch64 library in kestrel/, so that every path relative to the tree's root is as in the
repository. Needs cffi (for kestrel/_kestrel_cffi.py, the same on every machine). Prints the tree's folder.
"""
from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kestrel", "tests", "board", "csrc", "cross", "pyproject.toml", "setup.py", "README.md", "LICENSE", ".gitignore")
SKIP = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info", ".pytest_cache", ".hypothesis")


def load_csrc_build():
    spec = importlib.util.spec_from_file_location("kestrel_csrc_build", str(ROOT / "csrc" / "build.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lay_out(done, csrc_build) -> Path:
    tree = done.folder / "tree"
    shutil.rmtree(str(tree), ignore_errors=True)
    tree.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(str(source), str(tree / name), ignore=SKIP)
        elif source.exists():
            shutil.copy2(str(source), str(tree / name))
    shutil.copy2(str(done.library), str(tree / "kestrel" / csrc_build.LIBRARY))
    csrc_build.emit_cffi(tree / "kestrel")
    if done.checkasm:
        place = tree / "build" / done.machine
        place.mkdir(parents=True)
        shutil.copy2(str(done.checkasm), str(place / "checkasm"))
    # compiled here when this Python is the emulated one's version: under emulation it takes seconds
    compileall.compile_dir(str(tree / "kestrel"), quiet=1)
    return tree


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--cc", default=os.environ.get("CROSS_CC", "aarch64-linux-gnu-gcc"))
    ap.add_argument("--werror", action="store_true")
    a = ap.parse_args()
    csrc_build = load_csrc_build()
    try:
        done = csrc_build.build(cc=a.cc, target="all", werror=a.werror)
        if done.architecture != "aarch64":
            raise csrc_build.BuildError(f"{a.cc} compiles for {done.machine}, not for aarch64")
        print(lay_out(done, csrc_build))
    except csrc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"{error.name} is needed to write kestrel/_kestrel_cffi.py: pip install cffi", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
