/* matmul, portable: the contracts of matmul_int8, matmul_int4 and matmul_f32 in C (kernels.h). SPDX-License-Identifier: Apache-2.0 */
#include "half.h"
#include "kernels.h"

/* sum[r] += a group's products of row r: a byte of int8 is one k, of int4 two, which lie 4 k apart. */
static inline void add_products(int32_t sum[PANEL], const int8_t *w, const int8_t *x, int32_t type)
{
    if (type == KESTREL_INT4) {
        for (int64_t k8 = 0; k8 < GROUP / 8; k8++)
            for (int r = 0; r < PANEL; r++)
                for (int j = 0; j < 4; j++) {
                    const int8_t two = w[(k8 * PANEL + r) * 4 + j];
                    const int32_t low = ((two & 15) ^ 8) - 8, high = two >> 4;
                    sum[r] += low * x[k8 * 8 + j] + high * x[k8 * 8 + 4 + j];
                }
    } else {
        for (int64_t k4 = 0; k4 < GROUP / 4; k4++)
            for (int r = 0; r < PANEL; r++)
                for (int j = 0; j < 4; j++) sum[r] += w[(k4 * PANEL + r) * 4 + j] * x[k4 * 4 + j];
    }
}

static inline __attribute__((always_inline)) void walk(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride, int32_t type)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP, group_bytes = type == KESTREL_INT4 ? GROUP * PANEL / 2 : GROUP * PANEL;
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * panel_bytes(type, kp);
        const uint16_t *scale_w = (const uint16_t *)panel;
        const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp);
        for (int64_t i = 0; i < m; i++) {
            const int8_t *x = lhs->values + i * kp;
            float acc[PANEL] = {0};
            /* hot loop: one group: 8 exact integer sums, then one fma each */
            for (int64_t g = 0; g < groups; g++) {
                int32_t sum[PANEL] = {0};
                add_products(sum, w + g * group_bytes, x + g * GROUP, type);
                for (int r = 0; r < PANEL; r++)
                    acc[r] = fmaf((float)sum[r], kestrel_f16_to_f32(scale_w[g * PANEL + r]) * lhs->scales[i * groups + g], acc[r]);
            }
            for (int r = 0; r < PANEL; r++) dst[i * dst_stride + p * PANEL + r] = acc[r];
        }
    }
}

void kestrel_matmul_int8_portable(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT8);
}

void kestrel_matmul_int4_portable(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT4);
}

/* Four rows at a time: 8 independent outputs a row leave the multiplier waiting for its own latency. The order per output is untouched. */
void kestrel_matmul_f32_portable(const void *data, int64_t panels, int64_t k, const float *x, int64_t x_stride, int64_t m, float *dst, int64_t dst_stride)
{
    for (int64_t p = 0; p < panels; p++) {
        const float *w = (const float *)data + p * padded_k(k) * PANEL;
        int64_t i = 0;
        for (; i + 4 <= m; i += 4) {
            const float *x0 = x + i * x_stride, *x1 = x0 + x_stride, *x2 = x1 + x_stride, *x3 = x2 + x_stride;
            float a[4][PANEL] = {{0}};
            /* hot loop: one k: 8 outputs of four rows */
            for (int64_t j = 0; j < k; j++)
                for (int r = 0; r < PANEL; r++) {
                    const float v = w[j * PANEL + r];
                    a[0][r] = fmaf(x0[j], v, a[0][r]);
                    a[1][r] = fmaf(x1[j], v, a[1][r]);
                    a[2][r] = fmaf(x2[j], v, a[2][r]);
                    a[3][r] = fmaf(x3[j], v, a[3][r]);
                }
            for (int t = 0; t < 4; t++)
                for (int r = 0; r < PANEL; r++) dst[(i + t) * dst_stride + p * PANEL + r] = a[t][r];
        }
        for (; i < m; i++) {
            const float *row = x + i * x_stride;
            float a[PANEL] = {0};
            for (int64_t j = 0; j < k; j++)
                for (int r = 0; r < PANEL; r++) a[r] = fmaf(row[j], w[j * PANEL + r], a[r]);
            for (int r = 0; r < PANEL; r++) dst[i * dst_stride + p * PANEL + r] = a[r];
        }
    }
}
