/* Calls on a GPU for operands in host memory: copies of them on the device, kept from call to call, and
 * results copied back. Device memory comes from liblogitless_cuda, so that the program needs no CUDA. */
#ifndef LL_CLI_GPU_H
#define LL_CLI_GPU_H

#include "cli.h"

typedef struct cli_gpu cli_gpu;

/* True if the plan's kernel wants its operands in device memory. */
bool cli_gpu_wanted(const ll_plan *plan);

/* This thread's GPU from here on: the one of rank r, r modulo the GPUs there are. UNSUPPORTED, CUDA. */
ll_status cli_gpu_use(int32_t rank);

/* For plans with this description; workspace_bytes: of the hungriest pass. NULL and MEMORY, CUDA. */
ll_status cli_gpu_open(const ll_plan_desc *desc, size_t workspace_bytes, cli_gpu **gpu);
void cli_gpu_close(cli_gpu *gpu); /* NULL is fine */

/* Copies what `host` points to for a call of a pass; *device is that call with its pointers on the GPU. w,
 * bias and class weights are copied only if they are others than last time. INVALID_ARG for a target outside
 * the vocabulary, with its row, as a CPU would say. */
ll_status cli_gpu_bind(cli_gpu *gpu, const ll_linear_ce_args *host, ll_linear_ce_args *device);
/* Until everything queued has ended. */
ll_status cli_gpu_wait(const cli_gpu *gpu);
/* Waits, and copies the results of the last bound call to where `host` wanted them. */
ll_status cli_gpu_fetch(cli_gpu *gpu);

/* bind, the pass, fetch. */
ll_status cli_gpu_run(cli_gpu *gpu, const ll_plan *plan, ll_pass pass, const ll_linear_ce_args *host);

#endif
