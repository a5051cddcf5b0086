/* matmul_int8, matmul_int4 and matmul_f32 against portable. SPDX-License-Identifier: Apache-2.0 */
#include "checkasm.h"
#include "half.h"
#include <stdio.h>
#include <stdlib.h>

enum { M = 17, CAPACITY = 24 }; /* most rows of a test; what a kestrel_lhs of that many rows holds */

typedef enum kind { RANDOM, SAME_SIGN, OPPOSITE, ALTERNATING, NOT_FINITE, KINDS } kind;
static const char *const kind_name[] = {"random", "extreme x +127", "extreme x -127", "alternating extremes", "zero and NaN groups"};

static int32_t type_of(const kestrel_variant *v) { return !strcmp(v->op, "matmul_int4") ? KESTREL_INT4 : KESTREL_INT8; }

/* Column j of row r among a panel's values, by kernels.h's layout. */
static void set_weight(int8_t *values, int32_t type, int64_t j, int64_t r, int q)
{
    if (type == KESTREL_INT8) values[(j / 4 * PANEL + r) * 4 + j % 4] = (int8_t)q;
    else {
        int8_t *two = &values[(j / 8 * PANEL + r) * 4 + j % 4];
        *two = (int8_t)(j % 8 < 4 ? (*two & 0xf0) | (q & 15) : (*two & 15) | q * 16);
    }
}
static int get_weight(const int8_t *values, int32_t type, int64_t j, int64_t r)
{
    if (type == KESTREL_INT8) return values[(j / 4 * PANEL + r) * 4 + j % 4];
    const int two = values[(j / 8 * PANEL + r) * 4 + j % 4];
    return (((j % 8 < 4 ? two : two >> 4) & 15) ^ 8) - 8;
}

/* Panels as pack.c lays them: scales, zero padding, values with zero k padding. */
static void fill_panels(uint8_t *data, int32_t type, int64_t panels, int64_t k, kind kind)
{
    const int64_t kp = padded_k(k), bytes = panel_bytes(type, k);
    const int high = type == KESTREL_INT8 ? 127 : 7, low = type == KESTREL_INT8 ? -127 : -8;
    memset(data, 0, (size_t)(panels * bytes));
    for (int64_t p = 0; p < panels; p++, data += bytes) {
        uint16_t *scales = (uint16_t *)data;
        int8_t *w = (int8_t *)data + panel_scale_bytes(k);
        for (int64_t i = 0; i < kp / GROUP * PANEL; i++)
            scales[i] = kind == SAME_SIGN || kind == OPPOSITE || kind == ALTERNATING ? 0x3c00 : random_below(16) ? (uint16_t)(0x0400 + random_below(0x3000)) : 0;
        for (int64_t j = 0; j < k; j++)
            for (int r = 0; r < PANEL; r++) {
                int q = kind == RANDOM || kind == NOT_FINITE ? (int)random_below(high - low + 1) + low : kind == ALTERNATING && (j + r) % 2 ? low : high;
                if (type == KESTREL_INT4 && r % 2 && (kind == SAME_SIGN || kind == OPPOSITE)) q = low; /* the larger magnitude, against either sign of x */
                set_weight(w, type, j, r, q);
            }
    }
}

/* Rows that quantise to the wanted integers: absmax 127 gives scale 1. */
static void fill_rows(float *x, int64_t m, int64_t k, kind kind)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < k; j++) {
            float v = random_float();
            if (kind == SAME_SIGN) v = 127.0f;
            if (kind == OPPOSITE) v = -127.0f;
            if (kind == ALTERNATING) v = (j + i) % 2 ? -127.0f : 127.0f;
            if (kind == NOT_FINITE && (i + j / GROUP) % 3 == 0) v = 0.0f;
            if (kind == NOT_FINITE && i % 5 == 4 && j == k / 2) v = NAN;
            x[i * k + j] = v;
        }
}

/* The quantize_rows that runs together with this matmul: the two share the layout of kestrel_lhs.values. */
static kestrel_quantize_rows_fn *partner(const kestrel_variant *v)
{
    for (int i = 0; kestrel_isa_name(i); i++) {
        const char *isa = kestrel_isa_name(i), *name = kestrel_variant_name(isa, v->op);
        kestrel_kernels kernels;
        if (name && !strcmp(name, v->name) && !kestrel_kernels_select(isa, &kernels)) return kernels.quantize_rows;
    }
    return kestrel_quantize_rows_portable;
}

/* Told by the bytes of rows that differ from each other: a test's own rows may all be equal. */
static bool has_plain_layout(kestrel_quantize_rows_fn *quantize)
{
    enum { ROWS = 3, K = 2 * GROUP };
    float x[ROWS * K], scales[2][8 * K / GROUP];
    int8_t values[2][8 * K] = {{0}};
    int32_t sums[8 * K / GROUP];
    for (int i = 0; i < ROWS * K; i++) x[i] = (float)((i * 37) % 101 - 50);
    kestrel_lhs plain = {values[0], scales[0], sums, K}, own = {values[1], scales[1], sums, K};
    kestrel_quantize_rows_portable(x, K, K, 0, ROWS, &plain);
    quantize(x, K, K, 0, ROWS, &own);
    return !memcmp(values[0], values[1], sizeof values[0]);
}

static kestrel_lhs lhs_new(int64_t m, int64_t rows, int64_t kp, int place)
{
    kestrel_lhs l = {buffer_new((size_t)(rows * kp), 64, place, 0x5a), buffer_new((size_t)(rows * (kp / GROUP)) * 4, 4, place, 0x5a),
                     buffer_new((size_t)(round_up(m, 8) * (kp / GROUP)) * 4, 4, place, 0x5a), kp};
    return l;
}

static void lhs_seal(const kestrel_lhs *l)
{
    buffer_seal(l->values);
    buffer_seal(l->scales);
    buffer_seal(l->sums);
}

typedef struct problem {
    const kestrel_variant *v;
    kestrel_matmul_int8_fn *matmul; /* int4's has the same type */
    int32_t type;
    kestrel_quantize_rows_fn *quantize;
    int64_t panels, k;
    kind kind;
    uint8_t *data;
    float *x, *want;        /* [M][k], [M][8 panels] of portable */
    kestrel_lhs plain, own; /* M rows in portable's layout and in this variant's */
    bool same_layout;
} problem;

/* One call for m rows in guarded buffers; `cut` splits the panels in two calls (0: one call). */
static void one_call(const problem *t, int64_t m, int64_t extra, int place, int64_t cut, int64_t first)
{
    const int64_t kp = padded_k(t->k), n = t->panels * PANEL, stride = n + extra, bytes = panel_bytes(t->type, t->k);
    check_case("%s, panels %lld, k %lld, m %lld, first row %lld, stride +%lld, %s, cut %lld", kind_name[t->kind], (long long)t->panels,
               (long long)t->k, (long long)m, (long long)first, (long long)extra, place == AT_HEAD ? "head" : "tail", (long long)cut);
    kestrel_lhs l = lhs_new(m, t->same_layout ? m : round_up(m, 8), kp, place);
    if (t->same_layout) {
        memcpy(l.values, t->own.values + first * kp, (size_t)(m * kp));
        memcpy(l.scales, t->own.scales + first * (kp / GROUP), (size_t)(m * (kp / GROUP)) * 4);
        memcpy(l.sums, t->own.sums + first * (kp / GROUP), (size_t)(m * (kp / GROUP)) * 4);
    } else t->quantize(t->x + first * t->k, t->k, t->k, 0, m, &l);
    lhs_seal(&l);
    uint8_t *data = buffer_new((size_t)(t->panels * bytes), 64, place, 0);
    memcpy(data, t->data, (size_t)(t->panels * bytes));
    buffer_seal(data);
    const size_t floats = (size_t)((m - 1) * stride + n);
    float *dst = buffer_new(floats * 4, 4, place, 0xc3), *expect = malloc(floats * 4);
    memset(expect, 0xc3, floats * 4);
    for (int64_t i = 0; i < m; i++) memcpy(expect + i * stride, t->want + (first + i) * n, (size_t)n * 4);
    if (cut) {
        t->matmul(data + cut * bytes, t->panels - cut, &l, m, dst + cut * PANEL, stride);
        t->matmul(data, cut, &l, m, dst, stride);
    } else t->matmul(data, t->panels, &l, m, dst, stride);
    if (t->kind == NOT_FINITE) check_same_floats("dst", dst, expect, floats);
    else check_same("dst", dst, expect, floats, 4);
    free(expect);
    check_end_case();
}

static void statement(const problem *t)
{
    const int64_t kp = padded_k(t->k), n = t->panels * PANEL;
    check_case("float64 statement, %s, panels %lld, k %lld", kind_name[t->kind], (long long)t->panels, (long long)t->k);
    for (int64_t i = 0; i < M; i++)
        for (int64_t o = 0; o < n; o++) {
            const uint8_t *panel = t->data + o / PANEL * panel_bytes(t->type, t->k);
            const int8_t *w = (const int8_t *)panel + panel_scale_bytes(t->k);
            double sum = 0, size = 0;
            for (int64_t j = 0; j < kp; j++) {
                const double scale = (double)kestrel_f16_to_f32(((const uint16_t *)panel)[j / GROUP * PANEL + o % PANEL]) * t->plain.scales[i * (kp / GROUP) + j / GROUP];
                const double term = scale * get_weight(w, t->type, j, o % PANEL) * t->plain.values[i * kp + j];
                sum += term;
                size += fabs(term);
            }
            if (!check_near("dst", i * n + o, t->want[i * n + o], sum, size * 0x1p-23 * (double)(2 + kp / GROUP))) return;
        }
}

static void check_shape(const kestrel_variant *v, int64_t panels, int64_t k, kind kind, const int *rows, bool small)
{
    const int64_t kp = padded_k(k), n = panels * PANEL, groups = kp / GROUP;
    problem t = {v, (kestrel_matmul_int8_fn *)v->function, type_of(v), partner(v), panels, k, kind, NULL, NULL, NULL, {0}, {0}, false};
    t.data = aligned_alloc(64, (size_t)(panels * panel_bytes(t.type, k)));
    t.x = malloc((size_t)(M * k) * 4);
    t.want = malloc((size_t)(M * n) * 4);
    kestrel_lhs *both[] = {&t.plain, &t.own};
    for (int i = 0; i < 2; i++)
        *both[i] = (kestrel_lhs){aligned_alloc(64, (size_t)round_up(CAPACITY * kp, 64)), malloc((size_t)(CAPACITY * groups) * 4), malloc((size_t)(CAPACITY * groups) * 4), kp};
    fill_panels(t.data, t.type, panels, k, kind);
    fill_rows(t.x, M, k, kind);
    kestrel_quantize_rows_portable(t.x, k, k, 0, M, &t.plain);
    t.quantize(t.x, k, k, 0, M, &t.own);
    t.same_layout = has_plain_layout(t.quantize);
    (t.type == KESTREL_INT8 ? kestrel_matmul_int8_portable : kestrel_matmul_int4_portable)(t.data, panels, &t.plain, M, t.want, n);
    if (is_portable(v) && kind != NOT_FINITE && small) statement(&t);
    for (int i = 0; rows[i]; i++) {
        for (int place = 0; place < PLACES; place++) one_call(&t, rows[i], place == AT_HEAD ? 5 : 0, place, 0, 0);
        if (small)
            for (int64_t cut = 1; cut < panels; cut++) one_call(&t, rows[i], 3, AT_TAIL, cut, 0);
    }
    if (small) /* each row alone, and windows of rows: the same bits as among the others */
        for (int64_t first = 0; first < M; first++) one_call(&t, first % 2 && first < M - 5 ? 5 : 1, 0, AT_TAIL, 0, first);
    for (int i = 0; i < 2; i++) { free(both[i]->values); free(both[i]->scales); free(both[i]->sums); }
    free(t.data); free(t.x); free(t.want);
}

static const int all_rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 0}, some_rows[] = {1, 2, 4, 5, 8, 9, 16, 17, 0};

void check_matmul_int8(const kestrel_variant *v)
{
    const int64_t panels[] = {1, 2, 3, 4, 5, 9}, edges[] = {1, 2, 3, 4, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP - 1, 2 * GROUP, 3 * GROUP, 4 * GROUP, 5 * GROUP + 4, 9 * GROUP};
    for (size_t p = 0; p < sizeof panels / sizeof *panels; p++)
        for (size_t k = 0; k < sizeof edges / sizeof *edges; k++) check_shape(v, panels[p], edges[k], RANDOM, p == 2 ? all_rows : some_rows, true);
    for (kind kind = RANDOM; kind < KINDS; kind++) {
        check_shape(v, 3, 4 * GROUP, kind, all_rows, true);
        check_shape(v, 2, 576, kind, all_rows, true);
        check_shape(v, 2, 16384, kind, some_rows, false);
    }
    static const int real[][2] = {{576, 576}, {576, 1536}, {960, 576}, {3072, 576}}; /* SmolLM2-135M: n, k */
    for (int i = 0; i < (is_emulated() ? 2 : 4); i++) check_shape(v, real[i][0] / PANEL, real[i][1], RANDOM, some_rows, false);
}

void check_matmul_int4(const kestrel_variant *v) { check_matmul_int8(v); }

/* --- f32 ------------------------------------------------------------------------------------------------------------- */

static void check_shape_f32(const kestrel_variant *v, int64_t panels, int64_t k)
{
    kestrel_matmul_f32_fn *matmul = (kestrel_matmul_f32_fn *)v->function;
    const int64_t n = panels * PANEL, kp = padded_k(k), x_stride = k + 3;
    float *w = aligned_alloc(64, (size_t)(panels * kp * PANEL) * 4), *x = malloc((size_t)(M * x_stride) * 4), *want = malloc((size_t)(M * n) * 4);
    for (int64_t i = 0; i < panels * kp * PANEL; i++) w[i] = i / PANEL % kp < k ? random_float() : 0.0f;
    for (int64_t i = 0; i < M * x_stride; i++) x[i] = i % x_stride < k ? random_float() : NAN; /* columns past k are not read */
    kestrel_matmul_f32_portable(w, panels, k, x, x_stride, M, want, n);
    if (is_portable(v)) {
        check_case("float64 statement, panels %lld, k %lld", (long long)panels, (long long)k);
        for (int64_t i = 0; i < M; i++)
            for (int64_t o = 0; o < n; o++) {
                double sum = 0, size = 0;
                for (int64_t j = 0; j < k; j++) {
                    const double term = (double)x[i * x_stride + j] * w[(o / PANEL * kp + j) * PANEL + o % PANEL];
                    sum += term;
                    size += fabs(term);
                }
                check_near("dst", i * n + o, want[i * n + o], sum, size * 0x1p-24 * (double)(k + 1));
            }
    }
    for (int64_t m = 1; m <= M; m++)
        for (int place = 0; place < PLACES; place++) {
            const int64_t first = m < M ? random_below(M - m) : 0, stride = n + (place == AT_HEAD ? 5 : 0), cut = random_below(panels);
            const size_t floats = (size_t)((m - 1) * stride + n), x_bytes = (size_t)((m - 1) * x_stride + k) * 4, w_bytes = (size_t)(panels * kp * PANEL) * 4;
            check_case("panels %lld, k %lld, m %lld, first row %lld, %s, cut %lld", (long long)panels, (long long)k, (long long)m, (long long)first, place == AT_HEAD ? "head" : "tail", (long long)cut);
            void *data = buffer_new(w_bytes, 64, place, 0), *rows = buffer_new(x_bytes, 4, place, 0);
            memcpy(data, w, w_bytes);
            memcpy(rows, x + first * x_stride, x_bytes);
            buffer_seal(data);
            buffer_seal(rows);
            float *dst = buffer_new(floats * 4, 4, place, 0xc3), *expect = malloc(floats * 4);
            memset(expect, 0xc3, floats * 4);
            for (int64_t i = 0; i < m; i++) memcpy(expect + i * stride, want + (first + i) * n, (size_t)n * 4);
            matmul((const char *)data + cut * kp * PANEL * 4, panels - cut, k, rows, x_stride, m, dst + cut * PANEL, stride);
            if (cut) matmul(data, cut, k, rows, x_stride, m, dst, stride);
            check_same("dst", dst, expect, floats, 4);
            free(expect);
            check_end_case();
        }
    free(w); free(x); free(want);
}

void check_matmul_f32(const kestrel_variant *v)
{
    const int64_t k[] = {1, 7, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5, 576, 1536};
    for (int64_t panels = 1; panels <= 4; panels++)
        for (size_t i = 0; i < sizeof k / sizeof *k; i++) check_shape_f32(v, panels, k[i]);
}

/* --- bench: weights larger than the last cache, and one layer's that stay in it ------------------------------------------ */

typedef struct load { const kestrel_variant *v; const uint8_t *data; int64_t panels, k, m; kestrel_lhs lhs; float *x, *dst; } load;

static void body(void *context, int thread, int threads)
{
    const load *l = context;
    const int64_t begin = l->panels * thread / threads, end = l->panels * (thread + 1) / threads;
    if (!strcmp(l->v->op, "matmul_f32"))
        ((kestrel_matmul_f32_fn *)l->v->function)(l->data + begin * panel_bytes(KESTREL_F32, l->k), end - begin, l->k, l->x, l->k, l->m, l->dst + begin * PANEL, l->panels * PANEL);
    else
        ((kestrel_matmul_int8_fn *)l->v->function)(l->data + begin * panel_bytes(type_of(l->v), l->k), end - begin, &l->lhs, l->m, l->dst + begin * PANEL, l->panels * PANEL);
}

static void bench(const kestrel_variant *v, int32_t type)
{
    enum { ROWS = 64 };
    static uint8_t *memory;
    const int64_t k = 1536, bytes = panel_bytes(type, k), most = 160000000 / bytes, kp = padded_k(k);
    static int32_t filled = KESTREL_F32; /* f32 runs over whatever is there */
    if (!memory) memory = bench_memory(160000064);
    if (type != filled && type != KESTREL_F32) fill_panels(memory, filled = type, most, k, RANDOM);
    load l = {v, memory, most, k, 1, {bench_memory(ROWS * kp), bench_memory(ROWS * kp / GROUP * 4), bench_memory(ROWS * kp / GROUP * 4), kp},
              bench_memory(ROWS * k * 4), bench_memory((size_t)(ROWS * most * PANEL) * 4)};
    fill_rows(l.x, ROWS, k, RANDOM);
    partner(v)(l.x, k, k, 0, ROWS, &l.lhs);
    const int64_t rows[] = {1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 64};
    for (int cold = 1; cold >= 0; cold--)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            l.m = rows[i];
            l.panels = cold ? most : 72; /* 576 x 1536: in the second cache level */
            if (is_portable(v) && cold) l.panels /= 16;
            if (type == KESTREL_F32 && cold) break;
            char shape[40];
            snprintf(shape, sizeof shape, "%s k=%lld m=%lld", cold ? "160 MB" : "576 rows", (long long)k, (long long)l.m);
            const size_t streamed = (size_t)(l.panels * bytes);
            const bench_time t = bench_run(body, &l, memory, cold && !is_portable(v) ? streamed : 0);
            bench_row(v, shape, t, (double)(l.panels * PANEL * k * l.m), (double)streamed);
        }
}

void bench_matmul_int8(const kestrel_variant *v) { bench(v, KESTREL_INT8); }
void bench_matmul_int4(const kestrel_variant *v) { bench(v, KESTREL_INT4); }
void bench_matmul_f32(const kestrel_variant *v) { bench(v, KESTREL_F32); }
