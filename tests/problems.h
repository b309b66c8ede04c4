/* Problems as strings, shared by tests and benches: a failure prints the string that reruns it.
 *
 *   fb:bf16:n257:d64:v1031:cap30:t0.7:ls0.1:cw:bias:ign7:mean
 *
 *   fwd|bwd|fb      the pass a bench times (tests run all three)     first
 *   cef|ceb|ce      the same passes of ce, over given logits: ce_problems.h
 *   f32|bf16|f16    dtype of x and w; `bf16-f32`: of x, of w         second
 *   n# d# v#        tokens, hidden size, vocabulary                  required
 *   pad#            rows of w beyond the vocabulary (filled with NaN)
 *   cap# t# zl#     softcap, temperature, z-loss coefficient
 *   ls# lso#        label smoothing over all classes / over the others
 *   mean sum none   reduction (mean);  div#  the caller's divisor
 *   cw cw0          class weights; cw0: some of them are 0
 *   tw tw0 ts       token weights; tw0: every third is 0; token scaling
 *   bias biasf32    bias in w's dtype / in f32
 *   ninf#           bias -inf for all columns but every #-th: logits of -inf (implies bias); token 1's
 *                   target is such a column
 *   ign# ignall     every #-th token / every token is ignored (its row of x is NaN)
 *   id#             ignore_index (-100)
 *   nan#            every #-th token has a NaN in its row of x and is not ignored
 *   i32             targets are i32
 *   up noloss       random up_nll, up_lse, up_entropy too; no up_loss
 *   gxf32 gwf32 gbf32  dtype of a gradient
 *   fx fw fb        a gradient that is frozen and not asked for (fb after the pass: bias)
 *   acc             gradients are added to random values
 *   sx# sw# sy# sb# row stride of x and w beyond the row; step of target and bias
 *   sgx# sgw# sgb#  likewise for the gradients
 *   off1            every matrix starts one element off its alignment
 *   scale#          standard deviation of the logits (2);  add#  offset of all logits
 *   conf#           every second token's target logit is raised by about #
 *   tie             pairs of columns are equal: argmax must take the lower one
 *   th# ws# seed#   threads, workspace budget in KiB, seed */
#ifndef LL_TESTS_PROBLEMS_H
#define LL_TESTS_PROBLEMS_H

#include "guarded.h"

struct problem {
    char text[192];
    ll_op op;
    ll_pass pass;
    ll_dtype x_dtype, w_dtype, bias_dtype, grad_x_dtype, grad_w_dtype, grad_bias_dtype, target_dtype;
    int64_t n_tokens, n_hidden, v_total, v_pad;
    ll_loss loss;
    double divisor; /* 0: not given */
    bool class_weight, zero_class_weight, token_weight, zero_token_weight, upstream, no_up_loss, accumulate,
        ignore_all, tie;
    bool misaligned;
    int64_t ignore_every, nan_every, finite_every; /* 0: never; finite_every: see ninf */
    int64_t x_gap, w_gap, target_step, bias_step, grad_x_gap, grad_w_gap, grad_bias_step;
    int32_t frozen, n_threads;
    int64_t workspace_kib;
    int32_t n_ids, n_top;
    bool in_place;
    double scale, offset, confidence;
    uint64_t seed; /* from the text unless given */
};

/* NULL, or a sentence on the part that is not understood. */
const char *problem_parse(const char *text, struct problem *problem);

/* Description of the plan; desc->loss points into the problem. */
void problem_desc(const struct problem *problem, ll_plan_desc *desc);

enum { kProblemInputs = 10, kProblemOutputs = 11 };

/* Inputs of a problem, deterministic in its text, and their checksum. `args` holds every input that the
 * forward_backward pass takes; saved results and outputs are not set. */
struct operands {
    ll_linear_ce_args args;
    double divisor;
    struct guarded buffers[kProblemInputs];
    uint64_t checksum;
};

/* Every output, filled with NaN (or with what accumulation starts from); gaps between rows hold guard bytes.
 */
struct results {
    float *loss, *nll, *lse, *lse_lo, *entropy, *z_loss;
    int64_t *argmax;
    ll_sums *sums;
    ll_view grad_x, grad_w, grad_bias; /* all zeros: not asked for */
    struct guarded buffers[kProblemOutputs];
    int64_t n_loss;
};

/* False if memory is short. Free with the matching _destroy, also after a failure. */
bool operands_create(const struct problem *problem, struct operands *operands);
void operands_destroy(struct operands *operands);
bool results_create(const struct problem *problem, struct results *results);
void results_destroy(struct results *results);

/* False if guard bytes, gaps or (inputs) any byte changed. */
bool operands_intact(const struct operands *operands);
bool results_intact(const struct results *results);

/* Arguments of a pass: inputs of `operands`, outputs (for the backward also nll, lse, ... read) of `results`.
 */
ll_linear_ce_args problem_args(const struct problem *problem, const struct operands *operands,
                               const struct results *results, ll_pass pass);

/* The same call on tokens [first, first + count) only; grad_w, grad_bias and a reduced loss stay whole. */
void problem_slice(const struct problem *problem, ll_linear_ce_args *args, int64_t first, int64_t count);

/* xorshift64*: the next 64 bits; and from them a number of mean 0 and variance 1, |number| < 3.5. */
uint64_t problem_random(uint64_t *state);
double problem_normal(uint64_t *state);

#endif
