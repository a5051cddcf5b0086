/* matmul_int8 and its quantize_rows, Armv8.6 i8mm: smmla. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * One smmla takes 8 k of 2 tokens and of 2 rows. quantize_rows lays tokens out in pairs: values [pair][kp / 8][2][8], scales
 * [pair][kp / GROUP][2]; the rows' 8 k come from two vectors of the panel by zip. Sums and accumulators stay in smmla's order
 * {t0 r0, t0 r1, t1 r0, t1 r1} to the end. Lanes are outputs: the order of float operations is the contract's. */
#include "kernels.h"
#include <arm_neon.h>
#include <assert.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
enum { TILE = 6 /* pairs */, AHEAD = 2048 };

/* As in matmul_neon_dotprod.c: sums start at the bits of 1.5 * 2^23, one subtraction converts them. */
#define MAGIC 12582912.0f
static const int32_t magic_bits[8] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
_Static_assert(127 * 127 * GROUP < 1 << 22 && GROUP % 8 == 0, "a group's sum must stay below 2^22");

void kestrel_quantize_rows_neon_i8mm(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    for (int64_t i = row0; i < row0 + m; i++) {
        int8_t *values = lhs->values + i / 2 * 2 * kp + i % 2 * 8;
        float *scales = lhs->scales + i / 2 * 2 * groups + i % 2;
        for (int64_t g = 0; g < groups; g++) {
            int8_t q[GROUP];
            kestrel_lhs one = {q, scales + 2 * g, NULL, GROUP};
            const int64_t begin = g * GROUP, count = k - begin < GROUP ? k - begin : GROUP;
            kestrel_quantize_rows_neon(src + i * src_stride + begin, 0, count, 0, 1, &one);
            for (int64_t j = 0; j < GROUP; j += 8) memcpy(values + (begin + j) * 2, q + j, 8);
        }
    }
}

INLINE int8x16_t load_16(const int8_t *p)
{
    int8x16_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8x16_t *)p));
    return v;
}
INLINE float32x4_t load_scales(const float *p)
{
    float32x4_t v;
    __asm__ volatile("ldr %d0, %1" : "=w"(v) : "m"(*(const float (*)[2])p));
    return vzip1q_f32(v, v);
}
INLINE void load_sums(int32x4_t c[2])
{
    __asm__ volatile("ldp %q0, %q1, %2" : "=w"(c[0]), "=w"(c[1]) : "Q"(magic_bits));
}

/* Rows 4 half .. 4 half + 3 of a panel for `tokens` rows in `pairs` pairs from row (even) on; of an odd last pair the second is not stored. */
INLINE void tile(const uint8_t *panel, int half, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int tokens, int pairs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float16_t *scale_w = (const float16_t *)panel + 4 * half;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp) + 16 * half, *x[TILE];
    const float *scale_x[TILE];
    const float32x4_t magic = vdupq_n_f32(MAGIC);
    float32x4_t acc[TILE][2];
    UNROLL
    for (int p = 0; p < pairs; p++) {
        x[p] = lhs->values + (row + 2 * p) * kp;
        scale_x[p] = lhs->scales + (row + 2 * p) * groups;
        acc[p][0] = acc[p][1] = vdupq_n_f32(0.0f);
    }
    /* hot loop: one group: exact sums of 4 rows for all tokens, then one fma each */
    for (int64_t g = 0; g < groups; g++, w += GROUP * PANEL) {
        UNROLL
        for (int j = 0; j < GROUP * PANEL; j += 64) __builtin_prefetch(w + AHEAD + j);
        int32x4_t c[TILE][2];
        UNROLL
        for (int p = 0; p < pairs; p++) load_sums(c[p]);
        UNROLL
        for (int j = 0; j < GROUP; j += 8) {
            const int32x4_t a = vreinterpretq_s32_s8(load_16(w + j * PANEL)), b = vreinterpretq_s32_s8(load_16(w + j * PANEL + 32));
            const int32x4_t w0 = vzip1q_s32(a, b), w1 = vzip2q_s32(a, b);
            UNROLL
            for (int p = 0; p < pairs; p++) {
                const int8x16_t v = load_16(x[p] + (g * GROUP + j) * 2);
                __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(c[p][0]) : "w"(v), "w"(w0));
                __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(c[p][1]) : "w"(v), "w"(w1));
            }
        }
        const float32x4_t s = vcvt_f32_f16(vld1_f16(scale_w + g * PANEL));
        const float32x4_t s0 = vcombine_f32(vget_low_f32(s), vget_low_f32(s)), s1 = vcombine_f32(vget_high_f32(s), vget_high_f32(s));
        UNROLL
        for (int p = 0; p < pairs; p++) {
            const float32x4_t r = load_scales(scale_x[p] + 2 * g);
            acc[p][0] = vfmaq_f32(acc[p][0], vsubq_f32(vreinterpretq_f32_s32(c[p][0]), magic), vmulq_f32(s0, r));
            acc[p][1] = vfmaq_f32(acc[p][1], vsubq_f32(vreinterpretq_f32_s32(c[p][1]), magic), vmulq_f32(s1, r));
        }
    }
    UNROLL
    for (int p = 0; p < pairs; p++) {
        float *out = dst + (row + 2 * p) * dst_stride + 4 * half;
        vst1q_f32(out, vcombine_f32(vget_low_f32(acc[p][0]), vget_low_f32(acc[p][1])));
        if (2 * p + 1 < tokens) vst1q_f32(out + dst_stride, vcombine_f32(vget_high_f32(acc[p][0]), vget_high_f32(acc[p][1])));
    }
}

void kestrel_matmul_int8_neon_i8mm(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t bytes = panel_bytes(KESTREL_INT8, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i;
            const int tokens = left >= 2 * TILE && left != 16 ? 2 * TILE : left < 8 ? (int)left : 8;
            for (int half = 0; half < 2; half++)
                switch ((tokens + 1) / 2) {
                case 1: tile(panel, half, lhs, i, out, dst_stride, tokens, 1); break;
                case 2: tile(panel, half, lhs, i, out, dst_stride, tokens, 2); break;
                case 3: tile(panel, half, lhs, i, out, dst_stride, tokens, 3); break;
                case 4: tile(panel, half, lhs, i, out, dst_stride, tokens, 4); break;
                default: tile(panel, half, lhs, i, out, dst_stride, tokens, TILE);
                }
            i += tokens;
        }
    }
}
