# SPDX-License-Identifier: Apache-2.0
"""Which cores run the threads: big ones, inside the affinity mask and the control group's quota (case 23); idle threads sleep."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from machine import cpus, lay_out

from kestrel.cores import Cores, choose_cores, quota, running_on, warn_of_threads
from kestrel.model import ForwardModel
from kestrel.toy import write_toy

pytestmark = pytest.mark.native_only
RK3588 = [530] * 4 + [1024, 1024, 1008, 1008]  # 4x A55, 4x A76 of two bins


@pytest.mark.parametrize("capacities, allowed, big", [
    (RK3588, range(8), (4, 5, 6, 7)), (RK3588, (0, 1), (0, 1)), (RK3588, (3, 4), (4,)), ([1024] * 4, range(4), (0, 1, 2, 3)), ([], range(4), (0, 1, 2, 3)),
    ([250] * 4 + [870] * 3 + [1024], range(8), (4, 5, 6, 7)), ([446] * 4 + [871] * 2 + [1024] * 2, (0, 1, 2, 3, 4), (4,))])
@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_big_cores(tmp_path, capacities, allowed, big, name):
    """Case 23: of 4 big and 4 small cores the big ones; a mask is obeyed whatever it holds."""
    cores = choose_cores(lay_out(tmp_path, cpus(capacities, name)), set(allowed))
    assert (cores.allowed, cores.big, cores.quota) == (tuple(allowed), big, None)
    assert cores.threads == len(big) and cores.for_threads(len(big)) == big and cores.for_threads(len(big) + 1) == tuple(allowed)


V2, V1 = "0::/user.slice/app.service", "4:cpu,cpuacct:/app\n3:memory:/app\n0::/"


@pytest.mark.parametrize("files, expected", [
    ({}, None), ({"proc/self/cgroup": V2}, None),
    ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.service/cpu.max": "150000 100000"}, 1.5),
    ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.service/cpu.max": "max 100000"}, None),
    ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.service/cpu.max": "400000 100000", "sys/fs/cgroup/user.slice/cpu.max": "200000 100000"}, 2.0),
    ({"proc/self/cgroup": "0::/docker/0123", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),  # the path is the host's, the mount the container's
    ({"proc/self/cgroup": "0::/../../x", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
    ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
    ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000"}, None),
    ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "250000", "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000"}, 2.5),
    ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.service/cpu.max": "what"}, None), ({"proc/self/cgroup": b"\xff:::"}, None)])
def test_quota(tmp_path, files, expected):
    assert quota(lay_out(tmp_path, files)) == expected


def test_a_quota_bounds_the_threads(tmp_path):
    """Case 23: 1.5 CPUs' worth are 1 thread; less than one is still one."""
    for amount, threads in ((150000, 1), (50000, 1), (200000, 2), (900000, 4)):
        root = lay_out(tmp_path, {**cpus(RK3588), "proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.service/cpu.max": f"{amount} 100000"})
        assert choose_cores(root, set(range(8))).threads == threads


def test_under_a_mask_of_this_system():
    """Case 23, for real: a process confined to one CPU uses one thread."""
    one = sorted(os.sched_getaffinity(0))[:1]
    code = f"import os; os.sched_setaffinity(0, {one}); from kestrel.cores import *; print(choose_cores().allowed, default_threads())"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout == f"({one[0]},) 1\n"


def test_workers_stay_on_the_chosen_cores(tmp_path, monkeypatch):
    """The mask is the workers' own; the caller has its old one back."""
    import kestrel.model

    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.fail("this machine has one CPU: nothing to choose from")
    last = max(before)
    monkeypatch.setattr(kestrel.model, "choose_cores", lambda: Cores(tuple(sorted(before)), (last,) * 2, None))
    path = str(tmp_path / "toy")
    write_toy(path)
    tasks = set(os.listdir("/proc/self/task"))
    model = ForwardModel(path)
    assert model.threads == 2 and os.sched_getaffinity(0) == before
    made = set(os.listdir("/proc/self/task")) - tasks
    assert len(made) == 1 and [os.sched_getaffinity(int(t)) for t in made] == [{last}]


def test_the_mask_comes_back_after_an_error():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError):
        with running_on((min(before),)):
            assert os.sched_getaffinity(0) == {min(before)}
            1 / 0
    assert os.sched_getaffinity(0) == before
    with running_on(()):
        assert os.sched_getaffinity(0) == before
    assert threading.active_count() >= 1


@pytest.mark.parametrize("threads, cores, words", [
    (4, Cores((0, 1, 2, 3), (0, 1, 2, 3), None), None), (5, Cores((0, 1, 2, 3), (0, 1, 2, 3), None), "5 threads on 4 CPUs"),
    (8, Cores(tuple(range(8)), (4, 5, 6, 7), None), "8 threads on 4 big cores and 4 small ones"), (4, Cores(tuple(range(8)), (4, 5, 6, 7), None), None),
    (2, Cores((0, 1), (0, 1), 1.5), "pays for 1.5 CPUs"), (1, Cores((0, 1), (0, 1), 0.5), None)])
def test_too_many_threads_are_said(threads, cores, words):
    notes = []
    warn_of_threads(threads, notes.append, cores)
    assert notes == [] if words is None else len(notes) == 1 and words in notes[0]


def test_too_many_threads_run_all_the_same(tmp_path):
    path = str(tmp_path / "toy")
    write_toy(path)
    many = len(os.sched_getaffinity(0)) + 1
    done = subprocess.run([sys.executable, "-m", "kestrel", "generate", path, "--prompt", "abc", "--max-tokens", "3", "--threads", str(many), "--json"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0 and json.loads(done.stdout)["threads"] == many
    assert done.stderr.startswith(f"kestrel: {many} threads on {many - 1} CPUs") and done.stderr.count("\n") == 1


def test_an_idle_model_sleeps(tmp_path):
    """After its spin window a loaded model takes below 1 % of a CPU: clock ticks of the process, not its speed."""
    path = str(tmp_path / "toy")
    write_toy(path)
    code = """if True:
        import os, sys, time
        from kestrel import Model
        model = Model.load(sys.argv[1], threads=4)
        model.generate("abc", max_tokens=4).run()
        time.sleep(0.3)
        used = lambda: sum(int(x) for x in open("/proc/self/stat").read().rsplit(")", 1)[1].split()[11:13])
        before = used()
        time.sleep(2)
        print(used() - before, os.sysconf("SC_CLK_TCK"))
    """
    ticks, second = map(int, subprocess.run([sys.executable, "-c", code, path], stdout=subprocess.PIPE, check=True).stdout.split())
    assert ticks < 0.01 * 2 * second
