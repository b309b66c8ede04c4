/* The rig: guarded memory, plan and passes. Comparing is in compare.c, the runner in runner.c. */
#define _DEFAULT_SOURCE
#include "harness.h"

#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#endif
#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#endif

enum { kGuardByte = 0xa5 };

/* Mapped rather than taken from malloc, so that gigabytes of zeros cost nothing until they are written. */
void *rig_alloc(rig *r, size_t bytes, int fill) {
    assert_true(r->n_guards < kGuardsMax);
    guarded *g = &r->guards[r->n_guards++];
    g->bytes = bytes;
    g->mapped_bytes = bytes + 2 * kGuardBytes;
    g->base = mmap(NULL, g->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (g->base == MAP_FAILED) fail_msg("cannot map %zu bytes", g->mapped_bytes);
    memset(g->base, kGuardByte, kGuardBytes);
    if (fill) memset(g->base + kGuardBytes, fill, bytes);
    memset(g->base + kGuardBytes + bytes, kGuardByte, kGuardBytes);
#ifdef WITH_ASAN /* reads beyond the buffer are then found too */
    __asan_poison_memory_region(g->base, kGuardBytes);
    __asan_poison_memory_region(g->base + kGuardBytes + bytes, kGuardBytes);
#endif
    return g->base + kGuardBytes;
}

static void guards_check(const rig *r) {
#ifndef WITH_ASAN
    for (int i = 0; i < r->n_guards; i++) {
        const guarded *g = &r->guards[i];
        for (int b = 0; b < kGuardBytes; b++) {
            if (g->base[b] != kGuardByte)
                fail_msg("buffer %d: byte %d before it written", i, kGuardBytes - b);
            if (g->base[kGuardBytes + g->bytes + (size_t)b] != kGuardByte)
                fail_msg("buffer %d (%zu bytes): byte %d after it written", i, g->bytes, b);
        }
    }
#else
    (void)r;
#endif
}

float *rig_tokens(rig *r, float value) {
    float *values = rig_alloc(r, sizeof *values * (size_t)(r->n > 0 ? r->n : 1), 0);
    for (int64_t i = 0; i < r->n || i == 0; i++) values[i] = value;
    return values;
}

static ll_view matrix(rig *r, ll_dtype dtype, int64_t rows, int64_t cols) {
    size_t bytes = ll_dtype_bytes(dtype) * (size_t)rows * (size_t)cols;
    return ll_view_matrix(rig_alloc(r, bytes ? bytes : 1, 0), dtype, rows, cols, 0);
}

rig *rig_open(int64_t n, int64_t d, int64_t v, ll_dtype dtype) {
    rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->n = n;
    r->d = d;
    r->v = v;
    r->options = (ll_loss)LL_LOSS_INIT;
    r->options.reduction = LL_REDUCTION_SUM;
    r->desc = (ll_plan_desc)LL_PLAN_DESC_INIT;
    r->desc.n_tokens_max = n;
    r->desc.n_hidden = d;
    r->desc.v_local = r->desc.v_total = v;
    r->desc.x_dtype = r->desc.w_dtype = dtype;
    r->desc.grad_x_dtype = r->desc.grad_w_dtype = LL_DTYPE_F32;
    r->desc.n_threads = 2;
    r->desc.loss = &r->options;

    ll_linear_ce_args *a = &r->args;
    *a = (ll_linear_ce_args)LL_LINEAR_CE_ARGS_INIT;
    a->x = matrix(r, dtype, n, d);
    a->w = matrix(r, dtype, v, d);
    r->y = rig_alloc(r, sizeof *r->y * (size_t)(n > 0 ? n : 1), 0);
    a->target = ll_view_vector(r->y, LL_DTYPE_I64, n, 0);
    a->loss = rig_tokens(r, 0);
    a->nll = rig_tokens(r, 0);
    a->lse = rig_tokens(r, 0);
    a->lse_lo = rig_tokens(r, 0);
    a->entropy = rig_tokens(r, 0);
    a->z_loss = rig_tokens(r, 0);
    a->argmax = rig_alloc(r, sizeof *a->argmax * (size_t)(n > 0 ? n : 1), 0);
    a->sums = &r->sums;
    r->up_loss = rig_tokens(r, 1);
    a->up_loss = r->up_loss;
    a->grad_x = matrix(r, LL_DTYPE_F32, n, d);
    a->grad_w = matrix(r, LL_DTYPE_F32, v, d);
    return r;
}

rig *rig_exact(int64_t n, int64_t v, ll_dtype dtype, const double *z) {
    rig *r = rig_open(n, 2 * n, v, dtype);
    for (int64_t t = 0; t < n; t++) {
        rig_set(&r->args.x, t, 2 * t, 1);
        for (int64_t j = 0; j < v; j++) {
            double value = z[t * v + j];
            if (isfinite(value)) {
                rig_set(&r->args.w, j, 2 * t, value);
            } else {
                assert_true(dtype != LL_DTYPE_F16);
                rig_set(&r->args.x, t, 2 * t + 1, 1e30);
                rig_set(&r->args.w, j, 2 * t + 1, value > 0 ? 1e30 : -1e30);
            }
        }
    }
    return r;
}

float *rig_bias(rig *r) {
    r->args.bias = matrix(r, LL_DTYPE_F32, r->v, 1);
    r->args.grad_bias = matrix(r, LL_DTYPE_F32, r->v, 1);
    r->desc.bias_dtype = r->desc.grad_bias_dtype = LL_DTYPE_F32;
    return r->args.bias.data;
}

void rig_random(rig *r, uint64_t seed, double x_scale, double w_scale) {
    for (int64_t t = 0; t < r->n; t++)
        for (int64_t k = 0; k < r->d; k++) rig_set(&r->args.x, t, k, x_scale * uniform(&seed));
    for (int64_t j = 0; j < r->v; j++)
        for (int64_t k = 0; k < r->d; k++) rig_set(&r->args.w, j, k, w_scale * uniform(&seed));
    for (int64_t j = 0; j < r->args.bias.rows; j++) rig_set(&r->args.bias, j, 0, w_scale * uniform(&seed));
    for (int64_t t = 0; t < r->n; t++) r->y[t] = below(&seed, r->v);
}

void rig_plan_only(rig *r) {
    ll_plan_destroy(r->plan);
    r->plan = NULL;
    const ll_status status = ll_plan_create(&r->desc, &r->plan);
    if (status == LL_STATUS_UNSUPPORTED && on_partial_kernel()) skip();
    OK(status);
}

void rig_plan(rig *r) {
    rig_plan_only(r);
    size_t bytes = 0;
    for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        size_t need = 0;
        OK(ll_plan_workspace(r->plan, (ll_pass)pass, &need));
        if (need > bytes) bytes = need;
    }
    if (!r->args.workspace || bytes > r->workspace_bytes) {
        r->args.workspace = rig_alloc(r, bytes ? bytes : 64, bytes < (1 << 22) ? 0xff : 0);
        r->workspace_bytes = bytes;
    }
    r->args.workspace_bytes = bytes;
}

void rig_close(rig *r) {
    guards_check(r);
    ll_plan_destroy(r->plan);
    for (int i = 0; i < r->n_guards; i++) {
#ifdef WITH_ASAN
        __asan_unpoison_memory_region(r->guards[i].base, r->guards[i].mapped_bytes);
#endif
        munmap(r->guards[i].base, r->guards[i].mapped_bytes);
    }
    free(r);
}

static size_t view_bytes(const ll_view *view) {
    if (!view->data || view->rows <= 0) return 0;
    return ll_dtype_bytes((ll_dtype)view->dtype) *
           (size_t)((view->rows - 1) * view->row_stride + (view->cols - 1) * view->col_stride + 1);
}

static uint64_t view_hash(uint64_t hash, const ll_view *view) {
    const unsigned char *bytes = view->data;
    size_t n = view_bytes(view);
    if (n > (1 << 24)) return hash; /* the few huge operands are not worth a second reading */
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t inputs_hash(const rig *r) {
    uint64_t hash = 0xcbf29ce484222325u;
    hash = view_hash(hash, &r->args.x);
    hash = view_hash(hash, &r->args.w);
    hash = view_hash(hash, &r->args.bias);
    return view_hash(hash, &r->args.target);
}

static void spoil(void *data, size_t bytes) {
    if (data) memset(data, 0xff, bytes); /* a NaN in every float type, -1 in an integer */
}

void rig_spoil(const rig *r, const ll_linear_ce_args *a, ll_pass pass) {
    size_t n = (size_t)r->n;
    if (pass != LL_PASS_BACKWARD) {
        spoil(a->loss, sizeof *a->loss * (r->options.reduction == LL_REDUCTION_NONE ? n : 1));
        float *per_token[] = {a->nll, a->lse, a->lse_lo, a->entropy, a->z_loss};
        for (size_t i = 0; i < COUNT(per_token); i++) spoil(per_token[i], sizeof(float) * n);
        spoil(a->argmax, sizeof *a->argmax * n);
        spoil(a->sums, sizeof *a->sums);
    }
    if (pass != LL_PASS_FORWARD) {
        if (!(a->accumulate & LL_ACCUMULATE_X)) spoil(a->grad_x.data, view_bytes(&a->grad_x));
        if (!(a->accumulate & LL_ACCUMULATE_W)) spoil(a->grad_w.data, view_bytes(&a->grad_w));
        if (!(a->accumulate & LL_ACCUMULATE_BIAS)) spoil(a->grad_bias.data, view_bytes(&a->grad_bias));
    }
}

ll_linear_ce_args rig_args(const rig *r, ll_pass pass) {
    ll_linear_ce_args a = r->args;
    const ll_view none = {0};
    if (pass == LL_PASS_FORWARD) {
        a.up_loss = a.up_nll = a.up_lse = a.up_entropy = NULL;
        a.grad_x = a.grad_w = a.grad_bias = none;
        a.accumulate = 0;
    } else if (pass == LL_PASS_BACKWARD) {
        a.loss = a.z_loss = NULL;
        a.argmax = NULL;
        a.sums = NULL;
    }
    return a;
}

ll_status rig_pass(const ll_plan *plan, ll_pass pass, const ll_linear_ce_args *args) {
    return pass == LL_PASS_FORWARD    ? ll_linear_ce_forward(plan, args, NULL)
           : pass == LL_PASS_BACKWARD ? ll_linear_ce_backward(plan, args, NULL)
                                      : ll_linear_ce_forward_backward(plan, args, NULL);
}

ll_status rig_call(rig *r, ll_pass pass) {
    if (!r->plan) rig_plan(r);
    ll_linear_ce_args a = rig_args(r, pass);
    rig_spoil(r, &a, pass);
    uint64_t hash = inputs_hash(r);
    ll_status status = rig_pass(r->plan, pass, &a);
    guards_check(r);
    assert_true(hash == inputs_hash(r));
    return status;
}

void rig_forward(rig *r) {
    OK(rig_call(r, LL_PASS_FORWARD));
}
void rig_backward(rig *r) {
    OK(rig_call(r, LL_PASS_BACKWARD));
}
void rig_forward_backward(rig *r) {
    OK(rig_call(r, LL_PASS_FORWARD_BACKWARD));
}

void rig_run(rig *r) {
    rig_forward(r);
    rig_backward(r);
    snapshot *two = snapshot_take(r);
    rig_forward_backward(r);
    snapshot_equal(two, r);
    snapshot_free(two);
}

double rig_dz(const rig *r, int64_t t, int64_t v) {
    return rig_get(&r->args.grad_w, v, 2 * t);
}
