/* Operands of more than 2^31 and 2^32 elements: an index that is too narrow reads or writes elsewhere. x and
 * w are zeros but for a few rows at the far end, so every result is known by hand. */
#define _POSIX_C_SOURCE 200809L
#include "core/dtype.h"
#include "cuda/image.h"
#include "kernel_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* A call of n tokens in device memory, everything zero. */
struct large {
    int64_t n, d, v;
    ll_linear_ce_args args;
    ll_plan *plan;
    void *memory[12];
    int count;
};

static void *zeros(struct large *large, size_t bytes) {
    void *data = device_take(bytes);
    if (!data) return NULL;
    device_fill(data, 0, bytes);
    return large->memory[large->count++] = data;
}

static bool large_open(int64_t n, int64_t d, int64_t v, ll_pass pass, size_t budget, struct large *large) {
    *large = (struct large){.n = n, .d = d, .v = v};
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    ll_loss loss = LL_LOSS_INIT;
    size_t bytes = 0;
    loss.reduction = LL_REDUCTION_SUM;
    desc.backend = LL_BACKEND_CUDA;
    desc.n_tokens_max = n;
    desc.n_hidden = d;
    desc.v_local = desc.v_total = v;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_BF16;
    desc.loss = &loss;
    desc.workspace_budget_bytes = budget;
    if (ll_plan_create(&desc, &large->plan) != LL_STATUS_OK) fail_msg("%s", ll_last_error());
    ll_plan_workspace(large->plan, pass, &bytes);
    const size_t x_bytes = 2 * (size_t)n * (size_t)d, w_bytes = 2 * (size_t)v * (size_t)d;
    ll_linear_ce_args a = LL_LINEAR_CE_ARGS_INIT;
    a.x = ll_view_matrix(zeros(large, x_bytes), LL_DTYPE_BF16, n, d, 0);
    a.w = ll_view_matrix(zeros(large, w_bytes), LL_DTYPE_BF16, v, d, 0);
    a.target = ll_view_vector(zeros(large, 8 * (size_t)n), LL_DTYPE_I64, n, 0);
    a.nll = zeros(large, 4 * (size_t)n);
    a.lse = zeros(large, 4 * (size_t)n);
    a.workspace = zeros(large, bytes);
    a.workspace_bytes = bytes;
    if (pass != LL_PASS_FORWARD) {
        const float one = 1.0f;
        float *up = zeros(large, 4);
        if (up) device_write(up, &one, sizeof one);
        a.up_loss = up;
        a.grad_x = ll_view_matrix(zeros(large, x_bytes), LL_DTYPE_BF16, n, d, 0);
        a.grad_w = ll_view_matrix(zeros(large, w_bytes), LL_DTYPE_BF16, v, d, 0);
    }
    large->args = a;
    return a.workspace && a.w.data && (pass == LL_PASS_FORWARD || a.grad_w.data);
}

static void large_close(struct large *large) {
    for (int i = 0; i < large->count; i++) device_release(large->memory[i]);
    ll_plan_destroy(large->plan);
}

static void put(const ll_view *view, int64_t row, int64_t col, float value) {
    const uint16_t h = lli_f32_to_bf16(value);
    device_write((uint16_t *)view->data + row * view->row_stride + col, &h, sizeof h);
}

static float get(const ll_view *view, int64_t row, int64_t col) {
    uint16_t h;
    device_read(&h, (const uint16_t *)view->data + row * view->row_stride + col, sizeof h);
    return lli_bf16_to_f32(h);
}

static void near(double got, double want, double relative, const char *what) {
    if (!(fabs(got - want) <= relative * fabs(want))) fail_msg("%s is %.9g, want %.9g", what, got, want);
}

/* The last token against the last class: logit 6 there, 0 elsewhere. budget: of the workspace, 0 the default.
 */
static void check_far_corner(int64_t n, int64_t d, int64_t v, ll_pass pass, size_t budget) {
    struct large large;
    float nll, first;
    if (!large_open(n, d, v, pass, budget, &large)) {
        large_close(&large);
        skip();
    }
    const int64_t target = v - 1;
    put(&large.args.x, n - 1, d - 1, 3.0f);
    put(&large.args.w, v - 1, d - 1, 2.0f);
    device_write((int64_t *)large.args.target.data + n - 1, &target, sizeof target);
    ll_stream stream = stream_open();
    const ll_status status = pass == LL_PASS_FORWARD
                                 ? ll_linear_ce_forward(large.plan, &large.args, stream)
                                 : ll_linear_ce_forward_backward(large.plan, &large.args, stream);
    if (status != LL_STATUS_OK) fail_msg("%s", ll_last_error());
    assert_true(stream_wait(stream));
    stream_close(stream);
    const double rest = (double)(v - 1) * exp(-6.0), p = 1.0 / (1.0 + rest);
    device_read(&nll, large.args.nll + n - 1, sizeof nll);
    device_read(&first, large.args.nll, sizeof first);
    near(nll, log1p(rest), 1e-6, "nll of the last token");
    if (n > 1) near(first, log((double)v), 1e-6, "nll of the first token");
    if (pass != LL_PASS_FORWARD) {
        near(get(&large.args.grad_x, n - 1, d - 1), 2.0 * (p - 1.0), 0.01, "grad_x of the last token");
        near(get(&large.args.grad_w, v - 1, d - 1), 3.0 * (p - 1.0), 0.01, "grad_w of the last class");
        near(get(&large.args.grad_w, 0, d - 1), 3.0 * exp(-6.0) * p, 0.01, "grad_w of the first class");
    }
    large_close(&large);
}

static void w_beyond_2_to_the_32(void **state) {
    (void)state;
    check_far_corner(3, 4104, 1 << 20, LL_PASS_FORWARD, 0);
    check_far_corner(2, 4104, 1 << 20, LL_PASS_FORWARD_BACKWARD, 0);
}

static void w_beyond_2_to_the_31_unaligned(void **state) {
    (void)state;
    check_far_corner(2, 4099, 600000, LL_PASS_FORWARD_BACKWARD, 0);
}

static void x_beyond_2_to_the_32(void **state) {
    (void)state;
    check_far_corner(1050000, 4096, 130, LL_PASS_FORWARD, 0);
    check_far_corner(1050000, 4096, 66, LL_PASS_FORWARD_BACKWARD, 0);
}

/* With room for them, all tokens are one chunk: more groups of rows than a grid has blocks in its second
 * dimension. */
static void more_rows_than_a_grid_has(void **state) {
    (void)state;
    check_far_corner(1200000, 64, 130, LL_PASS_FORWARD_BACKWARD, (size_t)4 << 30);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(w_beyond_2_to_the_32),
        cmocka_unit_test(w_beyond_2_to_the_31_unaligned),
        cmocka_unit_test(x_beyond_2_to_the_32),
        cmocka_unit_test(more_rows_than_a_grid_has),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
