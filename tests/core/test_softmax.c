/* The integer softmax: accuracy against long double, order-freeness, range, and special values. */
#include "core/math64.h"
#include "core/softmax.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t state = 0x9e3779b97f4a7c15u;
static uint32_t random_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static double uniform(void) {
    return ((double)random_bits() + 0.5) / 4294967296.0;
}
static double normal(void) {
    return sqrt(-2.0 * log(uniform())) * cos(6.283185307179586 * uniform());
}

static float largest(const float *z, int n) {
    float m = -INFINITY;
    for (int v = 0; v < n; v++) {
        if (z[v] != z[v]) return NAN;
        if (z[v] > m) m = z[v];
    }
    return m;
}

static lli_softmax row_of(const float *z, int n) {
    lli_softmax row;
    lli_softmax_clear(&row);
    for (int v = 0; v < n; v += kTileCols) {
        int count = n - v < kTileCols ? n - v : kTileCols;
        lli_softmax_tile(&row, z + v, count, largest(z + v, count));
    }
    return row;
}

/* ---- Accuracy: the table of the contract -------------------------------------------------------- */

enum { kVocab = 151936, kRows = 20 };

/* Worst error over kRows rows of logits offset + spread * normal, one of them raised by `peak`. */
static void check_accuracy(const char *name, double spread, double offset, double peak) {
    static float z[kVocab];
    double worst_lse = 0.0, worst_entropy = 0.0;
    for (int r = 0; r < kRows; r++) {
        for (int v = 0; v < kVocab; v++) z[v] = (float)(offset + spread * normal());
        if (peak > 0.0) z[random_bits() % kVocab] = (float)(peak + 7.0 * uniform());
        long double m = (long double)largest(z, kVocab), s = 0.0L, t = 0.0L;
        for (int v = 0; v < kVocab; v++) {
            long double e = expl((long double)z[v] - m);
            s += e;
            t += e * ((long double)z[v] - m);
        }
        const lli_softmax row = row_of(z, kVocab);
        worst_lse = fmax(worst_lse, (double)fabsl((long double)lli_softmax_lse(&row) - (m + logl(s))));
        worst_entropy =
            fmax(worst_entropy, (double)fabsl((long double)lli_softmax_entropy(&row) - (logl(s) - t / s)));
    }
    print_message("%-16s lse %.1e entropy %.1e nats\n", name, worst_lse, worst_entropy);
    assert_true(worst_lse < 1e-7);
    assert_true(worst_entropy < 1e-7);
}

static void accuracy(void **unused) {
    (void)unused;
    check_accuracy("std 1.5", 1.5, 0.0, 0.0);
    check_accuracy("std 4", 4.0, 0.0, 0.0);
    check_accuracy("std 12", 12.0, 0.0, 0.0);
    check_accuracy("offset 1e4", 1.0, 1e4, 0.0);
    check_accuracy("one at +17..24", 1.0, 0.0, 17.0);
    check_accuracy("-200 +- 1", 1.0, -200.0, 0.0);
    check_accuracy("offset 3e6", 2.0, 3e6, 0.0);
    check_accuracy("offset -1e8", 50.0, -1e8, 0.0);
}

/* ---- Order-freeness ----------------------------------------------------------------------------- */

/* Tiles with maxima far apart, so that windows rise and limbs drop out, merged in random orders and from
 * random partitions; also across the borders between the formulas. */
static void order_free(void **unused) {
    (void)unused;
    enum { kTiles = 200 };
    static float z[kTiles][kTileCols];
    static const double scales[] = {1.0, 30.0, 1e3, 1e5, 6e6, 1e8, 6e8, 3e12};
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        for (int round = 0; round < 20; round++) {
            lli_softmax tiles[kTiles], all;
            lli_softmax_clear(&all);
            for (int t = 0; t < kTiles; t++) {
                double centre = scales[s] * normal();
                for (int v = 0; v < kTileCols; v++) {
                    z[t][v] = random_bits() % 50 == 0 ? -INFINITY : (float)(centre + 5.0 * normal());
                }
                lli_softmax_clear(&tiles[t]);
                lli_softmax_tile(&tiles[t], z[t], kTileCols, largest(z[t], kTileCols));
                lli_softmax_tile(&all, z[t], kTileCols, largest(z[t], kTileCols));
            }
            int order[kTiles];
            for (int t = 0; t < kTiles; t++) order[t] = t;
            for (int t = kTiles - 1; t > 0; t--) {
                int j = (int)(random_bits() % (uint32_t)(t + 1)), swap = order[t];
                order[t] = order[j];
                order[j] = swap;
            }
            lli_softmax parts[5], merged;
            for (int p = 0; p < 5; p++) lli_softmax_clear(&parts[p]);
            for (int t = 0; t < kTiles; t++) lli_softmax_merge(&parts[random_bits() % 5], &tiles[order[t]]);
            lli_softmax_clear(&merged);
            for (int p = 4; p >= 0; p--) lli_softmax_merge(&merged, &parts[p]);
            assert_memory_equal(&merged, &all, sizeof all);
        }
    }
}

/* ---- Range -------------------------------------------------------------------------------------- */

/* The most that limbs can hold: 2^20 logits, all equal, at every position of the anchor in its limb, and with
 * the window raised by two limbs afterwards. */
static void no_overflow_at_the_largest_vocabulary(void **unused) {
    (void)unused;
    float z[kTileCols];
    for (int k = -40; k < 40; k++) {
        for (int v = 0; v < kTileCols; v++) z[v] = (float)(k * 0.6931471805599453);
        lli_softmax tile, row;
        lli_softmax_clear(&tile);
        lli_softmax_clear(&row);
        lli_softmax_tile(&tile, z, kTileCols, z[0]);
        for (int t = 0; t < 1 << 14; t++) lli_softmax_merge(&row, &tile);
        const double lse = (double)z[0] + 20.0 * 0.6931471805599453;
        assert_true(fabs(lli_softmax_lse(&row) - lse) < 1e-7);
        assert_true(fabs(lli_softmax_entropy(&row) - 20.0 * 0.6931471805599453) < 1e-7);
        for (int i = 0; i < 3; i++) {
            assert_true(row.s[i] >= 0 && row.s[i] < (int64_t)1 << 50);
            assert_true(row.u[i] >= 0 && row.u[i] < (int64_t)1 << 57);
        }
        lli_softmax one;
        float high = z[0] + 50.0f;
        lli_softmax_clear(&one);
        lli_softmax_tile(&one, &high, 1, high);
        lli_softmax_merge(&row, &one);
        for (int i = 0; i < 3; i++) assert_true(row.u[i] >= 0 && row.u[i] < (int64_t)1 << 62);
        const double rest = exp(20.0 * 0.6931471805599453 - 50.0);
        assert_true(fabs(lli_softmax_lse(&row) - ((double)high + log1p(rest))) <
                    1e-7 + 1e-7 * fabs((double)high));
    }
}

/* Every finite magnitude: equal logits give ln 2, and one far below counts for nothing. */
static void every_magnitude(void **unused) {
    (void)unused;
    for (int e = -149; e < 128; e++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            float pair[2] = {(float)sign * ldexpf(1.0f, e), (float)sign * ldexpf(1.0f, e)};
            lli_softmax row = row_of(pair, 2);
            assert_true(fabs(lli_softmax_entropy(&row) - 0.6931471805599453) < 1e-7);
            double lse = lli_softmax_lse(&row), want = (double)pair[0] + 0.6931471805599453;
            assert_true(fabs(lse - want) <= 1e-7 + 1e-15 * fabs(want));
            pair[1] = -3.4e38f;
            row = row_of(pair, 2);
            if (pair[0] > -1e37f)
                assert_true(fabs(lli_softmax_lse(&row) - (double)pair[0]) <=
                            1e-7 + 1e-15 * fabs((double)pair[0]));
        }
    }
    /* neighbours around the borders of the formulas */
    static const float borders[] = {LLI_Z_FLOAT, LLI_Z_DOUBLE};
    for (int b = 0; b < 2; b++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            float at = (float)sign * borders[b], z[2] = {at, nextafterf(at, 0.0f)};
            lli_softmax row = row_of(z, 2), first = row_of(z, 1), second = row_of(z + 1, 1);
            double high = fmax((double)z[0], (double)z[1]), low = fmin((double)z[0], (double)z[1]);
            double want = high + log1p(exp(low - high));
            assert_true(fabs(lli_softmax_lse(&row) - want) < 1e-6);
            lli_softmax_merge(&first, &second); /* as if in two tiles */
            assert_true(fabs(lli_softmax_lse(&first) - want) < 1e-6);
        }
    }
}

static void specials(void **unused) {
    (void)unused;
    float z[70];
    for (int v = 0; v < 70; v++) z[v] = -INFINITY;
    lli_softmax row = row_of(z, 70);
    assert_int_equal(row.top, LLI_TOP_EMPTY);
    assert_true(lli_softmax_lse(&row) == -INFINITY);
    z[69] = 0.0f;
    row = row_of(z, 70);
    assert_true(lli_softmax_lse(&row) == 0.0 && lli_softmax_entropy(&row) == 0.0);
    z[3] = NAN;
    row = row_of(z, 70);
    assert_true(isnan(lli_softmax_lse(&row)) && isnan(lli_softmax_entropy(&row)));
    z[3] = INFINITY;
    row = row_of(z, 70);
    assert_true(isnan(lli_softmax_lse(&row)));
    lli_softmax clean = row_of(z + 64, 6), other = clean; /* NaN wins in either order */
    lli_softmax_merge(&clean, &row);
    lli_softmax_merge(&row, &other);
    assert_true(isnan(lli_softmax_lse(&clean)) && isnan(lli_softmax_lse(&row)));
}

/* The anchor is the least integer that keeps every p at or below 1. */
static void anchors(void **unused) {
    (void)unused;
    for (int i = 0; i < 2000000; i++) {
        float z = (float)(normal() * exp(uniform() * 15.0));
        if (!(fabsf(z) < LLI_Z_FLOAT)) continue;
        float k = lli_softmax_anchor(z);
        float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -k));
        float above = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -(k - 1.0f)));
        assert_true(k == rintf(k) && d <= 0.0f && above > 0.0f);
    }
}

/* ---- math64 ------------------------------------------------------------------------------------- */

static void double_functions(void **unused) {
    (void)unused;
    for (int i = 0; i < 300000; i++) {
        double x = (uniform() - 0.5) * 1400.0, y = exp(x / 2.0), a = exp(x / 20.0), b = -exp(x / 20.0 - 5.0);
        assert_true(fabs(lli_exp(x) / (double)expl(x) - 1.0) < 4e-16);
        assert_true(fabs(lli_log(y) - (double)logl(y)) <= 4e-16 * fabs(log(y)));
        assert_true(fabs(lli_log1p(a) / (double)log1pl(a) - 1.0) < 6e-16);
        assert_true(fabs(lli_expm1(b) / (double)expm1l(b) - 1.0) < 6e-16);
    }
    assert_true(lli_exp(-INFINITY) == 0.0 && lli_exp(INFINITY) == INFINITY && isnan(lli_exp(NAN)));
    assert_true(lli_exp(0.0) == 1.0 && lli_expm1(0.0) == 0.0 && lli_expm1(-INFINITY) == -1.0);
    assert_true(lli_log(0.0) == -INFINITY && lli_log(1.0) == 0.0 && lli_log(INFINITY) == INFINITY);
    assert_true(isnan(lli_log(NAN)) && lli_log1p(0.0) == 0.0 && lli_log1p(INFINITY) == INFINITY);
    assert_true(lli_log1p(1e-300) == 1e-300 && isnan(lli_log1p(NAN)) && isnan(lli_expm1(NAN)));
    assert_true(lli_exp(-740.0) > 0.0 && lli_exp(-750.0) == 0.0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accuracy),
        cmocka_unit_test(order_free),
        cmocka_unit_test(no_overflow_at_the_largest_vocabulary),
        cmocka_unit_test(every_magnitude),
        cmocka_unit_test(specials),
        cmocka_unit_test(anchors),
        cmocka_unit_test(double_functions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
