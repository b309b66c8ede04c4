#define _GNU_SOURCE /* clock_gettime, nanosleep */
#include "ranks.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

typedef struct start {
    rank_fn *fn;
    pthread_barrier_t *together; /* a thread may be born late: on a busy machine by more than a time limit */
    rank_run *run;
} start;

static void *rank_main(void *argument) {
    const start *s = argument;
    pthread_barrier_wait(s->together);
    const double begin = seconds_now();
    s->fn(s->run);
    s->run->seconds = seconds_now() - begin;
    return NULL;
}

void run_ranks(ll_comm *comms, int32_t size, rank_fn *fn, void *context, rank_run *runs) {
    pthread_t threads[kRanksMax];
    start starts[kRanksMax];
    pthread_barrier_t together;
    assert_true(size >= 1 && size <= kRanksMax);
    assert_int_equal(pthread_barrier_init(&together, NULL, (unsigned)size), 0);
    for (int32_t rank = 0; rank < size; rank++) {
        memset(&runs[rank], 0, sizeof runs[rank]);
        runs[rank].comm = &comms[rank];
        runs[rank].rank = comms[rank].rank;
        runs[rank].context = context;
        starts[rank] = (start){fn, &together, &runs[rank]};
        assert_int_equal(pthread_create(&threads[rank], NULL, rank_main, &starts[rank]), 0);
    }
    for (int32_t rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
    pthread_barrier_destroy(&together);
}

void run_checked(ll_comm *comms, int32_t size, rank_fn *fn, void *context) {
    rank_run runs[kRanksMax];
    run_ranks(comms, size, fn, context, runs);
    for (int32_t rank = 0; rank < size; rank++) {
        if (runs[rank].bad_line) {
            fail_msg("rank %d of %d: line %d: %s; its last sentence: %s", rank, size, runs[rank].bad_line,
                     runs[rank].bad_text, runs[rank].sentence);
        }
    }
}

void note_bad(rank_run *run, int32_t line, const char *text) {
    if (run->bad_line) return;
    run->bad_line = line;
    snprintf(run->bad_text, sizeof run->bad_text, "%s", text);
}

void note_status(rank_run *run, ll_status status) {
    run->status = status;
    snprintf(run->sentence, sizeof run->sentence, "%s", run->comm->error(run->comm->self));
}

void make_world(int32_t size, int32_t timeout_ms, ll_comm *comms) {
    assert_int_equal(ll_comm_threads(size, timeout_ms, comms), LL_STATUS_OK);
}

void destroy_all(ll_comm *comms, int32_t size) {
    for (int32_t rank = 0; rank < size; rank++) ll_comm_destroy(&comms[rank]);
}

double seconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void sleep_ms(int64_t ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&time, &time) == -1 && errno == EINTR) continue;
}

static uint64_t mix(int32_t rank, int64_t i) {
    uint64_t z = ((uint64_t)rank << 32) + (uint64_t)i * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int32_t value_i32(int32_t rank, int64_t i) {
    const uint32_t bits = (uint32_t)(mix(rank, i) >> 32);
    int32_t value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int64_t value_i64(int32_t rank, int64_t i) {
    return (int64_t)(mix(rank, i) >> 6) - ((int64_t)1 << 57); /* sums of 16 of them fit */
}

float value_f32(int32_t rank, int64_t i) {
    static const float scales[] = {1e-3f, 1.0f, 1e3f, 1e7f}; /* so that the order of additions shows */
    const uint64_t bits = mix(rank, i);
    return ((float)(bits >> 40) - 8388608.0f) * 0x1p-23f * scales[bits & 3];
}
