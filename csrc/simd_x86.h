/* What the x86 variants share: exp.h's expf in vectors, step by step. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_SIMD_X86_H
#define KESTREL_SIMD_X86_H

#include "exp.h"
#include <immintrin.h>

/* max_ps gives its second operand when the first is NaN. */
static inline __m256 kestrel_expf8(__m256 x0)
{
    const __m256 low = _mm256_set1_ps(EXPF_LOW), magic = _mm256_set1_ps(ROUND_MAGIC);
    const __m256 x = _mm256_min_ps(_mm256_max_ps(x0, low), _mm256_set1_ps(EXPF_HIGH));
    const __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(EXPF_LOG2E), magic), n = _mm256_sub_ps(t, magic);
    const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXPF_LN2_LO), _mm256_fmadd_ps(n, _mm256_set1_ps(-EXPF_LN2_HI), x));
    __m256 p = _mm256_set1_ps(EXPF_C0);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXPF_C1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXPF_C2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXPF_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXPF_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXPF_C5));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    const __m256i y = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23));
    return _mm256_and_ps(_mm256_cmp_ps(x0, low, _CMP_GE_OQ), _mm256_castsi256_ps(y));
}

/* Of eight unsigned numbers. */
static inline uint32_t kestrel_largest8(__m256i v)
{
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(a);
}

static inline int32_t kestrel_total8(__m256i v)
{
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1));
    return _mm_cvtsi128_si32(a);
}

#if defined(__AVX512F__) || defined(KESTREL_EMULATED_AVX512) || defined(KESTREL_EMULATED_AVX512_VNNI)
static inline __m512 kestrel_expf16(__m512 x0)
{
    const __m512 low = _mm512_set1_ps(EXPF_LOW), magic = _mm512_set1_ps(ROUND_MAGIC);
    const __m512 x = _mm512_min_ps(_mm512_max_ps(x0, low), _mm512_set1_ps(EXPF_HIGH));
    const __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(EXPF_LOG2E), magic), n = _mm512_sub_ps(t, magic);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXPF_LN2_LO), _mm512_fmadd_ps(n, _mm512_set1_ps(-EXPF_LN2_HI), x));
    __m512 p = _mm512_set1_ps(EXPF_C0);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXPF_C1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXPF_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXPF_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXPF_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXPF_C5));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    const __m512i y = _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x0, low, _CMP_GE_OQ), _mm512_castsi512_ps(y));
}
#endif

#endif
