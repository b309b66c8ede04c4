/* logitless/comm_nccl.h: the communicator over NCCL, liblogitless_nccl.so, for plans on GPUs.
 *
 * A library of its own: it needs NCCL and nothing of liblogitless. ll_comm_nccl (comm.h) loads it. Every rank
 * has a GPU of its own, and the ranks have another communicator already, in host memory (threads, mpi, the
 * caller's own): over that they exchange NCCL's id once, and every all_gather afterwards, so a call's errors
 * and a rank that does not come are told as on a CPU, before anything is queued.
 *
 *   max_i32, sum_i64   ncclAllReduce: integers, exact whatever the algorithm
 *   sum_f32            in ascending ranks, whatever n and the element: each rank receives the others' shares
 * of one slice, adds them to its own in the order of ranks, and sends the sum to all
 *
 *     rank 0   [ a0 | a1 | a2 ]        slice 0 -> rank 0: a0 + b0 + c0 -> all
 *     rank 1   [ b0 | b1 | b2 ]        slice 1 -> rank 1: a1 + b1 + c1 -> all
 *     rank 2   [ c0 | c1 | c2 ]        slice 2 -> rank 2: a2 + b2 + c2 -> all
 *
 * Operations are queued on the stream and can be captured in a graph. `memory` is LL_COMM_MEMORY_DEVICE.
 *
 * Time limits: creating ends within timeout_ms of the last step that all ranks took. A queued operation that
 * has not ended timeout_ms after it was queued is given up (ncclCommAbort), by a thread of this library: the
 * stream goes on, what was queued has undefined results, and the next operation returns COMM with a sentence.
 * The limit has to cover the work queued before the operation. Operations of a graph are not watched. */
#ifndef LOGITLESS_COMM_NCCL_H
#define LOGITLESS_COMM_NCCL_H

#include <logitless/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *comm: this rank's end of a group of all ranks of `host`, on the GPU that is current.
 *   host        the rank's end; in host memory or any. Must outlive comm; not destroyed with it
 *   timeout_ms  0: LL_COMM_TIMEOUT_MS
 *   comm        struct_bytes set (LL_COMM_INIT); overwritten. ll_comm_destroy, or comm->destroy, releases it
 *   why         [why_bytes] receives the sentence of a failure; may be NULL if why_bytes is 0
 * Collective over host. Allocates 32 MiB of device memory. Returns an ll_status, the same on every rank
 * unless NCCL itself failed on one. Errors: INVALID_ARG (two ranks on one GPU), MEMORY, CUDA, COMM. */
LL_API int32_t ll_comm_nccl_create(const ll_comm *host, int32_t timeout_ms, ll_comm *comm, char *why,
                                   size_t why_bytes);

#ifdef __cplusplus
}
#endif
#endif
