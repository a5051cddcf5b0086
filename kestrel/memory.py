# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, and whether a model with its cache fits into it.

Linux's MemAvailable, and every memory cgroup that the process is in (v2: memory.max, v1: memory.limit_in_bytes; a container's limit is one).
What a cgroup has in its page cache counts as free: weights are mapped from their file and can be dropped there too.
"""
from __future__ import annotations

from typing import Dict, Iterator, NamedTuple, Optional

from . import cgroup
from .cgroup import read_number, read_text
from .errors import KestrelError

_MIB = 1 << 20


class Footprint(NamedTuple):
    """Bytes that answering takes: the mapped weights, a cache of `ctx` positions, scratch and logits of a pass."""

    weights: int
    kv: int
    scratch: int
    ctx: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.scratch

    def __str__(self) -> str:
        return (f"{mib(self.total)} (weights {mib(self.weights)}, cache of {self.ctx} positions {mib(self.kv)}, scratch {mib(self.scratch)})")


def mib(count: int) -> str:
    """Bytes as MiB, rounded up."""
    return f"{-(-count // _MIB)} MiB"


def require(footprint: Footprint, available: Optional[int], path: str) -> None:
    """KestrelError with both figures when the footprint is larger than what is available (None: unknown, then nothing is said)."""
    if available is not None and footprint.total > available:
        raise KestrelError(f"{path}: needs {footprint}, available {mib(max(available, 0))}; a smaller --ctx or --kv int8 takes less")


def meminfo(root: str = "/") -> Dict[str, int]:
    """{name: bytes} of /proc/meminfo; empty when it can't be read."""
    found = {}
    for line in (read_text(root, "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            found[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return found


def available_bytes(root: str = "/") -> Optional[int]:
    """Bytes that this process may take now; None where the system doesn't say. root: where /proc and /sys are (tests)."""
    found = [n for n in (meminfo(root).get("MemAvailable"), *_cgroups(root)) if n is not None]
    return min(found) if found else None


def _cgroups(root: str) -> Iterator[int]:
    """What each memory cgroup above this process leaves; one without a limit says nothing."""
    for folder in cgroup.folders(root, "memory"):
        for names in (("memory.max", "memory.current", "active_file", "inactive_file"),
                      ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")):
            limit, used = (read_number(root, folder, name) for name in names[:2])
            if limit is not None and used is not None:
                stat = dict(line.split(" ", 1) for line in (read_text(root, folder, "memory.stat") or "").splitlines() if " " in line)
                cached = sum(int(stat[name]) for name in names[2:] if stat.get(name, "").isdigit())
                yield limit - max(used - cached, 0)
