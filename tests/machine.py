# SPDX-License-Identifier: Apache-2.0
"""Folders that look like the root of another machine: /proc and /sys as far as kestrel reads them."""
from __future__ import annotations

from typing import Dict, List


def lay_out(root, files: Dict[str, object]) -> str:
    """Writes {path below root: content} and returns the root. None: a folder."""
    for path, content in files.items():
        target = root / path
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return str(root)


def cpus(capacities: List[object], name: str = "cpu_capacity") -> Dict[str, object]:
    """One file a CPU."""
    return {f"sys/devices/system/cpu/cpu{i}/{name}": c for i, c in enumerate(capacities)}
