/* The cache's inside, for kv.c and forward.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_KV_H
#define KESTREL_KV_H

#include "kernels.h"

struct kestrel_kv {
    int32_t type, n_layers, n_kv_heads, head_dim;
    int32_t capacity, max_rows, length;
    int64_t slots; /* capacity rounded up to whole spans */
    uint8_t *data; /* [span][layer][kv head][K, V]: K blocks or V rows of SPAN keys, int8: then their scales */
};

/* Where span `span` of a layer's head begins: its K blocks and V rows. */
void kestrel_kv_span(const kestrel_kv *kv, int32_t layer, int32_t head, int32_t span, const void **k, const void **v);
/* Rounds k[d] and v[d] to the cache's type and stores them at `position`. */
void kestrel_kv_store(kestrel_kv *kv, int32_t layer, int32_t head, int32_t position, const float *k, const float *v);

#endif
