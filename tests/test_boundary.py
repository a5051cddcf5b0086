# SPDX-License-Identifier: Apache-2.0
"""kestrel bench --speculation: what it runs, what its lines say, and what it refuses. Speeds are tested on a clock that counts passes."""
from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest

import toy

from kestrel import cli
from kestrel import boundary as boundary_module
from kestrel.boundary import LENGTHS, Scripted, boundary, draw_picture, in_loop, markdown, worst_window
from kestrel.errors import KestrelError
from kestrel.generate import Model
from kestrel.model import ForwardModel
from kestrel.toy import CONFIG, write_toy
from kestrel.workloads import Workload, builtin_workloads, every, read_workloads

pytestmark = pytest.mark.native_only  # Python alone, the same everywhere

TEXTS = [Workload("copy", [("abcabcabcabc",), ("one two one two",)]), Workload("talk", [("hello", "and then?")])]
WRONG = Workload("hostile", [("a tale of x",)], "wrong")
RIGHT = Workload("always right", [("why is y",)], "right")
ROW = 0.02  # what a row more costs on the counting clock, in plain passes


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = str(tmp_path_factory.mktemp("boundary") / "toy.kestrel")
    write_toy(where)
    return where


@pytest.fixture(scope="module")
def looping():
    """A model that says the same six tokens again and again."""
    return toy.Script([b"one", b" two", b" three", b" four", b" five", b" six"], ends=False).path


@pytest.fixture
def counting_clock(monkeypatch):
    """A pass takes 1 and ROW a row beyond the first; nothing else takes time."""
    now = [0.0]
    forward = ForwardModel.forward

    def counted(model, kv, tokens, wanted=0, **more):
        now[0] += 1.0 + ROW * (len(tokens) - 1)
        return forward(model, kv, tokens, wanted, **more)

    monkeypatch.setattr(ForwardModel, "forward", counted)
    monkeypatch.setattr(boundary_module._Model, "clock", staticmethod(lambda: now[0]))
    return now


def run(path, workloads, **settings):
    return list(boundary(path, workloads, **{"tokens": 40, "samples": 1, "threads": 1, **settings}))


# --- what the lines say --------------------------------------------------------------------------------------------------------

def test_every_workload_has_its_line(path):
    seen = []
    rows = run(path, [*TEXTS, WRONG, RIGHT], samples=2, progress=lambda done, total: seen.append((done, total)))
    assert [r["workload"] for r in rows] == ["copy", "talk", "hostile", "always right", "overall"]
    runs = 2 * (2 * 5 + 5 + 5 + 6)
    assert seen == [(i, runs) for i in range(runs + 1)]
    for r in rows:
        json.dumps(r, allow_nan=False)
        assert r["kind"] == "speculation" and r["draft"] == "auto" and r["identical"] is True
        assert r["ratio"] == r["on"] / r["off"] and r["efficiency"] == r["ratio"] / r["tokens_per_forward"]
        histogram = r["accepted_histogram"]
        assert sum(histogram) == r["forwards"] and sum(i * n for i, n in enumerate(histogram)) == r["accepted"] <= r["proposed"]
        assert set(r["fixed"]) == {str(k) for k in LENGTHS} | ({"15"} if r["workload"] == "always right" else set())
        assert r["fixed"][r["best_fixed"]]["ratio"] == max(f["ratio"] for f in r["fixed"].values())
        assert 0 < r["lookup_share"] < 1
        assert r["tokens"] == 40 * r["answers"] and r["costs"]["1"] == 1.0
        # auto begins with a plain round, which is not counted; without stops every round brings its accepted tokens and a bonus or ends
        assert r["tokens_per_forward"] == 2 * 39 * r["answers"] / r["forwards"]
        assert (r["model"], r["weights"], r["kv_type"], r["threads"], r["samples"], r["max_tokens"]) == ("toy.kestrel", "int8", "f16", 1, 2, 40)
    assert [r["drafter"] for r in rows] == [None, None, "wrong", "right", None]
    copy, talk, *_, overall = rows
    assert overall["answers"] == copy["answers"] + talk["answers"] == 4
    assert overall["accepted_histogram"] == [sum(n) for n in zip(*(r["accepted_histogram"] + [0] * (33 - len(r["accepted_histogram"]))
                                                                   for r in (copy, talk)))][:len(overall["accepted_histogram"])]
    assert min(copy["ratio"], talk["ratio"]) <= overall["ratio"] * (1 + 1e-9) and overall["ratio"] <= max(copy["ratio"], talk["ratio"]) * (1 + 1e-9)


def test_a_dialogue_goes_on_with_the_answers(path):
    talk = run(path, TEXTS[1:], tokens=12)[0]
    model = Model.load(path, threads=1)
    first = model.generate("hello\n\n", max_tokens=12, draft="off").run()
    second = model.encode(f"hello\n\n{first.text}\n\nand then?\n\n")
    assert [p["prompt_tokens"] for p in talk["prompts"]] == [7, len(second)]
    assert [p["tokens"] for p in talk["prompts"]] == [12, 12]


def test_modes_run_in_turn_and_keep_their_own_costs(path, monkeypatch):
    calls = []
    generate = boundary_module._Model.generate

    def spying(model, prompt, draft, **settings):
        calls.append((draft, id(model.costs), settings["max_tokens"]))
        return generate(model, prompt, draft=draft, **settings)

    monkeypatch.setattr(boundary_module._Model, "generate", spying)
    run(path, TEXTS[:1], samples=2)
    modes = ["off", "auto", "2", "4", "8"]
    assert [c[0] for c in calls[:5]] == modes and {c[2] for c in calls[:5]} == {32}  # these warm up
    orders = [[c[0] for c in calls[5 + 5 * i:10 + 5 * i]] for i in range(4)]
    assert all(sorted(order) == sorted(modes) for order in orders) and len(calls) == 25
    assert [order[0] for order in orders] == ["off", "auto", "auto", "2"]
    measured = calls[5:]
    assert len({c[1] for c in measured}) == 5 and len({c[:2] for c in measured}) == 5


def test_the_tables_show_every_workload(path):
    rows = run(path, [TEXTS[0], WRONG])
    text = markdown(rows)
    assert text.startswith("toy.kestrel: int8 weights, f16 cache,")
    speeds, rounds = ([[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()] for block in text.split("\n\n")[1:])
    assert [line[0] for line in speeds[2:]] == [line[0] for line in rounds[2:]] == ["copy", "hostile"]
    assert all(len(line) == len(speeds[0]) for line in speeds)
    for line, r in zip(speeds[2:], rows):
        assert line[2:5] == [f"{r['off']:.1f}", f"{r['on']:.1f}", f"{r['ratio']:.3f}"] and line[-1] == "yes"
    no = markdown([{**rows[0], "identical": False, "on": None, "ratio": None}])
    assert no.splitlines()[4].endswith("| NO |") and "| - | - |" in no.splitlines()[4]


def test_an_answer_of_one_token_has_no_speed(path):
    row = run(path, TEXTS[:1], tokens=1)[0]
    assert row["off"] is row["on"] is row["ratio"] is row["tokens_per_forward"] is row["worst_window"] is None
    assert row["identical"] and row["accepted_histogram"] == [0] and row["tokens"] == 2
    json.dumps(row, allow_nan=False)
    assert "copy" in markdown([row])


# --- scripted drafters -----------------------------------------------------------------------------------------------------------

def rounds_of(tokens, k, per_round):
    """Widths of the rounds after the first with a draft of k for each, clipped to the room left, when every one brings per_round(width) tokens."""
    left, widths = tokens, []
    while left:
        width = min(k, left - 1) + 1
        widths.append(width)
        left -= per_round(width)
    return widths[1:]


def cost(widths):
    return sum(1.0 + ROW * (w - 1) for w in widths)


def test_a_drafter_that_is_always_wrong(path, counting_clock):
    row = run(path, [WRONG], tokens=256)[0]
    assert row["tokens_per_forward"] == 1.0 and row["accepted_histogram"] == [255] and row["accepted"] == 0 < row["proposed"]
    assert row["off"] == pytest.approx(1.0, rel=1e-12)
    assert 0.99 <= row["ratio"] < 1.0 and row["identical"]
    assert 64 / (64 + 9 * ROW + 0.005 * 256) <= row["worst_window"] < 1.0
    for k in LENGTHS:
        assert row["fixed"][str(k)]["tokens_per_forward"] == 1.0
        assert row["fixed"][str(k)]["ratio"] == pytest.approx(255 / cost(rounds_of(256, k, lambda width: 1)), rel=1e-9)
    assert row["best_fixed"] == "2"


def test_nothing_mends_what_a_wrong_drafter_breaks(looping, counting_clock):
    """The session's own lookup would guess this text."""
    prompt = [("say it",)]
    plain, hostile = run(looping, [Workload("plain", prompt)], tokens=120)[0], run(looping, [Workload("hostile", prompt, "wrong")], tokens=120)[0]
    assert plain["fixed"]["4"]["tokens_per_forward"] > 3 and plain["tokens_per_forward"] > 3
    assert hostile["tokens_per_forward"] == 1.0 and {f["tokens_per_forward"] for f in hostile["fixed"].values()} == {1.0}
    assert plain["identical"] and hostile["identical"]


def test_lookup_is_a_share_of_the_time(path, counting_clock, monkeypatch):
    propose = Scripted.propose

    def slow(drafter, most):
        counting_clock[0] += 0.01
        return propose(drafter, most)

    monkeypatch.setattr(Scripted, "propose", slow)
    for work in (WRONG, RIGHT):
        row = run(path, [work], tokens=256)[0]
        seconds = 255 / row["on"]
        passes = row["forwards"] + ROW * row["proposed"]
        assert 0 < row["lookup_share"] == pytest.approx((seconds - passes) / seconds, rel=1e-6)
        assert row["ratio"] >= 0.99


def test_a_drafter_that_is_always_right(path, counting_clock):
    row = run(path, [RIGHT], tokens=256)[0]
    assert row["identical"] and row["accepted"] == row["proposed"] > 0
    assert row["tokens_per_forward"] > 8 and row["ratio"] > 6
    for k in (*LENGTHS, 15):
        widths = rounds_of(256, k, lambda width: width)
        fixed = row["fixed"][str(k)]
        assert fixed["tokens_per_forward"] == sum(widths) / len(widths)
        assert fixed["ratio"] == pytest.approx(sum(widths) / cost(widths), rel=1e-9)
        assert row["costs"][str(k + 1)] == pytest.approx(1.0 + ROW * k, rel=1e-9)
    assert row["best_fixed"] == "15"
    assert row["lookup_share"] == 0.0


def test_what_scripted_drafters_propose():
    right, wrong = Scripted([5, 6, 299, 8], 3, False, 300), Scripted([5, 6, 299, 8], 3, True, 300)
    for drafter, expected in ((right, [5, 6, 299, 8]), (wrong, [6, 7, 0, 9])):
        drafter.extend([1, 2, 3])
        assert list(drafter.propose(2)) == expected[:2]
        drafter.extend([5])
        assert list(drafter.propose(32)) == expected[1:]
        drafter.extend([6, 299, 8])
        assert list(drafter.propose(4)) == []


def test_a_broken_promise_is_said(path, monkeypatch, capsys, tmp_path):
    """When a row's token depended on the draft, the verdict is no and the exit code 1."""
    sample = ForwardModel.sample

    def sampling(model, row, *args):
        token = sample(model, row, *args)
        return token if row == 0 else (token + 1) % model.sampled_vocab

    monkeypatch.setattr(ForwardModel, "sample", sampling)
    (tmp_path / "one.jsonl").write_text(json.dumps({"question_id": 1, "category": "copy", "turns": ["abcabcabc"]}) + "\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", path, "--speculation", "--workloads", str(tmp_path / "one.jsonl"), "--tokens", "200", "--threads", "1", "--json"])
    assert end.value.code == 1
    row, = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["identical"] is False and row["prompts"][0]["identical"] is False


# --- windows and loops -------------------------------------------------------------------------------------------------------------

def test_the_worst_window():
    plain = [(n, float(n)) for n in range(1, 301)]
    assert worst_window(plain, plain) == 1.0
    assert worst_window(plain[:64], plain[:64]) is None and worst_window(plain[:65], plain[:65]) == 1.0
    slow = [(n, n + 0.5 * max(0, min(n - 100, 64))) for n in range(1, 301)]  # tokens 101 to 164 take half as long again
    assert worst_window(plain, slow) == pytest.approx(1 / 1.5)
    bursts = [(1, 1.0), (41, 11.0), (81, 41.0), (161, 61.0)]  # 40 tokens in 10, 40 in 30, 80 in 20
    assert worst_window(plain, bursts) == pytest.approx(80 / 40)


def test_degenerate_loops():
    fresh = [(i * i + 7 * i) % 1009 for i in range(300)]
    assert not in_loop(fresh) and not in_loop([])
    for period in (1, 2, 15, 16):
        loop = (list(range(2000, 2000 + period)) * 64)[:64]
        assert in_loop(loop) and not in_loop(loop[:63])
        assert in_loop(fresh + loop) and in_loop(loop + fresh)
        assert not in_loop(loop[:32] + [1] + loop[:32])
    assert not in_loop(list(range(2000, 2017)) * 8)


def test_loops_are_marked(path, looping, monkeypatch):
    row = run(looping, [Workload("say", [("say it",)])], tokens=120)[0]
    assert row["loops"] == 1 and row["prompts"][0]["loop"] and row["ratio_without_loops"] is None and "1 of 1 (without: -)" in markdown([row])
    first = Model.load(path, threads=1).generate("aaa\n\n", max_tokens=20, draft="off").run().token_ids
    monkeypatch.setattr(boundary_module, "in_loop", lambda ids: ids == first)
    row = run(path, [Workload("two", [("aaa",), ("bbb",)])], tokens=20)[0]
    assert row["loops"] == 1 and row["ratio_without_loops"] == row["prompts"][1]["ratio"]
    assert "1 of 2 (without: " in markdown([row])


# --- prompts ---------------------------------------------------------------------------------------------------------------------

def test_the_built_in_prompts():
    workloads = builtin_workloads()
    assert [w.name for w in workloads] == ["rewrite code", "quote or summarise", "answer from documents", "extract JSON", "chat", "translation", "story",
                                           "hostile", "always right"]
    assert [w.drafter for w in workloads] == [None] * 7 + ["wrong", "right"]
    assert all(len(w.dialogues) >= 3 for w in workloads)
    turns = [turn for w in workloads for d in w.dialogues for turn in d]
    assert len(set(turns)) == len(turns)
    assert all((len(d) > 1) == (w.name == "chat") for w in workloads for d in w.dialogues)


def test_spec_bench_files(tmp_path):
    def line(number, category, *turns, **more):
        return json.dumps({"question_id": number, "category": category, "turns": list(turns), **more})

    (tmp_path / "b.jsonl").write_text(line(3, "qa", "third") + "\n")
    (tmp_path / "a.jsonl").write_text(line(1, "qa", "first ü", reference=["x"]) + "\n\n" + line(2, "writing", "two", "and three"), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no prompts")
    both = [Workload("qa", [("first ü",), ("third",)]), Workload("writing", [("two", "and three")])]
    assert read_workloads(str(tmp_path)) == both
    assert read_workloads(str(tmp_path / "b.jsonl")) == [Workload("qa", [("third",)])]


def test_every_nth_prompt_of_each_kind():
    both = [Workload("qa", [("a",), ("b", "c"), ("d",)]), Workload("one", [("e",)], "wrong")]
    assert every(both, 1) == both
    assert every(both, 2) == [Workload("qa", [("a",), ("d",)]), both[1]]
    assert every(both, 100) == [Workload("qa", [("a",)]), both[1]]


GOOD = b'{"category": "qa", "turns": ["x"]}\n'


@pytest.mark.parametrize("raw, words", [
    (b"", "expected prompts, found none"), (b"\n \n", "expected prompts, found none"), (GOOD + b"{", "line 2: not JSON"), (b"[" * 100000, "line 1: not JSON"),
    (b"\xff\xfe", "line 1: not JSON"), (b"[1]", "expected an object"), (b'{"turns": ["x"]}', "category"), (b'{"category": 1, "turns": ["x"]}', "category"),
    (b'{"category": "qa"}', "turns"), (b'{"category": "qa", "turns": []}', "turns"), (b'{"category": "qa", "turns": "x"}', "turns"),
    (b'{"category": "qa", "turns": ["x", 1]}', "turns"), (b'{"category": "qa", "turns": [" "]}', "turns"),
    (b'{"category": "qa", "turns": ["x"], "drafter": "best"}', "drafter"), (GOOD + GOOD, "line 2: expected a prompt of its own, found the one of")])
def test_bad_prompts_are_one_line(tmp_path, raw, words):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(raw)
    with pytest.raises(KestrelError) as error:
        read_workloads(str(file))
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_prompts_without_room_are_left_out(tmp_path):
    small = str(tmp_path / "small.kestrel")
    write_toy(small, config=dataclasses.replace(CONFIG, max_position_embeddings=64))
    notes = []
    rows = run(small, [Workload("mixed", [("x" * 70,), ("y" * 60,), ("z" * 61,)]), Workload("long", [("w" * 99,)])], note=notes.append)
    assert [r["workload"] for r in rows] == ["mixed"]
    assert rows[0]["answers"] == 1 and rows[0]["prompts"][0]["prompt_tokens"] == 62 and rows[0]["tokens"] == 2
    assert [n.split(" prompts")[0] for n in notes] == ["mixed: 2 of 3", "long: 1 of 1"]
    with pytest.raises(KestrelError, match="no prompt fits in a context of 64"):
        run(small, [Workload("long", [("w" * 99,)])])
    talk = run(small, [Workload("talk", [("a" * 20, "b" * 20)])])[0]  # no room for the second turn
    assert talk["answers"] == 1 and talk["identical"]


# --- the program -------------------------------------------------------------------------------------------------------------------

def kestrel(*args):
    return subprocess.run([sys.executable, "-m", "kestrel", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


def test_lines_of_the_program(path, tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"category": "qa", "turns": ["x"]}\n{"category": "rag", "turns": ["abcabc"]}\n')
    done = kestrel("bench", path, "--speculation", "--workloads", str(tmp_path), "--tokens", "9", "--threads", "2", "--kv-type", "f32", "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["workload"] for r in rows] == ["qa", "rag", "overall"]
    assert {(r["kv_type"], r["threads"], r["samples"], r["max_tokens"], r["identical"]) for r in rows} == {("f32", 2, 1, 9, True)}
    file.write_text(file.read_text() + '{"category": "qa", "turns": ["y"]}\n{"category": "qa", "turns": ["z"]}\n')
    table = kestrel("bench", path, "--speculation", "--workloads", str(file), "--tokens", "5", "--samples", "2", "--every", "2")
    assert table.returncode == 0 and table.stdout.count("| yes |") == 3 and "2 turns" in table.stdout
    assert "| qa | 10 |" in table.stdout and "| rag | 5 |" in table.stdout and "| overall | 15 |" in table.stdout  # x and z, abcabc: 5 tokens each


@pytest.mark.parametrize("args, words", [
    (("--tokens", "5"), "--tokens: only with --speculation"), (("--weights", "int4"), "--weights: only with --synthetic"), (("--every", "2"), "--every: only with"), (("--svg", "x.svg"), "--svg: only with"), (("--workloads", "x"), "--workloads: only with"),
    (("--speculation", "--depths", "0"), "--depths: not with --speculation"), (("--speculation", "--buffer", "1"), "--buffer: not with"),
    (("--speculation", "--threads", "1", "2"), "--threads: expected one number"), (("--speculation", "--workloads", "{tmp}"), "expected *.jsonl files"),
    (("--speculation", "--workloads", "{tmp}/missing"), "missing"), (("--speculation", "--workloads", ""), "No such file"),
    (("--speculation", "--kv-type", "int3"), "kv")])
def test_bad_input_is_one_line(path, tmp_path, capsys, args, words):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", path, *(a.format(tmp=tmp_path) for a in args)])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    line, = said.err.splitlines()
    assert words in line


# --- the picture -----------------------------------------------------------------------------------------------------------------

def test_without_matplotlib_nothing_is_measured(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(boundary_module, "boundary", lambda *args: pytest.fail("measured for a picture that can't be drawn"))
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", path, "--speculation", "--svg", str(tmp_path / "x.svg")])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err == "kestrel: --svg: expected matplotlib, found none: pip install 'kestrel[plot]'\n"


def test_the_picture_has_a_mark_for_each_workload(path, tmp_path):
    rows = run(path, [*TEXTS, WRONG, RIGHT])
    target = tmp_path / "picture.svg"
    draw_picture(rows, str(target))
    again = tmp_path / "again.svg"
    draw_picture(rows, str(again))
    assert target.read_bytes() == again.read_bytes() and sorted(p.name for p in tmp_path.iterdir()) == ["again.svg", "picture.svg"]
    tree = xml.etree.ElementTree.parse(str(target))
    marks = {e.get("id") for e in tree.iter() if (e.get("id") or "").startswith("workload-")}
    assert marks == {"workload-copy", "workload-talk", "workload-hostile", "workload-always-right", "workload-overall"}
    texts = ["".join(e.itertext()).strip() for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert all(any(t.startswith(r["workload"]) for t in texts) for r in rows)
    assert {"tokens per forward", "speed with draft auto / off", "0.92 x tokens per forward", "as fast as without"} <= set(texts)
    for bad in (tmp_path, tmp_path / "missing" / "x.svg"):
        with pytest.raises(KestrelError, match="expected a regular file|does not exist"):
            draw_picture(rows, str(bad))
