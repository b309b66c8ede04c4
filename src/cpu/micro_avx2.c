/* The CPU micro-kernels of micro_body.h in AVX2 with FMA and F16C. */
#include "cpu/simd_avx2.h"

#define LLI_GEMM_ROWS 6 /* kGemmRows, for the preprocessor */
#include "cpu/micro_body.h"

_Static_assert(LLI_GEMM_ROWS == kGemmRows, "LLI_GEMM_ROWS must be kGemmRows");

const lli_micro lli_micro_avx2 = {
    .rows = kGemmRows,
    .cols = kGemmCols,
    .pack = pack,
    .copy = copy,
    .gemm = gemm,
    .stats = stats,
    .gradient = gradient,
    .peak = peak,
};
