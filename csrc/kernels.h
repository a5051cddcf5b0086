/* Private: one function type per op with its contract, the menu, each variant's prototype. SPDX-License-Identifier: Apache-2.0
 *
 * The portable file of an op is its contract in C. Letters: m rows (tokens), n outputs, k depth, d head_dim; strides in elements.
 * "Exact: ORDERED" means: every variant gives the portable variant's bits, because the order of float operations of one output
 * element is fixed here. Fused only where fma stands. All units are compiled with -ffp-contract=off.
 */
#ifndef KESTREL_KERNELS_H
#define KESTREL_KERNELS_H

#include "kestrel.h"
#include <stdbool.h>

enum { PANEL = KESTREL_PANEL, GROUP = KESTREL_GROUP, KEY_BLOCK = KESTREL_KEY_BLOCK, SPAN = KESTREL_SPAN };

/* --- the packed layout (pack.c writes it, every matmul reads it as it lies) ---------------------------------------
 * k is padded with zeros to kp = round_up(k, GROUP), n to whole panels of 8 rows. A panel is contiguous, 64-byte aligned:
 *   int8: scales f16 [kp / GROUP][8], zero-padded to a multiple of 64 bytes; then int8 [kp / 4][8 rows][4 k].
 *   int4: the same scales; then bytes [kp / 8][8 rows][4]: byte j holds k = j in its low half and k = 4 + j in its high half, each
 *         two's complement in [-8, 7]. So the low halves of 32 bytes are one block of int8's layout, the high halves the next.
 *   f32:  float [kp][8 rows].
 * Group 64: with the fold at conversion (kestrel/calibration.py) mean KL 0.0044 on SmolLM2-135M, where group 32 gives 0.0030 with
 * it and 0.0048 without; 2.7 % fewer bytes a token and half the scale work. alpha 0.65 instead of 0.5 in the fold: 0.0048.
 * int4 keeps group 64 (4.25 bits; llama.cpp's Q4_0 has 4.5): what decides is the rounding, round_int4.c has the numbers.
 * Scales come first so that a panel is read strictly forwards. int8 values lie in [-127, 127]: never -128 (two products of
 * -128 x -128 overflow the 16-bit sums of the Armv8.0 and AVX2 paths). Four-byte k serves sdot by lane, smull/smlal, vpmaddubsw
 * and vpdpbusd without any pairwise add; smmla zips two vectors (measured: see quantize_rows and the commit of each variant). */
static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
static inline int64_t padded_k(int64_t k) { return round_up(k, GROUP); }
static inline int64_t panel_scale_bytes(int64_t k) { return round_up(padded_k(k) / GROUP * PANEL * 2, 64); }
static inline int64_t panel_bytes(int32_t type, int64_t k)
{
    return type == KESTREL_F32 ? padded_k(k) * PANEL * 4 : panel_scale_bytes(k) + padded_k(k) * PANEL / (type == KESTREL_INT4 ? 2 : 1);
}

/* Activations as a matmul reads them. The layout of `values` belongs to the variant pair (quantize_rows, matmul_int8); the plain one:
 * values [m][kp] int8, scales [m][kp / GROUP]. Row stride kp is GROUP-padded, rows are 64-byte aligned as a whole buffer only. */
typedef struct kestrel_lhs {
    int8_t *values; /* capacity round_up(m, 8) * kp */
    float *scales;  /* capacity round_up(m, 8) * (kp / GROUP) */
    int32_t *sums;  /* the same capacity; avx2, avx512: -128 times each group's sum, for their unsigned x signed dot products */
    int64_t kp;
} kestrel_lhs;

/* quantize_rows
 * Computes  per row and group of GROUP k: a = max |x| (compared as integers, so that NaN > Inf > finite). a < 1e-30: scale 0,
 *           values 0. a not finite: scale a / 127 (NaN or Inf), values 0: the matmul then gives NaN and the next norm reports it.
 *           Else scale = a / 127, r = 127 / a, value = round-half-even(x * r). A last partial group counts as zero-filled.
 * Shapes    rows [row0, row0 + m) of src [.][src_stride] f32, k columns, into the same rows of lhs. m >= 1, k >= 1.
 * Range     any x. |x * r| <= 127 (1 + 2^-23), which rounds to 127: no clamp is needed.
 * Memory    reads k floats a row; writes kp values and kp / GROUP scales (and sums) a row, in the variant's layout.
 * Exact     ORDERED (one division each; the multiply rounds once).
 * Rows      row i alone = row i among others (bits), whatever the layout.
 * Specials  -0 quantises to 0. A zero group has scale 0.
 * Errors    none: asserts.
 * Variant   portable (auto-vectorised), neon, neon_i8mm (tokens in pairs), avx2 and avx512 (and sums).
 * Cost      about 1 cycle an element; k elements against n k of the matmul. */
typedef void kestrel_quantize_rows_fn(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs);

/* matmul_int8
 * Computes  dst[i][p * 8 + r] = acc, for panels p in [0, panels), r in 0..7, rows i in [0, m):
 *           acc = 0; for g ascending: acc = fma((float)s, scale_w[g][r] * scale_x[i][g], acc), s the exact int32 sum of group g.
 * Shapes    data: `panels` panels of panel_bytes(INT8, kp); lhs rows [0, m); dst [m][dst_stride], first column of the first panel.
 * Range     |w|, |x| <= 127, so |s| <= 127 * 127 * GROUP: exact in f32 (< 2^24) and in any int32 order. m >= 1, kp a multiple of GROUP.
 * Memory    reads exactly the panels and the lhs rows (never past them; prefetch aside); writes 8 * panels floats a row.
 * Exact     ORDERED (integers EXACT).
 * Rows      row i has the same bits for every m.
 * Specials  scale 0 gives +0 sums; NaN scales travel.
 * Errors    none: asserts.
 * Variant   portable, neon (smull/smlal/sadalp), neon_dotprod (sdot by lane), neon_i8mm (smmla; own layout of lhs: tokens in pairs), avx2 (vpmaddubsw on |w|, x with w's sign),
 *           avx512_vnni (vpdpbusd on w + 128).
 * Cost      n k m MACs; n k (1 + 2 / GROUP) bytes of weights, each read once for all rows when m <= 8. */
typedef void kestrel_matmul_int8_fn(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride);

/* matmul_int4
 * As matmul_int8 in every field, with panels of type INT4: s is the exact int32 sum of q x over the group, q in [-8, 7], and
 *           acc = fma((float)s, scale_w[g][r] * scale_x[i][g], acc). |s| <= 8 * 127 * GROUP.
 * Variant   portable, neon (smlal of a whole group in 16 bits), neon_dotprod, neon_i8mm (16 q in the byte's upper half, sums 16 times as
 *           large read against a magic number 16 times as small), avx2 (vpmaddubsw on q + 8), avx512_vnni (vpdpbusd on q + 8).
 * Cost      n k m MACs; n k (1/2 + 2 / GROUP) bytes of weights. */
typedef kestrel_matmul_int8_fn kestrel_matmul_int4_fn;

/* matmul_f32
 * Computes  dst[i][p * 8 + r] = acc; acc = 0; for k ascending: acc = fma(x[i][k], w[k][r], acc), over the k columns (not the padding).
 * Shapes    as matmul_int8; x [m][x_stride] f32.
 * Exact     ORDERED.  Rows: as above.  Specials: NaN and Inf travel.  Memory: k floats of each x row.
 * Variant   portable (auto-vectorised over the 8 rows).
 * Cost      the truth path: no more than decent. */
typedef void kestrel_matmul_f32_fn(const void *data, int64_t panels, int64_t k, const float *x, int64_t x_stride, int64_t m, float *dst, int64_t dst_stride);

/* norm (RMSNorm, Zhang & Sennrich 2019)
 * Computes  if delta: x[i] += delta[i] (stored). 16 partial sums s[j], s[j] = fma(x, x, s[j]) over i = j mod 16 ascending;
 *           joined by s[j] += s[j + 8], += s[j + 4], += s[j + 2], += s[j + 1]; r = 1 / sqrtf(s[0] / n + eps); dst[i] = (x[i] * r) * gain[i].
 * Shapes    one row of n floats; dst is x itself (then the norm is all that stays of it) or does not overlap it.
 * Exact     ORDERED.  Returns false when the sum is not finite (NaN, Inf or overflow in x): the caller names layer and row.
 * Variant   portable, neon, avx2.
 * Cost      two passes over a row; the sum waits for its own chains of fma. */
typedef bool kestrel_norm_fn(float *x, const float *delta, const float *gain, int64_t n, float eps, float *dst);

/* rope (Su et al. 2021, the half-split form of Hugging Face's Llama)
 * Computes  for i < d / 2: a = x[i], b = x[i + d / 2]: x[i] = fma(a, c, -(b * s)), x[i + d / 2] = fma(b, c, a * s); c, s = table.
 * Shapes    `heads` heads of d floats, contiguous; cos, sin [d / 2].
 * Exact     ORDERED.
 * Variant   portable, auto-vectorised. By hand: avx2 1.04 times as fast (checkasm --bench rope), NEON 12.5 instructions for 4 pairs where gcc
 *           has 14; a token spends a thousandth of its time here. */
typedef void kestrel_rope_fn(float *x, int64_t heads, int64_t d, const float *cosine, const float *sine);

/* silu_multiply
 * Computes  dst[i] = (g / (1 + expf_(-g))) * u with kestrel_expf (exp.h).
 * Exact     ORDERED.  In place on gate is allowed. Variant: portable, neon, avx2. */
typedef void kestrel_silu_multiply_fn(const float *gate, const float *up, int64_t n, float *dst);

/* gelu_multiply (GELU's tanh form, Hendrycks & Gimpel 2016, as GeGLU)
 * Computes  dst[i] = (g / (1 + expf_(g * fma(B, g * g, A)))) * u with kestrel_expf; A = -2 sqrt(2 / pi), B = 0.044715 A, each rounded to f32:
 *           0.5 (1 + tanh y) = 1 / (1 + exp(-2 y)) needs no tanh.
 * Exact     ORDERED.  Specials: as silu_multiply; g * g that overflows gives g, or g / exp(88) below 0.  In place on gate is allowed. Variant: portable, neon, avx2. */
#define GELU_A -1.5957691216057308f
#define GELU_B -0.07135481627260025f
typedef void kestrel_gelu_multiply_fn(const float *gate, const float *up, int64_t n, float *dst);

/* attention: one span (SPAN keys at absolute positions [span * SPAN, ...)) for a tile of queries of one kv head.
 * A query is (row, head of the group); all queries of a tile share the K and V rows, which are read once for all of them.
 * Computes  for each query with at least one key in the span (first = max(lo, span begin), last = min(hi, span end - 1)):
 *             s[j] = fma over d ascending from 0 of q[d] * k[j][d]           (q is already scaled by 1 / sqrt(d))
 *             int8: k[j][d] the integer as f32, and s[j] *= scale_k[j] after the last d
 *             M = max s[j], NaN passed over;  p[j] = expf_(s[j] - M), 0 for NaN
 *             L[c] += p[j] over j ascending, c = (j - span begin) mod 8, from 0
 *             A[d] = fma(w[j], v[j][d], A[d]) over j ascending from 0; w[j] = p[j]; int8: p[j] * scale_v[j], v[j][d] the integer as f32
 *           merged into the query's state {max, L[8], A[d]}: an empty state (max = -Inf) takes M, L, A as they are; else
 *             N = max(max, M); a = expf_(max - N); b = expf_(M - N); L = fma(b, L', a * L); A = fma(b, A', a * A); max = N.
 *           Spans are merged in ascending order. A query without keys in the span is not touched.
 * Shapes    see kestrel_span; K and V are f32, f16 (converted exactly to f32) or int8 with one f32 scale a key, behind the span's values.
 * Memory    reads K and V rows of [min first, max last] only in value; K blocks are read whole, int8's scales in sixteens (dead keys
 *           may hold anything, NaN included, and do not reach a result); work: queries * SPAN floats.
 * Exact     ORDERED.  Rows: a query's bits do not depend on its neighbours.
 * Specials  keys outside [lo, hi] execute no operation that can reach a result.
 * Variant   portable, neon, avx2, avx512.
 * Cost      2 d SPAN queries fma; 2 d SPAN cache elements read. */
typedef struct kestrel_span {
    const void *k;      /* first K block of the span: [SPAN / KEY_BLOCK][d][KEY_BLOCK]; int8: then float scale_k[SPAN] */
    const void *v;      /* first V row of the span: [SPAN][d]; int8: then float scale_v[SPAN] */
    int32_t type;       /* KESTREL_F32, KESTREL_F16 or KESTREL_INT8 */
    int32_t d;          /* a multiple of 8 */
    int32_t begin;      /* absolute position of the span's first key */
    int32_t queries;
    const float *q;     /* [rows][row_stride], query i = row i / group, head i % group */
    int64_t q_stride;   /* from row to row; heads of a group are contiguous, d floats each */
    int32_t group;
    const int32_t *lo;  /* [rows] first and last visible key of each row */
    const int32_t *hi;
    float *state;       /* [queries][STATE_HEAD + d] */
    float *work;        /* [queries][SPAN] */
    const void *next;   /* the K that the same thread will read next: fetched while V is, as V is while K is. A hint: any address */
} kestrel_span;
/* Of a cache of that type. */
static inline int64_t element_bytes(int32_t type) { return type == KESTREL_F32 ? 4 : type == KESTREL_F16 ? 2 : 1; }
enum { STATE_HEAD = 16 }; /* floats before A: [0] max, [8..15] L */
/* Of an int8 span's `k` or `v`. */
static inline const float *kestrel_span_scales(const void *values, int64_t d) { return (const float *)((const int8_t *)values + SPAN * d); }
typedef void kestrel_attention_span_fn(const kestrel_span *span);

/* merges state b into a (a earlier), as above; finish: out[d] = A[d] * (1 / l), l = L joined as L[j] += L[j + 4], += [j + 2], += [j + 1];
 * NaN for an empty state (all scores were NaN), so that the next norm reports it. */
typedef void kestrel_attention_merge_fn(float *a, const float *b, int64_t d);
typedef void kestrel_attention_finish_fn(const float *state, int64_t d, float *out);

/* --- the menu -------------------------------------------------------------------------------------------------- */

enum kestrel_isa {
    ISA_NEON = 1, ISA_NEON_DOTPROD = 2, ISA_NEON_I8MM = 4, ISA_AVX2 = 8, ISA_AVX512 = 16, ISA_AVX512_VNNI = 32
};

typedef struct kestrel_kernels {
    const char *isa;
    kestrel_quantize_rows_fn *quantize_rows;
    kestrel_matmul_int8_fn *matmul_int8;
    kestrel_matmul_int4_fn *matmul_int4;
    kestrel_matmul_f32_fn *matmul_f32;
    kestrel_norm_fn *norm;
    kestrel_rope_fn *rope;
    kestrel_silu_multiply_fn *silu_multiply;
    kestrel_gelu_multiply_fn *gelu_multiply;
    kestrel_attention_span_fn *attention_span;
    kestrel_attention_merge_fn *attention_merge;
    kestrel_attention_finish_fn *attention_finish;
} kestrel_kernels;

typedef void kestrel_any_fn(void);
typedef struct kestrel_variant {
    const char *op, *name;
    uint32_t required; /* kestrel_isa bits */
    kestrel_any_fn *function;
} kestrel_variant;

/* Per op the variants oldest to newest; the last whose required set is usable wins. */
extern const kestrel_variant kestrel_menu[];
extern const int kestrel_menu_length;

uint32_t kestrel_cpu_isa(void);                                   /* cpu.c */
int kestrel_kernels_select(const char *isa, kestrel_kernels *out); /* KESTREL_OK or KESTREL_E_ISA; isa NULL = the best here */

/* --- variants ---------------------------------------------------------------------------------------------------- */

kestrel_quantize_rows_fn kestrel_quantize_rows_portable, kestrel_quantize_rows_neon, kestrel_quantize_rows_neon_i8mm, kestrel_quantize_rows_avx2, kestrel_quantize_rows_avx512;
kestrel_matmul_int8_fn kestrel_matmul_int8_portable, kestrel_matmul_int8_neon, kestrel_matmul_int8_neon_dotprod, kestrel_matmul_int8_neon_i8mm, kestrel_matmul_int8_avx2, kestrel_matmul_int8_avx512_vnni;
kestrel_matmul_int4_fn kestrel_matmul_int4_portable, kestrel_matmul_int4_neon, kestrel_matmul_int4_neon_dotprod, kestrel_matmul_int4_neon_i8mm, kestrel_matmul_int4_avx2, kestrel_matmul_int4_avx512_vnni;
kestrel_matmul_f32_fn kestrel_matmul_f32_portable;
kestrel_norm_fn kestrel_norm_portable, kestrel_norm_neon, kestrel_norm_avx2;
kestrel_rope_fn kestrel_rope_portable;
kestrel_silu_multiply_fn kestrel_silu_multiply_portable, kestrel_silu_multiply_neon, kestrel_silu_multiply_avx2;
kestrel_gelu_multiply_fn kestrel_gelu_multiply_portable, kestrel_gelu_multiply_neon, kestrel_gelu_multiply_avx2;
kestrel_attention_span_fn kestrel_attention_span_portable, kestrel_attention_span_neon, kestrel_attention_span_avx2, kestrel_attention_span_avx512;
kestrel_attention_merge_fn kestrel_attention_merge_portable;
kestrel_attention_finish_fn kestrel_attention_finish_portable;

#endif
