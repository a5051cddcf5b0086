# SPDX-License-Identifier: Apache-2.0
"""parallel.in_order: the order is kept, few items are in work, an exception comes out where it belongs."""
from __future__ import annotations

import threading
import time

import pytest

from kestrel import parallel


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_order_and_bound(monkeypatch, cores):
    monkeypatch.setattr(parallel, "default_threads", lambda: cores)
    lock, taken, yielded, most = threading.Lock(), [0], [0], [0]

    def items():
        for i in range(40):
            taken[0] += 1
            most[0] = max(most[0], taken[0] - yielded[0])
            yield i

    def square(i):
        time.sleep(0.002 * (i % 3))  # later items are often done first
        with lock:
            return i * i

    found = []
    for value in parallel.in_order(square, items()):
        yielded[0] += 1
        found.append(value)
    assert found == [i * i for i in range(40)]
    assert most[0] <= min(cores, 4) + 1


@pytest.mark.parametrize("cores", [1, 3])
def test_an_exception_comes_out_at_its_place(monkeypatch, cores):
    monkeypatch.setattr(parallel, "default_threads", lambda: cores)
    seen = []
    with pytest.raises(ZeroDivisionError):
        for value in parallel.in_order(lambda i: 6 // (3 - i), range(100)):
            seen.append(value)
    assert seen == [2, 3, 6]
    assert threading.active_count() == 1 or all(not t.name.startswith("ThreadPool") for t in threading.enumerate())
