/* attention: span, merge, finish against portable. SPDX-License-Identifier: Apache-2.0 */
#include "checkasm.h"
#include "half.h"
#include <stdio.h>
#include <stdlib.h>

enum { BLOCKS = SPAN / KEY_BLOCK };

static const int32_t cache_type[] = {KESTREL_F32, KESTREL_F16, KESTREL_INT8};
static const char *const type_name[] = {[KESTREL_F32] = "f32", [KESTREL_F16] = "f16", [KESTREL_INT8] = "int8"};

/* One span in plain memory: keys [SPAN][d] and values [SPAN][d] as floats that the cache's type holds exactly, int8's scales (else 1). */
typedef struct problem {
    int32_t type, d, begin, queries, group, rows;
    float *keys, *values, *q, *state, *want;
    int32_t *lo, *hi;
    float scale_k[SPAN], scale_v[SPAN];
} problem;

/* x in [-1, 1), times size, as the cache's type has it; int8: the integer, whose scale holds the size. */
static float in_type(int32_t type, float x, float size)
{
    if (type == KESTREL_INT8) return (float)(int32_t)(x * 127.99f);
    return type == KESTREL_F16 ? kestrel_f16_to_f32(kestrel_f32_to_f16(x * size)) : x * size;
}

static void store(void *p, int32_t type, int64_t i, float x)
{
    if (type == KESTREL_INT8) ((int8_t *)p)[i] = x - x != 0 ? -128 : (int8_t)x;
    else if (type == KESTREL_F16) ((uint16_t *)p)[i] = x != x ? 0x7e00 : kestrel_f32_to_f16(x);
    else ((float *)p)[i] = x;
}

typedef enum window { WHOLE, CAUSAL, SLIDING, RAGGED, POISONED, EXTREME, UNDERFLOW, NAN_SCORES, WINDOWS } window;
static const char *const window_name[] = {"whole", "causal", "sliding", "ragged", "poisoned for others", "extreme scores", "scores of +0 and -0", "scores of NaN"};

static problem make(int32_t type, int32_t d, int32_t group, int32_t queries, window window)
{
    problem t = {.type = type, .d = d, .begin = (int32_t)random_below(9) * SPAN, .queries = queries, .group = group, .rows = (queries + group - 1) / group};
    const int64_t q_count = (int64_t)t.rows * group * d, state = (int64_t)queries * (STATE_HEAD + d);
    t.keys = malloc((size_t)(SPAN * d) * 4);
    t.values = malloc((size_t)(SPAN * d) * 4);
    t.q = malloc((size_t)q_count * 4);
    t.state = malloc((size_t)state * 4);
    t.want = malloc((size_t)state * 4);
    t.lo = malloc((size_t)t.rows * 4);
    t.hi = malloc((size_t)t.rows * 4);
    const float size = window == EXTREME ? 40.0f : window == UNDERFLOW ? 1e-6f : 1.0f;
    for (int64_t i = 0; i < SPAN * d; i++) {
        t.keys[i] = in_type(type, random_float(), size);
        t.values[i] = in_type(type, random_below(32) ? random_float() : -0.0f, 1.0f);
    }
    for (int32_t j = 0; j < SPAN; j++) {
        t.scale_k[j] = type == KESTREL_INT8 ? (random_float() + 1.0f) * size / 127 : 1.0f;
        t.scale_v[j] = type == KESTREL_INT8 ? (random_float() + 1.0f) / 127 : 1.0f;
        if (window == NAN_SCORES && random_below(3) == 0) *(type == KESTREL_INT8 ? t.scale_k + j : t.keys + j * d + random_below(d)) = NAN;
    }
    const float scale = window == UNDERFLOW ? 1e-40f : 1.0f; /* products that round to +0 and -0: the first zero is the maximum */
    for (int64_t i = 0; i < q_count; i++) t.q[i] = random_float() * scale;
    const int32_t first = t.begin, last = t.begin + SPAN - 1, start = (int32_t)random_below(SPAN);
    for (int32_t r = 0; r < t.rows; r++) {
        t.lo[r] = first - (int32_t)random_below(200);
        t.hi[r] = last + (int32_t)random_below(200);
        if (window == CAUSAL || window == EXTREME || window == UNDERFLOW || window == NAN_SCORES) t.lo[r] = 0, t.hi[r] = first + start + r;
        if (window == SLIDING) t.hi[r] = first + start + r, t.lo[r] = t.hi[r] - 40;
        if (window == RAGGED || window == POISONED) { /* empty, single and disjoint ranges, in any order */
            t.lo[r] = first - 5 + (int32_t)random_below(SPAN + 10);
            t.hi[r] = t.lo[r] + (random_below(3) ? (int32_t)random_below(SPAN) : 0);
        }
    }
    for (int32_t i = 0; i < queries; i++) {
        float *s = t.state + (int64_t)i * (STATE_HEAD + d);
        const bool empty = random_below(3) == 0;
        for (int32_t c = 0; c < STATE_HEAD + d; c++) s[c] = empty ? NAN : c == 0 ? random_float() * 3 * size : c < 8 ? 0.0f : random_float() + 1.5f;
        if (empty) s[0] = -INFINITY;
    }
    return t;
}

static void drop(problem *t)
{
    free(t->keys); free(t->values); free(t->q); free(t->state); free(t->want); free(t->lo); free(t->hi);
}

static int32_t span_first(const problem *t, int32_t row) { return t->lo[row] > t->begin ? t->lo[row] - t->begin : 0; }
static int32_t span_last(const problem *t, int32_t row) { return t->hi[row] < t->begin + SPAN - 1 ? t->hi[row] - t->begin : SPAN - 1; }

/* Runs f over queries [0, t->queries). K blocks and V rows that no query may read are not mapped (or `dead`, so int8's); dead keys and
 * their scales hold `dead`. */
static void run(const problem *t, kestrel_attention_span_fn *f, int place, float dead, float *state_out)
{
    int32_t first = SPAN, last = -1;
    for (int32_t r = 0; r < t->rows; r++) {
        const int32_t a = span_first(t, r), b = span_last(t, r);
        if (a > b) continue;
        first = a < first ? a : first;
        last = b > last ? b : last;
    }
    if (last < 0) first = last = 0;
    const bool int8 = t->type == KESTREL_INT8, all = int8 || place == AT_TAIL;
    const int64_t size = int8 ? 1 : t->type == KESTREL_F16 ? 2 : 4, d = t->d, scales = int8 ? SPAN * 4 : 0;
    const int64_t block0 = all ? 0 : first / KEY_BLOCK, block1 = int8 ? BLOCKS - 1 : last / KEY_BLOCK, row0 = all ? 0 : first, row1 = int8 ? SPAN - 1 : last;
    const int64_t k_count = (block1 - block0 + 1) * KEY_BLOCK * d, v_count = (row1 - row0 + 1) * d;
    char *k = buffer_new((size_t)(k_count * size + scales), 32, place, 0), *v = buffer_new((size_t)(v_count * size + scales), 16, place, 0);
    for (int64_t j = block0 * KEY_BLOCK; j < (block1 + 1) * KEY_BLOCK; j++)
        for (int64_t c = 0; c < d; c++)
            store(k, t->type, ((j / KEY_BLOCK - block0) * d + c) * KEY_BLOCK + j % KEY_BLOCK, j < first || j > last ? dead : t->keys[j * d + c]);
    for (int64_t j = row0; j <= row1; j++)
        for (int64_t c = 0; c < d; c++) store(v, t->type, (j - row0) * d + c, j < first || j > last ? dead : t->values[j * d + c]);
    for (int64_t j = 0; int8 && j < SPAN; j++) {
        ((float *)(k + k_count))[j] = j < first || j > last ? dead : t->scale_k[j];
        ((float *)(v + v_count))[j] = j < first || j > last ? dead : t->scale_v[j];
    }
    const int64_t q_stride = t->group * d + 7, queries = t->queries, states = queries * (STATE_HEAD + d);
    const int64_t heads_of_last = queries - (int64_t)(t->rows - 1) * t->group, q_count = (t->rows - 1) * q_stride + heads_of_last * d;
    float *q = buffer_new((size_t)q_count * 4, 4, place, 0xff);
    for (int64_t r = 0; r < t->rows; r++) memcpy(q + r * q_stride, t->q + r * t->group * d, (size_t)((r == t->rows - 1 ? heads_of_last : t->group) * d) * 4);
    int32_t *lo = buffer_new((size_t)t->rows * 4, 4, place, 0), *hi = buffer_new((size_t)t->rows * 4, 4, place, 0);
    memcpy(lo, t->lo, (size_t)t->rows * 4);
    memcpy(hi, t->hi, (size_t)t->rows * 4);
    buffer_seal(k); buffer_seal(v); buffer_seal(q); buffer_seal(lo); buffer_seal(hi);
    float *state = buffer_new((size_t)states * 4, 4, place, 0), *work = buffer_new((size_t)(queries * SPAN) * 4, 4, place, place == AT_HEAD ? 0xff : 0x5a);
    memcpy(state, t->state, (size_t)states * 4);
    const kestrel_span span = {k - block0 * KEY_BLOCK * d * size, v - row0 * d * size, t->type, t->d, t->begin, t->queries, q, q_stride, t->group, lo, hi, state, work, NULL};
    f(&span);
    memcpy(state_out, state, (size_t)states * 4);
    check_end_case();
}

/* Softmax over the visible keys of the span alone, in float64. */
static void statement(const problem *t)
{
    const int64_t d = t->d;
    double score[SPAN], out[512];
    for (int32_t i = 0; i < t->queries; i++) {
        const int32_t row = i / t->group, first = span_first(t, row), last = span_last(t, row);
        const float *q = t->q + (int64_t)i * d, *was = t->state + i * (STATE_HEAD + d), *now = t->want + i * (STATE_HEAD + d);
        if (first > last || was[0] != -INFINITY) continue;
        double max = -INFINITY, sum = 0, size = 0;
        for (int32_t j = first; j <= last; j++) {
            score[j] = 0;
            double s = 0;
            for (int64_t c = 0; c < d; c++) {
                const double term = (double)q[c] * t->keys[j * d + c] * t->scale_k[j];
                score[j] += term;
                s += fabs(term);
            }
            max = fmax(max, score[j]);
            size = fmax(size, s);
        }
        for (int64_t c = 0; c < d; c++) out[c] = 0;
        for (int32_t j = first; j <= last; j++) {
            const double p = exp(score[j] - max);
            sum += p;
            for (int64_t c = 0; c < d; c++) out[c] += p * t->values[j * d + c] * t->scale_v[j];
        }
        float got[512];
        kestrel_attention_finish_portable(now, d, got);
        for (int64_t c = 0; c < d; c++) check_near("out", i * d + c, got[c], out[c] / sum, size * (double)d * 0x1p-22 + SPAN * 0x1p-22);
    }
}

static void check_span(const kestrel_variant *v, int32_t type, int32_t d, int32_t group, int32_t queries, window window)
{
    kestrel_attention_span_fn *f = (kestrel_attention_span_fn *)v->function;
    problem t = make(type, d, group, queries, window);
    const int64_t width = STATE_HEAD + d, states = queries * width;
    const bool int8 = type == KESTREL_INT8;
    float *got = malloc((size_t)states * 4);
#define CASE(what) check_case("%s, %s, d %d, group %d, queries %d: %s", type_name[type], window_name[window], d, group, queries, what)
    if (window == POISONED) { /* a key that only some rows see is NaN: the others' bits must not notice */
        const int32_t j = (int32_t)random_below(SPAN);
        CASE("clean");
        run(&t, kestrel_attention_span_portable, AT_TAIL, 0, t.want);
        if (int8) t.scale_k[j] = t.scale_v[j] = NAN;
        for (int64_t c = 0; c < d && !int8; c++) t.keys[j * d + c] = t.values[j * d + c] = NAN;
        for (int place = 0; place < PLACES; place++) {
            CASE("keys hidden from a row are NaN");
            run(&t, f, place, NAN, got);
            for (int32_t i = 0; i < queries; i++) {
                const int32_t row = i / group;
                if (j < span_first(&t, row) || j > span_last(&t, row)) check_same("state of a query that does not see the NaN key", got + i * width, t.want + i * width, (size_t)width, 4);
            }
        }
    } else {
        CASE("portable");
        run(&t, kestrel_attention_span_portable, AT_TAIL, 0, t.want);
        if (is_portable(v) && window != EXTREME && window != UNDERFLOW && window != NAN_SCORES) statement(&t);
        for (int place = 0; place < PLACES; place++) {
            CASE(place == AT_HEAD ? "head" : "tail");
            run(&t, f, place, place == AT_HEAD ? NAN : INFINITY, got);
            check_same("state", got, t.want, (size_t)states, 4);
        }
        /* The first rows of the tile alone: the same bits as in company. */
        problem alone = t;
        alone.queries = (int32_t)random_below(queries) + 1;
        alone.rows = (alone.queries + group - 1) / group;
        CASE("fewer queries");
        run(&alone, f, AT_TAIL, NAN, got);
        check_same("state", got, t.want, (size_t)(alone.queries * width), 4);
    }
#undef CASE
    free(got);
    drop(&t);
}

void check_attention_span(const kestrel_variant *v)
{
    const int32_t d[] = {8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 256};
    for (int type = 0; type < 3; type++)
        for (window window = WHOLE; window < WINDOWS; window++) {
            const int32_t cache = cache_type[type];
            for (size_t i = 0; i < sizeof d / sizeof *d; i++) check_span(v, cache, d[i], 1 + (int32_t)random_below(8), 1 + (int32_t)random_below(20), window);
            for (int32_t queries = 1; queries <= 51; queries += is_emulated() ? 5 : 1) check_span(v, cache, queries % 2 ? 64 : 16, 1 + queries % 8, queries, window);
            for (int32_t group = 1; group <= 8; group++) check_span(v, cache, 64, group, 5 * group, window);
        }
}

/* --- merge and finish ------------------------------------------------------------------------------------------------------- */

static void random_state(float *s, int32_t d, bool empty)
{
    for (int32_t c = 0; c < STATE_HEAD + d; c++) s[c] = c == 0 ? random_float() * 50 : c < 8 ? 0.0f : random_float() + 1.5f;
    if (empty) s[0] = -INFINITY;
}

void check_attention_merge(const kestrel_variant *v)
{
    kestrel_attention_merge_fn *f = (kestrel_attention_merge_fn *)v->function;
    for (int32_t d = 8; d <= 256; d += 8)
        for (int which = 0; which < 8; which++) { /* bits: a empty, b empty, tail */
            const int32_t n = STATE_HEAD + d;
            float a[STATE_HEAD + 256], b[STATE_HEAD + 256], want[STATE_HEAD + 256];
            random_state(a, d, which & 1);
            random_state(b, d, which & 2);
            memcpy(want, a, (size_t)n * 4);
            kestrel_attention_merge_portable(want, b, d);
            check_case("d %d%s%s", d, which & 1 ? ", a empty" : "", which & 2 ? ", b empty" : "");
            if (is_portable(v) && which % 4 == 0) {
                const double max = fmax(a[0], b[0]);
                check_near("max", 0, want[0], max, 0);
                for (int32_t c = 8; c < n; c++) {
                    const double x = a[c] * exp(a[0] - max), y = b[c] * exp(b[0] - max);
                    check_near("state", c, want[c], x + y, (fabs(x) + fabs(y)) * 0x1p-21 + 1e-37);
                }
            }
            float *pa = buffer_new((size_t)n * 4, 4, which >> 2, 0), *pb = buffer_new((size_t)n * 4, 4, which >> 2, 0);
            memcpy(pa, a, (size_t)n * 4);
            memcpy(pb, b, (size_t)n * 4);
            buffer_seal(pb);
            f(pa, pb, d);
            check_same("state", pa, want, (size_t)n, 4);
            check_end_case();
        }
}

void check_attention_finish(const kestrel_variant *v)
{
    kestrel_attention_finish_fn *f = (kestrel_attention_finish_fn *)v->function;
    for (int32_t d = 8; d <= 256; d += 8)
        for (int place = 0; place < PLACES; place++) {
            float state[STATE_HEAD + 256], want[256];
            random_state(state, d, false);
            kestrel_attention_finish_portable(state, d, want);
            check_case("d %d, %s", d, place == AT_HEAD ? "head" : "tail");
            double sum = 0;
            for (int c = 8; c < 16; c++) sum += state[c];
            for (int32_t c = 0; is_portable(v) && c < d; c++) check_near("out", c, want[c], state[STATE_HEAD + c] / sum, fabs(state[STATE_HEAD + c] / sum) * 0x1p-21);
            float *s = buffer_new((size_t)(STATE_HEAD + d) * 4, 4, place, 0), *out = buffer_new((size_t)d * 4, 4, place, 0xc3);
            memcpy(s, state, (size_t)(STATE_HEAD + d) * 4);
            buffer_seal(s);
            f(s, d, out);
            check_same("out", out, want, (size_t)d, 4);
            check_end_case();
        }
}

/* --- bench ---------------------------------------------------------------------------------------------------------------------- */

typedef struct load { const kestrel_variant *v; kestrel_span span; } load;
static void body(void *context, int thread, int threads)
{
    load *l = context;
    (void)threads;
    if (thread) return;
    l->span.state[0] = -INFINITY;
    ((kestrel_attention_span_fn *)l->v->function)(&l->span);
}

void bench_attention_span(const kestrel_variant *v)
{
    const struct { int32_t d, group, queries; } shapes[] = {{64, 3, 3}, {64, 3, 15}, {64, 3, 51}, {64, 3, 192}, {128, 4, 4}, {128, 4, 20}};
    for (int type = 0; type < 3; type++)
        for (int i = 0; i < 6; i++) {
            const int32_t d = shapes[i].d, group = shapes[i].group, queries = shapes[i].queries, rows = queries / group;
            float *k = bench_memory((size_t)(SPAN * d) * 4), *values = bench_memory((size_t)(SPAN * d) * 4), *q = bench_memory((size_t)(queries * d) * 4);
            const int32_t cache = cache_type[type];
            for (int64_t j = 0; j < SPAN * d; j++) { store(k, cache, j, in_type(cache, random_float(), 1)); store(values, cache, j, in_type(cache, random_float(), 1)); }
            for (int64_t j = 0; j < SPAN && cache == KESTREL_INT8; j++)
                ((float *)((char *)k + SPAN * d))[j] = ((float *)((char *)values + SPAN * d))[j] = (random_float() + 1.0f) / 127;
            for (int64_t j = 0; j < queries * d; j++) q[j] = random_float();
            int32_t *lo = bench_memory((size_t)rows * 4), *hi = bench_memory((size_t)rows * 4);
            for (int32_t r = 0; r < rows; r++) hi[r] = 4 * SPAN;
            load l = {v, {k, values, cache, d, SPAN, queries, q, (int64_t)group * d, group, lo, hi, bench_memory((size_t)(queries * (STATE_HEAD + d)) * 4), bench_memory((size_t)(queries * SPAN) * 4), k}};
            for (int32_t j = 0; j < queries; j++) l.span.state[j * (STATE_HEAD + d)] = -INFINITY;
            char shape[40];
            snprintf(shape, sizeof shape, "%s d=%d group=%d queries=%d", type_name[cache], d, group, queries);
            bench_row(v, shape, bench_run(body, &l, NULL, 0), 2.0 * d * SPAN * queries, 0);
        }
}

typedef struct pair { const kestrel_variant *v; float a[STATE_HEAD + 64], b[STATE_HEAD + 64]; } pair;
static void merge_body(void *context, int thread, int threads)
{
    pair *p = context;
    (void)threads;
    if (thread) return;
    if (!strcmp(p->v->op, "attention_merge")) {
        p->a[0] = 0;
        ((kestrel_attention_merge_fn *)p->v->function)(p->a, p->b, 64);
    } else ((kestrel_attention_finish_fn *)p->v->function)(p->b, 64, p->a + STATE_HEAD);
}

static void bench_pair(const kestrel_variant *v)
{
    pair p;
    p.v = v;
    random_state(p.a, 64, false);
    random_state(p.b, 64, false);
    p.b[0] = -20; /* the result stays finite over many merges */
    bench_row(v, "d=64 (elements, not MACs)", bench_run(merge_body, &p, NULL, 0), 64, 0);
}
void bench_attention_merge(const kestrel_variant *v) { bench_pair(v); }
void bench_attention_finish(const kestrel_variant *v) { bench_pair(v); }
