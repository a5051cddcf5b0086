/* One step in progress, for forward.c and spans.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_STEP_H
#define KESTREL_STEP_H

#include "model.h"

typedef struct step {
    kestrel_model *model;
    const kestrel_row *rows;
    int32_t m, threads;
    kestrel_output *out;
    int32_t row_block; /* rows of one task in phases that go by rows; even, so that a pair of rows is never split */
    int32_t layer;
    /* matmul */
    const kestrel_weight *weight;
    const float *src; /* f32 input rows and their stride, for norm, quantisation and the f32 matmul */
    int64_t src_stride;
    float *dst;
    int64_t dst_stride;
    int32_t dst_rows, tasks;
    const int32_t *finite; /* NULL, or the matmul's output is checked: which row of the pass each of its rows is */
    /* norm */
    const float *gain, *post_gain;
    float *delta;
    const int32_t *pick; /* rows to take, or NULL for all */
    float *maxima, *moments; /* NULL, or where the next matmul's inputs are gathered (calibration) */
    /* attention */
    int32_t tiles, wave_begin, wave_spans;
} step;

/* One phase: tasks [0, tasks) of fn, arg is the step. */
static inline void kestrel_run(step *s, kestrel_task_fn *fn, int32_t tasks)
{
    s->tasks = tasks;
    kestrel_pool_run(s->model->pool, fn, s, tasks);
}

/* Calibration: largest magnitude by channel, and sums of products by block, of the rows that s->weight reads from s->src; the place of
 * the next matmul's follows. Nothing when not asked for. */
void kestrel_observe_maxima(step *s, int32_t rows);
void kestrel_observe_moments(step *s, int32_t rows);

/* Rows of one kv and one kv head, cut so that a tile's queries fit the scratch: once a step, before the first layer. */
void kestrel_cut_tiles(step *s);
/* m->attended from m->qkv and the caches of all rows, for layer s->layer. */
void kestrel_attend(step *s);

#endif
