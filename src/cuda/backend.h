/* liblogitless_cuda as liblogitless sees it, and what its files share. */
#ifndef LLI_CUDA_BACKEND_H
#define LLI_CUDA_BACKEND_H

#include "core/backends.h"

/* CUDA with "pass: what failed: reason"; MEMORY where the device is out of it. */
ll_status lli_cuda_fail(int cuda_status, const char *pass, const char *what);

/* False and a sentence unless there is a driver, a device, and the current one is of a kind that is built
 * for. arch: 10 major + minor of it. */
bool lli_cuda_here(char *why, size_t why_bytes, int32_t *device, int32_t *arch);

/* By ll_pass: the first words of error sentences. */
const char *lli_cuda_pass_name(ll_pass pass);

/* What the kernels differ in (lli_kernel.isa; NULL: nothing of it). */
typedef struct lli_cuda_variant {
    /* Logits are formed again at the rate of the product alone: keeping a part of them is worth less. */
    bool cheap_logits;
} lli_cuda_variant;

extern const lli_kernel lli_linear_ce_cuda_sm90, lli_linear_ce_cuda, lli_ce_cuda, lli_ce_cuda_chip;

#endif
