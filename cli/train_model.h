/* A neural n-gram language model (Bengio et al., 2003) for `logitless train`:
 *
 *   x = [E[t-C], ..., E[t-1]]      the embeddings of the last C tokens, one after the other
 *   h = tanh(x U + u)
 *   z = W h + b,  p = softmax(z)   the head: logitless, z is never in memory
 */
#ifndef LL_CLI_TRAIN_MODEL_H
#define LL_CLI_TRAIN_MODEL_H

#include "ranks.h"

#include "core/status.h"

typedef struct cli_lm_config {
    int64_t n_vocab, n_context, n_embed, n_hidden, n_batch;
    ll_dtype head_dtype; /* of W and h as the head sees them: f32 or bf16; sums and parameters are f32 */
    int32_t n_ranks, n_threads; /* the head's vocabulary is cut evenly; threads of all ranks, 0: default */
    uint64_t seed;
} cli_lm_config;

/* Parameters, and in the same layout their gradients and Adam's two moments:
 *
 *   | embedding E | hidden_weight U | hidden_bias u | head_weight W | head_bias b |
 *   | [V, n_embed]| [C n_embed, n_hidden] | [n_hidden] | [V, n_hidden] | [V]     | */
typedef struct cli_lm_tensors {
    float *all, *embedding, *hidden_weight, *hidden_bias, *head_weight, *head_bias;
} cli_lm_tensors;

typedef struct cli_lm {
    cli_lm_config config;
    int64_t n_input, n_parameters; /* n_input = C n_embed */
    int64_t n_steps;               /* taken so far */
    cli_lm_tensors parameters, gradients, moment1, moment2;
    int64_t n_rows_max; /* tokens of a pass: the batch, or a larger chunk when nothing is learned */
    int64_t *positions;
    int32_t *context, *target;
    float *input, *hidden, *grad_hidden, *grad_input;
    float *hidden_weight_t; /* U transposed: every product's inner loop runs along rows */
    uint16_t *head_weight_narrow, *hidden_narrow; /* NULL: head_dtype is f32 */
    cli_ranks *train, *score;                     /* forward_backward of a batch; forward of n_rows_max */
} cli_lm;

/* Equal configs give equal parameters. MEMORY, or what ll_plan_create says; free it in every case. */
ll_status cli_lm_create(const cli_lm_config *config, cli_lm *lm);
void cli_lm_free(cli_lm *lm);

/* The next number of a sequence that the seed in *state fixes; splitmix64 (Steele et al., 2014). */
static inline uint64_t cli_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* W as the head sees it, [V, n_hidden] in head_dtype; valid until the next step. */
const void *cli_lm_head_weight(cli_lm *lm);

/* lm->gradients of the mean loss of tokens[positions[0..n)], n <= n_batch, each predicted from the tokens
 * before it in its paragraph; *loss is the sum of the n losses. */
ll_status cli_lm_gradients(cli_lm *lm, const int32_t *tokens, const int64_t *positions, int64_t n,
                           double *loss);

/* The same, then one step of Adam. *loss is from before the step. */
ll_status cli_lm_step(cli_lm *lm, const int32_t *tokens, const int64_t *positions, int64_t n,
                      float learning_rate, double *loss);

/* nll[i] of every token; hidden: NULL, or [n_tokens, n_hidden] in head_dtype, the head's inputs. */
ll_status cli_lm_score(cli_lm *lm, const int32_t *tokens, int64_t n_tokens, float *nll, void *hidden);

#endif
