/* The small ops, one row at a time: norm, rope, silu_multiply, gelu_multiply. SPDX-License-Identifier: Apache-2.0 */
#include "checkasm.h"
#include <stdio.h>
#include <stdlib.h>

static float *guarded_copy(const float *x, int64_t n, int place, bool seal)
{
    float *p = buffer_new((size_t)n * 4, 4, place, 0);
    memcpy(p, x, (size_t)n * 4);
    if (seal) buffer_seal(p);
    return p;
}

static float *random_row(int64_t n, float size)
{
    float *x = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) x[i] = random_float() * size;
    return x;
}

/* --- norm ------------------------------------------------------------------------------------------------------------ */

static void check_norm_n(const kestrel_variant *v, int64_t n, bool with_delta, float poison)
{
    kestrel_norm_fn *norm = (kestrel_norm_fn *)v->function;
    const float eps = 1e-5f;
    float *x = random_row(n, 3), *delta = random_row(n, 1), *gain = random_row(n, 2), *sum = malloc((size_t)n * 4), *want = malloc((size_t)n * 4);
    if (poison != 0) x[random_below(n)] = poison;
    memcpy(sum, x, (size_t)n * 4);
    const bool finite = kestrel_norm_portable(sum, with_delta ? delta : NULL, gain, n, eps, want);
    check_case("n %lld%s, poison %g", (long long)n, with_delta ? ", delta" : "", (double)poison);
    if (finite != (poison == 0)) check_fail("portable says %s", finite ? "finite" : "not finite");
    if (is_portable(v) && finite) {
        double square = 0;
        for (int64_t i = 0; i < n; i++) square += (double)sum[i] * sum[i];
        for (int64_t i = 0; i < n; i++) {
            const double y = sum[i] / sqrt(square / (double)n + eps) * gain[i];
            check_near("x", i, sum[i], (double)x[i] + (with_delta ? delta[i] : 0), 4 * 0x1p-24);
            check_near("dst", i, want[i], y, (fabs(y) + 0x1p-126) * 0x1p-24 * (8 + (double)n / 16));
        }
    }
    for (int place = 0; place < PLACES; place++) {
        check_case("n %lld%s, poison %g, %s", (long long)n, with_delta ? ", delta" : "", (double)poison, place == AT_HEAD ? "head" : "tail");
        float *row = guarded_copy(x, n, place, false), *dst = buffer_new((size_t)n * 4, 4, place, 0xc3);
        const bool got = norm(row, with_delta ? guarded_copy(delta, n, place, true) : NULL, guarded_copy(gain, n, place, true), n, eps, dst);
        if (got != finite) check_fail("returned %d, portable %d", got, finite);
        check_same_floats("x", row, sum, (size_t)n);
        check_same_floats("dst", dst, want, (size_t)n);
        check_end_case();
        if (with_delta) continue;
        check_case("n %lld, poison %g, %s, in place", (long long)n, (double)poison, place == AT_HEAD ? "head" : "tail");
        row = guarded_copy(x, n, place, false);
        if (norm(row, NULL, guarded_copy(gain, n, place, true), n, eps, row) != finite) check_fail("portable returned %d", finite);
        check_same_floats("dst", row, want, (size_t)n);
        check_end_case();
    }
    free(x); free(delta); free(gain); free(sum); free(want);
}

void check_norm(const kestrel_variant *v)
{
    for (int64_t n = 1; n <= 70; n++) check_norm_n(v, n, n % 2, 0);
    const int64_t real[] = {576, 960, 1536, 3072, 4096};
    const float poison[] = {0, NAN, INFINITY, -INFINITY, 3e38f};
    for (int i = 0; i < 5; i++)
        for (int p = 0; p < 5; p++) check_norm_n(v, real[i], (i + p) % 2, poison[p]);
}

/* --- rope ------------------------------------------------------------------------------------------------------------ */

void check_rope(const kestrel_variant *v)
{
    kestrel_rope_fn *rope = (kestrel_rope_fn *)v->function;
    const int64_t sizes[] = {2, 4, 6, 8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 256};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int64_t heads = 1; heads <= 9; heads += 2) {
            const int64_t d = sizes[s], half = d / 2, n = heads * d;
            float *x = random_row(n, 4), *want = malloc((size_t)n * 4), *cosine = malloc((size_t)half * 4), *sine = malloc((size_t)half * 4);
            for (int64_t i = 0; i < half; i++) {
                double a, b;
                kestrel_sincos((double)random_float() * 3.14, &a, &b);
                sine[i] = (float)a;
                cosine[i] = (float)b;
            }
            memcpy(want, x, (size_t)n * 4);
            kestrel_rope_portable(want, heads, d, cosine, sine);
            if (is_portable(v)) {
                check_case("float64 statement, heads %lld, d %lld", (long long)heads, (long long)d);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t j = i % d % half;
                    const double a = x[i / d * d + j], b = x[i / d * d + j + half];
                    check_near("x", i, want[i], i % d < half ? a * cosine[j] - b * sine[j] : b * cosine[j] + a * sine[j], (fabs(a) + fabs(b)) * 0x1p-23);
                }
            }
            for (int place = 0; place < PLACES; place++) {
                check_case("heads %lld, d %lld, %s", (long long)heads, (long long)d, place == AT_HEAD ? "head" : "tail");
                float *row = guarded_copy(x, n, place, false);
                rope(row, heads, d, guarded_copy(cosine, half, place, true), guarded_copy(sine, half, place, true));
                check_same("x", row, want, (size_t)n, 4);
                check_end_case();
            }
            free(x); free(want); free(cosine); free(sine);
        }
}

/* --- silu_multiply, gelu_multiply ---------------------------------------------------------------------------------------- */

static double silu(double g) { return g / (1 + exp(g < -88 ? 88 : -g)); } /* expf's clamp: exp(88) stays exp(88) */
static double gelu(double g)
{
    const double y = sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g);
    return g / (1 + exp(y < -44 ? 88 : -2 * y));
}

static void check_gated(const kestrel_variant *v, kestrel_silu_multiply_fn *portable, double (*statement)(double), double bound)
{
    kestrel_silu_multiply_fn *gated = (kestrel_silu_multiply_fn *)v->function;
    const int64_t real[] = {576, 1536, 3072};
    for (int64_t n = 1; n <= 43; n++) {
        const int64_t count = n <= 40 ? n : real[n - 41];
        const float size[] = {1, 10, 120, 1e30f}; /* 120: past both ends of expf's range */
        for (int s = 0; s < 4; s++) {
            float *gate = random_row(count, size[s]), *up = random_row(count, 2), *want = malloc((size_t)count * 4);
            if (s == 2) gate[random_below(count)] = random_below(2) ? 0.0f : -0.0f;
            portable(gate, up, count, want);
            if (is_portable(v)) {
                check_case("float64 statement, n %lld, size %g", (long long)count, (double)size[s]);
                for (int64_t i = 0; i < count; i++) {
                    const double y = statement(gate[i]) * up[i];
                    check_near("dst", i, want[i], y, fabs(y) * bound + 0x1p-140);
                }
            }
            for (int place = 0; place < PLACES; place++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    check_case("n %lld, size %g, %s%s", (long long)count, (double)size[s], place == AT_HEAD ? "head" : "tail", in_place ? ", in place" : "");
                    float *g = guarded_copy(gate, count, place, !in_place), *dst = in_place ? g : buffer_new((size_t)count * 4, 4, place, 0xc3);
                    gated(g, guarded_copy(up, count, place, true), count, dst);
                    check_same("dst", dst, want, (size_t)count, 4);
                    check_end_case();
                }
            free(gate); free(up); free(want);
        }
    }
}

void check_silu_multiply(const kestrel_variant *v) { check_gated(v, kestrel_silu_multiply_portable, silu, 0x1p-21); }
/* GELU's exponent reaches 88 and its own rounding is multiplied by that much. */
void check_gelu_multiply(const kestrel_variant *v) { check_gated(v, kestrel_gelu_multiply_portable, gelu, 0x1p-15); }

/* --- bench ---------------------------------------------------------------------------------------------------------------- */

typedef struct load { const kestrel_variant *v; float *x, *y, *z, *dst; int64_t n; } load;
static void body(void *context, int thread, int threads)
{
    load *l = context;
    (void)threads;
    if (thread) return;
    if (!strcmp(l->v->op, "norm")) ((kestrel_norm_fn *)l->v->function)(l->x, NULL, l->y, l->n, 1e-5f, l->dst);
    else if (!strcmp(l->v->op, "rope")) ((kestrel_rope_fn *)l->v->function)(l->x, l->n / 64, 64, l->y, l->z);
    else ((kestrel_silu_multiply_fn *)l->v->function)(l->x, l->y, l->n, l->dst);
}

static void bench(const kestrel_variant *v, int64_t n)
{
    load l = {v, bench_memory((size_t)n * 4), bench_memory((size_t)n * 4), bench_memory((size_t)n * 4), bench_memory((size_t)n * 4), n};
    for (int64_t i = 0; i < n; i++) {
        l.x[i] = random_float();
        l.y[i] = 0.6f; /* 0.6, 0.8: a rotation, repeated in place, neither grows nor dies */
        l.z[i] = 0.8f;
    }
    char shape[40];
    snprintf(shape, sizeof shape, "n=%lld (elements, not MACs)", (long long)n);
    bench_row(v, shape, bench_run(body, &l, NULL, 0), (double)n, 0);
}

void bench_norm(const kestrel_variant *v) { bench(v, 576); bench(v, 1536); }
void bench_rope(const kestrel_variant *v) { bench(v, 576); }
void bench_silu_multiply(const kestrel_variant *v) { bench(v, 1536); }
void bench_gelu_multiply(const kestrel_variant *v) { bench(v, 2048); }
