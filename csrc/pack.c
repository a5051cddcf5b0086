/* pack: rows -> panels and back, one layout for all variants (kernels.h describes it). SPDX-License-Identifier: Apache-2.0 */
#include "half.h"
#include "kernels.h"
#include "round_int4.h"
#include <stdlib.h>

static bool shape_ok(int32_t type, int64_t n, int64_t k)
{
    return (type == KESTREL_F32 || type == KESTREL_INT8 || type == KESTREL_INT4) && n >= 1 && k >= 1 && n <= (int64_t)1 << 31 && k <= (int64_t)1 << 24;
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

static void pack_f32(const float *src, int64_t rows, int64_t k, float *panel)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < k; j++) panel[j * PANEL + r] = src[r * k + j];
}

static void pack_int8(const float *src, int64_t rows, int64_t k, uint8_t *panel)
{
    uint16_t *scales = (uint16_t *)panel;
    int8_t *values = (int8_t *)panel + panel_scale_bytes(k);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < padded_k(k) / GROUP; g++) {
            int8_t q[GROUP];
            quantize_group(src + r * k + g * GROUP, k - g * GROUP < GROUP ? k - g * GROUP : GROUP, &scales[g * PANEL + r], q);
            for (int64_t j = 0; j < GROUP; j++) values[((g * GROUP + j) / 4 * PANEL + r) * 4 + j % 4] = q[j];
        }
}

/* columns: float [kp][PANEL] and int8 [kp][PANEL] of scratch. */
static void pack_int4(const float *src, int64_t rows, int64_t k, const float *importance, const float *feedback, float *columns, uint8_t *panel)
{
    const int64_t kp = padded_k(k);
    int8_t *q = (int8_t *)(columns + kp * PANEL), *values = (int8_t *)panel + panel_scale_bytes(k);
    memset(columns, 0, (size_t)(kp * PANEL) * sizeof *columns);
    pack_f32(src, rows, k, columns);
    kestrel_round_int4(columns, kp, importance, feedback, (uint16_t *)panel, q);
    for (int64_t j = 0; j < kp; j++)
        for (int64_t r = 0; r < PANEL; r++) {
            const int v = q[j * PANEL + r];
            values[(j / 8 * PANEL + r) * 4 + j % 4] |= (int8_t)(j % 8 < 4 ? v & 15 : v * 16);
        }
}

int32_t kestrel_pack(int32_t type, int64_t n, int64_t k, int64_t row0, int64_t rows, const float *src, const float *importance, const float *feedback, void *dst)
{
    if (!shape_ok(type, n, k) || !src || !dst || row0 < 0 || rows < 1 || row0 % PANEL || row0 > n - rows) return KESTREL_E_ARGUMENT;
    if (rows % PANEL && row0 + rows != n) return KESTREL_E_ARGUMENT;
    const int64_t bytes = panel_bytes(type, k);
    float *columns = type == KESTREL_INT4 ? malloc((size_t)(padded_k(k) * PANEL) * (sizeof *columns + 1)) : NULL;
    if (type == KESTREL_INT4 && !columns) return KESTREL_E_MEMORY;
    for (int64_t r = 0; r < rows; r += PANEL, src += PANEL * k) {
        uint8_t *panel = (uint8_t *)dst + (row0 + r) / PANEL * bytes;
        const int64_t here = rows - r < PANEL ? rows - r : PANEL;
        memset(panel, 0, (size_t)bytes);
        if (type == KESTREL_F32) pack_f32(src, here, k, (float *)panel);
        else if (type == KESTREL_INT8) pack_int8(src, here, k, panel);
        else pack_int4(src, here, k, importance, feedback, columns, panel);
    }
    free(columns);
    return KESTREL_OK;
}

int32_t kestrel_unpack_row(const kestrel_weight *w, int64_t r, float *dst)
{
    if (!w || !dst || !w->data || !shape_ok(w->type, w->n, w->k) || r < 0 || r >= w->n) return KESTREL_E_ARGUMENT;
    const uint8_t *panel = (const uint8_t *)w->data + r / PANEL * panel_bytes(w->type, w->k);
    const int64_t lane = r % PANEL;
    const uint16_t *scales = (const uint16_t *)panel;
    const int8_t *values = (const int8_t *)panel + panel_scale_bytes(w->k);
    for (int64_t j = 0; j < w->k; j++) {
        if (w->type == KESTREL_F32) {
            dst[j] = ((const float *)panel)[j * PANEL + lane];
            continue;
        }
        const int64_t depth = w->type == KESTREL_INT8 ? 4 : 8; /* k that share a block of 8 rows x 4 bytes */
        int value = values[(j / depth * PANEL + lane) * 4 + j % 4];
        if (w->type == KESTREL_INT4) value = j % 8 < 4 ? ((value & 15) ^ 8) - 8 : value >> 4;
        dst[j] = (float)value * kestrel_f16_to_f32(scales[j / GROUP * PANEL + lane]);
    }
    return KESTREL_OK;
}
