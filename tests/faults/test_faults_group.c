/* Reported faults about ranks that do not agree, fail or do not come: one error on every rank within the time
 * limit, never a hang and never a number; and what a call communicates depends on shapes and options alone.
 */
#define _DEFAULT_SOURCE
#include "harness.h"
#include "rank_run.h"

#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { kTokens = 12, kHidden = 8, kVocab = 150 };

/* Of grad_w below f32 where chunks of tokens decide about its sum, as they do on a GPU. */
static double near(ll_dtype grad_w) {
    return !on_gpu() ? 1e-6 : grad_w == LL_DTYPE_F32 ? 2e-5 : 0x1p-7;
}

static rig *open_rig(void) {
    if (on_partial_kernel()) skip(); /* f32 */
    rig *r = rig_open(kTokens, kHidden, kVocab, LL_DTYPE_F32);
    rig_random(r, 9, 1, 1);
    return r;
}

/* Every rank has `status` and the same sentence, which has every word of `words` (parted by |). */
static void expect_all(const struct rank_run *run, ll_status status, const char *words) {
    for (int32_t k = 0; k < run->cut->n; k++) {
        if (run->status[k] != status || strcmp(run->sentence[k], run->sentence[0]) != 0) {
            fail_msg("rank %d: %s \"%s\", want %s and rank 0's \"%s\"", k, ll_status_name(run->status[k]),
                     run->sentence[k], ll_status_name(status), run->sentence[0]);
        }
    }
    char text[256];
    snprintf(text, sizeof text, "%s", words);
    for (char *rest = text, *word; (word = strtok_r(rest, "|", &rest)) != NULL;) {
        if (!strstr(run->sentence[0], word)) fail_msg("\"%s\" lacks \"%s\"", run->sentence[0], word);
    }
}

/* ---- One rank that is wrong --------------------------------------------------------------------- */

typedef struct wrong {
    const char *name;
    void (*change)(rig *r, ll_plan_desc *desc, ll_linear_ce_args *args);
    ll_status status;
    const char *words;
    bool host_only; /* a GPU finds it elsewhere (tests/cuda), or says it otherwise */
} wrong;

static int64_t other_targets[kTokens];
static float other_floats[kTokens];
static double other_divisor = 3.0;

#define WRONG(name, statement)                                                                               \
    static void name(rig *r, ll_plan_desc *desc, ll_linear_ce_args *args) {                                  \
        (void)r, (void)desc, (void)args;                                                                     \
        statement;                                                                                           \
    }

WRONG(null_w, args->w.data = NULL)
WRONG(null_x, args->x.data = NULL)
WRONG(no_struct, args->struct_bytes = 0)
WRONG(fewer_tokens, (args->x.rows -= 2, args->target.rows -= 2, args->grad_x.rows -= 2))
WRONG(bad_target, (memcpy(other_targets, r->y, sizeof other_targets), other_targets[7] = kVocab,
                   args->target.data = other_targets))
WRONG(other_target, (memcpy(other_targets, r->y, sizeof other_targets), other_targets[7] ^= 1,
                     args->target.data = other_targets))
WRONG(ignored_target, (memcpy(other_targets, r->y, sizeof other_targets), other_targets[3] = -100,
                       args->target.data = other_targets))
WRONG(no_grad_x, args->grad_x = (ll_view){0})
WRONG(more_upstreams, args->up_lse = other_floats)
WRONG(has_divisor, args->divisor = &other_divisor)
WRONG(no_results, (args->loss = args->nll = args->lse = args->lse_lo = args->entropy = args->z_loss = NULL,
                   args->argmax = NULL, args->sums = NULL))
WRONG(plan_hidden, desc->n_hidden = kHidden + 1)
WRONG(plan_hidden_bad, desc->n_hidden = 0)
WRONG(plan_tokens, desc->n_tokens_max = kTokens + 1)
WRONG(plan_vocabulary, desc->v_total = kVocab - 1)
WRONG(plan_dtype, desc->x_dtype = desc->grad_x_dtype = LL_DTYPE_BF16)
WRONG(plan_budget, desc->workspace_budget_bytes = 1000)
WRONG(plan_frozen, desc->frozen = LL_FROZEN_X)
WRONG(plan_overlap, desc->v_begin -= 1)
WRONG(plan_gap, (desc->v_begin += 1, desc->v_local -= 1))
WRONG(plan_short, desc->v_local -= 1)

static void plan_temperature(rig *r, ll_plan_desc *desc, ll_linear_ce_args *args) {
    static ll_loss loss;
    (void)args;
    loss = r->options;
    loss.temperature = 0.5f;
    desc->loss = &loss;
}

static const wrong wrongs[] = {
    {"w NULL (B74)", null_w, LL_STATUS_INVALID_ARG,
     "ll_linear_ce_forward_backward|w.data is NULL|rank 2 of 3", false},
    {"x NULL", null_x, LL_STATUS_INVALID_ARG, "x.data is NULL|rank 2", false},
    {"struct_bytes 0", no_struct, LL_STATUS_INVALID_ARG, "struct_bytes|rank 2", true},
    {"fewer tokens (B73)", fewer_tokens, LL_STATUS_INVALID_ARG, "rows of x|12 and 10|ranks 0 and 2", false},
    {"bad target (B74)", bad_target, LL_STATUS_INVALID_ARG, "target[7] is 150|rank 2", true},
    {"another target", other_target, LL_STATUS_INVALID_ARG, "ranks 0 and 2|the target", true},
    {"a target ignored on one rank", ignored_target, LL_STATUS_INVALID_ARG, "ranks 0 and 2|the target", true},
    {"grad_x not asked for", no_grad_x, LL_STATUS_INVALID_ARG, "ranks 0 and 2|grad_x asked for: 1 and 0",
     false},
    {"another upstream", more_upstreams, LL_STATUS_INVALID_ARG, "ranks 0 and 2|up_lse given: 0 and 1", false},
    {"a divisor", has_divisor, LL_STATUS_INVALID_ARG, "divisor|rank 2", false},
    {"plan: n_hidden", plan_hidden, LL_STATUS_INVALID_ARG, "ll_plan_create|ranks 0 and 2|n_hidden: 8 and 9",
     false},
    {"plan: bad n_hidden", plan_hidden_bad, LL_STATUS_INVALID_ARG, "n_hidden is 0|rank 2", false},
    {"plan: n_tokens_max", plan_tokens, LL_STATUS_INVALID_ARG, "n_tokens_max: 12 and 13", false},
    {"plan: v_total", plan_vocabulary, LL_STATUS_INVALID_ARG, "v_total: 150 and 149", false},
    {"plan: dtype", plan_dtype, LL_STATUS_INVALID_ARG, "x_dtype", true},
    {"plan: budget", plan_budget, LL_STATUS_WORKSPACE, "workspace_budget_bytes is 1000|rank 2", false},
    {"plan: frozen", plan_frozen, LL_STATUS_INVALID_ARG, "frozen", false},
    {"plan: temperature", plan_temperature, LL_STATUS_INVALID_ARG, "temperature: 1 and 0.5", false},
    {"plan: overlap", plan_overlap, LL_STATUS_INVALID_ARG, "ranks 1 [50, 100) and 2 [99, 149) overlap",
     false},
    {"plan: gap", plan_gap, LL_STATUS_INVALID_ARG, "no rank holds the columns [100, 101)", false},
    {"plan: too short", plan_short, LL_STATUS_INVALID_ARG, "end at column 149 of v_total 150", false},
};

typedef struct context {
    rig *r;
    const wrong *w;
    int32_t rank; /* that is wrong */
} context;

static void change(void *data, int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    const context *c = data;
    if (rank == c->rank && c->w) c->w->change(c->r, desc, args);
}

static void one_wrong_rank_is_an_error_on_all(void **state) {
    (void)state;
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 3, kVocab, 0);
    for (size_t i = 0; i < COUNT(wrongs); i++) {
        if (wrongs[i].host_only && on_gpu()) continue;
        rig *r = open_rig();
        context c = {r, &wrongs[i], 2};
        struct rank_run run = {.cut = &cut, .change = change, .context = &c, .timeout_ms = 20000};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
        rig_spoil(r, &a, LL_PASS_FORWARD_BACKWARD);
        (void)ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD_BACKWARD);
        print_message("%s: %s\n", wrongs[i].name, run.sentence[0]);
        expect_all(&run, wrongs[i].status, wrongs[i].words);
        for (int32_t k = 0; k < 3; k++) assert_true(run.seconds[k] < 5.0);
        assert_true(isnan(r->args.nll[0]) && isnan(rig_get(&r->args.grad_w, 0, 0))); /* nothing written */
        rig_close(r);
    }
}

/* A rank may want fewer results than the others, or another dtype of grad_w. */
static void ranks_may_want_different_results(void **state) {
    (void)state;
    static const wrong fewer = {"no results", no_results, LL_STATUS_OK, "", false};
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 3, kVocab, 0);
    rig *r = open_rig();
    rig_forward_backward(r);
    snapshot *alone = snapshot_take(r);
    for (int32_t rank = 1; rank < 3; rank++) {
        context c = {r, &fewer, rank};
        struct rank_run run = {.cut = &cut, .change = change, .context = &c};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
        rig_spoil(r, &a, LL_PASS_FORWARD_BACKWARD);
        (void)ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD_BACKWARD);
        for (int32_t k = 0; k < 3; k++) OK(run.status[k]);
        snapshot_near(alone, r, near(LL_DTYPE_F32));
    }
    snapshot_free(alone);
    rig_close(r);
}

WRONG(only_grad_x, args->grad_w = (ll_view){0})
WRONG(frozen_w, (desc->frozen = LL_FROZEN_W, args->grad_w = (ll_view){0}))

/* B65: rank 0 asks for grad_x only, rank 1 for both; also with bf16 grad_w, whose order of work differs. */
static void b65_frozen_on_one_rank(void **state) {
    (void)state;
    static const wrong kinds[] = {{"only grad_x", only_grad_x, LL_STATUS_OK, "", false},
                                  {"frozen w", frozen_w, LL_STATUS_OK, "", false}};
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 2, kVocab, 0);
    for (size_t i = 0; i < 2 * COUNT(kinds); i++) {
        rig *r = rig_open(kTokens, kHidden, kVocab, LL_DTYPE_BF16);
        rig_random(r, 9, 1, 1);
        if (i & 1) { /* grad_w in bf16: kept in the same memory, half of it used */
            r->desc.grad_w_dtype = LL_DTYPE_BF16;
            r->args.grad_w.dtype = LL_DTYPE_BF16;
        }
        rig_forward_backward(r);
        snapshot *alone = snapshot_take(r);
        context c = {r, &kinds[i / 2], 0};
        struct rank_run run = {.cut = &cut, .change = change, .context = &c, .timeout_ms = 10000};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
        OK(ranks_run(&run, &r->desc, &a,
                     LL_PASS_FORWARD_BACKWARD)); /* grad_w of rank 0: as rig_call left it */
        snapshot_near(alone, r, near(LL_DTYPE_F32));
        snapshot_free(alone);
        rig_close(r);
    }
}

WRONG(small_budget, (desc->workspace_budget_bytes = (size_t)3 << 20, desc->n_threads = 1))
WRONG(three_threads, desc->n_threads = 3)

/* Budgets and threads are each rank's own, and with them the cuts that it would choose: the ranks must still
 * go through the same chunks. */
static void ranks_with_other_budgets_and_threads(void **state) {
    (void)state;
    enum { kMany = 4500 };
    static const wrong kinds[] = {{"a small budget", small_budget, LL_STATUS_OK, "", false},
                                  {"three threads", three_threads, LL_STATUS_OK, "", false},
                                  {"frozen w", frozen_w, LL_STATUS_OK, "", false}};
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 3, kVocab, 0);
    for (size_t i = 0; i < 2 * COUNT(kinds); i++) {
        const ll_dtype dtype = i & 1 ? LL_DTYPE_BF16 : LL_DTYPE_F32;
        rig *r = rig_open(kMany, kHidden, kVocab, dtype);
        rig_random(r, 9, 1, 1);
        r->desc.grad_w_dtype = dtype;
        r->args.grad_w.dtype = dtype;
        r->desc.workspace_budget_bytes = (size_t)(i / 2 == 1 ? 5 : 64) << 20;
        rig_forward_backward(r);
        snapshot *alone = snapshot_take(r);
        for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
            context c = {r, &kinds[i / 2], 1};
            if (pass == LL_PASS_FORWARD && i / 2 == 2)
                continue; /* asks for no gradient that could be frozen */
            struct rank_run run = {.cut = &cut, .change = change, .context = &c, .timeout_ms = 10000};
            const ll_linear_ce_args a = rig_args(r, (ll_pass)pass);
            OK(ranks_run(&run, &r->desc, &a, (ll_pass)pass));
            snapshot_near(alone, r, near(dtype));
        }
        snapshot_free(alone);
        rig_close(r);
    }
}

static int64_t budgets[2];
static void two_budgets(void *data, int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args) {
    (void)data;
    desc->workspace_budget_bytes = (size_t)budgets[rank];
    desc->n_threads = 1;
    if (rank == 1) frozen_w(NULL, desc, args);
}

/* bf16 grad_w of all tokens in one chunk needs no f32 sum of it, but does once another rank can only take
 * smaller chunks: there are budgets that hold the first and not the second, and then no rank may take one
 * pass. */
static void one_pass_only_if_all_ranks_can(void **state) {
    (void)state;
    enum { kMany = 260, kWide = 256, kLarge = 1500, kStep = 96 << 10 };
    const struct rank_cut cut = {.n = 2, .begin = {0, 1000}, .count = {1000, 500}};
    rig *r = rig_open(kMany, kWide, kLarge, LL_DTYPE_BF16);
    rig_random(r, 9, 1, 1);
    r->desc.grad_w_dtype = r->args.grad_w.dtype = LL_DTYPE_BF16;
    rig_forward_backward(r);
    snapshot *alone = snapshot_take(r);
    /* From where neither holds its least to where both hold all; a GPU's scratch memory is larger. */
    const int64_t first[2] = {on_gpu() ? 7 << 19 : 2 << 20, on_gpu() ? 2 << 20 : 3 << 19};
    const int64_t last[2] = {on_gpu() ? 7 << 20 : 4 << 20, on_gpu() ? 5 << 20 : 3 << 20};
    const int64_t step[2] = {on_gpu() ? 2 * kStep : kStep, on_gpu() ? 4 * kStep : 2 * kStep};
    int64_t done = 0;
    for (budgets[1] = first[1]; budgets[1] < last[1]; budgets[1] += step[1]) {
        for (budgets[0] = first[0]; budgets[0] < last[0]; budgets[0] += step[0]) {
            struct rank_run run = {.cut = &cut, .change = two_budgets, .timeout_ms = 10000};
            const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
            const ll_status status = ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD_BACKWARD);
            if (status == LL_STATUS_WORKSPACE) continue;
            OK(status);
            snapshot_near(alone, r, near(LL_DTYPE_BF16));
            done++;
        }
    }
    assert_true(done > 20);
    snapshot_free(alone);
    rig_close(r);
}

/* ---- Shards ------------------------------------------------------------------------------------- */

/* B70: every rank passes all columns, as its shard from 0 or from where its turn would be. */
static void b70_full_weights_as_shards(void **state) {
    (void)state;
    const struct rank_cut cuts[] = {
        {.n = 2, .begin = {0, 0}, .count = {8, 8}},
        {.n = 2, .begin = {0, 8}, .count = {8, 8}},
        {.n = 3, .begin = {0, 8, 16}, .count = {8, 8, 8}},
    };
    if (on_partial_kernel()) skip();
    for (size_t i = 0; i < COUNT(cuts); i++) {
        rig *r = rig_open(3, 4, 24, LL_DTYPE_F32);
        r->desc.v_total = 8;
        struct rank_run run = {.cut = &cuts[i]};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD);
        (void)ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD);
        expect_all(&run, LL_STATUS_INVALID_ARG,
                   "ll_plan_create|hold at least v_total 8|not the full weights");
        rig_close(r);
    }
}

/* ---- Ranks that do not come --------------------------------------------------------------------- */

static bool last_stays_away(void *data, int32_t rank) {
    return rank == *(const int32_t *)data;
}

static void b74_a_rank_that_stays_away(void **state) {
    (void)state;
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 3, kVocab, 0);
    for (int32_t away = 0; away < 3; away++) {
        rig *r = open_rig();
        struct rank_run run = {
            .cut = &cut, .timeout_ms = on_gpu() ? 2000 : 200, .stay_away = last_stays_away, .context = &away};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD);
        (void)ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD);
        for (int32_t k = 0; k < 3; k++) {
            if (k == away) continue;
            assert_int_equal(run.status[k], LL_STATUS_COMM);
            assert_non_null(strstr(run.sentence[k], "ll_linear_ce_forward"));
            assert_true(run.seconds[k] < 5.0);
        }
        rig_close(r);
    }
}

/* The double refuses operation number k on every rank, for every k that a call has. */
static void every_operation_may_fail(void **state) {
    (void)state;
    const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, kVocab, 4);
    int64_t k = 1;
    for (;; k++) {
        ll_comm_double script = LL_COMM_DOUBLE_INIT;
        script.fail_at = k;
        rig *r = open_rig();
        struct rank_run run = {.cut = &cut, .timeout_ms = 5000, .script = &script};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
        const ll_status status = ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD_BACKWARD);
        for (int32_t rank = 0; rank < 3; rank++) assert_int_equal(run.status[rank], status);
        rig_close(r);
        if (status == LL_STATUS_OK) break;
        assert_int_equal(status, LL_STATUS_COMM);
    }
    /* plan, call, statistics, index, grad_x: all were tried; on a GPU a probe too (tests/cuda/host_call.c) */
    assert_int_equal(k, 3 + 1 + 2 + 1 + 1 + 1 + (on_gpu() ? 1 : 0));
}

/* ---- What is communicated ----------------------------------------------------------------------- */

static ll_comm_counts counts_of(rig *r, const struct rank_cut *cut, ll_pass pass) {
    ll_comm_double script = LL_COMM_DOUBLE_INIT;
    struct rank_run run = {.cut = cut, .script = &script};
    const ll_linear_ce_args a = rig_args(r, pass);
    OK(ranks_run(&run, &r->desc, &a, pass));
    for (int32_t k = 1; k < cut->n; k++) assert_true(run.counts[k].order == run.counts[0].order);
    return run.counts[0];
}

/* Number and order of operations with some, all or no token ignored, by several chunks. */
static void targets_do_not_decide_what_is_communicated(void **state) {
    (void)state;
    enum { kMany = 5000 };
    const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, kVocab, 2);
    for (int dtype = LL_DTYPE_F32; dtype <= LL_DTYPE_BF16; dtype++) {
        if (dtype == LL_DTYPE_F32 && on_partial_kernel()) continue;
        for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass += 2) {
            rig *r = rig_open(kMany, kHidden, kVocab, (ll_dtype)dtype);
            r->desc.workspace_budget_bytes = (size_t)3 << 20; /* several chunks */
            r->desc.grad_w_dtype = r->args.grad_w.dtype = dtype;
            rig_random(r, 3, 1, 1);
            const ll_comm_counts want = counts_of(r, &cut, (ll_pass)pass);
            assert_true(want.sum_i64 > 1);
            for (int variant = 0; variant < 3; variant++) {
                for (int64_t t = 0; t < kMany; t++) {
                    if (variant == 2 || t % (variant ? 2 : 300) == 0) r->y[t] = -100;
                }
                const ll_comm_counts got = counts_of(r, &cut, (ll_pass)pass);
                assert_int_equal(got.max_i32, want.max_i32);
                assert_int_equal(got.sum_i64, want.sum_i64);
                assert_int_equal(got.sum_f32, want.sum_f32);
                assert_int_equal(got.all_gather, want.all_gather);
            }
            rig_close(r);
        }
    }
}

/* Bytes a token of the integer exchange: 12 and 80 with cuts between tiles, whatever the vocabulary; on a GPU
 * 8 more, by which it compares targets. */
static void exchange_does_not_grow_with_the_vocabulary(void **state) {
    (void)state;
    const int64_t sizes[] = {128, 1280, 12800};
    if (on_partial_kernel()) skip();
    for (size_t i = 0; i < COUNT(sizes); i++) {
        rig *r = rig_open(100, 4, sizes[i], LL_DTYPE_F32);
        r->args.argmax = NULL;
        const struct rank_cut cut = rank_cut_make(CUT_EVEN, 2, sizes[i], 0);
        const ll_comm_counts counts = counts_of(r, &cut, LL_PASS_FORWARD);
        assert_int_equal(counts.max_bytes, 100 * (on_gpu() ? 20 : 12));
        assert_int_equal(counts.sum_bytes, 100 * 80);
        assert_int_equal(counts.grad_bytes, 0);
        rig_close(r);
    }
}

/* ---- Debug mode --------------------------------------------------------------------------------- */

static float other_x[kTokens * kHidden];
WRONG(debug_on, ((ll_comm *)(uintptr_t)desc->comm)->debug = 1)
WRONG(debug_other_x, (memcpy(other_x, r->args.x.data, sizeof other_x), other_x[5] += 1,
                      args->x.data = other_x, debug_on(r, desc, args)))
WRONG(debug_other_upstream, (other_floats[0] = 7, args->up_loss = other_floats, debug_on(r, desc, args)))

static void debug_mode_compares_contents(void **state) {
    (void)state;
    static const wrong kinds[] = {
        {"x", debug_other_x, LL_STATUS_INVALID_ARG, "ranks 0 and 1 differ in x", true},
        {"upstream", debug_other_upstream, LL_STATUS_INVALID_ARG, "ranks 0 and 1 differ in an upstream",
         true},
        {"nothing", debug_on, LL_STATUS_OK, "", false}};
    const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, kVocab, 5);
    for (size_t i = 0; i < COUNT(kinds); i++) {
        if (kinds[i].host_only && on_gpu()) continue;
        rig *r = open_rig();
        context c = {r, &kinds[i], 1}; /* one rank asks for debug mode: all have it */
        struct rank_run run = {.cut = &cut, .change = change, .context = &c, .timeout_ms = 10000};
        const ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
        (void)ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD_BACKWARD);
        expect_all(&run, kinds[i].status, kinds[i].words);
        rig_close(r);
    }
}

/* Ranks in different calls: named in either mode, because every call starts with the same meeting. */
typedef struct straggler {
    rig *r;
    const ll_comm *comm;
    ll_pass pass;
    ll_status status;
    char sentence[kRankTextBytes];
} straggler;

static void *straggler_main(void *data) {
    straggler *s = data;
    rig *r = s->r;
    ll_plan *plan = NULL;
    ll_plan_desc desc = r->desc;
    desc.comm = s->comm;
    desc.v_begin = s->comm->rank ? kVocab / 2 : 0;
    desc.v_local = kVocab / 2;
    s->status = ll_plan_create(&desc, &plan);
    ll_linear_ce_args a = rig_args(r, s->pass);
    a.w.rows = a.grad_w.rows = kVocab / 2;
    if (s->pass == LL_PASS_FORWARD) a.grad_w = (ll_view){0};
    if (s->status == LL_STATUS_OK) s->status = ll_plan_workspace(plan, s->pass, &a.workspace_bytes);
    a.workspace = aligned_alloc(64, a.workspace_bytes / 64 * 64 + 64);
    if (s->status == LL_STATUS_OK) s->status = rig_pass(plan, s->pass, &a);
    snprintf(s->sentence, sizeof s->sentence, "%s", ll_last_error());
    free(a.workspace);
    ll_plan_destroy(plan);
    return NULL;
}

static void ranks_in_different_calls(void **state) {
    (void)state;
    ll_comm comms[2];
    straggler s[2];
    pthread_t threads[2];
    if (on_partial_kernel()) skip();
    OK(ll_comm_threads(2, 5000, comms));
    for (int k = 0; k < 2; k++) {
        s[k] = (straggler){
            .r = open_rig(), .comm = &comms[k], .pass = k ? LL_PASS_FORWARD_BACKWARD : LL_PASS_FORWARD};
        assert_int_equal(pthread_create(&threads[k], NULL, straggler_main, &s[k]), 0);
    }
    for (int k = 0; k < 2; k++) pthread_join(threads[k], NULL);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(s[k].status, LL_STATUS_INVALID_ARG);
        if (!strstr(s[k].sentence, "ll_linear_ce_forward and ll_linear_ce_forward_backward")) {
            fail_msg("rank %d: %s", k, s[k].sentence);
        }
        ll_comm_destroy(&comms[k]);
        rig_close(s[k].r);
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT_RANKS(one_wrong_rank_is_an_error_on_all),
        FAULT_RANKS(ranks_may_want_different_results),
        FAULT_RANKS(b65_frozen_on_one_rank),
        FAULT_RANKS(ranks_with_other_budgets_and_threads),
        FAULT_HEAVY(one_pass_only_if_all_ranks_can),
        FAULT_RANKS(b70_full_weights_as_shards),
        FAULT_RANKS(b74_a_rank_that_stays_away),
        FAULT_RANKS(every_operation_may_fail),
        FAULT_RANKS(targets_do_not_decide_what_is_communicated),
        FAULT_RANKS(exchange_does_not_grow_with_the_vocabulary),
        FAULT_RANKS(debug_mode_compares_contents),
        FAULT_RANKS(ranks_in_different_calls),
    };
    return faults_main("reported faults: groups", tests, COUNT(tests), argc, argv);
}
