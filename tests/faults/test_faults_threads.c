/* Reported faults of sections 8 and 11 about concurrency: calls in flight together on one plan, and a
 * forked child. */
#define _DEFAULT_SOURCE
#include "harness.h"
#include "sanitizer.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kForkedPlans = WITH_TSAN ? 1 : 2 };

/* One caller's results and workspace; operands and plan are shared. Asserts stay on the main thread:
 * a failing cmocka assert jumps, which only the test's own thread may do. */
typedef struct caller {
    const rig *r;
    float *nll, *entropy, *loss, *grad_x, *grad_w;
    ll_sums sums;
    void *workspace;
    int repeats, failures;
    char why[200];
} caller;

static ll_linear_ce_args caller_args(const caller *c) {
    ll_linear_ce_args a = c->r->args;
    a.nll = c->nll;
    a.entropy = c->entropy;
    a.loss = c->loss;
    a.grad_x.data = c->grad_x;
    a.grad_w.data = c->grad_w;
    a.lse = a.lse_lo = a.z_loss = NULL;
    a.argmax = NULL;
    a.workspace = c->workspace;
    return a;
}

static int differs(const caller *c) {
    const rig *r = c->r;
    size_t n = sizeof(float) * (size_t)r->n, d = (size_t)r->d;
    return memcmp(c->nll, r->args.nll, n) != 0 || memcmp(c->entropy, r->args.entropy, n) != 0 ||
           memcmp(c->loss, r->args.loss, sizeof(float)) != 0 ||
           memcmp(&c->sums, &r->sums, sizeof c->sums) != 0 ||
           memcmp(c->grad_x, r->args.grad_x.data, n * d) != 0 ||
           memcmp(c->grad_w, r->args.grad_w.data, sizeof(float) * (size_t)r->v * d) != 0;
}

static void *caller_main(void *arg) {
    caller *c = arg;
    ll_linear_ce_args a = caller_args(c);
    a.sums = &c->sums;
    for (int i = 0; i < c->repeats; i++) {
        memset(c->grad_w, 0xff, sizeof(float) * (size_t)(c->r->v * c->r->d));
        ll_status status = ll_linear_ce_forward_backward(c->r->plan, &a, NULL);
        if (status != LL_STATUS_OK) snprintf(c->why, sizeof c->why, "%s", ll_last_error());
        c->failures += status != LL_STATUS_OK || differs(c);
        /* A failing call beside good ones: its sentence belongs to this thread alone. */
        ll_linear_ce_args bad = a;
        bad.workspace = NULL;
        c->failures += ll_linear_ce_forward_backward(c->r->plan, &bad, NULL) != LL_STATUS_WORKSPACE;
    }
    return NULL;
}

static void calls_in_flight(int n_callers, int repeats, int32_t n_threads, uint64_t seed) {
    enum { kCallersMax = 48 };
    caller callers[kCallersMax] = {{0}};
    pthread_t threads[kCallersMax];
    rig *r = rig_open(23, 6, 200, LL_DTYPE_F32);
    r->desc.n_threads = n_threads;
    rig_random(r, seed, 1, 1);
    rig_run(r);
    size_t floats = (size_t)(r->n * r->d + r->v * r->d + 2 * r->n + 1);
    for (int i = 0; i < n_callers; i++) {
        float *results = calloc(floats, sizeof *results);
        assert_non_null(results);
        float *grad_w = results + r->n * r->d, *nll = grad_w + r->v * r->d;
        callers[i] = (caller){.r = r,
                              .nll = nll,
                              .entropy = nll + r->n,
                              .loss = nll + 2 * r->n,
                              .grad_x = results,
                              .grad_w = grad_w,
                              .repeats = repeats};
        callers[i].workspace = aligned_alloc(64, (r->args.workspace_bytes + 64) / 64 * 64);
        assert_non_null(callers[i].workspace);
    }
    for (int i = 0; i < n_callers; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, caller_main, &callers[i]), 0);
    for (int i = 0; i < n_callers; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < n_callers; i++) {
        if (callers[i].failures)
            fail_msg("caller %d: %d of %d calls differ; %s", i, callers[i].failures, repeats, callers[i].why);
        free(callers[i].grad_x);
        free(callers[i].workspace);
    }
    rig_close(r);
}

static void b80_calls_in_flight(void **state) {
    (void)state;
    int repeats = on_slow_kernel() ? 5 : 20;
    calls_in_flight(48, repeats, 1, 80);
    calls_in_flight(48, repeats, 3, 80);
}

static void b94_threads_share_a_plan(void **state) {
    (void)state;
    calls_in_flight(8, 100, 2, 94);
}

/* The child has this process's plan but none of its worker threads. Exit code: 0 right numbers or an
 * error status, 1 wrong numbers; the alarm kills it if it hangs. */
static int child(rig *r, int with_new_plan) {
    alarm(30);
    if (with_new_plan) {
        ll_plan *plan = NULL;
        if (ll_plan_create(&r->desc, &plan) != LL_STATUS_OK) return 1;
        r->plan = plan;
    }
    caller c = {.r = r};
    size_t n = (size_t)r->n, d = (size_t)r->d;
    c.nll = calloc(2 * n + 1 + n * d + (size_t)r->v * d, sizeof(float));
    if (!c.nll) return 1;
    c.entropy = c.nll + n;
    c.loss = c.entropy + n;
    c.grad_x = c.loss + 1;
    c.grad_w = c.grad_x + n * d;
    c.workspace = r->args.workspace;
    ll_linear_ce_args a = caller_args(&c);
    a.sums = &c.sums;
    ll_status status = ll_linear_ce_forward_backward(r->plan, &a, NULL);
    if (status != LL_STATUS_OK) return with_new_plan || !ll_last_error()[0];
    return differs(&c);
}

static void b95_forked_child(void **state) {
    (void)state;
    for (int with_new_plan = 0; with_new_plan < kForkedPlans; with_new_plan++) {
        rig *r = rig_open(300, 16, 700, LL_DTYPE_F32);
        r->desc.n_threads = 3;
        rig_random(r, 95, 1, 1);
        rig_run(r);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) _exit(child(r, with_new_plan));
        int status = 0;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFSIGNALED(status))
            fail_msg("the child died of signal %d (%d: it hung)", WTERMSIG(status), SIGALRM);
        assert_int_equal(WEXITSTATUS(status), 0);
        rig_run(r); /* and the parent goes on */
        rig_close(r);
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b80_calls_in_flight),
        FAULT(b94_threads_share_a_plan),
        FAULT(b95_forked_child),
    };
    return faults_main("faults: threads", tests, COUNT(tests), argc, argv);
}
