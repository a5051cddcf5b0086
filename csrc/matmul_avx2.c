/* matmul_int8, avx2 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0
 *
 * One 32-byte vector holds 8 rows x 4 k: |w| (unsigned) times x with w's sign, in pairs to int16 (2 * 127 * 127 fits), in pairs to int32.
 * Four vector instructions and one broadcast load for 32 MACs: 21 to 23 MAC/cycle on Zen 3 before the scales, 19.5 with them (8 rows, group 32).
 * Rejected, MAC/cycle of the tile at 4 / 8 rows where this one has 18.5 / 19.5: weights widened to int16 and two vpmaddwd, 17.5 / 18.3;
 * x xor w's sign with the correction counted once a panel, 19.8 / 20.8 but a pass over the panel more (pays from 64 rows on);
 * x xor sign minus sign instead of vpsignb, 21.9 against 23.4 in the bare loop; all of a group unrolled, 18.1 / 18.8 (spills).
 * The two multiplies share two pipes (1.0 to 1.1 cycles with the addition, 1.07 with vpxor), vpsignb contends with them (1.25, 1.35 to 1.40 with the broadcast).
 * In GMAC/s at 4 / 8 rows where this one has 62 / 67: that xor with the correction within the tile, 61 / 66 (were it free: 67 / 73); two panels
 * of at most 5 rows, 67 / 67, but 0.8 to 0.9 of this one with the weights in DRAM and both cores at work (0.9 to 1.0 when the prefetch skips the
 * other panel). In the bare loop, cycles for 32 MACs where this one has 1.35 to 1.40: x splatted beforehand, 1.35; two vpmaddwd of two panels,
 * all widened beforehand, 1.30; carries of a 16-bit sum by vpavgw for vpmaddwd, 0.95 of the cycles before the bias that an unsigned average needs. */
#include "kernels.h"
#include <immintrin.h>
#include <string.h>

enum { TILE = 8 }; /* most rows of a tile */

/* Bytes ahead of the reading position. One row: a step of 1 row with AHEAD took 1.00 of the time, with 768 B 1.01 to 1.07, 2 KB 1.03 to 1.05,
 * 4 KB 1.08 (in turns in one process: between processes the pages' places make more than that), and 1.05 to 1.09 when the panel's scales are
 * fetched ahead as well, 1.2 with every second line only. Several rows: 2 KB to 8 KB are alike, AHEAD costs 3 %. */
enum { AHEAD = 1280, AHEAD_ROWS = 4096 };

static inline __attribute__((always_inline)) void tile(const uint8_t *panel, const int8_t *values, const float *scale_x, int64_t kp, float *dst, int64_t dst_stride, int m)
{
    const int64_t groups = kp / GROUP;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp);
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t *x[TILE];
    __m256 acc[TILE];
    for (int i = 0; i < m; i++) {
        x[i] = values + i * kp;
        acc[i] = _mm256_setzero_ps();
    }
    /* hot loop: one group of k for 8 outputs and m rows */
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++, w += GROUP * PANEL) {
        __m256i sum[TILE];
        for (int i = 0; i < m; i++) sum[i] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int c = 0; c < GROUP / 4; c += 2) {
            _mm_prefetch((const char *)w + c * 32 + (m == 1 ? AHEAD : AHEAD_ROWS), _MM_HINT_T0);
            for (int h = c; h < c + 2; h++) {
                const __m256i v = _mm256_load_si256((const __m256i *)(w + h * 32)), magnitude = _mm256_abs_epi8(v);
                for (int i = 0; i < m; i++) {
                    int32_t four;
                    memcpy(&four, x[i] + g * GROUP + h * 4, 4);
                    const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_set1_epi32(four), v));
                    sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(pairs, ones));
                    __asm__("" : "+x"(sum[i])); /* in this order: gcc would add the products of both h first, and spill sums */
                }
            }
        }
        const __m256 scale_w = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(panel + g * 16)));
        for (int i = 0; i < m; i++)
            acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i]), _mm256_mul_ps(scale_w, _mm256_set1_ps(scale_x[i * groups + g])), acc[i]);
    }
    for (int i = 0; i < m; i++) _mm256_storeu_ps(dst + i * dst_stride, acc[i]);
}

void kestrel_matmul_int8_avx2(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP, bytes = panel_bytes(KESTREL_INT8, kp);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        for (int64_t i = 0; i < m;) {
            const int8_t *x = lhs->values + i * kp;
            const float *scale_x = lhs->scales + i * groups;
            float *out = dst + i * dst_stride + p * PANEL;
            const int64_t left = m - i;
            /* 9..15 rows in two tiles of nearly equal height */
            const int rows = (int)(left <= TILE ? left : left < 2 * TILE ? (left + 1) / 2 : TILE);
            switch (rows) {
            case 1: tile(panel, x, scale_x, kp, out, dst_stride, 1); break;
            case 2: tile(panel, x, scale_x, kp, out, dst_stride, 2); break;
            case 3: tile(panel, x, scale_x, kp, out, dst_stride, 3); break;
            case 4: tile(panel, x, scale_x, kp, out, dst_stride, 4); break;
            case 5: tile(panel, x, scale_x, kp, out, dst_stride, 5); break;
            case 6: tile(panel, x, scale_x, kp, out, dst_stride, 6); break;
            case 7: tile(panel, x, scale_x, kp, out, dst_stride, 7); break;
            default: tile(panel, x, scale_x, kp, out, dst_stride, 8);
            }
            i += rows;
        }
    }
}
