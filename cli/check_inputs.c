/* Inputs and results of `logitless check`. Every number is a function of the seed, the array and the index
 * alone, so that each rank can make any rows without the others. */
#include "check.h"

#include "core/dtype.h"
#include "core/status.h"
#include "train_model.h" /* cli_random */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { kStreamX, kStreamW, kStreamBias, kStreamTarget, kStreamNll, kStreamLse, kStreamEntropy };
enum { kIgnoredEvery = 16, kIgnored = 5, kIgnoreIndex = -100 };

/* Where the sequence of an array starts; element i is the i-th number of splitmix64 from there. */
static uint64_t stream_of(uint64_t seed, int stream) {
    uint64_t state = seed;
    state = cli_random(&state) + (uint64_t)stream;
    return cli_random(&state);
}

/* The sum of four uniform numbers, scaled to variance 1: whole numbers and one rounding, the same everywhere.
 */
static double normal_at(uint64_t stream, int64_t index) {
    uint64_t state = stream + (uint64_t)index * 0x9e3779b97f4a7c15u, bits = cli_random(&state);
    int64_t sum = 0;
    for (int part = 0; part < 4; part++) sum += (int64_t)(bits >> (16 * part) & 0xffffu);
    return (double)(sum - 131070) * (1.7320508075688772 / 65536.0);
}

static bool is_ignored(int64_t token) {
    return token % kIgnoredEvery == kIgnored;
}

/* Targets of tokens 0, 1, ... are spread evenly over the vocabulary (steps of the golden ratio), so that
 * every shard owns about its share of them. */
static int64_t target_at(const check_shape *shape, int64_t token) {
    uint64_t place = stream_of(shape->seed, kStreamTarget) + (uint64_t)token * 0x9e3779b97f4a7c15u;
    return (int64_t)((place >> 32) * (uint64_t)shape->n_vocab >> 32);
}

/* Zeros; NULL once anything could not be had, so that what fits is not filled in vain. */
static void *take(int64_t count, size_t element_bytes, bool *ok) {
    if (!*ok) return NULL;
    size_t bytes = ((size_t)count * element_bytes + 64) / 64 * 64; /* never 0 */
    void *memory = aligned_alloc(64, bytes);
    if (memory) memset(memory, 0, bytes);
    *ok = memory != NULL;
    return memory;
}

/* An ignored token's row is NaN: it must reach nothing. */
static void fill_tokens(check_inputs *in) {
    const check_shape *shape = &in->shape;
    const uint64_t x = stream_of(shape->seed, kStreamX);
    const struct {
        int stream;
        float *values;
    } upstreams[] = {{kStreamNll, in->up_nll}, {kStreamLse, in->up_lse}, {kStreamEntropy, in->up_entropy}};
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        in->target[i] = is_ignored(i) ? kIgnoreIndex : target_at(shape, i);
        in->n_valid += !is_ignored(i);
        for (int64_t k = 0; k < shape->n_hidden; k++) {
            int64_t at = i * shape->n_hidden + k;
            lli_store(in->x, (int32_t)shape->dtype, at, is_ignored(i) ? NAN : (float)normal_at(x, at));
        }
        for (int u = 0; u < 3; u++) {
            upstreams[u].values[i] = (float)(0.5 * normal_at(stream_of(shape->seed, upstreams[u].stream), i));
        }
    }
    in->up_loss = 0.5f * (float)in->n_valid; /* the mean divides by n_valid: each token's share is 0.5 */
}

ll_status check_inputs_create(const check_shape *shape, int64_t v_begin, int64_t v_local, check_inputs *in) {
    const size_t element_bytes = ll_dtype_bytes(shape->dtype);
    const int64_t n_hidden = shape->n_hidden;
    bool ok = true;
    *in = (check_inputs){.shape = *shape, .v_begin = v_begin, .v_local = v_local};
    in->x = take(shape->n_tokens * n_hidden, element_bytes, &ok);
    in->w = take(v_local * n_hidden, element_bytes, &ok);
    if (shape->bias) in->bias = take(v_local, element_bytes, &ok);
    in->target = take(shape->n_tokens, sizeof *in->target, &ok);
    in->up_nll = take(shape->n_tokens, sizeof(float), &ok);
    in->up_lse = take(shape->n_tokens, sizeof(float), &ok);
    in->up_entropy = take(shape->n_tokens, sizeof(float), &ok);
    LLI_REQUIRE(ok, LL_STATUS_MEMORY, "check: no memory for %lld tokens and %lld rows of %lld",
                (long long)shape->n_tokens, (long long)v_local, (long long)n_hidden);
    const uint64_t w = stream_of(shape->seed, kStreamW), bias = stream_of(shape->seed, kStreamBias);
    const double scale = CHECK_LOGIT_STD / sqrt((double)n_hidden);
    for (int64_t at = 0; at < v_local * n_hidden; at++) {
        lli_store(in->w, (int32_t)shape->dtype, at, (float)(scale * normal_at(w, v_begin * n_hidden + at)));
    }
    for (int64_t v = 0; in->bias && v < v_local; v++) {
        lli_store(in->bias, (int32_t)shape->dtype, v, (float)(0.5 * normal_at(bias, v_begin + v)));
    }
    fill_tokens(in);
    return LL_STATUS_OK;
}

void check_inputs_free(check_inputs *in) {
    free(in->x);
    free(in->w);
    free(in->bias);
    free(in->target);
    free(in->up_nll);
    free(in->up_lse);
    free(in->up_entropy);
    *in = (check_inputs){0};
}

uint64_t check_hash(uint64_t hash, const void *data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof hash) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + at, bytes - at < sizeof word ? bytes - at : sizeof word);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 32; /* or flips of the highest bits of two words would cancel: signs of floats */
    }
    return hash;
}

uint64_t check_inputs_hash(const check_inputs *in) {
    const size_t n = (size_t)in->shape.n_tokens, row = (size_t)in->shape.n_hidden;
    const size_t element_bytes = ll_dtype_bytes(in->shape.dtype);
    uint64_t hash = check_hash(CHECK_HASH, in->x, n * row * element_bytes);
    hash = check_hash(hash, in->w, (size_t)in->v_local * row * element_bytes);
    if (in->bias) hash = check_hash(hash, in->bias, (size_t)in->v_local * element_bytes);
    hash = check_hash(hash, in->target, n * sizeof *in->target);
    hash = check_hash(hash, &in->up_loss, sizeof in->up_loss);
    hash = check_hash(hash, in->up_nll, n * sizeof(float));
    hash = check_hash(hash, in->up_lse, n * sizeof(float));
    return check_hash(hash, in->up_entropy, n * sizeof(float));
}

ll_status check_results_create(const check_shape *shape, int64_t v_local, ll_dtype grad_dtype,
                               check_results *results) {
    const size_t grad_bytes = ll_dtype_bytes(grad_dtype);
    bool ok = true;
    *results = (check_results){.grad_dtype = grad_dtype};
    float **floats[] = {&results->nll, &results->lse, &results->lse_lo, &results->entropy};
    for (int f = 0; f < 4; f++) *floats[f] = take(shape->n_tokens, sizeof(float), &ok);
    results->argmax = take(shape->n_tokens, sizeof *results->argmax, &ok);
    results->grad_x = take(shape->n_tokens * shape->n_hidden, grad_bytes, &ok);
    results->grad_w = take(v_local * shape->n_hidden, grad_bytes, &ok);
    if (shape->bias) results->grad_bias = take(v_local, grad_bytes, &ok);
    LLI_REQUIRE(ok, LL_STATUS_MEMORY, "check: no memory for the results of %lld tokens and %lld rows of %lld",
                (long long)shape->n_tokens, (long long)v_local, (long long)shape->n_hidden);
    return LL_STATUS_OK;
}

void check_results_free(check_results *results) {
    free(results->nll);
    free(results->lse);
    free(results->lse_lo);
    free(results->entropy);
    free(results->argmax);
    free(results->grad_x);
    free(results->grad_w);
    free(results->grad_bias);
    *results = (check_results){0};
}

uint64_t check_hash_shared(const check_shape *shape, const check_results *results) {
    const size_t n = (size_t)shape->n_tokens, grad_bytes = ll_dtype_bytes(results->grad_dtype);
    uint64_t hash = check_hash(CHECK_HASH, &results->loss, sizeof results->loss);
    hash = check_hash(hash, results->nll, n * sizeof(float));
    hash = check_hash(hash, results->lse, n * sizeof(float));
    hash = check_hash(hash, results->entropy, n * sizeof(float));
    hash = check_hash(hash, results->argmax, n * sizeof *results->argmax);
    return check_hash(hash, results->grad_x, n * (size_t)shape->n_hidden * grad_bytes);
}

uint64_t check_hash_shard(const check_shape *shape, int64_t v_local, const check_results *results) {
    const size_t rows = (size_t)v_local, grad_bytes = ll_dtype_bytes(results->grad_dtype);
    uint64_t hash = check_hash(CHECK_HASH, results->grad_w, rows * (size_t)shape->n_hidden * grad_bytes);
    return results->grad_bias ? check_hash(hash, results->grad_bias, rows * grad_bytes) : hash;
}
