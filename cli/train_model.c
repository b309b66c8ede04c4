/* The model of train_model.h: one hidden layer in plain loops, the head by logitless, and Adam. Every sum
 * outside the head runs in one fixed order on one thread, and the head has the same bits for any number of
 * threads: so has the training. Ranks add up dL/dh in another order, so their number changes its last bits.
 * Left out: everything that a second layer would need. */
#include "train_model.h"

#include "core/dtype.h"
#include "train_tokens.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

enum { kScoreRows = 4096 }; /* tokens of a forward-only pass */

/* out[i, :] += sum_k a[i, k] b[k, :] in ascending k; a's element (i, k) is a[i a_row + k a_col]. Four k at
 * a time, so that a row of `out` is loaded and stored a quarter as often. */
static void add_product(float *restrict out, int64_t n_rows, int64_t n_cols, const float *a, int64_t a_row,
                        int64_t a_col, const float *restrict b, int64_t n_inner) {
    for (int64_t i = 0; i < n_rows; i++) {
        float *restrict row = out + i * n_cols;
        const float *a_i = a + i * a_row;
        int64_t k = 0;
        for (; k + 4 <= n_inner; k += 4) {
            const float *b0 = b + k * n_cols, *b1 = b0 + n_cols, *b2 = b1 + n_cols, *b3 = b2 + n_cols;
            float a0 = a_i[k * a_col], a1 = a_i[(k + 1) * a_col];
            float a2 = a_i[(k + 2) * a_col], a3 = a_i[(k + 3) * a_col];
            for (int64_t j = 0; j < n_cols; j++) {
                row[j] = (((row[j] + a0 * b0[j]) + a1 * b1[j]) + a2 * b2[j]) + a3 * b3[j];
            }
        }
        for (; k < n_inner; k++) {
            for (int64_t j = 0; j < n_cols; j++) row[j] += a_i[k * a_col] * b[k * n_cols + j];
        }
    }
}

/* Points into `all` as the layout says. */
static void cut_tensors(const cli_lm *lm, cli_lm_tensors *tensors) {
    const cli_lm_config *config = &lm->config;
    tensors->embedding = tensors->all;
    tensors->hidden_weight = tensors->embedding + config->n_vocab * config->n_embed;
    tensors->hidden_bias = tensors->hidden_weight + lm->n_input * config->n_hidden;
    tensors->head_weight = tensors->hidden_bias + config->n_hidden;
    tensors->head_bias = tensors->head_weight + config->n_vocab * config->n_hidden;
}

/* Uniform in [-limit, limit). */
static void fill_uniform(float *values, int64_t n, double limit, uint64_t *state) {
    for (int64_t i = 0; i < n; i++) {
        double unit = (double)(cli_random(state) >> 11) * 0x1p-53;
        values[i] = (float)((2 * unit - 1) * limit);
    }
}

static void set_parameters(cli_lm *lm) {
    const cli_lm_config *config = &lm->config;
    uint64_t state = config->seed;
    fill_uniform(lm->parameters.embedding, config->n_vocab * config->n_embed, 1.0, &state);
    fill_uniform(lm->parameters.hidden_weight, lm->n_input * config->n_hidden,
                 1.0 / sqrt((double)lm->n_input), &state);
    fill_uniform(lm->parameters.head_weight, config->n_vocab * config->n_hidden,
                 0.1 / sqrt((double)config->n_hidden), &state);
}

static ll_status create_ranks(cli_lm *lm, const cli_cut *cut, int64_t n_tokens_max, int32_t frozen,
                              int32_t passes, cli_ranks **ranks) {
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = n_tokens_max;
    desc.n_hidden = lm->config.n_hidden;
    desc.v_local = desc.v_total = lm->config.n_vocab;
    desc.x_dtype = desc.w_dtype = (int32_t)lm->config.head_dtype;
    desc.bias_dtype = LL_DTYPE_F32;
    desc.grad_x_dtype = desc.grad_w_dtype = LL_DTYPE_F32;
    desc.frozen = frozen;
    desc.n_threads = lm->config.n_threads;
    return cli_ranks_create(&desc, cut, passes, false, ranks);
}

static ll_status create_head(cli_lm *lm) {
    cli_cut cut = {0};
    ll_status status = LL_STATUS_OK;
    if (!cli_cut_even(lm->config.n_vocab, lm->config.n_ranks, &cut)) {
        status = lli_fail(LL_STATUS_MEMORY, "train: no memory for %d ranks", (int)lm->config.n_ranks);
    }
    if (status == LL_STATUS_OK) {
        status = create_ranks(lm, &cut, lm->config.n_batch, 0, CLI_FORWARD_BACKWARD, &lm->train);
    }
    if (status == LL_STATUS_OK) {
        status = create_ranks(lm, &cut, lm->n_rows_max, LL_FROZEN_X | LL_FROZEN_W | LL_FROZEN_BIAS,
                              CLI_FORWARD, &lm->score);
    }
    cli_cut_free(&cut);
    return status;
}

/* Every array of the model: zeros, 64-byte aligned. One list serves creation and release. */
typedef struct array {
    void *slot; /* address of the pointer */
    int64_t n_elements;
    size_t element_bytes;
} array;

enum { kArrays = 14 };

static void list_arrays(cli_lm *lm, array arrays[kArrays]) {
    const cli_lm_config *config = &lm->config;
    int64_t n_rows = lm->n_rows_max, n_batch = config->n_batch, n_hidden = config->n_hidden;
    bool narrow = config->head_dtype != LL_DTYPE_F32; /* else the head reads the f32 arrays themselves */
    size_t given_bytes = ll_dtype_bytes(config->head_dtype);
    const array list[kArrays] = {
        {&lm->parameters.all, lm->n_parameters, sizeof(float)},
        {&lm->gradients.all, lm->n_parameters, sizeof(float)},
        {&lm->moment1.all, lm->n_parameters, sizeof(float)},
        {&lm->moment2.all, lm->n_parameters, sizeof(float)},
        {&lm->positions, n_rows, sizeof(int64_t)},
        {&lm->context, n_rows * config->n_context, sizeof(int32_t)},
        {&lm->target, n_rows, sizeof(int32_t)},
        {&lm->input, n_rows * lm->n_input, sizeof(float)},
        {&lm->hidden, n_rows * n_hidden, sizeof(float)},
        {&lm->grad_hidden, n_batch * n_hidden, sizeof(float)},
        {&lm->grad_input, n_batch * lm->n_input, sizeof(float)},
        {&lm->hidden_weight_t, lm->n_input * n_hidden, sizeof(float)},
        {&lm->head_weight_narrow, narrow ? config->n_vocab * n_hidden : 0, given_bytes},
        {&lm->hidden_narrow, narrow ? n_rows * n_hidden : 0, given_bytes},
    };
    memcpy(arrays, list, sizeof list);
}

static ll_status allocate_arrays(cli_lm *lm) {
    array arrays[kArrays];
    list_arrays(lm, arrays);
    for (int i = 0; i < kArrays; i++) {
        size_t bytes = ((size_t)arrays[i].n_elements * arrays[i].element_bytes + 63) / 64 * 64;
        if (bytes == 0) continue;
        void *memory = aligned_alloc(64, bytes);
        LLI_REQUIRE(memory, LL_STATUS_MEMORY, "train: no memory for %zu bytes of the model", bytes);
        memset(memory, 0, bytes);
        memcpy(arrays[i].slot, &memory, sizeof memory);
    }
    return LL_STATUS_OK;
}

ll_status cli_lm_create(const cli_lm_config *config, cli_lm *lm) {
    memset(lm, 0, sizeof *lm);
    lm->config = *config;
    lm->n_input = config->n_context * config->n_embed;
    lm->n_parameters =
        config->n_vocab * (config->n_embed + config->n_hidden + 1) + (lm->n_input + 1) * config->n_hidden;
    lm->n_rows_max = config->n_batch > kScoreRows ? config->n_batch : kScoreRows;
    LLI_TRY(create_head(lm));
    LLI_TRY(allocate_arrays(lm));
    cut_tensors(lm, &lm->parameters);
    cut_tensors(lm, &lm->gradients);
    set_parameters(lm);
    return LL_STATUS_OK;
}

void cli_lm_free(cli_lm *lm) {
    array arrays[kArrays];
    list_arrays(lm, arrays);
    for (int i = kArrays - 1; i >= 0; i--) {
        void *memory;
        memcpy(&memory, arrays[i].slot, sizeof memory);
        free(memory);
    }
    cli_ranks_destroy(lm->score);
    cli_ranks_destroy(lm->train);
    memset(lm, 0, sizeof *lm);
}

/* h of tokens[positions[0..n)] and the targets. A context ends at its paragraph's begin: the ends of
 * paragraphs stand in for what would be before it, so no paragraph sees its neighbour. */
static void run_hidden_layer(cli_lm *lm, const int32_t *tokens, const int64_t *positions, int64_t n) {
    int64_t n_context = lm->config.n_context, n_embed = lm->config.n_embed, n_hidden = lm->config.n_hidden;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = 0;
        lm->target[i] = tokens[positions[i]];
        for (int64_t back = 1; back <= n_context; back++) {
            int64_t slot = i * n_context + n_context - back;
            if (id != kParagraphEnd) id = back <= positions[i] ? tokens[positions[i] - back] : kParagraphEnd;
            lm->context[slot] = id;
            memcpy(lm->input + slot * n_embed, lm->parameters.embedding + id * n_embed,
                   (size_t)n_embed * sizeof(float));
        }
        memcpy(lm->hidden + i * n_hidden, lm->parameters.hidden_bias, (size_t)n_hidden * sizeof(float));
    }
    add_product(lm->hidden, n, n_hidden, lm->input, lm->n_input, 1, lm->parameters.hidden_weight,
                lm->n_input);
    for (int64_t i = 0; i < n * n_hidden; i++) lm->hidden[i] = tanhf(lm->hidden[i]);
}

/* The head's operands of n rows; in bf16 both are rounded from their f32 masters. */
static ll_linear_ce_args head_args(cli_lm *lm, int64_t n) {
    int64_t n_vocab = lm->config.n_vocab, n_hidden = lm->config.n_hidden;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    const void *x = lm->hidden;
    if (lm->hidden_narrow) {
        x = lm->hidden_narrow;
        for (int64_t i = 0; i < n * n_hidden; i++) lm->hidden_narrow[i] = lli_f32_to_bf16(lm->hidden[i]);
    }
    args.x = ll_view_matrix(x, lm->config.head_dtype, n, n_hidden, 0);
    args.w = ll_view_matrix(cli_lm_head_weight(lm), lm->config.head_dtype, n_vocab, n_hidden, 0);
    args.bias = ll_view_vector(lm->parameters.head_bias, LL_DTYPE_F32, n_vocab, 0);
    args.target = ll_view_vector(lm->target, LL_DTYPE_I32, n, 0);
    return args;
}

const void *cli_lm_head_weight(cli_lm *lm) {
    if (!lm->head_weight_narrow) return lm->parameters.head_weight;
    for (int64_t i = 0; i < lm->config.n_vocab * lm->config.n_hidden; i++) {
        lm->head_weight_narrow[i] = lli_f32_to_bf16(lm->parameters.head_weight[i]);
    }
    return lm->head_weight_narrow;
}

/* From dL/dh in grad_hidden to the gradients of u, U and E. */
static void run_hidden_layer_backward(cli_lm *lm, int64_t n) {
    int64_t n_embed = lm->config.n_embed, n_hidden = lm->config.n_hidden, n_input = lm->n_input;
    cli_lm_tensors *gradients = &lm->gradients;
    memset(gradients->all, 0, (size_t)(gradients->head_weight - gradients->all) * sizeof(float));
    memset(lm->grad_input, 0, (size_t)(n * n_input) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        float *grad = lm->grad_hidden + i * n_hidden;
        const float *h = lm->hidden + i * n_hidden;
        for (int64_t j = 0; j < n_hidden; j++) {
            grad[j] *= 1 - h[j] * h[j];
            gradients->hidden_bias[j] += grad[j];
        }
    }
    add_product(gradients->hidden_weight, n_input, n_hidden, lm->input, 1, n_input, lm->grad_hidden, n);
    for (int64_t k = 0; k < n_input; k++) {
        for (int64_t j = 0; j < n_hidden; j++) {
            lm->hidden_weight_t[j * n_input + k] = lm->parameters.hidden_weight[k * n_hidden + j];
        }
    }
    add_product(lm->grad_input, n, n_input, lm->grad_hidden, n_hidden, 1, lm->hidden_weight_t, n_hidden);
    for (int64_t slot = 0; slot < n * lm->config.n_context; slot++) {
        float *row = gradients->embedding + lm->context[slot] * n_embed;
        for (int64_t j = 0; j < n_embed; j++) row[j] += lm->grad_input[slot * n_embed + j];
    }
}

/* Kingma and Ba, 2015; both bias corrections are in the rate, epsilon is scaled along. */
static void step_adam(cli_lm *lm, float learning_rate) {
    const float decay1 = 0.9f, decay2 = 0.999f;
    double t = (double)++lm->n_steps;
    float correction2 = (float)sqrt(1 - pow(decay2, t));
    float rate = learning_rate * correction2 / (float)(1 - pow(decay1, t)), epsilon = 1e-8f * correction2;
    float *restrict value = lm->parameters.all, *restrict mean = lm->moment1.all;
    float *restrict square = lm->moment2.all;
    const float *restrict grad = lm->gradients.all;
    for (int64_t i = 0; i < lm->n_parameters; i++) {
        mean[i] = decay1 * mean[i] + (1 - decay1) * grad[i];
        square[i] = decay2 * square[i] + (1 - decay2) * (grad[i] * grad[i]);
        value[i] -= rate * mean[i] / (sqrtf(square[i]) + epsilon);
    }
}

ll_status cli_lm_gradients(cli_lm *lm, const int32_t *tokens, const int64_t *positions, int64_t n,
                           double *loss) {
    const float one = 1;
    int64_t n_vocab = lm->config.n_vocab, n_hidden = lm->config.n_hidden;
    ll_sums sums;
    run_hidden_layer(lm, tokens, positions, n);
    ll_linear_ce_args args = head_args(lm, n);
    args.up_loss = &one;
    args.sums = &sums;
    args.grad_x = ll_view_matrix(lm->grad_hidden, LL_DTYPE_F32, n, n_hidden, 0);
    args.grad_w = ll_view_matrix(lm->gradients.head_weight, LL_DTYPE_F32, n_vocab, n_hidden, 0);
    args.grad_bias = ll_view_vector(lm->gradients.head_bias, LL_DTYPE_F32, n_vocab, 0);
    LLI_TRY(cli_ranks_run(lm->train, LL_PASS_FORWARD_BACKWARD, &args));
    run_hidden_layer_backward(lm, n);
    *loss = sums.loss;
    return LL_STATUS_OK;
}

ll_status cli_lm_step(cli_lm *lm, const int32_t *tokens, const int64_t *positions, int64_t n,
                      float learning_rate, double *loss) {
    LLI_TRY(cli_lm_gradients(lm, tokens, positions, n, loss));
    step_adam(lm, learning_rate);
    return LL_STATUS_OK;
}

ll_status cli_lm_score(cli_lm *lm, const int32_t *tokens, int64_t n_tokens, float *nll, void *hidden) {
    size_t row_bytes = (size_t)lm->config.n_hidden * ll_dtype_bytes(lm->config.head_dtype);
    for (int64_t begin = 0; begin < n_tokens; begin += lm->n_rows_max) {
        int64_t n = n_tokens - begin < lm->n_rows_max ? n_tokens - begin : lm->n_rows_max;
        for (int64_t i = 0; i < n; i++) lm->positions[i] = begin + i;
        run_hidden_layer(lm, tokens, lm->positions, n);
        ll_linear_ce_args args = head_args(lm, n);
        args.nll = nll + begin;
        LLI_TRY(cli_ranks_run(lm->score, LL_PASS_FORWARD, &args));
        if (hidden) memcpy((char *)hidden + (size_t)begin * row_bytes, args.x.data, (size_t)n * row_bytes);
    }
    return LL_STATUS_OK;
}
