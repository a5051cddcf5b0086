/* quantize_rows, Armv8.0 NEON: f32 activation rows -> int8 rows + group scales. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>

INLINE int8x16_t round_16(const float *x, float r)
{
    const float32x4_t magic = vdupq_n_f32(ROUND_MAGIC); /* rounds to an integer; its low byte is the int8 */
    const int16x8_t a = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x), r), magic));
    const int16x8_t b = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 4), r), magic));
    const int16x8_t c = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 8), r), magic));
    const int16x8_t d = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 12), r), magic));
    return vuzp1q_s8(vreinterpretq_s8_s16(vuzp1q_s16(a, b)), vreinterpretq_s8_s16(vuzp1q_s16(c, d)));
}

/* One whole group: returns its scale. fabs clears the sign of a NaN too, so the unsigned maximum is the contract's. */
INLINE float group(const float *x, int8_t *q)
{
    uint32x4_t top[4] = {0};
#pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += 16)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) top[i] = vmaxq_u32(top[i], vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + j + 4 * i))));
    const uint32_t bits = vmaxvq_u32(vmaxq_u32(vmaxq_u32(top[0], top[1]), vmaxq_u32(top[2], top[3])));
    const float a = kestrel_bits_f32(bits);
    const bool finite = bits < 0x7f800000u, zero = finite && a < 1e-30f;
    if (zero || !finite) {
        memset(q, 0, GROUP);
        return zero ? 0.0f : a / 127.0f;
    }
    const float r = 127.0f / a;
#pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += 16) vst1q_s8(q + j, round_16(x + j, r));
    return a / 127.0f;
}

void kestrel_quantize_rows_neon(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP, whole = k / GROUP;
    assert(k >= 1 && kp >= k && kp % GROUP == 0);
    for (int64_t i = row0; i < row0 + m; i++) {
        const float *x = src + i * src_stride;
        int8_t *q = lhs->values + i * kp;
        float *scale = lhs->scales + i * groups;
        /* hot loop: one group: absmax, then scale and round */
        for (int64_t g = 0; g < whole; g++) scale[g] = group(x + g * GROUP, q + g * GROUP);
        for (int64_t g = whole; g < groups; g++) {
            float tail[GROUP] = {0};
            if (g == whole) memcpy(tail, x + g * GROUP, (size_t)(k - g * GROUP) * sizeof *tail);
            scale[g] = group(tail, q + g * GROUP);
        }
    }
}
