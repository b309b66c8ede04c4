/* The thread that ends a group which does not move: NCCL's kernels wait for their peers without a limit. */
#define _GNU_SOURCE /* pthread_condattr_setclock */
#include "comm/nccl/end.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { kLookMs = 100 };

int64_t lli_nccl_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void kill_locked(lli_nccl_watch *watch, const char *format, va_list args) {
    if (watch->dead) return;
    vsnprintf(watch->sentence, sizeof watch->sentence, format, args);
    watch->dead = true;
    pthread_cond_broadcast(&watch->changed);
}

void lli_nccl_kill(lli_nccl_end *end, const char *format, ...) {
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&end->watch.mutex);
    kill_locked(&end->watch, format, args);
    pthread_mutex_unlock(&end->watch.mutex);
    va_end(args);
}

bool lli_nccl_is_dead(lli_nccl_end *end) {
    pthread_mutex_lock(&end->watch.mutex);
    const bool dead = end->watch.dead;
    if (dead) memcpy(end->sentence, end->watch.sentence, sizeof end->sentence);
    pthread_mutex_unlock(&end->watch.mutex);
    return dead;
}

static bool captured(cudaStream_t stream) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone;
}

bool lli_nccl_hold(lli_nccl_end *end) {
    lli_nccl_watch *watch = &end->watch;
    pthread_mutex_lock(&watch->mutex);
    const bool dead = watch->dead;
    if (dead) memcpy(end->sentence, watch->sentence, sizeof end->sentence);
    watch->busy = !dead;
    pthread_mutex_unlock(&watch->mutex);
    return !dead;
}

bool lli_nccl_enter(lli_nccl_end *end, cudaStream_t stream) {
    if (!lli_nccl_hold(end)) return false;
    /* Both are of this thread, which alone records the event. */
    if (end->watch.used && !captured(stream)) (void)cudaStreamWaitEvent(stream, end->watch.queued, 0);
    return true;
}

void lli_nccl_leave(lli_nccl_end *end) {
    pthread_mutex_lock(&end->watch.mutex);
    end->watch.busy = false;
    pthread_cond_broadcast(&end->watch.changed);
    pthread_mutex_unlock(&end->watch.mutex);
}

cudaError_t lli_nccl_watch_stream(lli_nccl_end *end, cudaStream_t stream) {
    if (captured(stream)) return cudaSuccess;
    lli_nccl_watch *watch = &end->watch;
    pthread_mutex_lock(&watch->mutex);
    const cudaError_t status = cudaEventRecord(watch->queued, stream);
    watch->used = watch->pending = status == cudaSuccess;
    watch->deadline_ms = lli_nccl_now_ms() + end->timeout_ms;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
    return status;
}

static void wait_ms(lli_nccl_watch *watch, int64_t ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    (void)pthread_cond_timedwait(&watch->changed, &watch->mutex, &until);
}

static void *watch_main(void *argument) {
    lli_nccl_end *end = argument;
    lli_nccl_watch *watch = &end->watch;
    /* A capture of another thread must not be broken by a question about an event. */
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaSetDevice(end->device);
    pthread_mutex_lock(&watch->mutex);
    while (!watch->stop) {
        if (watch->dead && !watch->aborted && !watch->busy && end->nccl) {
            watch->aborted = true;
            pthread_mutex_unlock(&watch->mutex); /* it may wait for the GPU */
            (void)ncclCommAbort(end->nccl);
            pthread_mutex_lock(&watch->mutex);
            continue;
        }
        if (watch->pending && !watch->dead) {
            if (cudaEventQuery(watch->queued) != cudaErrorNotReady) {
                watch->pending = false;
            } else if (lli_nccl_now_ms() > watch->deadline_ms) {
                snprintf(watch->sentence, sizeof watch->sentence,
                         "rank %d of %d: an operation on the GPU did not end within %d ms of being queued; "
                         "results since then are undefined",
                         end->rank, end->size, end->timeout_ms);
                watch->dead = true;
                continue;
            }
        }
        if (watch->pending && !watch->dead) {
            wait_ms(watch, kLookMs);
        } else {
            pthread_cond_wait(&watch->changed, &watch->mutex);
        }
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}

bool lli_nccl_watch_open(lli_nccl_end *end) {
    lli_nccl_watch *watch = &end->watch;
    pthread_condattr_t attributes;
    if (pthread_mutex_init(&watch->mutex, NULL) != 0) return false;
    if (pthread_condattr_init(&attributes) != 0) goto no_attributes;
    if (pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0) goto no_cond;
    if (pthread_cond_init(&watch->changed, &attributes) != 0) goto no_cond;
    if (cudaEventCreateWithFlags(&watch->queued, cudaEventDisableTiming) != cudaSuccess) goto no_event;
    if (pthread_create(&watch->thread, NULL, watch_main, end) != 0) goto no_thread;
    pthread_condattr_destroy(&attributes);
    watch->started = true;
    return true;
no_thread:
    (void)cudaEventDestroy(watch->queued);
no_event:
    pthread_cond_destroy(&watch->changed);
no_cond:
    pthread_condattr_destroy(&attributes);
no_attributes:
    pthread_mutex_destroy(&watch->mutex);
    return false;
}

void lli_nccl_watch_close(lli_nccl_end *end) {
    lli_nccl_watch *watch = &end->watch;
    if (!watch->started) return;
    pthread_mutex_lock(&watch->mutex);
    watch->stop = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
    pthread_join(watch->thread, NULL);
    (void)cudaEventDestroy(watch->queued);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->mutex);
    watch->started = false;
}
