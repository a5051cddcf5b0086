/* Timing: median over runs, a read-only probe between them. SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#define _POSIX_C_SOURCE 200809L
#include "checkasm.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { RUNS = 9, MOST_THREADS = 64 };
int bench_threads = 1;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

typedef struct job { bench_body *body; void *context; int thread, threads; pthread_t id; } job;
static void *start(void *p)
{
    const job *j = p;
    j->body(j->context, j->thread, j->threads);
    return NULL;
}

static double timed(bench_body *body, void *context)
{
    const int threads = bench_threads < 1 ? 1 : bench_threads > MOST_THREADS ? MOST_THREADS : bench_threads;
    job jobs[MOST_THREADS];
    const double begin = now();
    for (int i = 0; i < threads; i++) {
        jobs[i] = (job){body, context, i, threads, 0};
        if (i && pthread_create(&jobs[i].id, NULL, start, &jobs[i])) { perror("checkasm: pthread_create"); exit(2); }
    }
    start(&jobs[0]);
    for (int i = 1; i < threads; i++) pthread_join(jobs[i].id, NULL);
    return now() - begin;
}

typedef struct range { const uint64_t *words; size_t count; } range;
static volatile uint64_t sink;
static void probe(void *context, int thread, int threads)
{
    const range *r = context;
    uint64_t s[32] = {0};
    const size_t begin = r->count / 32 * (size_t)thread / (size_t)threads * 32, end = r->count / 32 * (size_t)(thread + 1) / (size_t)threads * 32;
    for (size_t i = begin; i < end; i += 32) {
        __builtin_prefetch(r->words + i + 256);
        __builtin_prefetch(r->words + i + 264);
        __builtin_prefetch(r->words + i + 272);
        __builtin_prefetch(r->words + i + 280);
        for (int j = 0; j < 32; j++) s[j] += r->words[i + (size_t)j];
    }
    uint64_t all = 0;
    for (int j = 0; j < 32; j++) all += s[j];
    sink += all;
}

static int ascending(const void *a, const void *b)
{
    const double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

bench_time bench_run(bench_body *body, void *context, const void *data, size_t bytes)
{
    double t[RUNS], p[RUNS] = {0};
    range r = {data, bytes / 8};
    double once = timed(body, context);
    int repeat = 1; /* short bodies are timed in bundles of at least 50 us */
    while (once * repeat < 5e4 && repeat < 1 << 20) repeat *= 2;
    for (int i = 0; i < RUNS; i++) {
        if (bytes) p[i] = timed(probe, &r);
        if (repeat == 1) { t[i] = timed(body, context); continue; }
        const double begin = now();
        for (int j = 0; j < repeat; j++) body(context, 0, 1);
        t[i] = (now() - begin) / repeat;
    }
    qsort(t, RUNS, sizeof *t, ascending);
    qsort(p, RUNS, sizeof *p, ascending);
    return (bench_time){t[RUNS / 2], p[RUNS / 2]};
}

/* ns per MAC of the portable variant for the same row, so that the others print their ratio. */
static struct { char key[96]; double ns_per_mac; } base[256];
static int bases;

void bench_row(const kestrel_variant *v, const char *shape, bench_time t, double macs, double bytes)
{
    char key[96];
    snprintf(key, sizeof key, "%s %s", v->op, shape);
    if (is_portable(v) && bases < 256) {
        memcpy(base[bases].key, key, sizeof key);
        base[bases++].ns_per_mac = t.ns / macs;
    }
    printf("%-17s %-13s %-34s %12.0f ns %8.2f GMAC/s", v->op, v->name, shape, t.ns, macs / t.ns);
    if (t.probe_ns > 0) printf(" %7.2f GB/s %4.0f %% of probe", bytes / t.ns, 100 * t.probe_ns / t.ns);
    for (int i = 0; i < bases; i++)
        if (!strcmp(base[i].key, key) && !is_portable(v)) printf("  x%.1f", base[i].ns_per_mac / (t.ns / macs));
    printf("\n");
    fflush(stdout);
}

void *bench_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { perror("checkasm: mmap"); exit(2); }
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}
