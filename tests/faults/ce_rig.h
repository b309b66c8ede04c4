/* A call of ce on few rows, its operands in plain arrays: for tests of reported faults and of arguments. */
#ifndef LL_TESTS_FAULTS_CE_RIG_H
#define LL_TESTS_FAULTS_CE_RIG_H

#include "ce_run.h"

/* Every output is asked for and filled with NaN; up_loss is 1 (a row each, if the reduction is none). logits
 * and grad_logits lie in memory of their own, contiguous unless the test changes the views in `args`. */
struct ce_rig {
    ll_plan_desc desc;
    ll_loss loss;
    ll_ce_args args;
    ll_ce_state state;
    int64_t n, v;
    int64_t *target;
    float *up_loss, *loss_out, *nll, *lse, *lse_lo, *entropy, *z_loss;
    int64_t *argmax;
    ll_sums sums;
    const char *kernel;
};

/* The kernel under test: kernels_of("ce_")'s, by cmocka's state. */
struct ce_rig *ce_rig_open(const char *kernel, int64_t n, int64_t v, ll_dtype dtype);
void ce_rig_close(struct ce_rig *rig);

void ce_rig_set(struct ce_rig *rig, int64_t i, int64_t v, double z);
void ce_rig_fill(struct ce_rig *rig, double z);
double ce_rig_logit(const struct ce_rig *rig, int64_t i, int64_t v);
double ce_rig_grad(const struct ce_rig *rig, int64_t i, int64_t v);
double ce_rig_grad_sum(const struct ce_rig *rig, int64_t i);

/* The outputs filled with NaN again, then a plan and one call. */
ll_status ce_rig_try(struct ce_rig *rig, ll_pass pass);
/* The same, and the test fails with the sentence unless it is OK. */
void ce_rig_run(struct ce_rig *rig, ll_pass pass);

/* The test fails unless |got - want| <= relative |want| + absolute, or both are the same infinity or NaN. */
void ce_near(const char *what, double got, double want, double relative, double absolute);

/* Runs every test once for every runnable kernel of ce, its name as the test's state. */
typedef void ce_fault_fn(void **state);
struct ce_fault {
    const char *name;
    ce_fault_fn *run;
};
int ce_faults_main(const struct ce_fault *faults, int count);

#endif
