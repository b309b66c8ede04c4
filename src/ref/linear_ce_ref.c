/* linear_ce_ref: loss, log-probabilities, entropy and gradients, straight from the formulas of logitless.h.
 *
 * Separate from every other kernel on purpose: it is what they are tested against, so it shares none of
 * their arithmetic. Leaves out every idea of speed; logits are recomputed wherever they are needed.
 *
 *   forward    row by row: z[0..V) -> max, sums -> nll, lse, entropy, argmax, loss
 *   gradients  grad_w, grad_bias row by row of w; grad_x row by row of x; long double sums, rounded once
 *
 * Letters: N tokens, D hidden size, V real columns of the vocabulary, i a token, v a column. */
#include "ref/ref.h"
#include "core/dtype.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* A token for the gradients. dz[i,v] is linear in four upstream coefficients, see row_dz. */
struct ref_row {
    int64_t target; /* -1: ignored */
    double nll, lse, entropy;
    double up_nll, up_lse, up_entropy, up_smooth; /* up_loss is already spread over the other three */
};

/* Everything of a call; rows, z and the two row buffers lie in the workspace. */
struct ref_call {
    const lli_problem *problem;
    const ll_linear_ce_args *args;
    const lli_call *call;
    int64_t D, V;
    double smoothing_share;  /* a / V or a / (V - 1); 0 without smoothing */
    long double class_total; /* sum_v class_weight[v] */
    struct ref_row *rows;    /* [N] */
    double *z;               /* [V] logits of one token */
    double *operand;         /* [D] the row of x or w at hand, widened */
    long double *sum;        /* [D] the gradient row at hand */
};

struct ref_logit {
    double z, slope; /* slope = dz / d(raw logit) */
};

/* What the forward finds for one token; z_loss and loss are scaled as the header says. */
struct ref_result {
    double nll, lse, entropy, z_loss, loss, loss_z_part;
    int64_t argmax;
};

static size_t carve(const lli_problem *problem, lli_arena *arena, struct ref_call *ref) {
    ref->rows = lli_take(arena, problem->n_tokens_max, sizeof *ref->rows);
    ref->z = lli_take(arena, problem->v_total, sizeof *ref->z);
    ref->operand = lli_take(arena, problem->n_hidden, sizeof *ref->operand);
    ref->sum = lli_take(arena, problem->n_hidden, sizeof *ref->sum);
    return arena->used;
}

static double class_weight(const struct ref_call *ref, int64_t v) {
    return ref->args->class_weight ? (double)ref->args->class_weight[v] : 1.0;
}

/* factor * value where a factor of exactly 0 is a mask: 0 * inf must not make a NaN of what counts for
 * nothing. */
static double masked_product(double factor, double value) {
    return factor == 0.0 ? 0.0 : factor * value;
}

/* ---- Logits ------------------------------------------------------------------------------------- */

static double beyond_f32_is_infinite(double value) {
    return fabs(value) > (double)FLT_MAX ? copysign((double)INFINITY, value) : value;
}

/* Logit from the widened row in ref->operand and a row in memory: the same products in the same order whether
 * the token's or the class's row is the widened one. */
static struct ref_logit logit(const struct ref_call *ref, const char *row, int32_t dtype, int64_t v) {
    const ll_loss *loss = &ref->problem->loss;
    const ll_view *bias = &ref->args->bias;
    struct ref_logit out;
    double raw = 0.0, temperature = loss->temperature, cap = loss->softcap;
    for (int64_t k = 0; k < ref->D; ++k) raw += ref->operand[k] * (double)lli_load(row, dtype, k);
    if (bias->data) raw += (double)lli_load(bias->data, bias->dtype, v * bias->row_stride);
    raw = beyond_f32_is_infinite(raw);
    out.slope = 1.0 / temperature;
    if (cap > 0.0) {
        double tanh_raw = tanh(raw / cap), cosh_raw = cosh(raw / cap);
        out.slope /= cosh_raw * cosh_raw; /* 1 - tanh^2 without cancellation near the cap */
        raw = cap * tanh_raw;
    }
    out.z = beyond_f32_is_infinite(raw / temperature);
    return out;
}

static void widen_row(struct ref_call *ref, const ll_view *view, int64_t r) {
    const char *row = lli_row(view, r);
    for (int64_t k = 0; k < ref->D; ++k) ref->operand[k] = (double)lli_load(row, view->dtype, k);
}

/* ---- Forward ------------------------------------------------------------------------------------ */

/* Lowest index of the largest logit; -1 where the row is NaN: a NaN or +inf logit, or -inf only. */
static int64_t row_argmax(const double *z, int64_t V) {
    int64_t best = 0;
    for (int64_t v = 0; v < V; ++v) {
        if (isnan(z[v]) || z[v] == (double)INFINITY) return -1;
        if (z[v] > z[best]) best = v;
    }
    return z[best] == -(double)INFINITY ? -1 : best;
}

/* Sum over the smoothed classes of cw[v] (lse - z[v]). */
static long double smoothed_sum(const struct ref_call *ref, long double max, long double log_sum,
                                int64_t target) {
    bool others = ref->problem->loss.smoothing_rule == LL_SMOOTHING_OTHERS;
    long double sum = 0.0L;
    for (int64_t v = 0; v < ref->V; ++v) {
        double weight = class_weight(ref, v);
        if (weight == 0.0 || (others && v == target)) continue;
        sum += weight * (log_sum + (max - (long double)ref->z[v]));
    }
    return sum;
}

/* s[i] = token_weight[i] * (token_scaling ? p[i, y_i] : 1) */
static double token_scale(const struct ref_call *ref, int64_t i, double nll) {
    double weight = ref->args->token_weight ? (double)ref->args->token_weight[i] : 1.0;
    return ref->problem->loss.token_scaling ? masked_product(weight, exp(-nll)) : weight;
}

/* ce = (1 - a) cw[y] nll + share * smoothed;  z_loss = c lse^2;  loss = s (ce + z_loss) */
static void row_loss(const struct ref_call *ref, int64_t i, int64_t target, double smoothed,
                     struct ref_result *out) {
    const ll_loss *loss = &ref->problem->loss;
    double ce = masked_product((1.0 - (double)loss->label_smoothing) * class_weight(ref, target), out->nll);
    double scale = token_scale(ref, i, out->nll);
    ce += masked_product(ref->smoothing_share, smoothed);
    out->z_loss = masked_product(loss->z_loss, out->lse * out->lse);
    out->loss = masked_product(scale, ce + out->z_loss);
    out->loss_z_part = masked_product(scale, out->z_loss);
}

/* From ref->z. With e[v] = exp(z[v] - max) and rest = sum of e but for the largest one, which is 1:
 * ln sum_v e[v] = log1p(rest), and nll = log1p(rest) + (max - z[y]) adds two numbers >= 0, so a confident
 * token's nll is as exact as any other's. */
static void row_forward(const struct ref_call *ref, int64_t i, int64_t target, struct ref_result *out) {
    const double *z = ref->z;
    out->argmax = row_argmax(z, ref->V);
    if (out->argmax < 0) {
        out->nll = out->lse = out->entropy = (double)NAN;
        row_loss(ref, i, target, (double)NAN, out);
        return;
    }
    long double max = z[out->argmax], rest = 0.0L, log_sum, entropy = 0.0L, smoothed = 0.0L;
    for (int64_t v = 0; v < ref->V; ++v) {
        if (v != out->argmax) rest += expl((long double)z[v] - max);
    }
    log_sum = log1pl(rest);
    for (int64_t v = 0; v < ref->V; ++v) {
        long double minus_log_p = log_sum + (max - (long double)z[v]), p = expl(-minus_log_p);
        if (p > 0.0L) entropy += p * minus_log_p;
    }
    if (ref->smoothing_share > 0.0) smoothed = smoothed_sum(ref, max, log_sum, target);
    out->nll = (double)(log_sum + (max - (long double)z[target]));
    out->lse = (double)(max + log_sum);
    out->entropy = (double)entropy;
    row_loss(ref, i, target, (double)smoothed, out);
}

static void write_row(const struct ref_call *ref, int64_t i, const struct ref_result *r) {
    const ll_linear_ce_args *args = ref->args;
    if (args->nll) args->nll[i] = (float)r->nll;
    if (args->lse) args->lse[i] = (float)r->lse;
    if (args->lse_lo) args->lse_lo[i] = (float)(r->lse - (double)(float)r->lse);
    if (args->entropy) args->entropy[i] = (float)r->entropy;
    if (args->z_loss) args->z_loss[i] = (float)r->z_loss;
    if (args->argmax) args->argmax[i] = r->argmax;
    if (args->loss && ref->problem->loss.reduction == LL_REDUCTION_NONE) args->loss[i] = (float)r->loss;
}

static void forward(struct ref_call *ref) {
    static const struct ref_result ignored = {.argmax = -1};
    const ll_linear_ce_args *args = ref->args;
    long double loss = 0.0L, z_loss = 0.0L;
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        struct ref_row *row = &ref->rows[i];
        struct ref_result result = ignored;
        if (row->target >= 0) {
            widen_row(ref, &args->x, i);
            for (int64_t v = 0; v < ref->V; ++v) {
                ref->z[v] = logit(ref, lli_row(&args->w, v), args->w.dtype, v).z;
            }
            row_forward(ref, i, row->target, &result);
        }
        write_row(ref, i, &result);
        /* As a backward would find them saved in f32, so that both ways give the same bits. */
        const float lse = (float)result.lse;
        row->nll = (double)(float)result.nll;
        row->lse = (double)lse + (double)(float)(result.lse - (double)lse);
        row->entropy = (double)(float)result.entropy;
        loss += result.loss;
        z_loss += result.loss_z_part;
    }
    if (args->loss && ref->problem->loss.reduction != LL_REDUCTION_NONE) {
        args->loss[0] = ref->call->divisor == 0.0 ? 0.0f : (float)(loss / ref->call->divisor);
    }
    if (args->sums) {
        int64_t n_valid = ref->call->n_valid;
        *args->sums = (ll_sums){(double)loss, (double)z_loss, ref->call->weight, n_valid,
                                ref->call->n_tokens - n_valid};
    }
}

/* ---- Gradients ---------------------------------------------------------------------------------- */

/* Spreads up_loss of token i over the coefficients:  up_loss dL/dz = up_loss s / divisor *
 *   ((1 - a) cw[y] (p - [v = y]) + share (sum_u cw[u] p - cw[v]) + 2 c lse p) */
static void spread_upstream(const struct ref_call *ref, int64_t i, struct ref_row *row) {
    const ll_loss *loss = &ref->problem->loss;
    const ll_linear_ce_args *args = ref->args;
    row->up_nll = args->up_nll ? (double)args->up_nll[i] : 0.0;
    row->up_lse = args->up_lse ? (double)args->up_lse[i] : 0.0;
    row->up_entropy = args->up_entropy ? (double)args->up_entropy[i] : 0.0;
    row->up_smooth = 0.0;
    if (args->up_loss && ref->call->divisor != 0.0) {
        double up = loss->reduction == LL_REDUCTION_NONE ? (double)args->up_loss[i]
                                                         : (double)args->up_loss[0] / ref->call->divisor;
        up = masked_product(up, token_scale(ref, i, row->nll));
        row->up_nll +=
            masked_product(up, (1.0 - (double)loss->label_smoothing) * class_weight(ref, row->target));
        row->up_lse += masked_product(up * 2.0 * (double)loss->z_loss, row->lse);
        row->up_smooth = masked_product(ref->smoothing_share, up);
    }
    bool nothing =
        row->up_nll == 0.0 && row->up_lse == 0.0 && row->up_entropy == 0.0 && row->up_smooth == 0.0;
    if (nothing) row->target = -1; /* as good as ignored: 0 * NaN of its row of x must reach no gradient */
}

/* What the backward pass got from the caller; forward_backward has its own, in double. */
static void load_saved(struct ref_call *ref) {
    const ll_linear_ce_args *args = ref->args;
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        struct ref_row *row = &ref->rows[i];
        row->nll = args->nll ? (double)args->nll[i] : 0.0;
        row->lse = (double)args->lse[i] + (args->lse_lo ? (double)args->lse_lo[i] : 0.0);
        row->entropy = args->entropy ? (double)args->entropy[i] : 0.0;
    }
}

/* dz = up_nll (p - [v = y]) + up_lse p + up_entropy p (lse - H - z) + up_smooth (sum_u cw[u] p - cw[v]) */
static double row_dz(const struct ref_call *ref, const struct ref_row *row, int64_t v, double z) {
    double p = exp(z - row->lse);
    double p_minus_onehot = v == row->target ? expm1(-row->nll) : p;
    double dz = masked_product(row->up_nll, p_minus_onehot) + masked_product(row->up_lse, p);
    if (p != 0.0 && row->up_entropy != 0.0)
        dz += row->up_entropy * p * (row->lse - row->entropy - z); /* p = 0: 0 * inf */
    if (row->up_smooth != 0.0) {
        bool others = ref->problem->loss.smoothing_rule == LL_SMOOTHING_OTHERS;
        double total = (double)(ref->class_total - (others ? class_weight(ref, row->target) : 0.0));
        double own = others && v == row->target ? 0.0 : class_weight(ref, v);
        dz += row->up_smooth * (total * p - own);
    }
    return dz;
}

/* Rounds to odd, so that a second rounding to bf16 or f16 gives what one rounding would. */
static float f32_round_to_odd(double value) {
    float nearest = (float)value;
    if (isnan(value) || (double)nearest == value) return nearest;
    uint32_t bits = lli_bits(nearest);
    if (fabs((double)nearest) > fabs(value)) bits -= 1;
    return lli_float(bits | 1u);
}

static void write_gradient(const ll_view *view, int64_t r, int64_t c, bool accumulate, long double sum) {
    char *row = (char *)view->data + (size_t)(r * view->row_stride) * ll_dtype_bytes((ll_dtype)view->dtype);
    if (accumulate) sum += lli_load(row, view->dtype, c);
    lli_store(row, view->dtype, c, view->dtype == LL_DTYPE_F32 ? (float)sum : f32_round_to_odd((double)sum));
}

/* A row of zeros where nothing flows (ignored token, padded column); accumulation leaves it as it is. */
static void write_zero_row(const ll_view *view, int64_t r, bool accumulate) {
    for (int64_t c = 0; c < view->cols && !accumulate; ++c) write_gradient(view, r, c, false, 0.0L);
}

static void grad_w_and_bias(struct ref_call *ref) {
    const ll_linear_ce_args *args = ref->args;
    const ll_view *grad_w = &args->grad_w, *grad_bias = &args->grad_bias;
    bool add_w = args->accumulate & LL_ACCUMULATE_W, add_bias = args->accumulate & LL_ACCUMULATE_BIAS;
    for (int64_t v = 0; v < ref->problem->v_local; ++v) {
        if (v >= ref->V) {
            if (grad_w->data) write_zero_row(grad_w, v, add_w);
            if (grad_bias->data) write_zero_row(grad_bias, v, add_bias);
            continue;
        }
        long double bias_sum = 0.0L;
        widen_row(ref, &args->w, v);
        for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] = 0.0L;
        for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
            if (ref->rows[i].target < 0) continue;
            const char *x_row = lli_row(&args->x, i);
            struct ref_logit at = logit(ref, x_row, args->x.dtype, v);
            long double dr = row_dz(ref, &ref->rows[i], v, at.z) * at.slope;
            bias_sum += dr;
            for (int64_t k = 0; k < ref->D && grad_w->data; ++k)
                ref->sum[k] += dr * lli_load(x_row, args->x.dtype, k);
        }
        for (int64_t k = 0; k < ref->D && grad_w->data; ++k) write_gradient(grad_w, v, k, add_w, ref->sum[k]);
        if (grad_bias->data) write_gradient(grad_bias, v, 0, add_bias, bias_sum);
    }
}

static void grad_x(struct ref_call *ref) {
    const ll_linear_ce_args *args = ref->args;
    bool add = args->accumulate & LL_ACCUMULATE_X;
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        if (ref->rows[i].target < 0) {
            write_zero_row(&args->grad_x, i, add);
            continue;
        }
        widen_row(ref, &args->x, i);
        for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] = 0.0L;
        for (int64_t v = 0; v < ref->V; ++v) {
            const char *w_row = lli_row(&args->w, v);
            struct ref_logit at = logit(ref, w_row, args->w.dtype, v);
            long double dr = row_dz(ref, &ref->rows[i], v, at.z) * at.slope;
            for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] += dr * lli_load(w_row, args->w.dtype, k);
        }
        for (int64_t k = 0; k < ref->D; ++k) write_gradient(&args->grad_x, i, k, add, ref->sum[k]);
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

static ll_status ref_run(const ll_plan *plan, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    const ll_loss *loss = &plan->problem.loss;
    struct ref_call ref = {.problem = &plan->problem, .args = args, .call = call};
    lli_arena arena = {.base = args->workspace};
    carve(&plan->problem, &arena, &ref);
    ref.D = plan->problem.n_hidden;
    ref.V = plan->problem.v_total;
    if (loss->label_smoothing > 0.0f) {
        int64_t classes = loss->smoothing_rule == LL_SMOOTHING_OTHERS ? ref.V - 1 : ref.V;
        ref.smoothing_share = (double)loss->label_smoothing / (double)classes;
    }
    for (int64_t v = 0; v < ref.V; ++v) ref.class_total += class_weight(&ref, v);
    for (int64_t i = 0; i < call->n_tokens; ++i) {
        int64_t target = lli_id(&args->target, i);
        ref.rows[i].target = target == loss->ignore_index ? -1 : target;
    }
    if (call->pass == LL_PASS_BACKWARD) {
        load_saved(&ref);
    } else {
        forward(&ref);
    }
    if (call->pass != LL_PASS_FORWARD) {
        for (int64_t i = 0; i < call->n_tokens; ++i) {
            if (ref.rows[i].target >= 0) spread_upstream(&ref, i, &ref.rows[i]);
        }
        if (args->grad_w.data || args->grad_bias.data) grad_w_and_bias(&ref);
        if (args->grad_x.data) grad_x(&ref);
    }
    lli_arena_release(&arena);
    return LL_STATUS_OK;
}

static bool ref_machine_ok(char *why, size_t why_bytes) {
    if (why_bytes > 0) why[0] = '\0';
    return true;
}

static bool ref_accepts(const lli_problem *problem, char *why, size_t why_bytes) {
    if (problem->in_group) {
        snprintf(why, why_bytes, "the definition runs on one rank, without a communicator");
        return false;
    }
    return ref_machine_ok(why, why_bytes);
}

static size_t ref_workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                            ll_pass pass) {
    (void)kernel;
    struct ref_call ref;
    lli_arena arena = {0};
    (void)config;
    (void)pass;
    return carve(problem, &arena, &ref);
}

static ll_status ref_configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                               lli_config *config) {
    (void)agreed;
    size_t needed = ref_workspace(kernel, problem, config, LL_PASS_FORWARD);
    *config = (lli_config){0};
    LLI_REQUIRE(problem->budget_bytes == 0 || needed <= problem->budget_bytes, LL_STATUS_WORKSPACE,
                "workspace_budget_bytes: %zu, but linear_ce_ref needs at least %zu", problem->budget_bytes,
                needed);
    return LL_STATUS_OK;
}

const lli_kernel lli_linear_ce_ref = {
    .name = "linear_ce_ref",
    .numerics = "ref-f64-v1",
    .backend = LL_BACKEND_REF,
    .machine_ok = ref_machine_ok,
    .accepts = ref_accepts,
    .configure = ref_configure,
    .workspace = ref_workspace,
    .run = ref_run,
};
