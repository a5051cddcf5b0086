/* quantize_rows against portable. SPDX-License-Identifier: Apache-2.0 */
#include "checkasm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 17 };
typedef enum kind { RANDOM, WIDE, HALVES, NEAR_HALVES, ZEROS, TINY, NOT_FINITE, KINDS } kind;
static const char *const kind_name[] = {"random", "all exponents", "ties", "beside ties", "signed zeros", "around 1e-30", "NaN and Inf"};

static float value(kind kind, int64_t i, int64_t j)
{
    const float r = random_float();
    if (kind == WIDE) { const float x = kestrel_bits_f32((uint32_t)random_bits()); return isfinite(x) ? x : r; }
    if (kind == HALVES) return j % GROUP == 0 ? 127.0f : (float)random_below(254) - 126.5f; /* scale 1: every value a tie */
    if (kind == NEAR_HALVES) { /* a second rounding of r moves such a value over the tie */
        static float largest;
        if (j % GROUP == 0) return largest = r + 2.5f;
        const float tie = ((float)random_below(254) - 126.5f) * largest / 127.0f;
        return kestrel_bits_f32(kestrel_f32_bits(tie) + (uint32_t)random_below(5) - 2);
    }
    if (kind == ZEROS) return (i + j / GROUP) % 2 ? (random_below(2) ? 0.0f : -0.0f) : r;
    if (kind == TINY) return r * (random_below(2) ? 1e-30f : 1.1e-30f);
    if (kind == NOT_FINITE && (i + j / GROUP) % 4 && random_below(8) == 0)
        return (i + j / GROUP) % 4 == 1 ? NAN : (i + j / GROUP) % 4 == 2 ? -INFINITY : random_below(2) ? INFINITY : -NAN;
    return r;
}

/* scale = absmax / 127, |x - q scale| <= scale / 2 with the float rounding of r and of the product on top. */
static void statement(const float *x, int64_t k, const kestrel_lhs *l)
{
    for (int64_t i = 0; i < M; i++)
        for (int64_t g = 0; g < l->kp / GROUP; g++) {
            double most = 0;
            for (int64_t j = g * GROUP; j < (g + 1) * GROUP && j < k; j++) most = fmax(most, fabs(x[i * k + j]));
            const double scale = most < 1e-30f ? 0 : most / 127;
            check_near("scale", i * l->kp / GROUP + g, l->scales[i * (l->kp / GROUP) + g], scale, scale * 0x1p-24 + 0x1p-150);
            for (int64_t j = g * GROUP; j < (g + 1) * GROUP; j++) {
                const double q = l->values[i * l->kp + j];
                check_near("value", i * l->kp + j, q, scale > 0 && j < k ? x[i * k + j] / scale : 0, 0.5 + 127 * 0x1p-22);
            }
        }
}

/* Rows [0, rows) of a variant's own layout as portable's: neon_i8mm keeps them in pairs, [pair][kp / 8][2][8] and [pair][groups][2]. */
static kestrel_lhs plain_rows(const kestrel_variant *v, const kestrel_lhs *l, int64_t rows)
{
    const int64_t kp = l->kp, groups = kp / GROUP;
    const bool pairs = !strcmp(v->name, "neon_i8mm");
    kestrel_lhs p = {malloc((size_t)(rows * kp)), malloc((size_t)(rows * groups) * 4), NULL, kp};
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < kp; j++) p.values[i * kp + j] = l->values[pairs ? i / 2 * 2 * kp + j / 8 * 16 + i % 2 * 8 + j % 8 : i * kp + j];
        for (int64_t g = 0; g < groups; g++) p.scales[i * groups + g] = l->scales[pairs ? i / 2 * 2 * groups + 2 * g + i % 2 : i * groups + g];
    }
    return p;
}

static void check_k(const kestrel_variant *v, int64_t k, kind kind)
{
    kestrel_quantize_rows_fn *quantize = (kestrel_quantize_rows_fn *)v->function;
    const int64_t kp = padded_k(k), groups = kp / GROUP;
    float *x = malloc((size_t)(M * k) * 4);
    for (int64_t i = 0; i < M * k; i++) x[i] = value(kind, i / k, i % k);
    kestrel_lhs want = {malloc((size_t)(24 * kp)), malloc((size_t)(24 * groups) * 4), NULL, kp};
    kestrel_quantize_rows_portable(x, k, k, 0, M, &want);
    if (is_portable(v) && kind != NOT_FINITE) {
        check_case("float64 statement, %s, k %lld", kind_name[kind], (long long)k);
        statement(x, k, &want);
    }
    for (int place = 0; place < PLACES; place++)
        for (int64_t m = 1; m <= M; m += m < 5 ? 1 : 6) {
            const int64_t row0 = m == M ? 0 : random_below(M - m + 1), stride = k + (place == AT_HEAD ? 5 : 0), rows = row0 + m;
            check_case("%s, k %lld, rows %lld..%lld, stride +%lld", kind_name[kind], (long long)k, (long long)row0, (long long)rows - 1, (long long)(stride - k));
            float *src = buffer_new((size_t)((rows - 1) * stride + k) * 4, 4, place, 0xff); /* NaN between the rows */
            for (int64_t i = 0; i < rows; i++) memcpy(src + i * stride, x + i * k, (size_t)k * 4);
            buffer_seal(src);
            const int64_t room = strcmp(v->name, "neon_i8mm") ? rows : round_up(rows, 2);
            kestrel_lhs l = {buffer_new((size_t)(room * kp), 32, place, 0x5a), buffer_new((size_t)(room * groups) * 4, 4, place, 0x5a),
                             buffer_new((size_t)(room * groups) * 4, 4, place, 0x5a), kp};
            char *untouched = malloc((size_t)(row0 * kp + 1));
            memset(untouched, 0x5a, (size_t)(row0 * kp));
            for (int twice = 0; twice < 2; twice++) { /* the second time over its own output */
                quantize(src, stride, k, row0, m, &l);
                const kestrel_lhs got = plain_rows(v, &l, rows);
                check_same("values before row0", got.values, untouched, (size_t)(row0 * kp), 1);
                check_same("scales before row0", got.scales, untouched, (size_t)(row0 * groups), 4);
                check_same("values", got.values + row0 * kp, want.values + row0 * kp, (size_t)(m * kp), 1);
                check_same_floats("scales", got.scales + row0 * groups, want.scales + row0 * groups, (size_t)(m * groups));
                for (int64_t i = 0; i < rows * groups && !strncmp(v->name, "avx", 3); i++) {
                    int32_t sum = i < row0 * groups ? 0x5a5a5a5a : 0;
                    for (int64_t j = 0; j < GROUP && i >= row0 * groups; j++) sum -= 128 * want.values[i / groups * kp + i % groups * GROUP + j];
                    if (l.sums[i] != sum) check_fail("sums element %lld: got %d, expected %d", (long long)i, l.sums[i], sum);
                }
                free(got.values); free(got.scales);
            }
            free(untouched);
            check_end_case();
        }
    free(x); free(want.values); free(want.scales);
}

void check_quantize_rows(const kestrel_variant *v)
{
    const int64_t k[] = {1, 2, 7, 8, 9, 15, 16, 17, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP - 1, 2 * GROUP, 3 * GROUP + 13, 576, 1536};
    for (kind kind = RANDOM; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof k / sizeof *k; i++) check_k(v, k[i], kind);
}

typedef struct load { kestrel_quantize_rows_fn *f; const float *x; int64_t k, m; kestrel_lhs lhs; } load;
static void body(void *context, int thread, int threads)
{
    load *l = context;
    (void)threads;
    if (thread == 0) l->f(l->x, l->k, l->k, 0, l->m, &l->lhs);
}

void bench_quantize_rows(const kestrel_variant *v)
{
    const int64_t shapes[][2] = {{1, 576}, {5, 576}, {5, 1536}, {64, 1536}};
    for (int i = 0; i < 4; i++) {
        const int64_t m = shapes[i][0], k = shapes[i][1];
        float *x = bench_memory((size_t)(m * k) * 4);
        for (int64_t j = 0; j < m * k; j++) x[j] = random_float();
        load l = {(kestrel_quantize_rows_fn *)v->function, x, k, m, {bench_memory((size_t)(m * k)), bench_memory((size_t)(m * k / GROUP) * 4), bench_memory((size_t)(m * k / GROUP) * 4), k}};
        char shape[40];
        snprintf(shape, sizeof shape, "k=%lld m=%lld (elements, not MACs)", (long long)k, (long long)m);
        bench_row(v, shape, bench_run(body, &l, NULL, 0), (double)(m * k), 0);
    }
}
