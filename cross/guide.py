#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the commands of cross/README.md, block by block: python3 cross/guide.py [--list]

A block is fenced and marked `sh`; its lines run in one bash -e from the top of the repository, with PYTHON's folder first on PATH.
Stops with the block's exit code at the first that fails.
"""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(text):
    """The shell blocks of a Markdown text, in its order."""
    return [b.strip() for b in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)]


def main():
    found = blocks((ROOT / "cross" / "README.md").read_text())
    if "--list" in sys.argv[1:]:
        print("\n\n".join(found))
        return 0
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for i, block in enumerate(found, 1):
        print(f"[{i}/{len(found)}] " + block.replace("\n", "\n      "), flush=True)
        begin = time.monotonic()
        code = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=str(ROOT), env=environment).returncode
        if code:
            print(f"cross/README.md: block {i} failed with exit code {code}", file=sys.stderr)
            return 1
        print(f"      ({time.monotonic() - begin:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
