/* attention_span, avx512 (contract in kernels.h). SPDX-License-Identifier: Apache-2.0
 *
 * As avx2, in vectors of 16: scores of 32 keys, or of 64 for few queries, softmax 16 keys at a time (the eight partial sums take the lower
 * and then the upper half), values 16 d at a time and a last 8 in half a vector. Up to 8 queries share each converted K and V vector.
 * Not run on hardware yet: no machine of ours has AVX-512. Its bytes are proven with SIMDe in the instructions' place
 * (tests/test_simde.py); no speed is claimed. */
#include "kernels.h"
#include "simd_x86.h"
#include <assert.h>

#define INLINE static inline __attribute__((always_inline))

enum { QUERIES = 8, MOST_D = 512 };
/* Vectors a tile of n queries is wide: 8 to 16 chains of fma hide its latency. */
INLINE int width(int n) { return n <= 4 ? 4 : 2; }

INLINE __m512 load(const void *p, int32_t type, int64_t i)
{
    if (type == KESTREL_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)((const int8_t *)p + i))));
    return type == KESTREL_F32 ? _mm512_loadu_ps((const float *)p + i) : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i)));
}

INLINE __m256 load_8(const void *p, int32_t type, int64_t i)
{
    if (type == KESTREL_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)((const int8_t *)p + i))));
    return type == KESTREL_F32 ? _mm256_loadu_ps((const float *)p + i) : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + i)));
}

/* Scores of `vectors` times 16 keys from `key` on, for n queries; dead keys give dead scores, which nothing reads. */
INLINE void scores_part(const kestrel_span *a, int32_t type, int32_t key, const float *const *q, float *const *score, int n, int vectors)
{
    const int64_t d = a->d, block = (int64_t)(key / KEY_BLOCK) * d * KEY_BLOCK;
    const float *scale = kestrel_span_scales(a->k, d) + key; /* int8 only */
    __m512 s[QUERIES][4];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < vectors; j++) s[i][j] = _mm512_setzero_ps();
    /* hot loop: q . k over d; 32 or 64 keys */
    for (int64_t c = 0; c < d; c++) {
        for (int j = 0; j < vectors; j += 2) _mm_prefetch((const char *)a->v + (block + (j / 2 * d + c) * KEY_BLOCK) * element_bytes(type), _MM_HINT_T1); /* as avx2 */
        for (int j = 0; j < vectors; j++) {
            const __m512 v = load(a->k, type, block + (j / 2 * d + c) * KEY_BLOCK + 16 * (j % 2));
            for (int i = 0; i < n; i++) s[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(q[i][c]), v, s[i][j]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < vectors; j++)
            _mm512_storeu_ps(score[i] + key + 16 * j, type == KESTREL_INT8 ? _mm512_mul_ps(s[i][j], _mm512_loadu_ps(scale + 16 * j)) : s[i][j]);
}

INLINE void scores(const kestrel_span *a, int32_t type, int32_t low, int32_t high, const float *const *q, float *const *score, int n)
{
    int32_t key = low / KEY_BLOCK * KEY_BLOCK;
    if (width(n) == 4)
        for (; key + KEY_BLOCK <= high; key += 2 * KEY_BLOCK) scores_part(a, type, key, q, score, n, 4);
    for (; key <= high; key += KEY_BLOCK) scores_part(a, type, key, q, score, n, 2);
}

/* max and p, times `scale` if any, over keys first..last of one query; L in `l`. */
static float softmax(float *score, int32_t first, int32_t last, const float *scale, float *l)
{
    const int32_t from = first / 16 * 16;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int32_t j = from; j <= last; j += 16) {
        const unsigned begin = j < first ? first - j : 0, end = last - j < 15 ? last - j : 15;
        const __mmask16 live = (__mmask16)((0xffffu << begin) & (0xffffu >> (15 - end)));
        most = _mm512_mask_max_ps(most, live, _mm512_loadu_ps(score + j), most);
    }
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(most), _mm512_extractf32x8_ps(most, 1));
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    float max = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    if (max == 0.0f) { /* the first of several zeros gives the sign */
        max = -INFINITY;
        for (int32_t j = first; j <= last; j++) max = score[j] > max ? score[j] : max;
    }
    __m256 sum = _mm256_setzero_ps();
    for (int32_t j = from; j <= last; j += 16) {
        const unsigned begin = j < first ? first - j : 0, end = last - j < 15 ? last - j : 15;
        const __mmask16 live = (__mmask16)((0xffffu << begin) & (0xffffu >> (15 - end)));
        /* dead lanes add +0, which leaves a sum of p >= 0 as it is */
        const __m512 p = _mm512_maskz_mov_ps(live, kestrel_expf16(_mm512_sub_ps(_mm512_loadu_ps(score + j), _mm512_set1_ps(max))));
        sum = _mm256_add_ps(_mm256_add_ps(sum, _mm512_castps512_ps256(p)), _mm512_extractf32x8_ps(p, 1));
        _mm512_storeu_ps(score + j, scale ? _mm512_mul_ps(p, _mm512_loadu_ps(scale + j)) : p);
    }
    _mm256_storeu_ps(l, sum);
    return max;
}

/* out[i][c ..] += p[i][j] v[j][c ..] for keys begin <= j < end, n queries, `vectors` of 16. */
INLINE void values_part(const kestrel_span *a, int32_t type, int32_t begin, int32_t end, const float *const *p, float *const *out, int n, int64_t c, int vectors)
{
    __m512 o[QUERIES][4];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < vectors; j++) o[i][j] = _mm512_loadu_ps(out[i] + c + 16 * j);
    for (int32_t t = begin; t < end; t++) {
        for (int j = 0; j < vectors; j += 2) _mm_prefetch((const char *)a->next + (t * (int64_t)a->d + c + 16 * j) * element_bytes(type), _MM_HINT_T1);
        for (int j = 0; j < vectors; j++) {
            const __m512 row = load(a->v, type, t * (int64_t)a->d + c + 16 * j);
            for (int i = 0; i < n; i++) o[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(p[i][t]), row, o[i][j]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < vectors; j++) _mm512_storeu_ps(out[i] + c + 16 * j, o[i][j]);
}

INLINE void values(const kestrel_span *a, int32_t type, int32_t begin, int32_t end, const float *const *p, float *const *out, int n)
{
    int64_t c = 0;
    if (begin >= end) return;
    for (; c + 16 * width(n) <= a->d; c += 16 * width(n)) values_part(a, type, begin, end, p, out, n, c, width(n));
    for (; c + 16 <= a->d; c += 16) values_part(a, type, begin, end, p, out, n, c, 1);
    for (; c < a->d; c += 8)
        for (int i = 0; i < n; i++) {
            __m256 o = _mm256_loadu_ps(out[i] + c);
            for (int32_t t = begin; t < end; t++) o = _mm256_fmadd_ps(_mm256_set1_ps(p[i][t]), load_8(a->v, type, t * (int64_t)a->d + c), o);
            _mm256_storeu_ps(out[i] + c, o);
        }
}

/* The live queries of one tile; keys count from the span's first. */
typedef struct tile {
    const float *q[QUERIES];
    float *score[QUERIES], *out[QUERIES];
    int32_t first[QUERIES], last[QUERIES];
    int n;
} tile;

/* Keys that not all queries of a tile see. */
static void values_alone(const kestrel_span *a, const float *score, float *out, int32_t begin, int32_t end)
{
    if (a->type == KESTREL_F16) values(a, KESTREL_F16, begin, end, &score, &out, 1);
    else if (a->type == KESTREL_F32) values(a, KESTREL_F32, begin, end, &score, &out, 1);
    else values(a, KESTREL_INT8, begin, end, &score, &out, 1);
}

INLINE void run(const kestrel_span *a, const tile *t, int32_t type, int n)
{
    int32_t low = SPAN, high = 0, begin = 0, end = SPAN; /* keys that any, that every query sees */
    for (int i = 0; i < n; i++) {
        low = t->first[i] < low ? t->first[i] : low;
        high = t->last[i] > high ? t->last[i] : high;
        begin = t->first[i] > begin ? t->first[i] : begin;
        end = t->last[i] + 1 < end ? t->last[i] + 1 : end;
    }
    if (end < begin) end = begin;
    scores(a, type, low, high, t->q, t->score, n);
    const float *scale = type == KESTREL_INT8 ? kestrel_span_scales(a->v, a->d) : NULL;
    for (int i = 0; i < n; i++) t->out[i][-STATE_HEAD] = softmax(t->score[i], t->first[i], t->last[i], scale, t->out[i] - STATE_HEAD + 8);
    for (int i = 0; i < n; i++) values_alone(a, t->score[i], t->out[i], t->first[i], t->last[i] + 1 < begin ? t->last[i] + 1 : begin);
    values(a, type, begin, end, (const float *const *)t->score, t->out, n);
    for (int i = 0; i < n; i++) values_alone(a, t->score[i], t->out[i], t->first[i] > end ? t->first[i] : end, t->last[i] + 1);
}

/* The same code per type and number of queries, so that tiles live in registers. */
INLINE void dispatch(const kestrel_span *a, const tile *t, int32_t type)
{
    switch (t->n) {
    case 1: run(a, t, type, 1); break;
    case 2: run(a, t, type, 2); break;
    case 3: run(a, t, type, 3); break;
    case 4: run(a, t, type, 4); break;
    case 5: run(a, t, type, 5); break;
    case 6: run(a, t, type, 6); break;
    case 7: run(a, t, type, 7); break;
    default: run(a, t, type, QUERIES);
    }
}

void kestrel_attention_span_avx512(const kestrel_span *a)
{
    const int64_t d = a->d, stride = STATE_HEAD + d;
    float partial[QUERIES][STATE_HEAD + MOST_D];
    assert(d % 8 == 0 && d <= MOST_D);
    for (int32_t i = 0; i < a->queries;) {
        tile t = {.n = 0};
        float *state[QUERIES];
        for (; i < a->queries && t.n < QUERIES; i++) {
            const int32_t row = i / a->group;
            const int32_t first = a->lo[row] > a->begin ? a->lo[row] - a->begin : 0;
            const int32_t last = a->hi[row] < a->begin + SPAN - 1 ? a->hi[row] - a->begin : SPAN - 1;
            if (first > last) continue;
            t.q[t.n] = a->q + row * a->q_stride + (i % a->group) * d;
            t.score[t.n] = a->work + (int64_t)i * SPAN;
            t.first[t.n] = first;
            t.last[t.n] = last;
            memset(partial[t.n], 0, (size_t)stride * sizeof(float));
            t.out[t.n] = partial[t.n] + STATE_HEAD;
            state[t.n++] = a->state + i * stride;
        }
        if (t.n == 0) break;
        if (a->type == KESTREL_F16) dispatch(a, &t, KESTREL_F16);
        else if (a->type == KESTREL_F32) dispatch(a, &t, KESTREL_F32);
        else dispatch(a, &t, KESTREL_INT8);
        for (int j = 0; j < t.n; j++) kestrel_attention_merge_portable(state[j], partial[j], d);
    }
}
