/* Operations of ranks in one process over shared memory: a mutex, a condition variable and one slot a rank.
 *
 *   rank 0   publish | wait: all here  | own slice of all arrays | wait: all done | return
 *   rank 1   publish |   time limit,   | own slice of all arrays |  no limit, not | return
 *   rank 2   publish |   not if dead   | own slice of all arrays |  even if dead  | return
 *   step       2k                        2k + 1                                     2k + 2
 *
 * Slices are disjoint, so results go straight into every rank's array: of each block of its slice a rank
 * reads all arrays, then writes all of them. The second wait has no limit because nobody may return, and free
 * an array, while others still write into it; whoever passed the first wait is computing and will come. */
#define _GNU_SOURCE /* clock_gettime */
#include "comm/threads.h"
#include "core/status.h"

#include <errno.h>
#include <string.h>
#include <time.h>

enum { kBlockBytes = 4096 }; /* of one array: its sums stay in the first-level cache beside what is added */

/* ---- The meeting -------------------------------------------------------------------------------- */

static struct timespec after_ms(int32_t ms) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += ms / 1000;
    time.tv_nsec += (long)(ms % 1000) * 1000000;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return time;
}

/* The first wait. False: the operation will not be done, me->sentence says why, and nobody touches this
 * rank's arrays: the step of a dead group never becomes odd again. */
static bool arrive(lli_end *me, const lli_slot *want) {
    lli_ranks *all = me->all;
    const struct timespec deadline = after_ms(all->timeout_ms);
    pthread_mutex_lock(&all->mutex);
    const int64_t step = all->step;
    if (!all->dead) {
        all->slots[me->rank] = *want;
        all->slots[me->rank].arrival = step + 1;
        if (++all->n_here == all->size) {
            lli_ranks_judge(all);
            if (!all->dead) all->step++;
            pthread_cond_broadcast(&all->changed);
        }
    }
    while (all->step == step && !all->dead) {
        if (all->n_gone) {
            lli_ranks_kill_gone(all, me->rank);
        } else if (pthread_cond_timedwait(&all->changed, &all->mutex, &deadline) == ETIMEDOUT &&
                   all->step == step && !all->dead) {
            lli_ranks_kill_late(all, me->rank);
        }
    }
    /* Not `dead`: an abort may follow the step before this rank wakes, and then the others count on it. */
    const bool met = all->step != step;
    if (!met) memcpy(me->sentence, all->sentence, sizeof me->sentence);
    pthread_mutex_unlock(&all->mutex);
    return met;
}

/* The second wait. */
static void finish(lli_end *me) {
    lli_ranks *all = me->all;
    pthread_mutex_lock(&all->mutex);
    const int64_t step = all->step;
    if (++all->n_done == all->size) {
        all->n_here = all->n_done = 0;
        all->step++;
        pthread_cond_broadcast(&all->changed);
    }
    while (all->step == step) pthread_cond_wait(&all->changed, &all->mutex);
    pthread_mutex_unlock(&all->mutex);
}

/* ---- The work between the waits ----------------------------------------------------------------- */

static void fold_max_i32(void *sums, const void *values, int64_t n) {
    int32_t *restrict to = sums;
    const int32_t *restrict from = values;
    for (int64_t i = 0; i < n; i++) to[i] = from[i] > to[i] ? from[i] : to[i];
}

/* Unsigned: a sum that wraps is its caller's mistake, but not undefined behaviour here. */
static void fold_sum_i64(void *sums, const void *values, int64_t n) {
    uint64_t *restrict to = sums;
    const uint64_t *restrict from = values;
    for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

static void fold_sum_f32(void *sums, const void *values, int64_t n) {
    float *restrict to = sums;
    const float *restrict from = values;
    for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

static const struct {
    void (*fold)(void *sums, const void *values, int64_t n);
    int64_t element_bytes;
} folds[] = {
    [LLI_COMM_MAX_I32] = {fold_max_i32, 4},
    [LLI_COMM_SUM_I64] = {fold_sum_i64, 8},
    [LLI_COMM_SUM_F32] = {fold_sum_f32, 4},
};

/* Ranks are folded in ascending order: of f32 that is the definition of the sum. */
static void reduce_slice(const lli_ranks *all, int32_t rank) {
    const lli_comm_kind kind = all->slots[0].kind;
    const int64_t n = all->slots[0].n, element_bytes = folds[kind].element_bytes;
    const int64_t part = n / all->size, rest = n % all->size;
    const int64_t begin = rank * part + (rank < rest ? rank : rest);
    const int64_t end = begin + part + (rank < rest ? 1 : 0), block = kBlockBytes / element_bytes;
    union {
        int64_t align;
        char bytes[kBlockBytes];
    } sums;
    for (int64_t at = begin; at < end; at += block) {
        const int64_t count = end - at < block ? end - at : block, offset = at * element_bytes;
        const size_t bytes = (size_t)(count * element_bytes);
        memcpy(sums.bytes, (char *)all->slots[0].values + offset, bytes);
        for (int32_t r = 1; r < all->size; r++) {
            folds[kind].fold(sums.bytes, (char *)all->slots[r].values + offset, count);
        }
        for (int32_t r = 0; r < all->size; r++) {
            memcpy((char *)all->slots[r].values + offset, sums.bytes, bytes);
        }
    }
}

static void gather(const lli_ranks *all, int32_t rank) {
    const size_t bytes = (size_t)all->slots[rank].n;
    char *values = all->slots[rank].values;
    for (int32_t r = 0; bytes && r < all->size; r++)
        memcpy(values + (size_t)r * bytes, all->slots[r].mine, bytes);
}

/* ---- The operations ----------------------------------------------------------------------------- */

static ll_status operate(lli_end *me, const lli_slot *want) {
    if (!arrive(me, want)) return lli_fail(LL_STATUS_COMM, "%s", me->sentence);
    if (want->kind == LLI_COMM_ALL_GATHER) {
        gather(me->all, me->rank);
    } else {
        reduce_slice(me->all, me->rank);
    }
    finish(me);
    return LL_STATUS_OK;
}

/* A fault of one rank is judged where all meet, so that all fail at once and with its sentence. */
static ll_status reduce(void *self, lli_comm_kind kind, void *values, int64_t n, ll_stream stream) {
    lli_slot want = {.kind = kind, .n = n, .values = values};
    if (n < 0) want.fault = "n is negative, want 0 or more";
    if (n > 0 && !values) want.fault = "values is NULL, want n of them";
    if (stream) want.fault = "stream is set, want NULL: ranks of one process meet in host memory";
    return operate(self, &want);
}

ll_status lli_threads_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    return reduce(self, LLI_COMM_MAX_I32, values, n, stream);
}

ll_status lli_threads_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    return reduce(self, LLI_COMM_SUM_I64, values, n, stream);
}

ll_status lli_threads_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    return reduce(self, LLI_COMM_SUM_F32, values, n, stream);
}

ll_status lli_threads_all_gather(void *self, const void *mine, void *all, size_t bytes) {
    lli_slot want = {.kind = LLI_COMM_ALL_GATHER, .n = (int64_t)bytes, .values = all, .mine = mine};
    if (bytes && !mine) want.fault = "mine is NULL, want its bytes";
    if (bytes && !all) want.fault = "all is NULL, want room for the bytes of all ranks";
    return operate(self, &want);
}

void lli_threads_abort(void *self, const char *sentence) {
    lli_ranks *all = ((lli_end *)self)->all;
    pthread_mutex_lock(&all->mutex);
    lli_ranks_kill(all, "%s", sentence ? sentence : "");
    pthread_mutex_unlock(&all->mutex);
}

const char *lli_threads_error(void *self) {
    return ((lli_end *)self)->sentence;
}
