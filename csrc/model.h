/* The model's inside, for model.c and forward.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_MODEL_H
#define KESTREL_MODEL_H

#include "kernels.h"
#include "kv.h"
#include "threads.h"
#include <stdatomic.h>

enum {
    QUERY_TILE = 128, /* most queries (rows x heads of a group) of one attention tile */
    WAVE = 16,        /* spans whose partial states are held at a time when one head's spans are shared out */
    WAVE_TILES = 2,     /* tiles per thread up to which spans are shared out instead of tiles */
    HEAD_BATCH = 32   /* rows whose logits are held at a time when only candidates are wanted */
};

/* One attention tile: rows [row0, row0 + rows) of one kv, one kv head. */
typedef struct kestrel_tile {
    kestrel_kv *kv;
    int32_t head, row0, rows;
} kestrel_tile;

struct kestrel_model {
    kestrel_config config; /* layers and rope_inv_freq point to own copies */
    kestrel_kernels kernels;
    kestrel_pool *pool;
    int32_t threads, prefill_threads, max_rows; /* threads: of passes of few rows, and of the probe */
    int32_t qkv_columns; /* (n_heads + 2 n_kv_heads) head_dim */

    /* Scratch, rows up to max_rows (R). One allocation. */
    int64_t scratch_bytes;
    void *scratch;
    float *x, *delta, *normed; /* [R][hidden_size]: residual stream, a block's output not yet added, a norm's output */
    float *qkv;                /* [R][qkv_columns] */
    float *attended;           /* [R][n_heads head_dim] */
    float *gate_up;            /* [R][2 intermediate_size]; the activation is written over gate */
    float *cosine, *sine;      /* [n_ropes][R][head_dim / 2] */
    float *head_logits;        /* [HEAD_BATCH][vocab_size] */
    int32_t *lo, *hi;          /* [R]: first and last visible key; lo is the layer's */
    int32_t *wanted;           /* [R]: rows that want an output */
    kestrel_tile *tiles;       /* [R * n_kv_heads] */
    float *states, *work;      /* per thread: [tile_queries][STATE_HEAD + d], [tile_queries][SPAN] */
    float *partials;           /* [WAVE_TILES threads][WAVE][tile_queries][STATE_HEAD + d] */
    float *wave_states;        /* [WAVE_TILES threads][tile_queries][STATE_HEAD + d] */
    float *tail;               /* [R][PANEL]: a matmul's last panel when it hangs over n */
    kestrel_lhs lhs;           /* kp is set per use */
    int32_t tile_queries;      /* max(QUERY_TILE, group) */
    atomic_int bad_row;        /* lowest row found not finite, or INT32_MAX */
};

#endif
