/* Attention of a pass: which spans of keys are walked, and by whom. SPDX-License-Identifier: Apache-2.0
 *
 * A tile is the rows of one kv and one kv head. With enough tiles each is one task that walks its spans; with few, the spans themselves are
 * the tasks and are merged afterwards, in the same ascending order: the same bits for every number of threads.
 */
#include "step.h"
#include <limits.h>
#include <math.h>

static int32_t first_span(const step *s, const kestrel_tile *tile) { return s->model->lo[tile->row0] / SPAN; }
static int32_t last_span(const step *s, const kestrel_tile *tile) { return s->model->hi[tile->row0 + tile->rows - 1] / SPAN; }

/* Keys and values of a span of a tile; next: the tile and span that come after it, or NULL. */
static kestrel_span span_of(const step *s, const kestrel_tile *tile, int32_t span, const kestrel_tile *next, int32_t next_span, float *states, float *work)
{
    const kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    const int32_t group = c->n_heads / c->n_kv_heads;
    kestrel_span a = {.type = tile->kv->type, .d = c->head_dim, .begin = span * SPAN, .queries = tile->rows * group, .q_stride = m->qkv_columns, .group = group,
                      .q = m->qkv + (int64_t)tile->row0 * m->qkv_columns + (int64_t)tile->head * group * c->head_dim, .lo = m->lo + tile->row0,
                      .hi = m->hi + tile->row0, .state = states, .work = work};
    const void *v;
    kestrel_kv_span(tile->kv, s->layer, tile->head, span, &a.k, &a.v);
    a.next = a.k;
    if (next) kestrel_kv_span(next->kv, s->layer, next->head, next_span, &a.next, &v);
    return a;
}

static void empty_states(const step *s, const kestrel_tile *tile, float *states)
{
    const kestrel_config *c = &s->model->config;
    for (int32_t i = 0; i < tile->rows * (c->n_heads / c->n_kv_heads); i++) states[i * (int64_t)(STATE_HEAD + c->head_dim)] = -INFINITY;
}

static void finish_tile(const step *s, const kestrel_tile *tile, const float *states)
{
    const kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    const int64_t d = c->head_dim, group = c->n_heads / c->n_kv_heads;
    for (int32_t i = 0; i < tile->rows * group; i++)
        m->kernels.attention_finish(states + i * (STATE_HEAD + d), d,
                                    m->attended + (tile->row0 + i / group) * c->n_heads * d + (tile->head * group + i % group) * d);
}

/* Enough tiles for all threads: one task walks all spans of its tile. */
static void tile_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const kestrel_tile *tile = &m->tiles[task];
    float *states = m->states + (int64_t)thread * m->tile_queries * (STATE_HEAD + m->config.head_dim);
    float *work = m->work + (int64_t)thread * m->tile_queries * SPAN;
    empty_states(s, tile, states);
    const kestrel_tile *after = task + 1 < s->tiles ? tile + 1 : NULL;
    for (int32_t span = first_span(s, tile), last = last_span(s, tile); span <= last; span++) {
        const bool stay = span < last;
        const kestrel_span a = span_of(s, tile, span, stay ? tile : after, stay ? span + 1 : after ? first_span(s, after) : 0, states, work);
        m->kernels.attention_span(&a);
    }
    finish_tile(s, tile, states);
}

static float *partial_states(const step *s, int32_t tile, int32_t span)
{
    const kestrel_model *m = s->model;
    return m->partials + ((int64_t)tile * WAVE + span % WAVE) * m->tile_queries * (STATE_HEAD + m->config.head_dim);
}

/* Few tiles: each span of a wave is a task with a state of its own, and merge_task joins them in the same ascending order. A span's heads lie together. */
static void span_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const int32_t t = task % s->tiles, span = s->wave_begin + task / s->tiles;
    const kestrel_tile *tile = &m->tiles[t];
    if (span < first_span(s, tile) || span > last_span(s, tile)) return;
    float *states = partial_states(s, t, span);
    empty_states(s, tile, states);
    const bool stay = t + 1 < s->tiles; /* with this span, for its next head */
    const kestrel_tile *after = stay ? tile + 1 : span + 1 < s->wave_begin + s->wave_spans ? m->tiles : NULL;
    const kestrel_span a = span_of(s, tile, span, after, stay ? span : span + 1, states, m->work + (int64_t)thread * m->tile_queries * SPAN);
    m->kernels.attention_span(&a);
}

static void merge_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const kestrel_tile *tile = &m->tiles[task];
    const int64_t state = STATE_HEAD + m->config.head_dim;
    const int32_t queries = tile->rows * (m->config.n_heads / m->config.n_kv_heads);
    float *states = m->wave_states + (int64_t)task * m->tile_queries * state;
    (void)thread;
    if (s->wave_begin <= first_span(s, tile)) empty_states(s, tile, states);
    for (int32_t span = s->wave_begin; span < s->wave_begin + WAVE; span++) {
        if (span < first_span(s, tile) || span > last_span(s, tile)) continue;
        const float *partial = partial_states(s, task, span);
        for (int32_t i = 0; i < queries; i++) m->kernels.attention_merge(states + i * state, partial + i * state, m->config.head_dim);
    }
    if (last_span(s, tile) < s->wave_begin + WAVE) finish_tile(s, tile, states);
}

void kestrel_attend(step *s)
{
    kestrel_model *m = s->model;
    int32_t first = INT_MAX, last = 0;
    for (int32_t t = 0; t < s->tiles; t++) {
        if (first_span(s, &m->tiles[t]) < first) first = first_span(s, &m->tiles[t]);
        if (last_span(s, &m->tiles[t]) > last) last = last_span(s, &m->tiles[t]);
    }
    if (s->threads == 1 || first == last || s->tiles > WAVE_TILES * s->threads) {
        kestrel_run(s, tile_task, s->tiles);
        return;
    }
    for (s->wave_begin = first; s->wave_begin <= last; s->wave_begin += WAVE) {
        s->wave_spans = last - s->wave_begin + 1 < WAVE ? last - s->wave_begin + 1 : WAVE;
        kestrel_run(s, span_task, s->tiles * s->wave_spans);
        kestrel_run(s, merge_task, s->tiles);
    }
}

void kestrel_cut_tiles(step *s)
{
    kestrel_model *m = s->model;
    const int32_t group = m->config.n_heads / m->config.n_kv_heads, most = m->tile_queries / group;
    s->tiles = 0;
    for (int32_t begin = 0; begin < s->m;) {
        int32_t end = begin + 1;
        while (end < s->m && s->rows[end].kv == s->rows[begin].kv) end++;
        for (int32_t row = begin; row < end; row += most)
            for (int32_t head = 0; head < m->config.n_kv_heads; head++)
                m->tiles[s->tiles++] = (kestrel_tile){s->rows[begin].kv, head, row, end - row < most ? end - row : most};
        begin = end;
    }
}
