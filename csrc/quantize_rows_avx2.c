/* quantize_rows, avx2 (contract in kernels.h): the plain layout, and in lhs.sums -128 times the sum of each group. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_x86.h"

enum { VECTORS = GROUP / 8 };

static inline void group(const float *x, int8_t *q, float *scale, int32_t *start)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int j = 0; j < VECTORS; j++) most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8 * j)), magnitude));
    const uint32_t bits = kestrel_largest8(most);
    const float a = kestrel_bits_f32(bits);
    const bool finite = bits < 0x7f800000u, zero = finite && a < 1e-30f;
    *scale = zero ? 0.0f : a / 127.0f;
    *start = 0;
    if (zero || !finite) {
        memset(q, 0, GROUP);
        return;
    }
    const __m256 r = _mm256_set1_ps(127.0f / a), magic = _mm256_set1_ps(ROUND_MAGIC);
    const __m256i base = _mm256_set1_epi32(ROUND_BITS);
    __m256i sum = _mm256_setzero_si256();
    for (int j = 0; j < VECTORS; j += 4) {
        __m256i v[4];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * (j + i)), r), magic)), base);
            sum = _mm256_add_epi32(sum, v[i]);
        }
        /* packs work within halves: bring the 32-bit quarters back in order */
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        _mm256_storeu_si256((__m256i *)(q + 8 * j), _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
    *start = -128 * kestrel_total8(sum);
}

void kestrel_quantize_rows_avx2(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
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
