/* matmul_int8, Armv8.2 dotprod: sdot by lane. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * One sdot takes 4 rows x 4 k of a panel (16 bytes as they lie) and 4 k of a token, picked by lane from 16 k. Lanes are rows, so the
 * order of float operations of an output is the contract's whatever the tile. */
#include "kernels.h"
#include <arm_neon.h>
#include <assert.h>

#define INLINE static inline __attribute__((always_inline))
enum { TILE = 8 };

/* c[t] = the exact sums of one group for rows 4 quad .. 4 quad + 3 and each token. */
INLINE void group_sums(const int8_t *w, const int8_t *const *x, int64_t k, int tokens, int32x4_t *c)
{
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) c[t] = vdupq_n_s32(0);
#pragma GCC unroll 8
    for (int j = 0; j < GROUP; j += 16) {
        const int8x16_t w0 = vld1q_s8(w + j * PANEL), w1 = vld1q_s8(w + j * PANEL + 32);
        const int8x16_t w2 = vld1q_s8(w + j * PANEL + 64), w3 = vld1q_s8(w + j * PANEL + 96);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const int8x16_t v = vld1q_s8(x[t] + k + j);
            c[t] = vdotq_laneq_s32(c[t], w0, v, 0);
            c[t] = vdotq_laneq_s32(c[t], w1, v, 1);
            c[t] = vdotq_laneq_s32(c[t], w2, v, 2);
            c[t] = vdotq_laneq_s32(c[t], w3, v, 3);
        }
    }
}

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
    /* hot loop: one group: exact sums of one half of the panel's rows for all tokens, scaled into acc; then the other half */
    for (int64_t g = 0; g < groups; g++, w += GROUP * PANEL) {
        if (tokens == 1) __builtin_prefetch(w + 2048);
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
#pragma GCC unroll 2
        for (int quad = 0; quad < 2; quad++) {
            int32x4_t c[TILE];
            group_sums(w + quad * 16, x, g * GROUP, tokens, c);
            const float32x4_t s = quad ? vcvt_high_f32_f16(h) : vcvt_f32_f16(vget_low_f16(h));
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++) acc[t][quad] = vfmaq_f32(acc[t][quad], vcvtq_f32_s32(c[t]), vmulq_n_f32(s, scale_x[t][g]));
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) {
        vst1q_f32(dst + (row + t) * dst_stride, acc[t][0]);
        vst1q_f32(dst + (row + t) * dst_stride + 4, acc[t][1]);
    }
}

void kestrel_matmul_int8_neon_dotprod(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t bytes = panel_bytes(KESTREL_INT8, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        int64_t i = 0;
        for (; i + TILE <= m; i += TILE) tile(panel, lhs, i, out, dst_stride, TILE);
        switch (m - i) {
        case 1: tile(panel, lhs, i, out, dst_stride, 1); break;
        case 2: tile(panel, lhs, i, out, dst_stride, 2); break;
        case 3: tile(panel, lhs, i, out, dst_stride, 3); break;
        case 4: tile(panel, lhs, i, out, dst_stride, 4); break;
        case 5: tile(panel, lhs, i, out, dst_stride, 5); break;
        case 6: tile(panel, lhs, i, out, dst_stride, 6); break;
        case 7: tile(panel, lhs, i, out, dst_stride, 7); break;
        }
    }
}
