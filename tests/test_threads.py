# SPDX-License-Identifier: Apache-2.0
"""The worker pool and the step that runs on it: no data race that ThreadSanitizer can see, and progress with more threads than cores."""
from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys

import pytest
import toy

# Each phase's tasks read what other threads wrote in the phase before, without atomics: only the pool's own order makes that legal.
POOL = r"""
#include "threads.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST = 300 };
static uint32_t a[MOST], b[MOST];
static int32_t used[64], tasks;
static const uint32_t *from;
static uint32_t *to;

static void mix(void *arg, int32_t task, int32_t thread)
{
    const uint32_t phase = *(const uint32_t *)arg;
    to[task] = from[(task * 7 + phase) % MOST] * 2654435761u + from[task] + phase;
    used[thread]++;
}

int main(int argc, char **argv)
{
    const int32_t threads = atoi(argv[1]);
    const uint32_t phases = (uint32_t)atoi(argv[2]);
    kestrel_pool *pool = kestrel_pool_create(threads);
    if (argc != 3 || !pool) return 2;
    for (uint32_t i = 0; i < MOST; i++) a[i] = i;
    for (uint32_t phase = 0; phase < phases; phase++) {
        tasks = (int32_t)(1 + phase * phase % MOST);
        from = phase % 2 ? b : a;
        to = phase % 2 ? a : b;
        for (int32_t i = tasks; i < MOST; i++) to[i] = from[i];
        kestrel_pool_run(pool, mix, &phase, tasks);
        if (phase % 1000 == 999) nanosleep(&(struct timespec){0, 3000000}, NULL); /* let the workers fall asleep */
    }
    uint64_t sum = 0, ran = 0;
    for (int i = 0; i < MOST; i++) sum = sum * 31 + a[i] + b[i];
    for (int i = 0; i < 64; i++) ran += (uint64_t)used[i];
    kestrel_pool_free(pool);
    printf("%llu %llu\n", (unsigned long long)sum, (unsigned long long)ran);
    return 0;
}
"""

# A model of random weights: passes of many shapes, by several threads, must give the bits of one thread.
STEP = r"""
#include "kestrel.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { V = 75, H = 48, F = 40, L = 2, HEADS = 6, KV_HEADS = 2, D = 8, LENGTH = 330, MOST = 64 };
static uint32_t state = 1;
static float rnd(void) { state = state * 1664525u + 1013904223u; return (float)(int32_t)state * 0x1p-31f; }
static float ones[H], inv_freq[D / 2];

static kestrel_weight weight(int32_t type, int64_t n, int64_t k)
{
    float *rows = malloc((size_t)(n * k) * sizeof *rows);
    for (int64_t i = 0; i < n * k; i++) rows[i] = rnd();
    const size_t bytes = (size_t)kestrel_packed_bytes(type, n, k);
    void *data = aligned_alloc(64, bytes);
    if (kestrel_pack(type, n, k, 0, n, rows, NULL, NULL, data)) exit(3);
    free(rows);
    return (kestrel_weight){.type = type, .n = n, .k = k, .data = data};
}

static void answer(const kestrel_config *config, int32_t threads, int32_t kv_type, float *logits)
{
    static const int sizes[] = {1, 64, 5, 33, 2, 60, 1, 1, 64, 17, 64, 18};
    kestrel_model *model;
    kestrel_kv *kv;
    if (kestrel_model_create(config, NULL, threads, 1 + threads * 3 % 5, MOST, &model) || kestrel_kv_create(model, LENGTH, MOST, kv_type, &kv)) exit(4);
    int32_t position = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        kestrel_row rows[MOST];
        for (int i = 0; i < sizes[s]; i++)
            rows[i] = (kestrel_row){.kv = kv, .position = position + i, .token = (position + i) * 31 % V, .want = KESTREL_WANT_LOGITS};
        kestrel_output out = {.logits = logits + position * V};
        const int32_t status = kestrel_step(model, rows, sizes[s], &out, -1);
        if (status) { fprintf(stderr, "%s\n", kestrel_status_text(status)); exit(5); }
        position += sizes[s];
    }
    if (position != LENGTH) exit(6);
    kestrel_kv_free(kv);
    kestrel_model_free(model);
}

int main(void)
{
    for (int i = 0; i < H; i++) ones[i] = 1;
    if (kestrel_rope_inv_freq(10000, D, inv_freq)) return 2;
    static float one[LENGTH * V], several[LENGTH * V];
    for (int32_t type = 0; type < 2; type++) {
        kestrel_layer layers[L];
        for (int i = 0; i < L; i++)
            layers[i] = (kestrel_layer){.attention_norm = ones, .mlp_norm = ones, .qkv = weight(type, (HEADS + 2 * KV_HEADS) * D, H),
                                        .o = weight(type, H, HEADS * D), .gate_up = weight(type, 2 * F, H), .down = weight(type, H, F)};
        const kestrel_weight embedding = weight(type, V, H);
        const kestrel_config config = {.vocab_size = V, .sampled_vocab = V, .hidden_size = H, .intermediate_size = F, .n_layers = L, .n_heads = HEADS,
                                       .n_kv_heads = KV_HEADS, .head_dim = D, .rms_norm_eps = 1e-5f, .query_scale = 0.3f, .n_ropes = 1, .rope_inv_freq = inv_freq, .final_norm = ones,
                                       .embedding = embedding, .head = embedding, .layers = layers};
        const int32_t kv_type = type == KESTREL_F32 ? KESTREL_F32 : KESTREL_F16;
        answer(&config, 1, kv_type, one);
        for (int32_t threads = 2; threads <= 5; threads++) {
            memset(several, 0, sizeof several);
            answer(&config, threads, kv_type, several);
            if (memcmp(one, several, sizeof one)) { printf("type %d, %d threads differ\n", type, threads); return 1; }
        }
    }
    printf("equal\n");
    return 0;
}
"""


@pytest.fixture(scope="module")
def drivers(root, tmp_path_factory):
    """(pool driver, step driver) built with ThreadSanitizer, linked with the very objects that csrc/build.py makes with it."""
    spec = importlib.util.spec_from_file_location("csrc_build", str(root / "csrc" / "build.py"))
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    done = build.build(sanitize="thread", target="lib", quiet=True)
    folder, made = tmp_path_factory.mktemp("tsan"), []
    for name, text in (("pool", POOL), ("step", STEP)):
        source = folder / f"{name}.c"
        source.write_text(text)
        command = build.compiler() + ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", f"-I{root / 'csrc'}", str(source), *map(str, done.objects.values()),
                                      "-pthread", "-lm", "-o", str(folder / name)]
        subprocess.run(command, check=True)
        made.append(str(folder / name))
    return made


def sanitized(*command):
    """stdout of a program under ThreadSanitizer that reported nothing."""
    done = subprocess.run(list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=300,
                          env=dict(os.environ, TSAN_OPTIONS="halt_on_error=1 exitcode=66"))
    assert done.returncode == 0 and done.stderr == "", f"exit {done.returncode}\n{done.stdout}{done.stderr[:4000]}"
    return done.stdout


@pytest.mark.native_only
def test_the_sanitizer_sees_a_race(tmp_path):
    """Else the tests below could pass with a sanitizer that is asleep."""
    source = tmp_path / "race.c"
    source.write_text("#include <pthread.h>\nstatic int x;\nstatic void *f(void *a) { x++; return a; }\n"
                      "int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); x++; pthread_join(t, 0); return 0; }\n")
    subprocess.run(shlex.split(os.environ.get("CC", "cc")) + ["-g", "-fsanitize=thread", str(source), "-pthread", "-o", str(tmp_path / "race")], check=True)
    done = subprocess.run([str(tmp_path / "race")], stderr=subprocess.PIPE, env=dict(os.environ, TSAN_OPTIONS="exitcode=66"))
    assert done.returncode == 66 and b"data race" in done.stderr


@pytest.mark.native_only
def test_many_small_phases(drivers):
    """20,000 phases of 1 to 300 tasks: every task exactly once, the same sum for any number of threads, no race."""
    phases = 20_000
    tasks = sum(1 + p * p % 300 for p in range(phases))
    answers = {threads: sanitized(drivers[0], str(threads), str(phases)).split() for threads in (1, 2, 4, 8)}
    assert {a[0] for a in answers.values()} == {answers[1][0]}
    assert all(int(a[1]) == tasks for a in answers.values())


@pytest.mark.native_only
def test_the_step_has_no_race(drivers):
    assert sanitized(drivers[1]) == "equal\n"


CODE = """
import os, sys, hashlib
cpus = int(sys.argv[3])
if cpus: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
from kestrel.model import ForwardModel
m = ForwardModel(sys.argv[1], threads=int(sys.argv[2]))
kv, seen = m.new_kv(400), hashlib.sha256()
for i in range(150):
    m.forward(kv, [i % 200], wanted=1)
    seen.update(m.logits(0).tobytes())
m.forward(kv, [i % 200 for i in range(200)], wanted=20)
seen.update(m._logits[:20].tobytes() + kv.export())
print(seen.hexdigest())
"""


def test_more_threads_than_cores_finish(emulated):
    """8 and 33 threads, all on one core, and as many as there are: the same bits, in seconds and not in minutes."""
    found = set()
    for threads, cpus in ((1, 0), (8, 1)) if emulated else ((1, 0), (8, 0), (8, 1), (33, 1)):
        done = subprocess.run([sys.executable, "-c", CODE, toy.long_toy(), str(threads), str(cpus)], stdout=subprocess.PIPE, universal_newlines=True,
                              check=True, timeout=120)
        found.add(done.stdout)
    assert len(found) == 1 and len(found.pop()) == 2 * hashlib.sha256().digest_size + 1


@pytest.mark.native_only
def test_threads_end_with_their_model():
    """Models come and go: no thread stays behind."""
    import gc

    from kestrel.model import ForwardModel

    def threads():
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = threads()
    for _ in range(5):
        model = ForwardModel(toy.packed(), threads=6)
        assert threads() == before + 5
        del model
        gc.collect()
        assert threads() == before


def test_prefill_may_use_other_threads():
    """Passes of at most 33 rows and the longer ones each with their own threads: the same bits, and as many threads as the larger number asks for."""
    import gc

    from kestrel.errors import KestrelError
    from kestrel.model import ForwardModel

    gc.collect()
    found = set()
    for threads, prefill_threads in ((1, None), (1, 3), (3, 1)):
        before = len(os.listdir("/proc/self/task"))
        model = ForwardModel(toy.packed(), threads=threads, prefill_threads=prefill_threads)
        assert len(os.listdir("/proc/self/task")) - before == max(threads, prefill_threads or threads) - 1
        kv, ids = model.new_kv(128), [i % 200 for i in range(80)]
        model.forward(kv, ids, wanted=0)
        model.forward(kv, ids[:5], wanted=5)
        found.add(model._logits[:5].tobytes() + kv.export())
        del model, kv
        gc.collect()
    assert len(found) == 1
    with pytest.raises(KestrelError, match="prefill threads: expected 1 to 256, found 300"):
        ForwardModel(toy.packed(), threads=1, prefill_threads=300)
