/* Worker pool. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_THREADS_H
#define KESTREL_THREADS_H

#include <stdint.h>

typedef struct kestrel_pool kestrel_pool;
/* One task of a phase; tasks write disjoint outputs, so which thread runs which never shows. thread in [0, threads). */
typedef void kestrel_task_fn(void *arg, int32_t task, int32_t thread);

kestrel_pool *kestrel_pool_create(int32_t threads); /* threads - 1 workers; NULL when a thread can't be had */
void kestrel_pool_free(kestrel_pool *pool);
/* How many threads the phases from now on are shared out to, at most all; the others sleep. */
void kestrel_pool_use(kestrel_pool *pool, int32_t threads);
/* The next phase that is shared out has `tasks` tasks, and task i begins by reading at data + i task_bytes: workers that wait fetch the
 * beginning of their share meanwhile. A hint: nothing depends on it. */
void kestrel_pool_ahead(kestrel_pool *pool, const void *data, int64_t task_bytes, int32_t tasks);
/* Runs tasks 0 .. tasks - 1 and returns when all are done. The caller works too. tasks <= 65000. */
void kestrel_pool_run(kestrel_pool *pool, kestrel_task_fn *fn, void *arg, int32_t tasks);

/* Rounding to nearest even, no flush of denormals, whatever the host program has set; returns what to restore. */
uint64_t kestrel_float_mode_enter(void);
void kestrel_float_mode_leave(uint64_t mode);

#endif
