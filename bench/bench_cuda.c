/* bench_cuda [--algos] [--budget-mib N] [nN:dD:vV ...]: the passes of linear_ce on this GPU, in turn with
 * cuBLASLt's own time for the products that they need: G1 of the logits product alone, G3 of all three, bf16
 * in and out, as its first heuristic does them. A ratio is of neighbours in time, since a card slows down as
 * it warms. --algos times every algorithm without split-k at the sizes that the backend uses. */
#define _POSIX_C_SOURCE 200809L
#include "bench_cuda.h"

#include <cublasLt.h>
#include <stdbool.h>

enum { kRounds = 9, kCandidates = 16 };

static cublasLtHandle_t lt;
static void *lt_workspace;
static const size_t lt_workspace_bytes = (size_t)64 << 20;
static cudaEvent_t begin_event, end_event;
static long budget_mib; /* 0: the default */

/* ---- Products ----------------------------------------------------------------------------------- */

typedef struct product {
    const char *name;
    int64_t m, n, k; /* row-major c[m, n] = a b */
    bool a_turned, b_turned;
    int64_t a_ld, b_ld, c_ld;
    const void *a, *b;
    void *c;
    cudaDataType_t out;
    float beta;
} product;

static cublasLtMatmulHeuristicResult_t results[kCandidates];

static int find(const product *p, size_t workspace_bytes, bool whole_k, cublasLtMatmulDesc_t *desc,
                cublasLtMatrixLayout_t *a, cublasLtMatrixLayout_t *b, cublasLtMatrixLayout_t *c) {
    cublasLtMatmulPreference_t wish;
    const cublasOperation_t op_b = p->b_turned ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_a = p->a_turned ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
    const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = 16;
    int count = 0;
    CHECK(cublasLtMatmulDescCreate(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b));
    CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a));
    CHECK(cublasLtMatrixLayoutCreate(b, CUDA_R_16BF, p->b_turned ? k : n, p->b_turned ? n : k, p->b_ld));
    CHECK(cublasLtMatrixLayoutCreate(a, CUDA_R_16BF, p->a_turned ? m : k, p->a_turned ? k : m, p->a_ld));
    CHECK(cublasLtMatrixLayoutCreate(c, p->out, n, m, p->c_ld));
    CHECK(cublasLtMatmulPreferenceCreate(&wish));
    CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace_bytes, sizeof workspace_bytes));
    for (int i = 0; whole_k && i < 4; i++) {
        CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none,
                                                   sizeof none));
        CHECK(cublasLtMatmulPreferenceSetAttribute(
            wish, (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
            &alignment, sizeof alignment));
    }
    CHECK(cublasLtMatmulAlgoGetHeuristic(lt, *desc, *b, *a, *c, *c, wish, whole_k ? kCandidates : 1, results,
                                         &count));
    cublasLtMatmulPreferenceDestroy(wish);
    return count;
}

static void multiply(const product *p, const cublasLtMatmulAlgo_t *algo, cublasLtMatmulDesc_t desc,
                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c) {
    const float one = 1.0f;
    CHECK(cublasLtMatmul(lt, desc, &one, p->b, b, p->a, a, &p->beta, p->c, c, p->c, c, algo, lt_workspace,
                         lt_workspace_bytes, 0));
}

static int attribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t which,
                     size_t bytes) {
    int32_t value = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, which, &value, bytes, &written);
    return value;
}

static void time_algos(const product *p) {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    const int count = find(p, 0, true, &desc, &a, &b, &c);
    printf("%s [%lld, %lld] over %lld\n", p->name, (long long)p->m, (long long)p->n, (long long)p->k);
    for (int i = 0; i < count; i++) {
        double ms[kRounds];
        multiply(p, &results[i].algo, desc, a, b, c);
        for (int r = 0; r < kRounds; r++) {
            CHECK(cudaEventRecord(begin_event, 0));
            for (int j = 0; j < 4; j++) multiply(p, &results[i].algo, desc, a, b, c);
            CHECK(cudaEventRecord(end_event, 0));
            ms[r] = elapsed_ms(begin_event, end_event) / 4;
        }
        const double t = median(ms, kRounds);
        printf(
            "  #%d id %d tile %d stages %d cluster %d swizzle %d inner %d split %d: %.4f ms %.0f TFLOP/s\n",
            i, attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_ID, 4),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
            attribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4), (double)t,
            2e-9 * (double)p->m * (double)p->n * (double)p->k / (double)t);
        fflush(stdout);
    }
}

/* ---- A problem ---------------------------------------------------------------------------------- */

typedef struct bench {
    int64_t n, d, v;
    void *x, *w, *dz, *out_x, *out_w;
    product products[3];
    cublasLtMatmulDesc_t desc[3];
    cublasLtMatrixLayout_t a[3], b[3], c[3];
    cublasLtMatmulAlgo_t algo[3];
    ll_plan *plan;
    ll_linear_ce_args args;
} bench;

static void open_products(bench *s) {
    const int64_t n = s->n, d = s->d, v = s->v;
    s->products[0] = (product){"logits", n, v, d, false, true, d, d, v, s->x, s->w, s->dz, CUDA_R_16BF, 0};
    s->products[1] =
        (product){"grad_x", n, d, v, false, false, v, d, d, s->dz, s->w, s->out_x, CUDA_R_16BF, 0};
    s->products[2] =
        (product){"grad_w", v, d, n, true, false, v, d, d, s->dz, s->x, s->out_w, CUDA_R_16BF, 0};
    for (int i = 0; i < 3; i++) {
        CHECK(find(&s->products[i], lt_workspace_bytes, false, &s->desc[i], &s->a[i], &s->b[i], &s->c[i]) <
              1);
        s->algo[i] = results[0].algo;
    }
}

static void run_products(const bench *s, int count) {
    for (int i = 0; i < count; i++) {
        multiply(&s->products[i], &s->algo[i], s->desc[i], s->a[i], s->b[i], s->c[i]);
    }
}

typedef enum step { STEP_G1, STEP_FORWARD, STEP_G3, STEP_ONE_PASS, STEP_BACKWARD, kSteps } step;
static const char *const step_names[kSteps] = {"g1", "forward", "g3", "forward_backward", "backward"};

static void run_step(const bench *s, step which) {
    ll_linear_ce_args a = s->args;
    if (which == STEP_G1) run_products(s, 1);
    if (which == STEP_G3) run_products(s, 3);
    if (which == STEP_FORWARD) {
        memset(&a.grad_x, 0, sizeof a.grad_x);
        memset(&a.grad_w, 0, sizeof a.grad_w);
        a.up_loss = NULL;
        CHECK(ll_linear_ce_forward(s->plan, &a, NULL));
    }
    if (which == STEP_ONE_PASS) CHECK(ll_linear_ce_forward_backward(s->plan, &a, NULL));
    if (which == STEP_BACKWARD) {
        a.loss = NULL;
        CHECK(ll_linear_ce_backward(s->plan, &a, NULL));
    }
}

static void open_plan(bench *s, bool narrow, size_t *bytes) {
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.backend = LL_BACKEND_CUDA;
    desc.n_tokens_max = s->n;
    desc.n_hidden = s->d;
    desc.v_local = desc.v_total = s->v;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_BF16;
    desc.workspace_budget_bytes = (size_t)budget_mib << 20;
    desc.grad_w_dtype = narrow ? LL_DTYPE_BF16 : LL_DTYPE_F32;
    CHECK(ll_plan_create(&desc, &s->plan));
    size_t most = 0;
    for (int pass = 0; pass < 3; pass++) {
        CHECK(ll_plan_workspace(s->plan, (ll_pass)pass, &bytes[pass]));
        if (bytes[pass] > most) most = bytes[pass];
    }
    ll_linear_ce_args a = LL_LINEAR_CE_ARGS_INIT;
    const size_t n = (size_t)s->n;
    int64_t *ids = malloc(n * sizeof *ids);
    uint64_t seed = 99;
    for (size_t i = 0; i < n; i++) ids[i] = (int64_t)(random_bits(&seed) % (uint64_t)s->v);
    void *target = take(n * sizeof *ids);
    CHECK(cudaMemcpy(target, ids, n * sizeof *ids, cudaMemcpyHostToDevice));
    free(ids);
    const float one = 1.0f;
    float *scalars = take(8);
    CHECK(cudaMemcpy(scalars, &one, sizeof one, cudaMemcpyHostToDevice));
    a.x = ll_view_matrix(s->x, LL_DTYPE_BF16, s->n, s->d, 0);
    a.w = ll_view_matrix(s->w, LL_DTYPE_BF16, s->v, s->d, 0);
    a.target = ll_view_vector(target, LL_DTYPE_I64, s->n, 0);
    a.up_loss = scalars;
    a.loss = scalars + 1;
    a.nll = take(4 * n);
    a.lse = take(4 * n);
    a.entropy = take(4 * n);
    a.grad_x = ll_view_matrix(s->out_x, LL_DTYPE_BF16, s->n, s->d, 0);
    a.grad_w = ll_view_matrix(s->out_w, (ll_dtype)desc.grad_w_dtype, s->v, s->d, 0);
    a.workspace = take(most);
    a.workspace_bytes = most;
    s->args = a;
}

static void measure(bench *s, bool narrow) {
    double ms[kSteps][kRounds], at[kSteps];
    float loss = 0;
    size_t bytes[3];
    char text[2048];
    open_plan(s, narrow, bytes);
    CHECK(ll_plan_describe(s->plan, text, sizeof text));
    fprintf(stderr, "%s", text);
    for (int r = -2; r < kRounds; r++) {
        for (int which = 0; which < kSteps; which++) {
            CHECK(cudaEventRecord(begin_event, 0));
            run_step(s, (step)which);
            CHECK(cudaEventRecord(end_event, 0));
            const double t = elapsed_ms(begin_event, end_event);
            if (r >= 0) ms[which][r] = t;
        }
    }
    CHECK(cudaMemcpy(&loss, s->args.loss, sizeof loss, cudaMemcpyDeviceToHost));
    printf(
        "{\"problem\": \"bf16:n%lld:d%lld:v%lld\", \"grad_w\": \"%s\", \"numerics\": \"%s\", \"loss\": %.6f",
        (long long)s->n, (long long)s->d, (long long)s->v, narrow ? "bf16" : "f32", ll_plan_numerics(s->plan),
        (double)loss);
    for (int which = 0; which < kSteps; which++) {
        at[which] = median(ms[which], kRounds);
        printf(", \"%s_ms\": %.3f", step_names[which], at[which]);
    }
    printf(", \"forward_by_g1\": %.3f, \"one_pass_by_g3\": %.3f, \"forward_then_backward_by_g1_g3\": %.3f, "
           "\"workspace_mib\": [%.0f, %.0f, %.0f]}\n",
           at[STEP_FORWARD] / at[STEP_G1], at[STEP_ONE_PASS] / at[STEP_G3],
           (at[STEP_FORWARD] + at[STEP_BACKWARD]) / (at[STEP_G1] + at[STEP_G3]), (double)bytes[0] / 0x1p20,
           (double)bytes[1] / 0x1p20, (double)bytes[2] / 0x1p20);
    fflush(stdout);
    ll_plan_destroy(s->plan);
    CHECK(cudaFree(s->args.workspace));
}

/* The sizes of src/cuda/cut.c. */
static void algos(const bench *s) {
    const int64_t d = s->d, v = s->v, block = 16384;
    float *f32 = take((size_t)1024 * (size_t)v * 4);
    const product all[] = {
        {"logits, forward", 4096, 2048, d, false, true, d, d, 2048, s->x, s->w, f32, CUDA_R_32F, 0},
        {"logits, forward", 1024, 8448, d, false, true, d, d, 8448, s->x, s->w, f32, CUDA_R_32F, 0},
        {"logits, one pass", 1024, v, d, false, true, d, d, v, s->x, s->w, f32, CUDA_R_32F, 0},
        {"grad_x", 1024, d, block, false, false, block, d, d, s->dz, s->w, f32, CUDA_R_32F, 1},
        {"grad_x", 4096, d, block, false, false, block, d, d, s->dz, s->w, f32, CUDA_R_32F, 1},
        {"grad_w", block, d, 1024, true, false, block, d, d, s->dz, s->x, f32, CUDA_R_32F, 1},
        {"grad_w", block, d, 4096, true, false, block, d, d, s->dz, s->x, f32, CUDA_R_32F, 0},
        {"narrow grad_w", block, d, 4096, true, false, block, d, d, s->dz, s->x, f32, CUDA_R_16BF, 0},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) time_algos(&all[i]);
    CHECK(cudaFree(f32));
}

static void *filled(size_t count, float scale, uint64_t seed) {
    void *data = take(2 * count);
    uint16_t *stretch = make_stretch(scale, seed);
    fill(data, 0, (int64_t)count, stretch);
    free(stretch);
    return data;
}

static void run(const char *text, bool want_algos) {
    bench s = {0};
    long long n, d, v;
    if (sscanf(text, "n%lld:d%lld:v%lld", &n, &d, &v) != 3) {
        fprintf(stderr, "bench_cuda: '%s' is no nN:dD:vV\n", text);
        exit(2);
    }
    s.n = n;
    s.d = d;
    s.v = v;
    const size_t nd = (size_t)n * (size_t)d, vd = (size_t)v * (size_t)d, nv = (size_t)n * (size_t)v;
    s.x = filled(nd, 1.0f, 1);
    s.w = filled(vd, 0.02f, 2);
    s.dz = filled(nv, 1e-3f, 3);
    s.out_x = take(4 * nd);
    s.out_w = take(4 * vd);
    open_products(&s);
    if (want_algos) {
        algos(&s);
    } else {
        measure(&s, false);
        measure(&s, true);
    }
    void *const memory[] = {s.x, s.w, s.dz, s.out_x, s.out_w};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) CHECK(cudaFree(memory[i]));
}

int main(int argc, char **argv) {
    bool want_algos = false;
    int problems = 0;
    for (int i = 1; i < argc; i++) want_algos |= strcmp(argv[i], "--algos") == 0;
    for (int i = 1; i < argc; i++) problems += argv[i][0] == 'n';
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--budget-mib") == 0) budget_mib = strtol(argv[i + 1], NULL, 10);
    }
    CHECK(cublasLtCreate(&lt));
    CHECK(cudaMalloc(&lt_workspace, lt_workspace_bytes));
    CHECK(cudaEventCreate(&begin_event));
    CHECK(cudaEventCreate(&end_event));
    for (int i = problems ? 1 : 0; i < (problems ? argc : 1); i++) {
        if (problems && argv[i][0] != 'n') continue;
        run(problems ? argv[i] : "n4096:d4096:v131072", want_algos);
    }
    return 0;
}
