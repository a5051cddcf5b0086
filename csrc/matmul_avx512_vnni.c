/* matmul_int8 and matmul_int4, avx512_vnni (contract in kernels.h). SPDX-License-Identifier: Apache-2.0
 *
 * vpdpbusd takes unsigned x signed bytes: w xor 0x80 is w + 128, and the accumulator starts at -128 times the sum of the x group, which
 * quantize_rows leaves in lhs.sums. Exact: (w + 128) x stays below 255 * 127 * GROUP. A 64-byte vector holds 4 k of the 8 rows of two
 * adjacent panels, so that 4 k of x come by a broadcasting load: 2 m + 3 instructions for 64 m MACs. A last single panel goes through
 * 32-byte vectors. All of a group is unrolled: in a loop gcc copies every accumulator once a round. int4: the halves of a byte are
 * q + 8 after one xor, the accumulator starts at a sixteenth of int8's, and a load serves 8 k.
 * Not run on hardware yet: no machine of ours has AVX-512. Its bytes are proven with SIMDe in the instructions' place
 * (tests/test_simde.py), the instructions themselves by disassembly (cross/check_objects.py); no speed is claimed. */
#include "kernels.h"
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { TILE = 8 };     /* most rows of a tile; with 12 gcc spills */
enum { AHEAD = 4096 }; /* bytes ahead of the reading position, as in matmul_avx2.c */

INLINE int32_t four(const int8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Two panels, m rows. */
INLINE void pair(const uint8_t *panel, int64_t bytes, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int32_t type, int m)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const int8_t *w0 = (const int8_t *)panel + panel_scale_bytes(kp), *w1 = w0 + bytes, *x = lhs->values + row * kp;
    const float *scale_x = lhs->scales + row * groups;
    const int32_t *start = lhs->sums + row * groups;
    const __m512i flip = _mm512_set1_epi32((int32_t)(type == KESTREL_INT4 ? 0x88888888u : 0x80808080u)), half = _mm512_set1_epi32(0x0f0f0f0f);
    __m512 acc[TILE];
    for (int i = 0; i < m; i++) acc[i] = _mm512_setzero_ps();
    const int halves = type == KESTREL_INT4 ? 2 : 1; /* blocks of 4 k in a vector's bytes */
    /* hot loop: one group of k for 16 outputs and m rows */
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++, w0 += GROUP * PANEL / halves, w1 += GROUP * PANEL / halves) {
        __m512i sum[TILE];
        for (int i = 0; i < m; i++) sum[i] = _mm512_set1_epi32(start[i * groups + g] / (type == KESTREL_INT4 ? 16 : 1));
#pragma GCC unroll 16
        for (int c = 0; c < GROUP / 4 / halves; c++) {
            if (c % 2 == 0) {
                _mm_prefetch((const char *)w0 + c * 32 + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)w1 + c * 32 + AHEAD, _MM_HINT_T0);
            }
            const __m512i first = _mm512_castsi256_si512(_mm256_load_si256((const __m256i *)(w0 + c * 32)));
            const __m512i w = _mm512_xor_si512(_mm512_inserti64x4(first, _mm256_load_si256((const __m256i *)(w1 + c * 32)), 1), flip);
            for (int h = 0; h < halves; h++) {
                const __m512i u = type == KESTREL_INT4 ? _mm512_and_si512(_mm512_srli_epi16(w, (unsigned)h * 4), half) : w;
                for (int i = 0; i < m; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], u, _mm512_set1_epi32(four(x + i * kp + g * GROUP + (c * halves + h) * 4)));
            }
        }
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const __m128i *)(panel + g * 16))),
                                                       _mm_load_si128((const __m128i *)(panel + bytes + g * 16)), 1);
        const __m512 scale_w = _mm512_cvtph_ps(both);
        for (int i = 0; i < m; i++)
            acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i]), _mm512_mul_ps(scale_w, _mm512_set1_ps(scale_x[i * groups + g])), acc[i]);
    }
    for (int i = 0; i < m; i++) _mm512_storeu_ps(dst + i * dst_stride, acc[i]);
}

/* One panel, m rows: the same steps in half the width. */
INLINE void single(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int32_t type, int m)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const int8_t *w0 = (const int8_t *)panel + panel_scale_bytes(kp), *x = lhs->values + row * kp;
    const float *scale_x = lhs->scales + row * groups;
    const int32_t *start = lhs->sums + row * groups;
    const __m256i flip = _mm256_set1_epi32((int32_t)(type == KESTREL_INT4 ? 0x88888888u : 0x80808080u)), half = _mm256_set1_epi32(0x0f0f0f0f);
    __m256 acc[TILE];
    for (int i = 0; i < m; i++) acc[i] = _mm256_setzero_ps();
    const int halves = type == KESTREL_INT4 ? 2 : 1;
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++, w0 += GROUP * PANEL / halves) {
        __m256i sum[TILE];
        for (int i = 0; i < m; i++) sum[i] = _mm256_set1_epi32(start[i * groups + g] / (type == KESTREL_INT4 ? 16 : 1));
#pragma GCC unroll 16
        for (int c = 0; c < GROUP / 4 / halves; c++) {
            if (c % 2 == 0) _mm_prefetch((const char *)w0 + c * 32 + AHEAD, _MM_HINT_T0);
            const __m256i w = _mm256_xor_si256(_mm256_load_si256((const __m256i *)(w0 + c * 32)), flip);
            for (int h = 0; h < halves; h++) {
                const __m256i u = type == KESTREL_INT4 ? _mm256_and_si256(_mm256_srli_epi16(w, h * 4), half) : w;
                for (int i = 0; i < m; i++) sum[i] = _mm256_dpbusd_epi32(sum[i], u, _mm256_set1_epi32(four(x + i * kp + g * GROUP + (c * halves + h) * 4)));
            }
        }
        const __m256 scale_w = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(panel + g * 16)));
        for (int i = 0; i < m; i++)
            acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i]), _mm256_mul_ps(scale_w, _mm256_set1_ps(scale_x[i * groups + g])), acc[i]);
    }
    for (int i = 0; i < m; i++) _mm256_storeu_ps(dst + i * dst_stride, acc[i]);
}

INLINE void tile(const uint8_t *panel, int64_t bytes, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, bool two, int32_t type, int m)
{
    if (two) pair(panel, bytes, lhs, row, dst, dst_stride, type, m);
    else single(panel, lhs, row, dst, dst_stride, type, m);
}

INLINE void walk(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride, int32_t type)
{
    const int64_t bytes = panel_bytes(type, lhs->kp);
    for (int64_t p = 0; p < panels; p += 2) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        const bool two = p + 1 < panels;
        for (int64_t i = 0; i < m;) {
            float *out = dst + i * dst_stride + p * PANEL;
            const int64_t left = m - i;
            /* 9..15 rows in two tiles of nearly equal height */
            const int rows = (int)(left <= TILE ? left : left < 2 * TILE ? (left + 1) / 2 : TILE);
            switch (rows) {
            case 1: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 1); break;
            case 2: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 2); break;
            case 3: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 3); break;
            case 4: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 4); break;
            case 5: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 5); break;
            case 6: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 6); break;
            case 7: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 7); break;
            default: tile(panel, bytes, lhs, i, out, dst_stride, two, type, 8);
            }
            i += rows;
        }
    }
}

void kestrel_matmul_int8_avx512_vnni(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT8);
}

void kestrel_matmul_int4_avx512_vnni(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT4);
}
