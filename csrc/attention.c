/* attention, portable: one span of keys for a tile of queries; merge and finish. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 * Sources: online softmax (Milakov & Gimelshein 2018), flash-decoding's split of keys (Dao et al. 2023), here with spans at absolute
 * positions merged in one fixed order, so that neither the rows of a pass nor the threads show in the bits. */
#include "half.h"
#include "kernels.h"

static inline float load(const void *p, int32_t type, int64_t i)
{
    if (type == KESTREL_INT8) return (float)((const int8_t *)p)[i];
    return type == KESTREL_F32 ? ((const float *)p)[i] : kestrel_f16_to_f32(((const uint16_t *)p)[i]);
}

void kestrel_attention_span_portable(const kestrel_span *a)
{
    const int64_t d = a->d;
    const bool int8 = a->type == KESTREL_INT8;
    const float *scale_k = kestrel_span_scales(a->k, d), *scale_v = kestrel_span_scales(a->v, d); /* int8 only */
    float partial[STATE_HEAD + 512];
    for (int32_t i = 0; i < a->queries; i++) {
        const int32_t row = i / a->group;
        const int32_t first = a->lo[row] > a->begin ? a->lo[row] - a->begin : 0;
        const int32_t last = a->hi[row] < a->begin + SPAN - 1 ? a->hi[row] - a->begin : SPAN - 1;
        if (first > last) continue;
        const float *q = a->q + row * a->q_stride + (i % a->group) * d;
        float *score = a->work + (int64_t)i * SPAN, *l = partial + 8, *out = partial + STATE_HEAD;
        float max = -INFINITY;
        for (int32_t j = first; j <= last; j++) {
            const int64_t block = (int64_t)(j / KEY_BLOCK) * d * KEY_BLOCK + j % KEY_BLOCK;
            float s = 0.0f;
            /* hot loop: q . k over d */
            for (int64_t c = 0; c < d; c++) s = fmaf(q[c], load(a->k, a->type, block + c * KEY_BLOCK), s);
            if (int8) s *= scale_k[j];
            score[j] = s;
            max = s > max ? s : max;
        }
        for (int64_t c = 0; c < STATE_HEAD + d; c++) partial[c] = 0.0f;
        partial[0] = max;
        for (int32_t j = first; j <= last; j++) {
            const float p = kestrel_expf(score[j] - max);
            const float w = int8 ? p * scale_v[j] : p;
            l[j % 8] += p;
            for (int64_t c = 0; c < d; c++) out[c] = fmaf(w, load(a->v, a->type, j * d + c), out[c]);
        }
        kestrel_attention_merge_portable(a->state + i * (STATE_HEAD + d), partial, d);
    }
}

void kestrel_attention_merge_portable(float *a, const float *b, int64_t d)
{
    if (b[0] == -INFINITY) return;
    if (a[0] == -INFINITY) {
        memcpy(a, b, (size_t)(STATE_HEAD + d) * sizeof *a);
        return;
    }
    const float max = a[0] > b[0] ? a[0] : b[0];
    const float scale_a = kestrel_expf(a[0] - max), scale_b = kestrel_expf(b[0] - max);
    a[0] = max;
    for (int64_t c = 8; c < STATE_HEAD + d; c++) a[c] = fmaf(scale_b, b[c], scale_a * a[c]);
}

void kestrel_attention_finish_portable(const float *state, int64_t d, float *out)
{
    float l[8];
    memcpy(l, state + 8, sizeof l);
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; j++) l[j] += l[j + half];
    const float r = state[0] == -INFINITY ? NAN : 1.0f / l[0]; /* every score was NaN: the state was never filled */
    for (int64_t c = 0; c < d; c++) out[c] = state[STATE_HEAD + c] * r; /* NaN r: NaN, whatever A holds */
}
