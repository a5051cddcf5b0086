/* The bounds that exp.h states, measured; and half.h's conversions for an outside check. SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#include "checkasm.h"
#include "half.h"
#include <float.h>
#include <stdio.h>

static int failed;

static void report(const char *what, double worst, double at, double bound, const char *unit)
{
    const bool ok = worst <= bound;
    printf("%-10s worst %.3g %s at %.17g, bound %.3g %s\n", what, worst, unit, at, bound, ok ? "ok" : "FAILED");
    failed |= !ok;
}

static void equal(const char *what, double got, double want)
{
    const bool ok = got == want && signbit(got) == signbit(want);
    printf("%-34s %.17g %s\n", what, got, ok ? "ok" : "FAILED");
    failed |= !ok;
}

/* Distance in units of the last place of the exact value y in a format of `digits` bits. */
static double ulps(long double got, long double y, int digits)
{
    int e;
    frexpl(y, &e);
    return (double)(fabsl(got - y) / ldexpl(1, e - digits));
}

static void measure_expf(int64_t stride)
{
    double worst = 0, at = 0;
    for (int64_t u = stride - 1; u <= 0x42b00000; u += stride) { /* positive floats up to 88 */
        const float x = kestrel_bits_f32((uint32_t)u);
        const double off = ulps(kestrel_expf(x), expl((long double)x), FLT_MANT_DIG);
        if (off > worst) { worst = off; at = x; }
        if (x > 87) continue;
        const double below = ulps(kestrel_expf(-x), expl((long double)-x), FLT_MANT_DIG);
        if (below > worst) { worst = below; at = -x; }
    }
    report("expf", worst, at, 1.1, "ulp");
    equal("expf(0)", kestrel_expf(0.0f), 1);
    equal("expf(-0)", kestrel_expf(-0.0f), 1);
    equal("expf(just below -87)", kestrel_expf(nextafterf(-87.0f, -88.0f)), 0);
    equal("expf(-inf)", kestrel_expf(-INFINITY), 0);
    equal("expf(inf) - expf(88)", kestrel_expf(INFINITY) - kestrel_expf(88.0f), 0);
    equal("expf(nextafter 88) - expf(88)", kestrel_expf(nextafterf(88.0f, 89.0f)) - kestrel_expf(88.0f), 0);
}

static void measure_f64(int64_t count)
{
    double worst[4] = {0}, at[4] = {0};
    random_seed(1);
    for (int64_t i = 0; i < count; i++) {
        const double unit = (double)(random_bits() >> 11) * 0x1p-53;
        const double x = i % 2 ? (unit - 0.5) * 1400 : (unit - 0.5) * ldexp(1, -(int)(i % 40)); /* all of the range, and dense at 0 */
        const double positive = kestrel_bits_f64((random_bits() >> 12) | (uint64_t)(i % 3 ? 1023 + random_below(7) - 3 : 1 + random_below(2046)) << 52);
        const double angle = (unit - 0.5) * (i % 2 ? 2097152.0 : 20.0);
        double sine, cosine;
        kestrel_sincos(angle, &sine, &cosine);
        const double off[4] = {ulps(kestrel_exp(x), expl((long double)x), DBL_MANT_DIG), ulps(kestrel_log(positive), logl((long double)positive), DBL_MANT_DIG),
                               (double)fabsl(sine - sinl((long double)angle)), (double)fabsl(cosine - cosl((long double)angle))};
        const double input[4] = {x, positive, angle, angle};
        for (int j = 0; j < 4; j++)
            if (off[j] > worst[j]) { worst[j] = off[j]; at[j] = input[j]; }
    }
    report("exp", worst[0], at[0], 1, "ulp");
    report("log", worst[1], at[1], 2, "ulp");
    report("sin", worst[2], at[2], 2e-16, "absolute");
    report("cos", worst[3], at[3], 2e-16, "absolute");
    double sine, cosine;
    kestrel_sincos(0, &sine, &cosine);
    equal("sin(0)", sine, 0);
    equal("cos(0)", cosine, 1);
    equal("exp(0)", kestrel_exp(0), 1);
    equal("exp(-701)", kestrel_exp(-701), 0);
    equal("exp(1000) - exp(700)", kestrel_exp(1000) - kestrel_exp(700), 0);
    equal("exp(NaN)", kestrel_exp(NAN), 0);
    equal("log(1)", kestrel_log(1), 0);
}

int measure_exp(int64_t stride)
{
    if (stride < 1) return 2;
    measure_expf(stride);
    measure_f64(stride > 5000 ? 20000 : 400000); /* binary128 libm in software is slow */
    return failed;
}

/* The CPU's conversions against the integer steps: all halves, every 509th float below 65504 of both signs. */
static int compare_half(void)
{
    long different = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        const float got = kestrel_f16_to_f32((uint16_t)h), want = kestrel_f16_to_f32_steps((uint16_t)h);
        different += got != got ? want == want : kestrel_f32_bits(got) != kestrel_f32_bits(want);
    }
    long floats = 0;
    for (uint32_t u = 0; u < 0x477fe000u; u += 509, floats += 2)
        for (uint32_t sign = 0; sign < 2; sign++) {
            const float x = kestrel_bits_f32(u | sign << 31);
            different += kestrel_f32_to_f16(x) != kestrel_f32_to_f16_steps(x);
        }
    printf("65536 halves, %ld floats: %ld different\n", floats, different);
    return different != 0;
}

int convert_half(const char *direction)
{
    if (!strcmp(direction, "compare")) return compare_half();
    if (!strcmp(direction, "widen")) {
        for (uint32_t h = 0; h < 65536; h++) {
            const float x = kestrel_f16_to_f32((uint16_t)h);
            if (fwrite(&x, 4, 1, stdout) != 1) return 2;
        }
        return 0;
    }
    if (strcmp(direction, "narrow")) return 2;
    float x;
    while (fread(&x, 4, 1, stdin) == 1) {
        const uint16_t h = kestrel_f32_to_f16(x);
        if (fwrite(&h, 2, 1, stdout) != 1) return 2;
    }
    return 0;
}
