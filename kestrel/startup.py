# SPDX-License-Identifier: Apache-2.0
"""Cold start: seconds from the start of a process to the first byte of an answer, with the model's file in the page cache and without.

Dropping a file from the page cache needs no rights when nobody has it mapped (posix_fadvise(2)); how much stayed is asked afterwards (preadv2(2)
with RWF_NOWAIT reads only what is there).
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median
from typing import Any, Callable, Dict, List, Optional

from .errors import KestrelError

_PLACES = 64  # looked at in the file
_MOST_RESIDENT = 0.1  # of a file that counts as cold


def resident(path: str) -> Optional[float]:
    """The part of a file that is in the page cache, from 0 to 1, by looking at some places; None when the system can't say."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return None
    there, size = 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        for i in range(_PLACES):
            try:
                there += os.preadv(file.fileno(), [bytearray(1)], size * i // _PLACES, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                pass
            except OSError:
                return None
    return there / _PLACES


def drop(path: str) -> None:
    """Asks the system to forget what it has of a file."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_byte_seconds(path: str) -> float:
    """Seconds until `kestrel generate` in a process of its own shows something. KestrelError: it failed."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p))
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "kestrel", "generate", path, "--prompt", "Hello", "--max-tokens", "2", "--ignore-end"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - begin
    _, error = process.communicate()
    if process.returncode:
        raise KestrelError(error.decode(errors="replace").strip()[-300:] or f"kestrel generate: exit code {process.returncode}")
    return seconds


def startup(path: str, samples: int, note: Callable[[str], None]) -> List[Dict[str, Any]]:
    """Rows of kind "start" (seconds): cache "cold", where the file could be dropped, and "warm". Before the file is mapped by this process."""
    rows = []
    for cache in ("cold", "warm"):
        found = []
        for _ in range(samples if cache == "warm" else 1):
            if cache == "cold":
                drop(path)
                stayed = resident(path)
                if stayed is None or stayed > _MOST_RESIDENT:
                    note("cold start: left out, the model's file stays in the page cache here")
                    break
            found.append(first_byte_seconds(path))
        if found:
            rows.append({"kind": "start", "cache": cache, "unit": "s", "median": median(found), "slowest": max(found), "fastest": min(found), "samples": found})
    return rows
