/* IEEE binary16 <-> binary32, in integer steps. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_HALF_H
#define KESTREL_HALF_H

#include "exp.h"

/* Exact; Inf and NaN stay. */
static inline float kestrel_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, f = h & 0x3ff;
    if (e == 0) return kestrel_bits_f32(sign | kestrel_f32_bits((float)f * 0x1p-24f));
    if (e == 31) return kestrel_bits_f32(sign | 0x7f800000u | f << 13);
    return kestrel_bits_f32(sign | (e + 112) << 23 | f << 13);
}

/* Round half to even; |x| > 65504 gives 65504 with x's sign (a cache must not hold Inf); NaN stays NaN. */
static inline uint16_t kestrel_f32_to_f16(float x)
{
    const uint32_t u = kestrel_f32_bits(x), a = u & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    if (a > 0x7f800000u) return sign | 0x7e00;
    if (a >= 0x477fe000u) return sign | 0x7bff;
    if (a < 0x38800000u) /* below 2^-14: a multiple of 2^-24, rounded by the addition */
        return sign | (uint16_t)(kestrel_f32_bits(kestrel_bits_f32(a) + 0.5f) - 0x3f000000u);
    const uint32_t rounded = a + 0xfffu + (a >> 13 & 1);
    const uint32_t h = (rounded >> 13) - (112u << 10);
    return sign | (uint16_t)(h > 0x7bff ? 0x7bff : h);
}

#endif
