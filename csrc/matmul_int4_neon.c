/* matmul_int4, Armv8.0 NEON: smlal in 16 bits over a whole group. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * 16 products of at most 8 * 127 meet in a 16-bit lane, so that a group needs no widening before its end: eight smull or smlal for
 * 64 MACs and a token, where int8 has four sadalp more. Splitting 8 k of 8 rows takes six shifts, shared by the tokens. An
 * accumulator holds two rows, four partial sums each. Lanes are rows: the order of float operations is the contract's.
 * A72's model, 1 to 4 tokens: 85, 98, 95, 90 % of 8 MAC/cycle. */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>

enum { TILE = 4, AHEAD = 1024 /* bytes: past a DRAM latency at the stream's pace */ };
_Static_assert(GROUP / 4 * 8 * 127 <= 32767, "a group's products must fit 16 bits");

/* The hot loop's instructions stay where they are written, as in matmul_neon.c. */
INLINE int32x4_t load_16(const int8_t *p)
{
    int32x4_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8_t (*)[16])p));
    return v;
}
/* 8 k of 8 rows: low takes the first 4 k, high the next. */
INLINE const int8_t *load_split(const int8_t *p, int8x16_t low[2], int8x16_t high[2])
{
    __asm__ volatile("ldp %q2, %q3, [%4], #32\n\tshl %0.16b, %2.16b, #4\n\tshl %1.16b, %3.16b, #4\n\t"
                     "sshr %2.16b, %2.16b, #4\n\tsshr %3.16b, %3.16b, #4\n\tsshr %0.16b, %0.16b, #4\n\tsshr %1.16b, %1.16b, #4"
                     : "=&w"(low[0]), "=&w"(low[1]), "=&w"(high[0]), "=&w"(high[1]), "+r"(p) : "m"(*(const int8_t (*)[32])p));
    return p;
}
INLINE float32x2_t load_scale(const float *p)
{
    float32x2_t v;
    __asm__ volatile("ldr %s0, %1" : "=w"(v) : "m"(*p));
    return v;
}

/* c += 4 k of 8 rows, a, by the token's 4 k in every lane of x. */
INLINE void dot_4(int16x8_t c[4], const int8x16_t a[2], int32x4_t x, bool first)
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

/* Four rows' sums from four partial sums each. */
INLINE float32x4_t joined(int16x8_t c0, int16x8_t c1)
{
    float32x4_t f;
    __asm__("saddlp %1.4s, %1.8h\n\tsaddlp %2.4s, %2.8h\n\taddp %0.4s, %1.4s, %2.4s\n\tscvtf %0.4s, %0.4s" : "=w"(f), "+w"(c0), "+w"(c1));
    return f;
}

/* c[t] += 8 k, the tokens' lanes `lane` and `next`. */
#define STEP(lane, next, first)                                                                       \
    do {                                                                                              \
        w = load_split(w, a, b);                                                                      \
        UNROLL for (int t = 0; t < tokens; t++) dot_4(c[t], a, vdupq_laneq_s32(v[t], lane), first);    \
        UNROLL for (int t = 0; t < tokens; t++) dot_4(c[t], b, vdupq_laneq_s32(v[t], next), false);    \
    } while (0)

INLINE void tile(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int tokens)
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
        for (int j = 0; j < GROUP * PANEL / 2; j += 64) __builtin_prefetch(w + AHEAD + j);
        int16x8_t c[TILE][4];
        int32x4_t v[TILE];
        int8x16_t a[2], b[2];
        UNROLL
        for (int j = 0; j < GROUP; j += 16) {
            UNROLL
            for (int t = 0; t < tokens; t++) v[t] = load_16(x[t] + g * GROUP + j);
            STEP(0, 1, j == 0);
            STEP(2, 3, false);
        }
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
        const float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_high_f32_f16(h);
        float32x2_t r[TILE];
        UNROLL
        for (int t = 0; t < tokens; t++) r[t] = load_scale(scale_x[t] + g);
        UNROLL
        for (int t = 0; t < tokens; t++) {
            if (in_dst) load_8(out[t], acc[t]);
            acc[t][0] = vfmaq_f32(acc[t][0], joined(c[t][0], c[t][1]), vmulq_lane_f32(low, r[t], 0));
            acc[t][1] = vfmaq_f32(acc[t][1], joined(c[t][2], c[t][3]), vmulq_lane_f32(high, r[t], 0));
            if (in_dst) store_8(out[t], acc[t]);
        }
    }
    UNROLL
    for (int t = 0; t < tokens; t++)
        if (!in_dst) store_8(out[t], acc[t]);
}

void kestrel_matmul_int4_neon(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t bytes = panel_bytes(KESTREL_INT4, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i, tokens = left == 5 || left == 6 ? 3 : left < TILE ? left : TILE;
            switch (tokens) {
            case 1: tile(panel, lhs, i, out, dst_stride, 1); break;
            case 2: tile(panel, lhs, i, out, dst_stride, 2); break;
            case 3: tile(panel, lhs, i, out, dst_stride, 3); break;
            default: tile(panel, lhs, i, out, dst_stride, TILE);
            }
            i += tokens;
        }
    }
}
