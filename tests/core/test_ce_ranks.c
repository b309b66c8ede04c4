/* ce with the vocabulary over ranks of this process: every kernel, many cuts, by bits against one rank: row
 * results, loss, ids, ranks, the top, and each rank's columns of the gradient; the forward's operations are
 * counted; an error of one rank is every rank's. */
#define _POSIX_C_SOURCE 200809L
#include "ce_run.h"
#include "rank_run.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { kAllFields = (1 << kCeFields) - 1 };

/* In cuda_tests, where there are no ids and no top over ranks, and contents are seen by the device alone. */
static bool on_gpu(void) {
    const char *only = getenv("LL_TEST_BACKEND");
    return only && strcmp(only, "cuda") == 0;
}

static const char *parse(const char *text, struct problem *problem) {
    const char *why = problem_parse(text, problem);
    if (on_gpu()) problem->n_ids = problem->n_top = 0;
    return why;
}

/* What the threads of a run share, and one rank's own. */
struct group_run {
    const struct problem *problem;
    const struct ce_operands *operands;
    const struct rank_cut *cut;
    ll_view grad;  /* whole rows; each rank writes its columns */
    bool one_call; /* forward_backward, or forward then backward */
    bool debug;
    int32_t wrong; /* rank with a bad target, or -1 */
    int32_t quiet; /* rank that asks for nothing but the loss, or -1 */
};

struct group_rank {
    const struct group_run *run;
    struct ce_results results;
    ll_comm comm, counting;
    ll_comm_counts counts;
    int32_t rank;
    ll_status status;
    char sentence[320];
    pthread_t thread;
};

/* Columns [begin, begin + count) of whole rows. */
static ll_view columns(const ll_view *whole, int64_t begin, int64_t count) {
    ll_view part = *whole;
    if (part.data) part.data = (char *)part.data + (size_t)begin * lli_dtype_bytes(part.dtype);
    part.cols = count;
    return part;
}

static ll_ce_args args_of(struct group_rank *rank, ll_pass pass) {
    const struct group_run *run = rank->run;
    const int64_t begin = run->cut->begin[rank->rank], count = run->cut->count[rank->rank];
    ll_ce_args args = ce_problem_args(run->problem, run->operands, &rank->results, pass);
    args.logits = columns(&args.logits, begin, count);
    if (pass != LL_PASS_FORWARD) args.grad_logits = columns(&run->grad, begin, count);
    if (count == 0) { /* a rank without columns need not have memory for them */
        args.logits.data = args.grad_logits.data = NULL;
        args.logits.row_stride = 0;
        if (pass != LL_PASS_FORWARD) args.grad_logits.row_stride = 0;
    }
    if (run->quiet == rank->rank && pass == LL_PASS_FORWARD) {
        args.nll = args.lse = args.lse_lo = args.entropy = args.z_loss = NULL;
        args.argmax = NULL;
        args.id_logp = args.top_logp = NULL;
        args.id_rank = args.top_ids = NULL;
    }
    return args;
}

static ll_status passes(struct group_rank *rank, ll_plan *plan) {
    const struct group_run *run = rank->run;
    int64_t bad = run->problem->v_total;
    if (!run->one_call) {
        ll_ce_args args = args_of(rank, LL_PASS_FORWARD);
        if (run->wrong == rank->rank) args.target = ll_view_vector(&bad, LL_DTYPE_I64, 1, 0);
        const ll_status status = ce_pass_run(plan, LL_PASS_FORWARD, args);
        if (status != LL_STATUS_OK || run->quiet >= 0 || run->wrong >= 0) return status;
        return ce_pass_run(plan, LL_PASS_BACKWARD, args_of(rank, LL_PASS_BACKWARD));
    }
    return ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args_of(rank, LL_PASS_FORWARD_BACKWARD));
}

static void *rank_main(void *context) {
    struct group_rank *rank = context;
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    ce_problem_desc(rank->run->problem, &desc);
    if (on_gpu()) desc.backend = LL_BACKEND_CUDA;
    desc.v_begin = rank->run->cut->begin[rank->rank];
    desc.v_local = rank->run->cut->count[rank->rank];
    rank->counting.debug = rank->run->debug;
    desc.comm = &rank->counting;
    rank->status = ll_plan_create(&desc, &plan);
    if (rank->status == LL_STATUS_OK) rank->status = passes(rank, plan);
    if (rank->status != LL_STATUS_OK) snprintf(rank->sentence, sizeof rank->sentence, "%s", ll_last_error());
    ll_plan_destroy(plan);
    (void)ll_comm_double_counts(&rank->counting, &rank->counts);
    return NULL;
}

static void run_ranks(const struct group_run *run, struct group_rank *ranks) {
    const int32_t n = run->cut->n;
    ll_comm comms[kRanksMax];
    const ll_comm_double script = LL_COMM_DOUBLE_INIT;
    assert_int_equal(ll_comm_threads(n, 20000, comms), LL_STATUS_OK);
    for (int32_t r = 0; r < n; ++r) {
        ranks[r] = (struct group_rank){.run = run, .comm = comms[r], .rank = r};
        assert_true(ce_results_create(run->problem, run->operands, &ranks[r].results));
        assert_int_equal(ll_comm_double_create(&ranks[r].comm, &script, &ranks[r].counting), LL_STATUS_OK);
    }
    for (int32_t r = 0; r < n; ++r) {
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < n; ++r) pthread_join(ranks[r].thread, NULL);
    for (int32_t r = 0; r < n; ++r) {
        ll_comm_destroy(&ranks[r].counting);
        ll_comm_destroy(&ranks[r].comm);
    }
}

/* One problem over one cut: differences from one rank's results. */
static int64_t compare_cut(const struct problem *problem, const struct ce_operands *operands,
                           const struct ce_results *want, const struct rank_cut *cut, bool one_call,
                           bool debug) {
    static struct group_rank ranks[kRanksMax];
    struct ce_results gradient; /* holds the rows that all ranks write together */
    int64_t failed = 0;
    assert_true(ce_results_create(problem, operands, &gradient));
    const struct group_run run = {problem, operands, cut, gradient.grad_logits, one_call, debug, -1, -1};
    run_ranks(&run, ranks);
    for (int32_t r = 0; r < cut->n; ++r) {
        if (ranks[r].status != LL_STATUS_OK) {
            printf("FAIL %s %s rank %d: %s\n", problem->text, rank_cut_text(cut), r, ranks[r].sentence);
            ++failed;
        } else {
            failed += ce_differences(problem, rank_cut_text(cut), &ranks[r].results, want,
                                     kAllFields & ~(1u << kCeGradient));
        }
        failed += ranks[r].counts.order != ranks[0].counts.order;
        ce_results_destroy(&ranks[r].results);
    }
    failed += ce_differences(problem, rank_cut_text(cut), &gradient, want, 1u << kCeGradient);
    ce_results_destroy(&gradient);
    return failed;
}

static void cuts_have_the_bits_of_one_rank(void **state) {
    (void)state;
    static const char *const texts[] = {
        "ce:f32:n9:v300:up:ids3:top5:zl0.01",
        "ce:bf16:n9:v1000:up:ids2:top9:ign4",
        "ce:f16:n7:v700:pad70:cap9:t0.8:none:up",
        "ce:f32:n9:v200:ls0.1:cw:up",
        "ce:bf16:n9:v333:lso0.2:cw0:tw:none:ids2:ign3",
        "ce:f32:n8:v90:tie:top20:ids4",
        "ce:f32:n8:v260:ninf5:up:top60:ids4",
        "ce:f32:n9:v150:nan3:none:ids2:top3:up",
        "ce:f32:n9:v129:ts:scale30:sum:up",
        "ce:f32:n40:v400:up:ids3:top5:ls0.1:ws60:th3", /* several chunks */
        "ce:bf16:n300:v400:up:ls0.1:ws400",            /* likewise, on a GPU too */
        "ce:bf16:n9:v1000:scale12:up:cw",
        "ce:f16:n30:v500:cap9:t0.7:ls0.1:up:sum",
        "ce:bf16:n9:v200:ninf7:up",
        "ce:f32:n5:v1:up:ids1:top1",
        "ce:f32:n5:v40:ignall:top2",
    };
    static const enum rank_cut_kind kinds[] = {CUT_EVEN, CUT_UNEVEN, CUT_EMPTY, CUT_PERMUTED, CUT_TINY};
    const struct kernel_list list = kernels_of(on_gpu() ? "ce_cuda" : "ce_cpu");
    int64_t failed = 0;
    for (int32_t k = 0; k < list.count; ++k) {
        setenv("LL_KERNEL", list.kernels[k].name, 1);
        for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
            struct problem problem;
            struct ce_operands operands;
            struct ce_results want;
            const char *why = parse(texts[t], &problem);
            if (why) fail_msg("%s", why);
            if (on_gpu() && problem.workspace_kib == 60) continue; /* less than the least there */
            assert_true(ce_operands_create(&problem, &operands));
            assert_true(ce_results_create(&problem, &operands, &want));
            struct problem alone = problem;
            alone.workspace_kib = 0;
            ll_ce_args args = ce_problem_args(&alone, &operands, &want, LL_PASS_FORWARD_BACKWARD);
            assert_int_equal(ce_kernel_run(list.kernels[k].name, &alone, LL_PASS_FORWARD_BACKWARD, &args),
                             LL_STATUS_OK);
            setenv("LL_KERNEL", list.kernels[k].name, 1);
            for (int32_t n = 1; n <= 7; n += n < 3 ? 1 : 2) {
                const enum rank_cut_kind kind = kinds[(size_t)n % 5];
                for (int second = 0; second < 2; ++second) {
                    const struct rank_cut cut =
                        rank_cut_make(second ? CUT_UNEVEN : kind, n, problem.v_total + problem.v_pad, t + 1);
                    failed += compare_cut(&problem, &operands, &want, &cut, second == 0, n == 3);
                }
            }
            ce_results_destroy(&want);
            ce_operands_destroy(&operands);
        }
        unsetenv("LL_KERNEL");
    }
    assert_int_equal(failed, 0);
}

/* Two operations a chunk, the index for argmax is the third; a backward has none. */
static void operations_are_few(void **state) {
    (void)state;
    static struct group_rank ranks[kRanksMax];
    struct problem problem;
    struct ce_operands operands;
    assert_null(parse("ce:f32:n64:v500:up:ids2:top5", &problem));
    assert_true(ce_operands_create(&problem, &operands));
    const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, 500, 5);
    struct ce_results gradient;
    assert_true(ce_results_create(&problem, &operands, &gradient));
    struct group_run run = {&problem, &operands, &cut, gradient.grad_logits, false, false, -1, -1};
    run_ranks(&run, ranks);
    for (int32_t r = 0; r < 3; ++r) {
        assert_int_equal(ranks[r].status, LL_STATUS_OK);
        assert_int_equal(ranks[r].counts.max_i32, 2);
        assert_int_equal(ranks[r].counts.sum_i64, 1);
        assert_int_equal(ranks[r].counts.sum_f32, 0);
        /* plan; forward, backward; and a probe of each (tests/cuda/host_call_ce.c) */
        assert_int_equal(ranks[r].counts.all_gather, 3 + (on_gpu() ? 4 : 2));
        ce_results_destroy(&ranks[r].results);
    }
    /* A rank that asks for the loss alone goes along, and gets it. */
    run.quiet = 1;
    run_ranks(&run, ranks);
    for (int32_t r = 0; r < 3; ++r) {
        assert_int_equal(ranks[r].status, LL_STATUS_OK);
        assert_true(ranks[r].results.loss[0] == ranks[0].results.loss[0] && ranks[0].results.loss[0] > 0.0f);
    }
    for (int32_t r = 0; r < 3; ++r) ce_results_destroy(&ranks[r].results);
    ce_results_destroy(&gradient);
    ce_operands_destroy(&operands);
}

/* B70, B74: shards that sum to too much, and a bad target on one rank. */
static void errors_are_everybodys(void **state) {
    (void)state;
    static struct group_rank ranks[kRanksMax];
    struct problem problem;
    struct ce_operands operands;
    struct ce_results gradient;
    assert_null(problem_parse("ce:f32:n1:v8:up", &problem));
    assert_true(ce_operands_create(&problem, &operands));
    assert_true(ce_results_create(&problem, &operands, &gradient));
    struct rank_cut cut = {.n = 2, .begin = {0, 0}, .count = {8, 8}};
    struct group_run run = {&problem, &operands, &cut, gradient.grad_logits, false, false, -1, -1};
    run_ranks(&run, ranks);
    for (int32_t r = 0; r < 2; ++r) {
        assert_int_equal(ranks[r].status, LL_STATUS_INVALID_ARG);
        assert_string_equal(ranks[r].sentence, ranks[0].sentence);
        ce_results_destroy(&ranks[r].results);
    }
    cut = (struct rank_cut){.n = 2, .begin = {0, 3}, .count = {3, 5}};
    run.wrong = 1;
    if (!on_gpu()) run_ranks(&run, ranks);
    for (int32_t r = 0; r < 2 && !on_gpu(); ++r) {
        assert_int_equal(ranks[r].status, LL_STATUS_INVALID_ARG);
        assert_non_null(strstr(ranks[r].sentence, "target[0] is 8"));
        assert_non_null(strstr(ranks[r].sentence, "rank 1"));
        ce_results_destroy(&ranks[r].results);
    }
    ce_results_destroy(&gradient);
    ce_operands_destroy(&operands);
}

/* B13, B71: flat logits, every target, cuts that meet no tile. */
static void flat_logits_over_two_ranks(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t first; /* columns of rank 0 */
        double nll;
    } flat[] = {
        {"ce:f32:n200:v200:scale0", 100, 5.298317367},
        {"ce:bf16:n3:v131074:scale0", 65537, 11.783517257},
        {"ce:f32:n5:v5:scale0", 3, 1.609437912},
    };
    static struct group_rank ranks[kRanksMax];
    for (int f = 0; f < 3; ++f) {
        struct problem problem;
        struct ce_operands operands;
        struct ce_results gradient;
        assert_null(problem_parse(flat[f].text, &problem));
        assert_true(ce_operands_create(&problem, &operands));
        assert_true(ce_results_create(&problem, &operands, &gradient));
        for (int64_t i = 0; i < problem.n_tokens; ++i) {
            ((int64_t *)operands.args.target.data)[i] = problem.n_tokens == 3 ? 65536 + i - 1 : i;
        }
        const struct rank_cut cut = {
            .n = 2, .begin = {0, flat[f].first}, .count = {flat[f].first, problem.v_total - flat[f].first}};
        const struct group_run run = {&problem, &operands, &cut, gradient.grad_logits, true, false, -1, -1};
        run_ranks(&run, ranks);
        for (int32_t r = 0; r < 2; ++r) {
            assert_int_equal(ranks[r].status, LL_STATUS_OK);
            for (int64_t i = 0; i < problem.n_tokens; ++i) {
                assert_true(fabs((double)ranks[r].results.nll[i] - flat[f].nll) < 2e-6);
            }
            ce_results_destroy(&ranks[r].results);
        }
        ce_results_destroy(&gradient);
        ce_operands_destroy(&operands);
    }
}

/* B41, B67, B68: every rank's columns have their gradient, whoever owns the target; smoothing is over the
 * whole vocabulary on every rank. */
static void hand_values_over_two_ranks(void **state) {
    (void)state;
    static const double dz[] = {2.903824, -0.261433, -0.710648, -1.931743};
    static struct group_rank ranks[kRanksMax];
    struct problem problem;
    struct ce_operands operands;
    struct ce_results gradient;
    float up = -3.0f;
    assert_null(problem_parse("ce:f32:n1:v4:noloss", &problem));
    assert_true(ce_operands_create(&problem, &operands));
    assert_true(ce_results_create(&problem, &operands, &gradient));
    for (int v = 0; v < 4; ++v) ((float *)operands.args.logits.data)[v] = (float)(v + 1);
    *(int64_t *)operands.args.target.data = 0;
    operands.args.up_nll = &up;
    const struct rank_cut cut = {.n = 2, .begin = {0, 2}, .count = {2, 2}};
    const struct group_run run = {&problem, &operands, &cut, gradient.grad_logits, true, false, -1, -1};
    run_ranks(&run, ranks);
    for (int32_t r = 0; r < 2; ++r) {
        assert_int_equal(ranks[r].status, LL_STATUS_OK);
        assert_true(fabs((double)ranks[r].results.nll[0] - 3.440190) < 2e-6);
        ce_results_destroy(&ranks[r].results);
    }
    for (int v = 0; v < 4; ++v) {
        assert_true(fabs((double)((float *)gradient.grad_logits.data)[v] - dz[v]) < 5e-6);
    }
    ce_results_destroy(&gradient);
    ce_operands_destroy(&operands);

    assert_null(problem_parse("ce:f32:n1:v8:ls0.1", &problem));
    assert_true(ce_operands_create(&problem, &operands));
    assert_true(ce_results_create(&problem, &operands, &gradient));
    for (int v = 0; v < 8; ++v) ((float *)operands.args.logits.data)[v] = v ? 0.0f : 2.0f;
    *(int64_t *)operands.args.target.data = 0;
    for (int others = 0; others < 2; ++others) {
        const struct rank_cut halves = {.n = 2, .begin = {0, 4}, .count = {4, 4}};
        const struct group_run smoothed = {&problem, &operands, &halves, gradient.grad_logits,
                                           true,     false,     -1,      -1};
        problem.loss.smoothing_rule = others ? LL_SMOOTHING_OTHERS : LL_SMOOTHING_ALL;
        run_ranks(&smoothed, ranks);
        for (int32_t r = 0; r < 2; ++r) {
            assert_int_equal(ranks[r].status, LL_STATUS_OK);
            assert_true(fabs((double)ranks[r].results.loss[0] - (others ? 0.866468 : 0.841468)) < 2e-6);
            ce_results_destroy(&ranks[r].results);
        }
    }
    ce_results_destroy(&gradient);
    ce_operands_destroy(&operands);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_have_the_bits_of_one_rank), cmocka_unit_test(flat_logits_over_two_ranks),
        cmocka_unit_test(hand_values_over_two_ranks),     cmocka_unit_test(operations_are_few),
        cmocka_unit_test(errors_are_everybodys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
