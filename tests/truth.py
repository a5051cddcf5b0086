# SPDX-License-Identifier: Apache-2.0
"""A model's passes one token at a time, against which every other pass is held: equality of bits, never a tolerance."""
from __future__ import annotations

import random

import numpy as np
import pytest
import toy

from kestrel.model import ForwardModel
from kestrel.toy import write_toy

MODELS = ("toy-int8", "toy-f32", "tiny-llama3-int8")
# What ARM adds, int8 shows; the others double the time under emulation.
EVERY_MODEL = [pytest.param(name, marks=[] if name == "toy-int8" else pytest.mark.native_only) for name in MODELS]


class Paths(dict):
    """{name of MODELS: packed file}, each made when a test asks for it, the toys in `folder`."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, name):
        source, _, weights = name.rpartition("-")
        if source != "toy":
            return self.setdefault(name, toy.packed(source, weights))
        write_toy(str(self.folder / weights), weights)
        return self.setdefault(name, str(self.folder / weights))


class Truth:
    """`length` tokens one at a time, by one thread and portable kernels: logits float32 [length, vocab], raw cache per position.

    kv_type: of the cache; None: the model's own.
    """

    def __init__(self, path, length, kv_type=None):
        self.path, self.length, self.kv_type = path, length, kv_type
        model = ForwardModel(path, threads=1, isa="portable", max_rows=33, kv_type=kv_type)
        rng = random.Random(5)
        self.vocab_size = model.config.vocab_size
        self.ids = [rng.randrange(self.vocab_size) for _ in range(length)]
        kv = model.new_kv(length)
        logits = []
        for token in self.ids:
            model.forward(kv, [token], wanted=1)
            logits.append(model.logits(0).copy())
        self.logits = np.array(logits)
        self.kv = np.frombuffer(kv.export(), np.uint8).reshape(model.config.num_hidden_layers, length, -1)

    def raw(self, begin, end):
        """What export(begin, end) must give."""
        return self.kv[:, begin:end].tobytes()


class Truths(dict):
    """{name: Truth}, each made when a test asks for it."""

    def __init__(self, paths, length, kv_type=None):
        super().__init__()
        self.paths, self.length, self.kv_type = paths, length, kv_type

    def __missing__(self, name):
        return self.setdefault(name, Truth(self.paths[name], self.length, self.kv_type))


def started(model, truth, begin):
    """A cache that holds the first `begin` positions."""
    kv = model.new_kv(truth.length)
    kv.append(truth.raw(0, begin), begin)
    return kv


def assert_same(model, truth, begin, sizes, kv=None):
    """Passes of these sizes from `begin` on: every row's logits, and at the end every K and V row."""
    kv = kv or started(model, truth, begin)
    at = begin
    for size in sizes:
        model.forward(kv, truth.ids[at:at + size], wanted=size)
        got = model._logits[:size]
        if got.tobytes() != truth.logits[at:at + size].tobytes():
            row, column = np.argwhere(got.view(np.uint32) != truth.logits[at:at + size].view(np.uint32))[0]
            pytest.fail(f"pass of {size} rows at {at}, {model.threads} threads, {model.isa}: first difference at position {at + row}, token {column}")
        at += size
    assert kv.length == at
    assert kv.export() == truth.raw(0, at)


def cut(length, size):
    return [size] * (length // size) + [length % size] * (length % size > 0)
