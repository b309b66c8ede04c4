/* The reference kernels: the formulas of logitless.h in double precision, one loop each. */
#ifndef LLI_REF_REF_H
#define LLI_REF_REF_H

#include "core/plan.h"

extern const lli_kernel lli_linear_ce_ref;
extern const lli_kernel lli_ce_ref;

#endif
