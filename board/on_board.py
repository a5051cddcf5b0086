# SPDX-License-Identifier: Apache-2.0
"""The board's half of deploy.py: sent over ssh to the board's own python3 (3.6 and newer, standard library only), one JSON object out.

    python3 - probe FOLDER              what this machine is
    python3 - inventory FOLDER NAME...  {name: [bytes, sha256]} of the files that are there; a started copy (NAME.part) with its size alone
    python3 - finish FOLDER NAME SHA256 turn NAME.part into NAME when it is whole; FOLDER may be ~/...
"""
import glob
import hashlib
import json
import os
import platform
import subprocess
import sys


def meminfo():
    with open("/proc/meminfo") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.rstrip().endswith("kB")}


def libc():
    """("glibc" or "musl", major, minor)"""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    except (ValueError, OSError, AttributeError):
        found = glob.glob("/lib/ld-musl-*.so.1")
        if not found:
            return ["unknown", 0, 0]
        said = subprocess.Popen([found[0]], stderr=subprocess.PIPE).communicate()[1].decode()
        name, version = "musl", said.split("Version ")[1].split()[0]
    return [name] + [int(n) for n in version.split(".")[:2]]


def text(path):
    try:
        with open(path) as file:
            return file.read().strip("\0\n ")
    except OSError:
        return ""


def probe(folder):
    try:
        import venv     # noqa: F401  (Debian splits it off together with ensurepip on some releases)
        has_venv = True
    except ImportError:
        has_venv = False
    there = folder
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    disk, memory = os.statvfs(there), meminfo()
    return {"machine": platform.machine(), "bits": 64 if sys.maxsize > 2 ** 32 else 32, "python": list(sys.version_info[:3]), "venv": has_venv, "libc": libc(),
            "kernel": platform.release(), "model": text("/proc/device-tree/model"), "cpus": len(os.sched_getaffinity(0)),
            "page_bytes": os.sysconf("SC_PAGE_SIZE"), "memory_bytes": memory["MemTotal"], "memory_available_bytes": memory.get("MemAvailable", memory["MemFree"]),
            "disk_free_bytes": disk.f_bavail * disk.f_frsize, "folder": folder, "writable": os.access(there, os.W_OK)}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def inventory(folder, names):
    found = {}
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            found[name] = [os.path.getsize(path), sha256(path)]
        if os.path.isfile(path + ".part"):
            found[name + ".part"] = [os.path.getsize(path + ".part"), ""]
    return found


def finish(folder, name, wanted):
    path = os.path.join(folder, name)
    found = sha256(path + ".part")
    if found == wanted:
        os.replace(path + ".part", path)
    else:
        os.remove(path + ".part")
    return {"sha256": found}


folder = os.path.realpath(os.path.expanduser(sys.argv[2]))
print(json.dumps({"probe": lambda: probe(folder), "inventory": lambda: inventory(folder, sys.argv[3:]), "finish": lambda: finish(folder, *sys.argv[3:])}[sys.argv[1]]()))
