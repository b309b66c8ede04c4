/* How a GPU is called: graphs, streams and threads on one plan, targets that are no class, another device,
 * failures at the call. All on device memory; whether the numbers are right is tested elsewhere. */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "core/dtype.h"
#include "cuda/image.h"
#include "kernel_run.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { kPassCount = 3, kThreads = 4, kRounds = 6 };

/* A problem with its plan and its call in device memory. */
struct device_call {
    struct problem problem;
    struct operands operands;
    struct results results;
    int64_t bad_targets;
    ll_plan *plan;
    struct image image;
    ll_pass pass;
};

static ll_plan *plan_for(const struct problem *problem) {
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    problem_desc(problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    if (ll_plan_create(&desc, &plan) != LL_STATUS_OK) fail_msg("%s: %s", problem->text, ll_last_error());
    return plan;
}

static ll_linear_ce_args host_args(struct device_call *call) {
    static char some_workspace[64];
    ll_linear_ce_args args = problem_args(&call->problem, &call->operands, &call->results, call->pass);
    size_t bytes = 0;
    assert_int_equal(ll_plan_workspace(call->plan, call->pass, &bytes), LL_STATUS_OK);
    args.workspace = some_workspace; /* the image takes its own */
    args.workspace_bytes = bytes;
    args.bad_targets = &call->bad_targets;
    return args;
}

static void call_open(const char *text, ll_pass pass, ll_plan *plan, struct device_call *call) {
    *call = (struct device_call){.pass = pass};
    const char *why = problem_parse(text, &call->problem);
    if (why) fail_msg("%s", why);
    call->plan = plan ? plan : plan_for(&call->problem);
    assert_true(operands_create(&call->problem, &call->operands));
    assert_true(results_create(&call->problem, &call->results));
    if (pass == LL_PASS_BACKWARD) { /* from a forward */
        struct device_call forward = *call;
        forward.pass = LL_PASS_FORWARD;
        const ll_linear_ce_args args = host_args(&forward);
        assert_true(image_create(&args, call->problem.v_total, false, &forward.image));
        ll_stream stream = stream_open();
        assert_int_equal(ll_linear_ce_forward(call->plan, &forward.image.args, stream), LL_STATUS_OK);
        assert_true(stream_wait(stream) && image_fetch(&forward.image));
        stream_close(stream);
        image_destroy(&forward.image);
    }
    const ll_linear_ce_args args = host_args(call);
    const bool by_token = call->problem.loss.reduction == LL_REDUCTION_NONE;
    assert_true(image_create(&args, call->problem.v_total, by_token, &call->image));
}

static void call_close(struct device_call *call, bool with_plan) {
    image_destroy(&call->image);
    results_destroy(&call->results);
    operands_destroy(&call->operands);
    if (with_plan) ll_plan_destroy(call->plan);
}

static ll_status queue(const struct device_call *call, ll_stream stream) {
    const ll_linear_ce_args *args = &call->image.args;
    if (call->pass == LL_PASS_FORWARD) return ll_linear_ce_forward(call->plan, args, stream);
    if (call->pass == LL_PASS_BACKWARD) return ll_linear_ce_backward(call->plan, args, stream);
    return ll_linear_ce_forward_backward(call->plan, args, stream);
}

static void queued(const struct device_call *call, ll_stream stream) {
    if (queue(call, stream) != LL_STATUS_OK) fail_msg("%s: %s", call->problem.text, ll_last_error());
}

/* Other targets and another number of valid ones; one is no class. */
static void change_targets(struct device_call *call, int64_t every) {
    int64_t *ids = call->operands.args.target.data;
    for (int64_t i = 0; i < call->problem.n_tokens; i++) {
        ids[i] = (ids[i] < 0 ? 0 : ids[i] * 7 + i) % call->problem.v_total;
        if (i % every == 1) ids[i] = call->problem.loss.ignore_index;
    }
    if (call->pass == LL_PASS_FORWARD) ids[call->problem.n_tokens / 2] = call->problem.v_total + 5;
}

static void spoil(struct results *results) {
    for (int b = 0; b < kProblemOutputs; b++) {
        if (results->buffers[b].data) memset(results->buffers[b].data, 0xff, results->buffers[b].bytes);
    }
}

static int32_t fields_of(ll_pass pass) {
    return pass == LL_PASS_FORWARD    ? FIELDS_FORWARD
           : pass == LL_PASS_BACKWARD ? FIELDS_GRADIENTS
                                      : FIELDS_ALL;
}

static void check_graph(const char *text, ll_pass pass) {
    struct device_call call;
    struct results eager;
    call_open(text, pass, NULL, &call);
    assert_true(results_create(&call.problem, &eager));
    ll_stream stream = stream_open();
    assert_true(capture_begin(stream));
    queued(&call, stream);
    void *graph = capture_end(stream);
    assert_non_null(graph);
    for (int64_t round = 0; round < 3; round++) {
        if (round) {
            /* x of tokens that were ignored is NaN and stays so: the new targets must not name them */
            if (!call.problem.ignore_every) change_targets(&call, 2 + round);
        }
        if (pass != LL_PASS_BACKWARD) spoil(&call.results);
        image_refresh(&call.image);
        queued(&call, stream);
        assert_true(stream_wait(stream) && image_fetch(&call.image));
        for (int b = 0; b < kProblemOutputs; b++) {
            if (eager.buffers[b].data)
                memcpy(eager.buffers[b].data, call.results.buffers[b].data, eager.buffers[b].bytes);
        }
        if (pass != LL_PASS_BACKWARD) spoil(&call.results);
        image_refresh(&call.image);
        assert_true(graph_launch(graph, stream) && stream_wait(stream) && image_fetch(&call.image));
        assert_true(results_same_bits(&call.problem, "linear_ce_cuda", "a replayed graph", &call.results,
                                      &eager, fields_of(pass), 0, call.problem.n_tokens));
    }
    graph_close(graph);
    stream_close(stream);
    results_destroy(&eager);
    call_close(&call, true);
}

static void captured_and_replayed_with_other_targets(void **state) {
    (void)state;
    for (int pass = 0; pass < kPassCount; pass++) {
        check_graph("fb:bf16:n300:d64:v3000:bias:up", (ll_pass)pass);
        check_graph("fb:bf16:n300:d64:v3000:up", (ll_pass)pass);         /* exponentials kept in grad_w */
        check_graph("fb:bf16:n300:d64:v3000:gwf32:sgw8", (ll_pass)pass); /* and in the workspace */
        check_graph("fb:f16:n130:d48:v9000:ls0.1:cw:zl0.01", (ll_pass)pass);
        check_graph("fb:f32:n70:d33:v500:cap5:t0.7:ign3", (ll_pass)pass);
    }
}

/* ---- Streams and threads ------------------------------------------------------------------------ */

struct worker {
    struct device_call call;
    struct results want;
    pthread_t thread;
    int failures;
};

static void *work(void *argument) {
    struct worker *worker = argument;
    ll_stream stream = stream_open();
    for (int round = 0; round < kRounds; round++) {
        worker->failures += queue(&worker->call, stream) != LL_STATUS_OK;
        worker->failures += queue(&worker->call, stream) != LL_STATUS_OK;
        worker->failures += !stream_wait(stream);
    }
    stream_close(stream);
    return NULL;
}

static void threads_and_streams_share_a_plan(void **state) {
    (void)state;
    static const char text[] = "fb:bf16:n200:d128:v5000:bias:up:gwf32";
    struct worker workers[kThreads];
    struct problem problem;
    assert_null(problem_parse(text, &problem));
    ll_plan *plan = plan_for(&problem);
    for (int w = 0; w < kThreads; w++) {
        workers[w].failures = 0;
        call_open(text, (ll_pass)(w == 3 ? LL_PASS_FORWARD : LL_PASS_FORWARD_BACKWARD), plan,
                  &workers[w].call);
    }
    for (int w = 0; w < kThreads; w++) pthread_create(&workers[w].thread, NULL, work, &workers[w]);
    for (int w = 0; w < kThreads; w++) pthread_join(workers[w].thread, NULL);
    for (int w = 0; w < kThreads; w++) {
        assert_int_equal(workers[w].failures, 0);
        assert_true(image_fetch(&workers[w].call.image));
        assert_true(results_same_bits(&problem, "linear_ce_cuda", "threads", &workers[w].call.results,
                                      &workers[0].call.results, w == 3 ? FIELDS_FORWARD : FIELDS_ALL, 0,
                                      problem.n_tokens));
    }
    for (int w = 0; w < kThreads; w++) call_close(&workers[w].call, false);
    ll_plan_destroy(plan);
}

/* ---- Faults ------------------------------------------------------------------------------------- */

static void targets_that_are_no_class(void **state) {
    (void)state;
    struct device_call call;
    struct results clean;
    call_open("fb:bf16:n40:d32:v300:none:zl0.1:ign7", LL_PASS_FORWARD_BACKWARD, NULL, &call);
    assert_true(results_create(&call.problem, &clean));
    ll_stream stream = stream_open();
    queued(&call, stream);
    assert_true(stream_wait(stream) && image_fetch(&call.image));
    assert_int_equal(call.bad_targets, 0);
    for (int b = 0; b < kProblemOutputs; b++) {
        if (clean.buffers[b].data)
            memcpy(clean.buffers[b].data, call.results.buffers[b].data, clean.buffers[b].bytes);
    }
    int64_t *ids = call.operands.args.target.data, old[2] = {ids[5], ids[20]};
    ids[5] = 300;
    ids[20] = INT64_MIN;
    call.bad_targets = 100;
    image_refresh(&call.image);
    queued(&call, stream);
    assert_true(stream_wait(stream) && image_fetch(&call.image));
    assert_int_equal(call.bad_targets, 102);
    assert_true(isnan(call.results.nll[5]) && isnan(call.results.lse[20]) && isnan(call.results.loss[5]));
    assert_true(isnan(call.results.entropy[5]) && call.results.argmax[20] == -1);
    assert_true(isnan(
        lli_load(call.results.grad_x.data, call.results.grad_x.dtype, 5 * call.results.grad_x.row_stride)));
    for (int64_t i = 0; i < 40; i++) {
        if (i == 5 || i == 20) continue;
        assert_true(results_same_bits(&call.problem, "linear_ce_cuda", "rows beside a bad target",
                                      &call.results, &clean, FIELDS_FORWARD & ~FIELDS_SUMS, i, 1));
    }
    ids[5] = old[0];
    ids[20] = old[1];
    call.bad_targets = 0;
    image_refresh(&call.image);
    queued(&call, stream);
    assert_true(stream_wait(stream) && image_fetch(&call.image));
    assert_true(results_same_bits(&call.problem, "linear_ce_cuda", "the call after", &call.results, &clean,
                                  FIELDS_ALL, 0, 40));
    stream_close(stream);
    results_destroy(&clean);
    call_close(&call, true);
}

/* The default stream may not be used while one that waits for it is captured: the launch fails, and the call
 * must say so; the next one works. */
static void a_launch_that_fails(void **state) {
    (void)state;
    ll_status __real_ll_linear_ce_forward(const ll_plan *, const ll_linear_ce_args *, ll_stream);
    struct device_call call;
    call_open("fb:f32:n9:d8:v70", LL_PASS_FORWARD, NULL, &call);
    ll_stream stream = stream_open(), blocking = stream_open_blocking();
    assert_true(capture_begin(blocking));
    const ll_status status = __real_ll_linear_ce_forward(call.plan, &call.image.args, NULL);
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", ll_last_error());
    void *graph = capture_end(blocking);
    if (graph) graph_close(graph);
    stream_close(blocking);
    printf("the sentence: %s\n", sentence);
    assert_int_equal(status, LL_STATUS_CUDA);
    assert_non_null(strstr(sentence, "ll_linear_ce_forward: "));
    queued(&call, stream);
    assert_true(stream_wait(stream) && image_fetch(&call.image));
    assert_true(isfinite(call.results.loss[0]));
    stream_close(stream);
    call_close(&call, true);
}

static void another_device_than_the_current(void **state) {
    (void)state;
    static const char text[] = "fb:bf16:n40:d32:v3000:bias:up";
    struct device_call first, second;
    if (device_count() < 2) skip();
    call_open(text, LL_PASS_FORWARD_BACKWARD, NULL, &first);
    ll_stream stream = stream_open();
    queued(&first, stream);
    assert_true(stream_wait(stream) && image_fetch(&first.image));
    stream_close(stream);
    device_use(1);
    call_open(text, LL_PASS_FORWARD_BACKWARD, NULL, &second);
    stream = stream_open();
    device_use(0);
    queued(&second, stream);
    assert_int_equal(device_current(), 0);
    assert_true(stream_wait(stream));
    device_use(1);
    assert_true(image_fetch(&second.image));
    stream_close(stream);
    assert_true(results_same_bits(&first.problem, "linear_ce_cuda", "device 1", &second.results,
                                  &first.results, FIELDS_ALL, 0, 40));
    call_close(&second, true);
    device_use(0);
    call_close(&first, true);
}

static void what_is_refused_by_name(void **state) {
    (void)state;
    struct problem problem;
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    char text[2048];
    assert_null(problem_parse("fb:bf16-f32:n4:d8:v9", &problem));
    problem_desc(&problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    assert_int_equal(ll_plan_create(&desc, &plan), LL_STATUS_UNSUPPORTED);
    assert_non_null(strstr(ll_last_error(), "x is bf16 and w f32"));
    assert_null(problem_parse("fb:bf16:n4096:d4096:v131072:gwf32", &problem));
    plan = plan_for(&problem);
    assert_int_equal(ll_plan_describe(plan, text, sizeof text), LL_STATUS_OK);
    printf("%s\n", text);
    size_t bytes[3];
    for (int pass = 0; pass < 3; pass++) ll_plan_workspace(plan, (ll_pass)pass, &bytes[pass]);
    assert_true(bytes[0] <= (size_t)64 << 20 && bytes[1] <= (size_t)512 << 20 &&
                bytes[2] <= (size_t)512 << 20);
    ll_plan_destroy(plan);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused_by_name),
        cmocka_unit_test(targets_that_are_no_class),
        cmocka_unit_test(captured_and_replayed_with_other_targets),
        cmocka_unit_test(threads_and_streams_share_a_plan),
        cmocka_unit_test(a_launch_that_fails),
        cmocka_unit_test(another_device_than_the_current),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
