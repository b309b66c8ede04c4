/* The threads of a plan: who runs what, barriers, a busy team, a forked child, the floating-point
 * environment. */
#define _GNU_SOURCE /* fork, alarm, setenv, signal masks */
#include "core/pool.h"

#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { kThreads = 4, kRounds = 200 };

typedef struct record {
    int32_t runs[kThreads], team_size, rounding[kThreads];
    int64_t values[kThreads], sums[kThreads];
    lli_pool *pool;
    struct record *inner;
    int signals_blocked;
} record;

static void count_job(void *context, int32_t thread, const lli_team *team) {
    record *r = context;
    r->runs[thread]++;
    if (thread == 0) r->team_size = lli_team_size(team);
}

static void every_thread_once(void **unused) {
    (void)unused;
    lli_pool *pool;
    assert_int_equal(lli_pool_create(kThreads, &pool), LL_STATUS_OK);
    for (int32_t n = 1; n <= kThreads + 2; n++) {
        record r = {{0}, 0, {0}, {0}, {0}, NULL, NULL, 0};
        const int32_t size = n < kThreads ? n : kThreads;
        for (int round = 0; round < kRounds; round++) lli_pool_run(pool, n, count_job, &r);
        assert_int_equal(r.team_size, size);
        for (int32_t t = 0; t < kThreads; t++) assert_int_equal(r.runs[t], t < size ? kRounds : 0);
    }
    lli_pool_destroy(pool);
    lli_pool_destroy(NULL);
}

/* What each thread wrote before a barrier, every thread sees after it. */
static void barrier_job(void *context, int32_t thread, const lli_team *team) {
    record *r = context;
    for (int round = 1; round <= kRounds; round++) {
        r->values[thread] = round * (thread + 1);
        lli_team_barrier(team);
        int64_t sum = 0;
        for (int32_t t = 0; t < lli_team_size(team); t++) sum += r->values[t];
        r->sums[thread] += sum == round * 10 ? 1 : 0;
        lli_team_barrier(team);
    }
}

static void barriers(void **unused) {
    (void)unused;
    lli_pool *pool;
    record r = {{0}, 0, {0}, {0}, {0}, NULL, NULL, 0};
    assert_int_equal(lli_pool_create(kThreads, &pool), LL_STATUS_OK);
    lli_pool_run(pool, kThreads, barrier_job, &r);
    for (int32_t t = 0; t < kThreads; t++) assert_int_equal(r.sums[t], kRounds);
    lli_pool_destroy(pool);
}

/* A job that runs another on the same pool meets a busy team: the inner one runs alone instead of waiting. */
static void nested_job(void *context, int32_t thread, const lli_team *team) {
    record *r = context;
    (void)team;
    if (thread == 0) lli_pool_run(r->pool, kThreads, count_job, r->inner);
}

static void busy_team(void **unused) {
    (void)unused;
    record inner = {{0}, 0, {0}, {0}, {0}, NULL, NULL, 0}, outer = inner;
    assert_int_equal(lli_pool_create(kThreads, &outer.pool), LL_STATUS_OK);
    outer.inner = &inner;
    lli_pool_run(outer.pool, kThreads, nested_job, &outer);
    assert_int_equal(inner.team_size, 1);
    assert_int_equal(inner.runs[0], 1);
    lli_pool_run(outer.pool, kThreads, count_job, &inner); /* and is free again */
    assert_int_equal(inner.team_size, kThreads);
    lli_pool_destroy(outer.pool);
}

static void environment_job(void *context, int32_t thread, const lli_team *team) {
    record *r = context;
    sigset_t blocked;
    (void)team;
    r->rounding[thread] = fegetround();
    if (thread == 1) {
        pthread_sigmask(SIG_SETMASK, NULL, &blocked);
        r->signals_blocked = sigismember(&blocked, SIGINT) == 1 && sigismember(&blocked, SIGALRM) == 1;
    }
}

/* Whatever the caller's rounding, jobs round to nearest; the caller's comes back. Workers take no signals. */
static void environment(void **unused) {
    (void)unused;
    record r = {{0}, 0, {0}, {0}, {0}, NULL, NULL, 0};
    lli_pool *pool;
    sigset_t blocked;
    fesetround(FE_UPWARD);
    assert_int_equal(lli_pool_create(kThreads, &pool), LL_STATUS_OK);
    lli_pool_run(pool, kThreads, environment_job, &r);
    const int after = fegetround();
    fesetround(FE_TONEAREST);
    assert_int_equal(after, FE_UPWARD);
    for (int32_t t = 0; t < kThreads; t++) assert_int_equal(r.rounding[t], FE_TONEAREST);
    assert_true(r.signals_blocked);
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    assert_int_equal(sigismember(&blocked, SIGINT), 0);
    lli_pool_destroy(pool);
}

/* A child has no workers: its job runs alone, and destroying its copy of the pool waits for nobody. */
static void forked_child(void **unused) {
    (void)unused;
    lli_pool *pool;
    assert_int_equal(lli_pool_create(kThreads, &pool), LL_STATUS_OK);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        record r = {{0}, 0, {0}, {0}, {0}, NULL, NULL, 0};
        alarm(20);
        lli_pool_run(pool, kThreads, count_job, &r);
        lli_pool_destroy(pool);
        _exit(r.team_size == 1 && r.runs[0] == 1 ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    lli_pool_destroy(pool);
}

static void number_of_threads(void **unused) {
    (void)unused;
    int32_t n = 0;
    static const char *const bad[] = {"0", "-1", "x", "2x", "1025", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("LL_NUM_THREADS", bad[i], 1);
        assert_int_equal(lli_pool_default_threads(&n), LL_STATUS_INVALID_ARG);
        assert_non_null(strstr(ll_last_error(), "LL_NUM_THREADS"));
    }
    setenv("LL_NUM_THREADS", "7", 1);
    assert_int_equal(lli_pool_default_threads(&n), LL_STATUS_OK);
    assert_int_equal(n, 7);
    setenv("LL_NUM_THREADS", "", 1);
    assert_int_equal(lli_pool_default_threads(&n), LL_STATUS_OK);
    assert_true(n >= 1);
    unsetenv("LL_NUM_THREADS");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_thread_once), cmocka_unit_test(barriers),
        cmocka_unit_test(busy_team),         cmocka_unit_test(environment),
        cmocka_unit_test(forked_child),      cmocka_unit_test(number_of_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
