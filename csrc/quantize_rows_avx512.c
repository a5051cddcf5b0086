/* quantize_rows, avx512 (contract in kernels.h): the plain layout, and in lhs.sums -128 times the sum of each group, where the
 * accumulators of avx512_vnni's matmul start. Not run on hardware yet: see matmul_avx512_vnni.c. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_x86.h"

enum { VECTORS = GROUP / 16 };

static inline uint32_t largest(__m512i v) { return kestrel_largest8(_mm256_max_epu32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1))); }

static inline int32_t total(__m512i v) { return kestrel_total8(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1))); }

static inline void group(const float *x, int8_t *q, float *scale, int32_t *start)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int j = 0; j < VECTORS; j++) most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + 16 * j), magnitude));
    const uint32_t bits = largest(most);
    const float a = kestrel_bits_f32(bits);
    const bool finite = bits < 0x7f800000u, zero = finite && a < 1e-30f;
    *scale = zero ? 0.0f : a / 127.0f;
    *start = 0;
    if (zero || !finite) {
        memset(q, 0, GROUP);
        return;
    }
    const __m512 r = _mm512_set1_ps(127.0f / a), magic = _mm512_set1_ps(ROUND_MAGIC);
    const __m512i base = _mm512_set1_epi32(ROUND_BITS);
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < VECTORS; j++) {
        const __m512i v = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), r), magic)), base);
        sum = _mm512_add_epi32(sum, v);
        _mm_storeu_si128((__m128i *)(q + 16 * j), _mm512_cvtepi32_epi8(v));
    }
    *start = -128 * total(sum);
}

void kestrel_quantize_rows_avx512(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP, whole = k / GROUP;
    for (int64_t i = row0; i < row0 + m; i++) {
        const float *x = src + i * src_stride;
        int8_t *q = lhs->values + i * kp;
        float *scale = lhs->scales + i * groups;
        int32_t *start = lhs->sums + i * groups;
        /* hot loop: one group: absmax, two divisions, round, sum */
        for (int64_t g = 0; g < whole; g++) group(x + g * GROUP, q + g * GROUP, scale + g, start + g);
        if (whole < groups) {
            float rest[GROUP] = {0};
            memcpy(rest, x + whole * GROUP, (size_t)(k - whole * GROUP) * sizeof *rest);
            group(rest, q + whole * GROUP, scale + whole, start + whole);
        }
    }
}
