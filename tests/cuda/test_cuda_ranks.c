/* The vocabulary over ranks on a GPU. Every option, on every kernel that takes it, over cuts on tiles, inside
 * tiles, all inside one tile, with empty ranks and in any order: row results, loss, grad_w and grad_bias have
 * one rank's bits (but see rounds_by_parts), grad_x is the same on every rank and within the bounds of one
 * kernel. Then what a rank
 * does wrong, which every rank must be told alike. Ranks are threads on one GPU; the reported faults of ranks
 * run here too (tests/faults/test_faults_ranks.c). */
#define _POSIX_C_SOURCE 200809L
#include "core/expect.h"
#include "cuda/image.h"
#include "kernel_run.h"
#include "rank_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *const kernels[] = {"linear_ce_cuda", "linear_ce_cuda_sm90"};
enum { kKernels = 2 };

/* One chunk of tokens each, so that grad_w is one sum as on one rank. */
static const char *const problems[] = {
    /* f32: linear_ce_cuda alone */
    "fb:f32:n9:d7:v5:up",
    "fb:f32:n70:d16:v129:up:ign3",
    "fb:f32:n33:d24:v700:up:bias:ls0.1:zl1e-3",
    "fb:f32:n19:d40:v180:cap5:lso0.2:up",
    "fb:f32:n21:d24:v300:cw0:ls0.1:ign4:bias:ninf3",
    "fb:f32:n21:d24:v150:tie:up:nan5",
    "fb:f32:n24:d24:v200:conf40:up",
    "fb:f32:n24:d24:v200:scale200000:up",
    "fb:f32:n12:d24:v200:scale1e8",
    "fb:f32:n300:d20:v600:acc:up:cw:div37.5",
    "fb:f32:n3:d2:v1:ls0.1:zl0.1:bias:up",
    "fb:f16:n12:d65:v130:gxf32:gwf32:biasf32:up:t0.7",
    "fb:f16:n70:d64:v300:ls0.1:cw:bias:ign5",
    "fb:bf16:n29:d33:v333:up:bias:pad50:tw0:ts:ign5",
    /* both */
    "fb:bf16:n130:d64:v700:up:ign7",
    "fb:bf16:n140:d72:v2500:up:gwf32:none:sx8:sw8:sgx2:sgw7",
    "fb:bf16:n64:d72:v450:up:bias:t0.7:zl1e-3:cw:pad70",
    "fb:bf16:n257:d24:v600:tie:bias:up:nan9:ts:tw0",
    "fb:bf16:n40:d64:v300:conf15:up:gxf32:gwf32",
    "fb:bf16:n33:d64:v500:ninf3:up",
    "fb:bf16:n20:d64:v260:fx:bias",
    "fb:bf16:n20:d64:v260:fw:up",
    "fb:bf16:n17:d64:v150:ignall:up:bias",
    "fb:bf16:n0:d64:v90:bias:up",
};

struct group_case {
    struct problem problem;
    struct operands operands;
    struct results want; /* forward_backward on one rank */
    struct expectation expect;
    const char *kernel;
    int64_t failed, checked;
    struct expect_stats stats;
};

/* ---- Cuts --------------------------------------------------------------------------------------- */

/* Ranks [0, edges[0]), [edges[0], edges[1]), ...; edges beyond the rows are the rows. */
static struct rank_cut cut_at(int64_t n_rows, int32_t n_edges, const int64_t *edges) {
    struct rank_cut cut = {.n = n_edges + 1};
    int64_t begin = 0;
    for (int32_t r = 0; r <= n_edges; r++) {
        const int64_t end = r == n_edges || edges[r] > n_rows ? n_rows : edges[r];
        cut.begin[r] = begin;
        cut.count[r] = end - begin;
        begin = end;
    }
    return cut;
}

enum { kCuts = 11 };

static struct rank_cut cut_number(int number, int64_t n_rows, uint64_t seed) {
    static const int64_t on_tiles[] = {64, 192}, in_one_tile[] = {70, 80, 90}, one_column[] = {64, 65},
                         tile_and_rest[] = {128, 191}, around[] = {63, 129};
    switch (number) {
    case 0:
        return cut_at(n_rows, 2, on_tiles);
    case 1:
        return cut_at(n_rows, 3, in_one_tile);
    case 2:
        return cut_at(n_rows, 2, one_column);
    case 3:
        return cut_at(n_rows, 2, tile_and_rest);
    case 4:
        return cut_at(n_rows, 2, around);
    case 5:
        return rank_cut_make(CUT_EVEN, 2, n_rows, seed);
    case 6:
        return rank_cut_make(CUT_EVEN, 1, n_rows, seed);
    case 7:
        return rank_cut_make(CUT_TINY, 4, n_rows, seed);
    case 8:
        return rank_cut_make(CUT_EMPTY, 4, n_rows, seed);
    case 9:
        return rank_cut_make(CUT_PERMUTED, 4, n_rows, seed);
    default:
        return rank_cut_make(CUT_UNEVEN, 3, n_rows, seed);
    }
}

/* ---- Bits and bounds ---------------------------------------------------------------------------- */

static void case_open(const char *text, struct group_case *c) {
    *c = (struct group_case){0};
    const char *why = problem_parse(text, &c->problem);
    if (why) fail_msg("%s: %s", text, why);
    if (!operands_create(&c->problem, &c->operands)) fail_msg("out of memory");
}

static void new_results(const struct group_case *c, struct results *results) {
    if (!results_create(&c->problem, results)) fail_msg("out of memory");
}

static void fail_case(struct group_case *c, const struct rank_cut *cut, const char *what, const char *why) {
    printf("FAIL %s %s: %d ranks %s: %s: %s\n", c->problem.text, c->kernel, cut->n, rank_cut_text(cut), what,
           why);
    c->failed++;
}

static bool run(struct group_case *c, struct rank_run *rank_run, const struct results *results, ll_pass pass,
                const char *what) {
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    if (ranks_run(rank_run, &desc, &args, pass) == LL_STATUS_OK) return true;
    const char *why = rank_run->difference;
    for (int32_t r = 0; r < rank_run->cut->n && !*why; r++) why = rank_run->sentence[r];
    fail_case(c, rank_run->cut, what, why);
    return false;
}

static void same(struct group_case *c, const struct rank_cut *cut, const char *what,
                 const struct results *got, const struct results *want, int32_t fields) {
    char label[256];
    c->checked++;
    snprintf(label, sizeof label, "%d ranks, %.160s, %s", cut->n, rank_cut_text(cut), what);
    if (!results_same_bits(&c->problem, c->kernel, label, got, want, fields, 0, c->problem.n_tokens) ||
        !results_intact(got)) {
        fail_case(c, cut, what, "not the same bits, or guard bytes changed");
    }
}

/* dz of a plain bf16 problem is made of exponentials that are rounded relative to the largest logit of their
 * tile (cuda/exp16.cuh): where a cut goes through the tile, of the rank's part of it. */
static bool rounds_by_parts(const struct problem *p, const struct rank_cut *cut) {
    bool inside = false;
    for (int32_t r = 0; r < cut->n; r++) {
        inside = inside || cut->begin[r] % 64 != 0 || (cut->begin[r] + cut->count[r]) % 64 != 0;
    }
    return inside && p->x_dtype == LL_DTYPE_BF16 && p->bias_dtype == LL_DTYPE_NONE &&
           p->loss.temperature == 1.0f && p->loss.softcap == 0.0f && p->loss.label_smoothing == 0.0f;
}

/* forward_backward, and forward followed by backward. */
static void check_cut(struct group_case *c, const struct rank_cut *cut, const ll_comm_double *script) {
    struct results both, apart;
    struct rank_run both_run = {.cut = cut, .script = script}, apart_run = both_run;
    new_results(c, &both);
    new_results(c, &apart);
    const int32_t sums = rounds_by_parts(&c->problem, cut) ? FIELDS_GRADIENTS : 1 << FIELD_GRAD_X;
    if (run(c, &both_run, &both, LL_PASS_FORWARD_BACKWARD, "forward_backward")) {
        same(c, cut, "forward_backward", &both, &c->want, FIELDS_ALL & ~sums);
        expectation_check(&c->expect, c->kernel, "ranks", &both, sums, &c->stats);
    }
    if (run(c, &apart_run, &apart, LL_PASS_FORWARD, "forward") &&
        run(c, &apart_run, &apart, LL_PASS_BACKWARD, "backward")) {
        same(c, cut, "forward then backward", &apart, &both, FIELDS_ALL);
    }
    results_destroy(&apart);
    results_destroy(&both);
}

/* Every cut of a problem on linear_ce_cuda_sm90, every third on linear_ce_cuda; two of three where that is
 * alone. */
static void each_option_each_cut(void **state) {
    (void)state;
    static const ll_comm_double script = {
        .struct_bytes = sizeof script, .seed = 7, .delay_us = 100, .pieces = 5};
    int64_t failed = 0, checked = 0;
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) {
        struct group_case c;
        case_open(problems[p], &c);
        const struct expect_rounding rounding = expect_rounding_here(&c.problem);
        if (!expectation_create_for(&c.problem, &c.operands, &rounding, &c.expect)) fail_msg("out of memory");
        bool taken = false;
        for (int k = kKernels - 1; k >= 0; k--) {
            c.kernel = kernels[k];
            if (!kernel_accepts(c.kernel, &c.problem)) continue;
            new_results(&c, &c.want);
            const ll_linear_ce_args args =
                problem_args(&c.problem, &c.operands, &c.want, LL_PASS_FORWARD_BACKWARD);
            assert_int_equal(kernel_run(c.kernel, &c.problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
            setenv("LL_KERNEL", c.kernel, 1);
            for (int number = 0; number < kCuts; number++) {
                if (taken && (number + (int)p) % 3 != 0) continue;
                if (!taken && k == 0 && (number + (int)p) % 3 == 0) continue;
                const struct rank_cut cut =
                    cut_number(number, c.problem.v_total + c.problem.v_pad, c.problem.seed);
                check_cut(&c, &cut, number == kCuts - 1 ? &script : NULL);
            }
            unsetenv("LL_KERNEL");
            results_destroy(&c.want);
            taken = true;
        }
        assert_true(taken);
        if (!operands_intact(&c.operands)) {
            printf("FAIL %s: an input changed\n", problems[p]);
            failed++;
        }
        expectation_destroy(&c.expect);
        operands_destroy(&c.operands);
        failed += c.failed + c.stats.failed;
        checked += c.checked;
    }
    printf("%lld comparisons over ranks\n", (long long)checked);
    assert_true(checked > 300);
    assert_int_equal(failed, 0);
}

/* Several chunks of tokens, other ones on each rank's own wish: the ranks go through the same. Rows, loss and
 * grad_x need no more; grad_w is a sum over chunks, checked by its bounds. */
static void chunks_that_ranks_agree_on(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n2500:d16:v700:up:ign7:bias",
        "fb:bf16:n2500:d16:v700:up:gwf32:ws4000",
        "fb:f32:n2500:d16:v500:up:ls0.1:ws4000",
    };
    int64_t failed = 0;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct group_case c;
        case_open(texts[t], &c);
        const struct expect_rounding rounding = expect_rounding_here(&c.problem);
        if (!expectation_create_for(&c.problem, &c.operands, &rounding, &c.expect)) fail_msg("out of memory");
        struct results apart;
        new_results(&c, &c.want);
        new_results(&c, &apart);
        c.kernel = kernels[kernel_accepts(kernels[1], &c.problem)];
        const ll_linear_ce_args args =
            problem_args(&c.problem, &c.operands, &c.want, LL_PASS_FORWARD_BACKWARD);
        assert_int_equal(kernel_run(c.kernel, &c.problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
        setenv("LL_KERNEL", c.kernel, 1);
        const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, c.problem.v_total, 5);
        struct rank_run both_run = {.cut = &cut}, apart_run = both_run;
        struct results both;
        new_results(&c, &both);
        if (run(&c, &both_run, &both, LL_PASS_FORWARD_BACKWARD, "forward_backward")) {
            same(&c, &cut, "forward_backward", &both, &c.want, FIELDS_FORWARD);
            expectation_check(&c.expect, c.kernel, "ranks", &both, FIELDS_GRADIENTS, &c.stats);
        }
        if (run(&c, &apart_run, &apart, LL_PASS_FORWARD, "forward") &&
            run(&c, &apart_run, &apart, LL_PASS_BACKWARD, "backward")) {
            same(&c, &cut, "forward then backward", &apart, &both, FIELDS_FORWARD | 1 << FIELD_GRAD_X);
            expectation_check(&c.expect, c.kernel, "ranks, apart", &apart, FIELDS_GRADIENTS, &c.stats);
        }
        unsetenv("LL_KERNEL");
        results_destroy(&both);
        results_destroy(&apart);
        results_destroy(&c.want);
        expectation_destroy(&c.expect);
        operands_destroy(&c.operands);
        failed += c.failed + c.stats.failed;
    }
    assert_int_equal(failed, 0);
}

/* ---- Operations --------------------------------------------------------------------------------- */

struct counted {
    int64_t max, sum, sum_f32;
};

static struct counted count(struct group_case *c, struct rank_run *run, const struct results *results,
                            ll_pass pass) {
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    if (ranks_run(run, &desc, &args, pass) != LL_STATUS_OK) fail_msg("%s", run->sentence[0]);
    for (int32_t r = 1; r < run->cut->n; r++) {
        assert_true(run->counts[r].order == run->counts[0].order);
    }
    return (struct counted){run->counts[0].max_i32, run->counts[0].sum_i64, run->counts[0].sum_f32};
}

/* Two maxima (one for argmax) and one sum a chunk of the forward, one sum of grad_x a backward's, whatever
 * the targets are. */
static void operations_depend_on_shapes_alone(void **state) {
    (void)state;
    static const ll_comm_double script = {.struct_bytes = sizeof script};
    static const char *const texts[] = {"fb:bf16:n300:d64:v700:up", "fb:bf16:n300:d64:v700:up:ignall"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct group_case c;
        struct results results;
        case_open(texts[t], &c);
        new_results(&c, &results);
        const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, 700, 1);
        struct rank_run run = {.cut = &cut, .script = &script};
        struct counted n = count(&c, &run, &results, LL_PASS_FORWARD);
        assert_true(n.max == 2 && n.sum == 1 && n.sum_f32 == 0);
        n = count(&c, &run, &results, LL_PASS_BACKWARD);
        assert_true(n.max == 0 && n.sum == 0 && n.sum_f32 == 1);
        n = count(&c, &run, &results, LL_PASS_FORWARD_BACKWARD);
        assert_true(n.max == 2 && n.sum == 1 && n.sum_f32 == 1);
        results_destroy(&results);
        operands_destroy(&c.operands);
    }
}

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
static void run_mischief(struct group_case *c, struct mischief *m, ll_pass pass,
                         const struct results *results, struct rank_run *run) {
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
    struct group_case c;
    struct results results;
    case_open("fb:bf16:n40:d64:v300:up", &c);
    new_results(&c, &results);
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
    operands_destroy(&c.operands);
}

/* A target that is no class: its row is NaN on every rank and counted, and the others keep their bits. */
static void a_bad_target_on_the_device(void **state) {
    (void)state;
    enum { kRow = 17 };
    struct group_case c;
    struct results want, got;
    case_open("fb:bf16:n40:d64:v300:up:ign7:none", &c);
    c.kernel = kernels[0];
    new_results(&c, &want);
    new_results(&c, &got);
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
    operands_destroy(&c.operands);
}

/* Ranks that were given other targets: which one is right is not known, so the row is NaN, and the loss. */
static void targets_that_differ(void **state) {
    (void)state;
    enum { kTokens = 40, kRow = 11, kIgnoredRow = 12 };
    struct group_case c;
    struct results got;
    case_open("fb:bf16:n40:d64:v300:sum", &c);
    new_results(&c, &got);
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
    operands_destroy(&c.operands);
}

/* Divisors that differ: the host cannot see them, and every row says so. */
static void divisors_that_differ(void **state) {
    (void)state;
    enum { kRow = 16 }; /* not ignored */
    struct group_case c;
    struct results got;
    case_open("fb:bf16:n40:d64:v300:up:ign7", &c);
    new_results(&c, &got);
    struct mischief m = {.change = other_divisor};
    struct rank_run run;
    run_mischief(&c, &m, LL_PASS_FORWARD_BACKWARD, &got, &run);
    if (run.status[0] || run.status[1]) fail_msg("%s", run.sentence[0]);
    assert_int_equal(m.bad[0], c.problem.n_tokens);
    assert_true(isnan(*got.loss) && isnan(got.nll[kRow]) && isnan(view_value(&got.grad_x, kRow, 0)));
    results_destroy(&got);
    operands_destroy(&c.operands);
}

static bool stays_away(void *context, int32_t rank) {
    (void)context;
    return rank == 1;
}

/* A rank that does not come, and an operation that fails on all. */
static void lost_ranks(void **state) {
    (void)state;
    struct group_case c;
    struct results results;
    ll_plan_desc desc;
    case_open("fb:bf16:n40:d64:v300:up", &c);
    new_results(&c, &results);
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
    operands_destroy(&c.operands);
}

/* ---- Capture ------------------------------------------------------------------------------------ */

struct captured {
    ll_status status;
    char sentence[kRankTextBytes];
    bool graph;
};

/* One rank over `comm`, captured; the graph is launched twice and leaves `results`. */
static struct captured capture(struct group_case *c, const ll_comm *comm, struct results *results) {
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
    struct group_case c;
    struct results want, got;
    ll_comm self, threads;
    case_open("fb:bf16:n130:d64:v700:up:bias", &c);
    c.kernel = kernels[kernel_accepts(kernels[1], &c.problem)];
    new_results(&c, &want);
    new_results(&c, &got);
    const ll_linear_ce_args args = problem_args(&c.problem, &c.operands, &want, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(kernel_run(c.kernel, &c.problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    assert_int_equal(ll_comm_self(&self), LL_STATUS_OK);
    assert_int_equal(ll_comm_threads(1, 0, &threads), LL_STATUS_OK);
    struct captured outcome = capture(&c, &self, &got);
    if (outcome.status) fail_msg("%s", outcome.sentence);
    assert_true(outcome.graph);
    assert_true(results_same_bits(&c.problem, c.kernel, "a graph of self", &got, &want, FIELDS_ALL, 0,
                                  c.problem.n_tokens));
    outcome = capture(&c, &threads, &got);
    assert_int_equal(outcome.status, LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(outcome.sentence, "captured"));
    ll_comm_destroy(&threads);
    results_destroy(&got);
    results_destroy(&want);
    operands_destroy(&c.operands);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_option_each_cut),
        cmocka_unit_test(chunks_that_ranks_agree_on),
        cmocka_unit_test(operations_depend_on_shapes_alone),
        cmocka_unit_test(one_sentence_on_all_ranks),
        cmocka_unit_test(a_bad_target_on_the_device),
        cmocka_unit_test(targets_that_differ),
        cmocka_unit_test(divisors_that_differ),
        cmocka_unit_test(lost_ranks),
        cmocka_unit_test(graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
