/* The CPU micro-kernels of micro_body.h in plain C. */
#include "cpu/simd_plain.h"

#define LLI_GEMM_ROWS 4 /* kGemmRows, for the preprocessor */
#include "cpu/micro_body.h"

_Static_assert(LLI_GEMM_ROWS == kGemmRows, "LLI_GEMM_ROWS must be kGemmRows");

const lli_micro lli_micro_plain = {
    .rows = kGemmRows,
    .cols = kGemmCols,
    .pack = pack,
    .copy = copy,
    .gemm = gemm,
    .stats = stats,
    .gradient = gradient,
    .peak = peak,
};
