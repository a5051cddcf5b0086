/* The menu: per op the variants oldest to newest. The last one whose required set is usable wins. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"
#include <string.h>

#define ENTRY(op, variant, required) {#op, #variant, required, (kestrel_any_fn *)kestrel_##op##_##variant}
const kestrel_variant kestrel_menu[] = {
    ENTRY(quantize_rows, portable, 0),
    ENTRY(matmul_int8, portable, 0),
    ENTRY(matmul_int4, portable, 0),
    ENTRY(matmul_f32, portable, 0),
    ENTRY(norm, portable, 0),
    ENTRY(rope, portable, 0),
    ENTRY(silu_multiply, portable, 0),
    ENTRY(gelu_multiply, portable, 0),
    ENTRY(attention_span, portable, 0),
    ENTRY(attention_merge, portable, 0),
    ENTRY(attention_finish, portable, 0),
#ifdef KESTREL_HAVE_NEON
    ENTRY(quantize_rows, neon, ISA_NEON),
    ENTRY(matmul_int8, neon, ISA_NEON),
    ENTRY(matmul_int4, neon, ISA_NEON),
    ENTRY(norm, neon, ISA_NEON),
    ENTRY(silu_multiply, neon, ISA_NEON),
    ENTRY(gelu_multiply, neon, ISA_NEON),
    ENTRY(attention_span, neon, ISA_NEON),
#endif
#ifdef KESTREL_HAVE_NEON_DOTPROD
    ENTRY(matmul_int8, neon_dotprod, ISA_NEON_DOTPROD),
    ENTRY(matmul_int4, neon_dotprod, ISA_NEON_DOTPROD),
#endif
#ifdef KESTREL_HAVE_NEON_I8MM
    ENTRY(quantize_rows, neon_i8mm, ISA_NEON_I8MM),
    ENTRY(matmul_int8, neon_i8mm, ISA_NEON_I8MM),
    ENTRY(matmul_int4, neon_i8mm, ISA_NEON_I8MM),
#endif
#ifdef KESTREL_HAVE_AVX2
    ENTRY(quantize_rows, avx2, ISA_AVX2),
    ENTRY(matmul_int8, avx2, ISA_AVX2),
    ENTRY(matmul_int4, avx2, ISA_AVX2),
    ENTRY(norm, avx2, ISA_AVX2),
    ENTRY(silu_multiply, avx2, ISA_AVX2),
    ENTRY(gelu_multiply, avx2, ISA_AVX2),
    ENTRY(attention_span, avx2, ISA_AVX2),
#endif
#ifdef KESTREL_HAVE_AVX512
    ENTRY(quantize_rows, avx512, ISA_AVX512),
    ENTRY(attention_span, avx512, ISA_AVX512),
#endif
#ifdef KESTREL_HAVE_AVX512_VNNI
    ENTRY(matmul_int8, avx512_vnni, ISA_AVX512_VNNI),
    ENTRY(matmul_int4, avx512_vnni, ISA_AVX512_VNNI),
#endif
};
const int kestrel_menu_length = (int)(sizeof kestrel_menu / sizeof *kestrel_menu);

/* Each named instruction set with what it stands on. */
static const struct { const char *name; uint32_t own, all; } sets[] = {
    {"portable", 0, 0},
#ifdef KESTREL_HAVE_NEON
    {"neon", ISA_NEON, ISA_NEON},
#endif
#ifdef KESTREL_HAVE_NEON_DOTPROD
    {"neon_dotprod", ISA_NEON_DOTPROD, ISA_NEON | ISA_NEON_DOTPROD},
#endif
#ifdef KESTREL_HAVE_NEON_I8MM
    {"neon_i8mm", ISA_NEON_I8MM, ISA_NEON | ISA_NEON_DOTPROD | ISA_NEON_I8MM},
#endif
#ifdef KESTREL_HAVE_AVX2
    {"avx2", ISA_AVX2, ISA_AVX2},
#endif
#ifdef KESTREL_HAVE_AVX512
    {"avx512", ISA_AVX512, ISA_AVX2 | ISA_AVX512},
#endif
#ifdef KESTREL_HAVE_AVX512_VNNI
    {"avx512_vnni", ISA_AVX512_VNNI, ISA_AVX2 | ISA_AVX512 | ISA_AVX512_VNNI},
#endif
};
enum { SETS = sizeof sets / sizeof *sets };

static int find_set(const char *isa)
{
    const uint32_t cpu = kestrel_cpu_isa();
    int best = -1;
    for (int i = 0; i < SETS; i++)
        if ((sets[i].all & ~cpu) == 0 && (!isa || !strcmp(isa, sets[i].name))) best = i;
    return best;
}

static const kestrel_variant *find_variant(const char *op, uint32_t mask)
{
    const kestrel_variant *found = NULL;
    for (int i = 0; i < kestrel_menu_length; i++)
        if (!strcmp(kestrel_menu[i].op, op) && (kestrel_menu[i].required & ~mask) == 0) found = &kestrel_menu[i];
    return found;
}

int kestrel_kernels_select(const char *isa, kestrel_kernels *out)
{
    const int set = find_set(isa);
    if (set < 0) return KESTREL_E_ISA;
    const uint32_t mask = sets[set].all;
    out->isa = sets[set].name;
#define SELECT(op) out->op = (kestrel_##op##_fn *)find_variant(#op, mask)->function
    SELECT(quantize_rows);
    SELECT(matmul_int8);
    SELECT(matmul_int4);
    SELECT(matmul_f32);
    SELECT(norm);
    SELECT(rope);
    SELECT(silu_multiply);
    SELECT(gelu_multiply);
    SELECT(attention_span);
    SELECT(attention_merge);
    SELECT(attention_finish);
    return KESTREL_OK;
}

const char *kestrel_isa_name(int32_t index)
{
    const uint32_t cpu = kestrel_cpu_isa();
    for (int i = 0; i < SETS; i++)
        if ((sets[i].all & ~cpu) == 0 && index-- == 0) return sets[i].name;
    return NULL;
}

const char *kestrel_variant_name(const char *isa, const char *op)
{
    const int set = op ? find_set(isa) : -1;
    const kestrel_variant *v = set < 0 ? NULL : find_variant(op, sets[set].all);
    return v ? v->name : NULL;
}

const char *kestrel_op_name(int32_t index)
{
    for (int i = 0; i < kestrel_menu_length; i++)
        if (!strcmp(kestrel_menu[i].name, "portable") && index-- == 0) return kestrel_menu[i].op;
    return NULL;
}
