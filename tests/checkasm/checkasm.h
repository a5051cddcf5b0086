/* checkasm: each variant of each op on the kernel menu against the portable one. SPDX-License-Identifier: Apache-2.0
 *
 * One file per op family; a family gives a test and a bench over the same entries of kestrel_menu, so that the two cannot drift.
 * Inputs and outputs lie in guarded buffers (buffer.c): PROT_NONE pages at both ends, canaries in the rest of the mapping.
 */
#ifndef CHECKASM_H
#define CHECKASM_H

#include "exp.h"
#include "kernels.h"

/* --- buffer.c: everything made here lives until buffers_free() ------------------------------------------------ */

enum { AT_HEAD, AT_TAIL, PLACES }; /* data flush with the lower guard page, or with the upper one (as far as `align` allows) */

void *buffer_new(size_t bytes, size_t align, int place, int fill);
void buffer_seal(const void *data);     /* from now on a write to it traps */
const char *buffers_damage(void);       /* NULL, or which canary is gone */
void buffers_free(void);

/* --- checkasm.c: the running case, random numbers, comparing ------------------------------------------------------- */

/* Names the case that runs next: what a failure or a trap is reported as. */
void check_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Bytes equal? If not: fails the case, naming the first different element of `size` bytes. */
bool check_same(const char *what, const void *got, const void *want, size_t count, size_t size);
/* Floats equal in bits, any NaN equal to any NaN (payloads are no part of a contract). */
bool check_same_floats(const char *what, const float *got, const float *want, size_t count);
/* |got - want| <= bound: the suite's only tolerance, portable against a float64 statement. */
bool check_near(const char *what, int64_t index, double got, double want, double bound);
/* Canaries of all live buffers, then frees them. */
void check_end_case(void);

void random_seed(uint64_t seed);
uint64_t random_bits(void);
int64_t random_below(int64_t n);        /* 0 .. n - 1 */
float random_float(void);               /* [-1, 1) */

bool is_portable(const kestrel_variant *v);
bool is_emulated(void);                 /* KESTREL_CHECKASM_SMALL=1: fewer large shapes */

/* --- bench.c ----------------------------------------------------------------------------------------------------------- */

typedef void bench_body(void *context, int thread, int threads);
/* Best nanoseconds of body over all threads, and of a read-only pass over [data, bytes) taken between the same runs (0 if none). */
typedef struct bench_time { double ns, probe_ns; } bench_time;
bench_time bench_run(bench_body *body, void *context, const void *data, size_t bytes);
/* One row. macs and bytes per call; probe GB/s 0: not a memory-bound row. */
void bench_row(const kestrel_variant *v, const char *shape, bench_time t, double macs, double bytes);
void *bench_memory(size_t bytes);       /* zeroed; stays until exit */
extern int bench_threads;

/* --- the families -------------------------------------------------------------------------------------------------------- */

typedef void check_fn(const kestrel_variant *v);
check_fn check_matmul_int8, bench_matmul_int8, check_matmul_int4, bench_matmul_int4, check_matmul_f32, bench_matmul_f32;
check_fn check_quantize_rows, bench_quantize_rows;
check_fn check_attention_span, bench_attention_span, check_attention_merge, bench_attention_merge, check_attention_finish, bench_attention_finish;
check_fn check_norm, bench_norm, check_rope, bench_rope, check_silu_multiply, bench_silu_multiply, check_gelu_multiply, bench_gelu_multiply;

int measure_exp(int64_t stride);        /* exp.c: prints the measured bounds of exp.h; 1 if one is exceeded */
int convert_half(const char *direction); /* exp.c: "widen": all 65536 halves to stdout; "narrow": f32 from stdin to f16 on stdout; "compare" */

#endif
