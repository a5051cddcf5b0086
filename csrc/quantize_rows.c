/* quantize_rows, portable: f32 activation rows -> int8 rows + group scales. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "exp.h"
#include "kernels.h"

void kestrel_quantize_rows_portable(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    for (int64_t i = row0; i < row0 + m; i++) {
        const float *x = src + i * src_stride;
        int8_t *q = lhs->values + i * kp;
        /* hot loop: one group: absmax, then scale and round */
        for (int64_t g = 0; g < groups; g++) {
            const int64_t begin = g * GROUP, count = k - begin < GROUP ? k - begin : GROUP;
            uint32_t bits = 0;
            for (int64_t j = begin; j < begin + count; j++) {
                const uint32_t v = kestrel_f32_bits(x[j]) & 0x7fffffffu;
                bits = v > bits ? v : bits;
            }
            const float a = kestrel_bits_f32(bits);
            const bool finite = bits < 0x7f800000u, zero = finite && a < 1e-30f;
            lhs->scales[i * groups + g] = zero ? 0.0f : a / 127.0f;
            memset(q + begin, 0, GROUP);
            if (zero || !finite) continue;
            const float r = 127.0f / a;
            for (int64_t j = begin; j < begin + count; j++)
                q[j] = (int8_t)(kestrel_f32_bits(x[j] * r + ROUND_MAGIC) - ROUND_BITS);
        }
    }
}
