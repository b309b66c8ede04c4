/* Conversions of element types: every 16-bit value, and rounding to nearest even against exact arithmetic. */
#include "core/dtype.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Value of an f16 by its definition. */
static double f16_value(uint16_t h) {
    int exponent = (h >> 10) & 31, fraction = h & 1023;
    double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                      : ldexp(fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

static void widening(void **unused) {
    (void)unused;
    for (int i = 0; i < 65536; i++) {
        const uint16_t h = (uint16_t)i;
        const double want = f16_value(h);
        const float f = lli_f16_to_f32(h), b = lli_bf16_to_f32(h);
        assert_true(isnan(want) ? isnan(f) : (double)f == want && !signbit(f) == !signbit(want));
        assert_true(lli_bits(b) == (uint32_t)i << 16);
        if (isnan(f)) {
            assert_true(isnan(lli_f16_to_f32(lli_f32_to_f16(f))));
        } else {
            assert_int_equal(lli_f32_to_f16(f), h);
        }
        if (isnan(b)) {
            assert_true(isnan(lli_bf16_to_f32(lli_f32_to_bf16(b))));
        } else {
            assert_int_equal(lli_f32_to_bf16(b), h);
        }
    }
}

/* Between two neighbours: below, at and above the midpoint; the tie goes to the even one. */
static void rounding(void **unused) {
    (void)unused;
    for (int i = 0; i < 0x7bff; i++) {
        const uint16_t low = (uint16_t)i, high = (uint16_t)(i + 1), even = low & 1 ? high : low;
        const double middle = (f16_value(low) + f16_value(high)) / 2;
        const float tie = (float)middle;
        assert_true((double)tie == middle);
        assert_int_equal(lli_f32_to_f16(tie), even);
        assert_int_equal(lli_f32_to_f16(nextafterf(tie, 0.0f)), low);
        assert_int_equal(lli_f32_to_f16(nextafterf(tie, INFINITY)), high);
        assert_int_equal(lli_f32_to_f16(-tie), even | 0x8000);
    }
    for (int i = 0; i < 0x7f7f; i++) {
        const uint16_t low = (uint16_t)i, high = (uint16_t)(i + 1), even = low & 1 ? high : low;
        const float tie = lli_float(((uint32_t)i << 16) + 0x8000u);
        assert_int_equal(lli_f32_to_bf16(tie), even);
        assert_int_equal(lli_f32_to_bf16(lli_float(lli_bits(tie) - 1)), low);
        assert_int_equal(lli_f32_to_bf16(lli_float(lli_bits(tie) + 1)), high);
        assert_int_equal(lli_f32_to_bf16(-tie), even | 0x8000);
    }
    assert_int_equal(lli_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(lli_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(lli_f32_to_f16(-1e30f), 0xfc00);
    assert_int_equal(lli_f32_to_bf16(3.4028235e38f), 0x7f80);
    assert_int_equal(lli_f32_to_bf16(INFINITY), 0x7f80);
    assert_true(isnan(lli_bf16_to_f32(lli_f32_to_bf16(lli_float(0x7f800001u)))));
}

static void names_and_sizes(void **unused) {
    (void)unused;
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_F32), 4);
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_BF16), 2);
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_F16), 2);
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_I32), 4);
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_I64), 8);
    assert_int_equal(ll_dtype_bytes(LL_DTYPE_NONE), 0);
    assert_int_equal(ll_dtype_bytes((ll_dtype)77), 0);
    assert_string_equal(ll_dtype_name(LL_DTYPE_BF16), "bf16");
    assert_string_equal(ll_dtype_name(LL_DTYPE_NONE), "none");
    assert_string_equal(ll_dtype_name((ll_dtype)77), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widening),
        cmocka_unit_test(rounding),
        cmocka_unit_test(names_and_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
