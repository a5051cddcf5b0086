# SPDX-License-Identifier: Apache-2.0
"""What a board says about itself: model, clocks, heat, throttling, memory, storage. Every reader bears the absence of what it reads.

Sources: the kernel's Documentation/ABI (sysfs-devices-system-cpu, sysfs-class-thermal, sysfs-class-devfreq), Raspberry Pi's firmware interface
(`get_throttled`), Rockchip's `dmc` and NVIDIA's `soctherm` as their kernels show them. `root` stands for "/" so that tests can lay out a board.
"""
from __future__ import annotations

import glob
import os
import platform
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Tuple

from .cgroup import read_number, read_text
from .memory import meminfo

# Raspberry Pi's get_throttled: bits of now; 16 higher, since boot
THROTTLE_BITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}
_SWAPPED_PAGES = 64  # between two readings: less is another process's crumb


def _below(root: str, pattern: str) -> List[str]:
    """Paths relative to root, by the numbers at their ends."""
    def order(path: str) -> Tuple[int, str]:
        digits = "".join(c for c in os.path.basename(path) if c.isdigit())
        return int(digits) if digits else -1, path

    return sorted((os.path.relpath(p, root) for p in glob.glob(os.path.join(glob.escape(root), pattern))), key=order)


def board(root: str = "/") -> Optional[str]:
    """The board's name from its device tree; on PCs the product's or the CPU's."""
    for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model", "sys/devices/virtual/dmi/id/product_name"):
        text = read_text(root, path)
        if text:
            return text
    names = [line.partition(":")[2].strip() for line in (read_text(root, "proc/cpuinfo") or "").splitlines() if line.startswith("model name")]
    return names[0] if names else None


def clusters(root: str = "/") -> List[Dict[str, Any]]:
    """One entry a frequency domain: name, cpus, governor, mhz (now), limit_mhz (what it may reach now), max_mhz (what the silicon can)."""
    found = []
    for folder in _below(root, "sys/devices/system/cpu/cpufreq/policy*"):
        mhz = {name: read_number(root, folder, file) for name, file in
               (("mhz", "scaling_cur_freq"), ("limit_mhz", "scaling_max_freq"), ("max_mhz", "cpuinfo_max_freq"))}
        found.append({"name": os.path.basename(folder), "cpus": read_text(root, folder, "related_cpus"), "governor": read_text(root, folder, "scaling_governor"),
                      **{name: None if value is None else value // 1000 for name, value in mhz.items()}})
    return found


def temperatures(root: str = "/") -> Dict[str, float]:
    """{zone: degrees Celsius}; zones of one type are numbered."""
    found: Dict[str, float] = {}
    for folder in _below(root, "sys/class/thermal/thermal_zone*"):
        value = read_number(root, folder, "temp")
        if value is not None:
            name = read_text(root, folder, "type") or os.path.basename(folder)
            found[name if name not in found else f"{name} {os.path.basename(folder)}"] = value / 1000
    return found


def _firmware_throttled(root: str) -> Optional[int]:
    """The Raspberry Pi firmware's bits: from sysfs, else from vcgencmd."""
    for path in _below(root, "sys/devices/platform/*/*firmware/get_throttled"):
        text = read_text(root, path)
        try:
            return int(text or "", 16)
        except ValueError:
            continue
    if root != "/" or not shutil.which("vcgencmd"):
        return None
    try:
        done = subprocess.run(["vcgencmd", "get_throttled"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5, universal_newlines=True)
        return int(done.stdout.strip().partition("=")[2], 16)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def throttling(root: str = "/") -> Dict[str, Any]:
    """now: what holds the clocks down at this moment; counts: {what: events so far}, that only rise; firmware: the Raspberry Pi's bits, or None."""
    now: List[str] = []
    counts: Dict[str, int] = {}
    bits = _firmware_throttled(root)
    if bits is not None:
        now += [text for bit, text in THROTTLE_BITS.items() if bits >> bit & 1]
        counts.update({f"firmware: {text}": bits >> (16 + bit) & 1 for bit, text in THROTTLE_BITS.items()})
    for folder in _below(root, "sys/class/thermal/cooling_device*"):
        kind, state = read_text(root, folder, "type") or "", read_number(root, folder, "cur_state")
        if state and any(word in kind.lower() for word in ("cpufreq", "cpu-", "processor", "devfreq", "dmc", "emc")) and "idle" not in kind:
            now.append(f"{kind} cooled by {state}")
    for path in _below(root, "sys/class/hwmon/hwmon*/oc*_event_cnt"):  # Jetson: over-current
        counts[os.path.basename(path)] = counts.get(os.path.basename(path), 0) + (read_number(root, path) or 0)
    for path in _below(root, "sys/class/hwmon/hwmon*/in*_lcrit_alarm"):  # Raspberry Pi: rpi_volt
        if read_number(root, path):
            now.append(f"{read_text(root, os.path.dirname(path), 'name') or 'supply'} too low")
    for name in ("core_throttle_count", "package_throttle_count"):  # x86
        values = [read_number(root, p) or 0 for p in _below(root, f"sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/{name}")]
        if values:
            counts[name] = max(values)
    return {"now": now, "counts": counts, "firmware": None if bits is None else hex(bits)}


def memory_clock(root: str = "/") -> Optional[Dict[str, Any]]:
    """The memory controller's scaling (Rockchip dmc, NVIDIA emc): name, governor, mhz, max_mhz; None when nothing scales it that we may see."""
    for folder in _below(root, "sys/class/devfreq/*"):
        name = os.path.basename(folder)
        if any(word in name.lower() for word in ("dmc", "emc", "ddr", "mem")):
            now, most = read_number(root, folder, "cur_freq"), read_number(root, folder, "max_freq")
            return {"name": name, "governor": read_text(root, folder, "governor"), "mhz": now and now // 1000000, "max_mhz": most and most // 1000000}
    rate, most = (read_number(root, "sys/kernel/debug/bpmp/debug/clk/emc", f) for f in ("rate", "max_rate"))
    return {"name": "emc", "governor": None, "mhz": rate // 1000000, "max_mhz": most and most // 1000000} if rate else None


def storage(path: str, root: str = "/", device: Optional[Tuple[int, int]] = None) -> Optional[Dict[str, str]]:
    """Where a file lies: device and kind (SD card, eMMC, NVMe, USB, SATA disk, SSD, ...). None for what is no block device. device: (major, minor)."""
    if device is None:
        try:
            number = os.stat(path).st_dev
        except OSError:
            return None
        device = os.major(number), os.minor(number)
    link = os.path.join(root, "sys/dev/block", "{}:{}".format(*device))
    if not os.path.exists(link):
        return None
    real = os.path.realpath(link)
    if os.path.exists(os.path.join(real, "partition")):
        real = os.path.dirname(real)
    name, rotational = os.path.basename(real), read_text(real, "queue/rotational")
    if name.startswith("mmcblk"):
        kind = {"SD": "SD card", "MMC": "eMMC"}.get(read_text(real, "device/type") or "", "SD card or eMMC")
    elif name.startswith("nvme"):
        kind = "NVMe"
    elif "/usb" in real:
        kind = "USB"
    elif name.startswith(("loop", "dm-", "zram", "ram", "md", "vd")):
        kind = {"vd": "virtual disk"}.get(name[:2], "".join(c for c in name if c.isalpha()))
    else:
        kind = "disk" if rotational == "1" else "SSD"
    return {"device": name, "kind": kind}


def counters(root: str = "/") -> Dict[str, int]:
    """Pages swapped in and out and major faults since boot, by the whole system; swap of this process in bytes."""
    found = {}
    for line in (read_text(root, "proc/vmstat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("pswpin", "pswpout", "pgmajfault") and value.isdigit():
            found[name] = int(value)
    for line in (read_text(root, "proc/self/status") or "").splitlines():
        if line.startswith("VmSwap:") and line.split()[1].isdigit():
            found["process_swap"] = int(line.split()[1]) << 10
    return found


def moving(root: str = "/") -> Dict[str, Any]:
    """What may change while something runs: read before and after each sample."""
    return {"clusters": clusters(root), "temperatures": temperatures(root), "throttling": throttling(root), "counters": counters(root)}


def marks(before: Dict[str, Any], after: Dict[str, Any]) -> List[str]:
    """What spoils a measurement between two readings of `moving`: "throttled: ..." and "swapped: ..."."""
    found = [f"throttled: {text}" for text in dict.fromkeys([*before["throttling"]["now"], *after["throttling"]["now"]])]
    old = before["throttling"]["counts"]
    found += [f"throttled: {name}" for name, count in after["throttling"]["counts"].items() if count > old.get(name, count)]
    pages = sum(after["counters"].get(name, 0) - before["counters"].get(name, 0) for name in ("pswpin", "pswpout"))
    if pages >= _SWAPPED_PAGES:
        found.append(f"swapped: {pages} pages")
    if after["counters"].get("process_swap", 0) > before["counters"].get("process_swap", 0):
        found.append("swapped: this process")
    return found


def snapshot(root: str = "/", path: Optional[str] = None) -> Dict[str, Any]:
    """Everything, as JSON-able values; None or empty where the board says nothing. path: the model file, for its storage."""
    memory = meminfo(root)
    return {
        "board": board(root), "machine": platform.machine(), "kernel": read_text(root, "proc/sys/kernel/osrelease"), "load": (read_text(root, "proc/loadavg") or "").split()[:3],
        "page_bytes": os.sysconf("SC_PAGE_SIZE"), "memory_clock": memory_clock(root), "storage": storage(path, root) if path else None,
        "memory": {name: memory.get(key) for name, key in (("total", "MemTotal"), ("available", "MemAvailable"), ("swap_total", "SwapTotal"), ("swap_free", "SwapFree"))},
        **moving(root),
    }


def advice(found: Dict[str, Any]) -> List[str]:
    """What in a snapshot makes figures lower, or differ from run to run, and can be changed by the owner."""
    said = [f"{c['name']} (CPUs {c['cpus']}): governor {c['governor']}; `performance` gives steadier figures" for c in found["clusters"]
            if c["governor"] not in (None, "performance")]
    clock = found["memory_clock"]
    if clock and clock["governor"] not in (None, "performance"):
        said.append(f"memory ({clock['name']}): governor {clock['governor']}; `performance` keeps its clock up")
    said += [f"held down now: {text}" for text in found["throttling"]["now"]]
    said += [f"{name} has happened since boot" for name, count in found["throttling"]["counts"].items() if count and name.startswith("firmware: ")]
    return said
