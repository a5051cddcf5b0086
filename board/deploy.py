#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put kestrel and a model on a board over ssh, prove it there, measure it there, and bring the results back.

    python3 board/deploy.py HOST [--model FILE] [--quick]

HOST is what ssh takes: pi@raspberrypi, or a name in ~/.ssh/config. Each step is said before it is done; a second run does
only what is missing, and a copy that broke off goes on where it stopped. The board needs python3 (3.9 or newer) and ssh:
no root, no compiler, no network - wheels of all dependencies are sent along. All that is put there is in ~/kestrel.

 1 look      machine, Python, libc, memory, disk: refused with the figures when it can't work
 2 wheel     of this source tree for that machine (cross/build.py), and its dependencies' (pip download)
 3 copy      wheels and model, resumed, checked by SHA-256
 4 install   a virtual environment, from those wheels only
 5 check     kestrel check MODEL: every setting gives the same bytes, the golden digest is the one checked in
 6 bench     kestrel bench MODEL
 7 results   board/results/HOST-TIME.json and .md

Exit code 0 when all went well, 1 when the board's answers differ, 2 when it was refused or broke off.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
ON_BOARD = Path(__file__).resolve().parent / "on_board.py"
sys.path.insert(0, str(ROOT / "cross"))
from check_wheel import platforms  # noqa: E402

MIB = 1 << 20
HEADROOM = 150 * MIB        # Python, numpy, tokenizers and a cache of 2,000 positions beside the weights
QUICK_BENCH = "--brief --samples 2 --depths 0 --widths 1 4 --prefill 64 --decode 8 --buffer 64"
MARKDOWN = "import json, sys; from kestrel.report import markdown; print(markdown([json.loads(line) for line in sys.stdin]))"


def say(step: str, text: str) -> None:
    print(f"{step:8} {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    print(f"deploy: {text}", file=sys.stderr)
    sys.exit(2)


class Board:
    """One board behind ssh; every connection shares the first one's login."""

    def __init__(self, host: str, config: Optional[str], sockets: str):
        if not shutil.which("ssh"):
            refuse("no ssh on this machine: install openssh-client")
        if host.startswith("-"):
            refuse(f"{host!r}: expected a host, as in pi@raspberrypi")
        self.host = host
        self._ssh = ["ssh", *(["-F", config] if config else []), "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8",
                     "-o", "ControlMaster=auto", "-o", f"ControlPath={sockets}/%C", "-o", "ControlPersist=30"]
        if not sys.stdin.isatty():
            self._ssh += ["-o", "BatchMode=yes"]    # nobody there to type a password

    def command(self, line: str) -> List[str]:
        """argv that runs a POSIX shell line on the board, whatever its login shell is."""
        return [*self._ssh, self.host, f"exec sh -c {shlex.quote(line)}"]

    def run(self, line: str, what: str, stdin: Optional[bytes] = None, show: bool = False, accept: Tuple[int, ...] = (0,)) -> Tuple[int, str]:
        """(exit code, stdout) of a line; refuses in one line when it fails. show: its stderr is progress for the person here."""
        done = subprocess.run(self.command(line), input=stdin if stdin is not None else b"", stdout=subprocess.PIPE, stderr=None if show else subprocess.PIPE)
        if done.returncode not in accept:
            last = "" if show else " ".join(done.stderr.decode(errors="replace").split())[-300:]
            if done.returncode == 255:
                refuse(f"{what}: no ssh connection to {self.host}: {last or 'it broke off'}; run again to go on")
            refuse(f"{what}: exit code {done.returncode} on {self.host}{': ' + last if last else ''}")
        return done.returncode, done.stdout.decode(errors="replace")

    def ask(self, what: str, *arguments: str) -> Any:
        """What board/on_board.py says there."""
        line = "command -v python3 >/dev/null || { echo no python3 >&2; exit 3; }; python3 - " + " ".join(map(shlex.quote, arguments))
        code, out = self.run(line, what, stdin=ON_BOARD.read_bytes(), accept=(0, 3))
        if code == 3:
            refuse(f"{self.host} has no python3: install Python 3.9 or newer (Debian: sudo apt-get install python3)")
        try:
            return json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            refuse(f"{what}: {self.host} answered {out.strip()[-200:]!r}, expected JSON (does its login shell print something?)")

    def send(self, path: Path, folder: str, name: str, digest: str, offset: int) -> None:
        """Append path[offset:] to folder/name.part, then give it its name if the whole is right."""
        size = path.stat().st_size
        target = shlex.quote(f"{folder}/{name}.part")
        process = subprocess.Popen(self.command(f"cat {'>>' if offset else '>'} {target}"), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin and process.stderr
        sent = offset
        try:
            with open(str(path), "rb") as file:
                file.seek(offset)
                for block in iter(lambda: file.read(MIB), b""):
                    process.stdin.write(block)
                    sent += len(block)
                    if sys.stderr.isatty():
                        print(f"\r{'copy':8} {name}: {sent / MIB:.0f} of {size / MIB:.0f} MiB", end="", file=sys.stderr, flush=True)
            process.stdin.close()
        except BrokenPipeError:
            pass
        said = process.stderr.read().decode(errors="replace").strip()
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if process.wait():
            refuse(f"copy of {name} broke off after {sent / MIB:.0f} of {size / MIB:.0f} MiB: {said.splitlines()[-1] if said else 'connection lost'}; run again to go on")
        found = self.ask("checking the copy", "finish", folder, name, digest)["sha256"]
        if found != digest:
            refuse(f"{name} arrived with SHA-256 {found[:16]}, expected {digest[:16]}; the copy is removed, run again")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(str(path), "rb") as file:
        for block in iter(lambda: file.read(MIB), b""):
            digest.update(block)
    return digest.hexdigest()


def fits(board: Dict[str, Any], host: str) -> str:
    """The wheel's tag for this board; refuses what can't run kestrel at all."""
    machine, bits = board["machine"], board["bits"]
    libc, major, minor = board["libc"]
    if bits != 64:
        refuse(f"{host} runs a 32-bit Python ({machine}): kestrel needs a 64-bit system (Raspberry Pi OS 64-bit, for one)")
    if machine not in ("aarch64", "x86_64"):
        refuse(f"{host} is {machine}, expected aarch64 (or x86_64)" + (": a 32-bit system; install its 64-bit one" if machine.startswith("arm") else ""))
    if tuple(board["python"][:2]) < (3, 9):
        refuse(f"{host} has Python {'.'.join(map(str, board['python']))}, expected 3.9 or newer")
    if not board["venv"]:
        refuse(f"{host} has no venv module: sudo apt-get install python3-venv")
    if not board["writable"]:
        refuse(f"{host}: {board['folder']} can't be written by this user")
    if libc == "musl" and machine == "aarch64" and (major, minor) >= (1, 2):
        return "musllinux_1_2_aarch64"
    if libc == "glibc" and (major, minor) >= (2, 28):
        return f"manylinux_2_28_{machine}"
    refuse(f"{host} has {libc} {major}.{minor} on {machine}, expected glibc 2.28 or newer (or musl 1.2 on aarch64)")


def build_wheel(tag: str) -> Path:
    """The wheel of this source tree."""
    done = subprocess.run([sys.executable, str(ROOT / "cross" / "build.py"), "--target", tag], stdout=subprocess.PIPE, universal_newlines=True)
    if done.returncode:
        refuse(f"cross/build.py --target {tag} failed (exit code {done.returncode})")
    return Path(done.stdout.split()[-1])


def bundle(wheel: Path, board: Dict[str, Any]) -> Path:
    """A tar of wheels: everything that the wheel depends on for the board's Python, and pip, which installs them there.

    One file, because a board that is slow at starting programs is slow at every one that is sent.
    """
    version, (libc, _, minor) = "{}.{}".format(*board["python"][:2]), board["libc"]
    # what decides it: the wheel's own requirements and the board's Python and libc
    with zipfile.ZipFile(str(wheel)) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    core = [line for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.M) if "extra ==" not in line] + ["pip"]
    name = f"{board['machine']}-{libc}{minor}-py{version}-{hashlib.sha256(repr(core).encode()).hexdigest()[:8]}.tar"
    target = ROOT / "build" / "bundle" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=str(target.parent)) as folder:
            cmd = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp",
                   "--python-version", version, "-d", folder, *(a for p in platforms(libc, minor, board["machine"]) for a in ("--platform", p)), *core]
            done = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
            if done.returncode:
                errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
                refuse(f"no wheels for Python {version} on {board['machine']} ({libc}): {(errors or [done.stdout.strip()[-200:]])[-1]}")
            with tarfile.open(str(Path(folder, "tar")), "w") as archive:
                for path in sorted(Path(folder).glob("*.whl")):
                    archive.add(str(path), path.name)
            os.replace(str(Path(folder, "tar")), str(target))
    return target


def unpacked_bytes(wheel: Path, tar: Path) -> int:
    """What an installation takes: the contents of all wheels, and for its time the wheels themselves."""
    with tarfile.open(str(tar)) as archive:
        inside = sum(i.file_size for member in archive.getmembers() for i in zipfile.ZipFile(archive.extractfile(member)).infolist())  # type: ignore[arg-type]
    with zipfile.ZipFile(str(wheel)) as archive:
        return inside + tar.stat().st_size + sum(i.file_size for i in archive.infolist())


def room(board: Dict[str, Any], host: str, copies: int, unpacked: int, model: Path) -> None:
    """Refuses a disk or a memory that is too small, with the figures."""
    needed = copies + unpacked
    if board["disk_free_bytes"] < needed + 20 * MIB:
        refuse(f"{host}: {board['disk_free_bytes'] / MIB:.0f} MiB free in {board['folder']}, needed {needed / MIB + 20:.0f} MiB "
               f"({copies / MIB:.0f} to copy, {unpacked / MIB:.0f} unpacked, 20 to spare)")
    memory = model.stat().st_size + HEADROOM
    if board["memory_available_bytes"] < memory:
        refuse(f"{host}: {board['memory_available_bytes'] / MIB:.0f} MiB of memory available of {board['memory_bytes'] / MIB:.0f}, needed {memory / MIB:.0f} MiB for "
               f"{model.name} ({model.stat().st_size / MIB:.0f} of weights, {HEADROOM / MIB:.0f} for Python and the cache); a smaller model may fit")


def default_model() -> Path:
    """SmolLM2-135M-Instruct with int8 weights, fetched and converted on this machine when it is not there yet."""
    path = Path(os.environ.get("KESTREL_CACHE") or Path.home() / ".cache" / "kestrel") / "smollm2-135m-int8.kestrel"
    if not path.exists():
        say("model", f"making {path} (board/demo.sh --model-only)")
        if subprocess.run(["bash", str(ROOT / "board" / "demo.sh"), "--model-only"], stdout=sys.stderr).returncode:
            refuse("board/demo.sh --model-only failed: give a packed model with --model")
    return path


def put(board: Board, folder: str, files: Dict[str, Path], digests: Dict[str, str], found: Dict[str, Any]) -> None:
    """Copy what is missing or different."""
    for name, path in files.items():
        size = path.stat().st_size
        if found.get(name) == [size, digests[name]]:
            continue
        offset = found.get(name + ".part", [0])[0]
        offset = offset if offset <= size else 0
        say("copy", f"{name}, {size / MIB:.1f} MiB" + (f", going on at {offset / MIB:.0f}" if offset else ""))
        board.send(path, folder, name, digests[name], offset)


def report(board: Dict[str, Any], host: str, check: Dict[str, Any], table: str, when: str) -> str:
    """The Markdown beside the JSON."""
    where = board["model"] or board["machine"]
    verdicts = "; ".join(f"{name}: {digest[:16]} ({check['golden_verdict'][name]})" for name, digest in check["golden"].items())
    lines = [f"# {where}", "",
             f"{host}, {when}: {board['machine']}, {board['cpus']} CPUs, {board['memory_bytes'] / MIB:.0f} MiB, kernel {board['kernel']}, "
             f"pages of {board['page_bytes'] // 1024}K, {board['libc'][0]} {board['libc'][1]}.{board['libc'][2]}, Python {'.'.join(map(str, board['python']))}", "",
             f"`kestrel check`: {check['cells']} cells, {'all equal' if check['passed'] else 'NOT EQUAL'}; instruction sets {', '.join(check['isa'])}; golden {verdicts}", "", table]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("host", metavar="HOST")
    ap.add_argument("--model", type=Path, help="a packed model (default: SmolLM2-135M-Instruct, int8)")
    ap.add_argument("--quick", action="store_true", help="fewer cells and samples: a first look, no figures to quote")
    ap.add_argument("--install-only", action="store_true", help="no check, no bench")
    ap.add_argument("--folder", default="~/kestrel", help="where on the board (default ~/kestrel)")
    ap.add_argument("--results", type=Path, default=ROOT / "board" / "results")
    ap.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    a = ap.parse_args()
    with tempfile.TemporaryDirectory(prefix="kestrel-") as sockets:
        board = Board(a.host, a.ssh_config, sockets)
        say("look", a.host)
        facts = board.ask("look", "probe", a.folder)
        folder, libc = facts["folder"], facts["libc"]
        say("look", f"{facts['model'] or facts['machine']}: {facts['machine']}, {facts['cpus']} CPUs, {facts['memory_available_bytes'] / MIB:.0f} of {facts['memory_bytes'] / MIB:.0f} MiB "
                    f"available, {facts['disk_free_bytes'] / MIB:.0f} MiB of disk, {libc[0]} {libc[1]}.{libc[2]}, Python {'.'.join(map(str, facts['python']))}")
        tag = fits(facts, a.host)
        if a.model and not a.model.is_file():
            refuse(f"{a.model}: no such file")
        model = a.model or default_model()
        say("wheel", tag)
        wheel = build_wheel(tag)
        say("wheel", f"{wheel.name} and the wheels that it depends on")
        tar = bundle(wheel, facts)
        files = {"wheels.tar": tar, wheel.name: wheel, f"models/{model.name}": model}
        digests = {name: sha256(path) for name, path in files.items()}
        stamp = [digests["wheels.tar"], digests[wheel.name]]

        place = shlex.quote(folder)
        _, installed = board.run(f"mkdir -p {place}/models && cd {place} && cat venv/kestrel.stamp 2>/dev/null || true", "making the folder")
        found = board.ask("copy", "inventory", folder, *files)
        others_current = installed.split()[:1] == stamp[:1]     # the dependencies, which change seldom and take longest
        current = installed.split() == stamp
        copies = sum(p.stat().st_size - min(found.get(f"{n}.part", [0])[0], p.stat().st_size) for n, p in files.items() if found.get(n) != [p.stat().st_size, digests[n]])
        room(facts, a.host, copies, 0 if others_current else unpacked_bytes(wheel, tar), model)
        put(board, folder, files, digests, found)
        say("copy", f"{len(files)} files there, SHA-256 equal")

        if current:
            say("install", f"{folder}/venv is up to date")
        else:
            say("install", f"{folder}/venv" + (": kestrel's own wheel" if others_current else ""))
            options = "install -q --disable-pip-version-check --no-cache-dir --no-compile --no-index"
            # pip runs from its own wheel: ensurepip, which Debian has in a package of its own, is not needed
            whole = ("rm -rf wheels && python3 -m venv --clear --without-pip venv && python3 -m tarfile -e wheels.tar wheels && pip=$(echo wheels/pip-*.whl) && "
                     f"venv/bin/python $pip/pip {options} --find-links wheels $pip {shlex.quote(wheel.name)} && rm -rf wheels")
            own = f"venv/bin/python -m pip {options} --no-deps --force-reinstall {shlex.quote(wheel.name)}"
            board.run(f"cd {place} && {own if others_current else whole} && echo {' '.join(stamp)} > venv/kestrel.stamp", "install", show=True)

        kestrel, packed = f"cd {place} && venv/bin/kestrel", shlex.quote(f"models/{model.name}")
        _, text = board.run(f"{kestrel} info {packed}", "kestrel info", show=True)
        say("info", text.strip().splitlines()[-1].strip())
        if a.install_only:
            return 0
        say("check", "kestrel check" + (" --quick" if a.quick else ", some minutes"))
        _, text = board.run(f"{kestrel} check {packed} --json" + (" --quick" if a.quick else ""), "kestrel check", show=True, accept=(0, 1))
        if not text.strip().startswith("{"):
            refuse(f"kestrel check on {a.host} ended without a result: its last words are above")
        check = json.loads(text.strip().splitlines()[-1])
        say("check", f"{check['cells']} cells in {check['seconds']} s, {'all equal' if check['passed'] else 'NOT EQUAL'}; golden "
                     + "; ".join(f"{name} {digest[:16]} ({check['golden_verdict'][name]})" for name, digest in check["golden"].items()))
        say("bench", "kestrel bench" + (" " + QUICK_BENCH if a.quick else ", some minutes"))
        _, text = board.run(f"{kestrel} bench {packed} --json {QUICK_BENCH if a.quick else ''}", "kestrel bench", show=True)
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        _, table = board.run(f"cd {place} && venv/bin/python -c {shlex.quote(MARKDOWN)}", "bench report", stdin="\n".join(json.dumps(r) for r in rows).encode())

        when = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
        name = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', a.host)}-{when}"
        a.results.mkdir(parents=True, exist_ok=True)
        everything = {"host": a.host, "time": when, "board": facts, "wheel": {"name": wheel.name, "sha256": digests[wheel.name]},
                      "model": {"name": model.name, "sha256": digests[f"models/{model.name}"]}, "quick": a.quick, "check": check, "bench": rows}
        for suffix, content in ((".json", json.dumps(everything, indent=1) + "\n"), (".md", report(facts, a.host, check, table, when))):
            path = a.results / (name + suffix)
            path.write_text(content)
            say("results", str(path))
            print(path)
    return 0 if check["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
