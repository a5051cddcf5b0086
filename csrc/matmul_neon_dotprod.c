/* matmul_int8 and matmul_int4, Armv8.2 dotprod: sdot by lane. Contract in kernels.h. SPDX-License-Identifier: Apache-2.0
 *
 * One sdot takes 4 rows x 4 k of a panel (16 bytes as they lie) and 4 k of a token, picked by lane from 16 k. Lanes are rows, so the
 * order of float operations of an output is the contract's whatever the tile. Five tokens fill the register file (10 sums, 10
 * accumulators, 5 tokens, 4 weights, 1 constant); 8 rows x 8 tokens as two halves of the rows loads too much (62 % of peak).
 * int4: a byte's high half is 16 q as it stands, its low half after a shift by four; sums are 16 times as large. N1's
 * model, 1 to 5 tokens: 43, 57, 64, 64, 70 % of 32 MAC/cycle (shl has one pipe of the two that sdot has). */
#include "kernels.h"
#include "simd_neon.h"
#include <assert.h>

enum { TILE = 5, AHEAD = 1536 /* bytes: past a DRAM latency at the stream's pace */ };

/* Sums start at the bits of 1.5 * 2^23: read as a float they then are 1.5 * 2^23 + sum, exactly (|sum| < 2^22), and one subtraction
 * converts. scvtf occupies its one pipe for two cycles, a mov to clear a register a slot of either: the constant is loaded. */
static const int32_t magic_bits[8] = {ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS, ROUND_BITS};
/* 1.5 * 2^19, of which 16 q x is q x units: the sixteenth costs nothing. */
#define MAGIC_INT4 786432.0f
static const int32_t magic_bits_int4[8] = {0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000, 0x49400000};
_Static_assert(127 * 127 * GROUP < 1 << 22 && 8 * 127 * GROUP < 1 << 18, "a group's sum must stay below a third of the magic number");

/* Loads stay where they are written: left to itself gcc 12 hoists them over the register file and spills (52 % of peak at 4 tokens). */
INLINE int8x16_t load_16(const int8_t *p)
{
    int8x16_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8x16_t *)p));
    return v;
}
INLINE const int8_t *load_32(const int8_t *p, int8x16_t v[2])
{
    __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(v[0]), "=w"(v[1]), "+r"(p) : "m"(*(const int8_t (*)[32])p));
    return p;
}
INLINE void load_sums(int32x4_t c[2], const int32_t (*bits)[8])
{
    __asm__ volatile("ldp %q0, %q1, %2" : "=w"(c[0]), "=w"(c[1]) : "Q"(*bits));
}
INLINE int64_t group_bytes(int32_t type) { return type == KESTREL_INT4 ? GROUP * PANEL / 2 : GROUP * PANEL; }
/* 8 k of 8 rows of int4, times 16: low takes the first 4 k, high, which comes in as the bytes, the next. */
INLINE void split(int8x16_t low[2], int8x16_t high[2], int8x16_t mask)
{
    __asm__ volatile("shl %0.16b, %2.16b, #4\n\tshl %1.16b, %3.16b, #4\n\tand %2.16b, %2.16b, %4.16b\n\tand %3.16b, %3.16b, %4.16b"
                     : "=&w"(low[0]), "=&w"(low[1]), "+w"(high[0]), "+w"(high[1]) : "w"(mask));
}
INLINE float32x2_t load_scale(const float *p)
{
    float32x2_t v;
    __asm__ volatile("ldr %s0, %1" : "=w"(v) : "m"(*p));
    return v;
}

/* c[t] += 4 k of 8 rows, a[0] and a[1], by the token's `lane`. */
#define DOTS(c, a, v, lane)                                                                                             \
    UNROLL for (int t = 0; t < tokens; t++) {                                                                           \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(c[t][0]) : "w"(a[0]), "w"(v[t]));                \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(c[t][1]) : "w"(a[1]), "w"(v[t]));                \
    }

INLINE void tile(const uint8_t *panel, const kestrel_lhs *lhs, int64_t row, float *dst, int64_t dst_stride, int tokens, int32_t type)
{
    const int64_t kp = lhs->kp, groups = kp / GROUP;
    const float16_t *scale_w = (const float16_t *)panel;
    const int8_t *w = (const int8_t *)panel + panel_scale_bytes(kp), *x[TILE];
    const float *scale_x[TILE];
    const float32x4_t magic = vdupq_n_f32(type == KESTREL_INT4 ? MAGIC_INT4 : ROUND_MAGIC);
    const int8x16_t mask = vdupq_n_s8((int8_t)0xf0);
    float32x4_t acc[TILE][2];
    UNROLL
    for (int t = 0; t < tokens; t++) {
        x[t] = lhs->values + (row + t) * kp;
        scale_x[t] = lhs->scales + (row + t) * groups;
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    /* hot loop: one group: exact sums of 8 rows for all tokens, then one fma each */
    for (int64_t g = 0; g < groups; g++) {
        UNROLL
        for (int j = 0; j < group_bytes(type); j += 64) __builtin_prefetch(w + AHEAD + j);
        int32x4_t c[TILE][2];
        int8x16_t v[TILE], a[2], b[2];
        UNROLL
        for (int t = 0; t < tokens; t++) load_sums(c[t], type == KESTREL_INT4 ? &magic_bits_int4 : &magic_bits);
        UNROLL
        for (int j = 0; j < GROUP; j += 16) {
            if (type == KESTREL_INT4) {
                w = load_32(w, b);
                UNROLL
                for (int t = 0; t < tokens; t++) v[t] = load_16(x[t] + g * GROUP + j);
                split(a, b, mask);
                DOTS(c, a, v, 0);
                DOTS(c, b, v, 1);
                w = load_32(w, b);
                split(a, b, mask);
                DOTS(c, a, v, 2);
                DOTS(c, b, v, 3);
                continue;
            }
            w = load_32(w, a);
            UNROLL
            for (int t = 0; t < tokens; t++) v[t] = load_16(x[t] + g * GROUP + j);
            w = load_32(w, b);
            DOTS(c, a, v, 0);
            w = load_32(w, a);
            DOTS(c, b, v, 1);
            w = load_32(w, b);
            DOTS(c, a, v, 2);
            DOTS(c, b, v, 3);
        }
        const float16x8_t h = vld1q_f16(scale_w + g * PANEL);
        const float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_high_f32_f16(h);
        float32x2_t s[TILE];
        UNROLL
        for (int t = 0; t < tokens; t++) s[t] = load_scale(scale_x[t] + g);
        UNROLL
        for (int t = 0; t < tokens; t++) {
            acc[t][0] = vfmaq_f32(acc[t][0], vsubq_f32(vreinterpretq_f32_s32(c[t][0]), magic), vmulq_lane_f32(low, s[t], 0));
            acc[t][1] = vfmaq_f32(acc[t][1], vsubq_f32(vreinterpretq_f32_s32(c[t][1]), magic), vmulq_lane_f32(high, s[t], 0));
        }
    }
    UNROLL
    for (int t = 0; t < tokens; t++) {
        vst1q_f32(dst + (row + t) * dst_stride, acc[t][0]);
        vst1q_f32(dst + (row + t) * dst_stride + 4, acc[t][1]);
    }
}

INLINE void walk(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride, int32_t type)
{
    const int64_t bytes = panel_bytes(type, lhs->kp);
    assert(m >= 1 && lhs->kp % GROUP == 0);
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *panel = (const uint8_t *)data + p * bytes;
        float *out = dst + p * PANEL;
        for (int64_t i = 0; i < m;) {
            const int64_t left = m - i, tokens = left == 5 ? 5 : left == 6 || left == 3 ? 3 : left < 4 ? left : 4;
            switch (tokens) {
            case 1: tile(panel, lhs, i, out, dst_stride, 1, type); break;
            case 2: tile(panel, lhs, i, out, dst_stride, 2, type); break;
            case 3: tile(panel, lhs, i, out, dst_stride, 3, type); break;
            case 4: tile(panel, lhs, i, out, dst_stride, 4, type); break;
            default: tile(panel, lhs, i, out, dst_stride, 5, type);
            }
            i += tokens;
        }
    }
}

void kestrel_matmul_int8_neon_dotprod(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT8);
}

void kestrel_matmul_int4_neon_dotprod(const void *data, int64_t panels, const kestrel_lhs *lhs, int64_t m, float *dst, int64_t dst_stride)
{
    walk(data, panels, lhs, m, dst, dst_stride, KESTREL_INT4);
}
