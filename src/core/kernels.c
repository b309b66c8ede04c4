/* The kernels of each operation, best first; the reference, which accepts every problem, last. */
#include "core/plan.h"
#include "cpu/cpu.h"
#include "ref/ref.h"

static const lli_kernel *const kernels[] = {
#ifdef LLI_HAVE_AVX512
    &lli_linear_ce_cpu_avx512,
#endif
#ifdef LLI_HAVE_AVX2
    &lli_linear_ce_cpu_avx2,
#endif
    &lli_linear_ce_cpu_plain,  &lli_linear_ce_ref,
#ifdef LLI_HAVE_AVX512
    &lli_ce_cpu_avx512,
#endif
#ifdef LLI_HAVE_AVX2
    &lli_ce_cpu_avx2,
#endif
    &lli_ce_cpu_plain,         &lli_ce_ref,        NULL,
};

const lli_kernel *lli_kernel_built_in(int32_t index) {
    return kernels[index];
}
