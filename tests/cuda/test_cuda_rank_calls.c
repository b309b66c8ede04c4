/* The vocabulary over ranks on a GPU: what a rank does wrong, which every rank must be told alike; ranks that
 * do not come; capture. Ranks are threads on one GPU. */
#define _POSIX_C_SOURCE 200809L
#include "cuda/cuda_ranks.h"

#include <math.h>

/* ---- Faults ------------------------------------------------------------------------------------- */

/* What one rank does otherwise. */
struct mischief {
    void (*change)(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args);
    int64_t *targets[2]; /* of ranks 0 and 1; NULL: the problem's */
    int64_t bad[2];
};

static void apply(void *context, int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    struct mischief *m = context;
    desc->backend = LL_BACKEND_CUDA;
    args->bad_targets = &m->bad[rank];
    if (m->targets[rank]) args->target.data = m->targets[rank];
    if (m->change) m->change(rank, desc, args);
}

/* Two ranks; their statuses and sentences are in `run`. */
static void run_mischief(struct rank_case *c, struct mischief *m, ll_pass pass, const struct results *results,
                         struct rank_run *run) {
    static struct rank_cut cut;
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    cut = cut_at(c->problem.v_total, 1, (const int64_t[]){150});
    *run = (struct rank_run){.cut = &cut, .change = apply, .context = m, .timeout_ms = 10000};
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    (void)ranks_run(run, &desc, &args, pass);
}

static void no_lse(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)desc;
    if (rank == 1) args->lse = NULL;
}
static void no_target(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)desc;
    if (rank == 1) args->target.data = NULL;
}
static void other_up(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)desc;
    if (rank == 1) args->up_entropy = NULL;
}
static void other_temperature(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    static ll_loss loss;
    (void)args;
    loss = *desc->loss;
    loss.temperature = 3.0f;
    if (rank == 1) desc->loss = &loss;
}
static double divisors[2] = {37.5, 37.25};
static void other_divisor(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)desc;
    args->divisor = &divisors[rank];
}
static void other_backend(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)args;
    if (rank == 1) desc->backend = LL_BACKEND_CPU;
}

/* A rank's error is every rank's, in its words. */
static void one_sentence_on_all_ranks(void **state) {
    (void)state;
    static const struct {
        void (*change)(int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args);
        ll_pass pass;
        const char *words;
    } cases[] = {
        {no_lse, LL_PASS_BACKWARD, "lse is NULL"},
        {no_target, LL_PASS_FORWARD, "target"},
        {other_up, LL_PASS_FORWARD_BACKWARD, "up_entropy given"},
        {other_temperature, LL_PASS_FORWARD, "temperature"},
        {other_backend, LL_PASS_FORWARD, "numerics"},
    };
    struct rank_case c;
    struct results results;
    rank_case_open("fb:bf16:n40:d64:v300:up", &c);
    rank_case_results(&c, &results);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mischief m = {.change = cases[i].change};
        struct rank_run run;
        run_mischief(&c, &m, cases[i].pass, &results, &run);
        if (run.status[0] != LL_STATUS_INVALID_ARG || !strstr(run.sentence[0], cases[i].words)) {
            fail_msg("case %zu: %s: %s", i, ll_status_name(run.status[0]), run.sentence[0]);
        }
        assert_int_equal(run.status[1], run.status[0]);
        assert_string_equal(run.sentence[1], run.sentence[0]);
    }
    results_destroy(&results);
    rank_case_close(&c);
}

/* A target that is no class: its row is NaN on every rank and counted, and the others keep their bits. */
static void a_bad_target_on_the_device(void **state) {
    (void)state;
    enum { kRow = 17 };
    struct rank_case c;
    struct results want, got;
    rank_case_open("fb:bf16:n40:d64:v300:up:ign7:none", &c);
    c.kernel = kernels[0];
    rank_case_results(&c, &want);
    rank_case_results(&c, &got);
    ll_linear_ce_args args = problem_args(&c.problem, &c.operands, &want, LL_PASS_FORWARD);
    int64_t *target = (int64_t *)args.target.data, kept = target[kRow];
    assert_int_equal(kernel_run(c.kernel, &c.problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
    target[kRow] = 300;
    struct mischief m = {0};
    struct rank_run run;
    run_mischief(&c, &m, LL_PASS_FORWARD, &got, &run);
    target[kRow] = kept;
    if (run.status[0] || run.status[1]) fail_msg("%s", run.sentence[0]);
    assert_string_equal(run.difference, "");
    assert_int_equal(m.bad[0], 1);
    assert_int_equal(m.bad[1], 1);
    assert_true(isnan(got.nll[kRow]) && isnan(got.lse[kRow]) && isnan(got.loss[kRow]));
    assert_true(results_same_bits(&c.problem, c.kernel, "rows before", &got, &want, FIELDS_SAVED, 0, kRow));
    assert_true(results_same_bits(&c.problem, c.kernel, "rows behind", &got, &want, FIELDS_SAVED, kRow + 1,
                                  c.problem.n_tokens - kRow - 1));
    results_destroy(&got);
    results_destroy(&want);
    rank_case_close(&c);
}

/* Ranks that were given other targets: which one is right is not known, so the row is NaN, and the loss. */
static void targets_that_differ(void **state) {
    (void)state;
    enum { kTokens = 40, kRow = 11, kIgnoredRow = 12 };
    struct rank_case c;
    struct results got;
    rank_case_open("fb:bf16:n40:d64:v300:sum", &c);
    rank_case_results(&c, &got);
    int64_t other[kTokens];
    const ll_linear_ce_args args = problem_args(&c.problem, &c.operands, &got, LL_PASS_FORWARD);
    memcpy(other, args.target.data, sizeof other);
    other[kRow] = (other[kRow] + 200) % 300;
    other[kIgnoredRow] = -100;
    struct mischief m = {.targets = {NULL, other}};
    struct rank_run run;
    run_mischief(&c, &m, LL_PASS_FORWARD, &got, &run);
    if (run.status[0] || run.status[1]) fail_msg("%s", run.sentence[0]);
    assert_int_equal(m.bad[0], 2);
    assert_int_equal(m.bad[1], 2);
    assert_true(isnan(got.nll[kRow]) && isnan(got.nll[kIgnoredRow]) && isnan(*got.loss));
    for (int64_t i = 0; i < kTokens; i++) {
        if (i != kRow && i != kIgnoredRow) assert_true(isfinite(got.nll[i]));
    }
    results_destroy(&got);
    rank_case_close(&c);
}

/* Divisors that differ: the host cannot see them, and every row says so. */
static void divisors_that_differ(void **state) {
    (void)state;
    enum { kRow = 16 }; /* not ignored */
    struct rank_case c;
    struct results got;
    rank_case_open("fb:bf16:n40:d64:v300:up:ign7", &c);
    rank_case_results(&c, &got);
    struct mischief m = {.change = other_divisor};
    struct rank_run run;
    run_mischief(&c, &m, LL_PASS_FORWARD_BACKWARD, &got, &run);
    if (run.status[0] || run.status[1]) fail_msg("%s", run.sentence[0]);
    assert_int_equal(m.bad[0], c.problem.n_tokens);
    assert_true(isnan(*got.loss) && isnan(got.nll[kRow]) && isnan(view_value(&got.grad_x, kRow, 0)));
    results_destroy(&got);
    rank_case_close(&c);
}

static bool stays_away(void *context, int32_t rank) {
    (void)context;
    return rank == 1;
}

/* A rank that does not come, and an operation that fails on all. */
static void lost_ranks(void **state) {
    (void)state;
    struct rank_case c;
    struct results results;
    ll_plan_desc desc;
    rank_case_open("fb:bf16:n40:d64:v300:up", &c);
    rank_case_results(&c, &results);
    problem_desc(&c.problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 3, 300, 1);
    const ll_linear_ce_args args = problem_args(&c.problem, &c.operands, &results, LL_PASS_FORWARD);
    struct rank_run run = {.cut = &cut, .stay_away = stays_away, .timeout_ms = 500};
    (void)ranks_run(&run, &desc, &args, LL_PASS_FORWARD);
    assert_int_equal(run.status[0], LL_STATUS_COMM);
    assert_int_equal(run.status[2], LL_STATUS_COMM);
    /* Operations 1 to 3 make the plan, 4 and 5 start the call and its probe (host_call.c), 6 is a maximum. */
    const ll_comm_double script = {.struct_bytes = sizeof script, .fail_at = 6};
    run = (struct rank_run){.cut = &cut, .script = &script};
    (void)ranks_run(&run, &desc, &args, LL_PASS_FORWARD);
    for (int32_t r = 0; r < 3; r++) {
        assert_int_equal(run.status[r], LL_STATUS_COMM);
        assert_non_null(strstr(run.sentence[r], "max_i32"));
    }
    results_destroy(&results);
    rank_case_close(&c);
}

/* ---- Capture ------------------------------------------------------------------------------------ */

struct captured {
    ll_status status;
    char sentence[kRankTextBytes];
    bool graph;
};

/* One rank over `comm`, captured; the graph is launched twice and leaves `results`. */
static struct captured capture(struct rank_case *c, const ll_comm *comm, struct results *results) {
    static char some_workspace[64];
    struct captured got = {0};
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    struct image image;
    problem_desc(&c->problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    desc.comm = comm;
    if (ll_plan_create(&desc, &plan)) fail_msg("%s", ll_last_error());
    ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, LL_PASS_FORWARD_BACKWARD);
    args.workspace = some_workspace; /* the image takes its own */
    assert_int_equal(ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &args.workspace_bytes), LL_STATUS_OK);
    assert_true(image_create(&args, c->problem.v_total, false, &image));
    ll_stream stream = stream_open();
    assert_true(capture_begin(stream));
    got.status = ll_linear_ce_forward_backward(plan, &image.args, stream);
    snprintf(got.sentence, sizeof got.sentence, "%s", got.status ? ll_last_error() : "");
    void *graph = capture_end(stream);
    if (got.status == LL_STATUS_OK && graph) {
        got.graph = graph_launch(graph, stream);
        got.graph = graph_launch(graph, stream) && got.graph && stream_wait(stream);
        assert_true(image_fetch(&image));
    }
    if (graph) graph_close(graph);
    stream_close(stream);
    image_destroy(&image);
    ll_plan_destroy(plan);
    return got;
}

/* A communicator in device memory is captured with the call; one in host memory says that it cannot be. */
static void graphs(void **state) {
    (void)state;
    struct rank_case c;
    struct results got;
    ll_comm self, threads;
    rank_case_open("fb:bf16:n130:d64:v700:up:bias", &c);
    c.kernel = kernels[kernel_accepts(kernels[1], &c.problem)];
    rank_case_want(&c);
    rank_case_results(&c, &got);
    assert_int_equal(ll_comm_self(&self), LL_STATUS_OK);
    assert_int_equal(ll_comm_threads(1, 0, &threads), LL_STATUS_OK);
    struct captured outcome = capture(&c, &self, &got);
    if (outcome.status) fail_msg("%s", outcome.sentence);
    assert_true(outcome.graph);
    assert_true(results_same_bits(&c.problem, c.kernel, "a graph of self", &got, &c.want, FIELDS_ALL, 0,
                                  c.problem.n_tokens));
    outcome = capture(&c, &threads, &got);
    assert_int_equal(outcome.status, LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(outcome.sentence, "captured"));
    ll_comm_destroy(&threads);
    results_destroy(&got);
    results_destroy(&c.want);
    rank_case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sentence_on_all_ranks),
        cmocka_unit_test(a_bad_target_on_the_device),
        cmocka_unit_test(targets_that_differ),
        cmocka_unit_test(divisors_that_differ),
        cmocka_unit_test(lost_ranks),
        cmocka_unit_test(graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
