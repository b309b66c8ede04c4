/* A group of ranks in one process, as three files share it:
 *
 *   threads.c         the meeting of an operation, its work, the operations
 *   threads_fail.c    what is wrong with a meeting, in one sentence for all ranks
 *   threads_group.c   making and releasing groups and their ends
 *
 * A group is dead from its first failure on, and its sentence is that one's. The mutex is held for
 * bookkeeping only. A thread that holds a group's mutex never asks for that of the group's world. */
#ifndef LLI_COMM_THREADS_H
#define LLI_COMM_THREADS_H

#include "comm/comm_internal.h"

#include <pthread.h>
#include <stdbool.h>

/* What a rank wants done. Guarded by the mutex; read without it while all ranks work and nobody writes. */
typedef struct lli_slot {
    int64_t arrival; /* step + 1 of the operation that it is in or was in last; -1: has destroyed its end */
    lli_comm_kind kind;
    int64_t n;        /* all_gather: bytes */
    void *values;     /* all_gather: all */
    const void *mine; /* all_gather only */
    const char *fault;
} lli_slot;

typedef struct lli_ranks {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int32_t size, timeout_ms;
    int32_t n_here, n_done; /* ranks that arrived at, and finished, this operation */
    int32_t n_gone;         /* ends destroyed */
    int32_t n_references;   /* ends, and the offer */
    int64_t step;           /* 2k: operation k gathers its ranks; 2k + 1: all are here and work */
    bool dead;
    char sentence[kCommSentenceBytes];
    struct lli_offer *offers; /* groups of these ranks that some members have not asked for yet */
    lli_slot slots[];
} lli_ranks;

/* ll_comm.self */
typedef struct lli_end {
    lli_ranks *all;
    int32_t rank;
    char sentence[kCommSentenceBytes]; /* the rank's own copy, to be read without the mutex */
} lli_end;

/* The group is dead, with this sentence unless it has one. This and the next three with the mutex held. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void
lli_ranks_kill(lli_ranks *all, const char *format, ...);
/* Dead because `rank` has waited long enough, or waits for ranks that destroyed their ends. */
void lli_ranks_kill_late(lli_ranks *all, int32_t rank);
void lli_ranks_kill_gone(lli_ranks *all, int32_t rank);
/* All are here: dead if they do not want the same thing, or one of them no sound one. */
void lli_ranks_judge(lli_ranks *all);

ll_status lli_threads_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream);
ll_status lli_threads_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream);
ll_status lli_threads_sum_f32(void *self, float *values, int64_t n, ll_stream stream);
ll_status lli_threads_all_gather(void *self, const void *mine, void *all, size_t bytes);
void lli_threads_abort(void *self, const char *sentence);
const char *lli_threads_error(void *self);

#endif
