/* self-test: each op of the menu on inputs made from a counter, one number for all it gives back; the same on every machine and for every
 * instruction set. What checkasm compares with portable on a developer's machine, this compares with a recorded run on any. SPDX-License-Identifier: Apache-2.0 */
#include "half.h"
#include "kernels.h"
#include <stdlib.h>
#include <string.h>

enum { ARENA = 1 << 20, K = 200, N = 3 * PANEL, ROWS = 8, D = 64, GROUP_HEADS = 3, SPAN_ROWS = 5, QUERIES = GROUP_HEADS * SPAN_ROWS };

typedef struct test {
    uint8_t *arena; /* 64-byte aligned */
    int64_t used;
    uint64_t counter, digest;
    kestrel_kernels kernels;
} test;

/* [-1, 1), multiples of 2^-23: SplitMix64 (Steele et al. 2014). */
static float next(test *t)
{
    uint64_t x = t->counter += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (float)(int32_t)((x ^ x >> 31) >> 40) * 0x1p-23f - 1.0f;
}

static void *take(test *t, int64_t bytes)
{
    void *p = t->arena + t->used;
    t->used += round_up(bytes, 64);
    return memset(p, 0, (size_t)bytes);
}

static float *floats(test *t, int64_t count, float size)
{
    float *p = take(t, count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = next(t) * size;
    return p;
}

/* FNV-1a, 64 bits. */
static void add(test *t, const void *data, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++) t->digest = (t->digest ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
}

/* Rows as activations come: ordinary ones, one of the extremes alone, one of zeros, one with a large element in each group. */
static float *activations(test *t)
{
    float *x = floats(t, ROWS * K, 3.0f);
    for (int64_t k = 0; k < K; k++) {
        x[1 * K + k] = k % 3 ? 127.0f : -127.0f;
        x[2 * K + k] = 0.0f;
        if (k % GROUP == 5) x[3 * K + k] *= 1000.0f;
    }
    return x;
}

static kestrel_lhs quantized(test *t, const float *x, int64_t m)
{
    kestrel_lhs lhs = {.kp = padded_k(K)};
    lhs.values = take(t, ROWS * lhs.kp);
    lhs.scales = take(t, ROWS * lhs.kp / GROUP * 4);
    lhs.sums = take(t, ROWS * lhs.kp / GROUP * 4);
    t->kernels.quantize_rows(x, K, K, 0, m, &lhs);
    return lhs;
}

/* Values and scales as sets: their places belong to the variant. */
static void quantize_rows(test *t)
{
    const kestrel_lhs lhs = quantized(t, activations(t), ROWS);
    uint64_t counts[256] = {0}, scales = 0;
    for (int64_t i = 0; i < ROWS * lhs.kp; i++) counts[(uint8_t)lhs.values[i]]++;
    for (int64_t i = 0; i < ROWS * lhs.kp / GROUP; i++) {
        uint32_t bits;
        memcpy(&bits, &lhs.scales[i], 4);
        scales += bits * (uint64_t)0x9e3779b97f4a7c15u ^ bits;
    }
    add(t, counts, sizeof counts);
    add(t, &scales, sizeof scales);
}

static int matmul(test *t, int32_t type)
{
    float *w = floats(t, N * K, 0.1f);
    for (int64_t k = 0; k < K; k++) w[2 * K + k] = k % 2 ? 0.1f : -0.1f;
    void *panels = take(t, kestrel_packed_bytes(type, N, K));
    const int32_t status = kestrel_pack(type, N, K, 0, N, w, NULL, NULL, panels);
    if (status) return status;
    const float *x = activations(t);
    const int64_t start = t->used;
    for (int64_t m = 1; m <= ROWS; m++, t->used = start) {
        float *dst = take(t, ROWS * N * 4);
        if (type == KESTREL_F32) t->kernels.matmul_f32(panels, N / PANEL, K, x, K, m, dst, N);
        else {
            const kestrel_lhs lhs = quantized(t, x, m);
            (type == KESTREL_INT4 ? t->kernels.matmul_int4 : t->kernels.matmul_int8)(panels, N / PANEL, &lhs, m, dst, N);
        }
        add(t, dst, m * N * 4);
    }
    return KESTREL_OK;
}

static void norm(test *t)
{
    float *x = floats(t, K, 5.0f), *dst = take(t, K * 4);
    const float *delta = floats(t, K, 0.5f), *gain = floats(t, K, 2.0f);
    for (int32_t n = K; n > K - 17; n--) { /* every tail */
        t->kernels.norm(x, n % 2 ? delta : NULL, gain, n, 1e-5f, dst);
        add(t, dst, n * 4);
    }
    add(t, x, K * 4);
}

static void rope(test *t)
{
    float *x = floats(t, GROUP_HEADS * D, 4.0f);
    const float *cosine = floats(t, D / 2, 1.0f), *sine = floats(t, D / 2, 1.0f);
    t->kernels.rope(x, GROUP_HEADS, D, cosine, sine);
    add(t, x, GROUP_HEADS * D * 4);
}

static void multiply(test *t, kestrel_silu_multiply_fn *fn)
{
    float *gate = floats(t, K + 3, 30.0f), *dst = take(t, (K + 3) * 4);
    const float *up = floats(t, K + 3, 3.0f);
    fn(gate, up, K + 3, dst);
    add(t, dst, (K + 3) * 4);
}

/* A span's keys or values in the cache's type; int8's scales behind them. */
static void *cached(test *t, int32_t type)
{
    void *p = take(t, SPAN * D * 4 + SPAN * 4);
    for (int64_t i = 0; i < SPAN * D; i++) {
        const float x = next(t);
        if (type == KESTREL_F32) ((float *)p)[i] = x;
        else if (type == KESTREL_F16) ((uint16_t *)p)[i] = kestrel_f32_to_f16(x);
        else ((int8_t *)p)[i] = (int8_t)(x * 127.0f);
    }
    if (type == KESTREL_INT8)
        for (int64_t i = 0; i < SPAN; i++) ((float *)((int8_t *)p + SPAN * D))[i] = (next(t) + 1.0f) / 127.0f;
    return p;
}

static void attention_span(test *t)
{
    static const int32_t types[] = {KESTREL_F32, KESTREL_F16, KESTREL_INT8};
    for (int i = 0; i < 3; i++, t->used = 0) {
        const int32_t lo[SPAN_ROWS] = {0, 0, 3, 40, 0}, hi[SPAN_ROWS] = {200, 37, 140, 255, 128};
        float *state = take(t, QUERIES * (STATE_HEAD + D) * 4);
        for (int64_t query = 0; query < QUERIES; query++) state[query * (STATE_HEAD + D)] = -__builtin_inff();
        kestrel_span span = {.type = types[i], .d = D, .queries = QUERIES, .q_stride = GROUP_HEADS * D, .group = GROUP_HEADS, .lo = lo, .hi = hi, .state = state};
        span.q = floats(t, QUERIES * D, 2.0f);
        span.work = take(t, QUERIES * SPAN * 4);
        for (span.begin = 0; span.begin < 2 * SPAN; span.begin += SPAN) {
            span.k = cached(t, types[i]);
            span.v = cached(t, types[i]);
            t->kernels.attention_span(&span);
        }
        for (int64_t query = 0; query < QUERIES; query++) {
            const float *s = state + query * (STATE_HEAD + D);
            add(t, s, 4);
            add(t, s + 8, (8 + D) * 4);
        }
    }
}

static void merge_or_finish(test *t, bool merge)
{
    for (int i = 0; i < 4; i++) {
        float *a = floats(t, STATE_HEAD + D, 2.0f), *b = floats(t, STATE_HEAD + D, 2.0f), *out = take(t, D * 4);
        for (int j = 8; j < STATE_HEAD; j++) {
            a[j] += 3.0f;
            b[j] += 3.0f;
        }
        if (i == 1) a[0] = b[0];
        if (merge) t->kernels.attention_merge(a, b, D);
        else t->kernels.attention_finish(a, D, out);
        add(t, merge ? a : out, merge ? 4 : D * 4);
        if (merge) add(t, a + 8, (8 + D) * 4);
    }
}

int32_t kestrel_self_test(const char *isa, const char *op, uint64_t *digest)
{
    if (!op || !digest) return KESTREL_E_ARGUMENT;
    test t = {.digest = 0xcbf29ce484222325u};
    int32_t status = kestrel_kernels_select(isa, &t.kernels);
    if (status) return status;
    t.arena = aligned_alloc(64, ARENA);
    if (!t.arena) return KESTREL_E_MEMORY;
    if (!strcmp(op, "quantize_rows")) quantize_rows(&t);
    else if (!strcmp(op, "matmul_int8")) status = matmul(&t, KESTREL_INT8);
    else if (!strcmp(op, "matmul_int4")) status = matmul(&t, KESTREL_INT4);
    else if (!strcmp(op, "matmul_f32")) status = matmul(&t, KESTREL_F32);
    else if (!strcmp(op, "norm")) norm(&t);
    else if (!strcmp(op, "rope")) rope(&t);
    else if (!strcmp(op, "silu_multiply")) multiply(&t, t.kernels.silu_multiply);
    else if (!strcmp(op, "gelu_multiply")) multiply(&t, t.kernels.gelu_multiply);
    else if (!strcmp(op, "attention_span")) attention_span(&t);
    else if (!strcmp(op, "attention_merge")) merge_or_finish(&t, true);
    else if (!strcmp(op, "attention_finish")) merge_or_finish(&t, false);
    else status = KESTREL_E_ARGUMENT;
    free(t.arena);
    if (!status) *digest = t.digest;
    return status;
}
