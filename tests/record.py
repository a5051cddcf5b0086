# SPDX-License-Identifier: Apache-2.0
"""An answer and everything by which it may be compared with another."""
from __future__ import annotations

import hashlib
import struct

from kestrel.generate import Model
from kestrel.toy import write_toy

PROMPTS = {
    "one word x 48": " word" * 48,
    "code": "def add(a, b):\n    return a + b\n\ndef add(a, b, c):\n    return a + b + c\n",
    "prose": "It was the quiet hour after rain.",
}


def toy_model(folder):
    """The toy, packed in `folder`, on two threads."""
    path = str(folder / "toy.kestrel")
    write_toy(path)
    return Model.load(path, threads=2, chunk=512)


class Record:
    """An answer and everything it may be compared by: ids, text, pieces, reason, a hash of all logits, the cache."""

    def __init__(self, model, prompt, **options):
        seen = hashlib.sha256()
        self.positions = []

        def observe(position, token, logits):
            self.positions.append(position)
            seen.update(struct.pack("<qi", position, token) + logits.tobytes())

        ids = model.encode(prompt)
        kv = model.new_kv(len(ids) + options.get("max_tokens", 128))
        self.generation = model.generate(ids, observer=observe, kv=kv, **options)
        self.pieces = list(self.generation)
        self.text, self.ids, self.reason = self.generation.text, self.generation.token_ids, self.generation.finish_reason
        self.logits, self.cache = seen.hexdigest(), kv.export()
        self.statistics = self.generation.statistics
        assert "".join(self.pieces) == self.text
        assert self.positions == list(range(len(ids), len(ids) + len(self.ids)))
        assert kv.length == len(ids) + len(self.ids) - 1  # the last token was never fed
        s = self.statistics
        assert sum(s.accepted_histogram) == s.forwards
        assert sum(i * n for i, n in enumerate(s.accepted_histogram)) == s.accepted <= s.proposed

    def answer(self):
        return self.ids, self.text, self.reason, self.logits, self.cache
