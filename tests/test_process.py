# SPDX-License-Identifier: Apache-2.0
"""A pass among signals, threads, forks and the float mode of the host program: the same bits, or the cache as it was."""
from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import pytest
from truth import Paths, Truths, assert_same, started

from kestrel import _native
from kestrel.generate import Model
from kestrel.model import Cancelled, ForwardModel, Row

LENGTH = 1170


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return Paths(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def truths(paths):
    return Truths(paths, LENGTH)


def signal_after(seconds, number):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    return timer


def test_a_step_without_a_signal_handler_that_raises_is_cancelled_cleanly(paths, truths):
    """A handler that returns: the pass ends as Cancelled, the cache has its old length, and the same pass goes through after."""
    truth = truths["toy-int8"]
    model = ForwardModel(truth.path, threads=2, max_rows=1024)
    kv = started(model, truth, 100)
    seen = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(kv.length))
    try:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
            timer = signal_after(delay, signal.SIGUSR1)
            try:
                model.forward(kv, truth.ids[100:1000], wanted=1)
                assert kv.length == 1000
            except Cancelled:
                assert kv.length == 100
            timer.join()
            kv.rewind(100)
        for _ in range(100):  # the last one may still be on its way to the handler
            if len(seen) == 5:
                break
            time.sleep(0.01)
        assert len(seen) == 5
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert_same(model, truth, 100, [900, 5], kv)


@pytest.mark.native_only
def test_ctrl_c_during_a_long_prefill(real_model_int8):
    """Case 30: back within a second of a real SIGINT, the cache at its old length, the next request right."""
    model = Model.load(str(real_model_int8), chunk=1024)
    first = "The first request of this process. "
    expected = model.generate(first, max_tokens=8, draft="off").run().token_ids
    rng = random.Random(1)
    ids = [rng.randrange(1000, 40000) for _ in range(4096)]
    kv = model.new_kv(4200)
    answer = model.generate(ids, max_tokens=4, kv=kv)
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        answer.run()
    late = time.monotonic() - sent[0]
    timer.join()
    assert late < 1.0
    assert kv.length % 1024 == 0 and kv.length < 4096
    assert answer.token_ids == [] and answer.finish_reason is None
    assert model.generate(first, max_tokens=8).run().token_ids == expected


def test_steps_outside_the_main_thread(truths):
    """Signals can't be awaited there; the answer is the same, and two threads on one model take turns."""
    truth = truths["toy-int8"]
    model = ForwardModel(truth.path, threads=2)
    results, failures = {}, []

    def work(begin):
        try:
            kv = started(model, truth, begin)
            for at in range(begin, begin + 40):
                results[at] = model.step([Row(kv, at, truth.ids[at], _native.WANT_LOGITS)])["logits"][0].tobytes()
        except BaseException as error:  # noqa: BLE001 - a thread's exception would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(results) == 120
    assert all(results[at] == truth.logits[at].tobytes() for at in results)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_after_load(truths, threads):
    """The child has no workers of its own and still gives the same bits; the parent goes on."""
    truth = truths["toy-int8"]
    model = ForwardModel(truth.path, threads=threads)
    kv = started(model, truth, 200)
    assert_same(model, truth, 200, [33], kv)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert_same(model, truth, 233, [1, 33, 4], kv)
            code = 0
        except BaseException as error:  # noqa: BLE001
            print(error, file=sys.stderr)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(model, truth, 233, [1, 33, 4], kv)


def test_float_mode_of_the_host_program_does_not_show(truths):
    """Denormals flushed and rounding upwards in the calling thread, as some libraries leave it: same bits, and it is left so."""
    import ctypes
    import ctypes.util

    libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    upwards = {"x86_64": 0x800, "aarch64": 0x400000}[os.uname().machine]
    truth = truths["toy-int8"]
    model = ForwardModel(truth.path, threads=2)
    kv = started(model, truth, 100)
    assert libm.fesetround(upwards) == 0
    try:
        model.forward(kv, truth.ids[100:117], wanted=17)
        logits = model._logits[:17].tobytes()
        mode = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert mode == upwards
    assert logits == truth.logits[100:117].tobytes()
    assert kv.export() == truth.raw(0, 117)
