#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */
#include "comm/mpi/end.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* How long a rank looks for an abort that came while it was away for longer than the limit. */
enum { kLateMs = 10 };

/* Local: a rank that aborts may be in a hurry, and its peers notice by the time limit otherwise. */
enum { kAbortFlushMs = 50 };

/* A wait gives its CPU away from the start (ranks may outnumber CPUs) and sleeps once it is a long one, but
 * not before: a sleep takes longer than most operations. */
static const int64_t kYieldNs = 5000000;
static const struct timespec kSleep = {0, 50000};

static bool any_died;

bool lli_mpi_any_died(void) {
    return any_died;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void rest(int64_t waited_ns) {
    if (waited_ns < kYieldNs) {
        sched_yield();
    } else {
        nanosleep(&kSleep, NULL);
    }
}

void lli_mpi_flush(lli_mpi_end *end, int32_t limit_ms) {
    const int64_t start = now_ns(), limit = (int64_t)limit_ms * 1000000;
    while (end->n_notices > 0) {
        int sent = 0;
        const int code = MPI_Test(&end->notices[end->n_notices - 1], &sent, MPI_STATUS_IGNORE);
        const int64_t waited = now_ns() - start;
        if (sent || code != MPI_SUCCESS) {
            end->n_notices--;
        } else if (waited > limit) {
            return;
        } else {
            rest(waited);
        }
    }
}

/* end->sentence is set. The rank where it began tells every peer. One that heard of it tells those 1, 2, 4,
 * ... ranks further on, which reaches all living ranks also if the first one was gone before its messages
 * were. */
static void die(lli_mpi_end *end, bool first) {
    end->dead = true;
    any_died = true;
    if (end->control == MPI_COMM_NULL) return;
    for (int32_t step = 1; step < end->size; step = first ? step + 1 : 2 * step) {
        const int code = MPI_Isend(end->sentence, kSentenceBytes, MPI_BYTE, (end->rank + step) % end->size,
                                   kTagAbort, end->control, &end->notices[end->n_notices]);
        if (code == MPI_SUCCESS) end->n_notices++;
    }
    lli_mpi_flush(end, kAbortFlushMs);
}

ll_status lli_mpi_fail(lli_mpi_end *end, const char *format, ...) {
    if (end->dead) return LL_STATUS_COMM;
    va_list args;
    va_start(args, format);
    vsnprintf(end->sentence, sizeof end->sentence, format, args);
    va_end(args);
    die(end, true);
    return LL_STATUS_COMM;
}

ll_status lli_mpi_check(lli_mpi_end *end, const char *operation, int code) {
    if (code == MPI_SUCCESS) return LL_STATUS_OK;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return lli_mpi_fail(end, "%s: rank %d of %d: MPI said: %.400s", operation, end->rank, end->size, text);
}

bool lli_mpi_heard(lli_mpi_end *end) {
    if (end->control == MPI_COMM_NULL) return false;
    int there = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kTagAbort, end->control, &there, &status) != MPI_SUCCESS || !there) {
        return false;
    }
    MPI_Recv(end->sentence, kSentenceBytes, MPI_BYTE, status.MPI_SOURCE, kTagAbort, end->control,
             MPI_STATUS_IGNORE);
    end->sentence[sizeof end->sentence - 1] = 0;
    die(end, false);
    return true;
}

/* An abort that arrived while this rank was away may lie in a socket behind the data that its peers sent
 * before they gave up. One look does not find it there, and the operation would succeed here after it failed
 * there. */
static bool missed_abort(lli_mpi_end *end) {
    const int64_t start = now_ns(), away = start - end->last_ns;
    const bool late = end->last_ns && away > (int64_t)end->timeout_ms * 1000000;
    do {
        if (lli_mpi_heard(end)) return true;
    } while (late && now_ns() - start < (int64_t)kLateMs * 1000000);
    return false;
}

ll_status lli_mpi_begin(lli_mpi_end *end, const char *operation, ll_stream stream, lli_mpi_call *call) {
    if (end->dead || missed_abort(end)) return LL_STATUS_COMM;
    if (stream) {
        return lli_mpi_fail(end,
                            "%s: rank %d of %d: stream is not NULL, but this communicator takes host "
                            "memory only",
                            operation, end->rank, end->size);
    }
    call->operation = operation;
    call->start_ns = end->last_ns = now_ns();
    call->limit_ns = (int64_t)end->timeout_ms * 1000000;
    return LL_STATUS_OK;
}

ll_status lli_mpi_wait(lli_mpi_end *end, const lli_mpi_call *call, int code, MPI_Request *request) {
    int done = 0;
    for (const int64_t start = now_ns();;) {
        if (code == MPI_SUCCESS) code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) return lli_mpi_check(end, call->operation, code);
        const int64_t now = now_ns();
        if (done) {
            end->last_ns = now;
            return LL_STATUS_OK;
        }
        if (lli_mpi_heard(end)) return LL_STATUS_COMM;
        if (now - call->start_ns > call->limit_ns) {
            return lli_mpi_fail(end, "%s: rank %d of %d waited %d ms, the time limit, and not all ranks came",
                                call->operation, end->rank, end->size, end->timeout_ms);
        }
        rest(now - start);
    }
}
