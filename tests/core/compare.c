/* See compare.h. */
#include "core/compare.h"
#include "core/dtype.h"

#include <math.h>
#include <stdio.h>

const char *const field_names[kFields] = {"loss",   "nll",    "lse",    "lse_lo", "entropy",
                                          "z_loss", "argmax", "grad_x", "grad_w", "grad_bias"};

ll_view results_field(const struct problem *problem, const struct results *results, enum field field) {
    const float *const floats[] = {results->loss,   results->nll,     results->lse,
                                   results->lse_lo, results->entropy, results->z_loss};
    if (field == FIELD_GRAD_X) return results->grad_x;
    if (field == FIELD_GRAD_W) return results->grad_w;
    if (field == FIELD_GRAD_BIAS) return results->grad_bias;
    if (field == FIELD_ARGMAX) return ll_view_vector(results->argmax, LL_DTYPE_I64, problem->n_tokens, 0);
    int64_t n = field == FIELD_LOSS ? results->n_loss : problem->n_tokens;
    return ll_view_vector(floats[field], LL_DTYPE_F32, n, 0);
}

double view_value(const ll_view *view, int64_t r, int64_t c) {
    if (view->dtype == LL_DTYPE_I64) return (double)lli_id(view, r);
    return (double)lli_load(view->data, view->dtype, r * view->row_stride + c);
}

static bool same_bits(double a, double b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0; /* widening to double keeps bits apart */
}

static bool sums_same_bits(const struct problem *problem, const char *kernel, const char *what,
                           const ll_sums *got, const ll_sums *want) {
    bool same = same_bits(got->loss, want->loss) && same_bits(got->z_loss, want->z_loss) &&
                same_bits(got->weight, want->weight) && got->n_valid == want->n_valid &&
                got->n_ignored == want->n_ignored;
    if (!same) {
        printf("FAIL %s %s: %s: sums got %a %a %a %lld %lld want %a %a %a %lld %lld\n", problem->text, kernel,
               what, got->loss, got->z_loss, got->weight, (long long)got->n_valid, (long long)got->n_ignored,
               want->loss, want->z_loss, want->weight, (long long)want->n_valid, (long long)want->n_ignored);
    }
    return same;
}

bool results_same_bits(const struct problem *problem, const char *kernel, const char *what,
                       const struct results *got, const struct results *want, int32_t fields, int64_t first,
                       int64_t count) {
    for (int32_t field = 0; field < kFields; ++field) {
        if (!(fields >> field & 1)) continue;
        ll_view a = results_field(problem, got, (enum field)field);
        ll_view b = results_field(problem, want, (enum field)field);
        if (!a.data) continue;
        bool by_token = a.rows == problem->n_tokens && field != FIELD_GRAD_W && field != FIELD_GRAD_BIAS;
        int64_t begin = by_token ? first : 0, end = by_token ? first + count : a.rows;
        size_t row_bytes = (size_t)a.cols * ll_dtype_bytes((ll_dtype)a.dtype);
        for (int64_t r = begin; r < end; ++r) {
            if (memcmp(lli_row(&a, r), lli_row(&b, r), row_bytes) == 0) continue;
            for (int64_t c = 0; c < a.cols; ++c) {
                double x = view_value(&a, r, c), y = view_value(&b, r, c);
                if (same_bits(x, y)) continue;
                printf("FAIL %s %s: %s: %s[%lld,%lld] got %.9g (%a) want %.9g (%a)\n", problem->text, kernel,
                       what, field_names[field], (long long)r, (long long)c, x, x, y, y);
                return false;
            }
        }
    }
    return !(fields & FIELDS_SUMS) || sums_same_bits(problem, kernel, what, got->sums, want->sums);
}
