/* Formulas: the comments of ll_loss and ll_linear_ce_backward in logitless.h, taken literally. */
#include "oracle.h"

static double *zeros(int64_t count) {
    double *values = calloc((size_t)(count > 0 ? count : 1), sizeof *values);
    assert_non_null(values);
    return values;
}

static double upstream(const float *up, int64_t i) {
    return up ? (double)up[i] : 0;
}

typedef struct row {
    double *z, *p, *slope; /* after softcap and temperature; dz/dr */
    double lse, entropy;
} row;

static void logits(const rig *r, int64_t t, row *out) {
    const ll_linear_ce_args *a = &r->args;
    double cap = r->options.softcap, temperature = r->options.temperature, largest = -INFINITY, sum = 0,
           mean = 0;
    for (int64_t j = 0; j < r->v; j++) {
        double raw = a->bias.data ? rig_get(&a->bias, j, 0) : 0;
        for (int64_t k = 0; k < r->d; k++) raw += rig_get(&a->x, t, k) * rig_get(&a->w, j, k);
        double th = cap > 0 ? tanh(raw / cap) : 0;
        out->z[j] = (cap > 0 ? cap * th : raw) / temperature;
        out->slope[j] = (1 - th * th) / temperature;
        largest = fmax(largest, out->z[j]);
    }
    for (int64_t j = 0; j < r->v; j++) sum += exp(out->z[j] - largest);
    out->lse = largest + log(sum);
    for (int64_t j = 0; j < r->v; j++) {
        out->p[j] = exp(out->z[j] - largest) / sum;
        mean += out->p[j] * (out->z[j] - largest);
    }
    out->entropy = log(sum) - mean;
}

static double weight_of(const rig *r, int64_t j) {
    return r->args.class_weight ? r->args.class_weight[j] : 1;
}

/* Loss of token t; dz of it times `up` is added to dz. */
static void token_loss(const rig *r, oracle *o, int64_t t, const row *w, double up, double *dz) {
    const ll_loss *l = &r->options;
    int64_t y = r->y[t], v = r->v;
    double a = l->label_smoothing, c = l->z_loss, spread = 0, total = 0;
    int others = l->smoothing_rule == LL_SMOOTHING_OTHERS;
    double share = a == 0 ? 0 : a / (double)(others ? v - 1 : v);
    for (int64_t j = 0; j < v; j++) {
        if (others && j == y) continue;
        spread += weight_of(r, j) * (w->lse - w->z[j]);
        total += weight_of(r, j);
    }
    double s = (r->args.token_weight ? r->args.token_weight[t] : 1) * (l->token_scaling ? w->p[y] : 1);
    double own = (1 - a) * weight_of(r, y);
    o->z_loss[t] = c * w->lse * w->lse;
    o->row_loss[t] = s * (own * o->nll[t] + share * spread + o->z_loss[t]);
    for (int64_t j = 0; j < v; j++) {
        double taken = others && j == y ? 0 : weight_of(r, j);
        double g = own * (w->p[j] - (j == y)) + share * (total * w->p[j] - taken) + 2 * c * w->lse * w->p[j];
        dz[j] += up * s * g;
    }
}

static double divisor_of(const rig *r) {
    if (r->options.reduction != LL_REDUCTION_MEAN) return 1;
    if (r->args.divisor) return *r->args.divisor;
    double sum = 0;
    for (int64_t t = 0; t < r->n; t++)
        if (r->y[t] != r->options.ignore_index) sum += weight_of(r, r->y[t]);
    return sum > 0 ? sum : 1;
}

oracle *oracle_of(const rig *r) {
    const ll_linear_ce_args *args = &r->args;
    int64_t n = r->n, d = r->d, v = r->v;
    oracle *o = calloc(1, sizeof *o);
    assert_non_null(o);
    double **per_token[] = {&o->row_loss, &o->nll, &o->lse, &o->entropy, &o->z_loss};
    for (size_t i = 0; i < COUNT(per_token); i++) *per_token[i] = zeros(n);
    o->dr = zeros(n * v);
    o->grad_x = zeros(n * d);
    o->grad_w = zeros(v * d);
    o->grad_bias = zeros(v);
    row w = {zeros(v), zeros(v), zeros(v), 0, 0};
    double divisor = divisor_of(r);
    for (int64_t t = 0; t < n; t++) {
        if (r->y[t] == r->options.ignore_index) continue;
        logits(r, t, &w);
        double *dz = o->dr + t * v;
        o->lse[t] = w.lse;
        o->entropy[t] = w.entropy;
        o->nll[t] = w.lse - w.z[r->y[t]];
        int none = r->options.reduction == LL_REDUCTION_NONE;
        token_loss(r, o, t, &w, upstream(args->up_loss, none ? t : 0) / divisor, dz);
        o->loss += o->row_loss[t] / divisor;
        for (int64_t j = 0; j < v; j++) {
            dz[j] += upstream(args->up_nll, t) * (w.p[j] - (j == r->y[t])) +
                     upstream(args->up_lse, t) * w.p[j] +
                     upstream(args->up_entropy, t) * w.p[j] * (w.lse - w.entropy - w.z[j]);
            dz[j] *= w.slope[j];
            o->grad_bias[j] += dz[j];
            for (int64_t k = 0; k < d; k++) {
                o->grad_x[t * d + k] += dz[j] * rig_get(&args->w, j, k);
                o->grad_w[j * d + k] += dz[j] * rig_get(&args->x, t, k);
            }
        }
    }
    free(w.z);
    free(w.p);
    free(w.slope);
    return o;
}

void oracle_free(oracle *o) {
    double *all[] = {o->row_loss, o->nll,    o->lse,    o->entropy,  o->z_loss,
                     o->dr,       o->grad_x, o->grad_w, o->grad_bias};
    for (size_t i = 0; i < COUNT(all); i++) free(all[i]);
    free(o);
}

static void check_tokens(const char *name, const double *want, const float *got, int64_t n, double rel) {
    for (int64_t t = 0; t < n && got; t++) near_at(got[t], want[t], rel, rel, name, __FILE__, __LINE__);
}

/* dz: its relative rounding; a sum of many has less than one, and one of a single token all of it. */
static void check_matrix(const char *name, const double *want, const ll_view *got, double rel, double dz) {
    if (!got->data) return;
    rel += dz;
    double norm = 0, off = 0, largest = 0;
    for (int64_t i = 0; i < got->rows * got->cols; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < got->rows * got->cols; i++) {
        double value = rig_get(got, i / got->cols, i % got->cols);
        norm += want[i] * want[i];
        off += (value - want[i]) * (value - want[i]);
        near_at(value, want[i], 0, 10 * rel * largest, name, __FILE__, __LINE__);
    }
    near_at(sqrt(off), 0, 0, rel * sqrt(norm), name, __FILE__, __LINE__);
}

void oracle_check(const oracle *o, const rig *r, double rel) {
    const ll_linear_ce_args *a = &r->args;
    const double dz = dz_rounding((ll_dtype)a->x.dtype);
    if (a->loss && r->options.reduction == LL_REDUCTION_NONE) {
        check_tokens("loss", o->row_loss, a->loss, r->n, rel);
    } else if (a->loss) {
        check_tokens("loss", &o->loss, a->loss, 1, rel);
    }
    check_tokens("nll", o->nll, a->nll, r->n, rel);
    check_tokens("lse", o->lse, a->lse, r->n, rel);
    check_tokens("entropy", o->entropy, a->entropy, r->n, rel);
    check_tokens("z_loss", o->z_loss, a->z_loss, r->n, rel);
    check_matrix("grad_x", o->grad_x, &a->grad_x, rel, dz);
    check_matrix("grad_w", o->grad_w, &a->grad_w, rel, dz);
    check_matrix("grad_bias", o->grad_bias, &a->grad_bias, rel, 0);
}
