# SPDX-License-Identifier: Apache-2.0
"""What makes the source readable and the start quick, beside test_layout.py: sizes, names, docstrings, lazy imports, one loop."""
from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
import toy

pytestmark = pytest.mark.native_only  # about the source

# a file past this wants a second noun; forward.c holds one pass from embedding to logits
LIMIT = {"csrc/forward.c": 520}
MOST_LINES = 460


def python_files(root):
    return [p for p in sorted((root / "kestrel").glob("*.py")) if p.name != "_kestrel_cffi.py"]


def test_files_stay_a_few_hundred_lines(root):
    sizes = {p.relative_to(root).as_posix(): len(p.read_text().splitlines())
             for folder, ends in (("kestrel", "*.py"), ("csrc", "*.[ch]"), ("csrc", "*.py")) for p in (root / folder).glob(ends) if p.name != "_kestrel_cffi.py"}
    assert len(sizes) > 30
    assert {name: n for name, n in sizes.items() if n > LIMIT.get(name, MOST_LINES)} == {}


def test_names_say_what_a_thing_is(root):
    """No class or function ends in a word that means nothing, no kernel in a word that ages."""
    found = []
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and re.search(r"(Manager|Helper|Utils?|Misc|Wrapper)$|_(v2|fast|opt|new|old|helper|util)$", node.name):
                found.append(f"{path.name}: {node.name}")
    for path in sorted((root / "csrc").glob("*.[ch]")):
        found += [f"{path.name}: {m}" for m in re.findall(r"\bkestrel_\w*_(?:v2|fast|opt|new|old)\b", path.read_text())]
    assert found == []


def public(tree):
    """Public functions, classes and methods of a module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield inner


def test_everything_public_says_what_it_does(root):
    silent = []
    for path in python_files(root):
        tree = ast.parse(path.read_text())
        if path.name != "__main__.py" and not ast.get_docstring(tree):
            silent.append(path.name)
        for node in public(tree):
            if not ast.get_docstring(node):
                silent.append(f"{path.name}: {node.name}")
    assert silent == []


def test_every_source_names_its_licence(root):
    files = [*python_files(root), *(root / "csrc").glob("*.[ch]"), *(root / "csrc").glob("*.py")]
    assert [p.name for p in files if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(p.read_text().splitlines()[:3])] == []


def test_one_way_to_run_a_pass_and_one_loop(root):
    """kestrel_step is called in model.py alone; kestrel_sample too; only generate.py commits tokens."""
    callers = {name: {p.stem for p in python_files(root) if name in p.read_text()} for name in ("lib.kestrel_step", "lib.kestrel_sample", "acceptance.commit(")}
    assert callers == {"lib.kestrel_step": {"model"}, "lib.kestrel_sample": {"model"}, "acceptance.commit(": {"generate"}}


def test_no_transcendental_of_libm_or_numpy_after_the_logits(root):
    """Those differ between machines; kestrel has its own (exp.h)."""
    forbidden = re.compile(r"(?<![\w.])(?:expf?|logf?|sinf?|cosf?|tanhf?|powf?|erff?|exp2f?|log2f?|expm1f?)\(")
    found = []
    for path in sorted((root / "csrc").glob("*.[ch]")):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        found += [f"{path.name}: {m}" for m in forbidden.findall(code)]
    for stem in ("model", "sampling", "generate", "acceptance", "drafter", "_native", "pack", "check"):
        found += [f"{stem}.py: {m}" for m in re.findall(r"\b(?:np|math)\.(?:exp|log|sin|cos|tanh|power|softmax)\b", (root / "kestrel" / f"{stem}.py").read_text())]
    assert found == []


def test_nothing_is_estimated_or_contracted(root):
    """Reciprocal estimates differ between CPUs."""
    estimates = re.compile(r"vrecpe|vrsqrte|_mm\w*_rcp|_mm\w*_rsqrt|fast-math|STDC FP_CONTRACT ON")
    assert [p.name for p in sorted((root / "csrc").glob("*.[ch]")) if estimates.search(p.read_text())] == []


def test_step_allocates_nothing(root):
    for name in ("forward.c", "matmul.c", "attention.c", "quantize_rows.c", "norm.c", "rope.c", "activation.c"):
        assert not re.search(r"\b(?:malloc|calloc|realloc|aligned_alloc|free)\s*\(", (root / "csrc" / name).read_text()), name


@pytest.mark.parametrize("module, heavy", [
    ("kestrel.cli", ("numpy", "tokenizers", "jinja2", "tqdm", "gguf", "safetensors")), ("kestrel.generate", ("tokenizers", "jinja2", "tqdm", "gguf", "safetensors"))])
def test_importing_is_light(module, heavy):
    code = f"import sys, {module}\nprint([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout == "[]\n"


def test_an_answer_loads_only_what_it_needs():
    code = ("import sys\nfrom kestrel import Model\nModel.load(sys.argv[1]).generate('abc', max_tokens=3).run()\n"
            "print([m for m in ('jinja2', 'tqdm', 'gguf', 'safetensors', 'kestrel.checkpoint', 'kestrel.convert') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code, toy.packed()], stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout == "[]\n"
