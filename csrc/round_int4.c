/* int4's rounding: which scale, and where a rounding error goes. SPDX-License-Identifier: Apache-2.0
 *
 * Per group and row the scale is searched: for a few fractions of the largest weight, round, take the least-squares scale of those
 * integers, keep the one of least error; every column's error counts with its input's mean square. Then columns are rounded one
 * after another and each error is spread over the columns still to come, as the inputs' second moments say (GPTQ, Frantar et al.
 * 2022, after OBS), within blocks of FEEDBACK columns. Every sum has one order (columns ascending, lanes = rows of a panel).
 *
 * Mean KL, only the weights' rounding (board/compare_quality.py): SmolLM2-135M's dithered weights 0.216, Q4_0 0.416; Gemma 3 270M's 0.233
 * and 0.344. SmolLM2 as it runs 0.219, without the feedback 0.242. A prototype in numpy with another seed, Q4_0 0.478: absmax / 7 by 32
 * 0.667; scale of least plain error by 32 0.522; of least weighted error by 32 0.272, by 64 0.355; Q4_0's rounding with the fold 0.313. */
#include "round_int4.h"
#include "exp.h"
#include "half.h"
#include <stdlib.h>

/* Of the signed largest weight: -8 puts it on the range's longer side, beyond that it is clipped. */
static const float divisors[] = {-10.4f, -9.6f, -8.9f, -8.3f, -8.0f, -7.6f, -7.2f, -6.8f, -6.4f, -5.9f, -5.4f, -4.9f, 5.0f, 5.5f, 6.0f, 6.5f, 7.0f, 7.5f, 8.0f};
enum { DIVISORS = sizeof divisors / sizeof *divisors };

static inline float nearest(float x)
{
    x = x > -8.0f ? x : -8.0f; /* two selections, so that the loops over rows are vectorised */
    x = x < 7.0f ? x : 7.0f;
    return (x + ROUND_MAGIC) - ROUND_MAGIC; /* half to even */
}

static void search(const float *w, const float *importance, uint16_t *scales)
{
    float largest[PANEL] = {0}, best[PANEL], kept[PANEL];
    for (int j = 0; j < GROUP; j++)
        for (int r = 0; r < PANEL; r++) {
            const float x = w[j * PANEL + r];
            largest[r] = fabsf(x) > fabsf(largest[r]) ? x : largest[r];
        }
    for (int r = 0; r < PANEL; r++) best[r] = kept[r] = 0.0f; /* scale 0: no gain */
    for (int c = 0; c < DIVISORS; c++) {
        float inverse[PANEL], product[PANEL] = {0}, square[PANEL] = {0};
        for (int r = 0; r < PANEL; r++) inverse[r] = largest[r] != 0.0f ? divisors[c] / largest[r] : 0.0f;
        for (int j = 0; j < GROUP; j++) {
            const float h = importance ? importance[j] : 1.0f;
            for (int r = 0; r < PANEL; r++) {
                const float x = w[j * PANEL + r], q = nearest(x * inverse[r]), hq = h * q;
                product[r] = fmaf(hq, x, product[r]);
                square[r] = fmaf(hq, q, square[r]);
            }
        }
        for (int r = 0; r < PANEL; r++) {
            if (!(square[r] > 0.0f)) continue;
            const float s = kestrel_f16_to_f32(kestrel_f32_to_f16(product[r] / square[r]));
            const float gain = s * (2.0f * product[r] - s * square[r]); /* error of scale 0 less this one's */
            if (gain > best[r]) {
                best[r] = gain;
                kept[r] = s;
            }
        }
    }
    for (int r = 0; r < PANEL; r++) scales[r] = kestrel_f32_to_f16(kept[r]);
}

void kestrel_round_int4(float *w, int64_t kp, const float *importance, const float *feedback, uint16_t *scales, int8_t *values)
{
    for (int64_t g = 0; g < kp / GROUP; g++) {
        float scale[PANEL], inverse[PANEL];
        search(w + g * GROUP * PANEL, importance ? importance + g * GROUP : NULL, scales + g * PANEL);
        for (int r = 0; r < PANEL; r++) {
            scale[r] = kestrel_f16_to_f32(scales[g * PANEL + r]);
            inverse[r] = scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f;
        }
        for (int64_t j = g * GROUP; j < (g + 1) * GROUP; j++) {
            float error[PANEL];
            for (int r = 0; r < PANEL; r++) {
                const float x = w[j * PANEL + r], q = nearest(x * inverse[r]);
                values[j * PANEL + r] = (int8_t)q;
                error[r] = fmaf(-q, scale[r], x);
            }
            if (!feedback) continue;
            const int64_t end = round_up(j + 1, FEEDBACK) < kp ? round_up(j + 1, FEEDBACK) : kp;
            const float *factor = feedback + j * FEEDBACK - j / FEEDBACK * FEEDBACK;
            for (int64_t t = j + 1; t < end; t++) {
                const float f = factor[t];
#pragma GCC unroll 1 /* unrolled, gcc does not vectorise it */
                for (int r = 0; r < PANEL; r++) w[t * PANEL + r] = fmaf(-error[r], f, w[t * PANEL + r]);
            }
        }
    }
}

/* With H = moments + damping = R R^T, R upper triangular, and U = R^-1: H^-1 = U^T U, and column j's error goes to t > j as U[j][t] / U[j][j]. */
int32_t kestrel_feedback(int32_t n, const float *moments, float *factors)
{
    if (n < 1 || n > FEEDBACK || !moments || !factors) return KESTREL_E_ARGUMENT;
    double *r = malloc((size_t)FEEDBACK * FEEDBACK * sizeof *r), *u = calloc((size_t)FEEDBACK * FEEDBACK, sizeof *u), mean = 0.0;
    if (!r || !u) {
        free(r);
        free(u);
        return KESTREL_E_MEMORY;
    }
    for (int32_t i = 0; i < n; i++) mean += moments[i * FEEDBACK + i];
    mean /= n;
    const double damping = mean > 0.0 ? 0.01 * mean : 1.0;
    memset(factors, 0, (size_t)FEEDBACK * FEEDBACK * sizeof *factors);
    /* columns of R from the last one on: r[j][i] = R[i][j], i <= j */
    for (int32_t j = n - 1; j >= 0; j--)
        for (int32_t i = j; i >= 0; i--) {
            double sum = moments[i * FEEDBACK + j] + (i == j ? damping : 0.0);
            for (int32_t t = j + 1; t < n; t++) sum -= r[t * FEEDBACK + i] * r[t * FEEDBACK + j];
            r[j * FEEDBACK + i] = i == j ? sqrt(sum > 1e-3 * damping ? sum : 1e-3 * damping) : sum / r[j * FEEDBACK + j];
        }
    /* R U = 1: row i of U from the rows below it; U[i][t] = -sum over i < s <= t of R[i][s] U[s][t] / R[i][i] */
    for (int32_t i = n - 1; i >= 0; i--) {
        double *row = u + (size_t)i * FEEDBACK;
        for (int32_t s = i + 1; s < n; s++) {
            const double f = r[s * FEEDBACK + i];
            for (int32_t t = s; t < n; t++) row[t] -= f * u[(size_t)s * FEEDBACK + t];
        }
        const double d = r[i * FEEDBACK + i];
        for (int32_t t = i + 1; t < n; t++) row[t] /= d;
        row[i] = 1.0 / d;
        for (int32_t t = i + 1; t < n; t++) factors[i * FEEDBACK + t] = (float)(row[t] / row[i]);
    }
    free(r);
    free(u);
    return KESTREL_OK;
}
