# SPDX-License-Identifier: Apache-2.0
"""Which CPUs the threads run on: the big ones of those that this process may use, no more than its control group pays for.

A phase of a pass ends when its slowest task does, so that small cores beside big ones cost more than they bring (on an RK3588 eight threads
decode at half the speed of four: boards' published figures). Sources: /sys/devices/system/cpu (Documentation/ABI/testing/sysfs-devices-system-cpu of
the Linux kernel). `root` stands for "/" so that tests can lay out a machine.
"""
from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Set, Tuple

from . import cgroup
from .cgroup import read_number, read_text

_SIMILAR = 0.75  # of the largest capacity: cores of one kind differ by their bin, kinds by a factor of two


class Cores(NamedTuple):
    """allowed: CPUs of the affinity mask; big: those of the fastest kind; quota: CPUs that the control group pays for, None without limit."""

    allowed: Tuple[int, ...]
    big: Tuple[int, ...]
    quota: Optional[float]

    @property
    def threads(self) -> int:
        """Threads to use by default."""
        return max(1, len(self.big) if self.quota is None else min(len(self.big), int(self.quota)))

    def for_threads(self, threads: int) -> Tuple[int, ...]:
        """CPUs for so many threads: the big ones as long as each has one of its own, else all."""
        return self.big if threads <= len(self.big) else self.allowed


def quota(root: str = "/") -> Optional[float]:
    """CPUs' worth of time that the control groups of this process grant, the least of all levels; None without limit."""
    found = []
    for folder in cgroup.folders(root, "cpu"):
        parts = (read_text(root, folder, "cpu.max") or "").split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit():
            amount, period = int(parts[0]), int(parts[1])
        else:
            amount, period = read_number(root, folder, "cpu.cfs_quota_us") or -1, read_number(root, folder, "cpu.cfs_period_us") or 0
        if amount > 0 and period > 0:
            found.append(amount / period)
    return min(found, default=None)


def capacity(cpu: int, root: str = "/") -> Optional[int]:
    """How fast a CPU is beside the others: its capacity as the scheduler sees it, else its highest frequency in kHz; None when unknown."""
    folder = f"sys/devices/system/cpu/cpu{cpu}"
    return read_number(root, folder, "cpu_capacity") or read_number(root, folder, "cpufreq/cpuinfo_max_freq")


def choose_cores(root: str = "/", allowed: Optional[Set[int]] = None) -> Cores:
    """The CPUs of this process. allowed: the affinity mask (default: asked from the system)."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    known: Dict[int, Optional[int]] = {cpu: capacity(cpu, root) for cpu in sorted(allowed)}
    most = max((c for c in known.values() if c), default=0)
    big = tuple(cpu for cpu, c in known.items() if c is None or c >= _SIMILAR * most)
    return Cores(tuple(known), big, quota(root))


def default_threads() -> int:
    """Threads when nobody says how many."""
    return choose_cores().threads


def warn_of_threads(threads: int, note: Callable[[str], None], cores: Optional[Cores] = None) -> None:
    """Says so when more threads are asked for than there are CPUs for them; they are made all the same."""
    cores = cores or choose_cores()
    if threads > len(cores.allowed):
        note(f"{threads} threads on {len(cores.allowed)} CPUs that this process may use: they will wait for one another")
    elif cores.quota is not None and threads > max(1.0, cores.quota):
        note(f"{threads} threads, but the control group pays for {cores.quota:g} CPUs: they will be held up")
    elif threads > len(cores.big):
        note(f"{threads} threads on {len(cores.big)} big cores and {len(cores.allowed) - len(cores.big)} small ones: each pass waits for the slowest")


def stay_on(cpus: Tuple[int, ...]) -> None:
    """The calling thread, and threads that it makes from now on, run on `cpus` alone."""
    if hasattr(os, "sched_setaffinity") and cpus and set(cpus) < os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)


@contextmanager
def running_on(cpus: Tuple[int, ...]) -> Iterator[None]:
    """The calling thread, and threads that it makes meanwhile, run on `cpus` alone; afterwards the caller has its old mask back."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    stay_on(cpus)
    try:
        yield
    finally:
        if before is not None and before != os.sched_getaffinity(0):
            os.sched_setaffinity(0, before)
