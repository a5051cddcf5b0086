/* Timing: the best of the runs (what else the machine does only ever adds), a read-only probe between them. SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#define _POSIX_C_SOURCE 200809L
#include "checkasm.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { RUNS = 15, MOST_THREADS = 64 };
int bench_threads = 1;

/* CPU time of this thread: what other processes take of a shared machine does not count. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

typedef struct job { bench_body *body; void *context; int thread, threads; pthread_t id; double ns; } job;
static void *start(void *p)
{
    job *j = p;
    const double begin = now();
    j->body(j->context, j->thread, j->threads);
    j->ns = now() - begin;
    return NULL;
}

static double timed(bench_body *body, void *context)
{
    const int threads = bench_threads < 1 ? 1 : bench_threads > MOST_THREADS ? MOST_THREADS : bench_threads;
    job jobs[MOST_THREADS];
    double slowest = 0;
    for (int i = 0; i < threads; i++) {
        jobs[i] = (job){body, context, i, threads, 0, 0};
        if (i && pthread_create(&jobs[i].id, NULL, start, &jobs[i])) { perror("checkasm: pthread_create"); exit(2); }
    }
    start(&jobs[0]);
    for (int i = 0; i < threads; i++) {
        if (i) pthread_join(jobs[i].id, NULL);
        slowest = jobs[i].ns > slowest ? jobs[i].ns : slowest;
    }
    return slowest;
}

typedef struct range { const uint64_t *words; size_t count; } range;
static volatile uint64_t sink;
typedef uint64_t lanes __attribute__((vector_size(32)));
static void probe(void *context, int thread, int threads)
{
    const range *r = context;
    const size_t lines = r->count / 64, begin = lines * (size_t)thread / (size_t)threads, end = lines * (size_t)(thread + 1) / (size_t)threads;
    lanes s[8] = {{0}};
    for (const lanes *p = (const lanes *)r->words + begin * 16, *stop = (const lanes *)r->words + end * 16; p < stop; p += 16) {
        for (int j = 0; j < 16; j += 2) __builtin_prefetch((const char *)(p + j) + 3072);
        for (int j = 0; j < 16; j++) s[j % 8] += p[j];
    }
    for (int j = 1; j < 8; j++) s[0] += s[j];
    sink += s[0][0] + s[0][1] + s[0][2] + s[0][3];
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
    bench_time best = {t[0], p[0]};
    for (int i = 1; i < RUNS; i++) {
        best.ns = t[i] < best.ns ? t[i] : best.ns;
        best.probe_ns = p[i] < best.probe_ns ? p[i] : best.probe_ns;
    }
    return best;
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

/* Ordinary pages, as a mapped model file has them. */
void *bench_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { perror("checkasm: mmap"); exit(2); }
    return p;
}
