/* Calibration: what the matmuls of a step take in. SPDX-License-Identifier: Apache-2.0 */
#include "step.h"
#include <math.h>

enum { CHUNK = 16 }; /* columns of the moments held at a time */

/* moments[i][j] += x[row][i] x[row][j] over the rows ascending, for the columns of j's chunks that are not all left of i. */
static void moments_task(void *arg, int32_t block, int32_t thread)
{
    const step *s = arg;
    const int64_t first = (int64_t)block * KESTREL_FEEDBACK, left = s->weight->k - first, n = left < KESTREL_FEEDBACK ? left : KESTREL_FEEDBACK;
    float *moments = s->moments + first * KESTREL_FEEDBACK;
    (void)thread;
    for (int64_t j0 = 0; j0 < n; j0 += CHUNK) {
        const int64_t count = n - j0 < CHUNK ? n - j0 : CHUNK;
        for (int64_t i = 0; i < j0 + count; i++) {
            float sum[CHUNK] = {0};
            for (int64_t j = 0; j < count; j++) sum[j] = moments[i * KESTREL_FEEDBACK + j0 + j];
            for (int32_t row = 0; row < s->dst_rows; row++) {
                const float *x = s->src + row * s->src_stride + first, v = x[i];
                if (count == CHUNK)
                    for (int64_t j = 0; j < CHUNK; j++) sum[j] = fmaf(v, x[j0 + j], sum[j]);
                else
                    for (int64_t j = 0; j < count; j++) sum[j] = fmaf(v, x[j0 + j], sum[j]);
            }
            for (int64_t j = 0; j < count; j++) moments[i * KESTREL_FEEDBACK + j0 + j] = sum[j];
        }
    }
}

void kestrel_observe_maxima(step *s, int32_t rows)
{
    const int64_t k = s->weight->k;
    if (!s->maxima) return;
    for (int32_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < k; j++) {
            const float v = fabsf(s->src[i * s->src_stride + j]);
            s->maxima[j] = v > s->maxima[j] ? v : s->maxima[j];
        }
    s->maxima += k;
}

void kestrel_observe_moments(step *s, int32_t rows)
{
    const int64_t blocks = (s->weight->k + KESTREL_FEEDBACK - 1) / KESTREL_FEEDBACK;
    if (!s->moments) return;
    s->dst_rows = rows;
    kestrel_run(s, moments_task, (int32_t)blocks);
    s->moments += blocks * KESTREL_FEEDBACK * KESTREL_FEEDBACK;
}
