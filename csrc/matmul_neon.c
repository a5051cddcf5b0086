/* matmul_int8 and matmul_int4, Armv8.0 NEON: smull and smlal in 16 bits. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * int8: two products of at most 127 * 127 fit int16, so every smull + smlal pair (8 k) is widened by one sadalp. A sum's register holds
 * two rows, two partial sums each; one addp a group joins them.
 * int4: 16 products of at most 8 * 127 meet in a 16-bit lane, so that a group needs no widening before its end: eight smull or smlal
 * for 64 MACs and a token, where int8 has four sadalp more. Splitting 8 k of 8 rows takes six shifts, shared by the tokens. A sum's
 * register holds two rows, four partial sums of 16 bits each. A72's model, 1 to 4 tokens: 85, 98, 95, 90 % of 8 MAC/cycle.
 * Lanes are rows: the order of float operations is the contract's. */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>

enum { TILE = 4, AHEAD = 1024 /* bytes: past a DRAM latency at the stream's pace */ };
_Static_assert(GROUP / 4 * 8 * 127 <= 32767, "a group's products by int4 must fit 16 bits");

/* The hot loop's instructions stay where they are written: left to itself gcc 12 hoists loads over the register file and spills
 * (68 % of peak at 2 tokens). */
INLINE int32x4_t load_16(const int8_t *p)
{
    int32x4_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8_t (*)[16])p));
    return v;
}
INLINE const int8_t *load_32(const int8_t *p, int8x16_t v[2])
{
    __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(v[0]), "=w"(v[1]), "+r"(p) : "m"(*(const int8_t (*)[32])p));
    return p;
}
INLINE float32x2_t load_scale(const float *p)
{
    float32x2_t v;
    __asm__ volatile("ldr %s0, %1" : "=w"(v) : "m"(*p));
    return v;
}
/* 8 k of 8 rows of int4: low takes the first 4 k, high the next. */
INLINE const int8_t *load_split(const int8_t *p, int8x16_t low[2], int8x16_t high[2])
{
    __asm__ volatile("ldp %q2, %q3, [%4], #32\n\tshl %0.16b, %2.16b, #4\n\tshl %1.16b, %3.16b, #4\n\t"
                     "sshr %2.16b, %2.16b, #4\n\tsshr %3.16b, %3.16b, #4\n\tsshr %0.16b, %0.16b, #4\n\tsshr %1.16b, %1.16b, #4"
                     : "=&w"(low[0]), "=&w"(low[1]), "=&w"(high[0]), "=&w"(high[1]), "+r"(p) : "m"(*(const int8_t (*)[32])p));
    return p;
}
/* c += 8 k of 8 rows: a, b the weights of 4 k each, x and y the token's 4 k in every lane. */
#define PRODUCTS                                                             \
    "smull %4.8h, %8.8b, %12.8b\n\tsmull2 %5.8h, %8.16b, %12.16b\n\t"         \
    "smull %6.8h, %9.8b, %12.8b\n\tsmull2 %7.8h, %9.16b, %12.16b\n\t"         \
    "smlal %4.8h, %10.8b, %13.8b\n\tsmlal2 %5.8h, %10.16b, %13.16b\n\t"       \
    "smlal %6.8h, %11.8b, %13.8b\n\tsmlal2 %7.8h, %11.16b, %13.16b\n\t"
INLINE void dot_8(int32x4_t c[4], const int8x16_t a[2], const int8x16_t b[2], int32x4_t x, int32x4_t y, bool first)
{
    int16x8_t s0, s1, s2, s3;
    if (first)
        __asm__ volatile(PRODUCTS "saddlp %0.4s, %4.8h\n\tsaddlp %1.4s, %5.8h\n\tsaddlp %2.4s, %6.8h\n\tsaddlp %3.4s, %7.8h"
                         : "=&w"(c[0]), "=&w"(c[1]), "=&w"(c[2]), "=&w"(c[3]), "=&w"(s0), "=&w"(s1), "=&w"(s2), "=&w"(s3)
                         : "w"(a[0]), "w"(a[1]), "w"(b[0]), "w"(b[1]), "w"(x), "w"(y));
    else
        __asm__ volatile(PRODUCTS "sadalp %0.4s, %4.8h\n\tsadalp %1.4s, %5.8h\n\tsadalp %2.4s, %6.8h\n\tsadalp %3.4s, %7.8h"
                         : "+w"(c[0]), "+w"(c[1]), "+w"(c[2]), "+w"(c[3]), "=&w"(s0), "=&w"(s1), "=&w"(s2), "=&w"(s3)
                         : "w"(a[0]), "w"(a[1]), "w"(b[0]), "w"(b[1]), "w"(x), "w"(y));
}

/* c, in 16 bits, += 4 k of 8 rows, a, by the token's 4 k in every lane of x. */
INLINE void dot_4(int32x4_t c[4], const int8x16_t a[2], int32x4_t x, bool first)
{
    if (first)
        __asm__ volatile("smull %0.8h, %4.8b, %6.8b\n\tsmull2 %1.8h, %4.16b, %6.16b\n\tsmull %2.8h, %5.8b, %6.8b\n\tsmull2 %3.8h, %5.16b, %6.16b"
                         : "=&w"(c[0]), "=&w"(c[1]), "=&w"(c[2]), "=&w"(c[3]) : "w"(a[0]), "w"(a[1]), "w"(x));
    else
        __asm__ volatile("smlal %0.8h, %4.8b, %6.8b\n\tsmlal2 %1.8h, %4.16b, %6.16b\n\tsmlal %2.8h, %5.8b, %6.8b\n\tsmlal2 %3.8h, %5.16b, %6.16b"
                         : "+w"(c[0]), "+w"(c[1]), "+w"(c[2]), "+w"(c[3]) : "w"(a[0]), "w"(a[1]), "w"(x));
}

INLINE void load_8(const float *p, float32x4_t v[2])
{
    v[0] = vld1q_f32(p);
    v[1] = vld1q_f32(p + 4);
}
INLINE void store_8(float *p, const float32x4_t v[2])
{
    vst1q_f32(p, v[0]);
    vst1q_f32(p + 4, v[1]);
}

/* Four rows' sums from their partial sums. */
INLINE float32x4_t joined(int32x4_t c0, int32x4_t c1, int32_t type)
{
    float32x4_t f;
    if (type == KESTREL_INT4)
        __asm__("saddlp %1.4s, %1.8h\n\tsaddlp %2.4s, %2.8h\n\taddp %0.4s, %1.4s, %2.4s\n\tscvtf %0.4s, %0.4s" : "=w"(f), "+w"(c0), "+w"(c1));
    else
        __asm__("addp %0.4s, %1.4s, %2.4s\n\tscvtf %0.4s, %0.4s" : "=w"(f) : "w"(c0), "w"(c1));
    return f;
}

/* c[t] += 8 k, the tokens' lanes `lane` and `next`. */
#define STEP(lane, next, first)                                                                                                     \
    if (type == KESTREL_INT4) {                                                                                                     \
        w = load_split(w, a, b);                                                                                                    \
        UNROLL for (int t = 0; t < tokens; t++) dot_4(c[t], a, vdupq_laneq_s32(v[t], lane), first);                                  \
        UNROLL for (int t = 0; t < tokens; t++) dot_4(c[t], b, vdupq_laneq_s32(v[t], next), false);                                  \
    } else {                                                                                                                        \
        w = load_32(w, a);                                                                                                          \
        w = load_32(w, b);                                                                                                          \
        UNROLL for (int t = 0; t < tokens; t++) dot_8(c[t], a, b, vdupq_laneq_s32(v[t], lane), vdupq_laneq_s32(v[t], next), first); \
    }

INLINE void tile(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int tokens, int32_t type)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float16_t *scale_w = (const float16_t *)panel;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp), *x[TILE];
    const float *scale_x[TILE];
    const bool in_dst = tokens == TILE; /* 16 sums leave no registers for accumulators: these wait in dst, in L1 */
    float32x4_t acc[TILE][2];
    float *out[TILE];
    UNROLL
    for (int t = 0; t < tokens; t++) {
        x[t] = lhs->values + (row + t) * kp;
        scale_x[t] = lhs->scales + (row + t) * groups;
        out[t] = dst + (row + t) * dst_stride;
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
        if (in_dst) store_8(out[t], acc[t]);
    }
    /* hot loop: one group: exact sums of 8 rows for all tokens, then one fma each */
    for (int64_t g = 0; g < groups; g++) {
        UNROLL
        for (int j = 0; j < GROUP * PANEL; j += 64)
            if (type == KESTREL_INT8 || j < GROUP * PANEL / 2) __builtin_prefetch(w + AHEAD + j);
        int32x4_t c[TILE][4];
        int32x4_t v[TILE];
        int8x16_t a[2], b[2];
        UNROLL
        for (int j = 0; j < GROUP; j += 16) {
            UNROLL
            for (int t = 0; t < tokens; t++) v[t] = load_16(x[t] + g * GROUP + j);
            STEP(0, 1, j == 0)
            STEP(2, 3, false)
        }
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
        const float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_high_f32_f16(h);
        float32x2_t r[TILE];
        UNROLL
        for (int t = 0; t < tokens; t++) r[t] = load_scale(scale_x[t] + g);
        UNROLL
        for (int t = 0; t < tokens; t++) {
            if (in_dst) load_8(out[t], acc[t]);
            acc[t][0] = vfmaq_f32(acc[t][0], joined(c[t][0], c[t][1], type), vmulq_lane_f32(low, r[t], 0));
            acc[t][1] = vfmaq_f32(acc[t][1], joined(c[t][2], c[t][3], type), vmulq_lane_f32(high, r[t], 0));
            if (in_dst) store_8(out[t], acc[t]);
        }
    }
    UNROLL
    for (int t = 0; t < tokens; t++)
        if (!in_dst) store_8(out[t], acc[t]);
}

INLINE void walk(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride, int32_t type)
{
    const int64_t bytes = panel_bytes(type, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i, tokens = left == 5 || left == 6 ? 3 : left < TILE ? left : TILE;
            switch (tokens) {
            case 1: tile(panel, lhs, i, out, dst_stride, 1, type); break;
            case 2: tile(panel, lhs, i, out, dst_stride, 2, type); break;
            case 3: tile(panel, lhs, i, out, dst_stride, 3, type); break;
            default: tile(panel, lhs, i, out, dst_stride, TILE, type);
            }
            i += tokens;
        }
    }
}

void kestrel_matmul_int8_neon(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT8);
}

void kestrel_matmul_int4_neon(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT4);
}
