/* attention_span, Armv8.0 NEON: up to eight queries share each converted K and V vector. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * Scores: lanes are keys, fma ascending over d. Softmax: lanes are keys, the eight partial sums are two registers. Values: lanes are
 * d, fma ascending over keys; keys outside a query's range are never visited. Both tiles are n queries x V vectors of 4, n V <= 16. */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>

enum { TILE = 8, MAX_D = 512 };
/* Vectors a tile of n queries is wide: 10 to 16 chains of fma hide its latency, 1 query gets along with 8. */
INLINE int width(int n) { return n <= 2 ? 8 : n <= 4 ? 4 : 2; }

/* The live queries of one tile; keys count from the span's first. */
typedef struct tile {
    const float *q[TILE];
    float *score[TILE];
    int32_t first[TILE], last[TILE];
    int n;
} tile;

/* 4 `vectors` values from p on; f16 and int8 convert exactly. */
INLINE void load(const void *p, int64_t at, int32_t type, int vectors, float32x4_t *out)
{
    UNROLL
    for (int i = 0; i < vectors; i += 2) {
        if (type == KESTREL_INT8) {
            const int16x8_t w = vmovl_s8(vld1_s8((const int8_t *)p + at + 4 * i));
            out[i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(w)));
            out[i + 1] = vcvtq_f32_s32(vmovl_high_s16(w));
        } else if (type == KESTREL_F16) {
            const float16x8_t h = vld1q_f16((const float16_t *)p + at + 4 * i);
            out[i] = vcvt_f32_f16(vget_low_f16(h));
            out[i + 1] = vcvt_high_f32_f16(h);
        } else {
            out[i] = vld1q_f32((const float *)p + at + 4 * i);
            out[i + 1] = vld1q_f32((const float *)p + at + 4 * i + 4);
        }
    }
}

/* Into the second cache level: V while K is read, the next span's K while V is. On avx2 that was worth a third of a span's time; not measured on a board. */
INLINE void fetch(const void *p, int64_t at, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + at + i, 0, 2);
}

INLINE void scores_step(float32x4_t s[TILE][8], const void *k, int64_t at, int32_t type, const float32x4_t *q, int lane, int n)
{
    float32x4_t v[8];
    load(k, at, type, width(n), v);
    UNROLL
    for (int i = 0; i < n; i++)
        UNROLL
        for (int j = 0; j < width(n); j++)
            s[i][j] = lane == 0 ? vfmaq_laneq_f32(s[i][j], v[j], q[i], 0) : lane == 1 ? vfmaq_laneq_f32(s[i][j], v[j], q[i], 1) :
                      lane == 2 ? vfmaq_laneq_f32(s[i][j], v[j], q[i], 2) : vfmaq_laneq_f32(s[i][j], v[j], q[i], 3);
}

INLINE void scores(const kestrel_span *a, const tile *t, int32_t begin, int32_t end, int32_t type, int n)
{
    const int64_t d = a->d;
    const int32_t keys = 4 * width(n);
    const float *scale = kestrel_span_scales(a->k, d); /* int8 only */
    for (int32_t key = begin / keys * keys; key < end; key += keys) {
        const int64_t block = (int64_t)(key / KEY_BLOCK) * d * KEY_BLOCK + key % KEY_BLOCK;
        float32x4_t s[TILE][8], q[TILE];
        UNROLL
        for (int i = 0; i < n; i++)
            UNROLL
            for (int j = 0; j < width(n); j++) s[i][j] = vdupq_n_f32(0.0f);
        /* hot loop: some keys of n queries over d; its twin in values_part() runs over keys */
        for (int64_t c = 0; c < d; c += 4) {
            UNROLL
            for (int i = 0; i < n; i++) q[i] = vld1q_f32(t->q[i] + c);
            fetch(a->v, (key * d + c * keys) * element_bytes(type), 4 * keys * element_bytes(type));
            scores_step(s, a->k, block + c * KEY_BLOCK, type, q, 0, n);
            scores_step(s, a->k, block + (c + 1) * KEY_BLOCK, type, q, 1, n);
            scores_step(s, a->k, block + (c + 2) * KEY_BLOCK, type, q, 2, n);
            scores_step(s, a->k, block + (c + 3) * KEY_BLOCK, type, q, 3, n);
        }
        UNROLL
        for (int i = 0; i < n; i++)
            UNROLL
            for (int j = 0; j < width(n); j++)
                vst1q_f32(t->score[i] + key + 4 * j, type == KESTREL_INT8 ? vmulq_f32(s[i][j], vld1q_f32(scale + key + 4 * j)) : s[i][j]);
    }
}

/* Scores of keys [first, last] -> p, times `scale` if any, in place; state[0] = max, state[8..15] = L. Lanes of other keys take part as
 * -Inf and as +0. */
static void softmax(float *score, int32_t first, int32_t last, const float *scale, float *state)
{
    static const int32_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t lane0 = vld1q_s32(lanes), lane1 = vld1q_s32(lanes + 4);
    const int32x4_t from = vdupq_n_s32(first), to = vdupq_n_s32(last);
    const float32x4_t none = vdupq_n_f32(-INFINITY);
    float32x4_t top0 = none, top1 = none, l0 = vdupq_n_f32(0.0f), l1 = l0;
    for (int32_t j = first & ~7; j <= last; j += 8) {
        const int32x4_t k0 = vaddq_s32(lane0, vdupq_n_s32(j)), k1 = vaddq_s32(lane1, vdupq_n_s32(j));
        const uint32x4_t live0 = vandq_u32(vcgeq_s32(k0, from), vcleq_s32(k0, to)), live1 = vandq_u32(vcgeq_s32(k1, from), vcleq_s32(k1, to));
        top0 = vmaxnmq_f32(top0, vbslq_f32(live0, vld1q_f32(score + j), none));
        top1 = vmaxnmq_f32(top1, vbslq_f32(live1, vld1q_f32(score + j + 4), none));
    }
    float max = vmaxnmvq_f32(vmaxnmq_f32(top0, top1));
    if (max == 0.0f) { /* of +0 and -0 the contract's maximum is the first */
        int32_t j = first;
        while (score[j] != 0.0f) j++;
        max = score[j];
    }
    const float32x4_t m = vdupq_n_f32(max);
    for (int32_t j = first & ~7; j <= last; j += 8) {
        const int32x4_t k0 = vaddq_s32(lane0, vdupq_n_s32(j)), k1 = vaddq_s32(lane1, vdupq_n_s32(j));
        const uint32x4_t live0 = vandq_u32(vcgeq_s32(k0, from), vcleq_s32(k0, to)), live1 = vandq_u32(vcgeq_s32(k1, from), vcleq_s32(k1, to));
        const float32x4_t p0 = kestrel_expf4(vsubq_f32(vld1q_f32(score + j), m)), p1 = kestrel_expf4(vsubq_f32(vld1q_f32(score + j + 4), m));
        const float32x4_t q0 = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(p0), live0));
        const float32x4_t q1 = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(p1), live1));
        vst1q_f32(score + j, scale ? vmulq_f32(q0, vld1q_f32(scale + j)) : q0);
        vst1q_f32(score + j + 4, scale ? vmulq_f32(q1, vld1q_f32(scale + j + 4)) : q1);
        l0 = vaddq_f32(l0, q0);
        l1 = vaddq_f32(l1, q1);
    }
    state[0] = max;
    vst1q_f32(state + 8, l0);
    vst1q_f32(state + 12, l1);
}

INLINE void values_step(float32x4_t o[TILE][8], const void *v, int64_t at, int32_t type, const float32x4_t *p, int lane, int n, int vectors)
{
    float32x4_t x[8];
    load(v, at, type, vectors, x);
    UNROLL
    for (int i = 0; i < n; i++)
        UNROLL
        for (int j = 0; j < vectors; j++)
            o[i][j] = lane == 0 ? vfmaq_laneq_f32(o[i][j], x[j], p[i], 0) : lane == 1 ? vfmaq_laneq_f32(o[i][j], x[j], p[i], 1) :
                      lane == 2 ? vfmaq_laneq_f32(o[i][j], x[j], p[i], 2) : vfmaq_laneq_f32(o[i][j], x[j], p[i], 3);
}

/* out[i][c .. c + 4 vectors) += p v over keys [begin, end) for queries i0 .. i0 + n. */
INLINE void values_part(const kestrel_span *a, float *const *score, float *const *out, int64_t c, int32_t begin, int32_t end, int32_t type, int n, int vectors)
{
    const int64_t d = a->d;
    float32x4_t o[TILE][8], p[TILE];
    UNROLL
    for (int i = 0; i < n; i++)
        UNROLL
        for (int j = 0; j < vectors; j++) o[i][j] = vld1q_f32(out[i] + c + 4 * j);
    int32_t key = begin;
    for (; key + 4 <= end; key += 4) {
        UNROLL
        for (int i = 0; i < n; i++) p[i] = vld1q_f32(score[i] + key);
        fetch(a->next, (key * d + 4 * c) * element_bytes(type), 16 * vectors * element_bytes(type));
        values_step(o, a->v, key * d + c, type, p, 0, n, vectors);
        values_step(o, a->v, (key + 1) * d + c, type, p, 1, n, vectors);
        values_step(o, a->v, (key + 2) * d + c, type, p, 2, n, vectors);
        values_step(o, a->v, (key + 3) * d + c, type, p, 3, n, vectors);
    }
    for (; key < end; key++) {
        UNROLL
        for (int i = 0; i < n; i++) p[i] = vdupq_n_f32(score[i][key]);
        values_step(o, a->v, key * d + c, type, p, 0, n, vectors);
    }
    UNROLL
    for (int i = 0; i < n; i++)
        UNROLL
        for (int j = 0; j < vectors; j++) vst1q_f32(out[i] + c + 4 * j, o[i][j]);
}

INLINE void values(const kestrel_span *a, float *const *score, float *const *out, int32_t begin, int32_t end, int32_t type, int n)
{
    int64_t c = 0;
    if (begin >= end) return;
    for (; c + 4 * width(n) <= a->d; c += 4 * width(n)) values_part(a, score, out, c, begin, end, type, n, width(n));
    if (width(n) > 2)
        for (; c < a->d; c += 8) values_part(a, score, out, c, begin, end, type, n, 2);
}

/* Keys that not all queries of a tile see. */
static void values_alone(const kestrel_span *a, const tile *t, float *const *out, int i, int32_t begin, int32_t end)
{
    if (a->type == KESTREL_F16) values(a, t->score + i, out + i, begin, end, KESTREL_F16, 1);
    else if (a->type == KESTREL_F32) values(a, t->score + i, out + i, begin, end, KESTREL_F32, 1);
    else values(a, t->score + i, out + i, begin, end, KESTREL_INT8, 1);
}

INLINE void run(const kestrel_span *a, const tile *t, float *const *out, int32_t type, int n)
{
    int32_t low = SPAN, high = 0, begin = 0, end = SPAN;
    for (int i = 0; i < n; i++) {
        low = t->first[i] < low ? t->first[i] : low;
        high = t->last[i] + 1 > high ? t->last[i] + 1 : high;
        begin = t->first[i] > begin ? t->first[i] : begin;
        end = t->last[i] + 1 < end ? t->last[i] + 1 : end;
    }
    if (end < begin) end = begin;
    scores(a, t, low, high, type, n);
    for (int i = 0; i < n; i++) softmax(t->score[i], t->first[i], t->last[i], type == KESTREL_INT8 ? kestrel_span_scales(a->v, a->d) : NULL, out[i] - STATE_HEAD);
    for (int i = 0; i < n; i++) values_alone(a, t, out, i, t->first[i], t->last[i] + 1 < begin ? t->last[i] + 1 : begin);
    values(a, t->score, out, begin, end, type, n);
    for (int i = 0; i < n; i++) values_alone(a, t, out, i, t->first[i] > end ? t->first[i] : end, t->last[i] + 1);
}

/* The same code per type and number of queries, so that tiles live in registers. */
INLINE void dispatch(const kestrel_span *a, const tile *t, float *const *out, int32_t type)
{
    switch (t->n) {
    case 1: run(a, t, out, type, 1); break;
    case 2: run(a, t, out, type, 2); break;
    case 3: run(a, t, out, type, 3); break;
    case 4: run(a, t, out, type, 4); break;
    case 5: run(a, t, out, type, 5); break;
    case 6: run(a, t, out, type, 6); break;
    case 7: run(a, t, out, type, 7); break;
    default: run(a, t, out, type, TILE);
    }
}

void kestrel_attention_span_neon(const kestrel_span *a)
{
    const int64_t d = a->d, stride = STATE_HEAD + d;
    float partial[TILE][STATE_HEAD + MAX_D];
    assert(d >= 8 && d % 8 == 0 && d <= MAX_D);
    for (int32_t i = 0; i < a->queries;) {
        tile t = {.n = 0};
        float *out[TILE], *state[TILE];
        for (; i < a->queries && t.n < TILE; i++) {
            const int32_t row = i / a->group;
            const int32_t first = a->lo[row] > a->begin ? a->lo[row] - a->begin : 0;
            const int32_t last = a->hi[row] < a->begin + SPAN - 1 ? a->hi[row] - a->begin : SPAN - 1;
            if (first > last) continue;
            t.q[t.n] = a->q + row * a->q_stride + (i % a->group) * d;
            t.score[t.n] = a->work + (int64_t)i * SPAN;
            t.first[t.n] = first;
            t.last[t.n] = last;
            memset(partial[t.n], 0, (size_t)stride * sizeof(float));
            out[t.n] = partial[t.n] + STATE_HEAD;
            state[t.n++] = a->state + i * stride;
        }
        if (t.n == 0) break;
        if (a->type == KESTREL_F16) dispatch(a, &t, out, KESTREL_F16);
        else if (a->type == KESTREL_F32) dispatch(a, &t, out, KESTREL_F32);
        else dispatch(a, &t, out, KESTREL_INT8);
        for (int j = 0; j < t.n; j++) kestrel_attention_merge_portable(state[j], partial[j], d);
    }
}
