/* Worker pool: the caller drives the phases, workers join those that are open. SPDX-License-Identifier: Apache-2.0
 *
 * A phase ends when its tasks are done, not when every thread has arrived: a worker that the system has put aside holds up nobody
 * unless it holds a task, and with no worker running at all (after a fork) the caller does everything itself.
 */
#include "threads.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { STACK_BYTES = 1 << 20, SPINS = 4000, YIELD_EVERY = 256, LINE = 64 }; /* musl's default stack is 128 KB */

struct kestrel_pool {
    /* epoch << 32 | tasks << 16 | next task. One word, so that a claim always belongs to the phase whose size it saw. */
    _Alignas(LINE) atomic_uint_fast64_t ticket;
    _Alignas(LINE) atomic_int_fast32_t done;
    _Alignas(LINE) atomic_int_fast32_t sleepers;
    atomic_bool stop;
    kestrel_task_fn *fn; /* written before the ticket is published, read only by threads that hold a task of that phase */
    void *arg;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int32_t threads;
    pid_t owner;
    struct worker { kestrel_pool *pool; pthread_t thread; int32_t index; } *workers;
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

/* Takes tasks of the open phase until none is left. */
static void work(kestrel_pool *pool, int32_t thread)
{
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_relaxed);
        if ((ticket & 0xffff) >= (ticket >> 16 & 0xffff)) return;
        /* acquire: fn and arg, and what earlier phases wrote, are visible to the holder of the task */
        ticket = atomic_fetch_add_explicit(&pool->ticket, 1, memory_order_acquire);
        if ((ticket & 0xffff) >= (ticket >> 16 & 0xffff)) return;
        pool->fn(pool->arg, (int32_t)(ticket & 0xffff), thread);
        /* release: the task's outputs, to the caller's acquire in run() */
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
    }
}

static inline bool open_task(kestrel_pool *pool)
{
    const uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_relaxed);
    return (ticket & 0xffff) < (ticket >> 16 & 0xffff);
}

static void *worker_main(void *arg)
{
    struct worker *self = arg;
    kestrel_pool *pool = self->pool;
    kestrel_float_mode_enter();
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        work(pool, self->index);
        int spin = 0;
        while (spin < SPINS && !open_task(pool) && !atomic_load_explicit(&pool->stop, memory_order_relaxed)) relax(spin++);
        if (spin < SPINS) continue;
        pthread_mutex_lock(&pool->mutex);
        /* seq_cst on both sides (here: sleepers then ticket; run(): ticket then sleepers), so that one of the two sees the other */
        atomic_fetch_add(&pool->sleepers, 1);
        for (;;) {
            const uint64_t ticket = atomic_load(&pool->ticket);
            if ((ticket & 0xffff) < (ticket >> 16 & 0xffff) || atomic_load(&pool->stop)) break;
            pthread_cond_wait(&pool->wake, &pool->mutex);
        }
        atomic_fetch_sub(&pool->sleepers, 1);
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

void kestrel_pool_run(kestrel_pool *pool, kestrel_task_fn *fn, void *arg, int32_t tasks)
{
    if (pool->threads == 1 || tasks == 1 || pool->owner != getpid()) {
        for (int32_t t = 0; t < tasks; t++) fn(arg, t, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    const uint64_t epoch = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->ticket, epoch << 32 | (uint64_t)tasks << 16); /* seq_cst: see worker_main */
    if (atomic_load(&pool->sleepers)) wake_all(pool);
    work(pool, 0);
    for (int spin = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < tasks; spin++) relax(spin);
}

kestrel_pool *kestrel_pool_create(int32_t threads)
{
    kestrel_pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    *pool = (kestrel_pool){.threads = 1, .owner = getpid()};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pthread_attr_t attr;
    bool ok = pool->workers && !pthread_attr_init(&attr);
    if (ok) {
        ok = !pthread_attr_setstacksize(&attr, STACK_BYTES);
        for (int32_t i = 1; ok && i < threads; i++) {
            struct worker *w = &pool->workers[i - 1];
            *w = (struct worker){.pool = pool, .index = i};
            ok = !pthread_create(&w->thread, &attr, worker_main, w);
            if (ok) pool->threads = i + 1;
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
        for (int32_t i = 1; i < pool->threads; i++) pthread_join(pool->workers[i - 1].thread, NULL);
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->wake);
    }
    free(pool->workers);
    free(pool);
}
