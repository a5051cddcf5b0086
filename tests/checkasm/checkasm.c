/* checkasm: command line, the walk over the menu, traps turned into failures. SPDX-License-Identifier: Apache-2.0
 *
 *     checkasm [--op OP] [--variant NAME] [--seed N]     test; one line per op x variant, then "N passed, N failed"
 *     checkasm --bench [OP] [--threads N]                time the same entries
 *     checkasm --list | --exp [STRIDE] | --half widen|narrow|compare
 */
#define _DEFAULT_SOURCE
#include "checkasm.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const struct { const char *op; check_fn *check, *bench; } families[] = {
    {"quantize_rows", check_quantize_rows, bench_quantize_rows},
    {"matmul_int8", check_matmul_int8, bench_matmul_int8},
    {"matmul_int4", check_matmul_int4, bench_matmul_int4},
    {"matmul_f32", check_matmul_f32, bench_matmul_f32},
    {"norm", check_norm, bench_norm},
    {"rope", check_rope, bench_rope},
    {"silu_multiply", check_silu_multiply, bench_silu_multiply},
    {"gelu_multiply", check_gelu_multiply, bench_gelu_multiply},
    {"attention_span", check_attention_span, bench_attention_span},
    {"attention_merge", check_attention_merge, bench_attention_merge},
    {"attention_finish", check_attention_finish, bench_attention_finish},
};

static const kestrel_variant *running;
static char case_name[256];
static long cases, failed_cases;
static bool case_failed;
static sigjmp_buf trap;

void check_case(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(case_name, sizeof case_name, format, args);
    va_end(args);
    cases++;
    case_failed = false;
}

void check_fail(const char *format, ...)
{
    if (case_failed) return; /* the first reason of a case is enough */
    case_failed = true;
    if (failed_cases++ >= 5) return;
    printf("FAIL %s %s [%s]: ", running->op, running->name, case_name);
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

bool check_same(const char *what, const void *got, const void *want, size_t count, size_t size)
{
    if (!memcmp(got, want, count * size)) return true;
    const unsigned char *a = got, *b = want;
    size_t i = 0;
    while (!memcmp(a + i * size, b + i * size, size)) i++;
    uint64_t x = 0, y = 0;
    memcpy(&x, a + i * size, size < 8 ? size : 8);
    memcpy(&y, b + i * size, size < 8 ? size : 8);
    check_fail("%s element %zu of %zu: got 0x%llx, expected 0x%llx", what, i, count, (unsigned long long)x, (unsigned long long)y);
    return false;
}

bool check_same_floats(const char *what, const float *got, const float *want, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!memcmp(got + i, want + i, 4) || (got[i] != got[i] && want[i] != want[i])) continue;
        check_fail("%s element %zu of %zu: got %a, expected %a", what, i, count, (double)got[i], (double)want[i]);
        return false;
    }
    return true;
}

bool check_near(const char *what, int64_t index, double got, double want, double bound)
{
    const double off = got > want ? got - want : want - got;
    if (off <= bound) return true;
    check_fail("%s element %lld: got %.9g, float64 says %.9g, bound %.3g", what, (long long)index, got, want, bound);
    return false;
}

void check_end_case(void)
{
    const char *damage = buffers_damage();
    if (damage) check_fail("%s", damage);
    buffers_free();
}

static uint64_t random_state = 1;
void random_seed(uint64_t seed) { random_state = seed * 0x9e3779b97f4a7c15ull | 1; }
uint64_t random_bits(void) /* xorshift64*, Vigna 2016 */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}
int64_t random_below(int64_t n) { return (int64_t)((random_bits() >> 32) * (uint64_t)n >> 32); }
float random_float(void) { return (float)(int32_t)(random_bits() >> 40) * 0x1p-23f - 1.0f; }

bool is_portable(const kestrel_variant *v) { return !strcmp(v->name, "portable"); }
bool is_emulated(void) { const char *e = getenv("KESTREL_CHECKASM_SMALL"); return e && *e == '1'; }

static void on_trap(int signal) { siglongjmp(trap, signal); }

static void catch_traps(void)
{
    const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    struct sigaction action = {.sa_handler = on_trap};
    for (int i = 0; i < 4; i++) sigaction(signals[i], &action, NULL);
}

static bool check_variant(const kestrel_variant *v, check_fn *check, uint64_t seed)
{
    running = v;
    cases = failed_cases = 0;
    random_seed(seed);
    const int signal = sigsetjmp(trap, 1);
    if (signal == 0) check(v);
    else {
        case_failed = false;
        check_fail("signal %d (%s)", signal, strsignal(signal));
        buffers_free();
    }
    const bool ok = failed_cases == 0 && cases > 0;
    printf("%-17s %-13s %6ld cases %s", v->op, v->name, cases, ok ? "ok" : "FAILED");
    if (failed_cases) printf(" (%ld)", failed_cases);
    printf("\n");
    fflush(stdout);
    return ok;
}

int main(int argc, char **argv)
{
    const char *only = NULL, *variant = NULL;
    bool bench = false, list = false;
    uint64_t seed = 1;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *next = i + 1 < argc && argv[i + 1][0] != '-' ? argv[i + 1] : NULL;
        if (!strcmp(a, "--bench")) { bench = true; if (next) { only = next; i++; } }
        else if (!strcmp(a, "--list")) list = true;
        else if (!strcmp(a, "--exp")) return measure_exp(next ? atoll(next) : 509);
        else if (!strcmp(a, "--half") && next) return convert_half(next);
        else if (!strcmp(a, "--op") && next) { only = next; i++; }
        else if (!strcmp(a, "--variant") && next) { variant = next; i++; }
        else if (!strcmp(a, "--seed") && next) { seed = strtoull(next, NULL, 0); i++; }
        else if (!strcmp(a, "--threads") && next) { bench_threads = atoi(next); i++; }
        else { fprintf(stderr, "checkasm: unknown argument %s\n", a); return 2; }
    }
    const uint32_t cpu = kestrel_cpu_isa();
    int passed = 0, failed = 0, met = 0;
    if (!bench && !list) {
        printf("checkasm: seed %llu\n", (unsigned long long)seed);
#if !defined(__SANITIZE_ADDRESS__)
        catch_traps(); /* the sanitizer reports a trap better than we do */
#endif
    }
    for (int f = 0; f < (int)(sizeof families / sizeof *families); f++) {
        for (int i = 0; i < kestrel_menu_length; i++) {
            const kestrel_variant *v = &kestrel_menu[i];
            if (strcmp(v->op, families[f].op)) continue;
            met++;
            if ((only && strcmp(only, v->op)) || (variant && strcmp(variant, v->name))) continue;
            const bool usable = (v->required & ~cpu) == 0;
            if (list) { printf("%s %s%s\n", v->op, v->name, usable ? "" : " (not on this CPU)"); passed++; continue; }
            if (!usable) { printf("%-17s %-13s not on this CPU\n", v->op, v->name); continue; }
            if (bench) { families[f].bench(v); passed++; continue; }
            if (check_variant(v, families[f].check, seed)) passed++;
            else failed++;
        }
    }
    if (met != kestrel_menu_length) { printf("FAIL: %d of the menu's %d variants have a test\n", met, kestrel_menu_length); failed++; }
    if (passed + failed == 0) { fprintf(stderr, "checkasm: nothing matches\n"); return 2; }
    if (!bench && !list) printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
