/* The row part of the reference kernels: what the softmax of a token's logits gives, its loss, and what the
 * upstreams make of it. linear_ce_ref.c and ce_ref.c bring the logits and say where gradients go.
 *
 * Letters: N tokens, V real columns of the vocabulary, i a token, v a column. */
#ifndef LLI_REF_ROWS_H
#define LLI_REF_ROWS_H

#include "core/plan.h"

/* A token for the gradients. dz[i,v] is linear in four upstream coefficients, see lli_ref_dz. */
struct lli_ref_row {
    int64_t target; /* -1: ignored */
    double nll, lse, entropy;
    double up_nll, up_lse, up_entropy, up_smooth; /* up_loss is already spread over the other three */
};

/* A call's rows; memory lies in the workspace. */
struct lli_ref_rows {
    const lli_problem *problem;
    const ll_linear_ce_args *args;
    const lli_call *call;
    int64_t V;
    double smoothing_share;   /* a / V or a / (V - 1); 0 without smoothing */
    long double class_total;  /* sum_v class_weight[v] */
    struct lli_ref_row *rows; /* [N] */
    double *z;                /* [V] logits of one token */
};

struct lli_ref_logit {
    double z, slope; /* slope = dz / d(raw logit) */
};

/* What the forward finds for one token; z_loss and loss are scaled as the header says. */
struct lli_ref_result {
    double nll, lse, entropy, z_loss, loss, loss_z_part;
    int64_t argmax;
};

/* What the forward adds up. */
struct lli_ref_totals {
    long double loss, z_loss;
};

void lli_ref_carve(const lli_problem *problem, lli_arena *arena, struct lli_ref_rows *ref);
/* After carving: targets, and what does not depend on tokens. */
void lli_ref_begin(const lli_problem *problem, const lli_call *call, struct lli_ref_rows *ref);

/* factor * value where a factor of exactly 0 is a mask: 0 * inf must not make a NaN of what counts for
 * nothing. */
double lli_ref_masked(double factor, double value);

/* Softcap and temperature. */
struct lli_ref_logit lli_ref_logit(const ll_loss *loss, double raw);

/* Row results of token i: from ref->z where its target is not -1. They are written, kept for the gradients as
 * a backward would find them saved, and added to the totals. */
struct lli_ref_result lli_ref_forward_row(struct lli_ref_rows *ref, int64_t i, struct lli_ref_totals *totals);
/* The reduced loss and the sums. */
void lli_ref_forward_end(const struct lli_ref_rows *ref, const struct lli_ref_totals *totals);

/* What the backward pass got from the caller. */
void lli_ref_load_saved(struct lli_ref_rows *ref);
/* Spreads the upstreams of every token; a token that none reaches becomes as good as ignored. */
void lli_ref_spread(struct lli_ref_rows *ref);
/* dz of a logit z in column v. */
double lli_ref_dz(const struct lli_ref_rows *ref, const struct lli_ref_row *row, int64_t v, double z);

/* Element (r, c) of a gradient from its sum, rounded once. */
void lli_ref_write(const ll_view *view, int64_t r, int64_t c, bool accumulate, long double sum);

/* Of the kernels' records. */
bool lli_ref_machine_ok(char *why, size_t why_bytes);
bool lli_ref_accepts(const lli_problem *problem, char *why, size_t why_bytes);

#endif
