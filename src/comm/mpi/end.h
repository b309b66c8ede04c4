/* One rank's end of a communicator over MPI, and the one place where it waits.
 *
 * A blocking MPI call cannot be given up, so every operation is a non-blocking one that lli_mpi_wait polls
 * until the time limit. A collective under way cannot be cancelled either: MPI may go on reading and writing
 * its buffers after the limit. Data therefore moves in pieces through two buffers of the end, and an end that
 * died keeps them, itself and its MPI objects for good; the caller's arrays are free when an operation ends.
 *
 *   data, levels[]   collectives
 *   control          messages: kTagAbort, the sentence of a rank that failed, looked for in every wait;
 *                    tags from 1 on, "I am here", empty, before a group is made */
#ifndef LLI_COMM_MPI_END_H
#define LLI_COMM_MPI_END_H

#include <logitless/comm.h>

#include <mpi.h>
#include <stdbool.h>

/* Bytes of a bounce buffer: some 64 KiB for each peer in groups of tens, where transfers reach full speed,
 * and still 64 bytes for each of LL_COMM_RANKS_MAX. */
enum { kPieceBytes = 4 << 20, kSentenceBytes = 512, kTagAbort = 0 };

/* A communicator over which slices are exchanged: all ranks; or those of a host, then a column of hosts. */
typedef struct lli_mpi_level {
    MPI_Comm comm;
    int32_t rank, size;
} lli_mpi_level;

typedef struct lli_mpi_end {
    int32_t rank, size, timeout_ms;
    int32_t n_levels;
    lli_mpi_level levels[2]; /* n_levels 1: levels[0] is all of data */
    MPI_Comm data, control;
    MPI_Comm duplicate;     /* being made: MPI may write it after the limit, and it is no communicator yet */
    uint64_t *host_of;      /* [size] a label of each rank's host, for the groups made from this one */
    char *piece, *received; /* kPieceBytes each */
    bool dead;              /* every operation fails from now on, with `sentence` */
    char sentence[kSentenceBytes]; /* also the abort's message, so that it must not change once dead */
    MPI_Request *notices;          /* [size] aborts on their way to peers */
    int32_t n_notices;
    int64_t last_ns;          /* when this rank was last in an operation */
    struct lli_mpi_end *next; /* in the list of ends that are kept for good */
    char levels_sentence[128];
} lli_mpi_end;

/* An operation under way. */
typedef struct lli_mpi_call {
    const char *operation;
    int64_t start_ns, limit_ns;
} lli_mpi_call;

/* True once an end of this process died: MPI_Finalize would wait for ranks that may be gone. */
bool lli_mpi_any_died(void);

/* Starts an operation: COMM if the end is dead or a peer's abort is there. `stream` must be NULL. */
ll_status lli_mpi_begin(lli_mpi_end *end, const char *operation, ll_stream stream, lli_mpi_call *call);

/* Waits for what an MPI call started that returned `code`. COMM: the end is dead, peers are told, and MPI may
 * still use the buffers. */
ll_status lli_mpi_wait(lli_mpi_end *end, const lli_mpi_call *call, int code, MPI_Request *request);

/* The end is dead with this sentence, unless it was already, and peers are told. Always COMM. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
ll_status
lli_mpi_fail(lli_mpi_end *end, const char *format, ...);
/* The same for an MPI call that returned `code`; OK where that is success. */
ll_status lli_mpi_check(lli_mpi_end *end, const char *operation, int code);

/* Takes a peer's abort if one is there. */
bool lli_mpi_heard(lli_mpi_end *end);
/* Gives aborts on their way up to limit_ms to leave: MPI sends within MPI calls only. */
void lli_mpi_flush(lli_mpi_end *end, int32_t limit_ms);

/* The functions of ll_comm (operations.c); lli_mpi_gather is all_gather within an operation under way. */
ll_status lli_mpi_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream);
ll_status lli_mpi_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream);
ll_status lli_mpi_sum_f32(void *self, float *values, int64_t n, ll_stream stream);
ll_status lli_mpi_all_gather(void *self, const void *mine, void *all, size_t bytes);
ll_status lli_mpi_gather(lli_mpi_end *end, const lli_mpi_call *call, const void *mine, void *all,
                         size_t bytes);

#endif
