/* matmul_int4, avx2 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0
 *
 * q + 8 is unsigned and small: vpmaddubsw takes it against x as it is, and eight of its pairs (8 * 2 * 15 * 127 = 30480) are added in
 * 16 bits before they are widened. lhs.sums holds -128 times each group's sum of x, a sixteenth of it takes the 8 off again: exact.
 * Six vector operations for 64 MACs where int8 has ten, so that the width of a tile costs less here. */
#include "kernels.h"
#include <immintrin.h>
#include <string.h>

enum { TILE = 6 /* 69 GMAC/s on Zen 3 where 8 rows spill to 64 */, AHEAD = 2048 /* a step of one row in 0.96 of the time that 4 KB took (1 and 2 threads), 1280 B 1.00, 768 B 1.06 */ };

static inline __attribute__((always_inline)) __m256i four(const int8_t *x)
{
    int32_t v;
    memcpy(&v, x, 4);
    return _mm256_set1_epi32(v);
}

static inline __attribute__((always_inline)) void tile(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int m)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const uint8_t *w = panel + panel_scale_bytes(kp);
    const __m256i ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(15), flip = _mm256_set1_epi8((char)0x88);
    const int8_t *x[TILE];
    __m256 acc[TILE];
    for (int i = 0; i < m; i++) {
        x[i] = lhs->values + (row + i) * kp;
        acc[i] = _mm256_setzero_ps();
    }
    /* hot loop: one group of k for 8 outputs and m rows */
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++) {
        __m256i sum[TILE];
        for (int i = 0; i < m; i++) sum[i] = _mm256_srai_epi32(_mm256_set1_epi32(lhs->sums[(row + i) * groups + g]), 4);
#pragma GCC unroll 1
        for (int part = 0; part < 2; part++, w += GROUP / 2 * PANEL / 2) {
            __m256i pairs[TILE];
#pragma GCC unroll 4
            for (int c = 0; c < GROUP / 16; c++) {
                if (c % 2 == 0) _mm_prefetch((const char *)w + c * 32 + AHEAD, _MM_HINT_T0);
                const __m256i both = _mm256_xor_si256(_mm256_load_si256((const __m256i *)(w + c * 32)), flip);
                const __m256i low = _mm256_and_si256(both, half), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), half);
                for (int i = 0; i < m; i++) {
                    const int8_t *at = x[i] + g * GROUP + part * GROUP / 2 + c * 8;
                    const __m256i products = _mm256_maddubs_epi16(low, four(at));
                    pairs[i] = c ? _mm256_add_epi16(pairs[i], products) : products;
                    pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(high, four(at + 4)));
                }
            }
            for (int i = 0; i < m; i++) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(pairs[i], ones));
        }
        const __m256 scale_w = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(panel + g * 16)));
        for (int i = 0; i < m; i++)
            acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i]), _mm256_mul_ps(scale_w, _mm256_set1_ps(lhs->scales[(row + i) * groups + g])), acc[i]);
    }
    for (int i = 0; i < m; i++) _mm256_storeu_ps(dst + (row + i) * dst_stride, acc[i]);
}
_Static_assert(8 * 2 * 15 * 127 <= 32767 && GROUP == 64, "half a group's pairs must fit 16 bits");

void kestrel_matmul_int4_avx2(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t bytes = panel_bytes(KESTREL_INT4, lhs->kp);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i;
            /* 7..11 rows in two tiles of nearly equal height */
            const int rows = (int)(left <= TILE ? left : left < 2 * TILE ? (left + 1) / 2 : TILE);
            switch (rows) {
            case 1: tile(panel, lhs, i, out, dst_stride, 1); break;
            case 2: tile(panel, lhs, i, out, dst_stride, 2); break;
            case 3: tile(panel, lhs, i, out, dst_stride, 3); break;
            case 4: tile(panel, lhs, i, out, dst_stride, 4); break;
            case 5: tile(panel, lhs, i, out, dst_stride, 5); break;
            default: tile(panel, lhs, i, out, dst_stride, 6);
            }
            i += rows;
        }
    }
}
