/* norm, portable (RMSNorm). Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include <math.h>

bool kestrel_norm_portable(float *x, const float *delta, const float *gain, int64_t n, float eps, float *dst)
{
    enum { PARTS = 16 };
    float s[PARTS] = {0};
    if (delta)
        for (int64_t i = 0; i < n; i++) x[i] += delta[i];
    int64_t i = 0;
    /* hot loop: 16 partial sums of squares */
    for (; i + PARTS <= n; i += PARTS)
        for (int j = 0; j < PARTS; j++) s[j] = fmaf(x[i + j], x[i + j], s[j]);
    for (int j = 0; i + j < n; j++) s[j] = fmaf(x[i + j], x[i + j], s[j]);
    for (int half = PARTS / 2; half; half /= 2)
        for (int j = 0; j < half; j++) s[j] += s[j + half];
    const float r = 1.0f / sqrtf(s[0] / (float)n + eps);
    for (i = 0; i < n; i++) dst[i] = (x[i] * r) * gain[i];
    return isfinite(s[0]);
}
