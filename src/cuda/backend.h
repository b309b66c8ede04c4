/* liblogitless_cuda as liblogitless sees it, and what its files share. */
#ifndef LLI_CUDA_BACKEND_H
#define LLI_CUDA_BACKEND_H

#include "core/backends.h"

/* CUDA with "pass: what failed: reason"; MEMORY where the device is out of it. */
ll_status lli_cuda_fail(int cuda_status, const char *pass, const char *what);

/* False and a sentence unless there is a driver, a device, and the current one is of a kind that is built
 * for. arch: 10 major + minor of it. */
bool lli_cuda_here(char *why, size_t why_bytes, int32_t *device, int32_t *arch);

/* ---- What the kernels' records share ---- */

/* lli_kernel.machine_ok: any device of a kind that is built for. */
bool lli_cuda_machine_ok(char *why, size_t why_bytes);
/* False and a sentence for more tokens than fit a grid. */
bool lli_cuda_takes(const lli_problem *problem, char *why, size_t why_bytes);
/* "<prefix>-sm<capability>-v<version>" of the current device, "<prefix>-v<version>" without one. Until this
 * thread's next call. */
const char *lli_cuda_numerics(const char *prefix, int32_t version);
/* queue(context) with `device` current, whatever the caller's is, which comes back. */
ll_status lli_cuda_on_device(int32_t device, const char *pass, ll_status (*queue)(const void *context),
                             const void *context);

/* The library that opened this one. */
const lli_host *lli_cuda_host(void);

/* By ll_pass: the first words of error sentences. */
const char *lli_cuda_pass_name(ll_pass pass);

/* What the kernels differ in (lli_kernel.isa; NULL: nothing of it). */
typedef struct lli_cuda_variant {
    /* Logits are formed again at the rate of the product alone: keeping a part of them is worth less. */
    bool cheap_logits;
    /* A pass with gradients can keep exponentials, and its first chunk in grad_w's own memory. */
    bool exponentials;
} lli_cuda_variant;

extern const lli_kernel lli_linear_ce_cuda_sm90, lli_linear_ce_cuda, lli_ce_cuda;

#endif
