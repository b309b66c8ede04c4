/* Runs one call of a ce problem on one kernel, and compares results by bits. Needs POSIX setenv: the
 * including file defines _POSIX_C_SOURCE first. */
#ifndef LL_TESTS_CE_RUN_H
#define LL_TESTS_CE_RUN_H

#include "ce_problems.h"
#include "kernel_run.h"

static inline ll_status ce_pass_run(const ll_plan *plan, ll_pass pass, ll_ce_args args) {
    size_t bytes = 0;
    ll_status status = ll_plan_workspace(plan, pass, &bytes);
    if (status != LL_STATUS_OK) return status;
    size_t rounded = (bytes + 64) / 64 * 64;
    args.workspace = aligned_alloc(64, rounded);
    args.workspace_bytes = bytes;
    if (!args.workspace) return LL_STATUS_MEMORY;
    memset(args.workspace, 0xff, rounded); /* its contents must not matter */
    if (pass == LL_PASS_FORWARD) status = ll_ce_forward(plan, &args, NULL);
    if (pass == LL_PASS_BACKWARD) status = ll_ce_backward(plan, &args, NULL);
    if (pass == LL_PASS_FORWARD_BACKWARD) status = ll_ce_forward_backward(plan, &args, NULL);
    free(args.workspace);
    return status;
}

/* A plan that one kernel alone may serve. */
static inline ll_status ce_plan_of(const char *kernel, const ll_plan_desc *desc, ll_plan **plan) {
    setenv("LL_KERNEL", kernel, 1);
    const ll_status status = ll_plan_create(desc, plan);
    unsetenv("LL_KERNEL");
    return status;
}

/* kernel: its name. The sentence of a failure is printed. */
static inline ll_status ce_kernel_run(const char *kernel, const struct problem *problem, ll_pass pass,
                                      const ll_ce_args *args) {
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    ce_problem_desc(problem, &desc);
    ll_status status = ce_plan_of(kernel, &desc, &plan);
    if (status == LL_STATUS_OK) status = ce_pass_run(plan, pass, *args);
    if (status != LL_STATUS_OK) {
        printf("FAIL %s %s: %s: %s\n", problem->text, kernel, ll_status_name(status), ll_last_error());
    }
    ll_plan_destroy(plan);
    return status;
}

/* One output of a call, element by element. */
struct ce_field {
    const char *name;
    const void *data;
    size_t element_bytes;
    int64_t rows, cols, row_stride;
};

enum { kCeFields = 13, kCeGradient = 12 };

/* All outputs, the gradient last; data NULL: not there. */
static inline void ce_fields(const struct problem *p, const struct ce_results *r,
                             struct ce_field fields[kCeFields]) {
    const int64_t n = p->n_tokens, m = p->n_ids, k = p->n_top;
    const ll_view *g = &r->grad_logits;
    const struct ce_field all[kCeFields] = {
        {"loss", r->loss, 4, 1, r->n_loss, 0},
        {"nll", r->nll, 4, n, 1, 1},
        {"lse", r->lse, 4, n, 1, 1},
        {"lse_lo", r->lse_lo, 4, n, 1, 1},
        {"entropy", r->entropy, 4, n, 1, 1},
        {"z_loss", r->z_loss, 4, n, 1, 1},
        {"argmax", r->argmax, 8, n, 1, 1},
        {"sums", r->sums, 8, 1, sizeof(ll_sums) / 8, 0},
        {"id_logp", r->id_logp, 4, n, m, m},
        {"id_rank", r->id_rank, 8, n, m, m},
        {"top_ids", r->top_ids, 8, n, k, k},
        {"top_logp", r->top_logp, 4, n, k, k},
        {"grad_logits", g->data, lli_dtype_bytes(g->dtype), g->rows, g->cols, g->row_stride},
    };
    memcpy(fields, all, sizeof all);
}

/* The bits of an element, NaNs as one. */
static inline int64_t ce_bits(const struct ce_field *f, int64_t r, int64_t c) {
    const char *at = (const char *)f->data + (size_t)(r * f->row_stride + c) * f->element_bytes;
    int64_t wide;
    float narrow;
    uint16_t half;
    if (f->element_bytes == 8) return memcpy(&wide, at, 8), wide;
    if (f->element_bytes == 2) return memcpy(&half, at, 2), half;
    memcpy(&narrow, at, 4);
    return narrow != narrow ? -1 : (int64_t)lli_bits(narrow);
}

/* Number of elements in which two results of a problem differ, tokens [first, first + count) of `want` beside
 * all of `got`; the first difference of a field is printed. fields: a bit each. */
static inline int64_t ce_differences(const struct problem *problem, const char *what,
                                     const struct ce_results *got, const struct ce_results *want,
                                     uint32_t fields) {
    struct ce_field a[kCeFields], b[kCeFields];
    int64_t differences = 0;
    ce_fields(problem, got, a);
    ce_fields(problem, want, b);
    for (int f = 0; f < kCeFields; ++f) {
        int64_t here = 0;
        for (int64_t r = 0; (fields >> f & 1) && a[f].data && r < a[f].rows; ++r) {
            for (int64_t c = 0; c < a[f].cols; ++c) {
                const int64_t x = ce_bits(&a[f], r, c), y = ce_bits(&b[f], r, c);
                if (x == y || here++ > 0) continue;
                printf("FAIL %s %s: %s[%lld, %lld] has bits %llx, want %llx\n", problem->text, what,
                       a[f].name, (long long)r, (long long)c, (long long)x, (long long)y);
            }
        }
        differences += here;
    }
    return differences;
}

#endif
