/* Worker threads that sleep on a condition variable between jobs.
 *
 * The caller is thread 0 of the team. Jobs are numbered by `generation`; a worker that is not part of a
 * job's team sleeps through it. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "core/pool.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct lli_team {
    int32_t size;
    pthread_barrier_t *barrier; /* NULL for a team of one */
};

struct lli_pool {
    int32_t n_threads;
    pid_t owner; /* a forked child must not wait for workers that it does not have */
    atomic_flag busy;
    pthread_mutex_t mutex;
    pthread_cond_t start, finish;
    int64_t generation;
    bool stop;
    lli_job *job;
    void *context;
    lli_team team;
    pthread_barrier_t barrier;
    int32_t n_running; /* workers of the job that have not finished */
    int32_t n_started;
    pthread_t *workers;
};

typedef struct worker_start {
    lli_pool *pool;
    int32_t thread;
} worker_start;

ll_status lli_pool_default_threads(int32_t *n_threads) {
    const char *text = getenv("LL_NUM_THREADS");
    if (text && *text) {
        char *end;
        long number = strtol(text, &end, 10);
        LLI_REQUIRE(*end == 0 && number >= 1 && number <= kPoolMaxThreads, LL_STATUS_INVALID_ARG,
                    "ll_plan_create: LL_NUM_THREADS is \"%s\", want 1 .. %d", text, kPoolMaxThreads);
        *n_threads = (int32_t)number;
        return LL_STATUS_OK;
    }
    long count = sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) count = CPU_COUNT(&allowed);
#endif
    *n_threads = count < 1 ? 1 : count > kPoolMaxThreads ? kPoolMaxThreads : (int32_t)count;
    return LL_STATUS_OK;
}

static void run_job(lli_job *job, void *context, int32_t thread, const lli_team *team) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    job(context, thread, team);
    fesetenv(&callers);
}

static void *worker_main(void *argument) {
    worker_start start = *(worker_start *)argument;
    free(argument);
    lli_pool *pool = start.pool;
    int64_t seen = 0;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->stop && pool->generation == seen) pthread_cond_wait(&pool->start, &pool->mutex);
        if (pool->stop) break;
        seen = pool->generation;
        if (start.thread >= pool->team.size) continue;
        pthread_mutex_unlock(&pool->mutex);
        run_job(pool->job, pool->context, start.thread, &pool->team);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->n_running == 0) pthread_cond_signal(&pool->finish);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

ll_status lli_pool_create(int32_t n_threads, lli_pool **result) {
    *result = NULL;
    lli_pool *pool = calloc(1, sizeof *pool);
    pthread_t *workers = calloc((size_t)n_threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return lli_fail(LL_STATUS_MEMORY, "ll_plan_create: no memory for %d threads", n_threads);
    }
    pool->n_threads = n_threads;
    pool->owner = getpid();
    pool->workers = workers;
    atomic_flag_clear(&pool->busy);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->finish, NULL);
    /* Signals are the program's business: its handlers must not run on threads it does not know. */
    sigset_t all, callers;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers);
    ll_status status = LL_STATUS_OK;
    for (int32_t thread = 1; thread < n_threads && status == LL_STATUS_OK; thread++) {
        worker_start *start = malloc(sizeof *start);
        if (start) *start = (worker_start){pool, thread};
        int error = start ? pthread_create(&workers[thread], NULL, worker_main, start) : ENOMEM;
        if (error) {
            free(start);
            status = lli_fail(LL_STATUS_MEMORY, "ll_plan_create: thread %d of %d could not be started: %s",
                              thread, n_threads, strerror(error));
        } else {
            pool->n_started = thread;
        }
    }
    pthread_sigmask(SIG_SETMASK, &callers, NULL);
    if (status != LL_STATUS_OK) {
        lli_pool_destroy(pool);
        return status;
    }
    *result = pool;
    return LL_STATUS_OK;
}

void lli_pool_destroy(lli_pool *pool) {
    if (!pool) return;
    if (pool->owner == getpid()) {
        pthread_mutex_lock(&pool->mutex);
        pool->stop = true;
        pthread_cond_broadcast(&pool->start);
        pthread_mutex_unlock(&pool->mutex);
        for (int32_t thread = 1; thread <= pool->n_started; thread++)
            pthread_join(pool->workers[thread], NULL);
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->start);
        pthread_cond_destroy(&pool->finish);
    }
    free(pool->workers);
    free(pool);
}

void lli_pool_run(lli_pool *pool, int32_t n_threads, lli_job *job, void *context) {
    if (n_threads > pool->n_threads) n_threads = pool->n_threads;
    const lli_team alone = {1, NULL};
    if (n_threads <= 1 || pool->owner != getpid() || atomic_flag_test_and_set(&pool->busy)) {
        run_job(job, context, 0, &alone);
        return;
    }
    pthread_barrier_init(&pool->barrier, NULL, (unsigned)n_threads);
    pthread_mutex_lock(&pool->mutex);
    pool->job = job;
    pool->context = context;
    pool->team = (lli_team){n_threads, &pool->barrier};
    pool->n_running = n_threads - 1;
    pool->generation++;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->mutex);
    run_job(job, context, 0, &pool->team);
    pthread_mutex_lock(&pool->mutex);
    while (pool->n_running > 0) pthread_cond_wait(&pool->finish, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
    pthread_barrier_destroy(&pool->barrier);
    atomic_flag_clear(&pool->busy);
}

int32_t lli_team_size(const lli_team *team) {
    return team->size;
}

void lli_team_barrier(const lli_team *team) {
    if (team->barrier) pthread_barrier_wait(team->barrier);
}
