# SPDX-License-Identifier: Apache-2.0
"""pull.py against a stand-in of the hub on the loopback: what is asked for, what is left alone, resuming, the cache, refusals."""
from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import toy
from test_cli import kestrel, refused

from kestrel.checkpoint import Checkpoint

pytestmark = pytest.mark.native_only
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves folder/OWNER/NAME as the hub does. requests: (method, path, Range header); cuts: {file: bytes after which each of its connections breaks off}."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requests, self.cuts = folder, [], {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self):
        """Files fetched, in order."""
        return [path.split(f"/resolve/{SHA}/")[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def refuse(self, code, kind):
        self.send_response(code)
        self.send_header("X-Error-Code", kind)
        self.send_header("X-Error-Message", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body):
        hub = self.server
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = hub.folder / parts[2] / parts[3]
            if parts[2] == "gated":
                return self.refuse(403, "GatedRepo")
            if not repo.is_dir():
                return self.refuse(404, "RepoNotFound")
            if len(parts) > 5 and parts[5] not in ("main", SHA):
                return self.refuse(404, "RevisionNotFound")
            names = sorted(p.relative_to(repo).as_posix() for p in repo.rglob("*") if p.is_file())
            raw = json.dumps({"id": "/".join(parts[2:4]), "sha": SHA, "siblings": [{"rfilename": n} for n in names]}).encode()
            headers = {"Content-Type": "application/json"}
        else:
            raw = (hub.folder / parts[0] / parts[1] / "/".join(parts[4:])).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        begin = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if begin else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(raw) - 1}/{len(raw)}")
        self.send_header("Content-Length", str(len(raw) - begin))
        self.end_headers()
        if body:
            cuts = hub.cuts.get(parts[-1])
            cut = cuts.pop(0) if cuts else len(raw)
            self.wfile.write(raw[begin:max(begin, cut)])
            if cut < len(raw):
                self.wfile.flush()
                self.connection.shutdown(2)
                self.close_connection = True


@pytest.fixture
def hub(tmp_path):
    server = Hub(tmp_path / "hub")
    for name, source in (("single", "tiny-tied"), ("sharded", "tiny-untied")):
        shutil.copytree(str(toy.GOLDEN / source), str(server.folder / "me" / name), ignore=shutil.ignore_patterns("golden.npz"))
    folder = server.folder / "me" / "sharded"
    checkpoint = Checkpoint.open(str(folder))
    tensors = {n: checkpoint.tensor(n) for n in checkpoint.names()}
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        toy.write_safetensors(folder / f"part-{i}.safetensors", {n: tensors[n] for n in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}}))
    (folder / "model.safetensors").unlink()
    for other in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "onnx/model.onnx"):  # what a conversion never reads
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"x" * 100)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(hub, tmp_path):
    return dict(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_TOKEN="", HF_HUB_OFFLINE="",
                no_proxy="*")


def pulled(*args, **environment):
    code, out, err = kestrel("pull", *args, **environment)
    assert (code, err) == (0, b""), err.decode()
    return Path(out.decode().rstrip("\n"))


@pytest.mark.parametrize("name, weights", [("single", ["model.safetensors"]), ("sharded", ["part-0.safetensors", "part-1.safetensors"])])
def test_only_what_a_conversion_reads(hub, environment, name, weights):
    folder = pulled(f"me/{name}", **environment)
    index = ["model.safetensors.index.json"] if name == "sharded" else []
    assert sorted(hub.asked()) == sorted(["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] + index + weights)
    assert sorted(p.name for p in folder.iterdir()) == sorted(hub.asked())
    ours, theirs = Checkpoint.open(str(folder)), Checkpoint.open(str(hub.folder / "me" / name))
    assert ours.fingerprint == theirs.fingerprint and ours.tokenizer_json == theirs.tokenizer_json
    hub.requests.clear()
    assert pulled(f"me/{name}", **environment) == folder and hub.asked() == []  # all is in the cache
    code, out, _ = kestrel("pull", f"me/{name}", "--json", **environment)
    assert code == 0 and json.loads(out) == {"path": str(folder), "repo": f"me/{name}"}


def test_a_broken_connection_goes_on_where_it_stopped(hub, environment):
    raw = np.random.default_rng(1).bytes(24 << 20)  # the library writes blocks of 10 MiB
    (hub.folder / "me/single/model.safetensors").write_bytes(raw)
    hub.cuts["model.safetensors"] = [12 << 20, 21 << 20]
    folder = pulled("me/single", **environment)
    assert (folder / "model.safetensors").read_bytes() == raw
    assert [r for method, path, r in hub.requests if method == "GET" and path.endswith("model.safetensors")] == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_a_run_that_failed_keeps_the_files_it_had(hub, environment):
    hub.cuts["part-1.safetensors"] = [5] * 20
    refused("pull", "me/sharded", words="me/sharded: ", **environment)
    hub.cuts.clear()
    hub.requests.clear()
    folder = pulled("me/sharded", **environment)
    assert hub.asked() == ["part-1.safetensors"] and Checkpoint.open(str(folder)).fingerprint == Checkpoint.open(str(hub.folder / "me/sharded")).fingerprint


def test_without_a_network_the_cache_serves(hub, environment):
    folder = pulled("me/single", **environment)
    gone = dict(environment, HF_ENDPOINT="http://127.0.0.1:9")  # nobody listens there
    code, out, err = kestrel("pull", "me/single", **gone)
    assert code == 0 and out.decode().strip() == str(folder) and err.decode().count("\n") == 1 and "can't be reached" in err.decode()
    hub.requests.clear()
    assert pulled("me/single", "--offline", **environment) == pulled("me/single", **dict(environment, HF_HUB_OFFLINE="1")) == folder and hub.requests == []
    assert "me/sharded: " in refused("pull", "me/sharded", **gone)
    assert "the cache holds no config.json" in refused("pull", "me/sharded", "--offline", **environment)


def test_gguf_repositories(hub, environment):
    folder = hub.folder / "me" / "quants"
    folder.mkdir()
    (folder / "a.Q8_0.gguf").write_bytes(b"GGUF8")
    assert pulled("me/quants", **environment).read_bytes() == b"GGUF8"
    (folder / "a.Q4_0.gguf").write_bytes(b"GGUF4")
    assert "--file takes one: a.Q4_0.gguf, a.Q8_0.gguf" in refused("pull", "me/quants", **environment)
    assert pulled("me/quants", "--file", "a.Q4_0.gguf", **environment).read_bytes() == b"GGUF4"
    assert "no GGUF file b.gguf; it has a.Q4_0.gguf" in refused("pull", "me/quants", "--file", "b.gguf", **environment)


@pytest.mark.parametrize("args, words", [
    (["me/nothing"], "me/nothing: no such repository"), (["me/single", "--revision", "v9"], "me/single: no revision 'v9'"),
    (["gated/model"], "gated/model: access must be asked for"), (["not a name"], "not a name: "), (["a/b/c"], "a/b/c: "), (["../../etc"], "../../etc: "),
])
def test_refusals_are_one_line(environment, args, words):
    refused("pull", *args, words=words, **environment)


@pytest.mark.parametrize("index, words", [("{}", "weight_map"), ("[", "weight_map"), ('{"weight_map": {"a": "gone.safetensors"}}', "shard gone.safetensors is missing"),
                                          ('{"weight_map": {"a": "../x.safetensors"}}', "shard ../x.safetensors is missing")])
def test_an_index_that_lies(hub, environment, index, words):
    (hub.folder / "me/sharded/model.safetensors.index.json").write_text(index)
    refused("pull", "me/sharded", words=words, **environment)


def test_without_the_extra(tmp_path):
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError\n")
    line = refused("pull", "me/single", PYTHONPATH=f"{tmp_path}:{Path(__file__).resolve().parent.parent}")
    assert "pip install 'kestrel[hub]'" in line
