# SPDX-License-Identifier: Apache-2.0
"""exp.h keeps its stated bounds (against long double libm, in C) and half.h converts as numpy does."""
from __future__ import annotations

import os
import re
import shlex
import subprocess

import numpy as np
import pytest


@pytest.fixture(scope="session")
def harness(request):
    named = os.environ.get("KESTREL_CHECKASM")
    return shlex.split(named) if named else request.getfixturevalue("checkasm")


def test_exp_bounds(harness, emulated):
    """Every 509th float of [-87, 88] (a prime stride) and 400,000 doubles each for exp, log, sin, cos; sparser under emulation."""
    done = subprocess.run(harness + ["--exp", "50021" if emulated else "509"], stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0, done.stdout
    assert not re.search("FAILED", done.stdout), done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if "worst" in line] == ["expf", "exp", "log", "sin", "cos"]


def test_f16_to_f32_is_exact(harness):
    done = subprocess.run(harness + ["--half", "widen"], stdout=subprocess.PIPE, check=True)
    got = np.frombuffer(done.stdout, np.uint32)
    want = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    nan = np.isnan(np.arange(65536, dtype=np.uint16).view(np.float16))
    assert got.size == 65536
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(np.float32)).all()


def test_f32_to_f16_rounds_as_ieee(harness):
    """Around every half and every midpoint of two, both signs, and a million random bit patterns; past 65504 clamped, never Inf."""
    halves = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:].astype(np.float64) + halves[:-1]).astype(np.float32) / np.float32(2)
    points = np.concatenate([halves, middles])
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    bits = np.random.default_rng(7).integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
    special = np.array([np.inf, 65504, 65519.996, 65520, 65536, 3e38, 1e-45, 0], np.float32)
    x = np.concatenate([near, bits, special])
    x = np.concatenate([x, -x]).astype(np.float32)
    done = subprocess.run(harness + ["--half", "narrow"], input=x.tobytes(), stdout=subprocess.PIPE, check=True)
    got = np.frombuffer(done.stdout, np.uint16)
    assert got.size == x.size
    nan = np.isnan(x)
    limited = np.clip(x[~nan], np.float32(-65504), np.float32(65504))
    want = limited.astype(np.float16).view(np.uint16)
    assert np.array_equal(got[~nan], want)
    assert np.isnan(got[nan].view(np.float16)).all()
