/* The CPU micro-kernels one by one, each instruction set that runs here: packing and products element by
 * element against their definition, softcap and gradient against double, all instruction sets against plain C
 * by bits. */
#include "core/dtype.h"
#include "cpu/detect.h"
#include "cpu/micro.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const lli_micro *micros[3];
static int n_micros;

static uint64_t state = 0x2545f4914f6cdd1du;
static float random_float(float scale) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return scale * ((float)(state >> 40) * 0x1p-23f - 1.0f);
}

static void fill(float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) x[i] = random_float(scale);
}

static void assert_bits(float got, float want) {
    if (lli_bits(got) != lli_bits(want)) fail_msg("got %.9g (%a) want %.9g (%a)", got, got, want, want);
}

enum { kRows = 40, kDepth = 83, kCanary = 64 };
static const float canary = -12345.678f;

static void packing(void **unused) {
    (void)unused;
    static float f32[kRows][kDepth];
    static uint16_t bf16[kRows][kDepth], f16[kRows][kDepth];
    const int32_t dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    fill(&f32[0][0], kRows * kDepth, 3.0f);
    f32[3][7] = 0x1p-140f; /* subnormals survive */
    for (int r = 0; r < kRows; r++) {
        for (int k = 0; k < kDepth; k++) {
            bf16[r][k] = lli_f32_to_bf16(f32[r][k]);
            f16[r][k] = lli_f32_to_f16(f32[r][k]);
        }
    }
    for (int m = 0; m < n_micros; m++) {
        for (int t = 0; t < 3; t++) {
            const int64_t widths[] = {micros[m]->rows, micros[m]->cols};
            for (int w = 0; w < 2; w++) {
                for (int64_t n_rows = 0; n_rows <= widths[w]; n_rows += n_rows < 3 ? 1 : 5) {
                    for (int64_t k0 = 0; k0 < 20; k0 += 19) {
                        static float panel[64 * kDepth + kCanary];
                        const int64_t width = widths[w], n_k = kDepth - k0;
                        const void *rows[64];
                        for (int64_t r = 0; r < n_rows; r++) {
                            rows[r] = t == 0 ? (void *)f32[r] : t == 1 ? (void *)bf16[r] : (void *)f16[r];
                        }
                        for (int64_t i = 0; i < kCanary; i++) panel[width * n_k + i] = canary;
                        micros[m]->pack(panel, width, rows, n_rows, dtypes[t], k0, n_k);
                        for (int64_t k = 0; k < n_k; k++) {
                            for (int64_t r = 0; r < width; r++) {
                                float want = r < n_rows ? lli_load(rows[r], dtypes[t], k0 + k) : 0.0f;
                                assert_bits(panel[k * width + r], want);
                            }
                        }
                        for (int64_t i = 0; i < kCanary; i++) assert_bits(panel[width * n_k + i], canary);
                    }
                }
            }
            /* copy: kRows steps of 71 columns from 5 on, one row missing */
            static float panels[3 * 64 * kRows];
            const int64_t width = micros[m]->rows, stride = width * kRows + 3, n_cols = 71;
            const void *rows[kRows];
            for (int r = 0; r < kRows; r++) {
                rows[r] = t == 0 ? (void *)f32[r] : t == 1 ? (void *)bf16[r] : (void *)f16[r];
            }
            rows[4] = NULL;
            assert_true((n_cols + width - 1) / width * stride <= (int64_t)(sizeof panels / sizeof *panels));
            micros[m]->copy(panels, width, stride, rows, kRows, dtypes[t], 5, n_cols);
            for (int64_t k = 0; k < kRows; k++) {
                for (int64_t c = 0; c < (n_cols + width - 1) / width * width; c++) {
                    float want = rows[k] && c < n_cols ? lli_load(rows[k], dtypes[t], 5 + c) : 0.0f;
                    assert_bits(panels[c / width * stride + k * width + c % width], want);
                }
            }
        }
    }
}

/* Every height and some widths, all modes; c has canaries between its rows. */
static void products(void **unused) {
    (void)unused;
    static float a[64 * kDepth], b[64 * kDepth], c[64 * 80], old[64 * 80];
    for (int q = 0; q < n_micros; q++) {
        const int64_t mr = micros[q]->rows, nr = micros[q]->cols, ldc = nr + 5;
        fill(a, mr * kDepth, 1.0f);
        fill(b, nr * kDepth, 1.0f);
        for (int64_t m = 1; m <= mr; m++) {
            for (int64_t n = 1; n <= nr; n += n < 3 || n > nr - 2 ? 1 : nr - 3 - n > 7 ? 7 : 1) {
                for (int mode = 0; mode < 3; mode++) {
                    fill(old, 64 * 80, 1.0f);
                    memcpy(c, old, sizeof c);
                    micros[q]->gemm(m, n, kDepth, a, b, c, ldc, (lli_gemm_mode)mode);
                    for (int64_t i = 0; i < 64 * 80; i++) {
                        const int64_t row = i / ldc, col = i % ldc;
                        float want = old[i];
                        if (row < m && col < n) {
                            float acc = mode == LLI_GEMM_CONTINUE ? old[i] : 0.0f;
                            for (int64_t k = 0; k < kDepth; k++)
                                acc = fmaf(a[k * mr + row], b[k * nr + col], acc);
                            want = mode == LLI_GEMM_ADD ? old[i] + acc : acc;
                        }
                        assert_bits(c[i], want);
                    }
                }
            }
        }
    }
}

/* Logits of one row, 200 columns in 4 tiles, by every instruction set: equal integers, and right. */
static void statistics(void **unused) {
    (void)unused;
    enum { kCols = 200, kPadded = 256 };
    static float raw[kPadded], bias[kPadded], weight[kCols];
    const lli_transform transforms[] = {{0.0f, 1.0f}, {5.0f, 1.0f}, {0.0f, 0.7f}, {30.0f, 1.3f}};
    for (int round = 0; round < 200; round++) {
        fill(raw, kPadded, round % 3 == 0 ? 1.0f : round % 3 == 1 ? 40.0f : 1e5f);
        fill(bias, kPadded, 1.0f);
        for (int v = 0; v < kCols; v++) weight[v] = fabsf(random_float(2.0f));
        weight[17] = 0.0f;
        if (round % 7 == 0) raw[round % kCols] = -INFINITY;
        if (round % 50 == 49) raw[5] = NAN;
        const lli_transform *transform = &transforms[round % 4];
        const lli_stretch stretch = {raw, bias, weight, 640, kCols, 640 + round % kCols};
        lli_row_sums sums[3];
        lli_row_target targets[3];
        lli_exact soft[3];
        for (int q = 0; q < n_micros; q++) {
            memset(&sums[q], 0, sizeof sums[q]);
            memset(&targets[q], 0, sizeof targets[q]);
            memset(&soft[q], 0, sizeof soft[q]);
            sums[q].max = -INFINITY;
            sums[q].argmax = -1;
            lli_softmax_clear(&sums[q].others);
            micros[q]->stats(transform, &stretch, LLI_WANT_ENTROPY | LLI_WANT_ARGMAX | LLI_WANT_SOFT_SUM,
                             &sums[q], &targets[q], &soft[q]);
            assert_memory_equal(&sums[q], &sums[0], sizeof sums[0]);
            assert_memory_equal(&targets[q].whole, &targets[0].whole, sizeof targets[0].whole);
            assert_memory_equal(&targets[q].rest, &targets[0].rest, sizeof targets[0].rest);
            assert_memory_equal(&soft[q], &soft[0], sizeof soft[0]);
        }
        if (round % 50 == 49) {
            assert_true(sums[0].others.top == LLI_TOP_NAN || targets[0].whole.top == LLI_TOP_NAN);
            continue;
        }
        double z[kCols], m = -INFINITY, s = 0.0, total = 0.0, largest = 0.0;
        int argmax = 0;
        for (int v = 0; v < kCols; v++) {
            z[v] = (double)(raw[v] + bias[v]);
            if (transform->softcap != 0.0f)
                z[v] = (double)transform->softcap * tanh(z[v] / (double)transform->softcap);
            z[v] /= (double)transform->temperature;
            if (z[v] > m) m = z[v], argmax = v;
            if (weight[v] != 0.0f) {
                total += (double)weight[v] * z[v];
                largest = fmax(largest, fabs(total));
            }
        }
        for (int v = 0; v < kCols; v++) s += exp(z[v] - m);
        lli_softmax whole = sums[0].others;
        lli_softmax_merge(&whole, &targets[0].whole);
        const double scale = fabs(m) + 1.0;
        assert_true(fabs(lli_softmax_lse(&whole) - (m + log(s))) < 1e-7 + 4e-7 * scale);
        if (isfinite(total)) {
            assert_true(fabs(lli_exact_value(&soft[0]) - total) < 1e-6 * (largest + 64.0 * scale));
        } else {
            assert_true(lli_exact_value(&soft[0]) == -INFINITY);
        }
        assert_true(sums[0].argmax == 640 + argmax || z[sums[0].argmax - 640] > m - 1e-5 * scale);
    }
}

/* The softcap's value and slope in relative precision, from subnormal to saturated, and infinities. */
static void softcap_and_slope(void **unused) {
    (void)unused;
    for (int q = 0; q < n_micros; q++) {
        for (int i = 0; i < 4000; i++) {
            float raw[64] = {0}, x = expf(random_float(12.0f)) * (i % 2 ? -1.0f : 1.0f);
            const float cap = 30.0f;
            const lli_transform transform = {cap, 1.0f};
            raw[0] = x;
            lli_row_sums sums = {.max = -INFINITY, .argmax = -1};
            lli_row_target target;
            lli_softmax_clear(&sums.others);
            const lli_stretch stretch = {raw, NULL, NULL, 0, 1, 0};
            micros[q]->stats(&transform, &stretch, LLI_WANT_ARGMAX, &sums, &target, NULL);
            const double u = (double)x / (double)cap, want = (double)cap * tanh(u);
            assert_true(fabs((double)target.z - want) <= 1e-6 * fabs(want));
            /* dz = p alpha slope with p = 1: lse is the logit itself */
            const lli_row_grad grad = {.alpha = 1.0f,
                                       .k = rintf((float)((double)target.z * 1.4426950408889634)),
                                       .fraction = (float)((double)target.z * 1.4426950408889634 -
                                                           rint((double)target.z * 1.4426950408889634)),
                                       .lse = target.z};
            micros[q]->gradient(&transform, &stretch, &grad, raw);
            const double slope = 1.0 / (cosh(u) * cosh(u));
            if (fabs(u) < 40.0) assert_true(fabs((double)raw[0] - slope) <= 1e-5 * slope);
        }
        float raw[64] = {INFINITY, -INFINITY};
        const lli_transform transform = {30.0f, 1.0f};
        lli_row_sums sums = {.max = -INFINITY, .argmax = -1};
        lli_row_target target;
        lli_softmax_clear(&sums.others);
        const lli_stretch stretch = {raw, NULL, NULL, 0, 2, 1};
        micros[q]->stats(&transform, &stretch, LLI_WANT_ARGMAX, &sums, &target, NULL);
        assert_true(sums.max == 30.0f && sums.argmax == 0 && target.z == -30.0f);
    }
}

/* Between f32 and the dtypes of given logits: every 16-bit pattern, f32 around every rounding, NaN and
 * infinity, and lengths that are no multiple of a vector; nothing is written behind the end. */
static void given_logits(void **unused) {
    (void)unused;
    enum { kAll = 65536 };
    static uint16_t half[kAll + 1];
    static float wide[kAll + 1];
    const int32_t dtypes[] = {LL_DTYPE_BF16, LL_DTYPE_F16};
    for (int m = 0; m < n_micros; m++) {
        for (int t = 0; t < 2; t++) {
            for (int64_t i = 0; i < kAll; i++) half[i] = (uint16_t)i;
            for (int64_t n = kAll - 20; n <= kAll; n++) {
                wide[n] = canary;
                micros[m]->widen(half, dtypes[t], n, wide);
                assert_bits(wide[n], canary);
            }
            for (int64_t i = 0; i < kAll; i++) {
                const float want = lli_load(half, dtypes[t], i);
                if (want == want) assert_bits(wide[i], want);
                if (want != want) assert_true(wide[i] != wide[i]);
            }
            for (uint32_t below = 0; below < 65536; below += 8191) { /* the bits that are rounded off */
                for (int64_t i = 0; i < kAll; i++) wide[i] = lli_float((uint32_t)i << 16 | below);
                micros[m]->narrow(wide, kAll - 3, half, dtypes[t]);
                for (int64_t i = 0; i < kAll - 3; i++) {
                    const uint16_t want = t == 0 ? lli_f32_to_bf16(wide[i]) : lli_f32_to_f16(wide[i]);
                    if (half[i] != want) fail_msg("%a: got %#x want %#x", wide[i], half[i], want);
                }
            }
        }
        float z[70];
        int64_t greater = 0;
        fill(z, 70, 2.0f);
        z[7] = NAN;
        z[9] = z[69] = INFINITY;
        for (int64_t i = 0; i < 70; i++) greater += z[i] > 0.5f;
        assert_int_equal(micros[m]->count_greater(z, 70, 0.5f), greater);
        assert_int_equal(micros[m]->count_greater(z, 69, 0.5f), greater - 1);
        assert_int_equal(micros[m]->count_greater(z, 70, INFINITY), 0);
        assert_int_equal(micros[m]->count_greater(z, 70, NAN), 0);
    }
}

int main(void) {
    char why[160];
    micros[n_micros++] = &lli_micro_plain;
#ifdef LLI_HAVE_AVX2
    if (lli_cpu_has_avx2(why, sizeof why)) micros[n_micros++] = &lli_micro_avx2;
#endif
#ifdef LLI_HAVE_AVX512
    if (lli_cpu_has_avx512(why, sizeof why)) micros[n_micros++] = &lli_micro_avx512;
#endif
    (void)why;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packing),           cmocka_unit_test(products),     cmocka_unit_test(statistics),
        cmocka_unit_test(softcap_and_slope), cmocka_unit_test(given_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
