/* Plans that must not be made: the right status, *plan NULL, a sentence that names the field; and the small
 * queries on plans and kernels. */
#define _DEFAULT_SOURCE
#include "harness.h"

#include <logitless/comm.h>

typedef struct bad_plan {
    const char *what;
    ll_status want;
    const char *named;
    void (*spoil)(ll_plan_desc *desc, ll_loss *loss);
} bad_plan;

#define BAD(name, body)                                                                                      \
    static void name(ll_plan_desc *desc, ll_loss *loss) {                                                    \
        (void)desc;                                                                                          \
        (void)loss;                                                                                          \
        body                                                                                                 \
    }
#define INVALID LL_STATUS_INVALID_ARG

BAD(temperature_0, loss->temperature = 0;)
BAD(temperature_minus_0, loss->temperature = -0.0f;)
BAD(temperature_negative, loss->temperature = -1;)
BAD(temperature_nan, loss->temperature = NAN;)
BAD(temperature_inf, loss->temperature = INFINITY;)
BAD(temperature_denormal, loss->temperature = 1e-45f;)
BAD(softcap_negative, loss->softcap = -1;)
BAD(softcap_nan, loss->softcap = NAN;)
BAD(softcap_inf, loss->softcap = INFINITY;)
BAD(smoothing_negative, loss->label_smoothing = -0.1f;)
BAD(smoothing_above_1, loss->label_smoothing = 1.1f;)
BAD(smoothing_nan, loss->label_smoothing = NAN;)
BAD(z_loss_negative, loss->z_loss = -1e-4f;)
BAD(z_loss_nan, loss->z_loss = NAN;)
BAD(z_loss_inf, loss->z_loss = INFINITY;)
BAD(rule_unknown, loss->smoothing_rule = 2;)
BAD(rule_negative, loss->smoothing_rule = -1;)
BAD(others_alone, loss->smoothing_rule = LL_SMOOTHING_OTHERS; loss->label_smoothing = 0.1f;
    desc->v_total = desc->v_local = 1;)
BAD(reduction_unknown, loss->reduction = 3;)
BAD(reduction_negative, loss->reduction = -1;)
BAD(scaling_unknown, loss->token_scaling = 2;)
BAD(loss_reserved, loss->reserved = 1;)
BAD(loss_struct_0, loss->struct_bytes = 0;)
BAD(struct_0, desc->struct_bytes = 0;)
BAD(op_unknown, desc->op = 2;)
BAD(op_negative, desc->op = -1;)
BAD(backend_unknown, desc->backend = 4;)
BAD(backend_cuda, desc->backend = LL_BACKEND_CUDA; unsetenv("LL_KERNEL");)
BAD(tokens_negative, desc->n_tokens_max = -1;)
BAD(tokens_huge, desc->n_tokens_max = INT64_MAX;)
BAD(hidden_0, desc->n_hidden = 0;)
BAD(hidden_negative, desc->n_hidden = -4;)
BAD(hidden_huge, desc->n_hidden = INT64_MAX;)
BAD(v_total_0, desc->v_total = 0;)
BAD(v_total_negative, desc->v_total = -1;)
BAD(v_total_above, desc->v_total = desc->v_local = LL_VOCAB_MAX + 1;)
BAD(v_local_negative, desc->v_local = -1;)
BAD(v_local_short, desc->v_local = 69;)
BAD(v_local_huge, desc->v_local = INT64_MAX;)
BAD(v_begin_1, desc->v_begin = 1;)
BAD(v_begin_negative, desc->v_begin = -1;)
BAD(x_dtype_none, desc->x_dtype = LL_DTYPE_NONE;)
BAD(x_dtype_i32, desc->x_dtype = LL_DTYPE_I32;)
BAD(w_dtype_none, desc->w_dtype = LL_DTYPE_NONE;)
BAD(w_dtype_unknown, desc->w_dtype = 6;)
BAD(bias_dtype_i64, desc->bias_dtype = LL_DTYPE_I64;)
BAD(grad_x_dtype_other, desc->grad_x_dtype = LL_DTYPE_BF16;)
BAD(grad_w_dtype_other, desc->grad_w_dtype = LL_DTYPE_F16;)
BAD(grad_w_dtype_unknown, desc->grad_w_dtype = -3;)
BAD(grad_bias_without_bias, desc->grad_bias_dtype = LL_DTYPE_F32;)
BAD(frozen_unknown, desc->frozen = 8;)
BAD(threads_negative, desc->n_threads = -1;)
BAD(threads_huge, desc->n_threads = INT32_MAX;)
BAD(budget_tiny, desc->workspace_budget_bytes = 1;)
static const ll_comm no_functions = {.struct_bytes = sizeof(ll_comm), .size = 1};
BAD(comm_empty, desc->comm = &no_functions;)
BAD(kernel_unknown, setenv("LL_KERNEL", "linear_ce_of_tomorrow", 1);)

static const bad_plan kBad[] = {
    {"temperature 0", INVALID, "temperature", temperature_0},
    {"temperature -0", INVALID, "temperature", temperature_minus_0},
    {"temperature -1", INVALID, "temperature", temperature_negative},
    {"temperature NaN", INVALID, "temperature", temperature_nan},
    {"temperature inf", INVALID, "temperature", temperature_inf},
    {"temperature 1e-45", INVALID, "temperature", temperature_denormal},
    {"softcap -1", INVALID, "softcap", softcap_negative},
    {"softcap NaN", INVALID, "softcap", softcap_nan},
    {"softcap inf", INVALID, "softcap", softcap_inf},
    {"smoothing -0.1", INVALID, "label_smoothing", smoothing_negative},
    {"smoothing 1.1", INVALID, "label_smoothing", smoothing_above_1},
    {"smoothing NaN", INVALID, "label_smoothing", smoothing_nan},
    {"z_loss < 0", INVALID, "z_loss", z_loss_negative},
    {"z_loss NaN", INVALID, "z_loss", z_loss_nan},
    {"z_loss inf", INVALID, "z_loss", z_loss_inf},
    {"smoothing rule 2", INVALID, "smoothing_rule", rule_unknown},
    {"smoothing rule -1", INVALID, "smoothing_rule", rule_negative},
    {"no other class", INVALID, "v_total", others_alone},
    {"reduction 3", INVALID, "reduction", reduction_unknown},
    {"reduction -1", INVALID, "reduction", reduction_negative},
    {"token_scaling 2", INVALID, "token_scaling", scaling_unknown},
    {"ll_loss.reserved", INVALID, "reserved", loss_reserved},
    {"ll_loss.struct_bytes 0", INVALID, "ll_loss", loss_struct_0},
    {"struct_bytes 0", INVALID, "struct_bytes", struct_0},
    {"op 1", INVALID, "op", op_unknown},
    {"op -1", INVALID, "op", op_negative},
    {"backend 4", INVALID, "backend", backend_unknown},
    {"backend cuda", LL_STATUS_UNSUPPORTED, "cuda", backend_cuda},
    {"n_tokens_max -1", INVALID, "n_tokens_max", tokens_negative},
    {"n_tokens_max 2^63-1", INVALID, "n_tokens_max", tokens_huge},
    {"n_hidden 0", INVALID, "n_hidden", hidden_0},
    {"n_hidden -4", INVALID, "n_hidden", hidden_negative},
    {"n_hidden 2^63-1", INVALID, "n_hidden", hidden_huge},
    {"v_total 0", INVALID, "v_total", v_total_0},
    {"v_total -1", INVALID, "v_total", v_total_negative},
    {"v_total above LL_VOCAB_MAX", INVALID, "v_total", v_total_above},
    {"v_local -1", INVALID, "shard", v_local_negative},
    {"v_local < v_total", INVALID, "v_local", v_local_short},
    {"v_local 2^63-1", INVALID, "shard", v_local_huge},
    {"v_begin 1", INVALID, "v_begin", v_begin_1},
    {"v_begin -1", INVALID, "shard", v_begin_negative},
    {"x_dtype none", INVALID, "x_dtype", x_dtype_none},
    {"x_dtype i32", INVALID, "x_dtype", x_dtype_i32},
    {"w_dtype none", INVALID, "w_dtype", w_dtype_none},
    {"w_dtype 6", INVALID, "w_dtype", w_dtype_unknown},
    {"bias_dtype i64", INVALID, "bias_dtype", bias_dtype_i64},
    {"grad_x_dtype bf16 of f32", INVALID, "grad_x_dtype", grad_x_dtype_other},
    {"grad_w_dtype f16 of f32", INVALID, "grad_w_dtype", grad_w_dtype_other},
    {"grad_w_dtype -3", INVALID, "grad_w_dtype", grad_w_dtype_unknown},
    {"grad_bias_dtype without bias", INVALID, "grad_bias_dtype", grad_bias_without_bias},
    {"frozen 8", INVALID, "frozen", frozen_unknown},
    {"n_threads -1", INVALID, "n_threads", threads_negative},
    {"n_threads 2^31-1", INVALID, "n_threads", threads_huge},
    {"budget of 1 byte", LL_STATUS_WORKSPACE, "budget", budget_tiny},
    {"a communicator without functions", LL_STATUS_INVALID_ARG, "comm", comm_empty},
    {"LL_KERNEL unknown", INVALID, "linear_ce_of_tomorrow", kernel_unknown},
};

static void bad_plans(void **state) {
    rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
    for (size_t i = 0; i < COUNT(kBad); i++) {
        ll_loss loss = r->options;
        ll_plan_desc desc = r->desc;
        ll_plan *plan = (ll_plan *)(uintptr_t)64;
        desc.loss = &loss;
        kBad[i].spoil(&desc, &loss);
        ll_status status = ll_plan_create(&desc, &plan);
        setenv("LL_KERNEL", (const char *)*state, 1);
        const char *sentence = status == LL_STATUS_OK ? "" : ll_last_error();
        if (status != kBad[i].want || !strstr(sentence, kBad[i].named))
            fail_msg("%s: %s \"%s\", want %s and \"%s\"", kBad[i].what, ll_status_name(status), sentence,
                     ll_status_name(kBad[i].want), kBad[i].named);
        assert_null(plan);
    }
    rig_run(r);
    rig_close(r);
}

/* Values at the edge that are sound. */
static void plans_at_the_edge(void **state) {
    (void)state;
    rig *r = rig_open(0, 1, 1, LL_DTYPE_F32);
    r->options.temperature = 1e-38f;
    r->options.label_smoothing = 1;
    r->options.ignore_index = INT64_MIN;
    r->desc.v_local = 3;
    OK(ll_plan_create(&r->desc, &r->plan));
    ll_plan_destroy(r->plan);
    r->plan = NULL;
    r->options.smoothing_rule = LL_SMOOTHING_OTHERS;
    r->options.label_smoothing = 0; /* no mass: one class is enough */
    OK(ll_plan_create(&r->desc, &r->plan));
    ll_plan_destroy(r->plan);
    r->desc.loss = NULL;
    OK(ll_plan_create(&r->desc, &r->plan));
    rig_close(r);
    rig *largest = rig_open(1, 1, LL_VOCAB_MAX, LL_DTYPE_BF16);
    OK(ll_plan_create(&largest->desc, &largest->plan));
    rig_close(largest);
}

static void struct_sizes(void **state) {
    (void)state;
    struct {
        ll_plan_desc desc;
        unsigned char tail[40];
    } longer = {0};
    struct {
        ll_loss loss;
        unsigned char tail[40];
    } longer_loss = {0};
    rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
    ll_plan *plan;
    for (int which = 0; which < 4; which++) {
        longer.desc = r->desc;
        longer.desc.struct_bytes = sizeof longer;
        longer.desc.loss = &longer_loss.loss;
        longer.tail[39] = which == 1;
        longer_loss.loss = r->options;
        longer_loss.loss.struct_bytes = sizeof longer_loss;
        longer_loss.tail[0] = which == 2;
        if (which == 3) longer.desc.struct_bytes = offsetof(ll_plan_desc, loss); /* of an older header */
        plan = NULL;
        ll_status status = ll_plan_create(&longer.desc, &plan);
        assert_int_equal(status, which == 1 || which == 2 ? LL_STATUS_INVALID_ARG : LL_STATUS_OK);
        if (status != LL_STATUS_OK) assert_true(ll_last_error()[0] != 0);
        ll_plan_destroy(plan);
    }
    rig_close(r);
}

static void budget_names_the_least(void **state) {
    (void)state;
    rig *r = rig_open(100, 8, 300, LL_DTYPE_F32);
    r->desc.workspace_budget_bytes = 1;
    assert_int_equal(ll_plan_create(&r->desc, &r->plan), LL_STATUS_WORKSPACE);
    size_t least = 0;
    for (const char *c = ll_last_error(); *c; c++) { /* the largest number of the sentence */
        if (*c < '0' || *c > '9') continue;
        char *end;
        size_t number = strtoull(c, &end, 10);
        if (number > least) least = number;
        c = end - 1;
    }
    r->desc.workspace_budget_bytes = least;
    rig_plan(r);
    assert_true(r->args.workspace_bytes <= least);
    rig_run(r);
    ll_plan_destroy(r->plan);
    r->plan = NULL;
    r->desc.workspace_budget_bytes = least - 1;
    assert_int_equal(ll_plan_create(&r->desc, &r->plan), LL_STATUS_WORKSPACE);
    rig_close(r);
}

static void queries(void **state) {
    rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
    char text[2000], byte = 'x';
    size_t bytes = 7;
    ll_kernel_info info;
    ll_plan *none = (ll_plan *)(uintptr_t)64;
    assert_int_equal(ll_plan_create(NULL, &none), LL_STATUS_INVALID_ARG);
    assert_null(none);
    assert_int_equal(ll_plan_create(&r->desc, NULL), LL_STATUS_INVALID_ARG);
    rig_plan(r);
    assert_string_equal(ll_plan_kernel(r->plan), (const char *)*state);
    assert_true(ll_plan_numerics(r->plan)[0] != 0 && ll_plan_threads(r->plan) >= 1);
    assert_null(ll_plan_kernel(NULL));
    assert_null(ll_plan_numerics(NULL));
    assert_int_equal(ll_plan_workspace(NULL, LL_PASS_FORWARD, &bytes), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_plan_workspace(r->plan, LL_PASS_FORWARD, NULL), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_plan_workspace(r->plan, (ll_pass)3, &bytes), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_plan_workspace(r->plan, (ll_pass)-1, &bytes), LL_STATUS_INVALID_ARG);
    assert_int_equal(bytes, 7);
    assert_int_equal(ll_plan_describe(r->plan, NULL, 10), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_plan_describe(r->plan, text, 0), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_plan_describe(NULL, text, sizeof text), LL_STATUS_INVALID_ARG);
    OK(ll_plan_describe(r->plan, &byte, 1));
    assert_int_equal(byte, 0);
    OK(ll_plan_describe(r->plan, text, sizeof text));
    assert_non_null(strstr(text, (const char *)*state));
    assert_int_equal(ll_kernel_get(-1, &info), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_kernel_get(1000, &info), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_kernel_get(0, NULL), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_status_name((ll_status)99), "LL_STATUS_UNKNOWN");
    ll_plan_destroy(NULL);
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(bad_plans), FAULT(plans_at_the_edge),      FAULT(struct_sizes),
        FAULT(queries),   FAULT(budget_names_the_least),
    };
    return faults_main("bad plans", tests, COUNT(tests), argc, argv);
}
