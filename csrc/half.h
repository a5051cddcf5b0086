/* IEEE binary16 <-> binary32: by the CPU's own conversion where the baseline has one, else in integer steps. The two give the same bits for
 * every number (tests/checkasm --half compare walks all halves and a sample of floats); a NaN stays one. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_HALF_H
#define KESTREL_HALF_H

#include "exp.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

/* Exact; Inf and NaN stay. */
static inline float kestrel_f16_to_f32_steps(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, f = h & 0x3ff;
    if (e == 0) return kestrel_bits_f32(sign | kestrel_f32_bits((float)f * 0x1p-24f));
    if (e == 31) return kestrel_bits_f32(sign | 0x7f800000u | f << 13);
    return kestrel_bits_f32(sign | (e + 112) << 23 | f << 13);
}

/* Of |x| < 65504. */
static inline uint16_t kestrel_f32_to_f16_steps(float x)
{
    const uint32_t u = kestrel_f32_bits(x), a = u & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    if (a < 0x38800000u) /* below 2^-14: a multiple of 2^-24, rounded by the addition */
        return sign | (uint16_t)(kestrel_f32_bits(kestrel_bits_f32(a) + 0.5f) - 0x3f000000u);
    return sign | (uint16_t)(((a + 0xfffu + (a >> 13 & 1)) >> 13) - (112u << 10));
}

static inline float kestrel_f16_to_f32(uint16_t h)
{
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &h, 2);
    return half;
#else
    return kestrel_f16_to_f32_steps(h);
#endif
}

/* Round half to even; |x| > 65504 gives 65504 with x's sign (a cache must not hold Inf); NaN stays NaN. */
static inline uint16_t kestrel_f32_to_f16(float x)
{
    const uint32_t u = kestrel_f32_bits(x), a = u & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    if (a >= 0x477fe000u) return sign | (a > 0x7f800000u ? 0x7e00 : 0x7bff);
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    const __fp16 half = x; /* kestrel_step sets the rounding mode */
    uint16_t h;
    memcpy(&h, &half, 2);
    return h;
#else
    return kestrel_f32_to_f16_steps(x);
#endif
}

/* The same of n finite numbers at once. */
static inline void kestrel_f32_to_f16_finite(const float *x, int64_t n, uint16_t *h)
{
    int64_t i = 0;
#if defined(__F16C__)
    const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(x + i), most), least), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    for (; i < n; i++) { /* one conversion for four: fcvtn */
        float c = x[i] < 65504.0f ? x[i] : 65504.0f;
        c = c > -65504.0f ? c : -65504.0f;
        const __fp16 half = c;
        memcpy(h + i, &half, 2);
    }
#endif
    for (; i < n; i++) h[i] = kestrel_f32_to_f16(x[i]);
}

#endif
