/* Reported faults whose cause is the vocabulary cut over ranks: a rank's own quantity taken for the group's.
 * Values by hand or from one rank, whose results every cut must repeat. */
#include "harness.h"
#include "rank_run.h"

#include <stdio.h>

/* The rig's call over ranks; results of the whole as rig_call leaves them, equal on all ranks. */
static void over(rig *r, const struct rank_cut *cut, ll_pass pass) {
    struct rank_run run = {.cut = cut};
    const ll_linear_ce_args a = rig_args(r, pass);
    rig_spoil(r, &a, pass);
    const ll_status status = ranks_run(&run, &r->desc, &a, pass);
    if (status == LL_STATUS_OK) return;
    if (status == LL_STATUS_UNSUPPORTED && on_partial_kernel()) skip();
    for (int32_t k = 0; k < cut->n; k++) print_error("rank %d: %s\n", k, run.sentence[k]);
    fail_msg("%d ranks %s: %s", cut->n, rank_cut_text(cut), run.difference);
}

static struct rank_cut two(int64_t first, int64_t v) {
    return (struct rank_cut){.n = 2, .begin = {0, first}, .count = {first, v - first}};
}

/* Targets on either side of a cut and beyond a rank's last tile; none may be taken for another column. */
static void b13_targets_of_other_shards(void **state) {
    (void)state;
    rig *r = rig_open(200, 8, 200, LL_DTYPE_F32);
    for (int64_t t = 0; t < 200; t++) r->y[t] = t;
    const struct rank_cut cuts[] = {two(100, 200), two(128, 200), two(1, 200), two(199, 200)};
    for (size_t c = 0; c < COUNT(cuts); c++) {
        over(r, &cuts[c], LL_PASS_FORWARD_BACKWARD);
        for (int64_t t = 0; t < 200; t++) NEAR(r->args.nll[t], 5.298317366548036);
    }
    rig_close(r);
}

/* Megatron: the local vocabulary size and the local mean in label smoothing. */
static void b41_b43_smoothing_is_global(void **state) {
    (void)state;
    const double z[] = {2, 0, 0, 0, 0, 0, 0, 0};
    rig *r = rig_exact(1, 8, LL_DTYPE_F32, z);
    const struct rank_cut cuts[] = {two(4, 8), two(1, 8), two(7, 8), two(0, 8)};
    const double want[] = {0.841468, 0.866468};
    r->options.label_smoothing = 0.1f;
    for (int rule = LL_SMOOTHING_ALL; rule <= LL_SMOOTHING_OTHERS; rule++) {
        r->options.smoothing_rule = rule;
        rig_plan(r);
        rig_run(r);
        snapshot *alone = snapshot_take(r);
        for (size_t c = 0; c < COUNT(cuts); c++) {
            over(r, &cuts[c], LL_PASS_FORWARD_BACKWARD);
            NEAR_TO(*r->args.loss, want[rule], 0, 1e-6);
            snapshot_near(alone, r, 1e-6);
        }
        snapshot_free(alone);
    }
    rig_close(r);
}

/* The backward of the owner and of the others: neither the identity nor zero. */
static void b67_b68_gradient_without_the_target(void **state) {
    (void)state;
    const double z[] = {1, 2, 3, 4}, want[] = {2.903824, -0.261433, -0.710648, -1.931743};
    rig *r = rig_exact(1, 4, LL_DTYPE_F32, z);
    r->args.up_loss = NULL;
    r->args.up_nll = rig_tokens(r, -3); /* logp = -nll with g = 3 */
    for (int64_t first = 0; first <= 4; first++) {
        const struct rank_cut cut = two(first, 4);
        over(r, &cut, LL_PASS_FORWARD);
        over(r, &cut, LL_PASS_BACKWARD);
        NEAR_TO(r->args.nll[0], 3.440190, 0, 1e-6);
        for (int64_t v = 0; v < 4; v++) NEAR_TO(rig_dz(r, 0, v), want[v], 0, 2e-6);
    }
    rig_close(r);
}

/* grad_x is the sum over ranks, the same on each (over checks that) and that of one rank. */
static void b69_grad_x_is_reduced(void **state) {
    (void)state;
    rig *r = rig_open(33, 24, 517, LL_DTYPE_F32);
    rig_random(r, 11, 1, 1);
    rig_run(r);
    snapshot *alone = snapshot_take(r);
    for (int kind = CUT_EVEN; kind <= CUT_PERMUTED; kind++) {
        const struct rank_cut cut = rank_cut_make((enum rank_cut_kind)kind, 5, 517, 3);
        over(r, &cut, LL_PASS_FORWARD_BACKWARD);
        snapshot_near(alone, r, on_gpu() ? 5e-6 : 1e-6); /* a matrix instruction's own order of additions */
    }
    snapshot_free(alone);
    rig_close(r);
}

static void b71_large_and_uneven_shards(void **state) {
    (void)state;
    rig *r = rig_open(2, 4, 131074, LL_DTYPE_F32);
    r->y[1] = 131073;
    struct rank_cut cut = two(65537, 131074);
    over(r, &cut, LL_PASS_FORWARD);
    NEAR(r->args.nll[0], 11.783517186);
    NEAR(r->args.nll[1], 11.783517186);
    rig_close(r);
    r = rig_open(5, 4, 5, LL_DTYPE_F32);
    for (int64_t t = 0; t < 5; t++) r->y[t] = t;
    cut = two(3, 5);
    over(r, &cut, LL_PASS_FORWARD_BACKWARD);
    for (int64_t t = 0; t < 5; t++) NEAR(r->args.nll[t], 1.6094379124341003);
    rig_close(r);
}

/* Means and weights count tokens and classes of the whole, on every rank. */
static void b34_b37_divisors_are_global(void **state) {
    (void)state;
    const double z[] = {1, 2, 3, 0.5, -1, 0, 2, 2, 0, 0, 0, 1};
    rig *r = rig_exact(3, 4, LL_DTYPE_F32, z);
    const float weights[] = {0.5f, 0, 2, 3};
    float *class_weight = rig_alloc(r, sizeof weights, 0);
    memcpy(class_weight, weights, sizeof weights);
    r->args.class_weight = class_weight;
    r->y[0] = 2, r->y[1] = -100, r->y[2] = 3;
    r->options.reduction = LL_REDUCTION_MEAN;
    r->options.label_smoothing = 0.2f;
    rig_plan(r);
    rig_run(r);
    snapshot *alone = snapshot_take(r);
    assert_int_equal(r->sums.n_valid, 2);
    assert_true(r->sums.weight == 5.0);
    for (int64_t first = 0; first <= 4; first++) {
        const struct rank_cut cut = two(first, 4);
        over(r, &cut, LL_PASS_FORWARD_BACKWARD);
        snapshot_near(alone, r, 1e-6);
        assert_int_equal(r->sums.n_valid, 2);
        assert_true(r->sums.weight == 5.0);
    }
    snapshot_free(alone);
    rig_close(r);
}

/* Log-probs do not depend on the number of ranks, nor on the tokens beside them. */
static void b79_log_probs_on_any_number_of_ranks(void **state) {
    (void)state;
    const double z[] = {0.1, -0.2, 1.7, 0.3, 1.2, -0.5};
    rig *r = rig_exact(1, 6, LL_DTYPE_F32, z);
    r->y[0] = 4;
    rig_forward(r);
    NEAR_TO(-r->args.nll[0], -1.339581, 0, 1e-6);
    snapshot *alone = snapshot_take(r);
    for (int32_t n = 1; n <= 6; n++) {
        const struct rank_cut cut = rank_cut_make(CUT_EVEN, n, 6, 1);
        over(r, &cut, LL_PASS_FORWARD);
        snapshot_near(alone, r, 0);
    }
    snapshot_free(alone);
    rig_close(r);
}

static void b78_b79_large_vocabulary(void **state) {
    (void)state;
    enum { kTokens = 24, kVocab = 151936 };
    rig *r = rig_open(kTokens, 16, kVocab, LL_DTYPE_F32);
    rig_random(r, 5, 2, 2);
    r->args.grad_x = r->args.grad_w = (ll_view){0};
    rig_forward(r);
    snapshot *alone = snapshot_take(r);
    const int32_t sizes[] = {1, 2, 4, 8};
    for (size_t s = 0; s < COUNT(sizes); s++) {
        for (int kind = CUT_EVEN; kind <= CUT_UNEVEN; kind++) {
            const struct rank_cut cut = rank_cut_make((enum rank_cut_kind)kind, sizes[s], kVocab, s);
            over(r, &cut, LL_PASS_FORWARD);
            snapshot_near(alone, r, 0);
        }
    }
    /* One of the rows alone: another number of tokens, another size of message. */
    const float nll = r->args.nll[17];
    ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD);
    a.x.data = (char *)a.x.data + 17 * 16 * sizeof(float);
    a.target.data = r->y + 17;
    a.x.rows = a.target.rows = 1;
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 4, kVocab, 0);
    struct rank_run run = {.cut = &cut};
    OK(ranks_run(&run, &r->desc, &a, LL_PASS_FORWARD));
    assert_true(same_bits(r->args.nll[0], nll));
    snapshot_free(alone);
    rig_close(r);
}

/* -inf columns alone on a rank, entropy and its gradient. */
static void b82_entropy_with_masked_columns(void **state) {
    (void)state;
    const double z[] = {0, 1, -INFINITY}, want[] = {0.196612, -0.196612, 0};
    rig *r = rig_exact(1, 3, LL_DTYPE_F32, z);
    r->args.up_loss = NULL;
    r->args.up_entropy = rig_tokens(r, 1);
    for (int64_t first = 0; first <= 3; first++) {
        const struct rank_cut cut = two(first, 3);
        over(r, &cut, LL_PASS_FORWARD_BACKWARD);
        NEAR_TO(r->args.entropy[0], 0.582203, 0, 1e-6);
        for (int64_t v = 0; v < 3; v++) NEAR_TO(rig_dz(r, 0, v), want[v], 0, 1e-6);
    }
    rig_close(r);
}

/* Confident targets, offsets, +inf and NaN rows: a cut changes nothing. */
static void hard_rows_over_ranks(void **state) {
    (void)state;
    enum { kRows = 7, kCols = 70 };
    static double z[kRows * kCols];
    for (int64_t v = 0; v < kCols; v++) {
        const double noise = (double)(v * 37 % 11) / 8;
        z[0 * kCols + v] = v == 69 ? 80 : 0;
        z[1 * kCols + v] = 1e8;
        z[2 * kCols + v] = 1e4 + noise;
        z[3 * kCols + v] = v < 65 ? -INFINITY : noise;
        z[4 * kCols + v] = v == 63 ? INFINITY : noise;
        z[5 * kCols + v] = -INFINITY;
        z[6 * kCols + v] = v % 10 == 9 ? 5 : noise;
    }
    rig *r = rig_exact(kRows, kCols, LL_DTYPE_F32, z);
    const int64_t y[kRows] = {69, 64, 63, 66, 5, 0, 9};
    memcpy(r->y, y, sizeof y);
    r->args.up_lse = rig_tokens(r, 0.5f);
    r->args.up_entropy = rig_tokens(r, 0.25f);
    r->options.reduction = LL_REDUCTION_NONE;
    rig_plan(r);
    rig_run(r);
    assert_int_equal(r->args.argmax[6], 9); /* ties: the lowest column, on whichever rank */
    assert_int_equal(r->args.argmax[1], 0);
    assert_true(isnan(r->args.nll[4]) && isnan(r->args.nll[5]) && r->args.nll[0] < 1e-30f);
    snapshot *alone = snapshot_take(r);
    for (int64_t first = 0; first <= kCols; first++) {
        const struct rank_cut cut = two(first, kCols);
        over(r, &cut, LL_PASS_FORWARD_BACKWARD);
        snapshot_near(alone, r, 1e-6);
    }
    snapshot_free(alone);
    rig_close(r);
}

/* Padding on several ranks, one of which has nothing else; its rows of grad_w are 0. */
static void padding_on_any_rank(void **state) {
    (void)state;
    rig *r = rig_open(9, 8, 16, LL_DTYPE_F32);
    rig_random(r, 3, 1, 1);
    r->desc.v_total = 10;
    for (int64_t t = 0; t < 9; t++) r->y[t] %= 10;
    for (int64_t v = 10; v < 16; v++) {
        for (int64_t k = 0; k < 8; k++) rig_set(&r->args.w, v, k, NAN);
    }
    rig_run(r);
    snapshot *alone = snapshot_take(r);
    const struct rank_cut cut = rank_cut_make(CUT_EVEN, 4, 16, 0);
    over(r, &cut, LL_PASS_FORWARD_BACKWARD);
    snapshot_near(alone, r, 1e-6);
    for (int64_t v = 10; v < 16; v++) assert_true(rig_get(&r->args.grad_w, v, 0) == 0.0);
    snapshot_free(alone);
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT_RANKS(b13_targets_of_other_shards),
        FAULT_RANKS(b41_b43_smoothing_is_global),
        FAULT_RANKS(b67_b68_gradient_without_the_target),
        FAULT_RANKS(b69_grad_x_is_reduced),
        FAULT_RANKS(b71_large_and_uneven_shards),
        FAULT_RANKS(b34_b37_divisors_are_global),
        FAULT_RANKS(b79_log_probs_on_any_number_of_ranks),
        FAULT_HEAVY(b78_b79_large_vocabulary),
        FAULT_RANKS(b82_entropy_with_masked_columns),
        FAULT_RANKS(hard_rows_over_ranks),
        FAULT_RANKS(padding_on_any_rank),
    };
    return faults_main("reported faults: ranks", tests, COUNT(tests), argc, argv);
}
