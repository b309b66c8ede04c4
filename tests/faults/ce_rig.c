/* See ce_rig.h. */
#define _POSIX_C_SOURCE 200809L
#include "faults/ce_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static void *room(int64_t count, size_t bytes) {
    void *data = malloc((size_t)(count > 0 ? count : 1) * bytes);
    assert_non_null(data);
    memset(data, 0xff, (size_t)(count > 0 ? count : 1) * bytes);
    return data;
}

static ll_view matrix(int64_t n, int64_t v, ll_dtype dtype) {
    return ll_view_matrix(room(n * v, ll_dtype_bytes(dtype)), dtype, n, v, 0);
}

struct ce_rig *ce_rig_open(const char *kernel, int64_t n, int64_t v, ll_dtype dtype) {
    struct ce_rig *rig = calloc(1, sizeof *rig);
    const ll_plan_desc desc = LL_PLAN_DESC_INIT;
    const ll_loss loss = LL_LOSS_INIT;
    const ll_ce_args args = LL_CE_ARGS_INIT;
    const ll_ce_state state = LL_CE_STATE_INIT;
    assert_non_null(rig);
    *rig = (struct ce_rig){
        .desc = desc, .loss = loss, .args = args, .state = state, .n = n, .v = v, .kernel = kernel};
    rig->desc.op = LL_OP_CE;
    rig->desc.n_tokens_max = n;
    rig->desc.v_local = rig->desc.v_total = v;
    rig->desc.logits_dtype = (int32_t)dtype;
    rig->desc.n_threads = 2;
    rig->args.logits = matrix(n, v, dtype);
    rig->args.grad_logits = matrix(n, v, dtype);
    rig->target = room(n, sizeof *rig->target);
    for (int64_t i = 0; i < n; ++i) rig->target[i] = 0;
    rig->args.target = ll_view_vector(rig->target, LL_DTYPE_I64, n, 0);
    float **rows[] = {&rig->loss_out, &rig->nll,    &rig->lse,    &rig->lse_lo,
                      &rig->entropy,  &rig->z_loss, &rig->up_loss};
    for (int f = 0; f < 7; ++f) *rows[f] = room(n, sizeof(float));
    rig->argmax = room(n, sizeof *rig->argmax);
    for (int64_t i = 0; i < (n > 0 ? n : 1); ++i) rig->up_loss[i] = 1.0f;
    rig->args.loss = rig->loss_out;
    rig->args.nll = rig->nll;
    rig->args.lse = rig->lse;
    rig->args.lse_lo = rig->lse_lo;
    rig->args.entropy = rig->entropy;
    rig->args.z_loss = rig->z_loss;
    rig->args.argmax = rig->argmax;
    rig->args.sums = &rig->sums;
    rig->args.up_loss = rig->up_loss;
    ce_rig_fill(rig, 0.0);
    return rig;
}

void ce_rig_close(struct ce_rig *rig) {
    free(rig->args.logits.data);
    if (rig->args.grad_logits.data != rig->args.logits.data) free(rig->args.grad_logits.data);
    free(rig->target);
    free(rig->loss_out);
    free(rig->nll);
    free(rig->lse);
    free(rig->lse_lo);
    free(rig->entropy);
    free(rig->z_loss);
    free(rig->up_loss);
    free(rig->argmax);
    free(rig);
}

void ce_rig_set(struct ce_rig *rig, int64_t i, int64_t v, double z) {
    const ll_view *logits = &rig->args.logits;
    lli_store(logits->data, logits->dtype, i * logits->row_stride + v, (float)z);
}

void ce_rig_fill(struct ce_rig *rig, double z) {
    for (int64_t i = 0; i < rig->n; ++i) {
        for (int64_t v = 0; v < rig->v; ++v) ce_rig_set(rig, i, v, z);
    }
}

static double element(const ll_view *view, int64_t i, int64_t v) {
    return (double)lli_load(lli_row(view, i), view->dtype, v);
}

double ce_rig_logit(const struct ce_rig *rig, int64_t i, int64_t v) {
    return element(&rig->args.logits, i, v);
}

double ce_rig_grad(const struct ce_rig *rig, int64_t i, int64_t v) {
    return element(&rig->args.grad_logits, i, v);
}

double ce_rig_grad_sum(const struct ce_rig *rig, int64_t i) {
    double sum = 0.0;
    for (int64_t v = 0; v < rig->v; ++v) sum += ce_rig_grad(rig, i, v);
    return sum;
}

static void spoil_outputs(struct ce_rig *rig) {
    float *rows[] = {rig->loss_out, rig->nll, rig->lse, rig->lse_lo, rig->entropy, rig->z_loss};
    for (int f = 0; f < 6; ++f) memset(rows[f], 0xff, sizeof(float) * (size_t)rig->n);
}

ll_status ce_rig_try(struct ce_rig *rig, ll_pass pass) {
    ll_plan *plan = NULL;
    ll_ce_args args = rig->args;
    rig->desc.loss = &rig->loss;
    ll_status status = ce_plan_of(rig->kernel, &rig->desc, &plan);
    if (pass == LL_PASS_FORWARD) {
        args.up_loss = args.up_nll = args.up_lse = args.up_entropy = NULL;
        args.grad_logits = (ll_view){0};
        args.in_place = 0;
    }
    if (pass == LL_PASS_BACKWARD) {
        args.loss = args.z_loss = NULL;
        args.argmax = NULL;
        args.sums = NULL;
        args.ids = (ll_view){0};
        args.id_logp = args.top_logp = NULL;
        args.id_rank = args.top_ids = NULL;
    } else {
        spoil_outputs(rig);
    }
    if (status == LL_STATUS_OK) status = ce_pass_run(plan, pass, args);
    ll_plan_destroy(plan);
    return status;
}

void ce_rig_run(struct ce_rig *rig, ll_pass pass) {
    const ll_status status = ce_rig_try(rig, pass);
    if (status != LL_STATUS_OK) fail_msg("%s: %s", ll_status_name(status), ll_last_error());
}

void ce_near(const char *what, double got, double want, double relative, double absolute) {
    if (got == want || (isnan(got) && isnan(want))) return;
    if (fabs(got - want) <= relative * fabs(want) + absolute) return;
    fail_msg("%s: got %.9g, want %.9g", what, got, want);
}

int ce_faults_main(const struct ce_fault *faults, int count) {
    enum { kCases = 512, kNameBytes = 96 };
    static struct kernel_list list;
    static struct CMUnitTest cases[kCases];
    static char names[kCases][kNameBytes];
    int n = 0;
    list = kernels_of("ce_");
    for (int32_t k = 0; k < list.count; ++k) {
        for (int f = 0; f < count && n < kCases; ++f, ++n) {
            snprintf(names[n], sizeof names[n], "%s [%s]", faults[f].name, list.kernels[k].name);
            cases[n] = (struct CMUnitTest){.name = names[n],
                                           .test_func = faults[f].run,
                                           .initial_state = (void *)(uintptr_t)list.kernels[k].name};
        }
    }
    return _cmocka_run_group_tests("ce", cases, (size_t)n, NULL, NULL);
}
