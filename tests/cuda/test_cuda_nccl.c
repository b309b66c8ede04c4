/* NCCL between GPUs, ranks as threads with a GPU each: the operations give the bits of the threads
 * communicator, the passes those of one rank, a graph replays them, and nobody waits for ever. Skipped with
 * one GPU. */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "cuda/image.h"
#include "kernel_run.h"
#include "rank_run.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <time.h>
#include <cmocka.h>

enum { kSentence = 512 };

static int32_t ranks_here(void) {
    const int count = device_count();
    return count > 4 ? 4 : count;
}

/* ---- Ranks as threads --------------------------------------------------------------------------- */

typedef struct rank {
    const struct crew *crew;
    int32_t number;
    ll_comm threads, nccl;
    ll_status status;
    char sentence[kSentence];
    int64_t failed;
    pthread_t thread;
} rank;

typedef struct crew {
    void (*work)(rank *r);
    int32_t n, timeout_ms;
    bool one_gpu;
    const void *context;
} crew;

static void *rank_main(void *argument) {
    rank *r = argument;
    device_use(r->crew->one_gpu ? 0 : r->number);
    r->status = ll_comm_nccl(&r->threads, r->crew->timeout_ms, &r->nccl);
    if (r->status != LL_STATUS_OK) {
        snprintf(r->sentence, sizeof r->sentence, "%s", ll_last_error());
        return NULL;
    }
    r->crew->work(r);
    ll_comm_destroy(&r->nccl);
    return NULL;
}

static void run_crew(const crew *c, rank *ranks) {
    ll_comm threads[8];
    assert_int_equal(ll_comm_threads(c->n, 20000, threads), LL_STATUS_OK);
    for (int32_t r = 0; r < c->n; r++) {
        ranks[r] = (rank){.crew = c, .number = r, .threads = threads[r]};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < c->n; r++) pthread_join(ranks[r].thread, NULL);
    for (int32_t r = 0; r < c->n; r++) ll_comm_destroy(&threads[r]);
}

/* ---- Operations --------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Numbers of rank r: of f32 with exponents far apart, so that another order would show. */
static void fill(int kind, int32_t r, int64_t n, void *values) {
    uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(r + 1) + (uint64_t)kind;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = draw(&state);
        if (kind == 0) ((int32_t *)values)[i] = (int32_t)bits;
        if (kind == 1) ((int64_t *)values)[i] = (int64_t)bits >> 8;
        if (kind == 2) ((float *)values)[i] = (float)((int32_t)bits) * (bits >> 62 ? 1e-3f : 1e3f);
    }
}

static ll_status operate(const ll_comm *comm, int kind, void *values, int64_t n, ll_stream stream) {
    if (kind == 0) return comm->max_i32(comm->self, values, n, stream);
    if (kind == 1) return comm->sum_i64(comm->self, values, n, stream);
    return comm->sum_f32(comm->self, values, n, stream);
}

static void operations(rank *r) {
    static const int64_t sizes[] = {0, 1, 2, 3, 5, 64, 1001, 65536, 1 << 20, 20000003};
    for (int kind = 0; kind < 3; kind++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            const int64_t n = sizes[s];
            const size_t bytes = (size_t)n * (kind == 1 ? 8 : 4);
            if (kind != 2 && n > 1 << 20) continue;
            char *want = malloc(bytes + 1), *got = malloc(bytes + 1);
            char *device = device_take(bytes + 16);
            ll_stream stream = stream_open();
            fill(kind, r->number, n, want);
            device_write(device, want, bytes);
            ll_status status = operate(&r->threads, kind, want, n, NULL);
            if (status == LL_STATUS_OK) status = operate(&r->nccl, kind, device, n, stream);
            if (!stream_wait(stream) || status != LL_STATUS_OK) r->failed++;
            device_read(got, device, bytes);
            if (memcmp(got, want, bytes) != 0) {
                printf("FAIL rank %d: operation %d of %lld elements has other bits\n", r->number, kind,
                       (long long)n);
                r->failed++;
            }
            stream_close(stream);
            device_release(device);
            free(want);
            free(got);
        }
    }
}

static void operations_have_the_bits_of_threads(void **state) {
    (void)state;
    rank ranks[8];
    if (ranks_here() < 2) skip();
    const crew c = {.work = operations, .n = ranks_here()};
    run_crew(&c, ranks);
    for (int32_t r = 0; r < c.n; r++) {
        if (ranks[r].status) fail_msg("%s", ranks[r].sentence);
        assert_int_equal(ranks[r].failed, 0);
    }
}

/* ---- Passes ------------------------------------------------------------------------------------- */

static ll_status join_nccl(void *context, int32_t number, const ll_comm *threads, ll_comm *comm) {
    (void)context;
    device_use(number);
    return ll_comm_nccl(threads, 0, comm);
}

static void passes_have_the_bits_of_one_rank(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n300:d136:v3000:up:gwf32:ign7",
        "fb:bf16:n64:d72:v450:up:bias:t0.7:zl1e-3:cw:pad70",
        "fb:f32:n33:d24:v700:up:bias:ls0.1:cap5",
        "fb:bf16:n0:d64:v90:bias:up",
    };
    if (ranks_here() < 2) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct problem problem;
        struct operands operands;
        struct results want, got;
        ll_plan_desc desc;
        const char *why = problem_parse(texts[t], &problem);
        if (why) fail_msg("%s", why);
        assert_true(operands_create(&problem, &operands));
        assert_true(results_create(&problem, &want) && results_create(&problem, &got));
        ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
        assert_int_equal(kernel_run("linear_ce_cuda", &problem, LL_PASS_FORWARD_BACKWARD, &args),
                         LL_STATUS_OK);
        for (int kind = CUT_EVEN; kind <= CUT_PERMUTED;
             kind += CUT_PERMUTED) { /* a group takes 0.5 s to make */
            const int64_t n_rows = problem.v_total + problem.v_pad;
            const struct rank_cut cut =
                rank_cut_make((enum rank_cut_kind)kind, ranks_here(), n_rows, problem.seed);
            struct rank_run run = {.cut = &cut, .join = join_nccl};
            problem_desc(&problem, &desc);
            desc.backend = LL_BACKEND_CUDA;
            for (int apart = 0; apart < 2; apart++) {
                const int32_t fields = FIELDS_ALL & ~(1 << FIELD_GRAD_X);
                ll_status status;
                if (apart) {
                    args = problem_args(&problem, &operands, &got, LL_PASS_FORWARD);
                    status = ranks_run(&run, &desc, &args, LL_PASS_FORWARD);
                    args = problem_args(&problem, &operands, &got, LL_PASS_BACKWARD);
                    if (!status) status = ranks_run(&run, &desc, &args, LL_PASS_BACKWARD);
                } else {
                    args = problem_args(&problem, &operands, &got, LL_PASS_FORWARD_BACKWARD);
                    status = ranks_run(&run, &desc, &args, LL_PASS_FORWARD_BACKWARD);
                }
                if (status)
                    fail_msg("%s %s: %s%s", texts[t], rank_cut_text(&cut), run.difference, run.sentence[0]);
                assert_true(results_same_bits(&problem, "nccl", rank_cut_text(&cut), &got, &want, fields, 0,
                                              problem.n_tokens));
            }
        }
        results_destroy(&got);
        results_destroy(&want);
        operands_destroy(&operands);
    }
}

/* ---- A graph ------------------------------------------------------------------------------------ */

typedef struct graph_case {
    const struct problem *problem;
    const struct operands *operands;
    struct results *results; /* by rank */
} graph_case;

static void replay(rank *r) {
    const graph_case *g = r->crew->context;
    static char some_workspace[64];
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    struct image image;
    const int64_t half = g->problem->v_total / 2, begin = r->number ? half : 0;
    const int64_t count = r->number ? g->problem->v_total - half : half;
    problem_desc(g->problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    desc.comm = &r->nccl;
    desc.v_begin = begin;
    desc.v_local = count;
    r->status = ll_plan_create(&desc, &plan);
    ll_linear_ce_args args =
        problem_args(g->problem, g->operands, &g->results[r->number], LL_PASS_FORWARD_BACKWARD);
    args.w.data = (char *)args.w.data + begin * args.w.row_stride * 2;
    args.grad_w.data = (char *)args.grad_w.data + begin * args.grad_w.row_stride * 2;
    args.w.rows = args.grad_w.rows = count;
    args.workspace = some_workspace; /* the image takes its own */
    if (!r->status) r->status = ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &args.workspace_bytes);
    ll_stream stream = stream_open();
    const bool made = !r->status && image_create(&args, g->problem->v_total, false, &image);
    /* Once as it is: NCCL connects its ranks in its first operations. */
    if (made) r->status = ll_linear_ce_forward_backward(plan, &image.args, stream);
    if (!made || !stream_wait(stream) || !capture_begin_local(stream)) r->failed++;
    if (!r->failed && !r->status) r->status = ll_linear_ce_forward_backward(plan, &image.args, stream);
    void *graph = capture_end(stream);
    snprintf(r->sentence, sizeof r->sentence, "%s", r->status ? ll_last_error() : "");
    if (made && !r->status && graph) {
        for (int i = 0; i < 3; i++) r->failed += !graph_launch(graph, stream);
        r->failed += !stream_wait(stream) || !image_fetch(&image);
        graph_close(graph);
    } else {
        r->failed++;
    }
    stream_close(stream);
    if (made) image_destroy(&image);
    ll_plan_destroy(plan);
}

static void a_graph_replays_the_passes(void **state) {
    (void)state;
    struct problem problem;
    struct operands operands;
    struct results want, got[2];
    rank ranks[8];
    if (ranks_here() < 2) skip();
    assert_null(problem_parse("fb:bf16:n130:d64:v700:up", &problem));
    assert_true(operands_create(&problem, &operands) && results_create(&problem, &want));
    assert_true(results_create(&problem, &got[0]) && results_create(&problem, &got[1]));
    const ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(kernel_run("linear_ce_cuda", &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    const graph_case g = {&problem, &operands, got};
    const crew c = {.work = replay, .n = 2, .context = &g};
    run_crew(&c, ranks);
    for (int32_t r = 0; r < 2; r++) {
        if (ranks[r].status) fail_msg("%s", ranks[r].sentence);
        assert_int_equal(ranks[r].failed, 0);
        assert_true(results_same_bits(&problem, "nccl", "a graph", &got[r], &want, FIELDS_FORWARD, 0, 130));
    }
    assert_true(
        results_same_bits(&problem, "nccl", "a graph, rank 1", &got[1], &got[0], 1 << FIELD_GRAD_X, 0, 130));
    results_destroy(&got[1]);
    results_destroy(&got[0]);
    results_destroy(&want);
    operands_destroy(&operands);
}

/* ---- Failures ----------------------------------------------------------------------------------- */

static void two_ranks_on_one_gpu(void **state) {
    (void)state;
    rank ranks[8];
    const crew c = {.work = operations, .n = 2, .one_gpu = true};
    run_crew(&c, ranks);
    for (int32_t r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].status, LL_STATUS_INVALID_ARG);
        assert_non_null(strstr(ranks[r].sentence, "ranks 0 and 1 are both on GPU"));
        assert_string_equal(ranks[r].sentence, ranks[0].sentence);
    }
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Rank 1 leaves an operation out; rank 0's stream must go on, and its next operation says so. */
static void leave_one_out(rank *r) {
    int32_t *device = device_take(64);
    ll_stream stream = stream_open();
    device_fill(device, 0, 64);
    /* All once, to connect. */
    if (r->nccl.max_i32(r->nccl.self, device, 16, stream) || !stream_wait(stream)) r->failed++;
    const double begin = seconds_now();
    if (r->number == 0) {
        if (r->nccl.max_i32(r->nccl.self, device, 16, stream)) r->failed++;
        (void)stream_wait(stream);
        if (seconds_now() - begin > 10) r->failed++;
        if (r->nccl.max_i32(r->nccl.self, device, 16, stream) != LL_STATUS_COMM) r->failed++;
        snprintf(r->sentence, sizeof r->sentence, "%s", r->nccl.error(r->nccl.self));
    }
    char mine = 0, all[8];
    if (r->nccl.all_gather(r->nccl.self, &mine, all, 1) != LL_STATUS_COMM) r->failed++;
    stream_close(stream);
    device_release(device);
}

static void a_lost_operation_ends_in_time(void **state) {
    (void)state;
    rank ranks[8];
    if (ranks_here() < 2) skip();
    const crew c = {.work = leave_one_out, .n = 2, .timeout_ms = 1500};
    run_crew(&c, ranks);
    for (int32_t r = 0; r < 2; r++) {
        if (ranks[r].status) fail_msg("%s", ranks[r].sentence);
        assert_int_equal(ranks[r].failed, 0);
    }
    assert_non_null(strstr(ranks[0].sentence, "did not end within 1500 ms"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_on_one_gpu),
        cmocka_unit_test(operations_have_the_bits_of_threads),
        cmocka_unit_test(passes_have_the_bits_of_one_rank),
        cmocka_unit_test(a_graph_replays_the_passes),
        cmocka_unit_test(a_lost_operation_ends_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
