/* Results of `logitless check` against the reference, element by element, and against other results, bit by
 * bit. What may differ how much stands in check_scale.c. */
#include "check.h"

#include "core/dtype.h"

#include <math.h>
#include <string.h>

const char *const check_line_names[CHECK_LINES] = {"output", "hidden_grad", "weight_grad", "bias_grad"};

const char *const check_part_names[] = {"nll",    "lse",    "entropy", "loss",
                                        "argmax", "grad_x", "grad_w",  "grad_bias"};

bool check_line_passes(const check_line *line) {
    return line->used <= 1;
}

/* A NaN on either side alone is as far away as can be. */
static void compare_element(check_line *line, int32_t part, double scale, int64_t row, int64_t col,
                            double got, double want) {
    double error = fabs(got - want);
    if (isnan(error)) error = isnan(got) && isnan(want) ? 0 : INFINITY;
    const double allowed = line->atol * scale + line->rtol * fabs(want);
    const double used = error == 0 ? 0 : allowed > 0 ? error / allowed : INFINITY;
    const double size = fmax(fabs(want), line->rms);
    const double relative = error == 0 ? 0 : size > 0 ? error / size : INFINITY;
    if (error > line->max_abs) line->max_abs = error;
    if (relative > line->max_rel) line->max_rel = relative;
    if (used <= line->used) return;
    line->used = used;
    line->part = part;
    line->row = row;
    line->col = col;
    line->got = got;
    line->want = want;
}

/* x_i . w_v + b_v. */
double check_logit(const check_inputs *in, int64_t i, int64_t v) {
    const check_shape *shape = &in->shape;
    const int32_t dtype = (int32_t)shape->dtype;
    double sum = in->bias ? (double)lli_load(in->bias, dtype, v) : 0;
    for (int64_t k = 0; k < shape->n_hidden; k++) {
        sum += (double)lli_load(in->x, dtype, i * shape->n_hidden + k) *
               (double)lli_load(in->w, dtype, v * shape->n_hidden + k);
    }
    return sum;
}

/* Near ties may go either way: what counts is the logit at the place found. */
static void compare_argmax(const check_inputs *in, check_line *line, int64_t i, int64_t got, int64_t want) {
    if (got == want) return;
    const bool both = got >= 0 && got < in->shape.n_vocab && want >= 0;
    compare_element(line, CHECK_ARGMAX, 1, i, 0, both ? check_logit(in, i, got) : NAN,
                    both ? check_logit(in, i, want) : 0);
}

typedef struct gradient {
    const void *data;
    ll_dtype dtype;
} gradient;

/* got: rows [first, first + rows) of what `want` is the whole of; scales of those rows, NULL: 1. */
static void compare_gradient(check_line *line, int32_t part, int64_t first, int64_t rows, int64_t cols,
                             gradient got, gradient want, const double *scales) {
    for (int64_t r = 0; r < rows; r++) {
        const double scale = scales ? scales[first + r] : 1;
        for (int64_t c = 0; c < cols; c++) {
            compare_element(line, part, scale, first + r, c,
                            (double)lli_load(got.data, (int32_t)got.dtype, r * cols + c),
                            (double)lli_load(want.data, (int32_t)want.dtype, (first + r) * cols + c));
        }
    }
}

void check_compare(const check_world *world, const check_call *call, const check_results *got,
                   check_line lines[CHECK_LINES]) {
    const check_inputs *in = &world->inputs;
    const check_shape *shape = &in->shape;
    const check_results *want = &world->want;
    const ll_dtype g = got->grad_dtype, w = want->grad_dtype;
    const bool scaled = world->options->atol < 0;
    const double *token = scaled ? world->scales.token : NULL, *column = scaled ? world->scales.column : NULL;
    check_line *output = &lines[CHECK_OUTPUT];
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        compare_element(output, CHECK_NLL, 1, i, 0, (double)got->nll[i], (double)want->nll[i]);
        compare_element(output, CHECK_LSE, 1, i, 0, (double)got->lse[i], (double)want->lse[i]);
        compare_element(output, CHECK_ENTROPY, 1, i, 0, (double)got->entropy[i], (double)want->entropy[i]);
        compare_argmax(in, output, i, got->argmax[i], want->argmax[i]);
    }
    compare_element(output, CHECK_LOSS, 1, 0, 0, (double)got->loss, (double)want->loss);
    compare_gradient(&lines[CHECK_HIDDEN_GRAD], CHECK_GRAD_X, 0, shape->n_tokens, shape->n_hidden,
                     (gradient){got->grad_x, g}, (gradient){want->grad_x, w}, token);
    compare_gradient(&lines[CHECK_WEIGHT_GRAD], CHECK_GRAD_W, call->v_begin, call->v_local, shape->n_hidden,
                     (gradient){got->grad_w, g}, (gradient){want->grad_w, w}, column);
    if (!shape->bias) return;
    compare_gradient(&lines[CHECK_BIAS_GRAD], CHECK_GRAD_BIAS, call->v_begin, call->v_local, 1,
                     (gradient){got->grad_bias, g}, (gradient){want->grad_bias, w}, column);
}

check_difference check_bits(const check_shape *shape, const check_results *got, const check_results *want) {
    const float *const pairs[][2] = {
        {got->nll, want->nll}, {got->lse, want->lse}, {got->entropy, want->entropy}};
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        for (int part = CHECK_NLL; part <= CHECK_ENTROPY; part++) {
            uint32_t a = lli_bits(pairs[part][0][i]), b = lli_bits(pairs[part][1][i]);
            if (a != b) return (check_difference){1, part, i, 0, a, b};
        }
        uint64_t a = (uint64_t)got->argmax[i], b = (uint64_t)want->argmax[i];
        if (a != b) return (check_difference){1, CHECK_ARGMAX, i, 0, a, b};
    }
    return (check_difference){0};
}

static check_difference compare_bits(int32_t part, int64_t rows, int64_t cols, size_t element_bytes,
                                     const void *got, const void *want) {
    check_difference found = {0};
    const size_t bytes = (size_t)(rows * cols) * element_bytes;
    if (bytes == 0 || memcmp(got, want, bytes) == 0) return found;
    size_t at = 0;
    while (memcmp((const char *)got + at, (const char *)want + at, element_bytes) == 0) at += element_bytes;
    const int64_t element = (int64_t)(at / element_bytes);
    found = (check_difference){.differs = 1, .part = part, .row = element / cols, .col = element % cols};
    memcpy(&found.got, (const char *)got + at, element_bytes);
    memcpy(&found.want, (const char *)want + at, element_bytes);
    return found;
}

check_difference check_all_bits(const check_shape *shape, int64_t v_local, const check_results *got,
                                const check_results *want) {
    const size_t bytes = ll_dtype_bytes(got->grad_dtype);
    const int64_t d = shape->n_hidden;
    check_difference found = check_bits(shape, got, want);
    if (!found.differs)
        found = compare_bits(CHECK_GRAD_X, shape->n_tokens, d, bytes, got->grad_x, want->grad_x);
    if (!found.differs) found = compare_bits(CHECK_GRAD_W, v_local, d, bytes, got->grad_w, want->grad_w);
    if (found.differs || !shape->bias) return found;
    return compare_bits(CHECK_GRAD_BIAS, v_local, 1, bytes, got->grad_bias, want->grad_bias);
}
