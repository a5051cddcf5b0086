# SPDX-License-Identifier: Apache-2.0
"""The kernel harness (tests/checkasm): every usable variant against portable, natively, sanitized, and on emulated cores (cases 19 and 21: a core without
dotprod, extreme weights and activations at k = 16384).

The harness's command comes from the fixture `checkasm`; KESTREL_CHECKASM, a shell-like command line, overrides it.
"""
from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest

from conftest import csrc_build


def run(command, *arguments, **environment):
    return subprocess.run(list(command) + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, env=dict(os.environ, **environment))


@pytest.fixture(scope="session")
def harness(request):
    named = os.environ.get("KESTREL_CHECKASM")
    return shlex.split(named) if named else request.getfixturevalue("checkasm")


def check_report(done, variants):
    """Exit code, closing line and one line a variant agree; every usable variant of the menu has run."""
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(rf"^{len(variants)} passed, 0 failed$", done.stdout, re.M), done.stdout[-4000:]
    ok = {tuple(line.split()[:2]) for line in done.stdout.splitlines() if line.endswith(" cases ok")}
    assert ok == variants


@pytest.fixture(scope="session")
def usable(harness):
    """{(op, variant)} that this CPU can run, as the menu says."""
    listed = run(harness, "--list")
    assert listed.returncode == 0, listed.stdout
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {tuple(row) for row in rows if len(row) == 2}


def test_every_variant_equals_portable(harness, usable, emulated):
    check_report(run(harness, KESTREL_CHECKASM_SMALL="1" if emulated else "0"), usable)


def test_another_seed(harness, usable, emulated):
    if emulated:
        check_report(run(harness, "--seed", "20240229", "--op", "matmul_int8", KESTREL_CHECKASM_SMALL="1"),
                     {pair for pair in usable if pair[0] == "matmul_int8"})
    else:
        check_report(run(harness, "--seed", "20240229"), usable)


def test_every_op_has_a_portable_variant(usable):
    assert {op for op, name in usable} == {op for op, name in usable if name == "portable"}


def test_half_conversions_of_the_cpu_are_the_integer_steps(harness):
    done = run(harness, "--half", "compare")
    assert done.returncode == 0 and done.stdout == "65536 halves, 4713410 floats: 0 different\n"


def test_nothing_matched_is_an_error(harness):
    done = run(harness, "--op", "matmul_int7")
    assert done.returncode == 2 and "nothing matches" in done.stdout


@pytest.mark.native_only
def test_sanitized(usable):
    build = csrc_build()
    try:
        done = build.build(target="checkasm", sanitize="address,undefined", quiet=True)
    except build.BuildError as error:
        pytest.fail(f"csrc/build.py --sanitize address,undefined: {error}", pytrace=False)
    report = run([str(done.checkasm)], UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1", KESTREL_CHECKASM_SMALL="1")
    assert "runtime error" not in report.stdout, report.stdout[-4000:]
    check_report(report, usable)
