/* test_library [killed FOLDER]: the whole library over MPI, in a program that is linked with neither. Every
 * rank knows the whole problem: it runs it alone, then its shard of every cut with the others, and compares
 * bits. With `killed`, rank 1 kills itself before a call and the others write down how theirs ended
 * (kill.sh).
 *
 * Leaves out what threads show as well (tests/core/test_ranks.c): this is about MPI underneath. */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "rank_run.h"

#include <logitless/comm.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const problems[] = {
    "fb:f32:n33:d24:v700:up:bias:ls0.1:zl1e-3", "fb:bf16:n29:d33:v333:up:bias:pad50:tw0:ts:ign5",
    "fb:f32:n21:d24:v150:tie:up:nan5",          "fb:f32:n300:d40:v5000:conf20:up",
    "fb:f32:n17:d24:v150:ignall:up:bias",
};

static ll_comm comm;
static int failures;

#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            failures++;                                                                                      \
            fprintf(stderr, "FAIL rank %d: ", comm.rank);                                                    \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fprintf(stderr, "\n");                                                                           \
        }                                                                                                    \
    } while (0)

static ll_status run_pass(const ll_plan *plan, ll_linear_ce_args args) {
    ll_status status = ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &args.workspace_bytes);
    if (status != LL_STATUS_OK) return status;
    args.workspace = aligned_alloc(64, (args.workspace_bytes + 64) / 64 * 64);
    if (!args.workspace) return LL_STATUS_MEMORY;
    status = ll_linear_ce_forward_backward(plan, &args, NULL);
    free(args.workspace);
    return status;
}

static ll_status run(const ll_plan_desc *desc, const ll_linear_ce_args *args) {
    ll_plan *plan = NULL;
    ll_status status = ll_plan_create(desc, &plan);
    if (status == LL_STATUS_OK) status = run_pass(plan, *args);
    ll_plan_destroy(plan);
    return status;
}

static void cut_rows(ll_view *view, int64_t begin, int64_t count) {
    if (!view->dtype) return;
    view->data =
        (char *)view->data + (size_t)(begin * view->row_stride) * ll_dtype_bytes((ll_dtype)view->dtype);
    view->rows = count;
}

/* Equal on all ranks? */
static void check_equal(const void *data, size_t bytes, const char *what) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    uint64_t *all = calloc((size_t)comm.size, sizeof *all);
    const ll_status status = comm.all_gather(comm.self, &hash, all, sizeof hash);
    CHECK(status == LL_STATUS_OK, "all_gather: %s", comm.error(comm.self));
    for (int32_t r = 0; r < comm.size; r++) CHECK(all[r] == all[0], "%s differs on rank %d", what, r);
    free(all);
}

static void check_cut(const struct problem *problem, const struct operands *operands,
                      const struct results *want, const struct rank_cut *cut) {
    enum { kGlobal = FIELDS_FORWARD };
    struct results got;
    ll_plan_desc desc;
    if (!results_create(problem, &got)) exit(2);
    ll_linear_ce_args args = problem_args(problem, operands, &got, LL_PASS_FORWARD_BACKWARD);
    const int64_t begin = cut->begin[comm.rank], count = cut->count[comm.rank];
    problem_desc(problem, &desc);
    desc.comm = &comm;
    desc.v_begin = begin;
    desc.v_local = count;
    cut_rows(&args.w, begin, count);
    cut_rows(&args.bias, begin, count);
    cut_rows(&args.grad_w, begin, count);
    cut_rows(&args.grad_bias, begin, count);
    const ll_status status = run(&desc, &args);
    CHECK(status == LL_STATUS_OK, "%s %s: %s", problem->text, rank_cut_text(cut), ll_last_error());
    CHECK(results_same_bits(problem, "MPI", rank_cut_text(cut), &got, want, kGlobal, 0, problem->n_tokens),
          "%s %s", problem->text, rank_cut_text(cut));
    for (int64_t r = begin; r < begin + count; r++) { /* this rank's rows of grad_w */
        const size_t bytes = (size_t)want->grad_w.cols * ll_dtype_bytes((ll_dtype)want->grad_w.dtype);
        const size_t at =
            (size_t)(r * want->grad_w.row_stride) * ll_dtype_bytes((ll_dtype)want->grad_w.dtype);
        CHECK(memcmp((char *)got.grad_w.data + at, (char *)want->grad_w.data + at, bytes) == 0,
              "%s %s: grad_w[%lld]", problem->text, rank_cut_text(cut), (long long)r);
    }
    const size_t grad_x_bytes =
        (size_t)(got.grad_x.rows * got.grad_x.row_stride) * ll_dtype_bytes((ll_dtype)got.grad_x.dtype);
    check_equal(got.grad_x.data, grad_x_bytes, "grad_x");
    results_destroy(&got);
}

static void check_problem(const char *text) {
    struct problem problem;
    struct operands operands;
    struct results want;
    ll_plan_desc desc;
    const char *why = problem_parse(text, &problem);
    if (why || !operands_create(&problem, &operands) || !results_create(&problem, &want)) exit(2);
    problem.n_threads = 1;
    problem_desc(&problem, &desc);
    const ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
    const ll_status status = run(&desc, &args);
    CHECK(status == LL_STATUS_OK, "%s alone: %s", text, ll_last_error());
    for (int kind = CUT_EVEN; kind <= CUT_PERMUTED; kind++) {
        const struct rank_cut cut =
            rank_cut_make((enum rank_cut_kind)kind, comm.size, problem.v_total + problem.v_pad, 5);
        check_cut(&problem, &operands, &want, &cut);
    }
    results_destroy(&want);
    operands_destroy(&operands);
}

/* A small problem, cut evenly: enough for errors. */
struct small {
    float x[4 * 8], w[64 * 8], nll[4];
    int64_t target[4];
};

static ll_status small_forward(struct small *s, ll_plan *plan, int64_t rows) {
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(s->x, LL_DTYPE_F32, 4, 8, 0);
    args.w = ll_view_matrix(s->w, LL_DTYPE_F32, rows, 8, 0);
    args.target = ll_view_vector(s->target, LL_DTYPE_I64, 4, 0);
    args.nll = s->nll;
    ll_plan_workspace(plan, LL_PASS_FORWARD, &args.workspace_bytes);
    args.workspace = aligned_alloc(64, (args.workspace_bytes + 64) / 64 * 64);
    const ll_status status = ll_linear_ce_forward(plan, &args, NULL);
    free(args.workspace);
    return status;
}

static ll_plan *small_plan(int64_t *rows) {
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, comm.size, 64, 0);
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    ll_plan *plan = NULL;
    desc.n_tokens_max = 4, desc.n_hidden = 8, desc.v_total = 64, desc.n_threads = 1;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    desc.comm = &comm;
    desc.v_begin = cut.begin[comm.rank];
    *rows = desc.v_local = cut.count[comm.rank];
    const ll_status status = ll_plan_create(&desc, &plan);
    CHECK(status == LL_STATUS_OK, "%s", ll_last_error());
    return plan;
}

/* A bad target on the last rank is the same error on all, and the group goes on. */
static void check_error(void) {
    static struct small s;
    int64_t rows;
    ll_plan *plan = small_plan(&rows);
    char sentence[512] = "";
    if (comm.rank == comm.size - 1) s.target[2] = 64;
    CHECK(small_forward(&s, plan, rows) == LL_STATUS_INVALID_ARG, "a bad target was taken");
    snprintf(sentence, sizeof sentence, "%s", ll_last_error());
    CHECK(strstr(sentence, "target[2] is 64"), "%s", sentence);
    check_equal(sentence, strlen(sentence), "the sentence");
    s.target[2] = 63;
    CHECK(small_forward(&s, plan, rows) == LL_STATUS_OK, "after an error: %s", ll_last_error());
    CHECK(s.nll[2] > 4.15f && s.nll[2] < 4.16f, "nll %g, want ln 64", (double)s.nll[2]);
    ll_plan_destroy(plan);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* As in test_failures: a line "STATUS MS SENTENCE" in a file named after the rank, then out without MPI. */
static int killed(const char *folder) {
    static struct small s;
    char path[4096];
    int64_t rows;
    ll_plan *plan = small_plan(&rows);
    if (comm.rank == 1) {
        kill(getpid(), SIGKILL);
        pause();
    }
    const double begin = now_ms();
    const ll_status status = small_forward(&s, plan, rows);
    const double ms = now_ms() - begin;
    snprintf(path, sizeof path, "%s/%d", folder, comm.rank);
    FILE *file = fopen(path, "w");
    if (!file) return 2;
    fprintf(file, "%d %.0f %s\n", (int)status, ms, ll_last_error());
    fclose(file);
    ll_plan_destroy(plan);
    ll_comm_destroy(&comm);
    _exit(0); /* MPI's own exit handlers would wait for the dead */
}

int main(int argc, char **argv) {
    const bool kill_mode = argc == 3 && strcmp(argv[1], "killed") == 0;
    if (ll_comm_open("mpi", kill_mode ? 2000 : 0, &comm) != LL_STATUS_OK) {
        fprintf(stderr, "FAIL: %s\n", ll_last_error());
        return 1;
    }
    if (kill_mode) return killed(argv[2]);
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) check_problem(problems[p]);
    check_error();
    if (comm.rank == 0)
        printf("%zu problems over %d ranks\n", sizeof problems / sizeof problems[0], comm.size);
    ll_comm_destroy(&comm);
    return failures != 0;
}
