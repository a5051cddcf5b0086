/* matmul_int8, matmul_int4 and their quantize_rows, Armv8.6 i8mm: smmla, sdot for few rows. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * One smmla takes 8 k of 2 tokens and of 2 rows. quantize_rows lays tokens out in pairs: values [pair][kp / 8][2][8], scales
 * [pair][kp / GROUP][2]; the rows' 8 k come from two vectors of the panel by zip. Sums and accumulators stay in smmla's order
 * {t0 r0, t0 r1, t1 r0, t1 r1} to the end. Lanes are outputs: the order of float operations is the contract's.
 * The zips cost as much as the smmla of one pair: 1 to 3 tokens take sdot on the panel as it lies; from 9 on a panel's zips are
 * paid once, into a buffer. Scales (a multiply, a subtraction, an fma per four sums) leave smmla 73 % of the two pipes at GROUP 64.
 * Neoverse N2's model, share of 64 MAC/cycle: 4 tokens 49 %, 6 54 %, 8 57 %, many 71 % without the zips, 39 cycles a group of a panel.
 * The two vector pipes are full: smmla, zips and scales take 64 + 32 + 34 of their slots a group at 4 tokens, 96 + 32 + 47 at 6,
 * 128 + 32 + 64 at 8, which allows 49, 55, 57 %. More needs a file whose k lies in eights (65 and 67 % at 4 and 8).
 * int4: a byte's high half is 16 q as it stands, its low half after a shift by four; sums are 16 times as large. Its panels go through
 * the buffer from 4 rows on: the splits are paid once, and the loop over the buffer is int8's.
 * Lost at 8: zips of the next group in the scalar pipes (ldr, bfxil, stp) 60 % with 3 of 8 steps, 50 % with all (dispatch); 4 + 4 through
 * the buffer 50 %. Lost elsewhere: 8 rows x 6 pairs as two halves of the rows 61 %, vmmlaq_s32 and a statement each smmla (gcc's moves: 50 to 52 % at 8),
 * a sum converted in place (moves: 54 % at 8), post-index ldp (39 cycles a group instead of 29 at 1 token). */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>
#include <string.h>

enum { TILE = 4 /* pairs */, FEW = 2 /* pairs */, AHEAD = 2048, CHUNK = 24 /* groups */ };

/* As in matmul_neon_dotprod.c: sums start at the bits of 1.5 * 2^23, one subtraction converts them. */
static const int32_t magic_bits[8] = {ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS};
#define MAGIC_INT4 786432.0f
static const int32_t magic_bits_int4[8] = {0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000};
_Static_assert(127 * 127 * GROUP < 1 << 22 && 8 * 127 * GROUP < 1 << 18 && GROUP % 8 == 0, "a group's sum must stay below a third of the magic number");

void kestrel_quantize_rows_neon_i8mm(const float *src, int64_t src_stride, int64_t k, int64_t row0, int64_t m, kestrel_lhs *lhs)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    for (int64_t i = row0; i < row0 + m; i++) {
        int8_t *values = lhs->values + i / 2 * 2 * kp + i % 2 * 8;
        float *scales = lhs->scales + i / 2 * 2 * groups + i % 2;
        for (int64_t g = 0; g < groups; g++) {
            int8_t q[GROUP];
            kestrel_lhs one = {q, scales + 2 * g, NULL, GROUP};
            const int64_t begin = g * GROUP, count = k - begin < GROUP ? k - begin : GROUP;
            kestrel_quantize_rows_neon(src + i * src_stride + begin, 0, count, 0, 1, &one);
            for (int64_t j = 0; j < GROUP; j += 8) memcpy(values + (begin + j) * 2, q + j, 8);
        }
    }
}

/* Loads stay where they are written, as in matmul_neon_dotprod.c. */
INLINE int8x16_t load_16(const int8_t *p)
{
    int8x16_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8x16_t *)p));
    return v;
}
/* 32 bytes from p + offset, a constant: the addressing mode, no register (post-index is two operations more a load). */
INLINE void load_32(const int8_t *p, int offset, int8x16_t v[2])
{
    const int8x16_t *m = (const int8x16_t *)(p + offset);
    __asm__ volatile("ldp %q0, %q1, [%2, %3]" : "=w"(v[0]), "=w"(v[1]) : "r"(p), "i"(offset), "m"(m[0]), "m"(m[1]));
}
INLINE float32x4_t load_scales(const float *p)
{
    float32x4_t v;
    __asm__ volatile("ldr %d0, %1" : "=w"(v) : "m"(*(const float (*)[2])p));
    return v;
}
INLINE void load_sums(int32x4_t c[2], int32_t type)
{
    if (type == KESTREL_INT4) __asm__ volatile("ldp %q0, %q1, %2" : "=w"(c[0]), "=w"(c[1]) : "Q"(magic_bits_int4));
    else __asm__ volatile("ldp %q0, %q1, %2" : "=w"(c[0]), "=w"(c[1]) : "Q"(magic_bits));
}
INLINE float32x4_t magic_of(int32_t type) { return vdupq_n_f32(type == KESTREL_INT4 ? MAGIC_INT4 : ROUND_MAGIC); }
INLINE int64_t group_bytes(int32_t type) { return type == KESTREL_INT4 ? GROUP * PANEL / 2 : GROUP * PANEL; }
INLINE void prefetch_group(const int8_t *w, int32_t type)
{
    UNROLL
    for (int j = 0; j < group_bytes(type); j += 64) __builtin_prefetch(w + AHEAD + j);
}
/* 8 k of 8 rows as they lie j k into a group: a the first 4 k, b the next; int4's times 16. */
INLINE void load_rows(const int8_t *w, int j, int32_t type, int8x16_t mask, int8x16_t a[2], int8x16_t b[2])
{
    if (type == KESTREL_INT4) {
        load_32(w, j * PANEL / 2, b);
        __asm__ volatile("shl %0.16b, %2.16b, #4\n\tshl %1.16b, %3.16b, #4\n\tand %2.16b, %2.16b, %4.16b\n\tand %3.16b, %3.16b, %4.16b"
                         : "=&w"(a[0]), "=&w"(a[1]), "+w"(b[0]), "+w"(b[1]) : "w"(mask));
    } else {
        load_32(w, j * PANEL, a);
        load_32(w, j * PANEL + 32, b);
    }
}

/* --- few rows: sdot ---------------------------------------------------------------------------------------------- */

/* c[t] += 4 k of 8 rows, a[0] and a[1], by the lane of the token in v[t / 2]: `even` of the pair's first, `odd` of its second. */
#define DOTS(c, a, v, even, odd)                                                                                        \
    UNROLL for (int t = 0; t < tokens; t++) {                                                                           \
        if (t % 2) {                                                                                                    \
            __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #odd "]" : "+w"(c[t][0]) : "w"(a[0]), "w"(v[t / 2]));         \
            __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #odd "]" : "+w"(c[t][1]) : "w"(a[1]), "w"(v[t / 2]));         \
        } else {                                                                                                        \
            __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #even "]" : "+w"(c[t][0]) : "w"(a[0]), "w"(v[t / 2]));        \
            __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #even "]" : "+w"(c[t][1]) : "w"(a[1]), "w"(v[t / 2]));        \
        }                                                                                                               \
    }

/* All of lhs, 1 to 2 * FEW rows: 16 bytes hold k 0..3, 4..7 of a pair's first token in lanes 0, 1, of its second in lanes 2, 3. */
INLINE void few_rows(const uint8_t *panel, const kestrel_lhs *lhs, float *dst, int64_t dst_stride, int tokens, int32_t type)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float16_t *scale_w = (const float16_t *)panel;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp), *x = lhs->values;
    const float *scale_x = lhs->scales;
    const float32x4_t magic = magic_of(type);
    const int8x16_t mask = vdupq_n_s8((int8_t)0xf0);
    float32x4_t acc[2 * FEW][2];
    UNROLL
    for (int t = 0; t < tokens; t++) acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    for (int64_t g = 0; g < groups; g++, w += group_bytes(type), x += GROUP * 2) {
        prefetch_group(w, type);
        int32x4_t c[2 * FEW][2];
        int8x16_t a[2], b[2], v[FEW];
        UNROLL
        for (int t = 0; t < tokens; t++) load_sums(c[t], type);
        UNROLL
        for (int j = 0; j < GROUP; j += 8) {
            UNROLL
            for (int t = 0; t < tokens; t += 2) v[t / 2] = load_16(x + t * kp + j * 2);
            load_rows(w, j, type, mask, a, b);
            DOTS(c, a, v, 0, 2);
            DOTS(c, b, v, 1, 3);
        }
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
        const float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_high_f32_f16(h);
        UNROLL
        for (int t = 0; t < tokens; t++) {
            const float32x2_t s = vget_low_f32(load_scales(scale_x + t / 2 * 2 * groups + 2 * g));
            const float32x4_t s0 = t % 2 ? vmulq_lane_f32(low, s, 1) : vmulq_lane_f32(low, s, 0);
            const float32x4_t s1 = t % 2 ? vmulq_lane_f32(high, s, 1) : vmulq_lane_f32(high, s, 0);
            acc[t][0] = vfmaq_f32(acc[t][0], vsubq_f32(vreinterpretq_f32_s32(c[t][0]), magic), s0);
            acc[t][1] = vfmaq_f32(acc[t][1], vsubq_f32(vreinterpretq_f32_s32(c[t][1]), magic), s1);
        }
    }
    UNROLL
    for (int t = 0; t < tokens; t++) {
        vst1q_f32(dst + t * dst_stride, acc[t][0]);
        vst1q_f32(dst + t * dst_stride + 4, acc[t][1]);
    }
}

/* --- smmla ------------------------------------------------------------------------------------------------------- */

/* Some groups of a panel as smmla reads them: of 8 k, row pairs 0..3; of a group's scales likewise {r0, r1, r0, r1}. */
typedef struct zipped {
    int8_t w[CHUNK * GROUP * PANEL];
    float scales[CHUNK][PANEL / 2][4];
} zipped;

/* Rows' 8 k from 4 k of four rows (a) and the next 4 of the same (b). */
INLINE void zip(int8x16_t a, int8x16_t b, int8x16_t r[2])
{
    r[1] = b;
    __asm__ volatile("zip1 %0.4s, %2.4s, %1.4s\n\tzip2 %1.4s, %2.4s, %1.4s" : "=&w"(r[0]), "+w"(r[1]) : "w"(a));
}

/* One statement for the rows of a pair of tokens, in half_group for a group: of many gcc 12 makes moves. */
INLINE void smmla_4(int32x4_t c[4], int8x16_t x, const int8x16_t w[4])
{
    __asm__ volatile("smmla %0.4s, %4.16b, %5.16b\n\tsmmla %1.4s, %4.16b, %6.16b\n\tsmmla %2.4s, %4.16b, %7.16b\n\tsmmla %3.4s, %4.16b, %8.16b"
        : "+w"(c[0]), "+w"(c[1]), "+w"(c[2]), "+w"(c[3]) : "w"(x), "w"(w[0]), "w"(w[1]), "w"(w[2]), "w"(w[3]));
}

#define HALF_STEP(s)                                                                                                    \
    "ldr q16, [%8, #(64 * " #s ")]\n\tldr q18, [%8, #(64 * " #s " + 32)]\n\tldr q19, [%9, #(16 * " #s ")]\n\t"            \
    "zip1 v17.4s, v16.4s, v18.4s\n\tzip2 v18.4s, v16.4s, v18.4s\n\t"                                                    \
    "ldr q20, [%10, #(16 * " #s ")]\n\tsmmla %0.4s, v19.16b, v17.16b\n\tsmmla %1.4s, v19.16b, v18.16b\n\t"              \
    "ldr q21, [%11, #(16 * " #s ")]\n\tsmmla %2.4s, v20.16b, v17.16b\n\tsmmla %3.4s, v20.16b, v18.16b\n\t"              \
    "ldr q22, [%12, #(16 * " #s ")]\n\tsmmla %4.4s, v21.16b, v17.16b\n\tsmmla %5.4s, v21.16b, v18.16b\n\t"              \
    "smmla %6.4s, v22.16b, v17.16b\n\tsmmla %7.4s, v22.16b, v18.16b\n\t"

/* c = the magic bits + a group of 4 rows of a panel, for 4 pairs whose groups begin at x[p] + offset. */
INLINE void half_group(int32x4_t c[TILE][4], const int8_t *w, const int8_t *const x[TILE], int64_t offset)
{
    _Static_assert(GROUP == 64 && PANEL == 8, "eight steps of 64 bytes");
    __asm__ volatile("ldp %q0, %q1, [%13]\n\tldp %q2, %q3, [%13]\n\tldp %q4, %q5, [%13]\n\tldp %q6, %q7, [%13]\n\t"
        HALF_STEP(0) HALF_STEP(1) HALF_STEP(2) HALF_STEP(3) HALF_STEP(4) HALF_STEP(5) HALF_STEP(6) HALF_STEP(7)
        : "=&w"(c[0][0]), "=&w"(c[0][1]), "=&w"(c[1][0]), "=&w"(c[1][1]), "=&w"(c[2][0]), "=&w"(c[2][1]), "=&w"(c[3][0]), "=&w"(c[3][1])
        : "r"(w), "r"(x[0] + offset), "r"(x[1] + offset), "r"(x[2] + offset), "r"(x[3] + offset), "r"(magic_bits)
        : "v16", "v17", "v18", "v19", "v20", "v21", "v22", "memory");
}

/* acc = fma((float)sum, w * x, acc); pinned: hoisted, its temporaries spill; a sum changed in place is moved first. */
INLINE void add_group(float32x4_t *acc, int32x4_t sum, float32x4_t magic, float32x4_t w, float32x4_t x)
{
    float32x4_t scale, value;
    __asm__ volatile("fsub %0.4s, %1.4s, %2.4s" : "=w"(value) : "w"(sum), "w"(magic));
    __asm__ volatile("fmul %1.4s, %3.4s, %4.4s\n\tfmla %0.4s, %2.4s, %1.4s" : "+w"(*acc), "=&w"(scale) : "w"(value), "w"(w), "w"(x));
}

INLINE void zip_scales(const float16_t *h, int quads, float32x4_t s[4])
{
    UNROLL
    for (int q = 0; q < quads; q++) {
        const float32x4_t f = vcvt_f32_f16(vld1_f16(h + 4 * q));
        s[2 * q] = vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(f), 0));
        s[2 * q + 1] = vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(f), 1));
    }
}

/* As load_rows and zip, but the store zips. st2 wants neighbours among the registers: of its intrinsic gcc makes 33 moves a group. */
INLINE int8_t *zip_store(const int8_t *w, int j, int32_t type, int8x16_t mask, int8_t *to)
{
    if (type == KESTREL_INT4)
        __asm__ volatile("ldp q17, q19, [%1, %2]\n\tshl v16.16b, v17.16b, #4\n\tshl v18.16b, v19.16b, #4\n\t"
                         "and v17.16b, v17.16b, %3.16b\n\tand v19.16b, v19.16b, %3.16b\n\t"
                         "st2 {v16.4s, v17.4s}, [%0], #32\n\tst2 {v18.4s, v19.4s}, [%0], #32"
                         : "+r"(to) : "r"(w), "i"(j * PANEL / 2), "w"(mask) : "v16", "v17", "v18", "v19", "memory");
    else
        __asm__ volatile("ldp q16, q18, [%1, %2]\n\tldp q17, q19, [%1, %3]\n\t"
                         "st2 {v16.4s, v17.4s}, [%0], #32\n\tst2 {v18.4s, v19.4s}, [%0], #32"
                         : "+r"(to) : "r"(w), "i"(j * PANEL), "i"(j * PANEL + 32) : "v16", "v17", "v18", "v19", "memory");
    return to;
}

INLINE void zip_groups(const int8_t *w, const float16_t *scales, int64_t groups, zipped *z, int32_t type)
{
    int8_t *to = z->w;
    const int8x16_t mask = vdupq_n_s8((int8_t)0xf0);
    for (int64_t g = 0; g < groups; g++, w += group_bytes(type)) {
        prefetch_group(w, type);
        UNROLL
        for (int j = 0; j < GROUP; j += 8) to = zip_store(w, j, type, mask, to);
        float32x4_t s[4];
        zip_scales(scales + g * PANEL, 2, s);
        UNROLL
        for (int q = 0; q < 4; q++) vst1q_f32(z->scales[g][q], s[q]);
    }
}

/* `quads` x 4 rows of a panel for `tokens` rows in `pairs` pairs from row (even) on, over groups [begin, end); w and the scales are
 * those of group begin: `z` or, when it is NULL, the panel's. With begin > 0 dst goes on. Of an odd last pair the second is not stored. */
INLINE void tile(const int8_t *w, const float16_t *scale_w, const zipped *z, int64_t begin, int64_t end, const kestrel_lhs *lhs, int64_t row,
    float *dst, int64_t dst_stride, int tokens, int pairs, int quads, int32_t type)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float *scale_z = z ? z->scales[0][0] : NULL;
    const int8_t *x[TILE];
    const float *scale_x[TILE];
    const float32x4_t magic = magic_of(type);
    float32x4_t acc[TILE][4];
    if (z) w = z->w;
    dst += row * dst_stride;
    UNROLL
    for (int p = 0; p < pairs; p++) {
        x[p] = lhs->values + (row + 2 * p) * kp + begin * GROUP * 2;
        scale_x[p] = lhs->scales + (row + 2 * p) * groups + begin * 2;
        UNROLL
        for (int q = 0; q < 2 * quads; q++) {
            const float *out = dst + 2 * p * dst_stride + 2 * q;
            acc[p][q] = begin ? vcombine_f32(vld1_f32(out), vld1_f32(2 * p + 1 < tokens ? out + dst_stride : out)) : vdupq_n_f32(0.0f);
        }
    }
    /* hot loop: one group: exact sums of the rows for all tokens, then one fma each */
    for (int64_t g = 0; g < end - begin; g++, w += GROUP * PANEL) {
        if (!z) prefetch_group(w, type);
        int32x4_t c[TILE][4];
        UNROLL
        for (int p = 0; p < pairs && quads == 2; p++) {
            load_sums(c[p], type);
            load_sums(c[p] + 2, type);
        }
        if (quads == 1) half_group(c, w, x, g * GROUP * 2);
        UNROLL
        for (int j = 0; j < GROUP && quads == 2; j += 8) {
            int8x16_t r[4];
            if (z) {
                load_32(w, j * PANEL, r);
                load_32(w, j * PANEL + 32, r + 2);
            } else {
                int8x16_t a[2], b[2];
                load_32(w, j * PANEL, a);
                load_32(w, j * PANEL + 32, b);
                zip(a[0], b[0], r);
                zip(a[1], b[1], r + 2);
            }
            UNROLL
            for (int p = 0; p < pairs; p++) smmla_4(c[p], load_16(x[p] + (g * GROUP + j) * 2), r);
        }
        float32x4_t s[4];
        if (z) {
            UNROLL
            for (int q = 0; q < 4; q++) s[q] = vreinterpretq_f32_s8(load_16((const int8_t *)(scale_z + (g * 4 + q) * 4)));
        } else zip_scales(scale_w + g * PANEL, quads, s);
        UNROLL
        for (int p = 0; p < pairs; p++) {
            const float32x4_t two = load_scales(scale_x[p] + 2 * g), r = vzip1q_f32(two, two);
            UNROLL
            for (int q = 0; q < 2 * quads; q++) add_group(&acc[p][q], c[p][q], magic, s[q], r);
        }
    }
    UNROLL
    for (int p = 0; p < pairs; p++) {
        UNROLL
        for (int h = 0; h < quads; h++) {
            float *out = dst + 2 * p * dst_stride + 4 * h;
            const float32x4_t *a = acc[p] + 2 * h;
            vst1q_f32(out, vcombine_f32(vget_low_f32(a[0]), vget_low_f32(a[1])));
            if (2 * p + 1 < tokens) vst1q_f32(out + dst_stride, vcombine_f32(vget_high_f32(a[0]), vget_high_f32(a[1])));
        }
    }
}

/* Any number of rows; a chunk of groups, its rows of lhs and the buffer stay in L1; between chunks the accumulators lie in dst. */
INLINE void many_rows(const int8_t *w, const float16_t *scales, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride, int32_t type)
{
    const int64_t groups = lhs->kp / GROUP;
    zipped z;
    for (int64_t begin = 0, end; begin < groups; begin = end) {
        end = begin + CHUNK < groups ? begin + CHUNK : groups;
        zip_groups(w + begin * group_bytes(type), scales + begin * PANEL, end - begin, &z, type);
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i;
            const int tokens = left > 8 ? 6 : left > 6 ? 4 : (int)left;
            switch ((tokens + 1) / 2) {
            case 1: tile(NULL, NULL, &z, begin, end, lhs, i, dst, dst_stride, tokens, 1, 2, type); break;
            case 2: tile(NULL, NULL, &z, begin, end, lhs, i, dst, dst_stride, tokens, 2, 2, type); break;
            default: tile(NULL, NULL, &z, begin, end, lhs, i, dst, dst_stride, tokens, 3, 2, type);
            }
            i += tokens;
        }
    }
}

void kestrel_matmul_int8_neon_i8mm(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP, bytes = panel_bytes(KESTREL_INT8, kp);
    assert(m >= 1 && kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        const float16_t *scales = (const float16_t *)panel;
        const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp);
        float *out = dst + p * PANEL;
        const int rows = m <= 8 ? (int)m : 9;
        switch (rows) {
        case 1: few_rows(panel, lhs, out, dst_stride, 1, KESTREL_INT8); break;
        case 2: few_rows(panel, lhs, out, dst_stride, 2, KESTREL_INT8); break;
        case 3: few_rows(panel, lhs, out, dst_stride, 3, KESTREL_INT8); break;
        case 4: tile(w, scales, NULL, 0, groups, lhs, 0, out, dst_stride, 4, 2, 2, KESTREL_INT8); break;
        case 5:
        case 6: tile(w, scales, NULL, 0, groups, lhs, 0, out, dst_stride, rows, 3, 2, KESTREL_INT8); break;
        case 7:
        case 8:
            tile(w, scales, NULL, 0, groups, lhs, 0, out, dst_stride, rows, 4, 1, KESTREL_INT8);
            tile(w + 16, scales + 4, NULL, 0, groups, lhs, 0, out + 4, dst_stride, rows, 4, 1, KESTREL_INT8);
            break;
        default: many_rows(w, scales, lhs, m, out, dst_stride, KESTREL_INT8);
        }
    }
}

void kestrel_matmul_int4_neon_i8mm(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    const int64_t kp = lhs->kp, bytes = panel_bytes(KESTREL_INT4, kp);
    assert(m >= 1 && kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        switch (m) {
        case 1: few_rows(panel, lhs, out, dst_stride, 1, KESTREL_INT4); break;
        case 2: few_rows(panel, lhs, out, dst_stride, 2, KESTREL_INT4); break;
        case 3: few_rows(panel, lhs, out, dst_stride, 3, KESTREL_INT4); break;
        default: many_rows((const int8_t *)panel + panel_scale_bytes(kp), (const float16_t *)panel, lhs, m, out, dst_stride, KESTREL_INT4);
        }
    }
}
