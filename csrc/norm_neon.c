/* norm, Armv8.0 NEON. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_neon.h"

/* x += delta, and the four quarters of the 16 partial sums, for 16 elements. */
INLINE void add_squares(float *x, const float *delta, float32x4_t s[4])
{
    UNROLL
    for (int j = 0; j < 4; j++) {
        float32x4_t v = vld1q_f32(x + 4 * j);
        if (delta) {
            v = vaddq_f32(v, vld1q_f32(delta + 4 * j));
            vst1q_f32(x + 4 * j, v);
        }
        s[j] = vfmaq_f32(s[j], v, v);
    }
}

INLINE float sum_of_squares(float *x, const float *delta, int64_t n)
{
    float32x4_t s[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    int64_t i = 0;
    /* hot loop: 16 elements; four chains of fma, which the order fixes */
    for (; i + 16 <= n; i += 16) add_squares(x + i, delta ? delta + i : NULL, s);
    if (i < n) {
        float rest[16] = {0}; /* fma(0, 0, s) = s: s is never -0 */
        for (int j = 0; i + j < n; j++) rest[j] = x[i + j] = delta ? x[i + j] + delta[i + j] : x[i + j];
        add_squares(rest, NULL, s);
    }
    const float32x4_t a = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

bool kestrel_norm_neon(float *x, const float *delta, const float *gain, int64_t n, float eps, float *dst)
{
    const float sum = delta ? sum_of_squares(x, delta, n) : sum_of_squares(x, NULL, n);
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        UNROLL
        for (int j = 0; j < 16; j += 4) vst1q_f32(dst + i + j, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i + j), r), vld1q_f32(gain + i + j)));
    for (; i < n; i++) dst[i] = (x[i] * r) * gain[i];
    return isfinite(sum);
}
