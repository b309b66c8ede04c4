/* Arguments of ce: what is refused, by which sentence; the gradient over the logits and the caller's note of
 * it; plans of the other operation. */
#define _POSIX_C_SOURCE 200809L
#include "faults/ce_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *kernel_of(void **state) {
    return (const char *)*state;
}

static void refused(struct ce_rig *rig, ll_pass pass, ll_status want, const char *word) {
    const ll_status status = ce_rig_try(rig, pass);
    if (status == want && strstr(ll_last_error(), word)) return;
    fail_msg("got %s \"%s\", want %s and \"%s\"", ll_status_name(status), ll_last_error(),
             ll_status_name(want), word);
}

static void put_in_place(struct ce_rig *rig) {
    free(rig->args.grad_logits.data);
    rig->args.grad_logits = rig->args.logits;
    rig->args.in_place = 1;
    rig->args.state = &rig->state;
}

/* ---- In place ----------------------------------------------------------------------------------- */

/* A forward, a backward over the logits, and then no second one. */
static void second_backward_in_place_is_refused(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    put_in_place(rig);
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "state"); /* no forward yet */
    ce_rig_run(rig, LL_PASS_FORWARD);
    assert_int_equal(rig->state.intact, 1);
    ce_rig_run(rig, LL_PASS_BACKWARD);
    assert_int_equal(rig->state.intact, 0);
    ce_near("dz over the logit", ce_rig_logit(rig, 1, 0), -0.4, 1e-6, 0);
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "a gradient has been written over them");
    ce_near("untouched", ce_rig_logit(rig, 1, 0), -0.4, 1e-6, 0);
    ce_rig_fill(rig, 0.0); /* new logits, a new forward */
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_rig_run(rig, LL_PASS_BACKWARD);
    ce_near("dz over the logit", ce_rig_logit(rig, 1, 0), -0.4, 1e-6, 0);
    ce_rig_close(rig);
}

static void forward_backward_in_place(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_BF16);
    put_in_place(rig);
    for (int step = 0; step < 3; ++step) {
        ce_rig_fill(rig, 0.0);
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        ce_near("dz", ce_rig_logit(rig, 0, 1), 0.1, 0x1p-8, 0);
        assert_int_equal(rig->state.intact, 0);
    }
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "state");
    ce_rig_close(rig);
}

/* A backward into other memory after one in place reads what is no longer there. */
static void any_backward_after_one_in_place(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    const ll_view apart = rig->args.grad_logits;
    rig->args.state = &rig->state;
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_rig_run(rig, LL_PASS_BACKWARD); /* not in place: may be repeated */
    ce_rig_run(rig, LL_PASS_BACKWARD);
    rig->args.grad_logits = rig->args.logits;
    rig->args.in_place = 1;
    ce_rig_run(rig, LL_PASS_BACKWARD);
    rig->args.grad_logits = apart;
    rig->args.in_place = 0;
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "state");
    ce_rig_close(rig);
}

static void state_of_other_logits(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    put_in_place(rig);
    ce_rig_run(rig, LL_PASS_FORWARD);
    rig->state.logits = rig->nll;
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "state is that of the logits at");
    rig->state.logits = rig->args.logits.data;
    rig->state.n_tokens = 1;
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "1 rows");
    rig->state.n_tokens = 2;
    rig->state.struct_bytes = 0;
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "LL_CE_STATE_INIT");
    rig->state.struct_bytes = sizeof rig->state;
    rig->args.state = NULL;
    refused(rig, LL_PASS_BACKWARD, LL_STATUS_INVALID_ARG, "state is NULL");
    rig->args.state = &rig->state;
    ce_rig_run(rig, LL_PASS_BACKWARD);
    ce_rig_close(rig);
}

static void overlaps_are_refused(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 3, 8, LL_DTYPE_F32);
    float *buffer = calloc(200, sizeof *buffer);
    const ll_view logits = rig->args.logits, grad = rig->args.grad_logits;
    assert_non_null(buffer);
    rig->args.logits = ll_view_matrix(buffer, LL_DTYPE_F32, 3, 8, 20);
    rig->args.grad_logits = rig->args.logits;
    refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "in_place 1");
    rig->args.grad_logits.data = buffer + 4;
    refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "in the memory of logits");
    rig->args.grad_logits.data = buffer + 16; /* its rows end in the next row of logits */
    refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "in the memory of logits");
    rig->args.grad_logits = ll_view_matrix(buffer + 10, LL_DTYPE_F32, 3, 8, 19);
    refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "in the memory of logits");
    rig->args.grad_logits =
        ll_view_matrix(buffer + 10, LL_DTYPE_F32, 3, 8, 20); /* the other half of each row */
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    rig->args.logits.data = buffer + 30; /* begins above the gradient's rows, between them */
    rig->args.grad_logits.data = buffer;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    rig->args.in_place = 1;
    rig->args.state = &rig->state;
    refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "another view than logits");
    rig->args.logits = logits;
    rig->args.grad_logits = grad;
    free(buffer);
    ce_rig_close(rig);
}

/* ---- Targets, ids, top -------------------------------------------------------------------------- */

/* B24: before anything is written, in every reduction. */
static void b24_targets_out_of_range(void **state) {
    static const int64_t bad[] = {8, -1, -4, INT32_MIN, INT64_MAX};
    for (int reduction = 0; reduction < 3; ++reduction) {
        for (int b = 0; b < 5; ++b) {
            struct ce_rig *rig = ce_rig_open(kernel_of(state), 3, 8, LL_DTYPE_F32);
            rig->loss.reduction = reduction;
            rig->target[1] = bad[b];
            refused(rig, LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG, "target[1]");
            assert_true(isnan(rig->loss_out[0]) && isnan(rig->nll[0]) && isnan(ce_rig_grad(rig, 0, 0)));
            rig->target[1] = 7;
            ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
            ce_rig_close(rig);
        }
    }
}

static void ids_and_top(void **state) {
    int64_t ids[2][2] = {{0, 4}, {-100, 5}};
    float logp[4] = {9, 9, 9, 9}, top_logp[4];
    int64_t rank[4] = {9, 9, 9, 9}, top[4];
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    rig->args.id_logp = logp;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "ids is not given");
    rig->args.ids = ll_view_matrix(ids, LL_DTYPE_I64, 2, 2, 0);
    rig->args.id_rank = rank;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "ids has 2 columns");
    rig->desc.n_ids = 2;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "ids[1, 1] is 5");
    assert_true(logp[0] == 9.0f && rank[0] == 9);
    ids[1][1] = 3;
    ce_rig_set(rig, 1, 0, 2.0);
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_near("log p", logp[0], -1.609437912, 1e-6, 0);
    assert_true(logp[2] == 0.0f && rank[2] == 0 && rank[0] == 1 && rank[3] == 2); /* [1, 0] is none */
    rig->target[0] = -100;
    ids[0][0] = 77; /* not looked at */
    ce_rig_run(rig, LL_PASS_FORWARD);
    assert_true(logp[0] == 0.0f && rank[0] == 0);
    rig->args.ids.dtype = LL_DTYPE_F32;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "ids' dtype");
    rig->args.ids.dtype = LL_DTYPE_I64;
    rig->args.top_ids = top;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "top_ids");
    rig->desc.n_top = 2;
    rig->args.top_logp = top_logp;
    ce_rig_run(rig, LL_PASS_FORWARD);
    assert_true(top[0] == -1 && top_logp[1] == 0.0f && top[2] == 0 && top[3] == 1);
    rig->desc.n_top = 6;
    refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, "n_top is 6");
    ce_rig_close(rig);
}

/* An output of the forward given to a backward, and the other way round. */
static void fields_of_other_passes(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    ll_plan *plan = NULL;
    ll_ce_args args = rig->args;
    rig->desc.loss = &rig->loss;
    assert_int_equal(ce_plan_of(rig->kernel, &rig->desc, &plan), LL_STATUS_OK);
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD, args), LL_STATUS_INVALID_ARG);
    assert_int_equal(ce_pass_run(plan, LL_PASS_BACKWARD, args), LL_STATUS_INVALID_ARG);
    args.up_loss = NULL;
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "ll_ce_forward_backward: every upstream"));
    args = rig->args;
    args.grad_logits = (ll_view){0};
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "grad_logits"));
    args = rig->args;
    args.reserved = 1;
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args), LL_STATUS_INVALID_ARG);
    args = rig->args;
    args.logits.dtype = LL_DTYPE_BF16;
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "logits has dtype bf16"));
    args = rig->args;
    args.logits.cols = 4;
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD_BACKWARD, args), LL_STATUS_INVALID_ARG);
    args = (ll_ce_args)LL_CE_ARGS_INIT;
    args.logits = rig->args.logits;
    args.target = rig->args.target;
    assert_int_equal(ce_pass_run(plan, LL_PASS_FORWARD, args), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "every output"));
    assert_int_equal(ll_ce_forward(plan, NULL, NULL), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_ce_forward(NULL, &args, NULL), LL_STATUS_INVALID_ARG);
    args.struct_bytes = 3;
    assert_int_equal(ll_ce_forward(plan, &args, NULL), LL_STATUS_INVALID_ARG);
    ll_plan_destroy(plan);
    ce_rig_close(rig);
}

static void workspace_is_checked(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    ll_plan *plan = NULL;
    size_t bytes = 0;
    char *memory = aligned_alloc(64, 1 << 16);
    assert_non_null(memory);
    rig->desc.loss = &rig->loss;
    assert_int_equal(ce_plan_of(rig->kernel, &rig->desc, &plan), LL_STATUS_OK);
    assert_int_equal(ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &bytes), LL_STATUS_OK);
    assert_in_range(bytes, 1, (1 << 16) - 64);
    rig->args.workspace = memory;
    rig->args.workspace_bytes = bytes - 1;
    assert_int_equal(ll_ce_forward_backward(plan, &rig->args, NULL), LL_STATUS_WORKSPACE);
    rig->args.workspace_bytes = bytes;
    rig->args.workspace = memory + 8;
    assert_int_equal(ll_ce_forward_backward(plan, &rig->args, NULL), LL_STATUS_WORKSPACE);
    rig->args.workspace = NULL;
    assert_int_equal(ll_ce_forward_backward(plan, &rig->args, NULL), LL_STATUS_WORKSPACE);
    rig->args.workspace = memory;
    assert_int_equal(ll_ce_forward_backward(plan, &rig->args, NULL), LL_STATUS_OK);
    ll_plan_destroy(plan);
    free(memory);
    ce_rig_close(rig);
}

/* ---- Plans -------------------------------------------------------------------------------------- */

typedef void spoil(ll_plan_desc *desc);

#define SPOIL(name, line)                                                                                    \
    static void name(ll_plan_desc *desc) {                                                                   \
        line                                                                                                 \
    }

SPOIL(n_hidden_set, desc->n_hidden = 4;)
SPOIL(x_dtype_set, desc->x_dtype = LL_DTYPE_F32;)
SPOIL(w_dtype_set, desc->w_dtype = LL_DTYPE_F32;)
SPOIL(bias_dtype_set, desc->bias_dtype = LL_DTYPE_F32;)
SPOIL(grad_x_set, desc->grad_x_dtype = LL_DTYPE_F32;)
SPOIL(frozen_set, desc->frozen = LL_FROZEN_W;)
SPOIL(logits_none, desc->logits_dtype = LL_DTYPE_NONE;)
SPOIL(logits_i64, desc->logits_dtype = LL_DTYPE_I64;)
SPOIL(grad_f16, desc->grad_logits_dtype = LL_DTYPE_F16;)
SPOIL(ids_negative, desc->n_ids = -1;)
SPOIL(ids_many, desc->n_ids = LL_CE_IDS_MAX + 1;)
SPOIL(top_many, desc->n_top = LL_CE_TOP_MAX + 1;)
SPOIL(v_total_none, desc->v_total = 0;)
SPOIL(shard_without_comm, desc->v_local = 4;)
SPOIL(linear_with_logits, desc->op = LL_OP_LINEAR_CE; desc->n_hidden = 4;
      desc->x_dtype = desc->w_dtype = LL_DTYPE_F32;)
SPOIL(linear_with_ids, desc->op = LL_OP_LINEAR_CE; desc->n_hidden = 4; desc->logits_dtype = 0;
      desc->n_ids = 3; desc->x_dtype = desc->w_dtype = LL_DTYPE_F32;)

static const struct {
    spoil *spoil;
    const char *named;
} kBad[] = {
    {n_hidden_set, "n_hidden"},
    {x_dtype_set, "x_dtype"},
    {w_dtype_set, "w_dtype"},
    {bias_dtype_set, "bias_dtype"},
    {grad_x_set, "grad_x_dtype"},
    {frozen_set, "frozen"},
    {logits_none, "logits_dtype"},
    {logits_i64, "logits_dtype"},
    {grad_f16, "grad_logits_dtype"},
    {ids_negative, "n_ids"},
    {ids_many, "n_ids"},
    {top_many, "n_top"},
    {v_total_none, "v_total"},
    {shard_without_comm, "v_local"},
    {linear_with_logits, "logits_dtype"},
    {linear_with_ids, "n_ids"},
};

static void plans_are_checked(void **state) {
    for (size_t i = 0; i < sizeof kBad / sizeof kBad[0]; ++i) {
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 200, LL_DTYPE_F32);
        kBad[i].spoil(&rig->desc);
        refused(rig, LL_PASS_FORWARD, LL_STATUS_INVALID_ARG, kBad[i].named);
        ce_rig_close(rig);
    }
}

static void the_other_operation(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 5, LL_DTYPE_F32);
    ll_plan *plan = NULL;
    ll_linear_ce_args linear = LL_LINEAR_CE_ARGS_INIT;
    char text[1024];
    rig->desc.loss = &rig->loss;
    assert_int_equal(ce_plan_of(rig->kernel, &rig->desc, &plan), LL_STATUS_OK);
    assert_string_equal(ll_plan_kernel(plan), rig->kernel);
    assert_int_equal(ll_linear_ce_forward(plan, &linear, NULL), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "the plan is of ce, want one of linear_ce"));
    assert_int_equal(ll_plan_describe(plan, text, sizeof text), LL_STATUS_OK);
    assert_non_null(strstr(text, "ce logits:f32 grad:f32 n2:v5"));
    ll_plan_destroy(plan);
    /* A forced kernel of the other operation leaves this one its choice. */
    setenv("LL_KERNEL", "linear_ce_cpu_plain", 1);
    assert_int_equal(ll_plan_create(&rig->desc, &plan), LL_STATUS_OK);
    assert_non_null(strstr(ll_plan_kernel(plan), "ce_cpu"));
    ll_plan_destroy(plan);
    unsetenv("LL_KERNEL");
    rig->desc.backend = LL_BACKEND_CUDA;
    assert_int_equal(ll_plan_create(&rig->desc, &plan), LL_STATUS_UNSUPPORTED);
    assert_null(plan);
    ce_rig_close(rig);
}

#define FAULT(name)                                                                                          \
    { #name, name }

int main(void) {
    static const struct ce_fault faults[] = {
        FAULT(second_backward_in_place_is_refused),
        FAULT(forward_backward_in_place),
        FAULT(any_backward_after_one_in_place),
        FAULT(state_of_other_logits),
        FAULT(overlaps_are_refused),
        FAULT(b24_targets_out_of_range),
        FAULT(ids_and_top),
        FAULT(fields_of_other_passes),
        FAULT(workspace_is_checked),
        FAULT(plans_are_checked),
        FAULT(the_other_operation),
    };
    return ce_faults_main(faults, (int)(sizeof faults / sizeof faults[0]));
}
