/* The cache: position -> slot is known here alone. SPDX-License-Identifier: Apache-2.0
 *
 * K lies in blocks of KEY_BLOCK keys, transposed ([d][keys]: keys are the lanes of q . k); V in rows ([d]: d is the lane of p . V).
 * Rewinding moves a counter; rows past the length are dead and never reach a result.
 */
#include "kv.h"
#include "half.h"
#include "model.h"
#include <stdlib.h>

static int64_t element_bytes(int32_t type) { return type == KESTREL_F32 ? 4 : 2; }

static int64_t head_elements(const kestrel_kv *kv) { return 2 * kv->slots * kv->head_dim; }

static uint8_t *head_data(const kestrel_kv *kv, int32_t layer, int32_t head)
{
    return kv->data + ((int64_t)layer * kv->n_kv_heads + head) * head_elements(kv) * element_bytes(kv->type);
}

static int64_t k_index(const kestrel_kv *kv, int64_t slot, int64_t c)
{
    return (slot / KEY_BLOCK * kv->head_dim + c) * KEY_BLOCK + slot % KEY_BLOCK;
}

static int64_t v_index(const kestrel_kv *kv, int64_t slot, int64_t c) { return kv->slots * kv->head_dim + slot * kv->head_dim + c; }

int64_t kestrel_kv_bytes(const kestrel_config *c, int32_t capacity, int32_t max_rows, int32_t type)
{
    if (!c || capacity < 1 || capacity > 1 << 24 || max_rows < 1 || (type != KESTREL_F32 && type != KESTREL_F16)) return -1;
    return 2 * (int64_t)c->n_layers * c->n_kv_heads * c->head_dim * round_up(capacity, SPAN) * element_bytes(type);
}

int32_t kestrel_kv_create(const kestrel_model *model, int32_t capacity, int32_t max_rows, int32_t type, kestrel_kv **out)
{
    if (!model || !out) return KESTREL_E_ARGUMENT;
    const kestrel_config *c = &model->config;
    const int64_t bytes = kestrel_kv_bytes(c, capacity, max_rows, type);
    if (bytes < 0) return KESTREL_E_ARGUMENT;
    kestrel_kv *kv = malloc(sizeof *kv);
    uint8_t *data = aligned_alloc(64, (size_t)round_up(bytes, 64)); /* large: fresh pages, touched only as positions are used */
    if (!kv || !data) {
        free(kv);
        free(data);
        return KESTREL_E_MEMORY;
    }
    *kv = (kestrel_kv){.type = type, .n_layers = c->n_layers, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .capacity = capacity,
                       .max_rows = max_rows, .slots = round_up(capacity, SPAN), .data = data};
    *out = kv;
    return KESTREL_OK;
}

void kestrel_kv_free(kestrel_kv *kv)
{
    if (!kv) return;
    free(kv->data);
    free(kv);
}

int32_t kestrel_kv_length(const kestrel_kv *kv) { return kv->length; }
int32_t kestrel_kv_capacity(const kestrel_kv *kv) { return kv->capacity; }

int32_t kestrel_kv_rewind(kestrel_kv *kv, int32_t length)
{
    if (!kv || length < 0 || length > kv->length) return KESTREL_E_REWIND;
    kv->length = length;
    return KESTREL_OK;
}

void kestrel_kv_span(const kestrel_kv *kv, int32_t layer, int32_t head, int32_t span, const void **k, const void **v)
{
    const uint8_t *base = head_data(kv, layer, head);
    *k = base + k_index(kv, (int64_t)span * SPAN, 0) * element_bytes(kv->type);
    *v = base + v_index(kv, (int64_t)span * SPAN, 0) * element_bytes(kv->type);
}

/* A finite value too large for f16 becomes its largest one; Inf becomes NaN, so that it is reported and not made a number. */
static inline uint16_t cached(float x) { return (kestrel_f32_bits(x) & 0x7fffffffu) == 0x7f800000u ? 0x7e00 : kestrel_f32_to_f16(x); }

void kestrel_kv_store(kestrel_kv *kv, int32_t layer, int32_t head, int32_t position, const float *k, const float *v)
{
    uint8_t *base = head_data(kv, layer, head);
    const int64_t d = kv->head_dim, k0 = k_index(kv, position, 0), v0 = v_index(kv, position, 0);
    if (kv->type == KESTREL_F32) {
        float *at = (float *)base;
        for (int64_t c = 0; c < d; c++) at[k0 + c * KEY_BLOCK] = k[c];
        memcpy(at + v0, v, (size_t)d * sizeof *v);
        return;
    }
    uint16_t *at = (uint16_t *)base;
    for (int64_t c = 0; c < d; c++) at[k0 + c * KEY_BLOCK] = cached(k[c]);
    for (int64_t c = 0; c < d; c++) at[v0 + c] = cached(v[c]);
}

int64_t kestrel_kv_export_bytes(const kestrel_kv *kv, int32_t begin, int32_t end)
{
    if (!kv || begin < 0 || end < begin || end > kv->length) return -1;
    return 2 * (int64_t)(end - begin) * kv->n_layers * kv->n_kv_heads * kv->head_dim * element_bytes(kv->type);
}

/* Copies between the cache and the canonical order [layer][position][K, V][kv head][d], one element at a time. */
static void transfer(const kestrel_kv *kv, int32_t begin, int32_t end, uint8_t *flat, bool to_flat)
{
    const int64_t d = kv->head_dim, bytes = element_bytes(kv->type);
    for (int32_t layer = 0; layer < kv->n_layers; layer++)
        for (int32_t position = begin; position < end; position++)
            for (int part = 0; part < 2; part++)
                for (int32_t head = 0; head < kv->n_kv_heads; head++) {
                    uint8_t *base = head_data(kv, layer, head);
                    for (int64_t c = 0; c < d; c++, flat += bytes) {
                        uint8_t *at = base + (part ? v_index(kv, position, c) : k_index(kv, position, c)) * bytes;
                        if (to_flat)
                            memcpy(flat, at, (size_t)bytes);
                        else
                            memcpy(at, flat, (size_t)bytes);
                    }
                }
}

int32_t kestrel_kv_export(const kestrel_kv *kv, int32_t begin, int32_t end, void *dst)
{
    if (kestrel_kv_export_bytes(kv, begin, end) < 0 || !dst) return KESTREL_E_ARGUMENT;
    transfer(kv, begin, end, dst, true);
    return KESTREL_OK;
}

int32_t kestrel_kv_import(kestrel_kv *kv, int32_t count, const void *src)
{
    if (!kv || !src || count < 0) return KESTREL_E_ARGUMENT;
    if (count > kv->capacity - kv->length) return KESTREL_E_CAPACITY;
    transfer(kv, kv->length, kv->length + count, (uint8_t *)src, false);
    kv->length += count;
    return KESTREL_OK;
}
