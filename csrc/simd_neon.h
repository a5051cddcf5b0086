/* What the NEON variants share: exp.h's expf in vectors, step by step, and how their tiles are written. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_SIMD_NEON_H
#define KESTREL_SIMD_NEON_H

#include "exp.h"
#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* maxnm takes the number when the other is NaN, as exp.h's comparison does. */
INLINE float32x4_t kestrel_expf4(float32x4_t x0)
{
    const float32x4_t magic = vdupq_n_f32(ROUND_MAGIC), low = vdupq_n_f32(EXPF_LOW);
    const float32x4_t x = vminnmq_f32(vmaxnmq_f32(x0, low), vdupq_n_f32(EXPF_HIGH));
    const float32x4_t t = vfmaq_f32(magic, x, vdupq_n_f32(EXPF_LOG2E)), n = vsubq_f32(t, magic);
    const float32x4_t r = vfmaq_f32(vfmaq_f32(x, n, vdupq_n_f32(-EXPF_LN2_HI)), n, vdupq_n_f32(-EXPF_LN2_LO));
    float32x4_t p = vdupq_n_f32(EXPF_C0);
    p = vfmaq_f32(vdupq_n_f32(EXPF_C1), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXPF_C2), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXPF_C3), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXPF_C4), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXPF_C5), p, r);
    p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.0f));
    const uint32x4_t y = vaddq_u32(vreinterpretq_u32_f32(p), vshlq_n_u32(vreinterpretq_u32_f32(t), 23));
    return vreinterpretq_f32_u32(vandq_u32(y, vcgeq_f32(x0, low)));
}

#endif
