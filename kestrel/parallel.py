# SPDX-License-Identifier: Apache-2.0
"""A map over all cores that keeps the order and holds no more than a few items at a time."""
from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, Iterable, Iterator, TypeVar

from .cores import default_threads

Item, Result = TypeVar("Item"), TypeVar("Result")
_MOST = 4  # items in work at a time: memory stays bounded on a host with many cores, a board has four


def in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) for each item, in the items' order, several at a time: for work that runs outside the interpreter's lock.

    An exception of one comes out at its place. What is yielded does not depend on the number of cores.
    """
    workers = min(default_threads(), _MOST)
    if workers == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers)
    running: Deque["Future[Result]"] = deque()
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) == workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
        pool.shutdown()
