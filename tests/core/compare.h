/* Results of two runs side by side, field by field: equal bits, or a bound on the difference. */
#ifndef LL_TESTS_CORE_COMPARE_H
#define LL_TESTS_CORE_COMPARE_H

#include "problems.h"

enum field {
    FIELD_LOSS,
    FIELD_NLL,
    FIELD_LSE,
    FIELD_LSE_LO,
    FIELD_ENTROPY,
    FIELD_Z_LOSS,
    FIELD_ARGMAX,
    FIELD_GRAD_X,
    FIELD_GRAD_W,
    FIELD_GRAD_BIAS,
    kFields
};

extern const char *const field_names[kFields];

enum {
    FIELDS_SUMS = 1 << kFields,
    FIELDS_FORWARD = ((1 << FIELD_GRAD_X) - 1) | FIELDS_SUMS,
    FIELDS_SAVED =
        FIELDS_FORWARD & ~(1 << FIELD_LOSS | FIELDS_SUMS), /* what does not depend on other tokens */
    FIELDS_GRADIENTS = 1 << FIELD_GRAD_X | 1 << FIELD_GRAD_W | 1 << FIELD_GRAD_BIAS,
    FIELDS_ALL = FIELDS_FORWARD | FIELDS_GRADIENTS
};

/* The field as a matrix; data is NULL where the problem has none. */
ll_view results_field(const struct problem *problem, const struct results *results, enum field field);

/* One element as a double; argmax too. */
double view_value(const ll_view *view, int64_t r, int64_t c);

/* True if the chosen fields (bits 1 << field, FIELDS_SUMS) have equal bits in rows [first, first + count) of
 * the fields with one row a token, and in all rows of the others. Two NaNs are equal whatever their payload.
 * Prints the first difference with problem, kernel, `what`, coordinates and both values. */
bool results_same_bits(const struct problem *problem, const char *kernel, const char *what,
                       const struct results *got, const struct results *want, int32_t fields, int64_t first,
                       int64_t count);

#endif
