/* Reported faults of sizes, strides and index widths of ce. Memory of gigabytes is reserved but not touched
 * where rows lie far apart; LL_TEST_SLOW-like lengths are kept out: everything here takes seconds. */
#define _DEFAULT_SOURCE
#include "faults/ce_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <cmocka.h>

static const char *kernel_of(void **state) {
    return (const char *)*state;
}

/* B18, B11: flat logits of any width, gradient too. */
static void b18_flat_rows_of_any_width(void **state) {
    static const int64_t widths[] = {1, 2, 3, 31, 33, 64, 129, 1023, 1024, 1025};
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; ++w) {
        const int64_t v = widths[w];
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, v, LL_DTYPE_F32);
        ce_rig_fill(rig, -20.0);
        rig->target[1] = v - 1;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        for (int64_t i = 0; i < 2; ++i) {
            ce_near("nll", rig->nll[i], log((double)v), 1e-6, 0);
            ce_near("entropy", rig->entropy[i], log((double)v), 1e-6, 0);
            ce_near("dz", ce_rig_grad(rig, i, rig->target[i]), 0.5 * (1.0 / (double)v - 1.0), 1e-6, 0);
            ce_near("sum", ce_rig_grad_sum(rig, i), 0.0, 0, 1e-6);
        }
        ce_rig_close(rig);
    }
}

/* B12: what padding a kernel makes for itself must not meet the softcap. */
static void b12_softcap_and_tiles(void **state) {
    for (int second = 0; second < 2; ++second) {
        const int64_t v = second ? 33 : 65537;
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 1, v, LL_DTYPE_F32);
        ce_rig_fill(rig, -5.0);
        rig->loss.softcap = 1.0f;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        ce_near("nll", rig->nll[0], log((double)v), 1e-6, 0);
        ce_near("sum", ce_rig_grad_sum(rig, 0), 0.0, 0, 1e-7);
        ce_rig_close(rig);
    }
}

/* B19: tiles that are -inf as a whole. */
static void b19_one_finite_logit(void **state) {
    for (int last = 0; last < 2; ++last) {
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 1, 4096, LL_DTYPE_F32);
        ce_rig_fill(rig, -(double)INFINITY);
        rig->target[0] = last ? 4095 : 0;
        ce_rig_set(rig, 0, rig->target[0], 0.0);
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        assert_true(rig->nll[0] == 0.0f && rig->entropy[0] == 0.0f);
        for (int64_t v = 0; v < 4096; ++v) assert_true(ce_rig_grad(rig, 0, v) == 0.0);
        ce_rig_close(rig);
    }
}

/* B55: sums over the vocabulary in low precision stall. */
static void b55_flat_bf16(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 262144, LL_DTYPE_BF16);
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_near("nll", rig->nll[1], 12.476649, 1e-6, 0);
    ce_rig_close(rig);
}

/* B07, B08: many rows, wide rows. */
static void b07_b08_many_and_wide_rows(void **state) {
    static const int64_t shapes[][2] = {{70000, 8}, {65537, 3}, {4, 1048576}, {3, 70000}};
    for (int s = 0; s < 4; ++s) {
        const int64_t n = shapes[s][0], v = shapes[s][1];
        struct ce_rig *rig = ce_rig_open(kernel_of(state), n, v, LL_DTYPE_F32);
        rig->loss.reduction = LL_REDUCTION_SUM;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        ce_near("loss", rig->loss_out[0], (double)n * log((double)v), 1e-6, 0);
        ce_near("nll of the last", rig->nll[n - 1], log((double)v), 1e-6, 0);
        ce_near("dz of the last", ce_rig_grad(rig, n - 1, 0), 1.0 / (double)v - 1.0, 1e-6, 0);
        ce_near("dz of the last", ce_rig_grad(rig, n - 1, v - 1), 1.0 / (double)v, 1e-6, 0);
        ce_rig_close(rig);
    }
}

/* B04: one batch, and its slices. */
static void b04_batch_and_slices(void **state) {
    enum { kRows = 60, kVocab = 5002, kPiece = 6 };
    uint64_t random = 9;
    float whole[kRows];
    struct ce_rig *rig = ce_rig_open(kernel_of(state), kRows, kVocab, LL_DTYPE_BF16);
    for (int64_t i = 0; i < kRows; ++i) {
        rig->target[i] = i % 3 == 0 ? 0 : i % 3 == 1 ? kVocab - 1 : -100;
        for (int64_t v = 0; v < kVocab; ++v) ce_rig_set(rig, i, v, problem_normal(&random));
    }
    ce_rig_run(rig, LL_PASS_FORWARD);
    memcpy(whole, rig->nll, sizeof whole);
    const ll_ce_args all = rig->args;
    for (int64_t first = 0; first < kRows; first += kPiece) {
        rig->args.logits.data = (void *)lli_row(&all.logits, first);
        rig->args.logits.rows = rig->args.target.rows = kPiece;
        rig->args.target.data = rig->target + first;
        ce_rig_run(rig, LL_PASS_FORWARD);
        assert_memory_equal(rig->nll, whole + first, sizeof(float) * kPiece);
    }
    rig->args = all;
    ce_rig_close(rig);
}

/* B15: rows of a [seq, batch] transpose and of a padded vocabulary, where they lie. */
static void b15_rows_apart(void **state) {
    enum { kRows = 4, kVocab = 100, kPadded = 107 };
    uint64_t random = 21;
    float packed[kRows];
    struct ce_rig *rig = ce_rig_open(kernel_of(state), kRows, kVocab, LL_DTYPE_F32);
    float *padded = malloc(sizeof(float) * 2 * kRows * kPadded);
    assert_non_null(padded);
    for (int64_t e = 0; e < 2 * kRows * kPadded; ++e) padded[e] = NAN;
    for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t v = 0; v < kVocab; ++v) {
            ce_rig_set(rig, i, v, problem_normal(&random));
            padded[2 * i * kPadded + v] = (float)ce_rig_logit(rig, i, v);
        }
    }
    ce_rig_run(rig, LL_PASS_FORWARD);
    memcpy(packed, rig->nll, sizeof packed);
    const ll_view own = rig->args.logits;
    rig->args.logits = ll_view_matrix(padded, LL_DTYPE_F32, kRows, kVocab, 2 * kPadded);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    assert_memory_equal(rig->nll, packed, sizeof packed);
    for (int64_t i = 0; i < kRows; ++i) assert_true(isnan(padded[2 * i * kPadded + kVocab]));
    rig->args.logits = own;
    free(padded);
    ce_rig_close(rig);
}

/* B16: a column stride is refused, never read as 1; a step of targets is read. */
static void b16_strides(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 3, 8, LL_DTYPE_F32);
    const int64_t apart[] = {0, 99, 1, 99, 2};
    for (int64_t i = 0; i < 3; ++i) ce_rig_set(rig, i, i, 1.0);
    rig->args.target = ll_view_vector(apart, LL_DTYPE_I64, 3, 2);
    ce_rig_run(rig, LL_PASS_FORWARD);
    for (int64_t i = 0; i < 3; ++i) ce_near("nll", rig->nll[i], 1.274009, 1e-5, 0);
    rig->args.logits.col_stride = 2;
    rig->args.logits.cols = 8;
    assert_int_equal(ce_rig_try(rig, LL_PASS_FORWARD), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "column stride 2"));
    rig->args.logits.col_stride = 1;
    ce_rig_close(rig);
}

static void b23_no_tokens(void **state) {
    for (int reduction = 0; reduction < 3; ++reduction) {
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 0, 5, LL_DTYPE_F32);
        rig->loss.reduction = reduction;
        rig->loss_out[0] = 7.0f;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        assert_true(rig->loss_out[0] == (reduction == LL_REDUCTION_NONE ? 7.0f : 0.0f));
        ce_rig_close(rig);
    }
}

/* ---- Beyond 2^31 and 2^32 elements -------------------------------------------------------------- */

static void *reserve(size_t bytes) {
    void *data =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

/* B01, B03: five rows 2^31 - 65 elements apart, logits and gradient; the last begins beyond 2^32. */
static void b01_b03_rows_beyond_2_to_32(void **state) {
    enum { kRows = 5, kVocab = 600 };
    const int64_t stride = (INT64_C(1) << 31) - 65;
    const size_t bytes = (size_t)(kRows * stride) * 2;
    const char *backend = getenv("LL_TEST_BACKEND");
    if (backend && strcmp(backend, "cuda") == 0) skip(); /* 40 GB to and fro: cuda_tests ce has its own */
    uint64_t random = 13;
    float want[kRows];
    struct ce_rig *rig = ce_rig_open(kernel_of(state), kRows, kVocab, LL_DTYPE_BF16);
    char *logits = reserve(bytes), *grad = reserve(bytes);
    if (!logits || !grad) skip();
    for (int64_t i = 0; i < kRows; ++i) {
        rig->target[i] = i;
        for (int64_t v = 0; v < kVocab; ++v) ce_rig_set(rig, i, v, problem_normal(&random));
        memcpy(logits + (size_t)(i * stride) * 2, lli_row(&rig->args.logits, i), kVocab * 2);
    }
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    memcpy(want, rig->nll, sizeof want);
    const ll_view near_logits = rig->args.logits, near_grad = rig->args.grad_logits;
    rig->args.logits = ll_view_matrix(logits, LL_DTYPE_BF16, kRows, kVocab, stride);
    rig->args.grad_logits = ll_view_matrix(grad, LL_DTYPE_BF16, kRows, kVocab, stride);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    assert_memory_equal(rig->nll, want, sizeof want);
    for (int64_t i = 0; i < kRows; ++i) {
        assert_memory_equal(lli_row(&rig->args.grad_logits, i), lli_row(&near_grad, i), kVocab * 2);
    }
    rig->args.grad_logits = rig->args.logits; /* over them */
    rig->args.in_place = 1;
    rig->args.state = &rig->state;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    for (int64_t i = 0; i < kRows; ++i) {
        assert_memory_equal(lli_row(&rig->args.logits, i), lli_row(&near_grad, i), kVocab * 2);
    }
    rig->args.logits = near_logits;
    rig->args.grad_logits = near_grad;
    munmap(logits, bytes);
    munmap(grad, bytes);
    ce_rig_close(rig);
}

#define FAULT(name)                                                                                          \
    { #name, name }

int main(void) {
    static const struct ce_fault faults[] = {
        FAULT(b01_b03_rows_beyond_2_to_32),
        FAULT(b04_batch_and_slices),
        FAULT(b07_b08_many_and_wide_rows),
        FAULT(b12_softcap_and_tiles),
        FAULT(b15_rows_apart),
        FAULT(b16_strides),
        FAULT(b18_flat_rows_of_any_width),
        FAULT(b19_one_finite_logit),
        FAULT(b23_no_tokens),
        FAULT(b55_flat_bf16),
    };
    return ce_faults_main(faults, (int)(sizeof faults / sizeof faults[0]));
}
