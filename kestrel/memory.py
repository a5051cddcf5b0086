# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, and whether a model with its cache fits into it.

Linux's MemAvailable, and every memory cgroup that the process is in (v2: memory.max, v1: memory.limit_in_bytes; a container's limit is one).
What a cgroup has in its page cache counts as free: weights are mapped from their file and can be dropped there too.
"""
from __future__ import annotations

import os
from typing import Iterator, NamedTuple, Optional, Tuple

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


def available_bytes(root: str = "/") -> Optional[int]:
    """Bytes that this process may take now; None where the system doesn't say. root: where /proc and /sys are (tests)."""
    found = [n for n in (_meminfo(root), *_cgroups(root)) if n is not None]
    return min(found) if found else None


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _number(text: str) -> Optional[int]:
    text = text.strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _meminfo(root: str) -> Optional[int]:
    for line in _read(root, "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            kib = _number(line.split()[1])
            return None if kib is None else kib << 10
    return None


def _cgroups(root: str) -> Iterator[Optional[int]]:
    """What each memory cgroup above this process leaves; one without a limit says nothing."""
    for line in _read(root, "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _levels(os.path.join(root, "sys/fs/cgroup"), path, ("memory.max", "memory.current", "active_file", "inactive_file"))
        elif "memory" in controllers.split(","):
            yield from _levels(os.path.join(root, "sys/fs/cgroup/memory"), path,
                               ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"))


def _levels(mount: str, path: str, names: Tuple[str, str, str, str]) -> Iterator[Optional[int]]:
    """From a cgroup up to its mount; inside a container the outer path doesn't exist and the mount itself holds the limit."""
    parts = [p for p in path.split("/") if p and p != ".."]
    for depth in range(len(parts), -1, -1):
        folder = os.path.join(mount, *parts[:depth])
        limit, used = _number(_read(folder, names[0])), _number(_read(folder, names[1]))
        if limit is not None and used is not None:
            stat = dict(line.split(" ", 1) for line in _read(folder, "memory.stat").splitlines() if " " in line)
            cached = sum(_number(stat.get(name, "0")) or 0 for name in names[2:])
            yield limit - max(used - cached, 0)
