# SPDX-License-Identifier: Apache-2.0
"""A packed model made runnable: weights in the mapped file, key-value caches, and the only place that runs a forward pass."""
from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _native
from ._native import ffi, lib
from .config import ModelConfig
from .cores import choose_cores, running_on
from .errors import KestrelError
from .memory import Footprint
from .pack import PackedModel
from .rope import attention_factor, inverse_frequencies
from .sampling import Sampling, TokenLogprobs, check_integer

MAX_DRAFT = 32  # the longest draft a pass may carry
KV_TYPES = ("f16", "f32", "int8")


class Row(NamedTuple):
    """One row of a pass: `token` at `position` of `kv`. want: WANT_NONE, WANT_LOGITS, WANT_CANDIDATES or both."""

    kv: "KVCache"
    position: int
    token: int
    want: int = _native.WANT_NONE


class Cancelled(Exception):
    """A step was cancelled by a signal; every cache has its old length."""


def rope_tables(config: ModelConfig) -> np.ndarray:
    """float32 [tables, head_dim / 2]: rotary frequencies with the config's scaling, then those of sliding layers where they differ."""
    tables = [inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)]
    if config.rope_local_base_freq is not None:
        tables.append(inverse_frequencies(config.rope_local_base_freq, config.head_dim, None))
    return np.stack(tables)


def kv_position_bytes(config: ModelConfig, kv_type: str) -> int:
    """Bytes of one cached position; int8 has a float32 scale for K and one for V of each layer and head."""
    row = {"f32": 4 * config.head_dim, "f16": 2 * config.head_dim, "int8": config.head_dim + 4}[kv_type]
    return 2 * config.num_hidden_layers * config.num_key_value_heads * row


class KVCache:
    """Keys and values of one sequence. Made by `ForwardModel.new_kv`. Rewinding moves a counter; nothing is copied."""

    def __init__(self, model: "ForwardModel", capacity: int, max_rows: int, kv_type: str):
        out = ffi.new("kestrel_kv **")
        _native.check(lib.kestrel_kv_create(model._handle, capacity, max_rows, _native.TYPES[kv_type], out),
                      f"cache of {capacity} positions, {max_rows} rows a pass")
        self._handle = ffi.gc(out[0], lib.kestrel_kv_free)
        self.capacity, self.max_rows, self.kv_type = capacity, max_rows, kv_type
        self.position_bytes = kv_position_bytes(model.config, kv_type)

    @property
    def length(self) -> int:
        """Positions stored."""
        return lib.kestrel_kv_length(self._handle)

    def rewind(self, length: int) -> None:
        """Forgets positions >= length."""
        _native.check(lib.kestrel_kv_rewind(self._handle, length), f"rewind from {self.length} to {length}")

    def export(self, begin: int = 0, end: Optional[int] = None) -> bytes:
        """Positions [begin, end) in canonical order [layer][position][K, V][kv head][head_dim], in the cache's type.

        int8: each head's values are followed by their float32 scale.
        """
        end = self.length if end is None else end
        size = lib.kestrel_kv_export_bytes(self._handle, begin, end)
        if size < 0:
            raise ValueError(f"export of [{begin}, {end}) from a cache of length {self.length}")
        out = bytearray(size)
        if size:
            _native.check(lib.kestrel_kv_export(self._handle, begin, end, ffi.from_buffer(out)), "export")
        return bytes(out)

    def append(self, raw: bytes, count: int) -> None:
        """Appends `count` positions that `export` gave (of any cache of the same model and type)."""
        length = self.length
        if count < 0 or length + count > self.capacity:
            raise ValueError(f"{count} positions do not fit: length {length}, capacity {self.capacity}")
        if len(raw) != count * self.position_bytes:
            raise ValueError(f"{count} positions take {count * self.position_bytes} bytes, found {len(raw)}")
        if count:
            _native.check(lib.kestrel_kv_import(self._handle, count, ffi.from_buffer(raw)), "import")


class ForwardModel:
    """Weights, worker threads and scratch. `step` runs one pass; the rest of kestrel stands on it.

    Attributes: packed (PackedModel), config, isa, threads, prefill_threads, max_rows, kv_type (one of KV_TYPES; by default "f16", "f32" for f32 weights).
    A pass and what is read from it are one thread's at a time: who calls `forward` and then `logits` or `sample` from several threads
    holds `lock` around them.
    """

    def __init__(self, path: str, threads: Optional[int] = None, isa: Optional[str] = None, max_rows: int = 256,
                 kv_type: Optional[str] = None, sampled_vocab: Optional[int] = None, prefill_threads: Optional[int] = None):
        self.packed = PackedModel(path) if not isinstance(path, PackedModel) else path
        self.config = self.packed.config
        self.isa = _native.choose_isa(isa)
        cores = choose_cores()
        self.threads = cores.threads if threads is None else threads
        self.prefill_threads = self.threads if prefill_threads is None else prefill_threads
        for name, count in (("threads", self.threads), ("prefill threads", self.prefill_threads)):
            check_integer(name, count, 1, 256, "1 to 256")
        self.threads, self.prefill_threads = int(self.threads), int(self.prefill_threads)
        self.max_rows = max(max_rows, MAX_DRAFT + 1)
        self.kv_type = kv_type or ("f32" if self.packed.weight_type == "f32" else "f16")
        if self.kv_type not in KV_TYPES:
            raise KestrelError(f"kv type: expected {', '.join(KV_TYPES)}, found {kv_type!r}")
        self.sampled_vocab = min(sampled_vocab or self.config.vocab_size, self.config.vocab_size)
        self.lock = threading.RLock()
        self._native_config, self._keep = self._describe()
        out = ffi.new("kestrel_model **")
        with running_on(cores.for_threads(max(self.threads, self.prefill_threads))):  # the workers inherit it
            _native.check(lib.kestrel_model_create(self._native_config, self.isa.encode(), self.threads, self.prefill_threads, self.max_rows, out),
                          self.packed.path)
        self._handle = ffi.gc(out[0], lib.kestrel_model_free)
        self._rows = ffi.new("kestrel_row[]", self.max_rows)
        self._output = ffi.new("kestrel_output *")
        self._logits = np.empty((0, self.config.vocab_size), np.float32)
        self._logits_pointer = ffi.NULL
        self._work = ffi.new("uint64_t[]", 1)
        self._row = ffi.NULL  # scratch for logits that settings change
        self._token = ffi.new("int32_t *")
        self._row_seconds = math.inf  # of the last pass of few rows, each
        self.scratch_bytes: int = lib.kestrel_model_scratch_bytes(self._handle)

    def _describe(self) -> Tuple[Any, List[Any]]:
        """The C description of the model; `keep` holds what it points to."""
        p, c = self.packed, self.config
        keep: List[Any] = []

        def vector(name: str) -> Any:
            if not p.has(name):
                return ffi.NULL
            keep.append(ffi.from_buffer("float[]", p.vector(name)))
            return keep[-1]

        def weight(into: Any, name: str, n: int, k: int) -> None:
            keep.append(ffi.from_buffer("uint8_t[]", p.array(name)))
            into.type, into.n, into.k, into.data, into.bias = _native.TYPES[p.stored_type(name)], n, k, keep[-1], vector(name + "_bias")

        layers = ffi.new("kestrel_layer[]", c.num_hidden_layers)
        tables = rope_tables(c)
        for i in range(c.num_hidden_layers):
            at, layer = f"layers.{i}.", layers[i]
            for name in ("attention_norm", "q_norm", "k_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
                setattr(layer, name, vector(at + name))
            weight(layer.qkv, at + "qkv", c.qkv_size, c.hidden_size)
            weight(layer.o, at + "o", c.hidden_size, c.q_size)
            weight(layer.gate_up, at + "gate_up", c.gate_up_size, c.hidden_size)
            weight(layer.down, at + "down", c.hidden_size, c.intermediate_size)
            layer.window = c.sliding_window if c.slides(i) else 0
            layer.rope = len(tables) - 1 if c.slides(i) else 0
        config = ffi.new("kestrel_config *")
        config.vocab_size, config.sampled_vocab = c.vocab_size, self.sampled_vocab
        config.hidden_size, config.intermediate_size, config.n_layers = c.hidden_size, c.intermediate_size, c.num_hidden_layers
        config.n_heads, config.n_kv_heads, config.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        config.hidden_act, config.rms_norm_eps = _native.HIDDEN_ACTS[c.hidden_act], c.rms_norm_eps
        scale = np.float32(1) / np.sqrt(np.float32(c.query_pre_attn_scalar or c.head_dim))
        config.query_scale = scale * np.float32(attention_factor(c.rope_scaling) ** 2)
        config.n_ropes, config.rope_inv_freq = len(tables), ffi.from_buffer("float[]", tables)
        config.final_norm, config.embedding_scale = vector("final_norm"), vector("embedding_scale")
        weight(config.embedding, "embedding", c.vocab_size, c.hidden_size)
        weight(config.head, "embedding" if c.tie_word_embeddings else "head", c.vocab_size, c.hidden_size)
        config.layers = layers
        keep += [layers, tables]
        return config, keep

    # --- caches ---------------------------------------------------------------------------------------------------

    def kv_bytes(self, capacity: int, max_rows: Optional[int] = None, kv_type: Optional[str] = None) -> int:
        """Bytes of a cache of `capacity` positions (of another type than the model's own, when given)."""
        return lib.kestrel_kv_bytes(self._native_config, capacity, max_rows or self.max_rows, _native.TYPES[kv_type or self.kv_type])

    def footprint(self, ctx: int, kv_type: Optional[str] = None) -> Footprint:
        """What answering within `ctx` positions takes. Nothing of it is touched yet: weights are mapped, scratch is reserved."""
        logits = 4 * (MAX_DRAFT + 1) * self.config.vocab_size
        return Footprint(self.packed.file_bytes, self.kv_bytes(ctx, kv_type=kv_type), self.scratch_bytes + logits, ctx)

    def longest_ctx(self, available: Optional[int], kv_type: Optional[str] = None) -> int:
        """The most positions, up to the model's, whose footprint is within `available` bytes (None: no bound); 0 when not even one's is."""
        low, high = 0, self.config.max_position_embeddings
        if available is None:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.footprint(middle, kv_type).total <= available else (low, middle - 1)
        return low

    def new_kv(self, capacity: int, max_rows: Optional[int] = None) -> KVCache:
        """An empty cache for `capacity` positions and passes of at most `max_rows` rows (default: the model's)."""
        return KVCache(self, capacity, max_rows or self.max_rows, self.kv_type)

    # --- the pass -------------------------------------------------------------------------------------------------

    def _reserve_logits(self, rows: int) -> None:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.config.vocab_size), np.float32)
            self._logits_pointer = ffi.from_buffer("float[]", self._logits)

    def forward(self, kv: KVCache, tokens: Sequence[int], wanted: int = 0, input_maxima: Optional[np.ndarray] = None,
                cancellable: bool = True, input_moments: Optional[np.ndarray] = None) -> None:
        """One pass of `tokens` after what `kv` holds; logits of the last `wanted` rows are kept for `logits` and `sample`.

        input_maxima, input_moments: see kestrel_output in kestrel.h; float32, updated in place (calibration); there are no logits then.
        Raises Cancelled when a signal arrived whose handler did not raise (not with cancellable False), KestrelError as `step`.
        """
        m, rows, position, handle = len(tokens), self._rows, kv.length, kv._handle
        if m > self.max_rows:
            raise KestrelError(f"a pass of {m} rows: the model was made for {self.max_rows}")
        with self.lock:
            for i, token in enumerate(tokens):
                row = rows[i]
                row.kv, row.position, row.token, row.want = handle, position + i, token, _native.WANT_NONE
            for i in range(m - wanted, m):
                rows[i].want = _native.WANT_LOGITS
            self._reserve_logits(wanted)
            self._output.logits = self._logits_pointer
            if input_maxima is None:
                self._run(m, cancellable)
                return
            c = self.config
            size = c.num_hidden_layers * (2 * c.hidden_size + c.intermediate_size) + c.hidden_size
            self._output.input_maxima = _native.array(input_maxima, "float32", (size,), "input_maxima", writable=True)
            if input_moments is not None:
                blocks = c.num_hidden_layers * sum(-(-k // _native.FEEDBACK) for k in (c.hidden_size, c.q_size, c.hidden_size, c.intermediate_size))
                self._output.input_moments = _native.array(input_moments, "float32", (blocks, _native.FEEDBACK, _native.FEEDBACK), "input_moments", writable=True)
            try:
                self._run(m)
            finally:
                self._output.input_maxima = self._output.input_moments = ffi.NULL

    def step(self, rows: Sequence[Row], candidates: int = 0) -> Dict[str, np.ndarray]:
        """One pass over rows of any number of caches (rows of one cache consecutive, positions ascending).

        Returns copies: logits float32 [rows that want them, vocab_size], candidate_ids int32 and candidate_logits float32
        [rows that want them, candidates]. KestrelError: a position that is not the cache's next, a full cache, NaN or Inf
        (naming layer and row).
        """
        m = len(rows)
        if not 1 <= m <= self.max_rows:
            raise KestrelError(f"a pass of {m} rows: the model was made for 1 to {self.max_rows}")
        n_logits = sum(1 for r in rows if r.want & _native.WANT_LOGITS)
        n_candidates = sum(1 for r in rows if r.want & _native.WANT_CANDIDATES)
        ids = np.zeros((n_candidates, candidates), np.int32)
        values = np.zeros((n_candidates, candidates), np.float32)
        with self.lock:
            for i, r in enumerate(rows):
                at = self._rows[i]
                at.kv, at.position, at.token, at.want = r.kv._handle, r.position, r.token, r.want
            self._reserve_logits(n_logits)
            out = self._output
            out.logits, out.n_candidates = self._logits_pointer, candidates
            if n_candidates and candidates:
                out.candidate_ids, out.candidate_logits = ffi.from_buffer("int32_t[]", ids), ffi.from_buffer("float[]", values)
            self._run(m)
            return {"logits": self._logits[:n_logits].copy(), "candidate_ids": ids, "candidate_logits": values}

    def _run(self, m: int, cancellable: bool = True) -> None:
        few, begin = m <= lib.KESTREL_FEW_ROWS, time.perf_counter()
        if not cancellable or few and m * self._row_seconds < _SOON:
            status = lib.kestrel_step(self._handle, self._rows, m, self._output, -1)
        else:
            with _wakeup_descriptor() as descriptor:
                status = lib.kestrel_step(self._handle, self._rows, m, self._output, descriptor)
        if few:
            self._row_seconds = (time.perf_counter() - begin) / m
        if status == _native.E_CANCELLED:
            raise Cancelled()
        if status == _native.E_NOT_FINITE:
            layer, n = self._output.error_layer, self.config.num_hidden_layers
            where = f"layer {layer}" if layer < n else "logits"
            raise KestrelError(f"{self.packed.path}: NaN or Inf at {where}, row {self._output.error_row} of the pass")
        _native.check(status, "step")

    def logits(self, i: int) -> np.ndarray:
        """float32 [vocab_size]: row i of the last `forward`'s wanted rows. A view: the next pass overwrites it."""
        return self._logits[i]

    def sample(self, i: int, sampling: Sampling, position: int) -> int:
        """The token of row i of the last `forward`'s wanted rows, as `sampling` says, for `position`."""
        if sampling.native.temperature > 0 and len(self._work) < self.sampled_vocab:
            self._work = ffi.new("uint64_t[]", self.sampled_vocab)
        if sampling.changes_logits and not self._row:
            self._row = ffi.new("float[]", self.sampled_vocab)
        status = lib.kestrel_sample(self._logits_pointer + i * self.config.vocab_size, self.sampled_vocab, sampling.native, position,
                                    self._work, self._row, self._token)
        _native.check(status, f"sampling at position {position}")
        return self._token[0]

    def logprobs(self, i: int, token: int, count: int) -> TokenLogprobs:
        """Log-probabilities of `token` and of the `count` best ids in row i of the last `forward`'s wanted rows, under the model's own
        distribution over what can be sampled."""
        logprob, ids, values = ffi.new("double *"), ffi.new("int32_t[]", count), ffi.new("double[]", count)
        status = lib.kestrel_logprobs(self._logits_pointer + i * self.config.vocab_size, self.sampled_vocab, token, count, logprob, ids, values)
        _native.check(status, f"log-probabilities of token {token}")
        return TokenLogprobs(token, logprob[0], list(zip(ids, values)))


_SOON = 0.25  # seconds: a signal may wait for a pass of few rows that takes less at the last one's price a row (watching takes 0.1 ms)
_pipe: Optional[Tuple[int, int, int]] = None  # (process id, read end, write end)


@contextmanager
def _wakeup_descriptor() -> Iterator[int]:
    """A descriptor that becomes readable when a signal arrives, for the step to poll; -1 outside the main thread.

    The step runs without the interpreter, so Python's own handler can't run until it is back.
    """
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        yield -1
        return
    if _pipe is None or _pipe[0] != os.getpid():
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        _pipe = (os.getpid(), read, write)
    _, read, write = _pipe
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(previous)
        try:
            pending = os.read(read, 4096)
        except BlockingIOError:
            pending = b""
        if pending and previous >= 0:  # the host's own loop wanted to know
            try:
                os.write(previous, pending)
            except OSError:
                pass
