/* Reported faults of section 8: one row has the same bits in any batch, chunk, budget and thread count, and
 * every result the same bits in every run. */
#include "harness.h"

enum { kHidden = 24, kVocab = 515 };

typedef struct one_row {
    float nll, lse, entropy, loss, grad_x[kHidden];
    int64_t argmax;
} one_row;

static void row_equal(const one_row *want, const rig *r, int64_t at, int64_t t, int64_t m) {
    const ll_linear_ce_args *a = &r->args;
    const float *grad = (const float *)a->grad_x.data + at * kHidden;
    if (!same_bits(want->nll, a->nll[at]) || !same_bits(want->entropy, a->entropy[at]) ||
        !same_bits(want->lse, a->lse[at]) || want->argmax != a->argmax[at] ||
        memcmp(want->grad_x, grad, sizeof want->grad_x) != 0)
        fail_msg("row %lld in a batch of %lld: nll %.9g %.9g, entropy %.9g %.9g, lse %.9g %.9g, grad_x[0] "
                 "%.9g %.9g",
                 (long long)t, (long long)m, (double)want->nll, (double)a->nll[at], (double)want->entropy,
                 (double)a->entropy[at], (double)want->lse, (double)a->lse[at], (double)want->grad_x[0],
                 (double)grad[0]);
}

static one_row row_take(const rig *r, int64_t at) {
    const ll_linear_ce_args *a = &r->args;
    one_row row = {a->nll[at], a->lse[at], a->entropy[at], 0, {0}, a->argmax[at]};
    memcpy(row.grad_x, (const float *)a->grad_x.data + at * kHidden, sizeof row.grad_x);
    return row;
}

/* The plan of r run over its rows [begin, begin + rows). */
static void run_rows(rig *r, int64_t begin, int64_t rows) {
    if (!r->plan) rig_plan(r);
    ll_linear_ce_args a = r->args;
    size_t x_bytes = ll_dtype_bytes((ll_dtype)a.x.dtype) * (size_t)(begin * kHidden);
    a.x = ll_view_matrix((char *)a.x.data + x_bytes, (ll_dtype)a.x.dtype, rows, kHidden, 0);
    a.grad_x = ll_view_matrix((float *)a.grad_x.data + begin * kHidden, LL_DTYPE_F32, rows, kHidden, 0);
    a.target = ll_view_vector(r->y + begin, LL_DTYPE_I64, rows, 0);
    a.nll += begin;
    a.lse += begin;
    a.lse_lo += begin;
    a.entropy += begin;
    a.z_loss += begin;
    a.argmax += begin;
    OK(ll_linear_ce_forward_backward(r->plan, &a, NULL));
}

static void b75_chunks_around_256(void **state) {
    (void)state;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16};
    const int64_t n = 1100, chunks[] = {255, 256, 257, 1};
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *r = rig_open(n, kHidden, kVocab, dtypes[i]);
        rig_random(r, 75, 1, 1);
        rig_run(r);
        one_row *rows = malloc(sizeof *rows * (size_t)n);
        assert_non_null(rows);
        for (int64_t t = 0; t < n; t++) rows[t] = row_take(r, t);
        for (size_t c = 0; c < COUNT(chunks); c++) {
            int64_t end = chunks[c] == 1 ? 40 : n;
            for (int64_t t = 0; t < end; t += chunks[c])
                run_rows(r, t, t + chunks[c] < n ? chunks[c] : n - t);
            for (int64_t t = 0; t < end; t++) row_equal(&rows[t], r, t, t, chunks[c]);
        }
        free(rows);
        rig_close(r);
    }
}

/* One row first, in the middle and last of batches of many sizes; a plan of its own for each. */
static void b76_row_in_any_batch(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 2, 17, 33, 128, 257, 1024};
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_F16};
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        one_row want = {0};
        for (size_t s = 0; s < COUNT(sizes); s++) {
            int64_t m = sizes[s], at[] = {0, m / 2, m - 1};
            for (int place = 0; place < 3; place++) {
                rig *one = rig_open(1, kHidden, kVocab, dtypes[i]),
                    *r = rig_open(m, kHidden, kVocab, dtypes[i]);
                rig_random(one, 76, 1, 1);
                rig_random(r, 1000 + s, 1, 1);
                size_t bytes = ll_dtype_bytes(dtypes[i]) * kHidden;
                memcpy(r->args.w.data, one->args.w.data, bytes * kVocab);
                memcpy((char *)r->args.x.data + bytes * (size_t)at[place], one->args.x.data, bytes);
                r->y[at[place]] = one->y[0];
                rig_run(r);
                if (s == 0 && place == 0) want = row_take(r, 0);
                row_equal(&want, r, at[place], at[place], m);
                rig_close(one);
                rig_close(r);
            }
        }
    }
}

/* B81, and the same for every thread count. */
static void b81_runs_and_threads(void **state) {
    (void)state;
    const int32_t threads[] = {1, 2, 3, 5};
    const int runs = on_slow_kernel() ? 2 : 25;
    rig *r = rig_open(1000, kHidden, kVocab, LL_DTYPE_BF16);
    rig_bias(r);
    rig_random(r, 81, 1, 1);
    r->options.reduction = LL_REDUCTION_MEAN;
    r->options.label_smoothing = 0.1f;
    r->options.z_loss = 1e-3f;
    rig_run(r);
    snapshot *first = snapshot_take(r);
    for (size_t i = 0; i < COUNT(threads); i++) {
        r->desc.n_threads = threads[i];
        rig_plan(r);
        for (int run = 0; run < runs; run++) {
            memset(r->args.workspace, run * 37,
                   r->args.workspace_bytes < (1 << 22) ? r->args.workspace_bytes : 1 << 22);
            rig_forward_backward(r);
            snapshot_equal(first, r);
        }
    }
    snapshot_free(first);
    rig_close(r);
}

/* B89, B104: a budget holds, does not grow with the tokens, and moves no bit of the forward's results. */
static void b89_budgets(void **state) {
    (void)state;
    const size_t budgets[] = {64 << 10, 192 << 10, 512 << 10, 1 << 20, 3 << 20, 16 << 20, 0};
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16};
    for (size_t d = 0; d < COUNT(dtypes); d++) {
        rig *r = rig_open(300, kHidden, 1300, dtypes[d]);
        if (dtypes[d] == LL_DTYPE_BF16) r->desc.grad_w_dtype = r->args.grad_w.dtype = LL_DTYPE_BF16;
        rig_random(r, 89, 1, 1);
        rig_run(r);
        snapshot *free_budget = snapshot_take(r);
        int taken = 0;
        for (size_t i = 0; i < COUNT(budgets); i++) {
            r->desc.workspace_budget_bytes = budgets[i];
            ll_plan *plan = NULL;
            ll_status status = ll_plan_create(&r->desc, &plan);
            if (status != LL_STATUS_OK) {
                assert_int_equal(status, LL_STATUS_WORKSPACE);
                assert_null(plan);
                assert_true(strpbrk(ll_last_error(), "0123456789") != NULL); /* the least that would do */
                continue;
            }
            for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
                size_t bytes = 0;
                OK(ll_plan_workspace(plan, (ll_pass)pass, &bytes));
                assert_true(bytes <= (budgets[i] ? budgets[i] : (size_t)512 << 20));
            }
            ll_plan_destroy(plan);
            rig_plan(r);
            rig_run(r);
            snapshot_near(free_budget, r, dtypes[d] == LL_DTYPE_BF16 ? 1e-2 : 1e-6);
            taken++;
        }
        assert_true(taken >= 2);
        snapshot_free(free_budget);
        rig_close(r);
    }
}

/* Large heads: within the default bound, and never a term in tokens * columns. What may grow with the tokens
 * is an f32 row of grad_x each and the per-token state. */
static void b104_workspace_bound(void **state) {
    (void)state;
    const int64_t tokens[] = {256, 8192, 32768, 1 << 20}, d = 4096;
    for (size_t i = 0; i < COUNT(tokens); i++) {
        rig *r = rig_open(1, 1, 1, LL_DTYPE_F32);
        r->desc.n_tokens_max = tokens[i];
        r->desc.n_hidden = d;
        r->desc.v_local = r->desc.v_total = 128256;
        rig_plan_only(r);
        for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
            size_t bytes = 0, bound = (size_t)512 << 20, margin = (size_t)64 << 20;
            size_t grown = margin + (size_t)tokens[i] * (4 * (size_t)d + 256);
            OK(ll_plan_workspace(r->plan, (ll_pass)pass, &bytes));
            print_message("%lld tokens, pass %d: %.1f MiB\n", (long long)tokens[i], pass,
                          (double)bytes / 1048576);
            if (tokens[i] > 8192 && grown > bound) bound = grown;
            assert_true(bytes <= bound);
        }
        rig_close(r);
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b75_chunks_around_256), FAULT(b76_row_in_any_batch), FAULT(b81_runs_and_threads),
        FAULT(b89_budgets),           FAULT(b104_workspace_bound),
    };
    return faults_main("faults: invariance", tests, COUNT(tests), argc, argv);
}
