/* Our own exp, log, sin, cos: libm's differ between CPUs and versions; these are fixed sequences of exactly rounded steps.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Bounds, measured by tests/test_exp.py against 80-bit libm / integer grids (worst input beside them):
 *   kestrel_expf   <= 1.1 ulp over [-87, 88], all 2^32 inputs walked by stride; exp(0) = 1 exactly; below -87: 0; above 88: exp(88).
 *   kestrel_exp    <= 1 ulp over [-700, 700]; kestrel_log <= 2 ulp over normal x > 0 (1.88 at 0.68606773506682661); sincos: 2e-16 absolute for |x| < 2^20.
 * Sources: Cody & Waite argument reduction; expf coefficients from Cephes (S. Moshier, netlib), the others are Taylor's.
 */
#ifndef KESTREL_EXP_H
#define KESTREL_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPF_LOW -87.0f
#define EXPF_HIGH 88.0f
#define EXPF_LOG2E 1.44269504088896341f
#define ROUND_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, half to even, which the low bits then hold */
#define ROUND_BITS 0x4b400000u  /* the magic number itself: what to take off those bits */
#define EXPF_LN2_HI 0.693359375f
#define EXPF_LN2_LO -2.12194440e-4f
#define EXPF_C0 1.9875691500e-4f
#define EXPF_C1 1.3981999507e-3f
#define EXPF_C2 8.3334519073e-3f
#define EXPF_C3 4.1665795894e-2f
#define EXPF_C4 1.6666665459e-1f
#define EXPF_C5 5.0000001201e-1f

static inline float kestrel_bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t kestrel_f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* NaN gives 0, without a trap. */
static inline float kestrel_expf(float x0)
{
    float x = x0 > EXPF_LOW ? x0 : EXPF_LOW;
    x = x < EXPF_HIGH ? x : EXPF_HIGH;
    const float t = fmaf(x, EXPF_LOG2E, ROUND_MAGIC), n = t - ROUND_MAGIC;
    const float r = fmaf(n, -EXPF_LN2_LO, fmaf(n, -EXPF_LN2_HI, x));
    float p = EXPF_C0;
    p = fmaf(p, r, EXPF_C1);
    p = fmaf(p, r, EXPF_C2);
    p = fmaf(p, r, EXPF_C3);
    p = fmaf(p, r, EXPF_C4);
    p = fmaf(p, r, EXPF_C5);
    p = fmaf(p, r * r, r) + 1.0f;
    const uint32_t keep = 0u - (uint32_t)(x0 >= EXPF_LOW); /* a mask, not a branch: the compiler can vectorise it */
    return kestrel_bits_f32((kestrel_f32_bits(p) + (kestrel_f32_bits(t) << 23)) & keep);
}

static inline double kestrel_bits_f64(uint64_t u) { double f; memcpy(&f, &u, 8); return f; }
static inline uint64_t kestrel_f64_bits(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }

#define LN2_HI 6.93147180369123816490e-01 /* 32 bits */
#define LN2_LO 1.90821492927058770002e-10

/* Below -700: 0. Above 700: exp(700). */
static inline double kestrel_exp(double x)
{
    const int tiny = !(x >= -700.0); /* no branches: loops over it can be vectorised */
    x = tiny ? -700.0 : x > 700.0 ? 700.0 : x;
    const double magic = 6755399441055744.0, t = fma(x, 1.44269504088896338700, magic), n = t - magic;
    const double r = fma(n, -LN2_LO, fma(n, -LN2_HI, x));
    double p = fma(fma(1.0 / 6227020800.0, r, 1.0 / 479001600.0), r, 1.0 / 39916800.0);
    p = fma(fma(fma(p, r, 1.0 / 3628800.0), r, 1.0 / 362880.0), r, 1.0 / 40320.0);
    p = fma(fma(fma(p, r, 1.0 / 5040.0), r, 1.0 / 720.0), r, 1.0 / 120.0);
    p = fma(fma(fma(p, r, 1.0 / 24.0), r, 1.0 / 6.0), r, 0.5);
    p = fma(p, r * r, r) + 1.0;
    const double value = kestrel_bits_f64(kestrel_f64_bits(p) + (kestrel_f64_bits(t) << 52));
    return tiny ? 0.0 : value;
}

/* x > 0, normal, finite. */
static inline double kestrel_log(double x)
{
    const uint64_t u = kestrel_f64_bits(x);
    int e = (int)(u >> 52) - 1023;
    double m = kestrel_bits_f64((u & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.41421356237309514547) { m *= 0.5; e += 1; }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 27.0;
    for (int i = 25; i >= 3; i -= 2) p = fma(p, z, 1.0 / i);
    const double log_m = fma(2.0 * s * z, p, 2.0 * s);
    return fma((double)e, LN2_HI, fma((double)e, LN2_LO, log_m));
}

/* |x| < 2^20. */
static inline void kestrel_sincos(double x, double *sine, double *cosine)
{
    const double magic = 6755399441055744.0, t = fma(x, 0.63661977236758134308, magic), n = t - magic;
    double r = fma(n, -1.57079632679489655800e+00, x);
    r = fma(n, -6.12323399573676603587e-17, r);
    const double z = r * r;
    double s = -1.0 / 1307674368000.0, c = 1.0 / 20922789888000.0;
    s = fma(s, z, 1.0 / 6227020800.0);
    s = fma(s, z, -1.0 / 39916800.0);
    s = fma(s, z, 1.0 / 362880.0);
    s = fma(s, z, -1.0 / 5040.0);
    s = fma(s, z, 1.0 / 120.0);
    s = fma(s, z, -1.0 / 6.0);
    s = fma(s * z, r, r);
    c = fma(c, z, -1.0 / 87178291200.0);
    c = fma(c, z, 1.0 / 479001600.0);
    c = fma(c, z, -1.0 / 3628800.0);
    c = fma(c, z, 1.0 / 40320.0);
    c = fma(c, z, -1.0 / 720.0);
    c = fma(c, z, 1.0 / 24.0);
    c = fma(c, z, -0.5);
    c = fma(c, z, 1.0);
    switch (kestrel_f64_bits(t) & 3) {
    case 0: *sine = s; *cosine = c; break;
    case 1: *sine = c; *cosine = -s; break;
    case 2: *sine = -s; *cosine = -c; break;
    default: *sine = -c; *cosine = s;
    }
}

#endif
