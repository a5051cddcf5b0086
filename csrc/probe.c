/* probe: how fast this machine reads memory, with the threads that also run the step. SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime; musl shows it only when asked */
#include "kernels.h"
#include "model.h"
#include <string.h>
#include <time.h>

enum {
    TASK_BYTES = 1 << 20,
    MOST_TASKS = 60000,
    SUMS = 8,     /* in flight: enough independent adds to hide their latency on every core */
    AHEAD = 768   /* Zen 3, GB/s on 1 and 2 threads: 16.3, 26.2; with 0: 15.6, 24.9; 1280: 15.2, 25.0; 3072: 14.6, 24.0 */
};

typedef uint64_t vector __attribute__((vector_size(16), aligned(1), may_alias)); /* one register of NEON, of any address */

typedef struct probe {
    const uint8_t *data;
    int64_t bytes, task_bytes;
    atomic_uint_fast64_t sum;
} probe;

static void probe_task(void *arg, int32_t task, int32_t thread)
{
    probe *p = arg;
    const int64_t begin = task * p->task_bytes, end = begin + p->task_bytes < p->bytes ? begin + p->task_bytes : p->bytes;
    const uint8_t *at = p->data + begin, *const stop = p->data + end;
    vector sums[SUMS] = {{0}};
    uint64_t sum = 0;
    (void)thread;
    for (; stop - at >= SUMS * 16; at += SUMS * 16) {
        __builtin_prefetch(at + AHEAD);
        __builtin_prefetch(at + AHEAD + 64);
        for (int i = 0; i < SUMS; i++) sums[i] += *(const vector *)(at + i * 16);
    }
    for (int i = 0; i < SUMS; i++) sum += sums[i][0] + sums[i][1];
    for (; at < stop; at += 8) {
        uint64_t word = 0;
        memcpy(&word, at, stop - at < 8 ? (size_t)(stop - at) : 8);
        sum += word;
    }
    /* relaxed: the pool's end of phase orders it before the caller's load */
    atomic_fetch_add_explicit(&p->sum, sum, memory_order_relaxed);
}

int32_t kestrel_read_probe(kestrel_model *model, const void *data, int64_t bytes, double *seconds, uint64_t *sum)
{
    if (!model || !data || bytes < 1 || !seconds || !sum) return KESTREL_E_ARGUMENT;
    probe p = {.data = data, .bytes = bytes, .task_bytes = TASK_BYTES};
    if (bytes / TASK_BYTES >= MOST_TASKS) p.task_bytes = round_up(bytes / MOST_TASKS + 1, 64);
    struct timespec begin, end;
    kestrel_pool_use(model->pool, model->threads);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    kestrel_pool_run(model->pool, probe_task, &p, (int32_t)((bytes + p.task_bytes - 1) / p.task_bytes));
    clock_gettime(CLOCK_MONOTONIC, &end);
    *seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    *sum = atomic_load_explicit(&p.sum, memory_order_relaxed);
    return KESTREL_OK;
}
