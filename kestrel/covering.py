# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few cells of a product of settings in which every pair (triple, ...) of values still occurs.

What two settings do to each other shows in some cell that holds both values; cells for each pair grow with the product of the two largest
factors, not of all. Greedy, one cell at a time (after AETG, Cohen et al. 1997), without chance: the same cells on every machine.
"""
from __future__ import annotations

import itertools
from typing import Dict, List, Sequence, Tuple

_Tuple = Tuple[Tuple[int, ...], Tuple[int, ...]]  # (factors, their values)


def covering_array(sizes: Sequence[int], strength: int) -> List[Tuple[int, ...]]:
    """Cells, each one value in range(sizes[i]) for each factor i, such that any `strength` factors take every combination of their values
    in some cell. sizes: each >= 1, `strength` of them at least."""
    columns = range(len(sizes))
    missing: Dict[_Tuple, None] = {(some, values): None for some in itertools.combinations(columns, strength)
                                   for values in itertools.product(*(range(sizes[i]) for i in some))}
    used = [[0] * size for size in sizes]
    cells = []
    while missing:
        cell = dict(zip(*next(iter(missing))))  # the first that is missing: each cell brings one at least
        for column in sorted(columns, key=lambda i: -sizes[i]):
            if column in cell:
                continue
            groups = list(itertools.combinations(sorted(cell), strength - 1))

            def gain(value: int) -> int:
                with_it = {**cell, column: value}
                return sum((some, tuple(with_it[i] for i in some)) in missing for some in (tuple(sorted((*g, column))) for g in groups))

            cell[column] = max(range(sizes[column]), key=lambda v: (gain(v), -used[column][v], -v))
        for some in itertools.combinations(columns, strength):
            missing.pop((some, tuple(cell[i] for i in some)), None)
        for i in columns:
            used[i][cell[i]] += 1
        cells.append(tuple(cell[i] for i in columns))
    return cells
