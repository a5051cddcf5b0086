/* matmul_int4, portable: its contract in C (kernels.h). SPDX-License-Identifier: Apache-2.0 */
#include "half.h"
#include "kernels.h"

void kestrel_matmul_int4_portable(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * panel_bytes(KESTREL_INT4, kp);
        const uint16_t *scale_w = (const uint16_t *)panel;
        const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp);
        for (int64_t i = 0; i < m; i++) {
            const int8_t *x = lhs->values + i * kp;
            float acc[PANEL] = {0};
            /* hot loop: one group: 8 exact integer sums, then one fma each */
            for (int64_t g = 0; g < groups; g++) {
                int32_t sum[PANEL] = {0};
                for (int64_t k8 = g * GROUP / 8; k8 < (g + 1) * GROUP / 8; k8++)
                    for (int r = 0; r < PANEL; r++)
                        for (int j = 0; j < 4; j++) {
                            const int8_t two = w[(k8 * PANEL + r) * 4 + j];
                            const int32_t low = ((two & 15) ^ 8) - 8, high = two >> 4;
                            sum[r] += low * x[k8 * 8 + j] + high * x[k8 * 8 + 4 + j];
                        }
                for (int r = 0; r < PANEL; r++)
                    acc[r] = fmaf((float)sum[r], kestrel_f16_to_f32(scale_w[g * PANEL + r]) * lhs->scales[i * groups + g], acc[r]);
            }
            for (int r = 0; r < PANEL; r++) dst[i * dst_stride + p * PANEL + r] = acc[r];
        }
    }
}
