/* pack: rows -> panels and back, one layout for all variants (kernels.h describes it). SPDX-License-Identifier: Apache-2.0 */
#include "half.h"
#include "kernels.h"

static bool shape_ok(int32_t type, int64_t n, int64_t k)
{
    return (type == KESTREL_F32 || type == KESTREL_INT8) && n >= 1 && k >= 1 && n <= (int64_t)1 << 31 && k <= (int64_t)1 << 24;
}

int64_t kestrel_packed_bytes(int32_t type, int64_t n, int64_t k)
{
    return shape_ok(type, n, k) ? round_up(n, PANEL) / PANEL * panel_bytes(type, k) : -1;
}

/* Symmetric absmax over one group. The scale is rounded to f16 first and the values follow it, so that what is stored is consistent. */
static void quantize_group(const float *x, int64_t count, uint16_t *scale, int8_t q[GROUP])
{
    float a = 0.0f;
    for (int64_t j = 0; j < count; j++) {
        const float v = fabsf(x[j]);
        a = v > a ? v : a;
    }
    *scale = kestrel_f32_to_f16(a / 127.0f);
    const float s = kestrel_f16_to_f32(*scale);
    for (int64_t j = 0; j < GROUP; j++) {
        float y = j < count && s > 0.0f ? x[j] / s : 0.0f;
        y = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;
        q[j] = (int8_t)(kestrel_f32_bits(y + ROUND_MAGIC) - ROUND_BITS);
    }
}

int32_t kestrel_pack(int32_t type, int64_t n, int64_t k, int64_t row0, int64_t rows, const float *src, void *dst)
{
    if (!shape_ok(type, n, k) || !src || !dst || row0 < 0 || rows < 1 || row0 % PANEL || row0 > n - rows) return KESTREL_E_ARGUMENT;
    if (rows % PANEL && row0 + rows != n) return KESTREL_E_ARGUMENT;
    const int64_t kp = padded_k(k), bytes = panel_bytes(type, k);
    for (int64_t r0 = 0; r0 < rows; r0 += PANEL) {
        uint8_t *panel = (uint8_t *)dst + (row0 + r0) / PANEL * bytes;
        memset(panel, 0, (size_t)bytes);
        const int64_t here = rows - r0 < PANEL ? rows - r0 : PANEL;
        for (int64_t r = 0; r < here; r++) {
            const float *x = src + (r0 + r) * k;
            if (type == KESTREL_F32) {
                for (int64_t j = 0; j < k; j++) ((float *)panel)[j * PANEL + r] = x[j];
                continue;
            }
            uint16_t *scales = (uint16_t *)panel;
            int8_t *values = (int8_t *)panel + panel_scale_bytes(k);
            for (int64_t g = 0; g < kp / GROUP; g++) {
                int8_t q[GROUP];
                quantize_group(x + g * GROUP, k - g * GROUP < GROUP ? k - g * GROUP : GROUP, &scales[g * PANEL + r], q);
                for (int64_t j = 0; j < GROUP; j++) values[((g * GROUP + j) / 4 * PANEL + r) * 4 + j % 4] = q[j];
            }
        }
    }
    return KESTREL_OK;
}

int32_t kestrel_unpack_row(const kestrel_weight *w, int64_t r, float *dst)
{
    if (!w || !dst || !w->data || !shape_ok(w->type, w->n, w->k) || r < 0 || r >= w->n) return KESTREL_E_ARGUMENT;
    const uint8_t *panel = (const uint8_t *)w->data + r / PANEL * panel_bytes(w->type, w->k);
    const int64_t lane = r % PANEL;
    if (w->type == KESTREL_F32) {
        for (int64_t j = 0; j < w->k; j++) dst[j] = ((const float *)panel)[j * PANEL + lane];
        return KESTREL_OK;
    }
    const uint16_t *scales = (const uint16_t *)panel;
    const int8_t *values = (const int8_t *)panel + panel_scale_bytes(w->k);
    for (int64_t j = 0; j < w->k; j++)
        dst[j] = (float)values[(j / 4 * PANEL + lane) * 4 + j % 4] * kestrel_f16_to_f32(scales[j / GROUP * PANEL + lane]);
    return KESTREL_OK;
}
