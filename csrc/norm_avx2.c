/* norm, avx2 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_x86.h"

/* x += delta, and the two halves of the 16 partial sums, for 16 elements. */
static inline __attribute__((always_inline)) void add_squares(float *x, const float *delta, __m256 s[2])
{
    for (int h = 0; h < 2; h++) {
        __m256 v = _mm256_loadu_ps(x + 8 * h);
        if (delta) {
            v = _mm256_add_ps(v, _mm256_loadu_ps(delta + 8 * h));
            _mm256_storeu_ps(x + 8 * h, v);
        }
        s[h] = _mm256_fmadd_ps(v, v, s[h]);
    }
}

static inline __attribute__((always_inline)) float sum_of_squares(float *x, const float *delta, int64_t n)
{
    __m256 s[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    /* hot loop: 16 elements; bound by the latency of fma, which the order fixes */
    for (; i + 16 <= n; i += 16) add_squares(x + i, delta ? delta + i : NULL, s);
    if (i < n) {
        float rest[16] = {0}; /* fma(0, 0, s) = s: s is never -0 */
        for (int j = 0; i + j < n; j++) rest[j] = x[i + j] = delta ? x[i + j] + delta[i + j] : x[i + j];
        add_squares(rest, NULL, s);
    }
    const __m256 a = _mm256_add_ps(s[0], s[1]);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

bool kestrel_norm_avx2(float *x, const float *delta, const float *gain, int64_t n, float eps, float *dst)
{
    const float sum = delta ? sum_of_squares(x, delta, n) : sum_of_squares(x, NULL, n);
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    const __m256 scale = _mm256_set1_ps(r);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), scale), _mm256_loadu_ps(gain + i)));
    for (; i < n; i++) dst[i] = (x[i] * r) * gain[i];
    return isfinite(sum);
}
