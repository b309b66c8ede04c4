/* The communicator of comm_nccl.h. NCCL's own communicator does not block: a call that waits for its peers
 * (connections are made by the first operation) comes back at once, is asked again until it is done, and is
 * given up at the time limit. */
#define _GNU_SOURCE /* nanosleep, gethostname */
#include "comm/nccl/end.h"
#include "comm/refuse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { kReceivedMib = 32, kPollUs = 20, kBusBytes = 16, kHostBytes = 64 };

/* What a rank shows the others before NCCL starts; of rank 0 the id too. */
typedef struct hello {
    int32_t status;
    char bus[kBusBytes], host[kHostBytes];
    ncclUniqueId id;
    char sentence[256];
} hello;

/* ---- Waiting ------------------------------------------------------------------------------------ */

static void pause_us(long us) {
    const struct timespec time = {0, us * 1000};
    (void)nanosleep(&time, NULL);
}

/* Until the call is through; then how it ended. ncclInProgress: not within the limit, or the group died. */
static ncclResult_t settle(lli_nccl_end *end, ncclResult_t result) {
    const int64_t until = lli_nccl_now_ms() + end->timeout_ms;
    while (result == ncclInProgress) {
        if (lli_nccl_now_ms() > until || lli_nccl_is_dead(end)) return ncclInProgress;
        pause_us(kPollUs);
        const ncclResult_t asked = ncclCommGetAsyncError(end->nccl, &result);
        if (asked != ncclSuccess) return asked;
    }
    return result;
}

/* ---- Operations --------------------------------------------------------------------------------- */

static ll_status broken(lli_nccl_end *end, const char *what, ncclResult_t result) {
    if (result == ncclInProgress) {
        lli_nccl_kill(end, "%s: rank %d of %d: not all ranks came within %d ms", what, end->rank, end->size,
                      end->timeout_ms);
    } else {
        lli_nccl_kill(end, "%s: rank %d of %d: NCCL: %s", what, end->rank, end->size,
                      ncclGetErrorString(result));
    }
    (void)lli_nccl_is_dead(end); /* copies the sentence */
    return LL_STATUS_COMM;
}

static ll_status broken_cuda(lli_nccl_end *end, const char *what, int status) {
    lli_nccl_kill(end, "%s: rank %d of %d: CUDA: %s", what, end->rank, end->size,
                  cudaGetErrorString((cudaError_t)status));
    (void)lli_nccl_is_dead(end);
    return LL_STATUS_COMM;
}

static ll_status reduce(lli_nccl_end *end, const char *what, void *values, int64_t n, ncclDataType_t type,
                        ncclRedOp_t op, cudaStream_t stream) {
    if (n < 0 || (n > 0 && !values)) return broken(end, what, ncclInvalidArgument);
    if (!lli_nccl_enter(end, stream)) return LL_STATUS_COMM;
    ll_status status = LL_STATUS_OK;
    if (n) {
        const ncclResult_t result =
            settle(end, ncclAllReduce(values, values, (size_t)n, type, op, end->nccl, stream));
        if (result != ncclSuccess) status = broken(end, what, result);
    }
    lli_nccl_leave(end);
    if (status == LL_STATUS_OK && n) {
        const cudaError_t watched = lli_nccl_watch_stream(end, stream);
        if (watched != cudaSuccess) status = broken_cuda(end, what, (int)watched);
    }
    return status;
}

static ll_status nccl_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    return reduce(self, "max_i32", values, n, ncclInt32, ncclMax, stream);
}

static ll_status nccl_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    return reduce(self, "sum_i64", values, n, ncclInt64, ncclSum, stream);
}

/* Elements [begin, end) of a piece of n that rank r adds up. Slices start on 16 bytes. */
typedef struct slice {
    int64_t begin, count;
} slice;

static slice slice_of(const lli_nccl_end *end, int64_t n, int32_t r) {
    const int64_t each = ((n + end->size - 1) / end->size + 3) / 4 * 4;
    const int64_t begin = r * each < n ? r * each : n;
    const int64_t count = n - begin < each ? n - begin : each;
    return (slice){begin, count};
}

/* Each rank's share of every slice to the rank that adds it up. */
static ncclResult_t scatter(lli_nccl_end *end, float *values, int64_t n, cudaStream_t stream) {
    const slice own = slice_of(end, n, end->rank);
    ncclResult_t result = ncclGroupStart();
    for (int32_t r = 0; r < end->size && result == ncclSuccess; r++) {
        const slice theirs = slice_of(end, n, r);
        float *from = end->received + (r < end->rank ? r : r - 1) * end->slice;
        if (r == end->rank) continue;
        if (theirs.count) {
            result = ncclSend(values + theirs.begin, (size_t)theirs.count, ncclFloat32, r, end->nccl, stream);
        }
        if (own.count && (result == ncclSuccess || result == ncclInProgress)) {
            result = ncclRecv(from, (size_t)own.count, ncclFloat32, r, end->nccl, stream);
        }
        if (result == ncclInProgress) result = ncclSuccess; /* the group's end says how it went */
    }
    const ncclResult_t ended = ncclGroupEnd();
    return settle(end, result != ncclSuccess ? result : ended);
}

/* Every slice from the rank that added it up to all. */
static ncclResult_t gather(lli_nccl_end *end, float *values, int64_t n, cudaStream_t stream) {
    const slice own = slice_of(end, n, end->rank);
    ncclResult_t result = ncclGroupStart();
    for (int32_t r = 0; r < end->size && result == ncclSuccess; r++) {
        const slice theirs = slice_of(end, n, r);
        if (r == end->rank) continue;
        if (own.count) {
            result = ncclSend(values + own.begin, (size_t)own.count, ncclFloat32, r, end->nccl, stream);
        }
        if (theirs.count && (result == ncclSuccess || result == ncclInProgress)) {
            result = ncclRecv(values + theirs.begin, (size_t)theirs.count, ncclFloat32, r, end->nccl, stream);
        }
        if (result == ncclInProgress) result = ncclSuccess;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return settle(end, result != ncclSuccess ? result : ended);
}

static ll_status sum_piece(lli_nccl_end *end, float *values, int64_t n, cudaStream_t stream) {
    const slice own = slice_of(end, n, end->rank);
    ncclResult_t result = scatter(end, values, n, stream);
    if (result != ncclSuccess) return broken(end, "sum_f32", result);
    const int added = lli_nccl_add_ranks(values + own.begin, end->received, own.count, end->slice, end->rank,
                                         end->size, stream);
    if (added) return broken_cuda(end, "sum_f32", added);
    result = gather(end, values, n, stream);
    return result == ncclSuccess ? LL_STATUS_OK : broken(end, "sum_f32", result);
}

static ll_status nccl_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    lli_nccl_end *end = self;
    if (n < 0 || (n > 0 && !values)) return broken(end, "sum_f32", ncclInvalidArgument);
    if (!lli_nccl_enter(end, stream)) return LL_STATUS_COMM;
    ll_status status = LL_STATUS_OK;
    const int64_t piece = end->slice * end->size;
    for (int64_t at = 0; at < n && end->size > 1 && status == LL_STATUS_OK; at += piece) {
        status = sum_piece(end, values + at, n - at < piece ? n - at : piece, stream);
    }
    lli_nccl_leave(end);
    if (status == LL_STATUS_OK && n) {
        const cudaError_t watched = lli_nccl_watch_stream(end, stream);
        if (watched != cudaSuccess) status = broken_cuda(end, "sum_f32", (int)watched);
    }
    return status;
}

/* Records of calls go over the host's communicator: nothing is queued before all ranks agree. */
static ll_status nccl_all_gather(void *self, const void *mine, void *all, size_t bytes) {
    lli_nccl_end *end = self;
    if (lli_nccl_is_dead(end)) {
        if (end->host.abort) end->host.abort(end->host.self, end->sentence);
        return LL_STATUS_COMM;
    }
    const ll_status status = end->host.all_gather(end->host.self, mine, all, bytes);
    if (status != LL_STATUS_OK) {
        const char *why = end->host.error ? end->host.error(end->host.self) : "";
        lli_nccl_kill(end, "%s", why && *why ? why : "all_gather of the host's communicator failed");
        (void)lli_nccl_is_dead(end);
    }
    return status;
}

static void nccl_abort(void *self, const char *sentence) {
    lli_nccl_end *end = self;
    if (end->host.abort) end->host.abort(end->host.self, sentence);
    lli_nccl_kill(end, "%s", sentence ? sentence : "");
}

static const char *nccl_error(void *self) {
    lli_nccl_end *end = self;
    (void)lli_nccl_is_dead(end);
    return end->sentence;
}

/* ---- Life --------------------------------------------------------------------------------------- */

/* NCCL's end, together with the other ranks', unless the group is dead. */
static void disconnect(lli_nccl_end *end) {
    if (!lli_nccl_hold(end)) return; /* the watching thread ends it, or has */
    const bool fine = settle(end, ncclCommFinalize(end->nccl)) == ncclSuccess;
    (void)(fine ? ncclCommDestroy(end->nccl) : ncclCommAbort(end->nccl));
    end->nccl = NULL;
    lli_nccl_leave(end);
}

static void end_free(lli_nccl_end *end) {
    if (!end) return;
    int callers = 0;
    (void)cudaGetDevice(&callers);
    (void)cudaSetDevice(end->device);
    if (end->watch.started && end->nccl) disconnect(end);
    lli_nccl_watch_close(end);
    if (end->nccl && !end->watch.aborted) (void)ncclCommAbort(end->nccl);
    (void)cudaFree(end->received);
    (void)cudaSetDevice(callers);
    free(end);
}

static void nccl_destroy(void *self) {
    end_free(self);
}

/* This rank's half of making an end: everything but NCCL's communicator. */
static ll_status prepare(const ll_comm *host, int32_t timeout_ms, lli_nccl_end **result, hello *mine) {
    const reason why = {mine->sentence, sizeof mine->sentence};
    lli_nccl_end *end = calloc(1, sizeof *end);
    *result = end;
    if (!end) return refuse(why, LL_STATUS_MEMORY, "no memory");
    end->host = *host;
    end->rank = host->rank;
    end->size = host->size;
    end->timeout_ms = timeout_ms ? timeout_ms : LL_COMM_TIMEOUT_MS;
    const int64_t others = host->size > 1 ? host->size - 1 : 1;
    end->slice = ((int64_t)kReceivedMib << 20) / (int64_t)sizeof(float) / others / 4 * 4;
    cudaError_t cuda = cudaGetDevice(&end->device);
    if (cuda == cudaSuccess) cuda = cudaDeviceGetPCIBusId(mine->bus, kBusBytes, end->device);
    if (cuda == cudaSuccess) cuda = cudaMalloc((void **)&end->received, (size_t)kReceivedMib << 20);
    if (cuda == cudaSuccess) cuda = (cudaError_t)lli_nccl_load_add_ranks();
    if (cuda != cudaSuccess) return refuse(why, LL_STATUS_CUDA, "CUDA: %s", cudaGetErrorString(cuda));
    (void)gethostname(mine->host, kHostBytes - 1);
    if (host->rank == 0) {
        const ncclResult_t id = ncclGetUniqueId(&mine->id);
        if (id != ncclSuccess) return refuse(why, LL_STATUS_COMM, "NCCL: %s", ncclGetErrorString(id));
    }
    return LL_STATUS_OK;
}

/* From all ranks' hellos the same verdict everywhere. */
static ll_status judge(const hello *all, int32_t size, reason why) {
    for (int32_t r = 0; r < size; r++) {
        if (all[r].status != LL_STATUS_OK) {
            return refuse(why, (ll_status)all[r].status, "ll_comm_nccl: rank %d of %d: %s", r, size,
                          all[r].sentence);
        }
    }
    for (int32_t r = 1; r < size; r++) {
        for (int32_t q = 0; q < r; q++) {
            if (strcmp(all[q].bus, all[r].bus) == 0 && strcmp(all[q].host, all[r].host) == 0) {
                return refuse(why, LL_STATUS_INVALID_ARG,
                              "ll_comm_nccl: ranks %d and %d are both on GPU %s of %s, want one GPU a rank",
                              q, r, all[r].bus, all[r].host);
            }
        }
    }
    return LL_STATUS_OK;
}

static ll_status connect(lli_nccl_end *end, const ncclUniqueId *id, reason why) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    /* Before NCCL's communicator is there the watching thread has nothing to end. */
    if (!lli_nccl_watch_open(end)) return refuse(why, LL_STATUS_MEMORY, "ll_comm_nccl: no thread");
    ncclComm_t made = NULL;
    ncclResult_t result = ncclCommInitRankConfig(&made, end->size, *id, end->rank, &config);
    end->nccl = made;
    result = made ? settle(end, result) : result;
    if (result == ncclSuccess) return LL_STATUS_OK;
    lli_nccl_kill(end, "it was not made");
    return refuse(why, LL_STATUS_COMM, "ll_comm_nccl: rank %d of %d: %s", end->rank, end->size,
                  result == ncclInProgress ? "not all ranks came within the time limit"
                                           : ncclGetErrorString(result));
}

static ll_status make(const ll_comm *host, int32_t timeout_ms, ll_comm *comm, reason why) {
    hello mine = {0}, *all = calloc((size_t)host->size, sizeof *all);
    lli_nccl_end *end = NULL;
    ll_status status = prepare(host, timeout_ms, &end, &mine);
    if (!all && status == LL_STATUS_OK) {
        status = refuse((reason){mine.sentence, sizeof mine.sentence}, LL_STATUS_MEMORY, "no memory");
    }
    mine.status = (int32_t)status;
    if (!all) {
        if (host->abort) host->abort(host->self, "ll_comm_nccl: a rank has no memory");
        status = refuse(why, LL_STATUS_MEMORY, "ll_comm_nccl: no memory");
    } else {
        status = host->all_gather(host->self, &mine, all, sizeof mine);
        if (status != LL_STATUS_OK) {
            const char *said = host->error ? host->error(host->self) : "";
            status = refuse(why, LL_STATUS_COMM, "ll_comm_nccl: %s", said ? said : "all_gather failed");
        }
        if (status == LL_STATUS_OK) status = judge(all, host->size, why);
        if (status == LL_STATUS_OK) status = connect(end, &all[0].id, why);
    }
    free(all);
    if (status != LL_STATUS_OK) {
        end_free(end);
        return status;
    }
    *comm = (ll_comm){.struct_bytes = sizeof *comm,
                      .rank = end->rank,
                      .size = end->size,
                      .debug = host->debug,
                      .memory = LL_COMM_MEMORY_DEVICE,
                      .self = end,
                      .max_i32 = nccl_max_i32,
                      .sum_i64 = nccl_sum_i64,
                      .all_gather = nccl_all_gather,
                      .sum_f32 = nccl_sum_f32,
                      .abort = nccl_abort,
                      .error = nccl_error,
                      .destroy = nccl_destroy};
    return LL_STATUS_OK;
}

int32_t ll_comm_nccl_create(const ll_comm *host, int32_t timeout_ms, ll_comm *comm, char *text,
                            size_t text_bytes) {
    const reason why = {text, text_bytes};
    if (!comm || comm->struct_bytes != sizeof *comm) {
        return refuse(why, LL_STATUS_INVALID_ARG, "ll_comm_nccl: comm is NULL or not LL_COMM_INIT");
    }
    if (!host || host->struct_bytes != sizeof *host || !host->all_gather || host->size < 1) {
        return refuse(why, LL_STATUS_INVALID_ARG, "ll_comm_nccl: host is no communicator");
    }
    if (timeout_ms < 0) {
        return refuse(why, LL_STATUS_INVALID_ARG, "ll_comm_nccl: timeout_ms is %d, want 0 (for %d) or more",
                      timeout_ms, LL_COMM_TIMEOUT_MS);
    }
    return make(host, timeout_ms, comm, why);
}
