# SPDX-License-Identifier: Apache-2.0
"""The packed file mapped or read: the same bytes, and no SIGBUS from a file that changes while it is opened (case 28)."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.pack import PackedModel
from kestrel.toy import write_toy

pytestmark = pytest.mark.native_only


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("mapping") / "toy.kestrel")
    write_toy(path)
    return path


def test_read_or_mapped_is_the_same(path):
    """--no-mmap: the same bytes in memory of our own, so that the file may go away."""
    mapped, copy = PackedModel(path), PackedModel(path, use_mmap=False)
    for name in ("embedding", "final_norm", "layers.0.qkv", "tokenizer.json"):
        assert mapped.array(name).tobytes() == copy.array(name).tobytes()
        assert copy.array(name).ctypes.data % 64 == 0 and not copy.array(name).flags.writeable and not mapped.array(name).flags.writeable
    results = [Model.load(path, use_mmap=m).generate("abcabc", max_tokens=8).run().token_ids for m in (True, False)]
    assert results[0] == results[1]
    own = path + ".own"
    with open(path, "rb") as source, open(own, "wb") as target:
        target.write(source.read())
    model = Model.load(own, use_mmap=False)
    os.truncate(own, 100)
    assert model.generate("abcabc", max_tokens=8).run().token_ids == results[0]
    done = subprocess.run([sys.executable, "-m", "kestrel", "generate", path, "--prompt", "abcabc", "--max-tokens", "8", "--json", "--no-mmap"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0 and json.loads(done.stdout)["token_ids"] == results[0]


@pytest.mark.parametrize("use_mmap", (True, False))
def test_a_file_that_shrinks_while_it_is_opened(path, tmp_path, monkeypatch, use_mmap):
    """Between the header and the mapping: one line, no SIGBUS. (Every truncation before that is case 28, in test_pack.)"""
    import kestrel.pack

    whole, path = path, str(tmp_path / "m")
    with open(whole, "rb") as source, open(path, "wb") as target:
        target.write(source.read())
    size = os.path.getsize(path)
    read = kestrel.pack.read_safetensors_header

    def then_truncate(name):
        result = read(name)
        os.truncate(path, size - 64)
        return result

    monkeypatch.setattr(kestrel.pack, "read_safetensors_header", then_truncate)
    with pytest.raises(KestrelError, match=f"expected {size} bytes, found {size - 64}: the file changes"):
        PackedModel(path, use_mmap)
