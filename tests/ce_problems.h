/* Problems of ce: the strings of problems.h whose first part is ce (forward and gradient in one call), cef or
 * ceb, without d.
 *
 *   ce:bf16:n257:v50257:pad7:sx3:cap30:ls0.1:ign7:ids2:top5:inplace
 *
 *   f32|bf16|f16    dtype of the logits          pad#   columns beyond the vocabulary (NaN)
 *   gxf32           grad_logits in f32           sx#    row stride of the logits beyond the row, sgx# of
 * grad_logits ids# top#       ids a row, k of the top-k    inplace  the gradient goes over the logits ninf#
 * logits are -inf for all columns but every #-th
 *
 * nan#, ign#, scale#, add#, conf#, tie and the options of the loss are those of problems.h; x, w and bias are
 * not there. */
#ifndef LL_TESTS_CE_PROBLEMS_H
#define LL_TESTS_CE_PROBLEMS_H

#include "problems.h"

void ce_problem_desc(const struct problem *problem, ll_plan_desc *desc);

enum { kCeInputs = 9, kCeOutputs = 13 };

/* Inputs, deterministic in the problem's text. `args` holds every input that forward_backward takes. */
struct ce_operands {
    ll_ce_args args;
    double divisor;
    struct guarded buffers[kCeInputs];
    uint64_t checksum;
};

/* Every output, filled with NaN; in place: grad_logits holds the logits. */
struct ce_results {
    float *loss, *nll, *lse, *lse_lo, *entropy, *z_loss;
    int64_t *argmax;
    ll_sums *sums;
    float *id_logp, *top_logp;
    int64_t *id_rank, *top_ids; /* NULL without ids, without a top */
    ll_view grad_logits;
    ll_ce_state state;
    struct guarded buffers[kCeOutputs];
    int64_t n_loss;
};

/* False if memory is short. Free with the matching _destroy, also after a failure. */
bool ce_operands_create(const struct problem *problem, struct ce_operands *operands);
void ce_operands_destroy(struct ce_operands *operands);
bool ce_results_create(const struct problem *problem, const struct ce_operands *operands,
                       struct ce_results *results);
void ce_results_destroy(struct ce_results *results);

/* False if guard bytes, gaps or (inputs) any byte changed. */
bool ce_operands_intact(const struct ce_operands *operands);
bool ce_results_intact(const struct ce_results *results);

/* Arguments of a pass. In place, the logits are those in results->grad_logits. */
ll_ce_args ce_problem_args(const struct problem *problem, const struct ce_operands *operands,
                           struct ce_results *results, ll_pass pass);

/* The same call on tokens [first, first + count) only; a reduced loss stays whole. */
void ce_problem_slice(const struct problem *problem, ll_ce_args *args, int64_t first, int64_t count);

#endif
