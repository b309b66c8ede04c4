/* Bad input of ll_linear_ce_*: the right status, a sentence with the name of what is wrong, and not one
 * byte of any result written. Plans that must not be made are in test_bad_plan.c. */
#include "harness.h"

#include <stdio.h>

enum {
    kForward = 1,
    kBackward = 2,
    kBoth = 4,
    kGrads = kBackward | kBoth,
    kOuts = kForward | kBoth,
    kAll = 7
};

typedef struct bad_call {
    const char *what;
    int passes; /* in which it is bad */
    ll_status want;
    const char *named; /* in the sentence */
    void (*spoil)(ll_linear_ce_args *a);
} bad_call;

static const double kZero = 0, kNegative = -1, kNan = NAN, kInf = INFINITY;
static float class_weight[70], token_weight[5];

#define BAD(name, body)                                                                                      \
    static void name(ll_linear_ce_args *a) {                                                                 \
        body                                                                                                 \
    }
#define VIEW_CASES(field)                                                                                    \
    BAD(field##_null, a->field.data = NULL;)                                                                 \
    BAD(field##_dtype, a->field.dtype = LL_DTYPE_I32;)                                                       \
    BAD(field##_unknown_dtype, a->field.dtype = 77;)                                                         \
    BAD(field##_rows, a->field.rows--;)                                                                      \
    BAD(field##_more_rows, a->field.rows++;)                                                                 \
    BAD(field##_cols, a->field.cols--;)                                                                      \
    BAD(field##_col_stride, a->field.col_stride = 2;)                                                        \
    BAD(field##_col_stride_0, a->field.col_stride = 0;)                                                      \
    BAD(field##_col_stride_negative, a->field.col_stride = -1;)                                              \
    BAD(field##_row_stride, a->field.row_stride = a->field.cols - 1;)                                        \
    BAD(field##_row_stride_negative, a->field.row_stride = -a->field.cols;)                                  \
    BAD(field##_row_stride_huge, a->field.row_stride = INT64_MAX;)                                           \
    BAD(field##_misaligned, a->field.data = (char *)a->field.data + 1;)                                      \
    BAD(field##_reserved, a->field.reserved = 1;)
#define VIEW_ROWS(field, passes)                                                                             \
    {#field " NULL", passes, LL_STATUS_INVALID_ARG, #field, field##_null},                                   \
        {#field " dtype i32", passes, LL_STATUS_INVALID_ARG, #field, field##_dtype},                         \
        {#field " dtype 77", passes, LL_STATUS_INVALID_ARG, #field, field##_unknown_dtype},                  \
        {#field " one row less", passes, LL_STATUS_INVALID_ARG, "shape", field##_rows},                      \
        {#field " one row more", passes, LL_STATUS_INVALID_ARG, #field, field##_more_rows},                  \
        {#field " one column less", passes, LL_STATUS_INVALID_ARG, #field, field##_cols},                    \
        {#field " column stride 2", passes, LL_STATUS_INVALID_ARG, #field, field##_col_stride},              \
        {#field " column stride 0", passes, LL_STATUS_INVALID_ARG, #field, field##_col_stride_0},            \
        {#field " column stride -1", passes, LL_STATUS_INVALID_ARG, #field, field##_col_stride_negative},    \
        {#field " row stride < cols", passes, LL_STATUS_INVALID_ARG, #field, field##_row_stride},            \
        {#field " row stride < 0", passes, LL_STATUS_INVALID_ARG, #field, field##_row_stride_negative},      \
        {#field " row stride huge", passes, LL_STATUS_INVALID_ARG, #field, field##_row_stride_huge},         \
        {#field " misaligned", passes, LL_STATUS_INVALID_ARG, #field, field##_misaligned}, {                 \
#field " reserved set", passes, LL_STATUS_INVALID_ARG, #field, field##_reserved                      \
    }

VIEW_CASES(w)
VIEW_CASES(grad_x)
VIEW_CASES(grad_w)
VIEW_CASES(x)

BAD(x_too_many, a->x.rows = a->target.rows = a->grad_x.rows = 6;)
BAD(x_negative, a->x.rows = -1;)
BAD(bias_null, a->bias.data = NULL;)
BAD(bias_missing, memset(&a->bias, 0, sizeof a->bias);)
BAD(bias_dtype, a->bias.dtype = LL_DTYPE_BF16;)
BAD(bias_rows, a->bias.rows = 69;)
BAD(bias_step, a->bias.row_stride = 0;)
BAD(target_null, a->target.data = NULL;)
BAD(target_missing, memset(&a->target, 0, sizeof a->target);)
BAD(target_dtype, a->target.dtype = LL_DTYPE_F32;)
BAD(target_rows, a->target.rows = 4;)
BAD(target_step, a->target.row_stride = 0;)
BAD(target_step_negative, a->target.row_stride = -1;)
BAD(target_misaligned, a->target.data = (char *)a->target.data + 4;)
BAD(class_nan, class_weight[69] = NAN; a->class_weight = class_weight;)
BAD(class_negative, class_weight[69] = -1; a->class_weight = class_weight;)
BAD(class_inf, class_weight[69] = INFINITY; a->class_weight = class_weight;)
BAD(token_nan, token_weight[3] = NAN; a->token_weight = token_weight;)
BAD(token_inf, token_weight[3] = -INFINITY; a->token_weight = token_weight;)
BAD(divisor_zero, a->divisor = &kZero;)
BAD(divisor_negative, a->divisor = &kNegative;)
BAD(divisor_nan, a->divisor = &kNan;)
BAD(divisor_inf, a->divisor = &kInf;)
BAD(workspace_small, a->workspace_bytes--;)
BAD(workspace_none, a->workspace_bytes = 0;)
BAD(workspace_null, a->workspace = NULL;)
BAD(workspace_misaligned, a->workspace = (char *)a->workspace + 4;)
BAD(struct_zero, a->struct_bytes = 0;)
BAD(struct_tiny, a->struct_bytes = 4;)
BAD(reserved_set, a->reserved = 1;)
BAD(accumulate_unknown, a->accumulate = 8;)
BAD(no_upstream, a->up_loss = a->up_nll = a->up_lse = a->up_entropy = NULL;)
BAD(no_gradient, memset(&a->grad_x, 0, sizeof a->grad_x); memset(&a->grad_w, 0, sizeof a->grad_w);
    memset(&a->grad_bias, 0, sizeof a->grad_bias);)
BAD(no_output, a->loss = a->nll = a->lse = a->lse_lo = a->entropy = a->z_loss = NULL; a->argmax = NULL;
    a->sums = NULL;)
BAD(lse_missing, a->lse = NULL;)
BAD(nll_missing, a->nll = NULL;)
BAD(entropy_missing, a->entropy = NULL; a->up_entropy = token_weight;)

static float scratch[512];
static int64_t scratch_i64[8];
static ll_sums scratch_sums;
BAD(takes_no_loss, a->loss = scratch;)
BAD(takes_no_z_loss, a->z_loss = scratch;)
BAD(takes_no_argmax, a->argmax = scratch_i64;)
BAD(takes_no_sums, a->sums = &scratch_sums;)
BAD(takes_no_upstream, a->up_nll = scratch;)
BAD(takes_no_grad_x, a->grad_x = ll_view_matrix(scratch, LL_DTYPE_F32, 5, 3, 0);)
BAD(takes_no_grad_bias, a->grad_bias = ll_view_vector(scratch, LL_DTYPE_F32, 70, 0);)
BAD(takes_no_accumulate, a->accumulate = LL_ACCUMULATE_W;)

static const bad_call kBad[] = {
    VIEW_ROWS(x, kAll),
    VIEW_ROWS(w, kAll),
    VIEW_ROWS(grad_x, kGrads),
    VIEW_ROWS(grad_w, kGrads),
    {"more tokens than the plan's", kAll, LL_STATUS_INVALID_ARG, "n_tokens_max", x_too_many},
    {"x with -1 rows", kAll, LL_STATUS_INVALID_ARG, "x", x_negative},
    {"bias NULL", kAll, LL_STATUS_INVALID_ARG, "bias", bias_null},
    {"bias not given", kAll, LL_STATUS_INVALID_ARG, "bias", bias_missing},
    {"bias dtype", kAll, LL_STATUS_INVALID_ARG, "bias", bias_dtype},
    {"bias rows", kAll, LL_STATUS_INVALID_ARG, "bias", bias_rows},
    {"bias step 0", kAll, LL_STATUS_INVALID_ARG, "bias", bias_step},
    {"target NULL", kAll, LL_STATUS_INVALID_ARG, "target", target_null},
    {"target not given", kAll, LL_STATUS_INVALID_ARG, "target", target_missing},
    {"target dtype f32", kAll, LL_STATUS_INVALID_ARG, "target", target_dtype},
    {"target rows", kAll, LL_STATUS_INVALID_ARG, "target", target_rows},
    {"target step 0", kAll, LL_STATUS_INVALID_ARG, "target", target_step},
    {"target step -1", kAll, LL_STATUS_INVALID_ARG, "target", target_step_negative},
    {"target misaligned", kAll, LL_STATUS_INVALID_ARG, "target", target_misaligned},
    {"class weight NaN", kAll, LL_STATUS_INVALID_ARG, "class_weight[69]", class_nan},
    {"class weight -1", kAll, LL_STATUS_INVALID_ARG, "class_weight[69]", class_negative},
    {"class weight inf", kAll, LL_STATUS_INVALID_ARG, "class_weight[69]", class_inf},
    {"token weight NaN", kAll, LL_STATUS_INVALID_ARG, "token_weight[3]", token_nan},
    {"token weight -inf", kAll, LL_STATUS_INVALID_ARG, "token_weight[3]", token_inf},
    {"divisor 0", kAll, LL_STATUS_INVALID_ARG, "divisor", divisor_zero},
    {"divisor -1", kAll, LL_STATUS_INVALID_ARG, "divisor", divisor_negative},
    {"divisor NaN", kAll, LL_STATUS_INVALID_ARG, "divisor", divisor_nan},
    {"divisor inf", kAll, LL_STATUS_INVALID_ARG, "divisor", divisor_inf},
    {"workspace one byte short", kAll, LL_STATUS_WORKSPACE, "workspace", workspace_small},
    {"workspace of 0 bytes", kAll, LL_STATUS_WORKSPACE, "workspace", workspace_none},
    {"workspace NULL", kAll, LL_STATUS_WORKSPACE, "workspace", workspace_null},
    {"workspace misaligned", kAll, LL_STATUS_WORKSPACE, "workspace", workspace_misaligned},
    {"struct_bytes 0", kAll, LL_STATUS_INVALID_ARG, "struct_bytes", struct_zero},
    {"struct_bytes 4", kAll, LL_STATUS_INVALID_ARG, "struct_bytes", struct_tiny},
    {"reserved set", kAll, LL_STATUS_INVALID_ARG, "reserved", reserved_set},
    {"unknown accumulate bit", kGrads, LL_STATUS_INVALID_ARG, "accumulate", accumulate_unknown},
    {"no upstream", kGrads, LL_STATUS_INVALID_ARG, "upstream", no_upstream},
    {"no gradient", kGrads, LL_STATUS_INVALID_ARG, "grad", no_gradient},
    {"no output", kForward, LL_STATUS_INVALID_ARG, "output", no_output},
    {"lse missing", kBackward, LL_STATUS_INVALID_ARG, "lse", lse_missing},
    {"nll missing", kBackward, LL_STATUS_INVALID_ARG, "nll", nll_missing},
    {"entropy missing", kBackward, LL_STATUS_INVALID_ARG, "entropy", entropy_missing},
    {"loss given", kBackward, LL_STATUS_INVALID_ARG, "loss", takes_no_loss},
    {"z_loss given", kBackward, LL_STATUS_INVALID_ARG, "z_loss", takes_no_z_loss},
    {"argmax given", kBackward, LL_STATUS_INVALID_ARG, "argmax", takes_no_argmax},
    {"sums given", kBackward, LL_STATUS_INVALID_ARG, "sums", takes_no_sums},
    {"up_nll given", kForward, LL_STATUS_INVALID_ARG, "upstream", takes_no_upstream},
    {"grad_x given", kForward, LL_STATUS_INVALID_ARG, "grad", takes_no_grad_x},
    {"grad_bias given", kForward, LL_STATUS_INVALID_ARG, "grad", takes_no_grad_bias},
    {"accumulate given", kForward, LL_STATUS_INVALID_ARG, "forward", takes_no_accumulate},
};

static int all_ff(const void *data, size_t bytes) {
    for (size_t i = 0; data && i < bytes; i++)
        if (((const unsigned char *)data)[i] != 0xff) return 0;
    return 1;
}

/* Every result of the pass still holds the bytes of rig_spoil. */
static void untouched(const rig *r, ll_pass pass, const char *what) {
    const ll_linear_ce_args *a = &r->args;
    const float *per_token[] = {a->nll, a->lse, a->lse_lo, a->entropy, a->z_loss};
    int clean = 1;
    if (pass != LL_PASS_BACKWARD) {
        for (size_t i = 0; i < COUNT(per_token); i++) clean &= all_ff(per_token[i], 5 * sizeof(float));
        clean &= all_ff(a->loss, sizeof(float)) && all_ff(a->argmax, 40) && all_ff(a->sums, sizeof(ll_sums));
    }
    if (pass != LL_PASS_FORWARD)
        clean &= all_ff(a->grad_x.data, 60) && all_ff(a->grad_w.data, 840) && all_ff(a->grad_bias.data, 280);
    if (!clean) fail_msg("%s: a result was written", what);
}

static void expect_bad(const rig *r, ll_pass pass, const bad_call *bad) {
    ll_linear_ce_args good = rig_args(r, pass), a = good;
    for (int j = 0; j < 70; j++) class_weight[j] = 1;
    for (int t = 0; t < 5; t++) token_weight[t] = 1;
    bad->spoil(&a);
    rig_spoil(r, &good, pass);
    ll_status status = rig_pass(r->plan, pass, &a);
    const char *sentence = status == LL_STATUS_OK ? "" : ll_last_error();
    if (status != bad->want || !strstr(sentence, bad->named))
        fail_msg("pass %d, %s: %s \"%s\", want %s and \"%s\"", (int)pass, bad->what, ll_status_name(status),
                 sentence, ll_status_name(bad->want), bad->named);
    assert_null(strchr(sentence, '\n'));
    untouched(r, pass, bad->what);
    OK(rig_pass(r->plan, pass, &good)); /* nothing of it stays behind */
}

static rig *good_rig(void) {
    rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
    rig_bias(r);
    rig_random(r, 1, 1, 1);
    r->options.reduction = LL_REDUCTION_MEAN;
    rig_run(r);
    for (int i = 0; i < 3; i++) {
        size_t need = 0; /* each pass is tried with exactly what it asks for */
        OK(ll_plan_workspace(r->plan, (ll_pass)i, &need));
        assert_true(need > 0);
    }
    return r;
}

static void bad_calls(void **state) {
    (void)state;
    rig *r = good_rig();
    for (size_t i = 0; i < COUNT(kBad); i++) {
        for (int pass = 0; pass < 3; pass++) {
            if (!(kBad[i].passes >> pass & 1)) continue;
            OK(ll_plan_workspace(r->plan, (ll_pass)pass, &r->args.workspace_bytes));
            expect_bad(r, (ll_pass)pass, &kBad[i]);
        }
    }
    rig_close(r);
}

static void divisor_without_mean(void **state) {
    (void)state;
    const double two = 2;
    for (int reduction = LL_REDUCTION_SUM; reduction <= LL_REDUCTION_NONE; reduction++) {
        rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
        r->options.reduction = reduction;
        r->args.divisor = &two;
        for (int pass = 0; pass < 3; pass++) {
            assert_int_equal(rig_call(r, (ll_pass)pass), LL_STATUS_INVALID_ARG);
            assert_non_null(strstr(ll_last_error(), "divisor"));
        }
        rig_close(r);
    }
}

static void frozen_gradients(void **state) {
    (void)state;
    const char *names[] = {"grad_x", "grad_w", "grad_bias"};
    for (int bit = 0; bit < 3; bit++) {
        rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
        rig_bias(r);
        r->desc.frozen = 1 << bit;
        rig_forward(r);
        for (int pass = LL_PASS_BACKWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
            assert_int_equal(rig_call(r, (ll_pass)pass), LL_STATUS_INVALID_ARG);
            assert_non_null(strstr(ll_last_error(), names[bit]));
            assert_non_null(strstr(ll_last_error(), "frozen"));
            untouched(r, (ll_pass)pass, names[bit]);
        }
        rig_close(r);
    }
}

static void bias_without_plan_for_it(void **state) {
    (void)state;
    rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
    rig_run(r);
    ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD);
    a.bias = ll_view_vector(scratch, LL_DTYPE_F32, 70, 0);
    assert_int_equal(ll_linear_ce_forward(r->plan, &a, NULL), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "bias"));
    a = rig_args(r, LL_PASS_FORWARD_BACKWARD);
    a.grad_bias = ll_view_vector(scratch, LL_DTYPE_F32, 70, 0);
    assert_int_equal(ll_linear_ce_forward_backward(r->plan, &a, NULL), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "grad_bias"));
    rig_close(r);
}

/* A struct of a newer header: fine while its tail is zero. One of an older header: its tail is zero. */
static void struct_sizes(void **state) {
    (void)state;
    struct {
        ll_linear_ce_args args;
        unsigned char tail[24];
    } longer = {0};
    rig *r = good_rig();
    longer.args = rig_args(r, LL_PASS_FORWARD);
    longer.args.struct_bytes = sizeof longer;
    rig_spoil(r, &longer.args, LL_PASS_FORWARD);
    OK(ll_linear_ce_forward(r->plan, &longer.args, NULL));
    longer.tail[23] = 1;
    rig_spoil(r, &longer.args, LL_PASS_FORWARD);
    assert_int_equal(ll_linear_ce_forward(r->plan, &longer.args, NULL), LL_STATUS_INVALID_ARG);
    assert_true(ll_last_error()[0] != 0);
    untouched(r, LL_PASS_FORWARD, "non-zero tail");
    rig_close(r);
}

static void null_arguments(void **state) {
    (void)state;
    rig *r = good_rig();
    for (int pass = 0; pass < 3; pass++) {
        ll_linear_ce_args a = rig_args(r, (ll_pass)pass);
        rig_spoil(r, &a, (ll_pass)pass);
        assert_int_equal(rig_pass(NULL, (ll_pass)pass, &a), LL_STATUS_INVALID_ARG);
        assert_non_null(strstr(ll_last_error(), "plan"));
        assert_int_equal(rig_pass(r->plan, (ll_pass)pass, NULL), LL_STATUS_INVALID_ARG);
        assert_non_null(strstr(ll_last_error(), "args"));
        untouched(r, (ll_pass)pass, "NULL");
    }
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(bad_calls),        FAULT(divisor_without_mean),
        FAULT(frozen_gradients), FAULT(bias_without_plan_for_it),
        FAULT(struct_sizes),     FAULT(null_arguments),
    };
    return faults_main("bad input", tests, COUNT(tests), argc, argv);
}
