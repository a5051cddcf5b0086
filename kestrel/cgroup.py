# SPDX-License-Identifier: Apache-2.0
"""Limits that a container or a service sets for this process: files of its control groups, the innermost first.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1 of the Linux kernel. `root` stands for "/" so that tests can lay out a machine.
"""
from __future__ import annotations

import os
from typing import Iterator, Optional


def read_text(root: str, *parts: str) -> Optional[str]:
    """The stripped text of a small file under `root`; None when it isn't there, can't be read, or is no text."""
    try:
        with open(os.path.join(root, *(p.lstrip("/") for p in parts)), "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace").replace("\0", "").strip()
    except OSError:
        return None


def read_number(root: str, *parts: str) -> Optional[int]:
    """The same as an integer; None when it is none."""
    text = read_text(root, *parts)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def folders(root: str, controller: str) -> Iterator[str]:
    """Folders (absolute below `root`) of this process's groups that `controller` ("cpu" or "memory") may limit, each before the one above it.

    In a container the path of /proc/self/cgroup may be the host's: what does not exist below the mount is passed over.
    """
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, names, path = parts
        if number == "0" and not names:
            mount = "sys/fs/cgroup"
        elif controller in names.split(","):
            mount = next((m for m in (f"sys/fs/cgroup/{names}", f"sys/fs/cgroup/{controller}") if os.path.isdir(os.path.join(root, m))), "")
        else:
            continue
        inner = [p for p in path.split("/") if p not in ("", ".", "..")]
        for depth in range(len(inner), -1, -1):
            folder = "/".join([mount, *inner[:depth]])
            if mount and os.path.isdir(os.path.join(root, folder)):
                yield folder
