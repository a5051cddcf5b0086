/* The cache: position -> slot is known here alone. SPDX-License-Identifier: Apache-2.0
 *
 * A span's K and V lie together, those of a layer's heads one after the other, all layers of a span before the next span: what a pass reads is
 * one stream a span, and the memory in use grows with the positions, in huge pages too (decode at depth 1024 in 0.97 of the time on 2 threads; the span kernel alone, from memory: 0.62).
 * K lies in blocks of KEY_BLOCK keys, transposed ([d][keys]: keys are the lanes of q . k); V in rows ([d]: d is the lane of p . V).
 * int8: each position of each head has one f32 scale for K and one for V; those of a span stand behind the span's values, so that a
 * span is one stream and a position's scales never depend on what comes later. f32, not f16: 1.06 bytes an element instead of 1.03 (d 64).
 * SmolLM2-135M, mean KL to the float model: int8 weights with f16 here 0.0044, with int8 here 0.0056; f32 weights with int8 here 0.0013.
 * Rewinding moves a counter; rows past the length are dead and never reach a result.
 */
#define _DEFAULT_SOURCE /* madvise */
#include "kv.h"
#include "half.h"
#include "model.h"
#include <stdlib.h>
#include <sys/mman.h>

enum { MOST_D = 512, HUGE_PAGE = 2 << 20 };

static int64_t scale_bytes(int32_t type) { return type == KESTREL_INT8 ? 4 : 0; }
/* K or V of one position of one head. */
static int64_t row_bytes(int32_t type, int64_t d) { return d * element_bytes(type) + scale_bytes(type); }

/* K (part 0) or V (part 1) of span `span`. */
static uint8_t *span_data(const kestrel_kv *kv, int32_t layer, int32_t head, int part, int64_t span)
{
    const int64_t at = ((span * kv->n_layers + layer) * kv->n_kv_heads + head) * 2 + part;
    return kv->data + at * SPAN * row_bytes(kv->type, kv->head_dim);
}

/* Where element c of slot `key` of a span lies. */
static int64_t k_index(int64_t d, int64_t key, int64_t c) { return (key / KEY_BLOCK * d + c) * KEY_BLOCK + key % KEY_BLOCK; }
static int64_t v_index(int64_t d, int64_t key, int64_t c) { return key * d + c; }

int64_t kestrel_kv_bytes(const kestrel_config *c, int32_t capacity, int32_t max_rows, int32_t type)
{
    if (!c || capacity < 1 || capacity > 1 << 24 || max_rows < 1 || (type != KESTREL_F32 && type != KESTREL_F16 && type != KESTREL_INT8)) return -1;
    return 2 * (int64_t)c->n_layers * c->n_kv_heads * round_up(capacity, SPAN) * row_bytes(type, c->head_dim);
}

int32_t kestrel_kv_create(const kestrel_model *model, int32_t capacity, int32_t max_rows, int32_t type, kestrel_kv **out)
{
    if (!model || !out) return KESTREL_E_ARGUMENT;
    const kestrel_config *c = &model->config;
    const int64_t bytes = kestrel_kv_bytes(c, capacity, max_rows, type);
    if (bytes < 0) return KESTREL_E_ARGUMENT;
    kestrel_kv *kv = malloc(sizeof *kv);
    const int64_t alignment = bytes < HUGE_PAGE ? 64 : HUGE_PAGE, size = round_up(bytes, alignment);
    uint8_t *data = aligned_alloc((size_t)alignment, (size_t)size); /* large: fresh pages, touched only as positions are used */
    if (!kv || !data) {
        free(kv);
        free(data);
        return KESTREL_E_MEMORY;
    }
#ifdef MADV_HUGEPAGE
    if (size >= HUGE_PAGE) madvise(data, (size_t)size, MADV_HUGEPAGE); /* advice: what becomes of it is no matter */
#endif
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
    *k = span_data(kv, layer, head, 0, span);
    *v = span_data(kv, layer, head, 1, span);
}

/* A finite value too large for f16 becomes its largest one; Inf becomes NaN, so that it is reported and not made a number. */
static void to_half(const float *x, int64_t d, bool finite, uint16_t *half)
{
    if (finite) kestrel_f32_to_f16_finite(x, d, half);
    else
        for (int64_t c = 0; c < d; c++) half[c] = (kestrel_f32_bits(x[c]) & 0x7fffffffu) == 0x7f800000u ? 0x7e00 : kestrel_f32_to_f16(x[c]);
}

/* max |x|, as bits: NaN > Inf > finite. */
static uint32_t largest(const float *x, int64_t d)
{
    uint32_t bits = 0;
    for (int64_t c = 0; c < d; c++) {
        const uint32_t v = kestrel_f32_bits(x[c]) & 0x7fffffffu;
        bits = v > bits ? v : bits;
    }
    return bits;
}

/* One row as quantize_rows does a group; returns its scale, NaN when an element is not finite. */
static float quantize_row(const float *x, int64_t d, int8_t *q)
{
    const uint32_t bits = largest(x, d);
    const float a = kestrel_bits_f32(bits);
    const bool finite = bits < 0x7f800000u;
    if (!finite || a < 1e-30f) {
        for (int64_t c = 0; c < d; c++) q[c] = 0;
        return finite ? 0.0f : kestrel_bits_f32(0x7fc00000u);
    }
    const float r = 127.0f / a;
    for (int64_t c = 0; c < d; c++) q[c] = (int8_t)(kestrel_f32_bits(x[c] * r + ROUND_MAGIC) - ROUND_BITS);
    return a / 127.0f;
}

static void store_int8(uint8_t *keys, uint8_t *values, int64_t d, int64_t key, const float *k, const float *v)
{
    int8_t q[MOST_D];
    const float scale_k = quantize_row(k, d, q), scale_v = quantize_row(v, d, (int8_t *)values + v_index(d, key, 0));
    for (int64_t c = 0; c < d; c++) keys[k_index(d, key, c)] = (uint8_t)q[c];
    memcpy(keys + (SPAN * d + key * 4), &scale_k, 4);
    memcpy(values + (SPAN * d + key * 4), &scale_v, 4);
}

void kestrel_kv_store(kestrel_kv *kv, int32_t layer, int32_t head, int32_t position, const float *k, const float *v)
{
    uint8_t *keys = span_data(kv, layer, head, 0, position / SPAN), *values = span_data(kv, layer, head, 1, position / SPAN);
    const int64_t d = kv->head_dim, key = position % SPAN, k0 = k_index(d, key, 0), v0 = v_index(d, key, 0);
    float not_finite[MOST_D];
    const bool finite = largest(k, d) < 0x7f800000u;
    if (!finite) { /* a score of NaN or -Inf gives p = 0: only V can report such a key */
        for (int64_t c = 0; c < d; c++) not_finite[c] = NAN;
        v = not_finite;
    }
    if (kv->type == KESTREL_INT8) store_int8(keys, values, d, key, k, v);
    else if (kv->type == KESTREL_F32) {
        for (int64_t c = 0; c < d; c++) ((float *)keys)[k0 + c * KEY_BLOCK] = k[c];
        memcpy((float *)values + v0, v, (size_t)d * sizeof *v);
    } else {
        uint16_t half[MOST_D];
        to_half(k, d, finite, half);
        for (int64_t c = 0; c < d; c++) ((uint16_t *)keys)[k0 + c * KEY_BLOCK] = half[c];
        to_half(v, d, largest(v, d) < 0x7f800000u, (uint16_t *)values + v0);
    }
}

int64_t kestrel_kv_export_bytes(const kestrel_kv *kv, int32_t begin, int32_t end)
{
    if (!kv || begin < 0 || end < begin || end > kv->length) return -1;
    return 2 * (int64_t)(end - begin) * kv->n_layers * kv->n_kv_heads * row_bytes(kv->type, kv->head_dim);
}

static uint8_t *copy(uint8_t *at, uint8_t *flat, int64_t bytes, bool to_flat)
{
    memcpy(to_flat ? flat : at, to_flat ? at : flat, (size_t)bytes);
    return flat + bytes;
}

/* Copies between the cache and the canonical order [layer][position][K, V][kv head][d], one element at a time; int8: d values, then the scale. */
static void transfer(const kestrel_kv *kv, int32_t begin, int32_t end, uint8_t *flat, bool to_flat)
{
    const int64_t d = kv->head_dim, bytes = element_bytes(kv->type);
    for (int32_t layer = 0; layer < kv->n_layers; layer++)
        for (int32_t position = begin; position < end; position++)
            for (int part = 0; part < 2; part++)
                for (int32_t head = 0; head < kv->n_kv_heads; head++) {
                    uint8_t *at = span_data(kv, layer, head, part, position / SPAN);
                    const int64_t key = position % SPAN;
                    for (int64_t c = 0; c < d; c++) flat = copy(at + (part ? v_index(d, key, c) : k_index(d, key, c)) * bytes, flat, bytes, to_flat);
                    if (kv->type == KESTREL_INT8) flat = copy(at + SPAN * d + key * 4, flat, 4, to_flat);
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
