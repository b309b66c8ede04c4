/* The exact accumulator and ll_sum_f32: right to the last bit, in any order. */
#include <logitless/logitless.h>

#include "core/dtype.h"
#include "core/exact_sum.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t state = 88172645463325252u;
static uint32_t random_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static void assert_same(double got, double want) {
    if (memcmp(&got, &want, sizeof got) != 0)
        fail_msg("got %.17g (%a) want %.17g (%a)", got, got, want, want);
}

static double sum_of(const float *values, int64_t n) {
    double sum = 0.0;
    assert_int_equal(ll_sum_f32(values, n, 1, &sum), LL_STATUS_OK);
    return sum;
}

static void known_sums(void **unused) {
    (void)unused;
    const float cancel[] = {1e8f, 1.0f, -1e8f, 1.0f};
    assert_same(sum_of(cancel, 4), 2.0);
    const float huge[] = {3e38f, 3e38f, -3e38f, 1e-45f};
    assert_same(sum_of(huge, 4), (double)3e38f);
    const float tiny[] = {3e38f, -3e38f, 1e-45f};
    assert_same(sum_of(tiny, 3), (double)1e-45f);
    assert_same(sum_of(tiny, 0), 0.0);
    const float half[] = {-0.5f, -0.25f};
    assert_same(sum_of(half, 2), -0.75);
    /* 2^53 + 1 is a tie: to even; a tiny more goes up */
    const float tie[] = {0x1p53f, 1.0f, 0x1p-140f};
    assert_same(sum_of(tie, 2), 0x1p53);
    assert_same(sum_of(tie, 3), 0x1p53 + 2.0);
    const float near_tie[] = {0x1p53f, 1.0f, 0x1p-20f}; /* the tiny part in the limb that is cut */
    assert_same(sum_of(near_tie, 3), 0x1p53 + 2.0);
    const float below[] = {-0x1p53f, -1.0f, 0x1p-140f};
    assert_same(sum_of(below, 2), -0x1p53);
    assert_same(sum_of(below, 3), -0x1p53);
}

static void specials(void **unused) {
    (void)unused;
    const float values[] = {1.0f, INFINITY, -INFINITY, NAN};
    assert_true(sum_of(values, 2) == INFINITY);
    assert_true(isnan(sum_of(values, 3)));
    assert_true(isnan(sum_of(values + 2, 2)));
    assert_true(sum_of(values + 2, 1) == -INFINITY);
}

/* Random floats of every exponent, against 128-bit long double where that is exact (a narrow range), and
 * against themselves in other orders and groupings over the whole range. */
static void random_sums(void **unused) {
    (void)unused;
    enum { kCount = 4096 };
    static float values[kCount];
    for (int round = 0; round < 50; round++) {
        long double narrow = 0.0L;
        for (int i = 0; i < kCount; i++) {
            values[i] = ldexpf((float)((int32_t)random_bits() % 4096), (int)(random_bits() % 32));
            narrow += (long double)values[i];
        }
        assert_same(sum_of(values, kCount), (double)narrow);
        for (int i = 0; i < kCount; i++) {
            do values[i] = lli_float(random_bits());
            while (!isfinite(values[i]));
        }
        const double want = sum_of(values, kCount);
        lli_exact parts[3] = {{{0}, 0, 0}};
        for (int i = 0; i < kCount; i++) lli_exact_add_f32(&parts[random_bits() % 3], values[i]);
        lli_exact_merge(&parts[0], &parts[2]);
        lli_exact_merge(&parts[1], &parts[0]);
        assert_same(lli_exact_value(&parts[1]), want);
        for (int i = kCount - 1; i > 0; i--) {
            int j = (int)(random_bits() % (uint32_t)(i + 1));
            float t = values[i];
            values[i] = values[j];
            values[j] = t;
        }
        assert_same(sum_of(values, kCount), want);
    }
}

/* Scaled integers over the whole range of exponents, and the carry that the count forces. */
static void scaled_integers(void **unused) {
    (void)unused;
    for (int exponent = -192; exponent <= 64; exponent += 7) {
        lli_exact acc = {{0}, 0, 0};
        lli_exact_add(&acc, ((int64_t)1 << 61) + 12345, exponent);
        lli_exact_add(&acc, -((int64_t)1 << 61), exponent);
        assert_same(lli_exact_value(&acc), ldexp(12345.0, exponent));
    }
    lli_exact acc = {{0}, 0, kExactCarryEvery - 5};
    for (int i = 0; i < 10; i++) lli_exact_add_f32(&acc, -3.0f);
    assert_true(acc.adds < 10);
    assert_same(lli_exact_value(&acc), -30.0);
}

static void steps_and_bad_arguments(void **unused) {
    (void)unused;
    const float values[] = {1.0f, 100.0f, 2.0f, 100.0f, 3.0f};
    double sum = -1.0;
    assert_int_equal(ll_sum_f32(values, 3, 2, &sum), LL_STATUS_OK);
    assert_same(sum, 6.0);
    assert_int_equal(ll_sum_f32(NULL, 0, 1, &sum), LL_STATUS_OK);
    sum = -1.0;
    assert_int_equal(ll_sum_f32(NULL, 1, 1, &sum), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_sum_f32(values, -1, 1, &sum), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_sum_f32(values, 1, 0, &sum), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_sum_f32(values, 1, 1, NULL), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "sum is NULL"));
    assert_same(sum, -1.0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_sums),
        cmocka_unit_test(specials),
        cmocka_unit_test(random_sums),
        cmocka_unit_test(scaled_integers),
        cmocka_unit_test(steps_and_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
