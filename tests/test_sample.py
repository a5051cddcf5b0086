# SPDX-License-Identifier: Apache-2.0
"""After the logits: argmax, what top-k, top-p and min-p keep, the draw, against plain float64 statements in Python."""
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel import _native
from kestrel._native import ffi, lib
from kestrel.errors import KestrelError
from kestrel.sampling import Sampling, Settings


def sample(logits, position=0, sampled=None, **options):
    """The token kestrel_sample chooses, or the status it refuses with as a negative number."""
    row = np.ascontiguousarray(logits, np.float32)
    sampled = len(row) if sampled is None else sampled
    return sample_with(Sampling(Settings(**options)), row, position, sampled)


def sample_with(sampling, row, position=0, sampled=None):
    """As `sample`, with a Sampling that has a past."""
    sampled = len(row) if sampled is None else sampled
    work, scratch, token = ffi.new("uint64_t[]", max(sampled, 1)), ffi.new("float[]", max(sampled, 1)), ffi.new("int32_t *")
    status = lib.kestrel_sample(ffi.from_buffer("float[]", row), sampled, sampling.native, position, work, scratch, token)
    return token[0] if status == 0 else -status


# --- the statement ---------------------------------------------------------------------------------------------------------

def philox(counter, key):
    """Philox-4x32-10 (Salmon et al. 2011), one word at a time."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(seed, position):
    """The draw in [0, 1) that belongs to (seed, position)."""
    c = philox([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    return ((c[0] << 32 | c[1]) >> 11) * 2.0 ** -53


def kept(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """[(id, weight)] that may be drawn, best first: top-k, then top-p of what is left, then min-p relative to the best.

    None where a threshold is nearer than 1e-9 to a sum: two orders of adding may then differ.
    """
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        ranking = ranking[:top_k]
    weights = [math.exp((float(logits[i]) - float(logits[ranking[0]])) / temperature) for i in ranking]
    total, mass, keep = math.fsum(weights), 0.0, []
    for i, w in zip(ranking, weights):
        if keep and (abs(mass - top_p * total) < 1e-9 * total and top_p < 1 or min_p and abs(w - min_p) < 1e-9):
            return None
        if keep and (top_p < 1 and mass >= top_p * total or w < min_p):
            break
        keep.append((i, w))
        mass += w
    return keep


def drawn(keep, u):
    """The id that u in [0, 1) chooses, walking down the ranking; None within 1e-9 of a border."""
    total = math.fsum(w for _, w in keep)
    left = u * total
    for i, w in keep:
        if abs(left - w) < 1e-9 * total:
            return None
        if left < w:
            return i
        left -= w
    return keep[-1][0]


def test_philox_known_answers():
    """The statement above against the vectors published with the generator (Random123, kat_vectors, philox4x32-10)."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


# --- greedy ---------------------------------------------------------------------------------------------------------------

@pytest.mark.native_only
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([-3.5, -0.0, 0.0, 1.0, 1.0000001, 2.0, 3e38, -3e38, -math.inf, 1e-45]), min_size=1, max_size=40))
def test_greedy_is_argmax_lowest_id(logits):
    """Case 18."""
    row = np.array(logits, np.float32)
    if np.isneginf(row).all():
        assert sample(row) == -_native.E_NOT_FINITE
        return
    best = int(row.argmax())  # numpy's argmax is the first of equals, and -0 equals 0
    assert sample(row) == best
    for seed in (0, 1, 2 ** 64 - 1):
        assert sample(row, position=seed % 97, temperature=1.3, top_k=1, seed=seed) == best
        assert sample(row, temperature=0.0, top_p=0.1, min_p=0.5, seed=seed) == best


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 32, 33, 49152])
def test_ties_go_to_the_lowest_id_wherever_they_lie(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        row = rng.uniform(-5, 5, n).astype(np.float32)
        ties = rng.integers(0, n, 3)
        row[ties] = 7
        assert sample(row) == ties.min() == sample(row, temperature=2.0, top_k=1)


def test_ranking_of_equals_is_by_id():
    row = np.zeros(50, np.float32)
    drawn_ids = {sample(row, position=p, temperature=1.0, top_k=3) for p in range(100)}
    assert drawn_ids == {0, 1, 2}
    row[[40, 7]] = 1e-3
    assert {sample(row, position=p, temperature=1.0, top_k=3) for p in range(100)} == {7, 40, 0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 5, 99])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_and_inf_are_errors(bad, at, temperature):
    """Case 18."""
    row = np.linspace(-1, 1, 100).astype(np.float32)
    row[at] = bad
    assert sample(row, temperature=temperature) == -_native.E_NOT_FINITE
    assert sample(row, temperature=temperature, sampled=at) >= 0 if at else True  # beyond `sampled` nobody looks


def test_minus_inf_is_never_drawn():
    row = np.full(64, -np.inf, np.float32)
    row[[3, 60]] = 0.5, 0.25
    assert {sample(row, position=p, temperature=5.0) for p in range(200)} == {3, 60}


@pytest.mark.parametrize("sampled", [1, 319, 320, 383])
def test_padding_of_the_vocabulary_is_never_chosen(sampled):
    """Case 35: the padding has by far the best logits."""
    row = np.random.default_rng(sampled).normal(size=384).astype(np.float32)
    row[sampled:] = 100
    assert sample(row, sampled=sampled) == int(row[:sampled].argmax())
    for position in range(300):
        assert 0 <= sample(row, position, sampled, temperature=3.0) < sampled


# --- what may be drawn, and what is --------------------------------------------------------------------------------------------

options = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.7, 20.0]), "top_k": st.sampled_from([0, 1, 2, 5, 40, 300, 1000]),
    "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.3, 1e-6]), "min_p": st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0])})


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2 ** 32 - 1), st.integers(1, 300), options, st.integers(0, 2 ** 64 - 1), st.integers(0, 2 ** 40))
def test_draws_are_as_stated(row_seed, n, settings_, seed, position):
    row = np.random.default_rng(row_seed).normal(0, 2.5, n).astype(np.float32)
    keep = kept(row, **settings_)
    expected = keep and drawn(keep, uniform(seed, position))
    if expected is not None:
        assert sample(row, position, seed=seed, **settings_) == expected


@pytest.mark.native_only
@pytest.mark.parametrize("settings_", [
    dict(temperature=1.0, top_k=7), dict(temperature=1.0, top_p=0.8), dict(temperature=1.0, min_p=0.1),
    dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05), dict(temperature=0.6, top_k=5, top_p=0.5)])
def test_the_kept_set_is_reached_and_never_left(settings_):
    row = np.random.default_rng(9).normal(0, 1, 60).astype(np.float32)
    expected = {i for i, w in kept(row, **settings_)}
    assert 2 <= len(expected) < 60
    assert {sample(row, p, seed=5, **settings_) for p in range(4000)} == expected


@pytest.mark.native_only
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square over 40,000 draws. The seed is fixed, so the test gives one answer; the limit is the 99.9 % point for 11 degrees."""
    row = np.random.default_rng(4).normal(0, 1, 12).astype(np.float32)
    draws = 40_000
    weights = np.exp(row.astype(np.float64) / temperature)
    expected = weights / weights.sum() * draws
    counts = np.bincount([sample(row, p, temperature=temperature, seed=77) for p in range(draws)], minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 31.26


def test_a_draw_depends_on_seed_and_position_only():
    row = np.random.default_rng(1).normal(0, 1, 500).astype(np.float32)
    at = lambda seed, position: sample(row, position, temperature=1.0, seed=seed)  # noqa: E731
    table = [[at(seed, position) for position in range(50)] for seed in range(5)]
    assert table == [[at(seed, position) for position in range(50)] for seed in range(5)]
    assert len({tuple(line) for line in table}) == 5
    assert len(set(table[0])) > 20
    # all 64 bits of both take part
    assert len({tuple(at(seed, p) for p in range(20)) for seed in (0, 1 << 31, 1 << 32, 1 << 63)}) == 4
    assert [at(0, p) for p in range(20)] != [at(0, p + (1 << 32)) for p in range(20)]


@pytest.mark.parametrize("name, value", [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 2e6), ("top_p", 0.0), ("top_p", 1.01),
    ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.5), ("min_p", math.nan), ("top_k", -1), ("top_k", 1 << 31), ("top_k", 2.5),
    ("seed", -1), ("seed", 1 << 64), ("seed", 1.5)])
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(KestrelError, match=f"^{name}: expected "):
        Settings(**{name: value})


def test_tiny_temperature_is_nearly_greedy_and_huge_is_nearly_uniform():
    row = np.random.default_rng(2).normal(0, 1, 30).astype(np.float32)
    assert {sample(row, p, temperature=1e-3) for p in range(200)} == {int(row.argmax())}
    assert {sample(row, p, temperature=1e6) for p in range(1000)} == set(range(30))
    assert sample(row, temperature=1e-300) == int(row.argmax())


def test_logsumexp_and_compare():
    rng = np.random.default_rng(8)
    for n in (1, 2, 33, 49152):
        p, q = rng.normal(0, 4, (2, n)).astype(np.float32)
        wide = p.astype(np.float64), q.astype(np.float64)
        z = [w.max() + np.log(np.exp(w - w.max()).sum()) for w in wide]
        assert _native.logsumexp(p) == pytest.approx(z[0], abs=1e-12)
        label = n // 2
        kl, nll, nll_reference, same = _native.compare(p, q, label)
        probability = np.exp(wide[0] - z[0])
        assert kl == pytest.approx(float((probability * ((wide[0] - z[0]) - (wide[1] - z[1]))).sum()), abs=1e-11)
        assert nll == pytest.approx(z[1] - wide[1][label], abs=1e-12) and nll_reference == pytest.approx(z[0] - wide[0][label], abs=1e-12)
        assert same == (p.argmax() == q.argmax())
        assert abs(_native.compare(p, p, 0)[0]) < 1e-12 and _native.compare(p, p, 0)[3]
    bad = np.array([0, np.nan], np.float32)
    with pytest.raises(KestrelError):
        _native.logsumexp(bad)
    with pytest.raises(KestrelError):
        _native.compare(np.zeros(2, np.float32), bad, 0)
    for label in (-1, 2):
        with pytest.raises(KestrelError):
            _native.compare(np.zeros(2, np.float32), np.ones(2, np.float32), label)


# --- penalties, bias, what is excluded -------------------------------------------------------------------------------------------

LARGEST_FLOAT = float(np.finfo(np.float32).max)


def changed(row, settings_, prompt=(), answer=(), end_ids=()):
    """The statement of kestrel_sampling, one id at a time in Python's float64: float32 logits that the next token is chosen from."""
    def rounded(x):
        return np.float32(x if x == -math.inf else min(max(x, -LARGEST_FLOAT), LARGEST_FLOAT))

    out = np.array(row, np.float32)
    repeats = settings_.repetition_penalty != 1
    for i in {*prompt, *answer} if repeats else {*answer}:
        if i >= len(out):
            continue
        x, times = float(out[i]), list(answer).count(i)
        if x > 0:
            x = x / settings_.repetition_penalty
        else:
            x = x * settings_.repetition_penalty
        if times:
            x = x - (settings_.presence_penalty + times * settings_.frequency_penalty)
        out[i] = rounded(x)
    for i, bias in settings_.logit_bias.items():
        out[i] = rounded(float(out[i]) + bias)
    if len(answer) < settings_.min_tokens:
        out[[i for i in end_ids if i < len(out)]] = -math.inf
    return out


numbers = st.floats(-3, 3) | st.sampled_from([0.0, -0.0, 1e-45, 1e6, -1e6])
penalties = st.fixed_dictionaries({
    "repetition_penalty": st.sampled_from([1.0, 1.1, 1.3, 0.7, 5e-324, 1e6]) | st.floats(0.1, 3), "presence_penalty": numbers, "frequency_penalty": numbers,
    "logit_bias": st.dictionaries(st.integers(0, 29), numbers, max_size=5)})


@settings(max_examples=120, deadline=None)
@given(st.lists(st.floats(-20, 20, width=32) | st.sampled_from([0.0, -0.0, 3e38, -3e38, -math.inf, 1e-45, -1e-45]), min_size=30, max_size=40),
       penalties, st.lists(st.integers(0, 45), max_size=20), st.lists(st.integers(0, 29), max_size=20), st.integers(0, 6),
       st.lists(st.integers(0, 45), max_size=3))
def test_logits_are_changed_as_stated(logits, options_, prompt, answer, min_tokens, end_ids):
    """Every bit of the row that the token is chosen from, and the token, greedy and drawn. The prompt and the end ids may have padding ids."""
    row = np.array(logits, np.float32)
    for temperature in (0.0, 1.5):
        settings_ = Settings(min_tokens=min_tokens, temperature=temperature, **options_)
        sampling = Sampling(settings_, len(row), prompt, end_ids)
        for token in answer:
            sampling.commit(token)
        expected = changed(row, settings_, prompt, answer, end_ids)
        scratch, work, token = ffi.new("float[]", [7.5] * len(row)), ffi.new("uint64_t[]", len(row)), ffi.new("int32_t *")
        status = lib.kestrel_sample(ffi.from_buffer("float[]", row), len(row), sampling.native, 3, work, scratch, token)
        assert row.tobytes() == np.array(logits, np.float32).tobytes()
        if sampling.native.n_seen or sampling.native.n_bias or sampling.native.n_excluded:
            assert sampling.changes_logits
            assert bytes(ffi.buffer(scratch)) == expected.tobytes()
        else:
            assert list(scratch) == [7.5] * len(row) and expected.tobytes() == row.tobytes()
        assert (token[0] if status == 0 else -status) == sample(expected, 3, temperature=temperature)


def test_repetition_counts_the_prompt_and_the_others_do_not():
    row = np.array([3.0, 2.0, -1.0, -1.5], np.float32)
    at = lambda prompt=(), answer=(), **options: _after(Sampling(Settings(**options), 4, prompt), answer, row)  # noqa: E731
    assert at() == 0
    assert at([0], repetition_penalty=2.0) == 1 and at([], [0], repetition_penalty=2.0) == 1 and at([0, 1], repetition_penalty=2.0) == 0
    assert at([0], presence_penalty=2.0) == 0 and at([], [0], presence_penalty=2.0) == 1
    assert at([0] * 9, frequency_penalty=0.6) == 0 and at([], [0], frequency_penalty=0.6) == 0 and at([], [0, 0], frequency_penalty=0.6) == 1
    assert at([], [0, 0, 0], presence_penalty=0.9) == 0  # once, not each time
    assert at(logit_bias={3: 4.6}) == 3 and at(logit_bias={0: -1e6, 1: -1e6}) == 2


def _after(sampling, answer, row):
    for token in answer:
        sampling.commit(token)
    return sample_with(sampling, row)


def test_end_ids_are_out_until_min_tokens_are_committed():
    row = np.array([1.0, 5.0, 4.0, 3.0], np.float32)
    sampling = Sampling(Settings(min_tokens=2), 4, end_ids=(1, 2, 99))
    assert sample_with(sampling, row) == 3
    sampling.commit(3)
    assert sample_with(sampling, row) == 3
    sampling.commit(3)
    assert sample_with(sampling, row) == 1
    nothing_left = Sampling(Settings(min_tokens=1, temperature=1.0), 4, end_ids=(0, 1, 2, 3))
    assert sample_with(nothing_left, row) == -_native.E_NOT_FINITE


@pytest.mark.parametrize("change", [
    {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0}, {"repetition_penalty": math.nan}, {"repetition_penalty": math.inf},
    {"presence_penalty": math.nan}, {"presence_penalty": 2e6}, {"frequency_penalty": -math.inf}, {"n_seen": -1}, {"n_bias": -1}, {"n_excluded": -1},
    {"seen_ids": ffi.NULL}, {"seen_counts": ffi.NULL}, {"bias": ffi.NULL}, {"bias_ids": ffi.NULL}, {"excluded_ids": ffi.NULL}])
def test_the_library_refuses_what_it_can_not_use(change):
    row = np.arange(8, dtype=np.float32)
    sampling = Sampling(Settings(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=1), 8, [1, 2], [5])
    assert sample_with(sampling, row) == 7
    for name, value in change.items():
        setattr(sampling.native, name, value)
    argument = sample([math.nan]), sample_with(sampling, row)
    assert argument == (-_native.E_NOT_FINITE, -lib.KESTREL_E_ARGUMENT)


def test_ids_outside_the_row_and_a_missing_row_are_refused():
    row = np.arange(8, dtype=np.float32)
    for name in ("_seen_ids", "_bias_ids", "_excluded"):
        for bad in (-1, 8):
            sampling = Sampling(Settings(repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=1), 8, [1, 2], [5])
            getattr(sampling, name)[0] = bad
            assert sample_with(sampling, row) == -lib.KESTREL_E_ARGUMENT
    token = ffi.new("int32_t *")
    for settings_, status in ((Settings(), 0), (Settings(logit_bias={3: 1.0}), lib.KESTREL_E_ARGUMENT)):
        assert lib.kestrel_sample(ffi.from_buffer("float[]", row), 8, Sampling(settings_, 8).native, 0, ffi.NULL, ffi.NULL, token) == status


# --- log-probabilities -------------------------------------------------------------------------------------------------------------

def logprobs(row, token, count, sampled=None):
    sampled = len(row) if sampled is None else sampled
    chosen, ids, values = ffi.new("double *"), ffi.new("int32_t[]", max(count, 1)), ffi.new("double[]", max(count, 1))
    status = lib.kestrel_logprobs(ffi.from_buffer("float[]", row), sampled, token, count, chosen, ids, values)
    return (chosen[0], list(ids)[:count], list(values)[:count]) if status == 0 else -status


@pytest.mark.parametrize("n", [1, 2, 33, 257, 49152])
def test_logprobs(n):
    rng = np.random.default_rng(n)
    row = np.round(rng.normal(0, 4, n)).astype(np.float32)  # ties everywhere, at the edge of the best too
    wide = row.astype(np.float64)
    stated = wide - wide.max() - math.log(math.fsum(np.exp(wide - wide.max())))
    for count in sorted({0, 1, min(n, 20), min(n, 100)}):
        token = int(rng.integers(0, n))
        chosen, ids, values = logprobs(row, token, count)
        assert ids == sorted(range(n), key=lambda i: (-row[i], i))[:count]
        assert chosen == pytest.approx(stated[token], abs=1e-12) and values == pytest.approx(list(stated[ids]), abs=1e-12)
        assert [chosen] == [v for i, v in zip(ids, values) if i == token] or token not in ids
    if n > 2:
        padded = np.concatenate([row, np.full(9, 50, np.float32)])
        assert logprobs(padded, n // 2, 2, n) == logprobs(row, n // 2, 2)
    for token, count in ((-1, 0), (n, 0), (0, -1), (0, n + 1)):
        assert logprobs(row, token, count) == -lib.KESTREL_E_ARGUMENT
    row[n // 2] = np.nan
    assert logprobs(row, 0, 1) == -_native.E_NOT_FINITE
