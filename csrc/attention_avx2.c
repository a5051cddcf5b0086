/* attention_span, avx2 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0
 *
 * Scores: lanes are keys, 32 keys x QUERIES queries a tile, so that a converted K vector serves several queries. Values: lanes are d,
 * 32 of them x QUERIES queries; keys that all queries of the tile see go together, the others query by query, each in ascending order. */
#include "kernels.h"
#include "simd_x86.h"
#include <assert.h>

enum { QUERIES = 3, MOST_D = 512 };
/* Bytes ahead of the keys. The values of the same keys come with them, and with the values the next span's keys, into the second cache level: from
 * memory a span (d 64, 3 queries) took 1.80 us in f16 and 1.69 in int8; 2.14 and 2.32 without the values', 3.3 and 2.5 with none; 1.39 and 1.62 cached. */
enum { AHEAD = 2048 };

static inline __attribute__((always_inline)) __m256 load(const void *p, int32_t type, int64_t i)
{
    if (type == KESTREL_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)((const int8_t *)p + i))));
    return type == KESTREL_F32 ? _mm256_loadu_ps((const float *)p + i) : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + i)));
}

/* Scores of one K block for n queries; dead keys give dead scores, which nothing reads. scale: of the block's keys, or NULL. v: their V. */
static inline __attribute__((always_inline)) void scores(const char *k, const char *v, int32_t type, int64_t d, const float *scale, const float *const *q, float *const *score, int n)
{
    __m256 s[QUERIES][4];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 4; j++) s[i][j] = _mm256_setzero_ps();
    /* hot loop: q . k over d; 32 keys */
    for (int64_t c = 0; c < d; c++) {
        const int64_t at = c * KEY_BLOCK * element_bytes(type);
        _mm_prefetch(k + at + AHEAD, _MM_HINT_T0);
        _mm_prefetch(v + at, _MM_HINT_T1);
        __m256 x[QUERIES];
        for (int i = 0; i < n; i++) x[i] = _mm256_broadcast_ss(q[i] + c);
        for (int j = 0; j < 4; j++) {
            const __m256 keys = load(k, type, c * KEY_BLOCK + 8 * j);
            for (int i = 0; i < n; i++) s[i][j] = _mm256_fmadd_ps(x[i], keys, s[i][j]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 4; j++) _mm256_storeu_ps(score[i] + 8 * j, scale ? _mm256_mul_ps(s[i][j], _mm256_loadu_ps(scale + 8 * j)) : s[i][j]);
}

/* out[i][c ..] += p[i][j] v[j][c ..] for keys begin <= j < end, n queries, `width` vectors of d. next: what is fetched meanwhile. */
static inline __attribute__((always_inline)) void values(const void *v, const char *next, int32_t type, int64_t d, int32_t begin, int32_t end, const float *const *p, float *const *out, int n, int64_t c, int width)
{
    __m256 a[QUERIES][4];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < width; j++) a[i][j] = _mm256_loadu_ps(out[i] + c + 8 * j);
    for (int32_t t = begin; t < end; t++) {
        _mm_prefetch(next + (t * d + c) * element_bytes(type), _MM_HINT_T1);
        __m256 x[QUERIES];
        for (int i = 0; i < n; i++) x[i] = _mm256_broadcast_ss(p[i] + t);
        for (int j = 0; j < width; j++) {
            const __m256 row = load(v, type, t * d + c + 8 * j);
            for (int i = 0; i < n; i++) a[i][j] = _mm256_fmadd_ps(x[i], row, a[i][j]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < width; j++) _mm256_storeu_ps(out[i] + c + 8 * j, a[i][j]);
}

static inline __attribute__((always_inline)) void all_values(const void *v, const char *next, int32_t type, int64_t d, int32_t begin, int32_t end, const float *const *p, float *const *out, int n)
{
    int64_t c = 0;
    for (; c + 32 <= d; c += 32) values(v, next, type, d, begin, end, p, out, n, c, 4);
    for (; c + 8 <= d; c += 8) values(v, next, type, d, begin, end, p, out, n, c, 1);
}

/* max and p, times `scale` if any, over keys first..last of one query; L in `l`. whole: first and last are the ends of vectors. */
static inline __attribute__((always_inline)) float softmax(float *score, int32_t first, int32_t last, const float *scale, float *l, bool whole)
{
    const int32_t from = first / 8 * 8;
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), low = _mm256_set1_epi32(first - 1), high = _mm256_set1_epi32(last + 1);
    const __m256 nothing = _mm256_set1_ps(-INFINITY);
    __m256 most = nothing;
    for (int32_t j = from; j <= last; j += 8) {
        const __m256i index = _mm256_add_epi32(lane, _mm256_set1_epi32(j));
        const __m256 seen = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(index, low), _mm256_cmpgt_epi32(high, index)));
        const __m256 s = _mm256_loadu_ps(score + j);
        most = _mm256_max_ps(whole ? s : _mm256_blendv_ps(nothing, s, seen), most);
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    float max = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    if (max == 0.0f) { /* the first of several zeros gives the sign */
        max = -INFINITY;
        for (int32_t j = first; j <= last; j++) max = score[j] > max ? score[j] : max;
    }
    __m256 sum = _mm256_setzero_ps();
    for (int32_t j = from; j <= last; j += 8) {
        const __m256i index = _mm256_add_epi32(lane, _mm256_set1_epi32(j));
        const __m256 seen = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(index, low), _mm256_cmpgt_epi32(high, index)));
        const __m256 p = kestrel_expf8(_mm256_sub_ps(_mm256_loadu_ps(score + j), _mm256_set1_ps(max)));
        const __m256 more = _mm256_add_ps(sum, p);
        sum = whole ? more : _mm256_blendv_ps(sum, more, seen);
        _mm256_storeu_ps(score + j, scale ? _mm256_mul_ps(p, _mm256_loadu_ps(scale + j)) : p);
    }
    _mm256_storeu_ps(l, sum);
    return max;
}

/* Queries that have keys in the span, at most QUERIES of them. */
static inline __attribute__((always_inline)) void tile(const kestrel_span *a, int32_t type, const int32_t *query, const int32_t *first, const int32_t *last, int n)
{
    const int64_t d = a->d;
    const float *scale_k = type == KESTREL_INT8 ? kestrel_span_scales(a->k, d) : NULL, *scale_v = type == KESTREL_INT8 ? kestrel_span_scales(a->v, d) : NULL;
    float partial[QUERIES][STATE_HEAD + MOST_D];
    const float *q[QUERIES];
    float *score[QUERIES], *out[QUERIES];
    int32_t low = SPAN, high = 0, all_low = 0, all_high = SPAN - 1; /* keys that any, that every query sees */
    for (int i = 0; i < n; i++) {
        q[i] = a->q + query[i] / a->group * a->q_stride + query[i] % a->group * d;
        out[i] = partial[i] + STATE_HEAD;
        low = first[i] < low ? first[i] : low;
        high = last[i] > high ? last[i] : high;
        all_low = first[i] > all_low ? first[i] : all_low;
        all_high = last[i] < all_high ? last[i] : all_high;
    }
    for (int32_t block = low / KEY_BLOCK; block <= high / KEY_BLOCK; block++) {
        for (int i = 0; i < n; i++) score[i] = a->work + (int64_t)query[i] * SPAN + block * KEY_BLOCK;
        const int64_t at = block * d * KEY_BLOCK * element_bytes(type);
        scores((const char *)a->k + at, (const char *)a->v + at, type, d, scale_k ? scale_k + block * KEY_BLOCK : NULL, q, score, n);
    }
    for (int i = 0; i < n; i++) {
        score[i] = a->work + (int64_t)query[i] * SPAN;
        memset(partial[i], 0, (size_t)(STATE_HEAD + d) * sizeof **partial);
        partial[i][0] = first[i] % 8 == 0 && last[i] % 8 == 7 ? softmax(score[i], first[i], last[i], scale_v, partial[i] + 8, true)
                                                              : softmax(score[i], first[i], last[i], scale_v, partial[i] + 8, false);
    }
    const float *const *p = (const float *const *)score;
    const bool common = all_low <= all_high;
    for (int i = 0; i < n; i++) all_values(a->v, a->next, type, d, first[i], common ? all_low : last[i] + 1, p + i, out + i, 1);
    if (common) {
        all_values(a->v, a->next, type, d, all_low, all_high + 1, p, out, n);
        for (int i = 0; i < n; i++) all_values(a->v, a->next, type, d, all_high + 1, last[i] + 1, p + i, out + i, 1);
    }
    for (int i = 0; i < n; i++) kestrel_attention_merge_portable(a->state + query[i] * (STATE_HEAD + d), partial[i], d);
}

static inline __attribute__((always_inline)) void span(const kestrel_span *a, int32_t type)
{
    int32_t query[QUERIES], first[QUERIES], last[QUERIES];
    int n = 0;
    for (int32_t i = 0; i < a->queries; i++) {
        const int32_t row = i / a->group;
        first[n] = a->lo[row] > a->begin ? a->lo[row] - a->begin : 0;
        last[n] = a->hi[row] < a->begin + SPAN - 1 ? a->hi[row] - a->begin : SPAN - 1;
        query[n] = i;
        n += first[n] <= last[n];
        if (n == QUERIES) {
            tile(a, type, query, first, last, QUERIES);
            n = 0;
        }
    }
    if (n == 2) tile(a, type, query, first, last, 2);
    if (n == 1) tile(a, type, query, first, last, 1);
}

void kestrel_attention_span_avx2(const kestrel_span *a)
{
    assert(a->d % 8 == 0 && a->d <= MOST_D);
    if (a->type == KESTREL_F32) span(a, KESTREL_F32);
    else if (a->type == KESTREL_F16) span(a, KESTREL_F16);
    else span(a, KESTREL_INT8);
}
