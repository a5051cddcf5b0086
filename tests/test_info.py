# SPDX-License-Identifier: Apache-2.0
"""memory.py and info.py: what there is by cgroup and meminfo, what a model takes, and the refusal where it won't fit."""
from __future__ import annotations

import json

import pytest
import toy
from test_cli import kestrel

from kestrel import cli, generate, info, memory
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import KV_TYPES
from kestrel.pack import PackedModel

GIB = 1 << 30


def machine(folder, available_kib=8 << 20, cgroup="", **files):
    """A fake root: /proc/meminfo, /proc/self/cgroup, and files under /sys/fs/cgroup ("a/b/memory.max": text)."""
    (folder / "proc/self").mkdir(parents=True)
    if available_kib is not None:
        (folder / "proc/meminfo").write_text(f"MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:   {available_kib} kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return str(folder)


@pytest.mark.parametrize("cgroup, files, expected", [
    ("", {}, 8 * GIB),
    ("0::/\n", {"memory.max": "max", "memory.current": 5}, 8 * GIB),
    ("0::/app\n", {"app/memory.max": 2 * GIB, "app/memory.current": GIB}, GIB),
    ("0::/app\n", {"app/memory.max": 2 * GIB, "app/memory.current": GIB, "app/memory.stat": f"anon 5\nactive_file {GIB // 4}\ninactive_file {GIB // 2}\nfile 9\n"}, 2 * GIB - GIB // 4),
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": 1, "a/memory.max": GIB, "a/memory.current": 0}, GIB),  # the parent's limit holds
    ("0::/docker/0123\n", {"memory.max": GIB, "memory.current": 0}, GIB),  # inside a container the outer path is not there
    ("0::/../../x\n", {"memory.max": GIB, "memory.current": 0}, GIB),
    ("0::/app\n", {"app/memory.max": GIB, "app/memory.current": 2 * GIB}, -GIB),
    ("12:memory:/app\n3:cpu,cpuacct:/\n", {"memory/app/memory.limit_in_bytes": 3 * GIB, "memory/app/memory.usage_in_bytes": GIB,
                                             "memory/app/memory.stat": f"total_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}\ninactive_file 7\n"}, 3 * GIB),
    ("12:memory:/\n", {"memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000, "memory/memory.usage_in_bytes": GIB}, 8 * GIB),  # v1's way to say no limit
    ("rubbish\n\n0::\n", {"memory.max": "what", "memory.current": ""}, 8 * GIB),
])
def test_available_memory(tmp_path, cgroup, files, expected):
    assert memory.available_bytes(machine(tmp_path, cgroup=cgroup, **files)) == expected


def test_available_memory_unknown(tmp_path):
    assert memory.available_bytes(machine(tmp_path, available_kib=None)) is None
    assert memory.available_bytes(str(tmp_path / "nowhere")) is None
    assert memory.available_bytes() > 1 << 20  # this machine


def test_footprint_is_what_is_made():
    model = Model.load(toy.packed())
    for kind in KV_TYPES:
        f = model.footprint(100, kind)
        assert (f.weights, f.kv, f.ctx) == (model.packed.file_bytes, model.kv_bytes(100, kv_type=kind), 100)
        assert f.scratch == model.scratch_bytes + 33 * 4 * model.config.vocab_size and f.total == f.weights + f.kv + f.scratch
    assert model.kv_bytes(100) == model.kv_bytes(100, kv_type="f16") == model.kv_bytes(100, kv_type="f32") // 2
    longest, most = model.longest_ctx(model.footprint(128).total), model.config.max_position_embeddings
    assert longest == min(128, most) and model.longest_ctx(None) == model.longest_ctx(1 << 40) == most and model.longest_ctx(1000) == 0


@pytest.fixture
def path():
    return toy.long_toy()


def limited(monkeypatch, count):
    for module in (memory, generate, info):
        monkeypatch.setattr(module, "available_bytes", lambda: count)


def run(capsys, *args):
    """(exit code, stdout, stderr) of the command line in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_case_25_the_default_context_is_bounded_by_memory_and_said_so(monkeypatch, capsys, path):
    model = Model.load(path)
    assert model.ctx == model.config.max_position_embeddings == 4096
    limited(monkeypatch, model.footprint(1024).total)
    assert Model.load(path).ctx == 1024
    # the answer is the same
    assert Model.load(path).generate("abc", max_tokens=5).run().token_ids == model.generate("abc", max_tokens=5).run().token_ids


def test_case_25_too_large_a_context_is_refused_with_both_figures(monkeypatch, capsys, path):
    """Before anything is allocated: no cache is made."""
    model = Model.load(path)
    limited(monkeypatch, model.footprint(1024).total)
    monkeypatch.setattr(Model, "new_kv", None)
    with pytest.raises(KestrelError) as error:
        Model.load(path, ctx=4096)
    assert str(error.value) == (f"{path}: needs {memory.mib(model.footprint(4096).total)} (weights {memory.mib(model.packed.file_bytes)}, cache of 4096 positions "
                                f"{memory.mib(model.kv_bytes(4096))}, scratch {memory.mib(model.footprint(1).scratch)}), available "
                                f"{memory.mib(model.footprint(1024).total)}; a smaller --ctx or --kv int8 takes less")
    for command in (["generate", path, "--prompt", "x"], ["info", path]):
        code, out, err = run(capsys, *command, "--ctx", 4096)
        assert code == 2 and err == f"kestrel: {error.value}\n" and (command[0] == "info" or out == "")
    limited(monkeypatch, 1000)
    for command in (["generate", path, "--prompt", "x"], ["info", path]):
        code, _, err = run(capsys, *command)
        assert code == 2 and "needs" in err and "available 1 MiB" in err and err.count("\n") == 1


def test_info_says_sizes_memory_and_what_runs_here(path):
    code, out, err = kestrel("info", path, "--ctx", 1000, "--kv", "int8", "--json")
    assert (code, err) == (0, b"")
    found, model = json.loads(out), Model.load(path, kv_type="int8")
    m = found["memory"]
    assert (m["ctx"], m["kv_type"], m["weights"], m["scratch"]) == (1000, "int8", model.packed.file_bytes, model.footprint(1000).scratch)
    assert m["kv"] == {kind: model.kv_bytes(1000, kv_type=kind) for kind in KV_TYPES} and m["available"] > m["weights"]
    assert m["longest_ctx"] == {kind: 4096 for kind in KV_TYPES} and found["kv_bytes_per_token"] == model.new_kv(8).position_bytes
    code, out, _ = kestrel("info", path)
    text = out.decode()
    assert code == 0 and "memory at 4096 positions" in text and "longest context that fits: f16 4096, f32 4096, int8 4096" in text
    assert f"{found['isa']} of" in text and f"{found['threads']} threads" in text
    code, _, err = kestrel("info", path, "--ctx", 5000)
    assert code == 2 and err.decode() == "kestrel: ctx: expected 1 to 4096 (the model's), found 5000\n"


def test_an_untied_embedding_is_not_read_per_token():
    """A pass reads one row of it a token; a tied one is the head too, and is read whole."""
    untied, tied = PackedModel(toy.packed("tiny-untied")), PackedModel(toy.packed("tiny-tied"))
    assert untied.weight_bytes == sum(e.end - e.begin for n, e in untied._entries.items() if n not in untied._text) - untied.array("embedding").size
    assert tied.weight_bytes == sum(e.end - e.begin for n, e in tied._entries.items() if n not in tied._text)
