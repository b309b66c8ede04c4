/* The CPU backend: its kernels, and what the program may ask about the machine. */
#ifndef LLI_CPU_CPU_H
#define LLI_CPU_CPU_H

#include "core/plan.h"

extern const lli_kernel lli_linear_ce_cpu_plain;
extern const lli_kernel lli_linear_ce_cpu_avx2;   /* if LLI_HAVE_AVX2 */
extern const lli_kernel lli_linear_ce_cpu_avx512; /* if LLI_HAVE_AVX512 */

extern const lli_kernel lli_ce_cpu_plain;
extern const lli_kernel lli_ce_cpu_avx2;   /* if LLI_HAVE_AVX2 */
extern const lli_kernel lli_ce_cpu_avx512; /* if LLI_HAVE_AVX512 */

/* Rate of a loop of nothing but independent f32 fused multiply-adds in the widest registers of this
 * machine, on n_threads threads, in GFLOP/s (2 operations each): the ceiling of the CPU kernels. */
double lli_cpu_fma_peak(int32_t n_threads);

#endif
