# SPDX-License-Identifier: Apache-2.0
"""The command line as its users meet it: a process, its two streams, its exit code."""
from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import toy

from kestrel import _native
from kestrel.convert import convert
from kestrel.generate import Model


def kestrel(*args, stdin=b"", **environment):
    """(exit code, stdout, stderr) of `kestrel args`, bytes; stdin closed unless given."""
    done = subprocess.run([sys.executable, "-m", "kestrel", *map(str, args)], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=dict(os.environ, **environment))
    return done.returncode, done.stdout, done.stderr


def refused(*args, words="", **options):
    """The one line on stderr of a command that must exit with 2."""
    code, out, err = kestrel(*args, **options)
    text = err.decode()
    assert code == 2, (code, text)
    assert out == b"" and text.count("\n") == 1 and text.endswith("\n"), text
    assert text.startswith("kestrel") and "Traceback" not in text
    assert words in text, text
    return text


@pytest.fixture(scope="module")
def path():
    return toy.packed("tiny-tied", eos_token_id=None)


@pytest.fixture(scope="module")
def answer(path):
    """What the package itself says to "def add(a, b)"."""
    return Model.load(path).generate("def add(a, b)", max_tokens=20, draft=0).run()


def test_generate_json(path, answer):
    code, out, err = kestrel("generate", path, "--prompt", "def add(a, b)", "--max-tokens", 20, "--json", "--threads", 2)
    assert (code, err) == (0, b"") and out.count(b"\n") == 1
    result = json.loads(out)
    types = {"text": str, "token_ids": list, "prompt_tokens": int, "completion_tokens": int, "finish_reason": str, "forwards": int, "proposed": int,
             "accepted": int, "accepted_histogram": list, "seconds": dict, "tokens_per_second": float, "isa": str, "threads": int, "sha256": str}
    assert {key: type(result[key]) for key in types} == types
    assert set(result["seconds"]) == {"load", "prefill", "decode", "draft", "saved"} and all(isinstance(v, float) for v in result["seconds"].values())
    assert result["forwards_saved"] == 20 - result["forwards"]
    assert result["token_ids"] == answer.token_ids and result["text"] == answer.text
    assert (result["prompt_tokens"], result["completion_tokens"], result["finish_reason"]) == (len(answer.prompt_ids), 20, "length")
    assert result["isa"] == _native.choose_isa(None) and result["threads"] == 2
    assert result["sha256"] == hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in answer.token_ids)).hexdigest()


def test_generate_text_is_all_of_stdout(path, answer, tmp_path):
    """Prompt from the option, a file, standard input: the text and a newline, nothing on stderr when it is no terminal."""
    (tmp_path / "prompt").write_bytes(b"def add(a, b)")
    for args, stdin in ((["--prompt", "def add(a, b)"], b""), (["--prompt-file", str(tmp_path / "prompt")], b"unread"), ([], b"def add(a, b)")):
        assert kestrel("generate", path, *args, "--max-tokens", 20, stdin=stdin) == (0, (answer.text + "\n").encode(), b"")


@pytest.mark.parametrize("options", [["--draft", "off"], ["--draft", "0"], ["--draft", "auto"], ["--draft", "16"], ["--chunk", "3"], ["--threads", "1"],
                                     ["--prefill-threads", "2"], ["--threads", "3", "--draft", "7", "--chunk", "1", "--ctx", "200"], ["--temperature", "0", "--seed", "9"]])
def test_options_that_must_not_show(path, answer, options):
    code, out, _ = kestrel("generate", path, "--prompt", "def add(a, b)", "--max-tokens", 20, "--json", *options)
    assert code == 0 and json.loads(out)["token_ids"] == answer.token_ids


def test_sampling_options(path):
    options = dict(temperature=1.5, top_k=30, top_p=0.9, min_p=0.01, seed=2 ** 64 - 1)
    expected = Model.load(path).generate("x", max_tokens=15, **options).run().token_ids
    args = [a for k, v in options.items() for a in ("--" + k.replace("_", "-"), v)]
    code, out, _ = kestrel("generate", path, "--prompt", "x", "--max-tokens", 15, "--json", *args)
    assert code == 0 and json.loads(out)["token_ids"] == expected
    assert expected != Model.load(path).generate("x", max_tokens=15).run().token_ids


def test_stop_may_be_given_again(path, answer):
    text = answer.text
    first, second = text[4:6], text[2:4]
    code, out, _ = kestrel("generate", path, "--prompt", "def add(a, b)", "--max-tokens", 20, "--stop", first, "--stop", second, "--json")
    result = json.loads(out)
    assert result["text"] == text[:min(text.index(first), text.index(second))] and result["finish_reason"] == "stop"


def test_drafts_from_a_file_and_explained(path, answer, tmp_path):
    """The answer itself as the text to follow; stdout is the answer, stderr a line a round and one at the end."""
    source = tmp_path / "source"
    source.write_bytes(answer.text.encode())
    args = ["generate", path, "--prompt", "def add(a, b)", "--max-tokens", 20, "--draft-from", source, "--explain"]
    for draft in ("auto", "5"):
        code, out, err = kestrel(*args, "--draft", draft, "--json")
        result = json.loads(out)
        assert code == 0 and result["token_ids"] == answer.token_ids
        lines = err.decode().splitlines()
        assert len(lines) == result["forwards"] + 1
        pattern = r"kestrel: (no draft|(text|suffix|lookup), match (\d+)): width (\d+), accepted (\d+), [0-9.]+ ms, ledger [+-][0-9.]+ ms"
        rounds = [re.fullmatch(pattern, line) for line in lines[:-1]]
        assert all(rounds), lines
        assert sum(int(r[5]) for r in rounds) == result["accepted"] and sum(int(r[4]) - 1 for r in rounds) == result["proposed"]
        assert lines[-1].startswith(f"kestrel: 20 tokens in {result['forwards']} forwards, ")
        assert f"accepted {result['accepted']} of {result['proposed']} drafted, saved {20 - result['forwards']} forwards" in lines[-1]
    assert result["forwards"] < 20 and any(r[2] == "text" for r in rounds)
    assert kestrel(*args, "--show-drafts")[1] == (answer.text + "\n").encode()  # plain when stdout is no terminal


def test_drafts_shown_in_a_terminal():
    """The model says abcde over and over; a round brings three letters that were drafted and one that was not."""
    master, slave = os.openpty()
    script = toy.Script([b"a", b"b", b"c", b"d", b"e"], ends=False)
    args = [sys.executable, "-m", "kestrel", "generate", script.path, "--prompt", "abcdeabcde", "--max-tokens", "9", "--draft", "3"]
    process = subprocess.Popen(args + ["--show-drafts"], stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert process.wait() == 0
    green = b"\x1b[32m%b\x1b[0m"
    plain = subprocess.run(args, stdout=subprocess.PIPE, check=True).stdout
    assert re.sub(rb"\x1b\[\d*m", b"", shown).replace(b"\r\n", b"\n") == plain == b"abcdeabcd\n"
    assert shown == b"".join([green % b"a", green % b"b", green % b"c", b"d", green % b"e", green % b"a", green % b"b", b"c", b"d\r\n"])


def test_impossible_drafts(path, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    refused("generate", path, "--prompt", "x", "--draft-from", tmp_path / "none", words="none: No such file")
    refused("generate", path, "--prompt", "x", "--draft-from", tmp_path / "empty", words="expected a text to draft from, found nothing")
    refused("generate", path, "--prompt", "x", "--draft-from", path, words="not UTF-8")
    refused("generate", path, "--prompt", "x", "--draft", "off", "--draft-from", __file__, words="draft_from: expected draft auto or 1 to 32")
    refused("generate", path, "--prompt", "x", "--show-drafts", "--json", words="--show-drafts: not with --json")


def test_chat(real_model_int8):
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "The capital of France?"}]
    expected = Model.load(str(real_model_int8)).generate(messages, max_tokens=12).run()
    args = ["generate", real_model_int8, "--chat", "--prompt", messages[1]["content"], "--max-tokens", 12]
    code, out, err = kestrel(*args, "--system", messages[0]["content"], "--json")
    assert code == 0 and err == b""
    assert json.loads(out)["token_ids"] == expected.token_ids and json.loads(out)["prompt_tokens"] == len(expected.prompt_ids)
    assert json.loads(kestrel(*args, "--json")[1])["prompt_tokens"] != len(expected.prompt_ids)


def test_convert_info(tmp_path):
    for weights in ("int8", "f32"):
        target = tmp_path / weights
        code, out, err = kestrel("convert", toy.GOLDEN / "tiny-untied", target, "--weights", weights, "--json")
        assert (code, err) == (0, b"")
        result = json.loads(out)
        assert result["bytes"] == target.stat().st_size and result["weights"] == weights and result["path"] == str(target)
        assert target.read_bytes() == open(toy.packed("tiny-untied", weights), "rb").read()
        code, out, err = kestrel("info", target, "--json")
        info = json.loads(out)
        assert (code, err) == (0, b"")
        assert (info["weights"], info["vocab_size"], info["head_dim"], info["num_key_value_heads"]) == (weights, 384, 32, 2)
        assert info["isa"] in info["isa_available"] and info["isa_available"][0] == "portable"
        assert info["kv_bytes_per_token"] == 2 * 2 * 64 * (4 if weights == "f32" else 2)
        code, out, err = kestrel("info", target)
        assert code == 0 and err == b"" and weights in out.decode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f32", "int8"]
    code, out, err = kestrel("convert", toy.GOLDEN / "tiny-untied", tmp_path / "again")  # int8 is what is meant
    assert code == 0 and out and (tmp_path / "again").read_bytes() == (tmp_path / "int8").read_bytes()


def test_quality(tmp_path):
    text = tmp_path / "text"
    text.write_text("def add(a, b):\n    return a + b\n" * 3)
    for other, zero in (("f32", True), ("int8", False)):
        code, out, err = kestrel("quality", toy.packed("tiny-tied", other), toy.packed("tiny-tied", "f32"), "--text", text, "--json")
        assert (code, err) == (0, b"")
        result = json.loads(out)
        assert set(result) == {"mean_kl", "p99_kl", "argmax_agreement", "perplexity", "perplexity_reference", "positions"}
        assert result["positions"] > 30 and result["perplexity_reference"] > 1
        assert (abs(result["mean_kl"]) < 1e-12 and result["argmax_agreement"] == 1) == zero
        assert result["mean_kl"] < 1
    refused("quality", toy.packed("tiny-tied"), toy.packed("tiny-untied", "f32"), "--text", text, words="vocabulary")
    refused("quality", toy.packed("tiny-tied", "f32"), toy.packed("tiny-tied"), words="expected a reference packed with --weights f32, found int8 weights")


def test_version_and_help():
    code, out, err = kestrel("--version")
    assert code == 0 and re.fullmatch(rb"kestrel \d+\.\d+\.\d+\n", out)
    for command in ([], ["convert"], ["generate"], ["info"], ["check"], ["quality"]):
        code, out, err = kestrel(*command, "--help")
        assert code == 0 and out.startswith(b"usage: kestrel") and err == b""


# --- refusals ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    (["--max-tokens", "0"], "--max-tokens"), (["--max-tokens", "x"], "--max-tokens"), (["--max-tokens", "9" * 23], "max_tokens: expected an integer from 1 to 2^62"),
    (["--threads", "1.5"], "--threads: expected an integer from 1, found 1.5"), (["--draft", "x"], "draft: expected off, auto or 0 to 32"),
    (["--draft", "33"], "draft: expected"), (["--draft", "-1"], "draft"), (["--threads", "0"], "--threads"), (["--threads", "1000"], "threads: expected"),
    (["--chunk", "0"], "--chunk"), (["--chunk", "100000"], "chunk: expected"), (["--ctx", "0"], "--ctx"), (["--ctx", "513"], "ctx: expected 1 to 512"),
    (["--temperature", "-1"], "temperature"), (["--temperature", "nan"], "temperature"), (["--temperature", "warm"], "--temperature"),
    (["--top-p", "0"], "top_p"), (["--top-p", "1.1"], "top_p"), (["--min-p", "2"], "min_p"), (["--top-k", "-1"], "top_k"), (["--seed", "-1"], "seed"),
    (["--seed", str(1 << 64)], "seed"), (["--stop", ""], "stop: expected"), (["--surprise"], "--surprise"), (["--system", "x"], "--system: only with --chat"),
    (["--prompt-file", "x"], "not allowed with")], ids=lambda v: "_".join(v) if isinstance(v, list) else "")
def test_impossible_options(path, options, words):
    refused("generate", path, "--prompt", "abc", *options, words=words)


def test_impossible_prompts(path, tmp_path):
    (tmp_path / "latin1").write_bytes("é".encode("latin-1"))
    refused("generate", path, "--prompt-file", tmp_path / "latin1", words=f"{tmp_path / 'latin1'}: not UTF-8 at byte 0")
    refused("generate", path, stdin=b"ab\xff", words="stdin: not UTF-8 at byte 2")
    refused("generate", path, "--prompt-file", tmp_path / "none", words="No such file")
    refused("generate", path, "--prompt-file", tmp_path, words="directory")
    refused("generate", path, "--prompt", "a" * 2000, words="leave no room in a context of 512")
    refused("generate", path, "--prompt", b"\xff".decode("utf-8", "surrogateescape"), words="surrogate")


def test_an_empty_prompt(tmp_path):
    """tiny-tied's prompts have no BOS to begin with."""
    refused("generate", toy.packed("tiny-tied"), "--prompt", "", words="prompt: empty")
    refused("generate", toy.packed("tiny-tied"), words="prompt: empty")


def test_no_chat_template(tmp_path):
    """Case 38: chat refuses clearly, completion works."""
    folder = toy.checkpoint("tiny-tied")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    convert(str(folder), str(tmp_path / "m"), "f32")
    assert "template" in refused("generate", tmp_path / "m", "--chat", "--prompt", "abc")
    assert kestrel("generate", tmp_path / "m", "--prompt", "abc", "--max-tokens", 2)[0] == 0


def test_missing_files(tmp_path):
    nowhere = tmp_path / "nowhere"
    for command in (["generate", nowhere, "--prompt", "x"], ["info", nowhere], ["convert", nowhere, tmp_path / "out"], ["quality", nowhere, nowhere],
                    ["check", nowhere]):
        assert str(nowhere) in refused(*command)
    assert list(tmp_path.iterdir()) == []


def test_wrong_files(tmp_path, path):
    refused("convert", path, tmp_path / "out")
    refused("convert", tmp_path, tmp_path / "out", words="config.json")
    refused("convert", toy.GOLDEN / "tiny-tied", tmp_path / "no" / "out", words="does not exist")
    refused("convert", toy.GOLDEN / "tiny-tied", tmp_path, words="found a folder")
    refused("convert", toy.GOLDEN / "tiny-tied", tmp_path / "out", "--weights", "int3", words="--weights")
    refused("info", toy.GOLDEN / "tiny-tied" / "model.safetensors", words="not a kestrel file")
    refused("info", toy.GOLDEN / "tiny-tied", words="folder")
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(str(tmp_path / "pipe"))
    for command in (["info"], ["convert"]):
        refused(*command, tmp_path / "pipe", *[tmp_path / "out"] * (command == ["convert"]), words="pipe: expected a regular file")
    os.remove(str(tmp_path / "pipe"))
    assert list(tmp_path.iterdir()) == []


def test_no_command():
    refused(words="command")
    refused("surprise", words="surprise")


# --- streams and signals -----------------------------------------------------------------------------------------------------------

def test_a_reader_that_goes_away(path):
    """`kestrel generate | head -c 1`: no traceback, an honest code."""
    process = subprocess.Popen([sys.executable, "-m", "kestrel", "generate", path, "--prompt", "abc", "--max-tokens", "400"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) in (0, 141)
    assert b"Traceback" not in err and b"Exception" not in err


@pytest.mark.parametrize("command", [["generate", "--prompt", "hi", "--max-tokens", "3"], ["generate", "--prompt", "hi", "--max-tokens", "3", "--json"], ["info"], ["info", "--help"]])
def test_a_full_disk_under_stdout(path, command):
    with open("/dev/full", "wb", buffering=0) as full:
        done = subprocess.run([sys.executable, "-m", "kestrel", command[0], path, *command[1:]], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE,
                              env=dict(os.environ, PYTHONUNBUFFERED=""))
    assert (done.returncode, done.stderr) == (2, b"kestrel: stdout: No space left on device\n")


@pytest.mark.parametrize("closed, command, code, err", [
    (1, ["info"], 2, b"kestrel: stdout: closed\n"), (0, ["generate"], 2, b"kestrel: stdin: closed\n"), (0, ["chat"], 2, b"kestrel: stdin: closed\n"),
    (0, ["generate", "--prompt", "x", "--max-tokens", "2"], 0, b""), (2, ["info"], 0, b"")])
def test_closed_streams(closed, command, code, err):
    done = subprocess.run([sys.executable, "-m", "kestrel", command[0], toy.long_toy(), *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, preexec_fn=lambda: os.close(closed))
    assert (done.returncode, done.stderr) == (code, err) and (closed == 2 or bool(done.stdout) == (code == 0))


def test_ctrl_c(real_model_int8):
    """130, within a second, and no traceback."""
    process = subprocess.Popen([sys.executable, "-m", "kestrel", "generate", str(real_model_int8), "--prompt", "Once upon a time", "--max-tokens", "4000",
                                "--ignore-end"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)  # it is answering
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 1.5
    assert process.returncode == 130 and b"Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_ended_leaves_nothing(root, tmp_path, number):
    process = subprocess.Popen([sys.executable, "-m", "kestrel", "convert", str(root / "tests" / "golden" / "tiny-llama3"), str(tmp_path / "out.kestrel")],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not list(tmp_path.glob(".kestrel-*")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_nohup_keeps_its_choice(path):
    """A hang-up that the caller ignores ends nothing."""
    process = subprocess.Popen([sys.executable, "-m", "kestrel", "generate", path, "--max-tokens", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for _ in range(20):     # during the imports and while it waits for the prompt
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    out, err = process.communicate(b"abc", timeout=60)
    assert process.returncode == 0 and out, err


def test_ctrl_c_during_the_imports(tmp_path):
    """Ended by the signal itself, without a word: nothing of the program is there yet to say one."""
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code, out, err = kestrel("info", "x", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert (code, out, err) == (-signal.SIGINT, b"", b"")


def test_output_without_a_utf8_locale(path):
    """A bare C locale: text still goes out as UTF-8."""
    script = toy.Script(["é😀".encode(), b" ok"])
    code, out, err = kestrel("generate", script.path, "--prompt", "x", "--max-tokens", 6, LC_ALL="C", PYTHONIOENCODING="", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert code == 0, err
    assert "é😀 ok" in out.decode("utf-8")
