/* ce on a GPU, beyond what every kernel is tested with: one row's bits on and off the chip, in any batch and
 * at any place; a CPU's bits of f32 logits; graphs, streams, ids and targets that the host does not see;
 * logits beyond 2^32 elements. */
#define _POSIX_C_SOURCE 200809L
#include "ce_run.h"
#include "core/dtype.h"
#include "cuda/image.h"
#include "faults/ce_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *kernel; /* under test */

/* Random rows, a target in each but for some that are ignored, upstreams of loss and entropy. */
struct rows {
    struct ce_rig *rig;
    float *up_entropy;
};

static struct rows rows_open(int64_t n, int64_t v, ll_dtype dtype, double scale) {
    uint64_t random = 77;
    struct rows rows = {ce_rig_open(kernel, n, v, dtype), malloc(sizeof(float) * (size_t)n)};
    assert_non_null(rows.up_entropy);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < v; ++c) ce_rig_set(rows.rig, i, c, scale * problem_normal(&random));
        rows.rig->target[i] = i % 7 == 3 ? -100 : (i * 7919 + v - 1) % v;
        rows.up_entropy[i] = (float)problem_normal(&random);
    }
    rows.rig->loss.reduction = LL_REDUCTION_SUM; /* no other row shows in a row's gradient */
    rows.rig->args.up_entropy = rows.up_entropy;
    return rows;
}

static void rows_close(struct rows *rows) {
    ce_rig_close(rows->rig);
    free(rows->up_entropy);
}

/* Tokens [first, first + n) of `want` beside all of `got`. */
static void same_rows(const char *what, const struct ce_rig *got, const struct ce_rig *want, int64_t first) {
    const size_t n = (size_t)got->n, f = sizeof(float);
    const float *a[] = {got->nll, got->lse, got->lse_lo, got->entropy};
    const float *b[] = {want->nll, want->lse, want->lse_lo, want->entropy};
    for (int field = 0; field < 4; ++field) {
        if (memcmp(a[field], b[field] + first, n * f) != 0) fail_msg("%s: field %d differs", what, field);
    }
    if (memcmp(got->argmax, want->argmax + first, n * 8) != 0) fail_msg("%s: argmax differs", what);
    const size_t bytes = ll_dtype_bytes((ll_dtype)got->args.grad_logits.dtype) * (size_t)got->v;
    for (int64_t i = 0; i < got->n; ++i) {
        if (memcmp(lli_row(&got->args.grad_logits, i), lli_row(&want->args.grad_logits, first + i), bytes) !=
            0) {
            fail_msg("%s: the gradient of row %lld differs", what, (long long)i);
        }
    }
}

/* Rows [first, first + n) of `whole` in a call of their own, `stride` columns apart and `off` columns from
 * where memory starts. */
static void check_part(const struct rows *whole, int64_t first, int64_t n, int64_t stride, int64_t off) {
    char what[96];
    const struct ce_rig *all = whole->rig;
    const int64_t v = all->v;
    const ll_dtype dtype = (ll_dtype)all->args.logits.dtype;
    const size_t element = ll_dtype_bytes(dtype);
    struct ce_rig *rig = ce_rig_open(kernel, n, v, dtype);
    char *memory = malloc(element * (size_t)(n * stride + off));
    assert_non_null(memory);
    memset(memory, 0xff, element * (size_t)(n * stride + off)); /* NaN between rows */
    const ll_view own = rig->args.logits;
    rig->args.logits = ll_view_matrix(memory + element * (size_t)off, dtype, n, v, stride);
    for (int64_t i = 0; i < n; ++i) {
        memcpy((char *)rig->args.logits.data + element * (size_t)(i * stride),
               lli_row(&all->args.logits, first + i), element * (size_t)v);
        rig->target[i] = all->target[first + i];
    }
    rig->loss = all->loss;
    rig->args.up_entropy = whole->up_entropy + first;
    snprintf(what, sizeof what, "rows [%lld, +%lld) of %lld columns, %lld apart", (long long)first,
             (long long)n, (long long)v, (long long)stride);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    same_rows(what, rig, all, first);
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_rig_run(rig, LL_PASS_BACKWARD);
    same_rows(what, rig, all, first);
    rig->args.logits = own;
    ce_rig_close(rig);
    free(memory);
}

static void any_batch_any_place_on_and_off_the_chip(void **state) {
    static const int64_t columns[] = {1, 2, 63, 64, 200, 1000, 4096, 33000, 50257, 131000, 262144, 300000};
    static const ll_dtype dtypes[] = {LL_DTYPE_BF16, LL_DTYPE_F32, LL_DTYPE_F16};
    static const int64_t counts[] = {1, 2, 17, 33};
    (void)state;
    for (size_t c = 0; c < sizeof columns / sizeof columns[0]; ++c) {
        const int64_t v = columns[c], n = v > 60000 ? 5 : 40, even = (v + 15) / 16 * 16;
        for (int d = 0; d < 3; ++d) {
            if (v > 60000 && d == 2) continue;
            struct rows rows = rows_open(n, v, dtypes[d], 4.0);
            ce_rig_run(rows.rig, LL_PASS_FORWARD_BACKWARD);
            check_part(&rows, 0, n, even, 0);      /* on the chip, where rows fit */
            check_part(&rows, 0, n, even + 3, 1);  /* read twice */
            check_part(&rows, 0, n, even + 16, 0); /* rows apart */
            for (int k = 0; k < 4 && counts[k] < n; ++k) {
                check_part(&rows, n - counts[k], counts[k], even, 0);
                check_part(&rows, (n - counts[k]) / 2, counts[k], v, 0);
            }
            rows_close(&rows);
        }
    }
}

/* Many rows a block, ignored ones among them in runs: slots go round, and a row without statistics must not
 * put the warps of its block out of step. */
static void more_rows_than_the_chip_takes_at_once(void **state) {
    static const struct {
        int64_t n, v;
        ll_dtype dtype;
    } shapes[] = {
        {3001, 3000, LL_DTYPE_F16},   {2500, 20000, LL_DTYPE_BF16}, {700, 60000, LL_DTYPE_F16},
        {520, 128256, LL_DTYPE_BF16}, {400, 128256, LL_DTYPE_F32},  {400, 200000, LL_DTYPE_F32},
    };
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
        const int64_t n = shapes[s].n, v = shapes[s].v, even = (v + 15) / 16 * 16;
        struct rows rows = rows_open(n, v, shapes[s].dtype, 6.0);
        for (int64_t i = 0; i < n; ++i) {
            if (i % 97 > 60 || i * 31 % 11 < 3) rows.rig->target[i] = -100;
        }
        ce_rig_run(rows.rig, LL_PASS_FORWARD_BACKWARD);
        check_part(&rows, 0, n, even, 0);
        check_part(&rows, 0, n, even + 1, 1);
        check_part(&rows, n - 2, 2, even, 0);
        check_part(&rows, n / 3, 257, even, 0);
        rows_close(&rows);
    }
}

static void equal_from_run_to_run(void **state) {
    (void)state;
    struct rows rows = rows_open(300, 50304, LL_DTYPE_BF16, 4.0);
    const size_t bytes = 2 * 300 * 50304;
    char *first = malloc(bytes);
    float loss;
    assert_non_null(first);
    for (int run = 0; run < 20; ++run) {
        ce_rig_run(rows.rig, LL_PASS_FORWARD_BACKWARD);
        if (run == 0) {
            loss = rows.rig->loss_out[0];
            memcpy(first, rows.rig->args.grad_logits.data, bytes);
        }
        assert_memory_equal(&loss, rows.rig->loss_out, sizeof loss);
        assert_memory_equal(first, rows.rig->args.grad_logits.data, bytes);
    }
    free(first);
    rows_close(&rows);
}

/* From f32 logits: every result and every dz. */
static void of_f32_logits_the_bits_of_the_cpu(void **state) {
    static const char *const texts[] = {
        "ce:f32:n37:v1000",
        "ce:f32:n5:v50257:ign7",
        "ce:f32:n6:v128256:zl0.0001",
        "ce:f32:n64:v63",
        "ce:f32:n33:v4097:t0.7:cap30",
        "ce:f32:n19:v2000:ls0.1:ign7",
        "ce:f32:n9:v3000:sx3:scale40",
        "ce:f32:n9:v3000:scale1000000",
        "ce:f32:n9:v3000:add10000",
        "ce:f32:n9:v3000:ninf5:conf0.99",
        "ce:f32:n30:v777:ids2:top5",
    };
    int failed = 0;
    (void)state;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct ce_operands operands;
        struct ce_results gpu, cpu;
        assert_null(problem_parse(texts[t], &problem));
        assert_true(ce_operands_create(&problem, &operands));
        assert_true(ce_results_create(&problem, &operands, &gpu) &&
                    ce_results_create(&problem, &operands, &cpu));
        const ll_ce_args on_gpu = ce_problem_args(&problem, &operands, &gpu, LL_PASS_FORWARD_BACKWARD);
        const ll_ce_args on_cpu = ce_problem_args(&problem, &operands, &cpu, LL_PASS_FORWARD_BACKWARD);
        failed +=
            ce_kernel_run(kernel, &problem, LL_PASS_FORWARD_BACKWARD, &on_gpu) != LL_STATUS_OK ||
            ce_kernel_run("ce_cpu_plain", &problem, LL_PASS_FORWARD_BACKWARD, &on_cpu) != LL_STATUS_OK ||
            ce_differences(&problem, "against the CPU", &gpu, &cpu, (1u << kCeFields) - 1) != 0;
        ce_results_destroy(&cpu);
        ce_results_destroy(&gpu);
        ce_operands_destroy(&operands);
    }
    assert_int_equal(failed, 0);
}

/* ---- Calls on streams --------------------------------------------------------------------------- */

struct device_call {
    struct image image;
    ll_plan *plan;
    void *workspace;
};

/* The rig's forward_backward with operands on the device, ready to be launched. */
static void device_call_open(struct ce_rig *rig, struct device_call *call) {
    size_t bytes = 0;
    rig->desc.loss = &rig->loss;
    assert_int_equal(ce_plan_of(rig->kernel, &rig->desc, &call->plan), LL_STATUS_OK);
    assert_int_equal(ll_plan_workspace(call->plan, LL_PASS_FORWARD_BACKWARD, &bytes), LL_STATUS_OK);
    ll_ce_args args = rig->args;
    args.workspace = call->workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
    args.workspace_bytes = bytes;
    assert_true(image_create_ce(&args, rig->v, rig->desc.n_top, rig->loss.reduction == LL_REDUCTION_NONE,
                                &call->image));
}

static void device_call_launch(struct device_call *call, ll_stream stream) {
    const ll_status status = ll_ce_forward_backward(call->plan, &call->image.ce, stream);
    if (status != LL_STATUS_OK) fail_msg("%s", ll_last_error());
}

static void device_call_close(struct device_call *call) {
    image_destroy(&call->image);
    ll_plan_destroy(call->plan);
    free(call->workspace);
}

static void a_graph_replayed_with_other_targets(void **state) {
    enum { kRows = 37, kColumns = 20000 };
    (void)state;
    for (int64_t stride = kColumns; stride <= kColumns + 1; ++stride) { /* on and off the chip */
        struct rows rows = rows_open(kRows, kColumns, LL_DTYPE_F32, 4.0);
        struct ce_rig *rig = rows.rig;
        float *memory = malloc(sizeof(float) * (size_t)(kRows * stride)), replayed[kRows];
        assert_non_null(memory);
        const ll_view own = rig->args.logits;
        for (int64_t i = 0; i < kRows; ++i)
            memcpy(memory + i * stride, lli_row(&own, i), sizeof(float) * kColumns);
        rig->args.logits = ll_view_matrix(memory, LL_DTYPE_F32, kRows, kColumns, stride);
        struct device_call call;
        device_call_open(rig, &call);
        ll_stream stream = stream_open();
        assert_true(capture_begin(stream));
        device_call_launch(&call, stream);
        void *graph = capture_end(stream);
        assert_non_null(graph);
        for (int round = 0; round < 3; ++round) {
            for (int64_t i = 0; i < kRows; ++i) {
                rig->target[i] = (i + round) % (2 + round) == 0 ? -100 : (i * 31 + round * 977) % kColumns;
            }
            image_refresh(&call.image);
            assert_true(graph_launch(graph, stream) && stream_wait(stream) && image_fetch(&call.image));
            memcpy(replayed, rig->nll, sizeof replayed);
            const float loss = rig->loss_out[0], dz = (float)ce_rig_grad(rig, kRows - 1, 5);
            ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD); /* eager */
            assert_memory_equal(replayed, rig->nll, sizeof replayed);
            assert_memory_equal(&loss, rig->loss_out, sizeof loss);
            assert_true(dz == (float)ce_rig_grad(rig, kRows - 1, 5));
        }
        graph_close(graph);
        stream_close(stream);
        device_call_close(&call);
        rig->args.logits = own;
        free(memory);
        rows_close(&rows);
    }
}

static void calls_side_by_side(void **state) {
    enum { kCalls = 6, kRows = 50, kColumns = 40000 };
    (void)state;
    struct rows rows = rows_open(kRows, kColumns, LL_DTYPE_BF16, 4.0);
    struct device_call calls[kCalls];
    ll_stream streams[kCalls];
    float want[kRows];
    ce_rig_run(rows.rig, LL_PASS_FORWARD_BACKWARD);
    memcpy(want, rows.rig->nll, sizeof want);
    for (int k = 0; k < kCalls; ++k) {
        device_call_open(rows.rig, &calls[k]);
        streams[k] = stream_open();
    }
    for (int round = 0; round < 5; ++round) {
        for (int k = 0; k < kCalls; ++k) device_call_launch(&calls[k], streams[k]);
    }
    for (int k = 0; k < kCalls; ++k) {
        assert_true(stream_wait(streams[k]));
        memset(rows.rig->nll, 0xff, sizeof want);
        assert_true(image_fetch(&calls[k].image));
        assert_memory_equal(want, rows.rig->nll, sizeof want);
        stream_close(streams[k]);
        device_call_close(&calls[k]);
    }
    rows_close(&rows);
}

/* ---- What the host does not see ----------------------------------------------------------------- */

static void bad_targets_and_ids(void **state) {
    enum { kRows = 5, kColumns = 3000, kIds = 3 };
    (void)state;
    for (int off = 0; off < 2; ++off) { /* on and off the chip */
        struct rows rows = rows_open(kRows, kColumns + off, LL_DTYPE_F32, 3.0);
        struct ce_rig *rig = rows.rig;
        int64_t bad = 40, ids[kRows * kIds], rank[kRows * kIds];
        float logp[kRows * kIds], clean[kRows];
        for (int k = 0; k < kRows * kIds; ++k) ids[k] = k;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        memcpy(clean, rig->nll, sizeof clean);
        rig->target[1] = kColumns + off;
        rig->target[2] = -1;
        ids[0] = -5;
        ids[2] = -100;
        rig->desc.n_ids = kIds;
        rig->args.ids = ll_view_matrix(ids, LL_DTYPE_I64, kRows, kIds, 0);
        rig->args.id_logp = logp;
        rig->args.id_rank = rank;
        rig->args.bad_targets = &bad;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        assert_int_equal(bad, 43);
        assert_true(isnan(rig->nll[1]) && isnan(rig->lse[2]) && isnan(ce_rig_grad(rig, 1, 7)));
        assert_true(isnan(logp[0]) && rank[0] == 0 && logp[2] == 0.0f && rank[2] == 0 && isnan(logp[kIds]));
        assert_true(clean[0] == rig->nll[0] && clean[4] == rig->nll[4] && !isnan(ce_rig_grad(rig, 4, 7)));
        ce_near("log p of an id", logp[1], ce_rig_logit(rig, 0, 1) - rig->lse[0], 0, 2e-6);
        rows_close(&rows);
    }
}

/* Two rows 2^32 elements apart, on 16 bytes and not: all zeros but for one logit of the last. */
static void rows_beyond_2_to_the_32(void **state) {
    enum { kColumns = 1000 };
    (void)state;
    for (int64_t off = 0; off < 2; ++off) {
        const int64_t stride = ((int64_t)1 << 32) + 8 + off;
        const size_t bytes = 2 * (size_t)(stride + kColumns);
        const uint16_t six = lli_f32_to_bf16(6.0f);
        struct ce_rig *rig = ce_rig_open(kernel, 2, kColumns, LL_DTYPE_BF16);
        ll_ce_state note = LL_CE_STATE_INIT;
        size_t workspace_bytes = 0;
        ll_plan *plan = NULL;
        float nll[2];
        uint16_t dz[2];
        char *logits = device_take(bytes), *small = device_take(4096), *workspace;
        if (!logits || !small) skip();
        rig->desc.loss = &rig->loss;
        assert_int_equal(ce_plan_of(kernel, &rig->desc, &plan), LL_STATUS_OK);
        ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &workspace_bytes);
        workspace = device_take(workspace_bytes);
        char *last = logits + 2 * stride;
        const float one = 1.0f;
        const int64_t targets[2] = {3, kColumns - 1};
        device_fill(logits, 0, 2 * kColumns);
        device_fill(last, 0, 2 * kColumns);
        device_write(last + 2 * (kColumns - 1), &six, 2);
        device_write(small, targets, sizeof targets);
        device_write(small + 64, &one, sizeof one);
        ll_ce_args args = LL_CE_ARGS_INIT;
        args.logits = args.grad_logits = ll_view_matrix(logits, LL_DTYPE_BF16, 2, kColumns, stride);
        args.target = ll_view_vector(small, LL_DTYPE_I64, 2, 0);
        args.up_loss = (const float *)(small + 64);
        args.nll = (float *)(small + 128);
        args.in_place = 1;
        args.state = &note;
        args.workspace = workspace;
        args.workspace_bytes = workspace_bytes;
        ll_stream stream = stream_open();
        assert_int_equal(ll_ce_forward_backward(plan, &args, stream), LL_STATUS_OK);
        assert_true(stream_wait(stream));
        device_read(nll, small + 128, sizeof nll);
        device_read(&dz[0], last, 2);
        device_read(&dz[1], last + 2 * (kColumns - 1), 2);
        const double rest = (double)(kColumns - 1) * exp(-6.0), p = 1.0 / (1.0 + rest);
        ce_near("nll", nll[0], log((double)kColumns), 1e-6, 0);
        ce_near("nll of the last", nll[1], log1p(rest), 1e-6, 0);
        ce_near("dz", lli_bf16_to_f32(dz[0]), exp(-6.0) * p / 2.0, 0x1p-8, 0);
        ce_near("dz of the target", lli_bf16_to_f32(dz[1]), (p - 1.0) / 2.0, 0x1p-8, 0);
        stream_close(stream);
        ll_plan_destroy(plan);
        device_release(workspace);
        device_release(small);
        device_release(logits);
        ce_rig_close(rig);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_batch_any_place_on_and_off_the_chip),
        cmocka_unit_test(more_rows_than_the_chip_takes_at_once),
        cmocka_unit_test(equal_from_run_to_run),
        cmocka_unit_test(of_f32_logits_the_bits_of_the_cpu),
        cmocka_unit_test(a_graph_replayed_with_other_targets),
        cmocka_unit_test(calls_side_by_side),
        cmocka_unit_test(bad_targets_and_ids),
        cmocka_unit_test(rows_beyond_2_to_the_32),
    };
    const struct kernel_list list = kernels_of("ce_cuda");
    int failed = 0;
    for (int32_t k = 0; k < list.count; ++k) {
        kernel = list.kernels[k].name;
        failed += _cmocka_run_group_tests(kernel, tests, sizeof tests / sizeof tests[0], NULL, NULL);
    }
    return failed + (list.count == 0);
}
