/* bench_cuda_ce [--rounds N] [TYPE:nN:vV ...], TYPE bf16, f16 or f32: the passes of ce over given logits on
 * this GPU, in turn with a copy of the logits, which reads and writes what forward and gradient must at
 * least. "of_copy" of a pass is the copy's time over its own; of the forward, which writes no gradient, half
 * of it. The gradient lies in memory of its own. Rows are random, mean 0, standard deviation 4. A few rows'
 * nll are compared with double arithmetic. One line of JSON a problem. */
#define _POSIX_C_SOURCE 200809L
#include "bench_cuda.h"

#include "core/dtype.h"

#include <math.h>

enum { kRoundsMax = 64, kSteps = 4, kCheckedRows = 4 };

static const char *const step_names[kSteps] = {"copy", "forward", "backward", "forward_backward"};

typedef struct problem {
    int64_t n, v;
    ll_dtype dtype;
    size_t bytes; /* of the logits */
    void *logits, *gradient;
    int64_t *targets; /* on the host */
    ll_plan *plan;
    ll_ce_args args[3];
    float *nll;
} problem;

/* The same numbers in every type. */
static void put_logits(problem *p) {
    const int64_t count = p->n * p->v;
    const size_t element = lli_dtype_bytes(p->dtype);
    uint16_t *stretch = make_stretch(4.0f, 1);
    char *typed = malloc(kStretch * element);
    for (int64_t i = 0; i < kStretch; i++) lli_store(typed, p->dtype, i, lli_bf16_to_f32(stretch[i]));
    for (int64_t at = 0; at < count; at += kStretch) {
        const int64_t n = count - at < kStretch ? count - at : kStretch;
        CHECK(cudaMemcpy((char *)p->logits + (size_t)at * element, typed, (size_t)n * element,
                         cudaMemcpyHostToDevice));
    }
    free(typed);
    free(stretch);
}

static void open_problem(problem *p) {
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    const size_t n = (size_t)p->n;
    p->bytes = n * (size_t)p->v * lli_dtype_bytes(p->dtype);
    desc.op = LL_OP_CE;
    desc.backend = LL_BACKEND_CUDA;
    desc.n_tokens_max = p->n;
    desc.v_local = desc.v_total = p->v;
    desc.logits_dtype = desc.grad_logits_dtype = p->dtype;
    CHECK(ll_plan_create(&desc, &p->plan));
    p->logits = take(p->bytes);
    p->gradient = take(p->bytes);
    put_logits(p);
    p->targets = malloc(n * sizeof *p->targets);
    for (int64_t i = 0; i < p->n; i++) p->targets[i] = i * 7919 % p->v;
    int64_t *target = take(n * sizeof *target);
    CHECK(cudaMemcpy(target, p->targets, n * sizeof *target, cudaMemcpyHostToDevice));
    const float one = 1.0f;
    float *scalars = take(2 * sizeof(float)), *lse = take(4 * n), *lse_lo = take(4 * n);
    CHECK(cudaMemcpy(scalars, &one, sizeof one, cudaMemcpyHostToDevice));
    p->nll = take(4 * n);
    for (int pass = 0; pass < 3; pass++) {
        ll_ce_args *a = &p->args[pass];
        *a = (ll_ce_args)LL_CE_ARGS_INIT;
        a->logits = ll_view_matrix(p->logits, p->dtype, p->n, p->v, 0);
        a->target = ll_view_vector(target, LL_DTYPE_I64, p->n, 0);
        a->nll = p->nll, a->lse = lse, a->lse_lo = lse_lo;
        if (pass != LL_PASS_BACKWARD) a->loss = scalars + 1;
        if (pass != LL_PASS_FORWARD) {
            a->up_loss = scalars;
            a->grad_logits = ll_view_matrix(p->gradient, p->dtype, p->n, p->v, 0);
        }
        CHECK(ll_plan_workspace(p->plan, (ll_pass)pass, &a->workspace_bytes));
        a->workspace = take(a->workspace_bytes);
    }
}

static void close_problem(problem *p) {
    void *const memory[] = {p->logits,
                            p->gradient,
                            (void *)p->args[0].target.data,
                            (void *)p->args[1].up_loss,
                            p->args[0].lse,
                            p->args[0].lse_lo,
                            p->nll,
                            p->args[0].workspace,
                            p->args[1].workspace,
                            p->args[2].workspace};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) CHECK(cudaFree(memory[i]));
    ll_plan_destroy(p->plan);
    free(p->targets);
}

static void run_step(const problem *p, int step) {
    if (step == 0) CHECK(cudaMemcpyAsync(p->gradient, p->logits, p->bytes, cudaMemcpyDeviceToDevice, 0));
    if (step == 1) CHECK(ll_ce_forward(p->plan, &p->args[LL_PASS_FORWARD], NULL));
    if (step == 2) CHECK(ll_ce_backward(p->plan, &p->args[LL_PASS_BACKWARD], NULL));
    if (step == 3) CHECK(ll_ce_forward_backward(p->plan, &p->args[LL_PASS_FORWARD_BACKWARD], NULL));
}

/* The largest error of nll in a few rows; the last row is one of them. */
static double nll_error(const problem *p) {
    const size_t row_bytes = p->bytes / (size_t)p->n;
    char *row = malloc(row_bytes);
    double worst = 0.0;
    for (int k = 0; k < kCheckedRows; k++) {
        const int64_t i = (p->n - 1) * k / (kCheckedRows - 1);
        float nll;
        double max = -INFINITY, sum = 0.0;
        CHECK(cudaMemcpy(row, (const char *)p->logits + (size_t)i * row_bytes, row_bytes,
                         cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&nll, p->nll + i, sizeof nll, cudaMemcpyDeviceToHost));
        for (int64_t c = 0; c < p->v; c++) max = fmax(max, (double)lli_load(row, p->dtype, c));
        for (int64_t c = 0; c < p->v; c++) sum += exp((double)lli_load(row, p->dtype, c) - max);
        const double off =
            fabs((double)nll - (max + log(sum) - (double)lli_load(row, p->dtype, p->targets[i])));
        if (!(off <= worst)) worst = off; /* NaN stays */
    }
    free(row);
    return worst;
}

static void measure(const char *text, int rounds) {
    problem p = {0};
    char type[8] = "";
    long long n = 0, v = 0;
    if (sscanf(text, "%7[a-z0-9]:n%lld:v%lld", type, &n, &v) != 3 || n < 1 || v < 1 ||
        (strcmp(type, "bf16") != 0 && strcmp(type, "f16") != 0 && strcmp(type, "f32") != 0)) {
        fprintf(stderr, "bench_cuda_ce: '%s' is no TYPE:nN:vV with TYPE bf16, f16 or f32\n", text);
        exit(2);
    }
    p.n = n, p.v = v;
    p.dtype = type[0] == 'b' ? LL_DTYPE_BF16 : strcmp(type, "f16") == 0 ? LL_DTYPE_F16 : LL_DTYPE_F32;
    open_problem(&p);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    double ms[kSteps][kRoundsMax], at[kSteps];
    for (int r = -2; r < rounds; r++) {
        for (int step = 0; step < kSteps; step++) {
            CHECK(cudaEventRecord(begin, 0));
            run_step(&p, step);
            CHECK(cudaEventRecord(end, 0));
            const double t = elapsed_ms(begin, end);
            if (r >= 0) ms[step][r] = t;
        }
    }
    printf("{\"problem\": \"%s\", \"kernel\": \"%s\", \"numerics\": \"%s\", \"rounds\": %d", text,
           ll_plan_kernel(p.plan), ll_plan_numerics(p.plan), rounds);
    for (int step = 0; step < kSteps; step++) {
        at[step] = median(ms[step], rounds);
        printf(", \"%s_ms\": %.4f", step_names[step], at[step]);
    }
    printf(", \"copy_gb_s\": %.0f, \"forward_of_copy\": %.3f, \"backward_of_copy\": %.3f, "
           "\"forward_backward_of_copy\": %.3f, \"nll_error\": %.2g, \"workspace_mib\": %.2f}\n",
           2e-6 * (double)p.bytes / at[0], 0.5 * at[0] / at[1], at[0] / at[2], at[0] / at[3], nll_error(&p),
           (double)p.args[LL_PASS_FORWARD_BACKWARD].workspace_bytes / 0x1p20);
    fflush(stdout);
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    close_problem(&p);
}

int main(int argc, char **argv) {
    static const char *const usual[] = {"bf16:n8192:v32000", "bf16:n8192:v128256", "bf16:n8192:v262144",
                                        "f32:n8192:v32000", "f32:n8192:v128256"};
    int at = 1, rounds = 9;
    if (at + 1 < argc && strcmp(argv[at], "--rounds") == 0) rounds = atoi(argv[at + 1]), at += 2;
    if (rounds < 1 || rounds > kRoundsMax) {
        fprintf(stderr, "bench_cuda_ce: --rounds wants 1 .. %d\n", kRoundsMax);
        return 2;
    }
    for (size_t i = 0; at >= argc && i < sizeof usual / sizeof *usual; i++) measure(usual[i], rounds);
    for (; at < argc; at++) measure(argv[at], rounds);
    return 0;
}
