/* The three plain products, by cuBLASLt, each with one algorithm that the plan has fixed.
 *
 *   logits   [tokens, columns] = x w^T          f32                    (k: n_hidden)
 *   grad_x   [tokens, n_hidden] (+)= dz w       f32                    (k: columns)
 *   grad_w   [columns, n_hidden] (+)= dz^T x    f32, or w's dtype      (k: tokens)
 *
 * On Hopper two kernels of ours take most of them (fused.h), with the same bits.
 *
 * An algorithm is chosen from dtype, n_hidden, nominal sizes and the device alone, without split-k and
 * without a workspace, so the order in which an element's k is added up does not depend on how many tokens or
 * columns a call has; tests/cuda proves it by bits. Rows of operands start on 16 bytes and results have a
 * multiple of 8 columns: others are refused by cuBLASLt's kernels for sm_90. */
#ifndef LLI_CUDA_GEMM_H
#define LLI_CUDA_GEMM_H

#include "core/plan.h"

#include <cublasLt.h>

typedef enum lli_gemm_kind {
    LLI_GEMM_LOGITS,
    LLI_GEMM_GRAD_X,
    LLI_GEMM_GRAD_X_FEW, /* up to kFewRows tokens: the same bits, which tests/cuda shows for sm_90; elsewhere
                          * the same algorithm */
    LLI_GEMM_GRAD_W,
    LLI_GEMM_GRAD_W_LONG, /* over more than kFewRows tokens */
    LLI_GEMM_GRAD_W_ADD,  /* the same onto what is there: its time goes into reading and writing that */
    LLI_GEMM_GRAD_W_NARROW,
    kGemmKinds
} lli_gemm_kind;

enum { kFewRows = 1024 };

/* What a plan keeps of its device. */
typedef struct lli_cuda_device {
    int32_t device, arch; /* arch: 10 major + minor */
    int32_t dtype;        /* of x, w and dz */
    cublasLtHandle_t lt;
    cublasLtMatmulAlgo_t algo[kGemmKinds];
    int32_t clusters;             /* of fused.h, that run at one time; 0: it is not used */
    void *encode_map;             /* the driver's function that describes an operand to the copy engine */
    struct lli_cuda_ranks *ranks; /* of a plan with a communicator (ranks.h); NULL: none */
    char numerics[32];
} lli_cuda_device;

/* Makes the device ready for fused.h. CUDA, UNSUPPORTED. */
ll_status lli_cuda_fused_open(lli_cuda_device *device);

/* Row-major c[rows, cols] = alpha a b + beta c in the shapes above; `a` has the rows, strides count elements.
 */
typedef struct lli_gemm {
    int64_t rows, cols, k;
    const void *a, *b;
    void *c;
    int64_t a_ld, b_ld, c_ld;
    int32_t add; /* beta is 1, not 0 */
    /* Of grad_w in f16: alpha in device memory, and zero and one beside it; NULL: alpha is 1. */
    const float *alpha, *zero, *one;
} lli_gemm;

/* Chooses and tries all algorithms. UNSUPPORTED, CUDA. */
ll_status lli_gemm_open(lli_cuda_device *device, int64_t n_hidden);

ll_status lli_gemm_run(const lli_cuda_device *device, lli_gemm_kind kind, const lli_gemm *gemm,
                       const char *pass, cudaStream_t stream);

#endif
