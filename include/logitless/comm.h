/* logitless/comm.h: what a vocabulary-parallel group needs from the world around it.
 *
 * A communicator is a plain struct of functions that an integrator fills in over anything; the library
 * ships `self` (one rank), `threads` (ranks of one process), `mpi` (liblogitless_mpi.so, loaded when asked
 * for) and a test double. Put one into ll_plan_desc.comm and ll_plan_create and the passes
 * (ll_linear_ce_forward, ll_ce_forward, ...) become collective: every rank of the group calls them in the
 * same order.
 *
 *   rank 0: w rows [0, 3)    rank 1: w rows [3, 7)    ...         any sizes, any rank order, empty ones too
 *      local sums of a chunk of tokens                 per token: integers only, their size independent of V
 *      max_i32, sum_i64  ->  the whole vocabulary's    exact in any order: no algorithm can change a bit
 *      sum_f32           ->  grad_x of all ranks       ascending ranks: equal on every rank and in every run
 *
 * No communicator (NULL) means one rank, never a default world.
 *
 * Failing together: each collective call starts with one all_gather of a short record (the outcome of the
 * rank's own checks, and what it is about to do). A bad argument on one rank, or ranks that want different
 * things, become one error with one sentence on every rank, and the group stays usable. A rank that does not
 * come makes the others return LL_STATUS_COMM within the time limit; the communicator is dead then, and every
 * later call on it says so. The number and order of operations depends on shapes and options alone, never on
 * values of x, w, logits or the targets. */
#ifndef LOGITLESS_COMM_H
#define LOGITLESS_COMM_H

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks of a group at most: records of a group are gathered on every rank. */
#define LL_COMM_RANKS_MAX 4096

/* Time limit of one operation where none is given. It has to cover how much later than the first the last
 * rank may arrive, which includes its work since the operation before. */
#define LL_COMM_TIMEOUT_MS 60000

/* Where the arrays of max_i32, sum_i64 and sum_f32 lie (all_gather's are always host memory).
 *
 *   HOST    host memory, and stream is NULL. A plan on a GPU hands its arrays over through pinned host memory
 *           that it owns: it waits for the stream, does the operation on the host, and queues the copy back.
 *           That is the one case in which a call on a GPU waits; it cannot be captured in a graph, and says
 * so DEVICE  memory of the stream's GPU: the operation is queued on the stream and ordered with it. Plans on
 * a CPU refuse such a communicator ANY     either: host memory, or device memory in the order of the stream
 */
typedef enum ll_comm_memory {
    LL_COMM_MEMORY_HOST = 0,
    LL_COMM_MEMORY_DEVICE = 1,
    LL_COMM_MEMORY_ANY = 2
} ll_comm_memory;

/* A rank's end of a group. Every function is called by one thread of a rank at a time, and in the same
 * order with the same n on every rank. Arrays are overwritten in place with the result, the same on every
 * rank. An operation returns LL_STATUS_OK, or LL_STATUS_COMM within the time limit if it could not be done
 * with all ranks; after that the communicator is dead and every operation fails at once.
 *
 *   max_i32     values[i] = max over ranks of values[i]             n >= 0
 *   sum_i64     values[i] = sum over ranks of values[i]             wraps nowhere: the library bounds them
 *   all_gather  all[r * bytes ..] = rank r's `bytes` bytes          host memory, also on a GPU; mine and all
 *               do not overlap
 *   sum_f32     values[i] = sum over ranks of values[i], f32        the order of additions must depend on the
 *               group alone, not on i, n or time: equal bits on every rank, in every run and batch
 *   abort       local and not blocking: the group is dead, peers that wait or come later fail with `sentence`
 *   error       sentence on the last failed operation, "" if there is none; valid until the next operation
 *   group       the end of a smaller group, ranks[0..n_ranks) of this one in the order of their new ranks.
 *               Called by its members only, with equal lists; NULL: not offered
 *   destroy     releases self; no operation may be in flight; NULL: nothing to release
 *
 * stream: NULL for host memory. For device memory the plan's (NULL: the GPU's default stream), on which
 * max_i32, sum_i64 and sum_f32 are ordered; the plan's GPU is current. An operation that fails later than its
 * call makes the next one fail. */
typedef struct ll_comm {
    size_t struct_bytes;
    int32_t rank, size; /* 0 <= rank < size <= LL_COMM_RANKS_MAX */
    /* 1: compare x, upstreams and weights by hash as well, and announce every operation before it is done,
     * so that a rank out of step is named instead of timing out. On for all ranks if it is for one.
     * LL_COMM_DEBUG=1 in the environment of ll_plan_create does the same. */
    int32_t debug;
    int32_t memory; /* ll_comm_memory */
    void *self;
    ll_status (*max_i32)(void *self, int32_t *values, int64_t n, ll_stream stream);
    ll_status (*sum_i64)(void *self, int64_t *values, int64_t n, ll_stream stream);
    ll_status (*all_gather)(void *self, const void *mine, void *all, size_t bytes);
    ll_status (*sum_f32)(void *self, float *values, int64_t n, ll_stream stream);
    void (*abort)(void *self, const char *sentence);
    const char *(*error)(void *self);
    ll_status (*group)(void *self, const int32_t *ranks, int32_t n_ranks, struct ll_comm *group);
    void (*destroy)(void *self);
} ll_comm;

/* ll_comm comm = LL_COMM_INIT; then fill it in, or let one of the functions below do it. */
#ifdef __cplusplus
#define LL_COMM_INIT lli_comm_init()
static inline ll_comm lli_comm_init(void) {
    ll_comm comm = ll_comm();
    comm.struct_bytes = sizeof(ll_comm);
    return comm;
}
#else
#define LL_COMM_INIT                                                                                         \
    { .struct_bytes = sizeof(ll_comm) }
#endif

/* One rank: every operation is a copy, in any memory. Nothing to destroy. Errors: INVALID_ARG. */
LL_API ll_status ll_comm_self(ll_comm *comm);

/* comms[0..size): the ends of a new group of `size` ranks in this process, each for one thread at a time.
 * An operation returns when all ranks have arrived. timeout_ms: 0 for LL_COMM_TIMEOUT_MS. Destroy every end.
 * Errors: INVALID_ARG, MEMORY. */
LL_API ll_status ll_comm_threads(int32_t size, int32_t timeout_ms, ll_comm *comms);

/* The communicator of a library of its own, loaded here: name "mpi" is liblogitless_mpi.so over
 * MPI_COMM_WORLD (started with MPI_Init_thread unless it is; then destroy ends it). The library is looked
 * for where LL_COMM_PATH says (a folder), beside this program or library, then by the system's rules.
 * Errors: INVALID_ARG, COMM (with what is missing, or what MPI said). */
LL_API ll_status ll_comm_open(const char *name, int32_t timeout_ms, ll_comm *comm);

/* NCCL between GPUs: *comm, the end of a group of the same ranks as `host`, for a plan on the GPU that is
 * current. Loads liblogitless_nccl.so, which is looked for as ll_comm_open does; comm_nccl.h says what it is.
 * host: the rank's end of a communicator in host memory (threads, mpi, the caller's own), which stays the
 * caller's and must outlive comm. Collective over host; one GPU a rank. timeout_ms: 0 for LL_COMM_TIMEOUT_MS.
 * It makes no groups: make them of `host`. Errors: INVALID_ARG, MEMORY, CUDA, COMM. */
LL_API ll_status ll_comm_nccl(const ll_comm *host, int32_t timeout_ms, ll_comm *comm);

/* Ranks ranks[0..n_ranks) of `world`, in the order of their new ranks: any subset, strided too. Only members
 * call it, all with the same list; several groups may be made and work side by side. Two groups with the
 * same list are told apart by the order of the calls. Errors: INVALID_ARG (a rank outside the world, twice,
 * or this rank not among them), UNSUPPORTED (world->group is NULL), MEMORY, COMM. */
LL_API ll_status ll_comm_group(const ll_comm *world, const int32_t *ranks, int32_t n_ranks, ll_comm *group);

/* Tells the peers that this rank will not come: operations that wait and all later ones fail with
 * LL_STATUS_COMM and `sentence` ("" if NULL). For a rank that leaves on an error of its own. */
LL_API void ll_comm_abort(const ll_comm *comm, const char *sentence);

/* Releases an end that one of the functions above filled in, and zeroes it. NULL and zeroed ones are fine. */
LL_API void ll_comm_destroy(ll_comm *comm);

/* ---- A test double ------------------------------------------------------------------------------ */

/* What the double does to the operations of another communicator, for tests of code that communicates. The
 * delays of a rank come from seed and rank; all else must be equal on all ranks. */
typedef struct ll_comm_double {
    size_t struct_bytes;
    uint64_t seed;
    int64_t delay_us; /* every operation starts up to this much late */
    int32_t pieces;  /* > 1: max_i32 and sum_i64 are done in up to so many pieces (at most 65536), in a random
                        order */
    int32_t reverse; /* 1: ranks appear in reverse: rank r is rank size - 1 - r of `inner` */
    int64_t fail_at; /* > 0: operation number fail_at (from 1) and all later ones fail without being done */
    int64_t stall_at; /* > 0: operation number stall_at starts stall_ms late */
    int64_t stall_ms;
} ll_comm_double;

#ifdef __cplusplus
#define LL_COMM_DOUBLE_INIT lli_comm_double_init()
static inline ll_comm_double lli_comm_double_init(void) {
    ll_comm_double script = ll_comm_double();
    script.struct_bytes = sizeof(ll_comm_double);
    return script;
}
#else
#define LL_COMM_DOUBLE_INIT                                                                                  \
    { .struct_bytes = sizeof(ll_comm_double) }
#endif

/* Operations so far, those that failed by the script too, and the bytes that this rank handed in. */
typedef struct ll_comm_counts {
    int64_t max_i32, sum_i64, all_gather, sum_f32;
    int64_t max_bytes, sum_bytes, gather_bytes, grad_bytes;
    uint64_t order; /* hash of the kinds and sizes of all operations in their order */
} ll_comm_counts;

/* `inner` stays the caller's and must outlive comm. Errors: INVALID_ARG, MEMORY. */
LL_API ll_status ll_comm_double_create(const ll_comm *inner, const ll_comm_double *script, ll_comm *comm);
/* Of a communicator that ll_comm_double_create made; INVALID_ARG for any other. */
LL_API ll_status ll_comm_double_counts(const ll_comm *comm, ll_comm_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
