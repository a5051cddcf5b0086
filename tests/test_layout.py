# SPDX-License-Identifier: Apache-2.0
"""The house's rules that a reader relies on: imports point upstream, one door to the library, one hot loop per variant."""
from __future__ import annotations

import ast
import importlib.util
import re

import pytest

# the way of the data; a module imports only from modules before it (tokenizer and chat stand before model: a conversion's
# calibration reads text)
ORDER = ("errors", "destination", "cgroup", "cores", "_native", "parallel", "fields", "architecture", "rope", "config", "container", "vocabulary", "checkpoint", "pull", "tokenizer", "chat", "pack", "toy", "synthetic", "sampling", "memory",
         "model", "calibration", "convert", "suffix", "drafter", "acceptance", "costs", "planner", "generate", "conversation", "info", "quality", "covering", "check", "telemetry", "bench", "workloads", "boundary", "startup", "device", "report",
         "terminal", "bench_command",
         "cli", "__main__")


def imports_of(path):
    """(module of this package or top-level name of another, is ours) for each import statement, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield (parts[1], True) if parts[0] == "kestrel" and len(parts) > 1 else (parts[0], False)
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level == 0 and parts[0] != "kestrel":
                yield parts[0], False
            else:
                inside = parts if node.level else parts[1:]
                if inside and inside[0]:
                    yield inside[0], True
                else:
                    for alias in node.names:
                        yield alias.name, True


def modules(root):
    return sorted(p for p in (root / "kestrel").glob("*.py") if p.stem not in ("__init__", "_kestrel_cffi"))


def test_syntax_is_python_3_9s(root):
    for folder in ("kestrel", "csrc", "board", "cross", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))


def test_every_module_has_its_place(root):
    assert [p.stem for p in modules(root) if p.stem not in ORDER] == []


def test_imports_point_upstream(root):
    wrong = []
    for path in (p for p in modules(root) if p.stem in ORDER):
        for name, ours in imports_of(path):
            if ours and name in ORDER and ORDER.index(name) >= ORDER.index(path.stem):
                wrong.append(f"{path.name} imports {name}")
    assert wrong == []


def test_only_native_touches_cffi(root):
    touching = {p.stem for p in modules(root) for name, ours in imports_of(p) if name in ("cffi", "_kestrel_cffi")}
    assert touching == {"_native"}


def test_one_hot_loop_per_variant_file(root):
    spec = importlib.util.spec_from_file_location("csrc_build", str(root / "csrc" / "build.py"))
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    variants = [p for p in sorted((root / "csrc").glob("*.c")) if build.isa_of(p.name)]
    assert variants
    counts = {p.name: len(re.findall(r"/\* hot loop: \S.*\*/", p.read_text())) for p in variants}
    assert {name: n for name, n in counts.items() if n != 1} == {}


@pytest.mark.parametrize("folder, suffixes", [("kestrel", (".py",)), ("csrc", (".c", ".h", ".py")), ("tests", (".py", ".sh", ".c", ".h", ".json", ".md")),
                                              ("board", (".py", ".sh")), ("cross", (".py", ".sh", ".c", ".md"))])
def test_no_path_of_one_machine(root, folder, suffixes):
    """Nobody else has the folders of the machine that a file was written on."""
    alien = re.compile("|".join(["/wor" + "k/", "/tm" + "p/w/", r"(?<!\w)/ro" + "ot/", r"pypi\.or" + "g", r"deb\.debia" + "n"]))
    found = []
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            match = alien.search(path.read_text(errors="replace"))
            if match:
                found.append(f"{path.relative_to(root)}: {match[0]}")
    assert found == []
