/* silu_multiply and gelu_multiply, Armv8.0 NEON. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_neon.h"

void kestrel_silu_multiply_neon(const float *gate, const float *up, int64_t n, float *dst)
{
    int64_t i = 0;
    /* hot loop: 8 elements */
    for (; i + 8 <= n; i += 8)
        UNROLL
        for (int64_t j = i; j < i + 8; j += 4) {
            const float32x4_t g = vld1q_f32(gate + j);
            vst1q_f32(dst + j, vmulq_f32(vdivq_f32(g, vaddq_f32(vdupq_n_f32(1.0f), kestrel_expf4(vnegq_f32(g)))), vld1q_f32(up + j)));
        }
    for (; i < n; i++) dst[i] = gate[i] / (1.0f + kestrel_expf(-gate[i])) * up[i];
}

void kestrel_gelu_multiply_neon(const float *gate, const float *up, int64_t n, float *dst)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        UNROLL
        for (int64_t j = i; j < i + 8; j += 4) {
            const float32x4_t g = vld1q_f32(gate + j), y = vmulq_f32(g, vfmaq_f32(vdupq_n_f32(GELU_A), vdupq_n_f32(GELU_B), vmulq_f32(g, g)));
            vst1q_f32(dst + j, vmulq_f32(vdivq_f32(g, vaddq_f32(vdupq_n_f32(1.0f), kestrel_expf4(y))), vld1q_f32(up + j)));
        }
    if (i < n) kestrel_gelu_multiply_portable(gate + i, up + i, n - i, dst + i);
}
