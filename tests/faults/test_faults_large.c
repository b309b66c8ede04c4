/* Reported faults of sections 1, 5 and 10 at their full sizes: products of two sizes beyond 2^31, millions
 * of columns. Run on the fast kernels only; hidden sizes are as small as the fault allows. */
#define _DEFAULT_SOURCE
#include "harness.h"

#include <stdio.h>

/* MemAvailable of this machine; 0 where it cannot be told. */
static size_t memory_available(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
    if (file) fclose(file);
    return (size_t)kib * 1024;
}

static void b01_tokens_times_vocabulary(void **state) {
    (void)state;
    rig *r = rig_open(42731, 1, 50257, LL_DTYPE_BF16);
    r->desc.n_threads = 0;
    for (int64_t t = 0; t < r->n; t++) {
        rig_set(&r->args.x, t, 0, 1);
        r->y[t] = t % r->v;
    }
    rig_forward_backward(r);
    for (int64_t t = 0; t < r->n; t++) NEAR(r->args.nll[t], 10.8249046);
    NEAR(r->args.loss[0], 42731 * log(50257));
    /* f32 sums: 2e-6 of the sum of the terms' sizes, which is 1.85 here */
    NEAR_TO(rig_get(&r->args.grad_w, 0, 0), 42731 / 50257.0 - 1, 0, 4e-6);
    NEAR_TO(rig_get(&r->args.grad_w, 50256, 0), 42731 / 50257.0, 2e-6, 0);
    rig_close(r);
}

/* The last token alone has x[1] = 1, so that grad_w[0, 1] is its own dz. */
static void b03_backward_offsets(void **state) {
    (void)state;
    rig *r = rig_open(65537, 2, 32768, LL_DTYPE_F32);
    r->desc.n_threads = 0;
    for (int64_t t = 0; t < r->n; t++) rig_set(&r->args.x, t, 0, 1);
    rig_set(&r->args.x, r->n - 1, 1, 1);
    rig_forward(r);
    rig_backward(r);
    NEAR(rig_get(&r->args.grad_w, 0, 1), 1 / 32768.0 - 1);
    NEAR(rig_get(&r->args.grad_w, 0, 0), 65537 / 32768.0 - 65537);
    for (int64_t j = 1; j < r->v; j++) NEAR(rig_get(&r->args.grad_w, j, 0), 65537 / 32768.0);
    rig_close(r);
}

static void b04_batch_and_its_slices(void **state) {
    (void)state;
    const int64_t n = 9500, v = 250002, slice = 950;
    rig *r = rig_open(n, 2, v, LL_DTYPE_F32);
    r->desc.n_threads = 0;
    rig_random(r, 4, 2, 2);
    for (int64_t t = 0; t < n; t++) r->y[t] = t % 3 == 0 ? 0 : t % 3 == 1 ? v - 1 : -100;
    rig_forward(r);
    float *nll = malloc(sizeof *nll * (size_t)n);
    assert_non_null(nll);
    double loss = r->sums.loss, parts = 0;
    memcpy(nll, r->args.nll, sizeof *nll * (size_t)n);
    for (int64_t begin = 0; begin < n; begin += slice) {
        ll_linear_ce_args a = rig_args(r, LL_PASS_FORWARD);
        a.x = ll_view_matrix((float *)a.x.data + begin * 2, LL_DTYPE_F32, slice, 2, 0);
        a.target = ll_view_vector(r->y + begin, LL_DTYPE_I64, slice, 0);
        a.nll += begin;
        OK(ll_linear_ce_forward(r->plan, &a, NULL));
        parts += r->sums.loss;
    }
    assert_memory_equal(nll, r->args.nll, sizeof *nll * (size_t)n);
    NEAR_TO(parts, loss, 1e-12, 0);
    free(nll);
    rig_close(r);
}

/* One non-zero element in each row of w, each in another column: every row of w counts, and what it gives
 * is known without reading 4.7 GB again. */
static void b06_weight_beyond_2_31(void **state) {
    (void)state;
    const int64_t n = 8, d = 8960, v = 262144;
    const size_t weight_bytes = (size_t)v * (size_t)d * 2;
    /* w is touched on one page a row, grad_w wholly; and room for others on the machine */
    if (memory_available() < 2 * weight_bytes + ((size_t)3 << 30)) {
        print_message("needs 12.4 GB of available memory, found %.1f GB\n",
                      (double)memory_available() * 1e-9);
        skip();
    }
    rig *r = rig_open(n, d, 1, LL_DTYPE_BF16);
    uint64_t seed = 6;
    r->v = r->desc.v_local = r->desc.v_total = v;
    r->desc.grad_w_dtype = LL_DTYPE_BF16;
    r->desc.n_threads = 0;
    r->args.w = ll_view_matrix(rig_alloc(r, weight_bytes, 0), LL_DTYPE_BF16, v, d, 0);
    r->args.grad_w = ll_view_matrix(rig_alloc(r, weight_bytes, 0), LL_DTYPE_BF16, v, d, 0);
    for (int64_t t = 0; t < n; t++) {
        r->y[t] = v - 1;
        for (int64_t k = 0; k < d; k++) rig_set(&r->args.x, t, k, uniform(&seed));
    }
    for (int64_t j = 0; j < v; j++) rig_set(&r->args.w, j, j * 7 % d, 3 * uniform(&seed));
    rig_forward(r);
    double p_last[8];
    for (int64_t t = 0; t < n; t++) {
        double sum = 0, z = 0;
        for (int64_t j = 0; j < v; j++) {
            int64_t k = j * 7 % d;
            z = rig_get(&r->args.x, t, k) * rig_get(&r->args.w, j, k);
            sum += exp(z);
        }
        p_last[t] = exp(z) / sum;
        NEAR(r->args.nll[t], log(sum) - z);
    }
    rig_backward(r);
    for (int64_t k = 0; k < d; k++) {
        double want = 0;
        for (int64_t t = 0; t < n; t++) want += (p_last[t] - 1) * rig_get(&r->args.x, t, k);
        NEAR_TO(rig_get(&r->args.grad_w, v - 1, k), want, 4e-3, 1e-5);
    }
    rig_close(r);
}

static void b08_a_million_columns(void **state) {
    (void)state;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16};
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *r = rig_open(4, 16, 1048576, dtypes[i]);
        r->desc.n_threads = 0;
        for (int64_t t = 0; t < 4; t++) {
            rig_set(&r->args.x, t, t, 1);
            r->y[t] = r->v - 1 - t;
        }
        rig_run(r);
        for (int64_t t = 0; t < 4; t++) {
            NEAR(r->args.nll[t], 13.8629436);
            NEAR(r->args.entropy[t], 13.8629436);
            NEAR(rig_get(&r->args.grad_w, 0, t), 0x1p-20);
            NEAR(rig_get(&r->args.grad_w, r->v - 1 - t, t), 0x1p-20 - 1);
        }
        rig_close(r);
    }
}

/* 8192 terms of 2^-17 each: none may be skipped or lost. */
static void b60_small_terms_of_grad_w(void **state) {
    (void)state;
    rig *r = rig_open(8192, 1, 131072, LL_DTYPE_BF16);
    r->desc.n_threads = 0;
    for (int64_t t = 0; t < r->n; t++) rig_set(&r->args.x, t, 0, 1);
    rig_forward_backward(r);
    for (int64_t j = 1; j < r->v; j++) NEAR(rig_get(&r->args.grad_w, j, 0), 0.0625);
    /* blocks of some 256 f32 terms 1 - 2^-17, each rounded at 2^-16: up to 256 * 2^-24 relative */
    NEAR_TO(rig_get(&r->args.grad_w, 0, 0), 0.0625 - 8192, 256 * 0x1p-24, 0);
    rig_close(r);
}

/* B89 at its size, the hidden size aside: two budgets, the same bits, and the bound kept. */
static void b89_budgets_at_full_size(void **state) {
    (void)state;
    const size_t budgets[] = {(size_t)32 << 20, (size_t)512 << 20};
    rig *r = rig_open(8192, 8, 65536, LL_DTYPE_BF16);
    r->desc.n_threads = 0;
    rig_random(r, 89, 1, 1);
    snapshot *first = NULL;
    for (int i = 0; i < 2; i++) {
        r->desc.workspace_budget_bytes = budgets[i];
        rig_plan(r);
        assert_true(r->args.workspace_bytes <= budgets[i]);
        rig_forward_backward(r);
        if (first)
            snapshot_near(first, r, 2e-6);
        else
            first = snapshot_take(r);
    }
    snapshot_free(first);
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT_HEAVY(b01_tokens_times_vocabulary),
        FAULT_HEAVY(b03_backward_offsets),
        FAULT_HEAVY(b04_batch_and_its_slices),
        FAULT_HEAVY(b06_weight_beyond_2_31),
        FAULT(b08_a_million_columns),
        FAULT_HEAVY(b60_small_terms_of_grad_w),
        FAULT_HEAVY(b89_budgets_at_full_size),
    };
    return faults_main("faults: large", tests, COUNT(tests), argc, argv);
}
