/* rope, portable (half-split rotary embedding) and its frequencies. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "exp.h"
#include "kernels.h"

void kestrel_rope_portable(float *x, int64_t heads, int64_t d, const float *cosine, const float *sine)
{
    const int64_t half = d / 2;
    /* hot loop: one head */
    for (int64_t h = 0; h < heads; h++, x += d)
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = fmaf(a, cosine[i], -(b * sine[i]));
            x[i + half] = fmaf(b, cosine[i], a * sine[i]);
        }
}

double kestrel_ln(double x) { return kestrel_log(x); }

int32_t kestrel_rope_inv_freq(double theta, int32_t head_dim, float *inv_freq)
{
    if (!inv_freq || !(theta >= 1.0 && theta <= 1e12) || head_dim < 2 || head_dim % 2) return KESTREL_E_ARGUMENT;
    const double log_theta = kestrel_log(theta);
    for (int32_t i = 0; i < head_dim / 2; i++) inv_freq[i] = (float)kestrel_exp(-(2.0 * i / head_dim) * log_theta);
    return KESTREL_OK;
}
