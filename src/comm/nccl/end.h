/* An end of a group over NCCL, as the files of this folder share it.
 *
 *   nccl.c         making and ending, the operations
 *   watch.c        the thread that gives up what does not end in time
 *   add_ranks.cu   the sum of slices in the order of ranks */
#ifndef LLI_COMM_NCCL_END_H
#define LLI_COMM_NCCL_END_H

#include <logitless/comm_nccl.h>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { kNcclSentenceBytes = 512 };

/* Guarded by the mutex but for what does not change. */
typedef struct lli_nccl_watch {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stop;
    bool busy;    /* the rank is in an NCCL call: it must not be aborted under its feet */
    bool used;    /* `queued` was recorded */
    bool pending; /* `queued` marks the last operation, which is to end before `deadline` */
    int64_t deadline_ms;
    cudaEvent_t queued;
    bool dead, aborted; /* aborted: ncclCommAbort was called */
    char sentence[kNcclSentenceBytes];
} lli_nccl_watch;

typedef struct lli_nccl_end {
    ll_comm host;
    ncclComm_t nccl;
    int32_t rank, size, timeout_ms;
    int device;
    float *received; /* device memory for the other ranks' shares of a slice */
    int64_t slice;   /* floats of one of them at most */
    lli_nccl_watch watch;
    char sentence[kNcclSentenceBytes]; /* the rank's own copy */
} lli_nccl_end;

int64_t lli_nccl_now_ms(void);

/* The thread and what it needs. False: no memory. */
bool lli_nccl_watch_open(lli_nccl_end *end);
void lli_nccl_watch_close(lli_nccl_end *end); /* also after a failed open */
/* The group is dead with this sentence unless it has one; the thread ends what is queued. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void
lli_nccl_kill(lli_nccl_end *end, const char *format, ...);
/* True, and the sentence copied, if the group is dead. */
bool lli_nccl_is_dead(lli_nccl_end *end);
/* Around the rank's NCCL calls. False: the group is dead, and there is no end to be called. What is queued on
 * the stream from here on comes after the operation before it, be that on another stream: they share memory.
 */
bool lli_nccl_enter(lli_nccl_end *end, cudaStream_t stream);
bool lli_nccl_hold(lli_nccl_end *end); /* the same where nothing is queued */
void lli_nccl_leave(lli_nccl_end *end);
/* What was queued on the stream so far is to end in time. */
cudaError_t lli_nccl_watch_stream(lli_nccl_end *end, cudaStream_t stream);

/* mine[i] = sum over ranks in ascending order: of rank r, mine where r is `rank`, else received[k * stride +
 * i] with k its place among the others. Returns a cudaError_t. */
#ifdef __cplusplus
extern "C"
#endif
    int
    lli_nccl_add_ranks(float *mine, const float *received, int64_t n, int64_t stride, int32_t rank,
                       int32_t size, cudaStream_t stream);
#ifdef __cplusplus
extern "C"
#endif
    int
    lli_nccl_load_add_ranks(void);

#endif
