/* cuBLASLt (gemm.h). Row-major matrices are handed over as their transposes, which it knows as column-major.
 */
#include "cuda/gemm.h"
#include "core/integers.h"
#include "cuda/backend.h"
#include "cuda/work.h"

#include <string.h>

static const char *const kind_names[kGemmKinds] = {"logits", "grad_x", "grad_x",       "grad_w",
                                                   "grad_w", "grad_w", "narrow grad_w"};

/* Sizes for which algorithms are ranked; never those of a call. */
enum { kNominalTokens = 1024, kNominalLong = 4096, kNominalCols = 8192, kCandidates = 16, kTrySize = 64 };

/* The operands of a product, in cuBLASLt's order: c' [cols, rows] = b' a'. */
typedef struct lt_shape {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c;
} lt_shape;

static cudaDataType_t lt_dtype(int32_t dtype) {
    return dtype == LL_DTYPE_F32 ? CUDA_R_32F : dtype == LL_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static cublasStatus_t set_op(lt_shape *shape, cublasLtMatmulDescAttributes_t which, cublasOperation_t op) {
    return cublasLtMatmulDescSetAttribute(&shape->desc, which, &op, sizeof op);
}

#define LT_TRY(call)                                                                                         \
    do {                                                                                                     \
        cublasStatus_t lt_status = (call);                                                                   \
        if (lt_status != CUBLAS_STATUS_SUCCESS) return lt_status;                                            \
    } while (0)

/* f32 products in f32: TF32 has 10 bits. */
static cublasStatus_t make_shape(const lli_cuda_device *device, lli_gemm_kind kind, const lli_gemm *g,
                                 lt_shape *shape) {
    const bool f32 = device->dtype == LL_DTYPE_F32;
    const cudaDataType_t in = lt_dtype(device->dtype);
    const cudaDataType_t out = kind == LLI_GEMM_GRAD_W_NARROW ? in : CUDA_R_32F;
    const bool b_turned = kind == LLI_GEMM_LOGITS;
    const bool a_turned = kind >= LLI_GEMM_GRAD_W;
    LT_TRY(cublasLtMatmulDescInit(&shape->desc, f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
                                  CUDA_R_32F));
    LT_TRY(set_op(shape, CUBLASLT_MATMUL_DESC_TRANSA, b_turned ? CUBLAS_OP_T : CUBLAS_OP_N));
    LT_TRY(set_op(shape, CUBLASLT_MATMUL_DESC_TRANSB, a_turned ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (g->alpha) {
        const cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_DEVICE;
        LT_TRY(cublasLtMatmulDescSetAttribute(&shape->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode,
                                              sizeof mode));
    }
    const uint64_t rows = (uint64_t)g->rows, cols = (uint64_t)g->cols, k = (uint64_t)g->k;
    LT_TRY(cublasLtMatrixLayoutInit(&shape->b, in, b_turned ? k : cols, b_turned ? cols : k, g->b_ld));
    LT_TRY(cublasLtMatrixLayoutInit(&shape->a, in, a_turned ? rows : k, a_turned ? k : rows, g->a_ld));
    return cublasLtMatrixLayoutInit(&shape->c, out, cols, rows, g->c_ld);
}

static cublasStatus_t multiply(const lli_cuda_device *device, lli_gemm_kind kind, const lli_gemm *g,
                               const cublasLtMatmulAlgo_t *algo, cudaStream_t stream) {
    lt_shape shape;
    const float one = 1.0f, zero = 0.0f;
    LT_TRY(make_shape(device, kind, g, &shape));
    const void *alpha = g->alpha ? g->alpha : &one;
    const void *beta = g->alpha ? (g->add ? g->one : g->zero) : g->add ? &one : &zero;
    return cublasLtMatmul(device->lt, &shape.desc, alpha, g->b, &shape.b, g->a, &shape.a, beta, g->c,
                          &shape.c, g->c, &shape.c, algo, NULL, 0, stream);
}

ll_status lli_gemm_run(const lli_cuda_device *device, lli_gemm_kind kind, const lli_gemm *gemm,
                       const char *pass, cudaStream_t stream) {
    if (gemm->rows == 0 || gemm->cols == 0 || gemm->k == 0) return LL_STATUS_OK;
    const cublasStatus_t status = multiply(device, kind, gemm, &device->algo[kind], stream);
    LLI_REQUIRE(status == CUBLAS_STATUS_SUCCESS, LL_STATUS_CUDA,
                "%s: the %s product [%lld, %lld] over %lld failed in cublasLtMatmul: %s", pass,
                kind_names[kind], (long long)gemm->rows, (long long)gemm->cols, (long long)gemm->k,
                cublasLtGetStatusString(status));
    return LL_STATUS_OK;
}

/* ---- Choosing ----------------------------------------------------------------------------------- */

static int32_t algo_int(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t which) {
    int32_t value = 0;
    size_t written = 0;
    (void)cublasLtMatmulAlgoConfigGetAttribute(algo, which, &value, sizeof value, &written);
    return value;
}

/* No part of k may be added up apart from the rest: neither split-k nor a reduction behind it. */
static bool whole_k(const cublasLtMatmulHeuristicResult_t *result) {
    return result->state == CUBLAS_STATUS_SUCCESS && result->workspaceSize == 0 &&
           algo_int(&result->algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
           algo_int(&result->algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* The smallest sizes that any call can have run too; a first run also loads the algorithm's code, which no
 * call in a stream capture may do. `memory`: operands of kTrySize rows of kTrySize f32 each. */
static bool runs(const lli_cuda_device *device, lli_gemm_kind kind, const cublasLtMatmulAlgo_t *algo,
                 char *memory, const float *scalars, cudaStream_t stream) {
    static const int64_t sizes[][3] = {{kTrySize, kTrySize, kTrySize}, {1, 24, 8}, {33, 8, kTrySize}};
    const size_t matrix_bytes = (size_t)kTrySize * kTrySize * sizeof(float);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        lli_gemm g = {.rows = sizes[i][0],
                      .cols = sizes[i][1],
                      .k = sizes[i][2],
                      .a = memory,
                      .b = memory + matrix_bytes,
                      .c = memory + 2 * matrix_bytes,
                      .a_ld = kTrySize,
                      .b_ld = kTrySize,
                      .c_ld = kTrySize,
                      .add = 1,
                      .alpha = scalars};
        if (scalars) g.zero = g.one = scalars;
        if (multiply(device, kind, &g, algo, stream) != CUBLAS_STATUS_SUCCESS) return false;
    }
    return cudaStreamSynchronize(stream) == cudaSuccess;
}

static cublasStatus_t candidates(const lli_cuda_device *device, lli_gemm_kind kind, const lli_gemm *nominal,
                                 cublasLtMatmulHeuristicResult_t *results, int *count) {
    lt_shape shape;
    cublasLtMatmulPreferenceOpaque_t wish;
    const uint64_t no_bytes = 0;
    const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = 16;
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    LT_TRY(make_shape(device, kind, nominal, &shape));
    LT_TRY(cublasLtMatmulPreferenceInit(&wish));
    LT_TRY(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &no_bytes,
                                                sizeof no_bytes));
    LT_TRY(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                &no_reduction, sizeof no_reduction));
    for (int i = 0; i < 4; i++) {
        LT_TRY(cublasLtMatmulPreferenceSetAttribute(&wish, aligned[i], &alignment, sizeof alignment));
    }
    return cublasLtMatmulAlgoGetHeuristic(device->lt, &shape.desc, &shape.b, &shape.a, &shape.c, &shape.c,
                                          &wish, kCandidates, results, count);
}

static lli_gemm nominal_of(lli_gemm_kind kind, int64_t n_hidden, const float *scalars) {
    const int64_t d = lli_round_up(n_hidden, 8);
    lli_gemm g = {
        .rows = kNominalTokens, .cols = kNominalCols, .k = d, .a_ld = d, .b_ld = d, .c_ld = kNominalCols};
    if (kind == LLI_GEMM_GRAD_X || kind == LLI_GEMM_GRAD_X_FEW) {
        g = (lli_gemm){.rows = kNominalTokens, .cols = d, .k = kNominalCols, .a_ld = kNominalCols};
        g.b_ld = g.c_ld = d;
    } else if (kind != LLI_GEMM_LOGITS) {
        g = (lli_gemm){
            .rows = kDzCols, .cols = d, .k = kNominalTokens, .a_ld = kDzCols, .b_ld = d, .c_ld = d};
        if (kind == LLI_GEMM_GRAD_W_LONG || kind == LLI_GEMM_GRAD_W_NARROW) g.k = kNominalLong;
        g.alpha = scalars;
    }
    return g;
}

/* Where an H200 measured another tile as faster than cuBLASLt's first; bench_cuda --algos shows all. */
static void prefer(const lli_cuda_device *device, lli_gemm_kind kind,
                   cublasLtMatmulHeuristicResult_t *results, int count) {
    static const int32_t tiles[kGemmKinds] = {[LLI_GEMM_GRAD_X_FEW] = CUBLASLT_MATMUL_TILE_256x64,
                                              [LLI_GEMM_GRAD_W_ADD] = CUBLASLT_MATMUL_TILE_128x160};
    if (device->arch != 90 || device->dtype == LL_DTYPE_F32 || !tiles[kind]) return;
    for (int i = 1; i < count; i++) {
        if (algo_int(&results[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID) != tiles[kind]) continue;
        const cublasLtMatmulHeuristicResult_t better = results[i];
        memmove(results + 1, results, (size_t)i * sizeof *results);
        results[0] = better;
        return;
    }
}

static ll_status choose(lli_cuda_device *device, lli_gemm_kind kind, int64_t n_hidden, char *memory,
                        const float *scalars, cudaStream_t stream) {
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int count = 0;
    const bool by_device = device->dtype == LL_DTYPE_F16 && kind >= LLI_GEMM_GRAD_W;
    const lli_gemm nominal = nominal_of(kind, n_hidden, by_device ? scalars : NULL);
    const cublasStatus_t status = candidates(device, kind, &nominal, results, &count);
    prefer(device, kind, results, status == CUBLAS_STATUS_SUCCESS ? count : 0);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++) {
        if (!whole_k(&results[i])) continue;
        if (!runs(device, kind, &results[i].algo, memory, nominal.alpha, stream)) continue;
        device->algo[kind] = results[i].algo;
        return LL_STATUS_OK;
    }
    return lli_fail(
        LL_STATUS_UNSUPPORTED,
        "ll_plan_create: cuBLASLt has no algorithm for the %s product in %s with n_hidden %lld that "
        "does without split-k (%d looked at; %s)",
        kind_names[kind], ll_dtype_name((ll_dtype)device->dtype), (long long)n_hidden, count,
        cublasLtGetStatusString(status));
}

ll_status lli_gemm_open(lli_cuda_device *device, int64_t n_hidden) {
    const size_t bytes = (size_t)4 * kTrySize * kTrySize * sizeof(float);
    char *memory = NULL;
    cudaStream_t stream = NULL;
    ll_status status = LL_STATUS_OK;
    int cuda = (int)cudaMalloc((void **)&memory, bytes);
    if (!cuda) cuda = (int)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!cuda) cuda = (int)cudaMemsetAsync(memory, 0, bytes, stream);
    if (cuda) status = lli_cuda_fail(cuda, "ll_plan_create", "trying the products");
    const float *scalars = (const float *)(memory + bytes / 4 * 3);
    for (int kind = 0; status == LL_STATUS_OK && kind < kGemmKinds; kind++) {
        status = choose(device, (lli_gemm_kind)kind, n_hidden, memory, scalars, stream);
    }
    if (stream) cudaStreamDestroy(stream);
    cudaFree(memory);
    return status;
}
