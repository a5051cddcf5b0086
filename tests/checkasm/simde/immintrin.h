/* Stands before the compiler's <immintrin.h> when the AVX-512 kernels are compiled for a CPU without it (tests/test_simde.py): the same
 * sources, each AVX-512 intrinsic replaced by SIMDe's or by one written here of AVX2 halves. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_SIMDE_IMMINTRIN_H
#define KESTREL_SIMDE_IMMINTRIN_H

#pragma GCC system_header
#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

/* What SIMDe 0.7 lacks. */
static inline __m512 halves_ps(__m256 a, __m256 b) { return simde_mm512_insertf32x8(simde_mm512_castps256_ps512(a), b, 1); }
static inline __m512i halves_i(__m256i a, __m256i b) { return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(a), b, 1); }
static inline __m256i low_i(__m512i a) { return simde_mm512_extracti64x4_epi64(a, 0); }
static inline __m256i high_i(__m512i a) { return simde_mm512_extracti64x4_epi64(a, 1); }

static inline __m512 emulated_cvtph_ps(__m256i a)
{
    return halves_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
static inline __m512 emulated_cvtepi32_ps(__m512i a) { return halves_ps(_mm256_cvtepi32_ps(low_i(a)), _mm256_cvtepi32_ps(high_i(a))); }
static inline __m512i emulated_cvtepi8_epi32(__m128i a)
{
    return halves_i(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_bsrli_si128(a, 8)));
}
static inline __m128i emulated_cvtepi32_epi8(__m512i a) /* truncates */
{
    int32_t words[16];
    int8_t bytes[16];
    simde_mm512_storeu_si512(words, a);
    for (int i = 0; i < 16; i++) bytes[i] = (int8_t)words[i];
    return _mm_loadu_si128((const __m128i *)bytes);
}
static inline __m256 emulated_extractf32x8_ps(__m512 a, int half)
{
    float words[16];
    simde_mm512_storeu_ps(words, a);
    return _mm256_loadu_ps(words + 8 * half);
}

#undef _mm512_cvtph_ps
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_extractf32x8_ps
#define _mm512_cvtph_ps(a) emulated_cvtph_ps(a)
#define _mm512_cvtepi32_ps(a) emulated_cvtepi32_ps(a)
#define _mm512_cvtepi8_epi32(a) emulated_cvtepi8_epi32(a)
#define _mm512_cvtepi32_epi8(a) emulated_cvtepi32_epi8(a)
#define _mm512_extractf32x8_ps(a, half) emulated_extractf32x8_ps(a, half)

#endif
