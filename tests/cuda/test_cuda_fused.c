/* The passes on Hopper that keep no logits, beside the products, statistics and gradients of linear_ce_cuda:
 * the same bits, whatever the grid, and from run to run. Where the other kernel's bits stand is
 * test_cuda_bits.c. One pass by exponentials, cut in every way, also against the reference. */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "core/dtype.h"
#include "core/expect.h"
#include "cuda/image.h"
#include "kernel_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define FUSED "linear_ce_cuda_sm90"
#define PLAIN "linear_ce_cuda"

enum { kRepeats = 100 };

static bool fused_runs(void) {
    const struct kernel_list list = kernels_here();
    for (int32_t k = 0; k < list.count; ++k) {
        if (strcmp(list.kernels[k].name, FUSED) == 0) return true;
    }
    return false;
}

static void problem_open(const char *text, struct problem *problem, struct operands *operands) {
    const char *why = problem_parse(text, problem);
    if (why) fail_msg("%s", why);
    if (!operands_create(problem, operands)) fail_msg("out of memory");
}

/* A forward with the workspace budget (0: the default), against `want`. */
static int64_t check_forward(const struct problem *problem, const struct operands *operands,
                             const struct results *want, int64_t kib, int32_t fields, const char *what) {
    struct problem variant = *problem;
    struct results got;
    variant.workspace_kib = kib;
    assert_true(results_create(problem, &got));
    ll_linear_ce_args args = problem_args(problem, operands, &got, LL_PASS_FORWARD);
    if (!(fields & 1 << FIELD_ARGMAX)) args.argmax = NULL;
    if (!(fields & 1 << FIELD_ENTROPY)) args.entropy = NULL;
    const bool fine = kernel_run(FUSED, &variant, LL_PASS_FORWARD, &args) == LL_STATUS_OK &&
                      results_same_bits(problem, FUSED, what, &got, want, fields, 0, problem->n_tokens);
    results_destroy(&got);
    return fine ? 0 : 1;
}

/* All outputs; without argmax (another variant of the kernel); without entropy too; and with fewer clusters,
 * because a smaller budget holds fewer slots. */
static int64_t check_problem(const char *text) {
    struct problem problem;
    struct operands operands;
    struct results want;
    problem_open(text, &problem, &operands);
    assert_true(results_create(&problem, &want));
    ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD);
    assert_int_equal(kernel_run(PLAIN, &problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
    const int32_t no_argmax = FIELDS_FORWARD & ~(1 << FIELD_ARGMAX),
                  least = no_argmax & ~(1 << FIELD_ENTROPY);
    int64_t failed = check_forward(&problem, &operands, &want, 0, FIELDS_FORWARD, "all outputs") +
                     check_forward(&problem, &operands, &want, 0, no_argmax, "without argmax") +
                     check_forward(&problem, &operands, &want, 0, least, "without argmax and entropy");
    if (problem.n_tokens >= 1024) {
        for (int64_t mib = 48; mib <= 192; mib *= 2) {
            failed += check_forward(&problem, &operands, &want, mib << 10, FIELDS_FORWARD, "a budget");
        }
    }
    results_destroy(&want);
    operands_destroy(&operands);
    return failed;
}

static void the_bits_of_products_and_statistics(void **state) {
    (void)state;
    static const char *const texts[] = {
        /* around tiles of 64, 128, 192 and 256, and less than a step of k */
        "fwd:bf16:n1:d8:v1",
        "fwd:bf16:n1:d64:v64",
        "fwd:bf16:n2:d8:v65",
        "fwd:bf16:n127:d72:v191",
        "fwd:bf16:n128:d64:v192",
        "fwd:bf16:n129:d120:v193",
        "fwd:bf16:n255:d128:v384",
        "fwd:bf16:n256:d192:v385",
        "fwd:bf16:n257:d200:v500",
        "fwd:bf16:n300:d520:v1000",
        "fwd:bf16:n17:d4096:v700",
        "fwd:bf16:n1:d4096:v50257",
        "fwd:bf16:n700:d4160:v3001",
        "fwd:bf16:n700:d256:v30001",
        "fwd:bf16:n1000:d1000:v12345:ign3",
        "fwd:bf16:n1800:d320:v9001",
        "fwd:bf16:n3300:d256:v5000",
        "fwd:bf16:n4096:d384:v9000",
        "fwd:bf16:n5000:d128:v4001:none",
        /* strides, padding, targets */
        "fwd:bf16:n130:d64:v300:sx8:sw16:pad37",
        "fwd:bf16:n130:d64:v300:sx3",
        "fwd:bf16:n130:d64:v300:off1",
        "fwd:bf16:n130:d64:v300:i32:ign2:id7",
        "fwd:bf16:n70:d64:v300:ignall",
        "fwd:bf16:n130:d64:v4000:conf40",
        "fwd:bf16:n130:d64:v4000:cw0:tw0:zl0.1:none",
        "fwd:bf16:n130:d64:v4000:ts",
        /* options */
        "fwd:bf16:n260:d64:v1000:bias",
        "fwd:bf16:n260:d64:v1000:t0.7",
        "fwd:bf16:n260:d64:v1003:biasf32:t3:sb1",
        "fwd:bf16:n260:d64:v1000:tie",
        "fwd:bf16:n260:d64:v1000:tie:bias:t0.1",
        /* logits of any range */
        "fwd:bf16:n260:d64:v1000:nan5",
        "fwd:bf16:n260:d64:v1000:ninf3:up",
        "fwd:bf16:n260:d64:v1000:ninf900:none",
        "fwd:bf16:n260:d64:v1000:scale300:none",
        "fwd:bf16:n260:d64:v700:scale3e6:none",
        "fwd:bf16:n260:d64:v700:scale3e9:none",
        "fwd:bf16:n130:d64:v700:scale3e30:none",
        "fwd:bf16:n260:d64:v1000:add-200",
        "fwd:bf16:n260:d64:v1000:add1e4:bias",
    };
    int64_t failed = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) failed += check_problem(texts[t]);
    assert_int_equal(failed, 0);
}

static void repeated(void **state) {
    (void)state;
    static const char *const texts[] = {"fwd:bf16:n700:d512:v9001", "fwd:bf16:n300:d128:v5000:bias"};
    int64_t failed = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct operands operands;
        struct results want;
        problem_open(texts[t], &problem, &operands);
        assert_true(results_create(&problem, &want));
        ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD);
        assert_int_equal(kernel_run(FUSED, &problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
        for (int round = 0; round < kRepeats; ++round) {
            failed += check_forward(&problem, &operands, &want, 0, FIELDS_FORWARD, "a repeat");
        }
        results_destroy(&want);
        operands_destroy(&operands);
    }
    assert_int_equal(failed, 0);
}

/* forward, then backward from what it saved. */
static bool forward_then_backward(const char *kernel, const struct problem *problem,
                                  const struct operands *operands, struct results *results) {
    ll_linear_ce_args args = problem_args(problem, operands, results, LL_PASS_FORWARD);
    if (kernel_run(kernel, problem, LL_PASS_FORWARD, &args) != LL_STATUS_OK) return false;
    args = problem_args(problem, operands, results, LL_PASS_BACKWARD);
    return kernel_run(kernel, problem, LL_PASS_BACKWARD, &args) == LL_STATUS_OK;
}

static void gradients_without_logits(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n70:d4096:v700:gwf32",
        "fb:bf16:n300:d4160:v1000",
        "fb:bf16:n70:d4096:v700:up",
        "fb:bf16:n1:d8:v1:up",
        "fb:bf16:n1:d64:v700",
        "fb:bf16:n129:d120:v193:up:gwf32:gxf32",
        "fb:bf16:n300:d64:v1000:up:gwf32",
        "fb:bf16:n300:d64:v1000:gwf32:ign3",
        "fb:bf16:n65:d200:v257:none",
        "fb:bf16:n700:d256:v20000:up",
        "fb:bf16:n1100:d72:v16390:up:gwf32",
        "fb:bf16:n5000:d64:v17000:gwf32:up",
        "fb:bf16:n4200:d64:v17000",
        /* products of grad_sm90.cu: tiles of 64, 128 and 192 columns, one block and two, and a rest of 64 */
        "fb:bf16:n256:d64:v8192:up:gwf32",
        "fb:bf16:n257:d128:v20001:up:gwf32",
        "fb:bf16:n1000:d192:v9000",
        "fb:bf16:n300:d448:v16383:up",
        "fb:bf16:n9000:d256:v8200:up",
        "fb:bf16:n300:d320:v40:up:gwf32",
        "fb:bf16:n300:d64:v1000:sx8:sw16:sgx8:sgw8:pad37:up",
        "fb:bf16:n300:d64:v1000:off1",
        "fb:bf16:n300:d64:v1000:fx:up",
        "fb:bf16:n300:d64:v1000:fw:up",
        "fb:bf16:n300:d64:v1000:acc:up:gwf32",
        "fb:bf16:n130:d64:v300:sx8:sw16:sgx8:sgw8:pad37:up",
        "fb:bf16:n130:d64:v300:off1",
        "fb:bf16:n130:d64:v300:fx:up",
        "fb:bf16:n130:d64:v300:fw:up",
        "fb:bf16:n130:d64:v300:acc:up:gwf32",
        "fb:bf16:n130:d64:v4000:conf40:up",
        "fb:bf16:n130:d64:v4000:cw0:tw0:zl0.1:none",
        "fb:bf16:n130:d64:v4000:ts",
        "fb:bf16:n130:d64:v1000:t0.7:bias:up",
        "fb:bf16:n70:d64:v300:ignall",
        "fb:bf16:n130:d64:v1000:nan5:up",
        "fb:bf16:n130:d64:v700:scale300:none:up",
        "fb:bf16:n130:d64:v700:scale3e6:none:up",
        "fb:bf16:n130:d64:v700:scale3e9:none:up",
        "fb:bf16:n130:d64:v700:scale3e30:none",
    };
    int64_t failed = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct operands operands;
        struct results got, want;
        problem_open(texts[t], &problem, &operands);
        assert_true(results_create(&problem, &got) && results_create(&problem, &want));
        const bool fine = forward_then_backward(PLAIN, &problem, &operands, &want) &&
                          forward_then_backward(FUSED, &problem, &operands, &got) &&
                          results_same_bits(&problem, FUSED, "forward, backward", &got, &want, FIELDS_ALL, 0,
                                            problem.n_tokens);
        failed += !fine;
        results_destroy(&got);
        results_destroy(&want);
        operands_destroy(&operands);
    }
    assert_int_equal(failed, 0);
}

/* ---- One pass by exponentials ------------------------------------------------------------------- */

/* How the plan cuts one pass. */
struct cuts {
    bool exponentials;
    long long kept_cols, first, rest; /* kept_cols 0: all */
    size_t bytes;
    ll_status status;
};

static struct cuts cuts_of(const struct problem *problem) {
    struct cuts cuts = {0};
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    char text[2048] = "";
    problem_desc(problem, &desc);
    setenv("LL_KERNEL", FUSED, 1);
    cuts.status = ll_plan_create(&desc, &plan);
    unsetenv("LL_KERNEL");
    if (cuts.status != LL_STATUS_OK) return cuts;
    assert_int_equal(ll_plan_describe(plan, text, sizeof text), LL_STATUS_OK);
    assert_int_equal(ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &cuts.bytes), LL_STATUS_OK);
    cuts.exponentials = strstr(text, "exponentials kept") != NULL;
    const char *at = strstr(text, "forward_backward in 3 GEMMs");
    if (cuts.exponentials && at &&
        sscanf(at, "forward_backward in 3 GEMMs, first %lld, then %lld", &cuts.first, &cuts.rest) != 2) {
        const int read = sscanf(at, "forward_backward in 3 GEMMs for %lld columns, 4 for the rest, %lld",
                                &cuts.kept_cols, &cuts.first);
        if (read != 2) fail_msg("%s: cannot read: %s", problem->text, text);
        cuts.rest = cuts.first;
    }
    ll_plan_destroy(plan);
    return cuts;
}

static int64_t one_pass(const struct problem *problem, const struct operands *operands,
                        const struct results *want, int32_t fields, const char *what) {
    struct results got;
    assert_true(results_create(problem, &got));
    const ll_linear_ce_args args = problem_args(problem, operands, &got, LL_PASS_FORWARD_BACKWARD);
    const bool fine = kernel_run(FUSED, problem, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK &&
                      results_same_bits(problem, FUSED, what, &got, want, fields, 0, problem->n_tokens) &&
                      results_intact(&got);
    results_destroy(&got);
    return fine ? 0 : 1;
}

/* A forward and a backward of the other kernel, which keeps nothing. */
static void one_pass_by_exponentials(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n1:d8:v1:up",
        "fb:bf16:n1:d64:v700",
        "fb:bf16:n70:d4096:v700:gwf32",
        "fb:bf16:n70:d4096:v700:up",
        "fb:bf16:n300:d4160:v1000:up",
        "fb:bf16:n127:d72:v191",
        "fb:bf16:n128:d64:v192:gwf32",
        "fb:bf16:n129:d120:v193:up:gwf32:gxf32",
        "fb:bf16:n255:d128:v384:up",
        "fb:bf16:n257:d200:v385:gwf32:none",
        "fb:bf16:n300:d64:v1000:up:gwf32",
        "fb:bf16:n300:d64:v1000:gwf32:ign3",
        "fb:bf16:n65:d200:v257:none",
        "fb:bf16:n700:d256:v20000:up",
        "fb:bf16:n1100:d72:v16390:up:gwf32",
        "fb:bf16:n2100:d64:v17000:gwf32:up",
        "fb:bf16:n4200:d64:v17000",
        /* all blocks in one launch, which makes dz from the second or third on */
        "fb:bf16:n300:d64:v16385",
        "fb:bf16:n300:d64:v50001:up:gwf32",
        "fb:bf16:n600:d128:v41000",
        "fb:bf16:n257:d320:v33000:up",
        "fb:bf16:n256:d4224:v25000:gwf32",
        "fb:bf16:n300:d64:v40000:fx:up",
        "fb:bf16:n300:d64:v40000:fw:up",
        "fb:bf16:n300:d64:v40000:acc:up:gwf32",
        "fb:bf16:n300:d64:v40000:ign3:conf40",
        "fb:bf16:n300:d64:v40000:nan5:up",
        "fb:bf16:n300:d64:v40000:scale3e6:none:up",
        /* what does not lie in grad_w's memory, or not all of it */
        "fb:bf16:n300:d64:v1000:acc:up:gwf32",
        "fb:bf16:n300:d64:v1000:acc",
        "fb:bf16:n130:d64:v300:sx8:sw16:sgx8:sgw8:pad37:up",
        "fb:bf16:n130:d64:v300:pad37:gwf32",
        "fb:bf16:n130:d64:v301:sgw3:gwf32",
        "fb:bf16:n130:d64:v300:off1",
        "fb:bf16:n130:d64:v300:fx:up",
        "fb:bf16:n130:d64:v300:fw:up",
        /* targets and weights */
        "fb:bf16:n130:d64:v4000:conf40:up",
        "fb:bf16:n130:d64:v4000:cw0:tw0:zl0.1:none",
        "fb:bf16:n130:d64:v4000:ts:tw:cw",
        "fb:bf16:n130:d64:v300:i32:ign2:id7:up",
        "fb:bf16:n70:d64:v300:ignall",
        "fb:bf16:n70:d64:v300:ignall:gwf32:acc",
        /* logits of any range */
        "fb:bf16:n130:d64:v1000:nan5:up",
        "fb:bf16:n130:d64:v1000:scale0",
        "fb:bf16:n130:d64:v700:scale300:none:up",
        "fb:bf16:n130:d64:v700:scale3e6:none:up",
        "fb:bf16:n130:d64:v700:scale3e6:none:gwf32:acc",
        "fb:bf16:n130:d64:v700:scale3e9:none:up",
        "fb:bf16:n130:d64:v700:scale3e30:none",
        /* other ways */
        "fb:bf16:n130:d64:v1000:t0.7:up",
        "fb:bf16:n130:d64:v1000:bias:up",
    };
    int64_t failed = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct operands operands;
        struct results want;
        problem_open(texts[t], &problem, &operands);
        const bool plain = problem.bias_dtype == LL_DTYPE_NONE && problem.loss.temperature == 1.0f;
        assert_int_equal(cuts_of(&problem).exponentials, plain);
        assert_true(results_create(&problem, &want));
        failed += !forward_then_backward(PLAIN, &problem, &operands, &want);
        failed += one_pass(&problem, &operands, &want, FIELDS_ALL, "one pass");
        ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
        if (args.argmax) { /* another variant of the kernel */
            struct results got;
            assert_true(results_create(&problem, &got));
            args = problem_args(&problem, &operands, &got, LL_PASS_FORWARD_BACKWARD);
            args.argmax = NULL;
            failed += kernel_run(FUSED, &problem, LL_PASS_FORWARD_BACKWARD, &args) != LL_STATUS_OK ||
                      !results_same_bits(&problem, FUSED, "one pass without argmax", &got, &want,
                                         FIELDS_ALL & ~(1 << FIELD_ARGMAX), 0, problem.n_tokens);
            results_destroy(&got);
        }
        results_destroy(&want);
        operands_destroy(&operands);
    }
    assert_int_equal(failed, 0);
}

/* Rows and grad_x have the same bits however a budget cuts the pass; grad_w, a sum over chunks, is right. All
 * ways of cutting occur: one chunk, two, more, and columns that are not kept. */
static void any_number_of_chunks(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n768:d16:v1000:gwf32:up",  "fb:bf16:n768:d16:v1000:gwf32:acc",
        "fb:bf16:n800:d16:v1000:up",        "fb:bf16:n800:d16:v1000:acc:ign5",
        "fb:bf16:n800:d16:v1000:fw",        "fb:bf16:n500:d8:v5000:gwf32",
        "fb:bf16:n500:d8:v5000:nan9:gwf32", "fb:bf16:n500:d8:v5000:scale3e6:none",
    };
    int64_t failed = 0, seen[4] = {0}, partly = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct operands operands;
        struct results want;
        struct expectation expect;
        struct expect_stats stats = {0};
        problem_open(texts[t], &problem, &operands);
        const struct expect_rounding rounding = expect_rounding_here(&problem);
        assert_true(expectation_create_for(&problem, &operands, &rounding, &expect));
        assert_true(results_create(&problem, &want));
        failed += !forward_then_backward(PLAIN, &problem, &operands, &want);
        for (int64_t kib = 2 << 10; kib < 64 << 10; kib += kib / 4) {
            struct problem variant = problem;
            struct results got;
            variant.workspace_kib = kib;
            const struct cuts cuts = cuts_of(&variant);
            if (cuts.status != LL_STATUS_OK) continue; /* too little */
            assert_true(cuts.bytes <= (size_t)kib << 10);
            if (cuts.exponentials) {
                const bool in_w = !problem.accumulate && !(problem.frozen & LL_FROZEN_W);
                const int64_t after = in_w ? problem.n_tokens - cuts.first : problem.n_tokens;
                const int64_t chunks = in_w + (after > 0 ? (after + cuts.rest - 1) / cuts.rest : 0);
                seen[chunks < 3 ? chunks : 3]++;
                partly += cuts.kept_cols != 0;
            }
            char what[64];
            snprintf(what, sizeof what, "a budget of %lld KiB", (long long)kib);
            assert_true(results_create(&problem, &got));
            const ll_linear_ce_args args = problem_args(&variant, &operands, &got, LL_PASS_FORWARD_BACKWARD);
            failed += kernel_run(FUSED, &variant, LL_PASS_FORWARD_BACKWARD, &args) != LL_STATUS_OK ||
                      !results_same_bits(&problem, FUSED, what, &got, &want,
                                         FIELDS_FORWARD | 1 << FIELD_GRAD_X, 0, problem.n_tokens);
            expectation_check(&expect, FUSED, what, &got, FIELDS_GRADIENTS, &stats);
            results_destroy(&got);
        }
        failed += stats.failed;
        results_destroy(&want);
        expectation_destroy(&expect);
        operands_destroy(&operands);
    }
    printf("one pass in one chunk: %lld budgets, two: %lld, more: %lld; some columns not kept: %lld\n",
           (long long)seen[1], (long long)seen[2], (long long)seen[3], (long long)partly);
    assert_true(seen[1] && seen[2] && seen[3] && partly);
    assert_int_equal(failed, 0);
}

/* x is (1, 0, ...), so a row of grad_w is dz itself: the target's entry p - 1 is rounded once, to bf16;
 * others go through an exponential of 11 bits first. */
static void confident_tokens(void **state) {
    (void)state;
    static const double sure[] = {0.9, 0.99, 0.999, 1 - 1e-6};
    if (!fused_runs()) skip();
    for (size_t s = 0; s < sizeof sure / sizeof sure[0]; ++s) {
        struct problem problem;
        struct operands operands;
        struct results got;
        problem_open("fb:bf16:n1:d8:v300:gwf32:sum", &problem, &operands);
        ll_linear_ce_args args = operands.args;
        const int64_t y = lli_id(&args.target, 0);
        double z[300], whole = 0.0, rest = 0.0;
        for (int64_t k = 0; k < 8; ++k)
            lli_store((void *)args.x.data, LL_DTYPE_BF16, k, k == 0 ? 1.0f : 0.0f);
        for (int64_t v = 0; v < 300; ++v) {
            const double of_others = (double)(v % 7) / 4.0;
            const double wish = v == y ? log(sure[s] / (1 - sure[s]) * 299.0) + 0.9 : of_others;
            lli_store((void *)args.w.data, LL_DTYPE_BF16, v * args.w.row_stride, (float)wish);
            z[v] = view_value(&args.w, v, 0);
        }
        for (int64_t v = 0; v < 300; ++v) whole += exp(z[v]);
        for (int64_t v = 0; v < 300; ++v) rest += v == y ? 0.0 : exp(z[v]);
        assert_true(results_create(&problem, &got));
        args = problem_args(&problem, &operands, &got, LL_PASS_FORWARD_BACKWARD);
        const double up = args.up_loss ? (double)*args.up_loss : 0.0;
        assert_true(up != 0.0);
        assert_int_equal(kernel_run(FUSED, &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
        for (int64_t v = 0; v < 300; ++v) {
            const double want = up * (v == y ? -rest / whole : exp(z[v]) / whole);
            const double allowed = fabs(want) * (v == y ? 0x1.01p-8 : 0x1.21p-8);
            const double dz = view_value(&got.grad_w, v, 0);
            if (!(fabs(dz - want) <= allowed))
                fail_msg("p %g: dz[%d] is %.9g, want %.9g", sure[s], (int)v, dz, want);
        }
        results_destroy(&got);
        operands_destroy(&operands);
    }
}

static void one_pass_repeated(void **state) {
    (void)state;
    static const char *const texts[] = {"fb:bf16:n700:d512:v9001:up", "fb:bf16:n600:d128:v41000",
                                        "fb:bf16:n1300:d128:v5000:gwf32:acc:ws65536"};
    int64_t failed = 0;
    if (!fused_runs()) skip();
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        struct problem problem;
        struct operands operands;
        struct results want;
        problem_open(texts[t], &problem, &operands);
        assert_true(results_create(&problem, &want));
        const ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
        assert_int_equal(kernel_run(FUSED, &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
        for (int round = 0; round < kRepeats / 4; ++round) {
            failed += one_pass(&problem, &operands, &want, FIELDS_ALL, "a repeat of one pass");
        }
        results_destroy(&want);
        operands_destroy(&operands);
    }
    assert_int_equal(failed, 0);
}

/* What it does not take goes to linear_ce_cuda, and the plan says why. */
static void refused_by_a_sentence(void **state) {
    (void)state;
    static const struct {
        const char *text, *sentence;
    } cases[] = {
        {"fwd:f16:n4:d64:v300", "x and w are f16, wanted bf16"},
        {"fwd:bf16:n4:d33:v300", "n_hidden is 33"},
        {"fwd:bf16:n4:d64:v300:cap5", "a softcap is not in this kernel"},
        {"fwd:bf16:n4:d64:v300:ls0.1", "label smoothing is not in this kernel"},
    };
    if (!fused_runs()) skip();
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; ++c) {
        struct problem problem;
        ll_plan_desc desc;
        ll_plan *plan = NULL;
        char text[2048];
        assert_null(problem_parse(cases[c].text, &problem));
        problem_desc(&problem, &desc);
        desc.backend = LL_BACKEND_CUDA;
        assert_int_equal(ll_plan_create(&desc, &plan), LL_STATUS_OK);
        assert_string_equal(ll_plan_kernel(plan), PLAIN);
        assert_int_equal(ll_plan_describe(plan, text, sizeof text), LL_STATUS_OK);
        if (!strstr(text, cases[c].sentence))
            fail_msg("%s: no \"%s\" in: %s", cases[c].text, cases[c].sentence, text);
        ll_plan_destroy(plan);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_by_a_sentence),    cmocka_unit_test(the_bits_of_products_and_statistics),
        cmocka_unit_test(gradients_without_logits), cmocka_unit_test(one_pass_by_exponentials),
        cmocka_unit_test(any_number_of_chunks),     cmocka_unit_test(confident_tokens),
        cmocka_unit_test(one_pass_repeated),        cmocka_unit_test(repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
