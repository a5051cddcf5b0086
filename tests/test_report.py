# SPDX-License-Identifier: Apache-2.0
"""kestrel bench on a device: rows under watch, cold start, thread counts, speculation with its hash, the page, two runs compared. No time is judged."""
from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from machine import lay_out

from kestrel import device, startup, telemetry
from kestrel.bench import Plan, bench
from kestrel.cli import main
from kestrel.report import compare, comparison, markdown, page, spoiled
from kestrel.toy import write_toy

pytestmark = pytest.mark.native_only
TINY = Plan(threads=(1, 2), depths=(0, 40), widths=(1, 4), samples=2, prefill=9, decode=3, buffer=1 << 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("report") / "toy.kestrel")
    write_toy(path)
    return path


@pytest.fixture(scope="module")
def rows(path):
    """One run of everything, with thread counts to choose."""
    notes = []
    found = list(device.measure(path, TINY._replace(threads=(), depths=(0,)), note=notes.append))
    return json.loads(json.dumps(found)), notes


def test_everything_in_its_order(rows, path):
    found, notes = rows
    kinds = [row["kind"] for row in found]
    assert list(dict.fromkeys(kinds)) == ["telemetry", "start", "choice", "bandwidth", "prefill", "decode", "verify", "speculation"]
    assert [row["when"] for row in found if row["kind"] == "telemetry"] == ["before", "during", "after"]
    start = [row for row in found if row["kind"] == "start"]
    assert {row["cache"] for row in start} | {"cold"} == {"cold", "warm"} and all(min(row["samples"]) > 0 for row in start)
    assert len(start) == 2 or any(note.startswith("cold start: left out") for note in notes)
    choice = {row["phase"]: row for row in found if row["kind"] == "choice"}
    assert set(choice) == {"decode", "prefill"}
    measured = {row["threads"] for row in found if row["kind"] == "decode"}
    for row in choice.values():
        best = max(row["by_threads"].values())
        good = [int(t) for t, speed in row["by_threads"].items() if speed >= 0.97 * best]
        assert row["threads"] == min(good) and row["threads"] in measured
    speculation = [row for row in found if row["kind"] == "speculation"]
    assert [row["workload"] for row in speculation] == ["rewrite code", "story", "overall"]
    assert all(row["identical"] and re.fullmatch("[0-9a-f]{64}", row["sha256"]) for row in speculation)
    assert all(row["marks"] == [] or row in spoiled(found) for row in found if "marks" in row)


def test_brief_and_bad_plans(path):
    kinds = {row["kind"] for row in device.measure(path, TINY._replace(samples=1), brief=True)}
    assert kinds == {"telemetry", "bandwidth", "prefill", "decode", "verify"}
    with pytest.raises(Exception, match="^widths: expected"):
        next(iter(device.measure(path, TINY._replace(widths=(0,)))))


def test_rows_are_marked_that_something_spoiled(path, tmp_path):
    """The firmware says `throttled` from some moment on: rows measured before are clean, rows after are marked, with the clock seen."""
    policy = "sys/devices/system/cpu/cpufreq/policy0"
    calm = lay_out(tmp_path / "calm", {"sys/devices/platform/soc/soc:firmware/get_throttled": "0", f"{policy}/scaling_cur_freq": 1500000})
    hot = lay_out(tmp_path / "hot", {"sys/devices/platform/soc/soc:firmware/get_throttled": "40004", f"{policy}/scaling_cur_freq": 600000})
    looks = []

    def look():
        looks.append(0)
        return telemetry.moving(hot if len(looks) > 3 else calm)  # once before, then after bandwidth, prefill, and from decode on

    found = bench(path, TINY._replace(threads=(1,), depths=(0,), samples=1), look=look)
    marks = {row["kind"]: row["marks"] for row in found}
    assert marks == {"bandwidth": [], "prefill": [], "decode": ["throttled: throttled", "throttled: firmware: throttled"], "verify": ["throttled: throttled"]}
    assert {row["kind"]: row["mhz"] for row in found} == {"bandwidth": {"policy0": 1500}, "prefill": {"policy0": 1500}, "decode": {"policy0": 600}, "verify": {"policy0": 600}}
    assert [row["kind"] for row in spoiled(found)] == ["decode", "verify", "verify"]
    assert "## Spoiled" in markdown(found) and "3 rows were spoiled" in page(found)


@pytest.mark.parametrize("strict, code", [((), 0), (("--strict",), 3)])
def test_strict_fails_when_something_swapped(path, monkeypatch, capsys, strict, code):
    pages = iter(range(0, 1 << 30, 100))
    moving = telemetry.moving
    monkeypatch.setattr(telemetry, "moving", lambda root="/": {**moving(root), "counters": {"pswpin": next(pages), "pswpout": 0}})
    with pytest.raises(SystemExit) as ended:
        main(["bench", path, "--brief", "--threads", "1", "--depths", "0", "--widths", "1", "--samples", "1", "--prefill", "4", "--decode", "2", "--buffer", "1", *strict])
    out, err = capsys.readouterr()
    assert ended.value.code == code and "spoiled by throttling or swapping" in err and "swapped: 100 pages" in out


def test_the_watch_keeps_extremes(tmp_path):
    zone, policy = "sys/class/thermal/thermal_zone0", "sys/devices/system/cpu/cpufreq/policy0"
    watch = device.Watch(str(tmp_path))
    for degrees, mhz, firmware in ((50, 2400, "0"), (81, 1500, "80008"), (60, 2000, "80000")):
        lay_out(tmp_path, {f"{zone}/type": "cpu-thermal", f"{zone}/temp": degrees * 1000, f"{policy}/scaling_cur_freq": mhz * 1000,
                           "sys/devices/platform/soc/soc:firmware/get_throttled": firmware})
        watch.look()
    assert watch.row() == {"kind": "telemetry", "when": "during", "temperatures": {"cpu-thermal": 81.0}, "throttled": ["soft temperature limit"],
                           "mhz": {"policy0": [1500, 2400]}}


def test_cold_and_warm_files(tmp_path):
    """What was just read is in the page cache; what was dropped is not, where the system lets us."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    with open(str(file), "rb") as opened:
        os.fsync(opened.fileno())
        opened.read()
    warm = startup.resident(str(file))
    assert warm in (None, 1.0)
    startup.drop(str(file))
    cold = startup.resident(str(file))
    assert cold is None or 0.0 <= cold <= 1.0


def test_a_failing_start_is_an_error(tmp_path):
    (tmp_path / "bad").write_bytes(b"x")
    with pytest.raises(Exception, match="bad"):
        startup.startup(str(tmp_path / "bad"), 1, lambda text: None)


def test_markdown_has_every_section(rows):
    text = markdown(rows[0])
    assert re.findall(r"^## (.*)$", text, re.M) == ["Board", "From process start to first token", "Thread counts, tokens/s", "Speed", "Speculation"] + (
        ["Spoiled"] if spoiled(rows[0]) else [])
    assert re.search(r"^Fastest here: `--threads \d+ --prefill-threads \d+`$", text, re.M)
    assert "sha256 of the answers' ids" in text


def test_the_page_stands_alone(rows):
    """Well-formed, no script, nothing from outside; each measured figure is a bar's or a point's."""
    text = page(rows[0])
    assert "<script" not in text and not re.search(r"(?:src|href)\s*=", text) and "http" not in text
    tree = ET.fromstring(re.sub(r"<meta[^>]*>", "", text.replace("<!doctype html>", "")))
    pictures = list(tree.iter("svg"))
    assert len(pictures) == 4
    bars = [len(list(p.iter("rect"))) for p in pictures[:3]]
    assert bars == [sum(row["kind"] == kind for row in rows[0]) for kind in ("decode", "prefill", "bandwidth")]
    assert len(list(pictures[3].iter("circle"))) == sum(row["kind"] == "verify" for row in rows[0])
    for picture in pictures:
        numbers = [float(e.get(k)) for e in picture.iter() for k in ("x", "y", "x1", "x2", "cx", "cy", "width", "height") if e is not picture and e.get(k)]
        assert min(numbers) >= 0 and max(numbers) <= 720
    for row in rows[0]:
        if row["kind"] == "decode":
            assert f"{row['median']:.1f}" in text
    assert "&lt;evil&gt;" in page([{**row, "model": "<evil>"} for row in rows[0]])


def test_compare(rows, tmp_path):
    """The same run twice is all noise; one that is twice as fast is better in every row, seconds and tokens/s alike, and of few samples nothing is said."""
    few, rows = copy.deepcopy(rows[0]), copy.deepcopy(rows)
    found = [row for row in rows[0] if "median" in row]
    for row in found:
        row["samples"] *= 4
    same = compare(rows[0], rows[0])
    assert len(same) == len(found) and {row["verdict"] for row in same} == {"within noise"} and {row["ratio"] for row in same} == {1.0}
    faster = copy.deepcopy(rows[0])
    for row in faster:
        if "median" in row:
            spread = 1 + (max(row["samples"]) - min(row["samples"])) / min(row["samples"])
            factor = 2 * spread if row["unit"] != "s" else 0.5 / spread
            row["median"] *= factor
            row["samples"] = [s * factor for s in row["samples"]]
    better = compare(rows[0], faster)
    assert {row["verdict"] for row in better} == {"better"} and all(row["ratio"] >= 2 for row in better)
    assert {row["verdict"] for row in compare(faster, rows[0])} == {"worse"}
    for row in few:
        if "median" in row:
            row["samples"] = row["samples"][:3]
    unsure = compare(few, faster)
    assert {row["verdict"] for row in unsure} == {"too few samples"} and "**" not in comparison(unsure)
    assert comparison(better).count("**better**") == len(found)
    files = []
    for name, content in (("a", rows[0]), ("b", faster)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        files.append(str(tmp_path / name))
    done = subprocess.run([sys.executable, "-m", "kestrel", "bench", "--compare", *files], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip() == comparison(better)


@pytest.mark.parametrize("content, words", [(None, "No such file"), (b"", "expected lines of JSON"), (b"{}\n", "expected lines of JSON"), (b"[1]\n", "expected lines"),
                                            (b"{\"kind\": \"telemetry\"}\n", "no measurement in common"), (b"\xff", "expected lines of JSON")])
def test_files_that_can_not_be_compared(tmp_path, capsys, content, words):
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "a")])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize("args, words", [(("--compare", "a", "b"), "nothing to measure"), (("--html", "{folder}"), "expected a file"),
                                         (("--html", "{folder}/no/x"), "expected a file"), (("--speculation", "--strict"), "--strict: not with"),
                                         (("--speculation", "--html", "x"), "--html: not with")])
def test_impossible_options(path, tmp_path, capsys, args, words):
    with pytest.raises(SystemExit) as ended:
        main(["bench", path, *(a.format(folder=tmp_path) for a in args)])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and words in err and err.count("\n") == 1


