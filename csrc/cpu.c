/* Which instruction sets this CPU has; nothing else. SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#define HWCAP_ASIMDDP_BIT (1ul << 20) /* Linux uapi/asm/hwcap.h; older headers lack the names */
#define HWCAP2_I8MM_BIT (1ul << 13)

uint32_t kestrel_cpu_isa(void)
{
    uint32_t isa = ISA_NEON; /* part of Armv8-A */
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP_BIT) isa |= ISA_NEON_DOTPROD;
    if ((isa & ISA_NEON_DOTPROD) && (getauxval(26 /* AT_HWCAP2 */) & HWCAP2_I8MM_BIT)) isa |= ISA_NEON_I8MM;
    return isa;
}
#elif defined(__x86_64__)
uint32_t kestrel_cpu_isa(void)
{
    uint32_t isa = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa |= ISA_AVX2;
    if ((isa & ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        isa |= ISA_AVX512;
    if ((isa & ISA_AVX512) && __builtin_cpu_supports("avx512vnni")) isa |= ISA_AVX512_VNNI;
    return isa;
}
#else
uint32_t kestrel_cpu_isa(void) { return 0; }
#endif
