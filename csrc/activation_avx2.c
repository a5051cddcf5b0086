/* silu_multiply and gelu_multiply, avx2 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include "simd_x86.h"

static inline __attribute__((always_inline)) __m256 silu_multiply(__m256 g, __m256 u)
{
    const __m256 e = kestrel_expf8(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
    return _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), u);
}

void kestrel_silu_multiply_avx2(const float *gate, const float *up, int64_t n, float *dst)
{
    int64_t i = 0;
    /* hot loop: 16 elements */
    for (; i + 16 <= n; i += 16) {
        const __m256 a = silu_multiply(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i));
        const __m256 b = silu_multiply(_mm256_loadu_ps(gate + i + 8), _mm256_loadu_ps(up + i + 8));
        _mm256_storeu_ps(dst + i, a);
        _mm256_storeu_ps(dst + i + 8, b);
    }
    for (; i < n; i++) dst[i] = gate[i] / (1.0f + kestrel_expf(-gate[i])) * up[i];
}

static inline __attribute__((always_inline)) __m256 gelu_multiply(__m256 g, __m256 u)
{
    const __m256 y = _mm256_mul_ps(g, _mm256_fmadd_ps(_mm256_set1_ps(GELU_B), _mm256_mul_ps(g, g), _mm256_set1_ps(GELU_A)));
    return _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), kestrel_expf8(y))), u);
}

void kestrel_gelu_multiply_avx2(const float *gate, const float *up, int64_t n, float *dst)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256 a = gelu_multiply(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i));
        const __m256 b = gelu_multiply(_mm256_loadu_ps(gate + i + 8), _mm256_loadu_ps(up + i + 8));
        _mm256_storeu_ps(dst + i, a);
        _mm256_storeu_ps(dst + i + 8, b);
    }
    if (i < n) kestrel_gelu_multiply_portable(gate + i, up + i, n - i, dst + i);
}
