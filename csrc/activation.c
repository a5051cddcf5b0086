/* silu_multiply and gelu_multiply, portable (SwiGLU and GeGLU, Shazeer 2020). Contract in kernels.h. SPDX-License-Identifier: Apache-2.0 */
#include "exp.h"
#include "kernels.h"

void kestrel_silu_multiply_portable(const float *gate, const float *up, int64_t n, float *dst)
{
    /* hot loop: element by element, vectorised by the compiler */
    for (int64_t i = 0; i < n; i++) {
        const float g = gate[i];
        dst[i] = g / (1.0f + kestrel_expf(-g)) * up[i];
    }
}

void kestrel_gelu_multiply_portable(const float *gate, const float *up, int64_t n, float *dst)
{
    for (int64_t i = 0; i < n; i++) {
        const float g = gate[i];
        dst[i] = g / (1.0f + kestrel_expf(g * fmaf(GELU_B, g * g, GELU_A))) * up[i];
    }
}
