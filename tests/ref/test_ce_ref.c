/* The reference kernel of ce against a second writing of the definition: row results in long double, the
 * gradient by central differences of J, ids by their definition; each option alone and every pair. Hand
 * values are in tests/faults/test_ce_faults.c, the other kernels in tests/core. */
#define _POSIX_C_SOURCE 200809L
#include "ce_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define REF "ce_ref"

enum { kTokens = 5, kVocab = 7 };

struct model {
    const struct problem *problem;
    const ll_ce_args *args;
    long double raw[kTokens][kVocab], scale[kTokens], divisor;
    int64_t target[kTokens]; /* -1: ignored */
};

struct values {
    long double z[kVocab], lse, nll, entropy, loss; /* loss: before s and the divisor */
};

static long double weight(const struct model *m, int64_t v) {
    return m->args->class_weight ? (long double)m->args->class_weight[v] : 1.0L;
}

static struct values values_of(const struct model *m, int64_t i) {
    const ll_loss *loss = &m->problem->loss;
    const long double a = loss->label_smoothing, c = loss->z_loss, cap = loss->softcap;
    const int64_t y = m->target[i];
    const bool others = loss->smoothing_rule == LL_SMOOTHING_OTHERS;
    struct values r = {{0}, 0, 0, 0, 0};
    long double sum = 0.0L, mean = 0.0L, smooth = 0.0L;
    for (int64_t v = 0; v < kVocab; ++v) {
        r.z[v] = m->raw[i][v];
        if (cap > 0.0L) r.z[v] = cap * tanhl(r.z[v] / cap);
        r.z[v] /= (long double)loss->temperature;
        sum += expl(r.z[v]);
    }
    r.lse = logl(sum);
    for (int64_t v = 0; v < kVocab; ++v) {
        mean += expl(r.z[v] - r.lse) * r.z[v];
        if (!others || v != y) smooth += weight(m, v) * (r.lse - r.z[v]);
    }
    r.entropy = r.lse - mean;
    r.nll = r.lse - r.z[y];
    r.loss =
        (1.0L - a) * weight(m, y) * r.nll + a / (others ? kVocab - 1 : kVocab) * smooth + c * r.lse * r.lse;
    return r;
}

static long double up(const float *values, int64_t i) {
    return values ? (long double)values[i] : 0.0L;
}

/* J as a function of the raw logits; s[i] is a constant. */
static long double objective(const struct model *m) {
    const bool none = m->problem->loss.reduction == LL_REDUCTION_NONE;
    long double j = 0.0L;
    for (int64_t i = 0; i < kTokens; ++i) {
        if (m->target[i] < 0) continue;
        const struct values r = values_of(m, i);
        /* A divisor of 0, where every valid target has weight 0, leaves no loss. */
        if (m->divisor > 0.0L) j += up(m->args->up_loss, none ? i : 0) * m->scale[i] * r.loss / m->divisor;
        j += up(m->args->up_nll, i) * r.nll + up(m->args->up_lse, i) * r.lse;
        j += up(m->args->up_entropy, i) * r.entropy;
    }
    return j;
}

static struct model model_of(const struct problem *p, const ll_ce_args *args) {
    struct model m = {.problem = p, .args = args, .divisor = 1.0L};
    long double total = 0.0L;
    for (int64_t i = 0; i < kTokens; ++i) {
        const int64_t y = lli_id(&args->target, i);
        m.target[i] = y == p->loss.ignore_index ? -1 : y;
        if (m.target[i] < 0) continue;
        total += weight(&m, y);
        for (int64_t v = 0; v < kVocab; ++v) {
            m.raw[i][v] = (long double)lli_load(lli_row(&args->logits, i), args->logits.dtype, v);
        }
        m.scale[i] = args->token_weight ? (long double)args->token_weight[i] : 1.0L;
        if (p->loss.token_scaling) m.scale[i] *= expl(-values_of(&m, i).nll);
    }
    if (p->loss.reduction == LL_REDUCTION_MEAN) {
        m.divisor = args->divisor ? (long double)*args->divisor : total;
    }
    return m;
}

static void near(const char *text, const char *what, int64_t i, int64_t v, double got, long double want,
                 double bound) {
    if (fabs(got - (double)want) <= bound) return;
    fail_msg("%s: %s[%lld, %lld] got %.9g, want %.9g", text, what, (long long)i, (long long)v, got,
             (double)want);
}

static void check_rows(const struct model *m, const struct ce_results *r) {
    const char *text = m->problem->text;
    for (int64_t i = 0; i < kTokens; ++i) {
        if (m->target[i] < 0) {
            assert_true(r->nll[i] == 0.0f && r->lse[i] == 0.0f && r->argmax[i] == -1);
            assert_true(r->id_rank[2 * i] == 0 && r->top_ids[3 * i] == -1);
            continue;
        }
        const struct values want = values_of(m, i);
        near(text, "nll", i, 0, r->nll[i], want.nll, 1e-6 * (1.0 + fabs((double)want.nll)));
        near(text, "lse", i, 0, r->lse[i], want.lse, 1e-6 * (1.0 + fabs((double)want.lse)));
        near(text, "entropy", i, 0, r->entropy[i], want.entropy, 1e-6);
        for (int64_t j = 0; j < 2; ++j) {
            const int64_t id = lli_id_at(&m->args->ids, i, j);
            int64_t rank = 1;
            if (id < 0) continue;
            for (int64_t v = 0; v < kVocab; ++v) rank += m->raw[i][v] > m->raw[i][id];
            near(text, "id_logp", i, j, r->id_logp[2 * i + j], want.z[id] - want.lse, 1e-5);
            assert_int_equal(r->id_rank[2 * i + j], rank);
        }
        for (int64_t k = 0; k < 3; ++k) { /* exactly k columns come before the k-th of the top */
            const int64_t column = r->top_ids[3 * i + k];
            int64_t before = 0;
            for (int64_t v = 0; v < kVocab; ++v) {
                before +=
                    m->raw[i][v] > m->raw[i][column] || (m->raw[i][v] == m->raw[i][column] && v < column);
            }
            assert_int_equal(before, k);
            near(text, "top_logp", i, k, r->top_logp[3 * i + k], want.z[column] - want.lse, 1e-5);
        }
    }
}

static void check_gradient(struct model *m, const struct ce_results *r) {
    const long double h = 1e-4L;
    for (int64_t i = 0; i < kTokens; ++i) {
        for (int64_t v = 0; v < kVocab; ++v) {
            const float got = lli_load(lli_row(&r->grad_logits, i), r->grad_logits.dtype, v);
            const long double at = m->raw[i][v];
            m->raw[i][v] = at + h;
            const long double above = objective(m);
            m->raw[i][v] = at - h;
            const long double want = (above - objective(m)) / (2.0L * h);
            m->raw[i][v] = at;
            near(m->problem->text, "grad_logits", i, v, got, want, 2e-6 + 1e-6 * fabs((double)want));
            if (m->target[i] < 0) assert_true(got == 0.0f);
        }
    }
}

static void check(const char *options) {
    struct problem problem;
    struct ce_operands operands;
    struct ce_results apart, both;
    char text[192];
    snprintf(text, sizeof text, "ce:f32:n5:v7:ids2:top3%s", options);
    const char *why = problem_parse(text, &problem);
    if (why) fail_msg("%s", why);
    assert_true(ce_operands_create(&problem, &operands));
    assert_true(ce_results_create(&problem, &operands, &apart));
    assert_true(ce_results_create(&problem, &operands, &both));
    ll_ce_args args = ce_problem_args(&problem, &operands, &both, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(ce_kernel_run(REF, &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    struct model model = model_of(&problem, &args);
    check_rows(&model, &both);
    check_gradient(&model, &both);
    args = ce_problem_args(&problem, &operands, &apart, LL_PASS_FORWARD);
    assert_int_equal(ce_kernel_run(REF, &problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
    args = ce_problem_args(&problem, &operands, &apart, LL_PASS_BACKWARD);
    assert_int_equal(ce_kernel_run(REF, &problem, LL_PASS_BACKWARD, &args), LL_STATUS_OK);
    assert_int_equal(ce_differences(&problem, "in two passes", &apart, &both, (1u << kCeFields) - 1), 0);
    assert_true(ce_operands_intact(&operands) && ce_results_intact(&apart) && ce_results_intact(&both));
    ce_results_destroy(&both);
    ce_results_destroy(&apart);
    ce_operands_destroy(&operands);
}

static const char *const options[] = {
    "",     ":cap3", ":t0.7", ":ls0.1", ":lso0.3",    ":zl0.01", ":cw",       ":cw0",   ":tw", ":ts",
    ":sum", ":none", ":div7", ":up",    ":noloss:up", ":ign3",   ":sx2:sgx3", ":conf6", ":tie"};
enum { kOptions = sizeof options / sizeof options[0] };

/* A divisor is for the mean alone, and the two smoothing rules exclude each other. */
static bool go_together(const char *a, const char *b) {
    const bool divisor = strstr(a, "div") || strstr(b, "div");
    const bool reduced = strstr(a, "sum") || strstr(b, "sum") || strstr(a, "none") || strstr(b, "none");
    return !(divisor && reduced) && !(strstr(a, "ls") && strstr(b, "ls")) &&
           !(strstr(a, "sum") && strstr(b, "none"));
}

static void options_alone_and_in_pairs(void **state) {
    (void)state;
    for (int a = 0; a < kOptions; ++a) {
        for (int b = a; b < kOptions; ++b) {
            char both[64];
            if (!go_together(options[a], options[b])) continue;
            snprintf(both, sizeof both, "%s%s", options[a], a == b ? "" : options[b]);
            check(both);
        }
    }
    check(":cap4:t1.3:ls0.2:zl0.01:cw:tw:ts:up:ign4");
    check(":cap4:t1.3:lso0.2:zl0.01:cw:tw:ts:up:none");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(options_alone_and_in_pairs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
