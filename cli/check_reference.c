/* The calls of `logitless check` and the two references that they are held against. `matching` is separate
 * from every kernel on purpose: plain loops over logits that are all in memory, rounded wherever a framework
 * rounds them:
 *
 *   z  = round(x . w + b)                      in the dtype, from an f32 sum
 *   p  = softmax(z), nll, lse, H               f32
 *   dz = round(up_nll (p - onehot) + ...)      in the dtype, over z
 *   grad_x = round(dz w)   grad_w = round(dz^T x)   grad_bias = round(sum_i dz)     f32 sums */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "gpu.h"

#include "core/dtype.h"
#include "core/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

ll_status check_call_create(check_call *call) {
    const check_shape *shape = &call->inputs->shape;
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.backend = call->backend;
    desc.n_tokens_max = shape->n_tokens;
    desc.n_hidden = shape->n_hidden;
    desc.v_begin = call->v_begin;
    desc.v_local = call->v_local;
    desc.v_total = shape->n_vocab;
    desc.x_dtype = desc.w_dtype = (int32_t)shape->dtype;
    desc.bias_dtype = (int32_t)(shape->bias ? shape->dtype : LL_DTYPE_NONE);
    desc.grad_x_dtype = desc.grad_w_dtype = (int32_t)call->grad_dtype;
    desc.grad_bias_dtype = (int32_t)(shape->bias ? call->grad_dtype : LL_DTYPE_NONE);
    desc.n_threads = call->n_threads;
    desc.comm = call->comm;
    LLI_TRY(ll_plan_create(&desc, &call->plan));
    for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        size_t bytes;
        LLI_TRY(ll_plan_workspace(call->plan, (ll_pass)pass, &bytes));
        if (bytes > call->workspace_bytes) call->workspace_bytes = bytes;
    }
    if (cli_gpu_wanted(call->plan)) return cli_gpu_open(&desc, call->workspace_bytes, &call->gpu);
    call->workspace = aligned_alloc(64, (call->workspace_bytes + 64) / 64 * 64);
    LLI_REQUIRE(call->workspace, LL_STATUS_MEMORY, "check: no memory for a workspace of %zu bytes",
                call->workspace_bytes);
    return LL_STATUS_OK;
}

void check_call_free(check_call *call) {
    cli_gpu_close(call->gpu);
    ll_plan_destroy(call->plan);
    free(call->workspace);
    call->plan = NULL;
    call->gpu = NULL;
    call->workspace = NULL;
}

/* A view of the rows of this call in an array that starts at row `from`. */
static ll_view rows_of(const check_call *call, const void *data, ll_dtype dtype, int64_t from, int64_t cols) {
    const char *bytes = data;
    bytes += (size_t)((call->v_begin - from) * cols) * ll_dtype_bytes(dtype);
    return ll_view_matrix(bytes, dtype, call->v_local, cols, 0);
}

static ll_status run_pass(const check_call *call, ll_pass pass, const ll_linear_ce_args *args) {
    if (call->gpu) return cli_gpu_run(call->gpu, call->plan, pass, args);
    if (pass == LL_PASS_FORWARD) return ll_linear_ce_forward(call->plan, args, NULL);
    if (pass == LL_PASS_BACKWARD) return ll_linear_ce_backward(call->plan, args, NULL);
    return ll_linear_ce_forward_backward(call->plan, args, NULL);
}

ll_status check_call_run(const check_call *call, ll_pass pass, check_results *results) {
    const check_inputs *in = call->inputs;
    const check_shape *shape = &in->shape;
    const ll_dtype grad = results->grad_dtype;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(in->x, shape->dtype, shape->n_tokens, shape->n_hidden, 0);
    args.w = rows_of(call, in->w, shape->dtype, in->v_begin, shape->n_hidden);
    if (shape->bias) args.bias = rows_of(call, in->bias, shape->dtype, in->v_begin, 1);
    args.target = ll_view_vector(in->target, LL_DTYPE_I64, shape->n_tokens, 0);
    args.nll = results->nll;
    args.lse = results->lse;
    args.lse_lo = results->lse_lo;
    args.entropy = results->entropy;
    args.workspace = call->workspace;
    args.workspace_bytes = call->workspace_bytes;
    if (pass != LL_PASS_BACKWARD) {
        args.loss = &results->loss;
        args.argmax = results->argmax;
    }
    if (pass == LL_PASS_FORWARD) return run_pass(call, pass, &args);
    args.up_loss = &in->up_loss;
    args.up_nll = in->up_nll;
    args.up_lse = in->up_lse;
    args.up_entropy = in->up_entropy;
    args.grad_x = ll_view_matrix(results->grad_x, grad, shape->n_tokens, shape->n_hidden, 0);
    args.grad_w = ll_view_matrix(results->grad_w, grad, call->v_local, shape->n_hidden, 0);
    if (shape->bias) args.grad_bias = ll_view_vector(results->grad_bias, grad, call->v_local, 0);
    return run_pass(call, pass, &args);
}

/* LL_KERNEL forces a kernel whatever the backend asked for; the reference must stay itself when a user
 * checks one kernel. No other thread runs yet. */
static ll_status run_double(const check_inputs *in, check_results *want) {
    check_call call = {.inputs = in,
                       .v_local = in->shape.n_vocab,
                       .backend = LL_BACKEND_REF,
                       .grad_dtype = LL_DTYPE_F32,
                       .n_threads = 1};
    const char *variable = getenv("LL_KERNEL");
    char *forced = variable ? strdup(variable) : NULL;
    LLI_REQUIRE(forced || !variable, LL_STATUS_MEMORY, "check: out of memory");
    unsetenv("LL_KERNEL");
    ll_status status = check_call_create(&call);
    if (forced) setenv("LL_KERNEL", forced, 1);
    free(forced);
    if (status == LL_STATUS_OK) status = check_call_run(&call, LL_PASS_FORWARD_BACKWARD, want);
    check_call_free(&call);
    return status;
}

/* ---- matching ------------------------------------------------------------------------------------ */

typedef struct matching {
    const check_inputs *in;
    check_results *want;
    float *x, *w; /* widened */
    float *z;     /* [n_tokens, n_vocab], then dz */
    float *sum;   /* a row of a gradient, and one of a block of its sum */
} matching;

static float round_to(ll_dtype dtype, float value) {
    uint32_t room = 0;
    lli_store(&room, (int32_t)dtype, 0, value);
    return lli_load(&room, (int32_t)dtype, 0);
}

static void widen(const void *from, ll_dtype dtype, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = lli_load(from, (int32_t)dtype, i);
}

static void logits_of(const matching *m, int64_t i, float *z) {
    const check_shape *shape = &m->in->shape;
    for (int64_t v = 0; v < shape->n_vocab; v++) {
        const float *x = m->x + i * shape->n_hidden, *w = m->w + v * shape->n_hidden;
        float sum = 0;
        for (int64_t k = 0; k < shape->n_hidden; k++) sum += x[k] * w[k];
        if (m->in->bias) sum += lli_load(m->in->bias, (int32_t)shape->dtype, v);
        z[v] = round_to(shape->dtype, sum);
    }
}

/* sum_v exp(z - shift), or sum_v exp(z - shift) z. Sums run in blocks, as the many threads of a framework's
 * reduction add up: in one long chain f32 would lose what is small beside the sum so far. */
enum { kBlock = 256 };

static float sum_of(const float *z, int64_t n, float shift, bool times_z) {
    float sum = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        float block = 0;
        for (int64_t v = begin; v < n && v < begin + kBlock; v++) {
            block += expf(z[v] - shift) * (times_z ? z[v] : 1);
        }
        sum += block;
    }
    return sum;
}

/* Results of token i, then dz over its logits. */
static void softmax_of(const matching *m, int64_t i, float *z) {
    const check_inputs *in = m->in;
    const int64_t n = in->shape.n_vocab, target = in->target[i];
    int64_t best = 0;
    for (int64_t v = 1; v < n; v++) {
        if (z[v] > z[best]) best = v;
    }
    const float lse = z[best] + logf(sum_of(z, n, z[best], false));
    const float entropy = lse - sum_of(z, n, lse, true);
    m->want->argmax[i] = best;
    m->want->lse[i] = lse;
    m->want->entropy[i] = entropy;
    m->want->nll[i] = lse - z[target];
    const float up_nll = in->up_nll[i] + in->up_loss / (float)in->n_valid;
    for (int64_t v = 0; v < n; v++) {
        const float p = expf(z[v] - lse), onehot = v == target ? 1.0f : 0.0f;
        const float dz =
            up_nll * (p - onehot) + in->up_lse[i] * p + in->up_entropy[i] * p * (lse - entropy - z[v]);
        z[v] = round_to(in->shape.dtype, dz);
    }
}

/* to[row] = sum_j factor[j * step] rows[j], in blocks as above. */
static void product_row(const matching *m, void *to, int64_t row, const float *factor, int64_t step,
                        const float *rows, int64_t n_rows) {
    const int64_t n_hidden = m->in->shape.n_hidden;
    float *sum = m->sum, *block = m->sum + n_hidden;
    memset(sum, 0, 2 * (size_t)n_hidden * sizeof *sum);
    for (int64_t j = 0; j < n_rows; j++) {
        const float f = factor[j * step];
        for (int64_t k = 0; k < n_hidden; k++) block[k] += f * rows[j * n_hidden + k];
        if ((j + 1) % kBlock != 0 && j + 1 < n_rows) continue;
        for (int64_t k = 0; k < n_hidden; k++) {
            sum[k] += block[k];
            block[k] = 0;
        }
    }
    for (int64_t k = 0; k < n_hidden; k++) {
        lli_store(to, (int32_t)m->want->grad_dtype, row * n_hidden + k, sum[k]);
    }
}

static void compute_matching(const matching *m) {
    const check_shape *shape = &m->in->shape;
    const int64_t n = shape->n_tokens, n_vocab = shape->n_vocab;
    double loss = 0;
    widen(m->in->x, shape->dtype, m->x, n * shape->n_hidden);
    widen(m->in->w, shape->dtype, m->w, n_vocab * shape->n_hidden);
    for (int64_t i = 0; i < n; i++) {
        float *z = m->z + i * n_vocab;
        if (m->in->target[i] < 0) { /* ignored: results 0, dz 0, and its row of x, which is NaN, not used */
            memset(z, 0, (size_t)n_vocab * sizeof *z);
            memset(m->x + i * shape->n_hidden, 0, (size_t)shape->n_hidden * sizeof *m->x);
            m->want->argmax[i] = -1;
            continue;
        }
        logits_of(m, i, z);
        softmax_of(m, i, z);
        loss += (double)m->want->nll[i];
        product_row(m, m->want->grad_x, i, z, 1, m->w, n_vocab);
    }
    m->want->loss = m->in->n_valid ? (float)(loss / (double)m->in->n_valid) : 0;
    for (int64_t v = 0; v < n_vocab; v++) {
        float sum = 0;
        product_row(m, m->want->grad_w, v, m->z + v, n_vocab, m->x, n);
        for (int64_t i = 0; i < n; i++) sum += m->z[i * n_vocab + v];
        if (shape->bias) lli_store(m->want->grad_bias, (int32_t)shape->dtype, v, sum);
    }
}

static ll_status run_matching(const check_inputs *in, check_results *want) {
    const check_shape *shape = &in->shape;
    const size_t d = (size_t)shape->n_hidden, n = (size_t)shape->n_tokens, n_vocab = (size_t)shape->n_vocab;
    matching m = {.in = in, .want = want};
    ll_status status = LL_STATUS_OK;
    m.x = calloc(n * d + 1, sizeof *m.x);
    m.w = calloc(n_vocab * d, sizeof *m.w);
    m.z = calloc(n * n_vocab + 1, sizeof *m.z);
    m.sum = calloc(2 * d, sizeof *m.sum);
    if (m.x && m.w && m.z && m.sum) {
        compute_matching(&m);
    } else {
        status = lli_fail(LL_STATUS_MEMORY,
                          "check: no memory for the %zu logits of --reference-mode matching", n * n_vocab);
    }
    free(m.sum);
    free(m.z);
    free(m.w);
    free(m.x);
    return status;
}

ll_status check_reference(const check_inputs *in, bool matching, check_results *want) {
    LLI_TRY(
        check_results_create(&in->shape, in->shape.n_vocab, matching ? in->shape.dtype : LL_DTYPE_F32, want));
    return matching ? run_matching(in, want) : run_double(in, want);
}
