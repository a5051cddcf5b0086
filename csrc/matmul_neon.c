/* matmul_int8, Armv8.0 NEON: smull + smlal in 16 bits, sadalp into 32. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * Two products of at most 127 * 127 fit int16, so every smull + smlal pair (8 k) is widened by one sadalp. An accumulator holds two
 * rows, two partial sums each; one addp a group joins them. Lanes are rows: the order of float operations is the contract's. */
#include "kernels.h"
#include <arm_neon.h>
#include <assert.h>

#define INLINE static inline __attribute__((always_inline))
enum { TILE = 2 };

INLINE int8x16_t dup4(const int8_t *x) { return vreinterpretq_s8_s32(vdupq_n_s32(*(const int32_t *)(const void *)x)); }

INLINE void tile(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int tokens)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float16_t *scale_w = (const float16_t *)panel;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp), *x[TILE];
    const float *scale_x[TILE];
    float32x4_t acc[TILE][2];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) {
        x[t] = lhs->values + (row + t) * kp;
        scale_x[t] = lhs->scales + (row + t) * groups;
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    /* hot loop: one group */
    for (int64_t g = 0; g < groups; g++, w += GROUP * PANEL) {
        if (tokens == 1) __builtin_prefetch(w + 1024);
        int32x4_t c[TILE][4];
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) c[t][0] = c[t][1] = c[t][2] = c[t][3] = vdupq_n_s32(0);
#pragma GCC unroll 8
        for (int j = 0; j < GROUP; j += 8) {
            const int8x16_t w0 = vld1q_s8(w + j * PANEL), w1 = vld1q_s8(w + j * PANEL + 16);
            const int8x16_t w2 = vld1q_s8(w + j * PANEL + 32), w3 = vld1q_s8(w + j * PANEL + 48);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++) {
                const int8x16_t a = dup4(x[t] + g * GROUP + j), b = dup4(x[t] + g * GROUP + j + 4);
                int16x8_t s0 = vmull_s8(vget_low_s8(w0), vget_low_s8(a)), s1 = vmull_high_s8(w0, a);
                int16x8_t s2 = vmull_s8(vget_low_s8(w1), vget_low_s8(a)), s3 = vmull_high_s8(w1, a);
                s0 = vmlal_s8(s0, vget_low_s8(w2), vget_low_s8(b));
                s1 = vmlal_high_s8(s1, w2, b);
                s2 = vmlal_s8(s2, vget_low_s8(w3), vget_low_s8(b));
                s3 = vmlal_high_s8(s3, w3, b);
                c[t][0] = vpadalq_s16(c[t][0], s0);
                c[t][1] = vpadalq_s16(c[t][1], s1);
                c[t][2] = vpadalq_s16(c[t][2], s2);
                c[t][3] = vpadalq_s16(c[t][3], s3);
            }
        }
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
        const float32x4_t lo = vcvt_f32_f16(vget_low_f16(h)), hi = vcvt_high_f32_f16(h);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const float s = scale_x[t][g];
            acc[t][0] = vfmaq_f32(acc[t][0], vcvtq_f32_s32(vpaddq_s32(c[t][0], c[t][1])), vmulq_n_f32(lo, s));
            acc[t][1] = vfmaq_f32(acc[t][1], vcvtq_f32_s32(vpaddq_s32(c[t][2], c[t][3])), vmulq_n_f32(hi, s));
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) {
        vst1q_f32(dst + (row + t) * dst_stride, acc[t][0]);
        vst1q_f32(dst + (row + t) * dst_stride + 4, acc[t][1]);
    }
}

void kestrel_matmul_int8_neon(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t bytes = panel_bytes(KESTREL_INT8, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        int64_t i = 0;
        for (; i + TILE <= m; i += TILE) tile(panel, lhs, i, out, dst_stride, TILE);
        if (i < m) tile(panel, lhs, i, out, dst_stride, 1);
    }
}
