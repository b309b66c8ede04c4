/* What the communicators of this folder share, and the check of a communicator that a caller filled in. */
#ifndef LLI_COMM_INTERNAL_H
#define LLI_COMM_INTERNAL_H

#include <logitless/comm.h>

enum { kCommSentenceBytes = 512 };

typedef enum lli_comm_kind {
    LLI_COMM_MAX_I32 = 0,
    LLI_COMM_SUM_I64 = 1,
    LLI_COMM_ALL_GATHER = 2,
    LLI_COMM_SUM_F32 = 3
} lli_comm_kind;

/* Names of the operations, by lli_comm_kind: the first words of their error sentences. */
extern const char *const lli_comm_kind_names[4];

/* INVALID_ARG names the field or function of *comm that is not sound, after `where`: "ll_plan_create: comm".
 * A communicator may lack abort, error, group and destroy. */
ll_status lli_comm_check(const ll_comm *comm, const char *where);

/* A communicator in a shared library of its own. */
typedef struct lli_comm_library {
    const char *file, *entry; /* entry: a lli_comm_entry */
    const char *hint;         /* what to do where there is none */
} lli_comm_library;

/* The one function of such a library, which knows nothing of liblogitless (a program may hold it linked
 * statically): an ll_status, with the sentence of a failure in `why`. */
typedef int32_t lli_comm_entry(int32_t timeout_ms, ll_comm *comm, char *why, size_t why_bytes);

/* ll_comm_open with its arguments checked. */
ll_status lli_comm_load(const lli_comm_library *library, int32_t timeout_ms, ll_comm *comm);

#endif
