# SPDX-License-Identifier: Apache-2.0
"""board/deploy.py against a board that is a folder of this machine behind a fake ssh: what it does, does not do twice, resumes, and refuses.

The whole way on a real (emulated) board over real ssh is cross/deploy_vm.sh.
"""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
import toy

pytestmark = pytest.mark.native_only  # starts processes, says nothing of the CPU

MIB = 1 << 20
BOARD = {"machine": "aarch64", "bits": 64, "python": [3, 11, 2], "venv": True, "libc": ["glibc", 2, 36], "kernel": "6.6.31-v8+", "model": "Raspberry Pi 5 Model B Rev 1.0",
         "cpus": 4, "page_bytes": 16384, "memory_bytes": 8063 * MIB, "memory_available_bytes": 7500 * MIB, "disk_free_bytes": 20000 * MIB, "writable": True}
# `ssh [-F x] [-o x]... HOST COMMAND`: runs COMMAND here with the board's home; answers `probe` from a file; says what an unreachable host would say
FAKE_SSH = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -F|-o) shift 2 ;; *) break ;; esac; done
host=$1; shift
[ "$host" != nobody ] || { echo "ssh: connect to host nobody port 22: No route to host" >&2; exit 255; }
echo "$*" >> "$FAKE/log"
case "$*" in
  *"python3 - probe"*) cat "$FAKE/probe.json"; exit "$(cat "$FAKE/probe.code" 2>/dev/null || echo 0)" ;;
  *"cat >"*) if [ -e "$FAKE/breaks" ]; then rm "$FAKE/breaks"; HOME=$FAKE/home bash -c "${*/cat/head -c 2000000 |cat}"; echo "client_loop: send disconnect" >&2; exit 255; fi ;;
esac
HOME=$FAKE/home exec bash -c "$*"
"""
# what stands for the environment's python and kestrel on the board
CHECK = {"passed": True, "cells": 31, "seconds": 1.5, "isa": ["portable", "neon"], "golden": {"toy": "b74f94bf" * 8}, "golden_verdict": {"toy": "as checked in"}}
FAKE_PYTHON = """#!/bin/bash
case "$1" in wheels/pip-26.3-py3-none-any.whl/pip|-m) echo "$*" >> "$FAKE/pip.log"; exit 0 ;; -c) cat > /dev/null; echo "| a table |"; exit 0 ;; esac
exit 9
"""
FAKE_KESTREL = f"""#!/bin/bash
case $1 in
  info) echo "here: neon of portable, neon, 4 threads" ;;
  check) echo '{json.dumps(CHECK)}'; [ ! -e "$FAKE/differs" ] ;;
  bench) echo '{{"kind": "decode"}}' ;;
esac
"""


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module")
def deploy(root):
    spec = importlib.util.spec_from_file_location("deploy", str(root / "board" / "deploy.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture()
def fake(tmp_path, deploy, monkeypatch):
    """A board in a folder. `python3 -m venv` there leaves stand-ins, wheels are two small files, the model is 5 MiB."""
    fake = tmp_path / "board"
    (fake / "home").mkdir(parents=True)
    (fake / "probe.json").write_text(json.dumps({**BOARD, "folder": str(fake / "home" / "kestrel")}))
    executable(fake / "bin" / "ssh", FAKE_SSH)
    executable(fake / "bin" / "python3", f"""#!/bin/bash
if [ "$1 $2" = "-m venv" ]; then rm -rf venv; mkdir -p venv/bin; cp "$FAKE/python" venv/bin/python; cp "$FAKE/kestrel" venv/bin/kestrel; exit 0; fi
exec {sys.executable} "$@"
""")
    executable(fake / "python", FAKE_PYTHON)
    executable(fake / "kestrel", FAKE_KESTREL)
    wheels = [tmp_path / name for name in ("kestrel-0.1.0-py3-none-manylinux_2_28_aarch64.whl", "pip-26.3-py3-none-any.whl")]
    for path in wheels:
        with zipfile.ZipFile(str(path), "w") as archive:
            archive.writestr("x", "x" * 1000)
    with tarfile.open(str(tmp_path / "bundle.tar"), "w") as archive:
        archive.add(str(wheels[1]), wheels[1].name)
    (tmp_path / "m.kestrel").write_bytes(os.urandom(5 * MIB))
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("PATH", f"{fake / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(deploy, "build_wheel", lambda tag: wheels[0])
    monkeypatch.setattr(deploy, "bundle", lambda wheel, board: tmp_path / "bundle.tar")

    def change(**facts):
        (fake / "probe.json").write_text(json.dumps({**json.loads((fake / "probe.json").read_text()), **facts}))

    fake_board = type("FakeBoard", (), {"root": fake, "home": fake / "home" / "kestrel", "model": tmp_path / "m.kestrel", "results": tmp_path / "results",
                                        "change": staticmethod(change), "log": staticmethod(lambda: (fake / "log").read_text())})
    return fake_board


def run(deploy, fake, capsys, monkeypatch, *more, host="pi@board"):
    """(exit code, stdout, stderr)"""
    monkeypatch.setattr(sys, "argv", ["deploy.py", host, "--model", str(fake.model), "--results", str(fake.results), *more])
    try:
        code = deploy.main()
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


def test_all_the_way_and_nothing_twice(deploy, fake, capfd, monkeypatch):
    code, out, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 0, err
    written = out.split()
    assert [os.path.splitext(p)[1] for p in written] == [".json", ".md"]
    result = json.loads(open(written[0]).read())
    assert result["check"] == CHECK and result["bench"] == [{"kind": "decode"}] and result["board"]["model"] == BOARD["model"]
    report = open(written[1]).read()
    assert report.startswith("# Raspberry Pi 5") and "31 cells, all equal" in report and "| a table |" in report and "pages of 16K" in report
    assert (fake.home / "models" / "m.kestrel").read_bytes() == fake.model.read_bytes()
    assert "--no-index" in (fake.root / "pip.log").read_text()
    assert "sudo" not in fake.log()
    (fake.root / "pip.log").unlink()
    (fake.root / "log").unlink()
    code, out, err = run(deploy, fake, capfd, monkeypatch, "--install-only")
    assert code == 0 and out == "" and "kestrel check" not in fake.log() and "cat >" not in fake.log() and "-m venv" not in fake.log() and not (fake.root / "pip.log").exists()
    assert "up to date" in err


def test_a_copy_that_broke_off_goes_on(deploy, fake, capfd, monkeypatch):
    run(deploy, fake, capfd, monkeypatch)
    (fake.home / "models" / "m.kestrel").unlink()
    (fake.root / "breaks").touch()
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and "m.kestrel broke off" in err and err.strip().endswith("client_loop: send disconnect; run again to go on")
    assert (fake.home / "models" / "m.kestrel.part").stat().st_size == 2000000
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 0 and "going on at 2" in err
    assert (fake.home / "models" / "m.kestrel").read_bytes() == fake.model.read_bytes()


def test_a_started_copy_of_another_file_is_noticed(deploy, fake, capfd, monkeypatch):
    (fake.home / "models").mkdir(parents=True)
    (fake.home / "models" / "m.kestrel.part").write_bytes(b"another model" * 1000)
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and "arrived with SHA-256" in err
    assert run(deploy, fake, capfd, monkeypatch)[0] == 0


def test_a_changed_model_is_sent_again(deploy, fake, capfd, monkeypatch):
    run(deploy, fake, capfd, monkeypatch)
    fake.model.write_bytes(os.urandom(5 * MIB))
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 0 and "models/m.kestrel, 5.0 MiB" in err and "wheels.tar," not in err
    assert (fake.home / "models" / "m.kestrel").read_bytes() == fake.model.read_bytes()


def test_a_changed_wheel_leaves_the_dependencies(deploy, fake, capfd, monkeypatch):
    run(deploy, fake, capfd, monkeypatch)
    (fake.root / "log").unlink()
    with zipfile.ZipFile(str(deploy.build_wheel("")), "w") as archive:
        archive.writestr("x", "y" * 1000)
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 0 and "kestrel's own wheel" in err and "-m venv" not in fake.log()
    assert (fake.root / "pip.log").read_text().splitlines()[-1].startswith("-m pip install") and "--no-deps --force-reinstall kestrel-" in (fake.root / "pip.log").read_text()


def test_answers_that_differ_are_exit_code_1_and_come_back(deploy, fake, capfd, monkeypatch):
    (fake.root / "differs").touch()
    executable(fake.root / "kestrel", FAKE_KESTREL.replace('"passed": true', '"passed": false'))
    code, out, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 1 and "NOT EQUAL" in err and "NOT EQUAL" in open(out.split()[1]).read()


def test_a_check_that_crashed_is_no_verdict(deploy, fake, capfd, monkeypatch):
    executable(fake.root / "kestrel", "#!/bin/sh\n[ $1 = info ] && echo here && exit 0\necho Traceback >&2; exit 1\n")
    code, out, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and out == "" and "Traceback" in err and err.strip().splitlines()[-1].startswith("deploy: kestrel check on pi@board ended without a result")


@pytest.mark.parametrize("facts, said", [
    ({"machine": "armv7l", "bits": 32}, "runs a 32-bit Python (armv7l)"), ({"bits": 32}, "runs a 32-bit Python (aarch64)"),
    ({"machine": "riscv64"}, "is riscv64, expected aarch64"), ({"python": [3, 7, 3]}, "has Python 3.7.3, expected 3.9 or newer"),
    ({"venv": False}, "has no venv module: sudo apt-get install python3-venv"), ({"libc": ["glibc", 2, 27]}, "has glibc 2.27 on aarch64, expected glibc 2.28 or newer"),
    ({"libc": ["musl", 1, 1]}, "has musl 1.1"), ({"writable": False}, "can't be written by this user"),
    ({"disk_free_bytes": 12 * MIB}, "12 MiB free in "), ({"memory_bytes": 512 * MIB, "memory_available_bytes": 100 * MIB}, "100 MiB of memory available of 512, needed 155 MiB")])
def test_a_board_that_can_not_is_refused_in_one_line(deploy, fake, capfd, monkeypatch, facts, said):
    fake.change(**facts)
    code, out, err = run(deploy, fake, capfd, monkeypatch)
    last = err.strip().splitlines()[-1]
    assert code == 2 and out == "" and last.startswith("deploy: pi@board") and said in last, err
    assert not (fake.home / "venv").exists() and "cat >" not in fake.log()


def test_no_ssh_no_host_no_python_no_model(deploy, fake, capfd, monkeypatch):
    code, _, err = run(deploy, fake, capfd, monkeypatch, host="nobody")
    assert code == 2 and err.strip().splitlines()[-1] == "deploy: look: no ssh connection to nobody: ssh: connect to host nobody port 22: No route to host; run again to go on"
    assert run(deploy, fake, capfd, monkeypatch, host="-oProxyCommand=x")[0] == 2
    (fake.root / "probe.code").write_text("3")
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and "has no python3" in err
    (fake.root / "probe.code").unlink()
    fake.model.unlink()
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and "no such file" in err
    monkeypatch.setenv("PATH", "")
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and err == "deploy: no ssh on this machine: install openssh-client\n"


def test_a_login_shell_that_talks(deploy, fake, capfd, monkeypatch):
    (fake.root / "probe.json").write_text("Welcome to the board")
    code, _, err = run(deploy, fake, capfd, monkeypatch)
    assert code == 2 and "expected JSON" in err


def test_what_the_board_says_of_itself(root, tmp_path):
    """board/on_board.py on this machine: every fact of the fake one's is there, of the same type."""
    done = subprocess.run([sys.executable, "-", "probe", str(tmp_path / "not" / "yet")], stdin=open(str(root / "board" / "on_board.py")), stdout=subprocess.PIPE, check=True)
    facts = json.loads(done.stdout)
    assert {k: type(v) for k, v in facts.items()} == {k: type(v) for k, v in {**BOARD, "folder": ""}.items()}
    assert facts["folder"] == str(tmp_path / "not" / "yet") and facts["writable"] and facts["venv"] and 0 < facts["memory_available_bytes"] <= facts["memory_bytes"]


def test_the_commands_that_it_gives_the_board_are_kestrels(deploy, tmp_path):
    """check, bench and the report from bench's JSON, with the real program: what deploy.py relies on."""
    model = toy.packed()
    call = lambda *arguments, **more: subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True, universal_newlines=True, **more).stdout  # noqa: E731
    lines = call("-m", "kestrel", "bench", str(model), "--json", *deploy.QUICK_BENCH.split())
    rows = [json.loads(line) for line in lines.splitlines()]
    table = call("-c", deploy.MARKDOWN, input="\n".join(json.dumps(r) for r in rows))
    assert len(rows) > 2 and table.count("|") > 20
    check = json.loads(call("-m", "kestrel", "check", "--json", "--quick"))
    report = deploy.report({**BOARD, "folder": "x"}, "pi@board", check, table, "2026-01-01T000000Z")
    assert "all equal; instruction sets portable" in report and "(as checked in)" in report and table.strip() in report
