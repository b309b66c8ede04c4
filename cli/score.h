/* The pieces of `logitless score`: options -> inputs (checked files) -> results -> report. */
#ifndef LL_CLI_SCORE_H
#define LL_CLI_SCORE_H

#include "ranks.h"

#include "io/tensor_file.h"

typedef struct score_options {
    const char *hidden, *weight, *targets, *bias, *class_weight, *token_weight;
    const char *smoothing_rule, *reduction, *backend, *out;
    double temperature, softcap, label_smoothing, z_loss;
    int64_t ignore_index, vocab_size, threads, chunk_tokens, workspace_mb;
    cli_cut_options cut;
    bool entropy, json;
} score_options;

/* One file of an option; file is NULL where the option was not given. */
typedef struct score_operand {
    const char *option, *spec; /* "--weight", "model.safetensors:lm_head.weight" */
    lli_tensor_file *file;
    lli_tensor tensor;
} score_operand;

/* Everything is checked and agrees: hidden [n_tokens, n_hidden], weight [v_local, n_hidden], ... */
typedef struct score_inputs {
    score_operand hidden, weight, targets, bias, class_weight, token_weight;
    int64_t n_tokens, n_hidden, v_local, v_total, n_valid;
    cli_cut cut; /* of the v_local rows of weight */
} score_inputs;

/* Per-token results, n_tokens each; NULL where nobody asked. */
typedef struct score_results {
    float *loss, *nll, *lse, *entropy;
    int64_t *argmax;
    double seconds;
} score_results;

/* Opens and checks all files; CLI_EXIT_OK, or the exit code of a reported error. To be closed either way. */
int score_inputs_open(const score_options *options, score_inputs *inputs);
void score_inputs_close(score_inputs *inputs);

/* Target of token i. */
int64_t score_target(const score_inputs *inputs, int64_t i);

/* Writes --out, then prints the totals. Overwrites results->loss. */
int score_report(const score_options *options, const score_inputs *inputs, score_results *results,
                 const cli_ranks *ranks);

#endif
