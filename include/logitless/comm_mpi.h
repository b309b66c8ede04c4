/* logitless/comm_mpi.h: the communicator over MPI, liblogitless_mpi.so.
 *
 * A library of its own: it needs MPI, libc, libm and nothing of liblogitless. ll_comm_open("mpi", ...) loads
 * it; a program that speaks MPI itself links it and hands its own communicator to ll_comm_mpi_create. It
 * works with the MPI that it was built with (Open MPI and MPICH do not replace each other).
 *
 * Sums of f32 are added in ascending ranks; where the group has equally many ranks, two or more, on each of
 * several hosts, first over the ranks of a host (ascending) and then over the hosts (ascending by their first
 * rank). A host is a processor name and a network namespace, or what LL_COMM_HOST says in the environment of
 * a rank: ranks with the same value share a host.
 *
 * Time limits: every operation ends within timeout_ms (and 50 ms in which peers are told). Creating a
 * communicator has the same limit until all ranks are known to be there; the MPI calls after that
 * (MPI_Comm_split, and MPI_Comm_create_group for a group) have no form that can be given up, so a rank that
 * dies within them is left to mpirun, as are MPI_Init and MPI_Finalize.
 *
 * Threads: MPI is asked for MPI_THREAD_SERIALIZED. Two threads of a process may not be in functions of
 * communicators of this library at the same time, not even of different ones. */
#ifndef LOGITLESS_COMM_MPI_H
#define LOGITLESS_COMM_MPI_H

#include <logitless/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *comm: this rank's end of a group of all ranks of MPI_COMM_WORLD; MPI is initialised unless it is. MPI that
 * was initialised here is finalised when the last end is destroyed, except where one of them died: the ranks
 * that MPI_Finalize waits for may be gone.
 *   timeout_ms  of each operation; 0: LL_COMM_TIMEOUT_MS
 *   comm        struct_bytes set (LL_COMM_INIT); overwritten. ll_comm_destroy, or comm->destroy, releases it
 *   why         [why_bytes] receives the sentence of a failure; may be NULL if why_bytes is 0
 * Collective over MPI_COMM_WORLD. Returns an ll_status. Errors: INVALID_ARG, MEMORY, COMM. */
LL_API int32_t ll_comm_mpi_open(int32_t timeout_ms, ll_comm *comm, char *why, size_t why_bytes);

/* The same over the caller's communicator: mpi_comm points to an MPI_Comm within a group (no
 * intercommunicator), which is duplicated and not used again. Collective over it. */
LL_API int32_t ll_comm_mpi_create(const void *mpi_comm, int32_t timeout_ms, ll_comm *comm, char *why,
                                  size_t why_bytes);

/* Writes how sums of f32 go, "two levels: 2 hosts of 4 ranks each" or one level and why, cut to text_bytes
 * with the terminating 0. Errors: INVALID_ARG (comm is not of this library, text NULL or text_bytes 0). */
LL_API int32_t ll_comm_mpi_describe(const ll_comm *comm, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
