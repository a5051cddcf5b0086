/* Worker pool: the caller drives the phases, workers join those that are open. SPDX-License-Identifier: Apache-2.0
 *
 * Each thread has a span of a phase's tasks, the same one for the same phase of the next token, and takes them in ascending order: what it reads
 * is one stream. Who has finished his own takes from the ends of the others' (Cilk's stealing, Blumofe & Leiserson 1999).
 * A phase ends when its tasks are done, not when every thread has arrived: a worker that the system has put aside holds up nobody
 * unless it holds a task, and with no worker running at all (after a fork) the caller does everything itself.
 */
#include "threads.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { STACK_BYTES = 1 << 20, SPINS = 4000, YIELD_EVERY = 256, LINE = 64 }; /* musl's default stack is 128 KB */
/* What an idle worker fetches: about what it reads while one row is normed and quantised. Decode at 2 threads took 1.01 to 1.02 of the time with 1 KB,
 * 1.05 with 64 KB. */
enum { AHEAD_BYTES = 32768, AHEAD_STEP = 4 * LINE };

struct kestrel_pool {
    _Alignas(LINE) atomic_int_fast32_t done;
    _Alignas(LINE) atomic_bool stop;
    kestrel_task_fn *fn; /* written before the spans are published, read only by threads that hold a task of that phase */
    void *arg;
    uint32_t epoch; /* the caller's alone, as is `active` */
    int32_t active; /* threads that get spans */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int32_t threads, started;
    pid_t owner;
    struct worker {
        /* epoch << 32 | end << 16 | begin of the tasks not yet taken. One word, so that a claim always belongs to the phase it saw. */
        _Alignas(LINE) atomic_uint_fast64_t span;
        atomic_uintptr_t ahead; /* where the thread's share of what the next phase reads begins, or 0 */
        atomic_bool asleep;
        kestrel_pool *pool;
        pthread_t thread;
        int32_t index;
    } *workers; /* [threads]; 0 is the caller, without a thread of its own */
};

static inline void relax(int spin)
{
    if (spin % YIELD_EVERY == YIELD_EVERY - 1) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on Cortex-A; isb waits for about a pause */
#endif
}

uint64_t kestrel_float_mode_enter(void)
{
#if defined(__x86_64__)
    const uint64_t old = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return old;
#elif defined(__aarch64__)
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return old;
#else
    return 0;
#endif
}

void kestrel_float_mode_leave(uint64_t mode)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(mode));
#else
    (void)mode;
#endif
}

static inline uint32_t first(uint64_t span) { return span & 0xffff; }
static inline uint32_t end(uint64_t span) { return span >> 16 & 0xffff; }

/* Takes a task from the span's beginning, or from its end; -1 when it is empty. */
static int32_t take(struct worker *from, bool front)
{
    uint64_t span = atomic_load_explicit(&from->span, memory_order_relaxed);
    while (first(span) < end(span))
        /* acquire: fn and arg, and what earlier phases wrote, are visible to the holder of the task */
        if (atomic_compare_exchange_weak_explicit(&from->span, &span, front ? span + 1 : span - (1 << 16), memory_order_acquire, memory_order_relaxed))
            return (int32_t)(front ? first(span) : end(span) - 1);
    return -1;
}

/* Tasks of the open phase until none is left: one's own, then the others'. */
static void work(kestrel_pool *pool, int32_t thread)
{
    int32_t task, done = 0;
    while ((task = take(&pool->workers[thread], true)) >= 0) {
        pool->fn(pool->arg, task, thread);
        done++;
    }
    for (int32_t i = 1; i < pool->threads; i++)
        while ((task = take(&pool->workers[(thread + i) % pool->threads], false)) >= 0) {
            pool->fn(pool->arg, task, thread);
            done++;
        }
    /* release: the tasks' outputs, to the caller's acquire in run(). Of one phase: it can't end while this thread has not counted its tasks. */
    if (done) atomic_fetch_add_explicit(&pool->done, done, memory_order_release);
}

static inline bool has_tasks(struct worker *self)
{
    const uint64_t span = atomic_load_explicit(&self->span, memory_order_relaxed);
    return first(span) < end(span);
}

/* Waits for tasks, with the share of the next phase's memory that was announced on its way into the cache meanwhile. False: time to sleep. */
static bool wait_for_tasks(struct worker *self)
{
    kestrel_pool *pool = self->pool;
    int32_t fetched = 0;
    for (int spin = 0; spin < SPINS; spin++) {
        if (has_tasks(self) || atomic_load_explicit(&pool->stop, memory_order_relaxed)) return true;
        const uintptr_t ahead = atomic_load_explicit(&self->ahead, memory_order_relaxed);
        if (ahead && fetched < AHEAD_BYTES)
            for (int32_t stop = fetched + AHEAD_STEP; fetched < stop; fetched += LINE) __builtin_prefetch((const char *)ahead + fetched, 0, 2);
        else relax(spin);
    }
    return false;
}

static void *worker_main(void *arg)
{
    struct worker *self = arg;
    kestrel_pool *pool = self->pool;
    kestrel_float_mode_enter();
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        work(pool, self->index);
        if (wait_for_tasks(self)) continue;
        pthread_mutex_lock(&pool->mutex);
        /* seq_cst on both sides (here: asleep then span; run(): span then asleep), so that one of the two sees the other */
        atomic_store(&self->asleep, true);
        for (;;) {
            const uint64_t span = atomic_load(&self->span);
            if (first(span) < end(span) || atomic_load(&pool->stop)) break;
            pthread_cond_wait(&pool->wake, &pool->mutex);
        }
        atomic_store(&self->asleep, false);
        pthread_mutex_unlock(&pool->mutex);
    }
    return NULL;
}

static void wake_all(kestrel_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

/* The first task of a thread's span: thread 0 is never the one that goes without. */
static int32_t share(const kestrel_pool *pool, int32_t tasks, int32_t thread)
{
    return thread >= pool->active ? tasks : (int32_t)(((int64_t)tasks * thread + pool->active - 1) / pool->active);
}

void kestrel_pool_use(kestrel_pool *pool, int32_t threads) { pool->active = threads < pool->threads ? threads : pool->threads; }

void kestrel_pool_ahead(kestrel_pool *pool, const void *data, int64_t task_bytes, int32_t tasks)
{
    for (int32_t i = 0; i < pool->active && i < tasks; i++)
        atomic_store_explicit(&pool->workers[i].ahead, (uintptr_t)data + (uintptr_t)(task_bytes * share(pool, tasks, i)), memory_order_relaxed);
}

void kestrel_pool_run(kestrel_pool *pool, kestrel_task_fn *fn, void *arg, int32_t tasks)
{
    if (pool->active == 1 || tasks == 1 || pool->owner != getpid()) {
        for (int32_t t = 0; t < tasks; t++) fn(arg, t, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    pool->epoch++;
    bool asleep = false;
    for (int32_t i = pool->active - 1; i >= 0; i--) {
        struct worker *w = &pool->workers[i];
        const uint64_t span = (uint64_t)pool->epoch << 32 | (uint64_t)share(pool, tasks, i + 1) << 16 | (uint64_t)share(pool, tasks, i);
        atomic_store_explicit(&w->ahead, 0, memory_order_relaxed);
        atomic_store(&w->span, span); /* seq_cst: see worker_main */
        asleep |= first(span) < end(span) && atomic_load(&w->asleep);
    }
    if (asleep) wake_all(pool);
    work(pool, 0);
    for (int spin = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < tasks; spin++) relax(spin);
}

kestrel_pool *kestrel_pool_create(int32_t threads)
{
    kestrel_pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    pool->started = 1;
    pool->owner = getpid();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    kestrel_pool_use(pool, threads);
    pool->workers = aligned_alloc(LINE, (size_t)threads * sizeof *pool->workers);
    if (pool->workers) memset(pool->workers, 0, (size_t)threads * sizeof *pool->workers);
    pthread_attr_t attr;
    bool ok = pool->workers && !pthread_attr_init(&attr);
    if (ok) {
        ok = !pthread_attr_setstacksize(&attr, STACK_BYTES);
        for (int32_t i = 1; ok && i < threads; i++) {
            struct worker *w = &pool->workers[i];
            w->pool = pool;
            w->index = i;
            ok = !pthread_create(&w->thread, &attr, worker_main, w);
            if (ok) pool->started = i + 1;
        }
        pthread_attr_destroy(&attr);
    }
    if (ok) return pool;
    kestrel_pool_free(pool);
    return NULL;
}

void kestrel_pool_free(kestrel_pool *pool)
{
    if (!pool) return;
    if (pool->owner == getpid()) {
        atomic_store(&pool->stop, true);
        wake_all(pool);
        for (int32_t i = 1; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->wake);
    }
    free(pool->workers);
    free(pool);
}
