/* gemm_sm90 [check|time]: the product of src/cuda/sm90_product.cuh by itself, and the forward that is made of
 * it, against cuBLASLt.
 *
 *   check   f32 logits, bit for bit, ragged sizes too; the forward's sums on grids of several shapes and at
 *           several paces, bit for bit
 *   time    in turn with cuBLASLt (bf16 out, its first heuristic), medians; "sums only" writes nothing
 *
 * build: nvcc -O3 -std=c++20 -fmad=false -I../../src -I../../include -gencode=arch=compute_90a,code=sm_90a
 *        --diag-suppress=177 gemm_sm90.cu -lcublasLt
 * (libcuda is not linked: the one driver function comes by its entry point). */
#include "cuda/fused_sm90.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const int check_status = (int)(call);                                                                \
        if (check_status) {                                                                                  \
            printf("%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, check_status);                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* ---- Our kernel --------------------------------------------------------------------------------- */

typedef struct gemm_args {
    product_grid grid;
    float *c;     /* NULL: nothing is written */
    float *never; /* where a sum that does not occur would go: keeps the products alive */
    int32_t m, n;
} gemm_args;

template <typename Tile>
static __device__ inline void store(const gemm_args &args, float (&acc)[Tile::kHalves][Tile::kSums],
                                    int32_t row0, int32_t col0) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int32_t row = row0 + 16 * warp + lane / 4, col = col0 + 2 * (lane % 4);
    if (args.c) {
#pragma unroll
        for (int half = 0; half < Tile::kHalves; half++) {
#pragma unroll
            for (int i = 0; i < Tile::kSums; i++) {
                const int32_t r = row + 64 * half + 8 * (i / 2 % 2), c = col + 8 * (i / 4) + i % 2;
                if (r < args.m && c < args.n) args.c[(int64_t)r * args.n + c] = acc[half][i];
            }
        }
        return;
    }
    float largest = 0.0f;
#pragma unroll
    for (int half = 0; half < Tile::kHalves; half++) {
#pragma unroll
        for (int i = 0; i < Tile::kSums; i++) largest = fmaxf(largest, acc[half][i]);
    }
    if (largest == 12345678.0f) *args.never = largest;
}

template <typename Tile>
static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    gemm(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
         const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    product_shared<Tile> *shared = (product_shared<Tile> *)memory;
    product_open(shared);
    const uint32_t group = threadIdx.x / 128;
    if (group == 0) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) {
            product_load(shared, &x, &w, &args.grid);
        }
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        const uint32_t clusters = gridDim.x / kProductCluster, rank = ptx_cluster_ctarank();
        const uint32_t n_tiles = args.grid.row_blocks * args.grid.col_blocks;
        const uint32_t first_row = Tile::kTurns ? 0 : 64 * (group - 1);
        float acc[Tile::kHalves][Tile::kSums];
        uint32_t tile = Tile::kTurns ? group - 1 : 0;
        product_take_turns<Tile>(group == 2);
        for (uint32_t t = blockIdx.x / kProductCluster + tile * clusters; t < n_tiles;) {
            product_multiply<Tile>(shared, tile, args.grid.depth_blocks, first_row, acc);
            const product_place place = product_place_of(&args.grid, t);
            store<Tile>(args, acc,
                        (int32_t)((place.row_block * kProductCluster + rank) * kProductRows + first_row),
                        (int32_t)(place.col_block * Tile::kCols));
            tile += Tile::kTurns ? 2 : 1;
            t += (Tile::kTurns ? 2 : 1) * clusters;
        }
    }
    product_close();
}

static cublasLtHandle_t lt;
static void *lt_workspace;
static const size_t lt_workspace_bytes = 64 << 20;

/* ---- Host --------------------------------------------------------------------------------------- */

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static CUtensorMap map_of(const void *base, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
    static encode_fn *encode;
    CUtensorMap map;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                               cudaEnableDefault, &found));
        CHECK(found != cudaDriverEntryPointSuccess);
    }
    const cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)ld * 2};
    const cuuint32_t box[2] = {kProductDepth, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)base, sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

static int grid_blocks = 132, group_rows = 8;

template <typename Tile>
static void run_ours(const void *x, const void *w, float *c, int m, int n, int k, int ld) {
    const size_t bytes = sizeof(product_shared<Tile>);
    static bool ready;
    if (!ready)
        CHECK(cudaFuncSetAttribute(gemm<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    ready = true;
    const CUtensorMap xm = map_of(x, m, k, ld, kProductRows);
    const CUtensorMap wm = map_of(w, n, k, ld, Tile::kCols / kProductCluster);
    gemm_args args = {.grid = {(uint32_t)(m + 255) / 256, (uint32_t)(n + Tile::kCols - 1) / Tile::kCols,
                               (uint32_t)(k + 63) / 64, (uint32_t)group_rows},
                      .c = c,
                      .never = (float *)lt_workspace,
                      .m = m,
                      .n = n};
    gemm<Tile><<<grid_blocks, kProductThreads, bytes>>>(xm, wm, args);
    CHECK(cudaGetLastError());
}

static int64_t divisor(int64_t a, int64_t b) {
    return b ? divisor(b, a % b) : a;
}

/* The forward's three kernels; `options`: the variant with argmax; `pace`: of its arithmetic. */
static void run_forward(const void *x, const void *w, const int64_t *ids, lli_cuda_slot *slots,
                        lli_cuda_row *rows, int m, int n, int k, bool options, int pace) {
    lli_cuda_fused f = {.tiles = {.x = map_of(x, m, k, k, kProductRows),
                                  .w = map_of(w, n, k, k, kFusedMapCols),
                                  .row_blocks = (uint32_t)(m + 255) / 256,
                                  .col_blocks = (uint32_t)(n + kFusedCols - 1) / kFusedCols,
                                  .depth_blocks = (uint32_t)(k + 63) / 64,
                                  .group_rows = (uint32_t)std::min(group_rows, (m + 255) / 256),
                                  .clusters = (uint32_t)grid_blocks / 2},
                        .n_rows = m,
                        .n_cols = n,
                        .targets = {ids, 1, -100, n, LL_DTYPE_I64},
                        .temperature = 1.0f,
                        .slots = slots,
                        .rows = rows,
                        .want_argmax = options};
    const lli_cuda_tiles *t = &f.tiles;
    const int64_t last_block = (t->row_blocks - 1) / t->group_rows * t->group_rows;
    f.stride = (uint32_t)divisor(2 * t->clusters, t->group_rows);
    f.last_stride = (uint32_t)divisor(2 * t->clusters, t->row_blocks - last_block);
    f.parts = (int32_t)(2 * t->clusters / f.stride);
    f.last_parts = (int32_t)(2 * t->clusters / f.last_stride);
    f.last_row = 256 * last_block;
    fused_kernel *const of_pace = pace == 1   ? fused<false, 1, false>
                                  : pace == 2 ? fused<false, 2, false>
                                  : pace == 4 ? fused<false, 4, false>
                                  : pace == 8 ? fused<false, 8, false>
                                              : fused<false, 16, false>;
    fused_kernel *const kernel = !options ? of_pace : pace == 4 ? fused<true, 4, false> : fused<true, 16, false>;
    CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(fused_shared)));
    CHECK(launch_forward(&f, kernel, 0));
}

typedef product_tile<192, 5, true> turns_192;
typedef product_tile<256, 4, false> halves_256;

static void run_lt(const void *x, const void *w, void *c, int m, int n, int k, int ld, bool f32) {
    static struct {
        int m, n, k, f32;
        cublasLtMatmulAlgo_t algo;
    } known;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const float one = 1, zero = 0;
    CHECK(cublasLtMatmulDescInit(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned));
    CHECK(cublasLtMatrixLayoutInit(&a, CUDA_R_16BF, k, n, ld));
    CHECK(cublasLtMatrixLayoutInit(&b, CUDA_R_16BF, k, m, ld));
    CHECK(cublasLtMatrixLayoutInit(&d, f32 ? CUDA_R_32F : CUDA_R_16BF, n, m, n));
    if (known.m != m || known.n != n || known.k != k || known.f32 != f32) {
        cublasLtMatmulPreferenceOpaque_t wish;
        cublasLtMatmulHeuristicResult_t result;
        int count = 0;
        const size_t bytes = f32 ? 0 : lt_workspace_bytes; /* f32: as src/cuda/gemm.c, without split-k */
        const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
        CHECK(cublasLtMatmulPreferenceInit(&wish));
        CHECK(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                   sizeof bytes));
        if (f32) {
            CHECK(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                       &no_reduction, sizeof no_reduction));
        }
        CHECK(cublasLtMatmulAlgoGetHeuristic(lt, &desc, &a, &b, &d, &d, &wish, 1, &result, &count));
        CHECK(count != 1);
        known = {m, n, k, f32, result.algo};
    }
    CHECK(cublasLtMatmul(lt, &desc, &one, w, &a, x, &b, &zero, c, &d, c, &d, &known.algo, lt_workspace,
                         f32 ? 0 : lt_workspace_bytes, 0));
}

/* Normal deviates by Box-Muller from a hash of the index. */
static __global__ void fill(__nv_bfloat16 *data, int64_t count, float scale, uint64_t seed) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t h = (i + 1) * 0x9e3779b97f4a7c15u + seed;
        h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
        h = (h ^ h >> 27) * 0x94d049bb133111ebu;
        h ^= h >> 31;
        const float u = ((uint32_t)(h >> 40) + 0.5f) * 0x1p-24f, v = (uint32_t)(h & 0xffffff) * 0x1p-24f;
        data[i] = __float2bfloat16(scale * sqrtf(-2 * logf(u)) * cosf(6.2831853f * v));
    }
}

static void *take(size_t bytes) {
    void *data = nullptr;
    CHECK(cudaMalloc(&data, bytes));
    return data;
}

static __global__ void compare(const uint32_t *a, const uint32_t *b, int64_t count, unsigned long long *out) {
    unsigned long long differ = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        if (a[i] != b[i]) {
            differ++;
            atomicMin(&out[1], (unsigned long long)i);
        }
    }
    if (differ) atomicAdd(&out[0], differ);
}

template <typename Tile> static int check(const char *name, int m, int n, int k, int ld) {
    __nv_bfloat16 *x = (__nv_bfloat16 *)take((size_t)m * ld * 2),
                  *w = (__nv_bfloat16 *)take((size_t)n * ld * 2);
    float *ours = (float *)take((size_t)m * n * 4), *theirs = (float *)take((size_t)m * n * 4);
    unsigned long long *out = (unsigned long long *)take(16), host[2];
    fill<<<1024, 256>>>(x, (int64_t)m * ld, 1.0f, 11);
    fill<<<1024, 256>>>(w, (int64_t)n * ld, 1.5f / sqrtf((float)k), 12);
    CHECK(cudaMemset(ours, 0xff, (size_t)m * n * 4));
    CHECK(cudaMemset(out, 0, 8));
    CHECK(cudaMemset(out + 1, 0xff, 8));
    run_lt(x, w, theirs, m, n, k, ld, true);
    CHECK(cudaDeviceSynchronize());
    run_ours<Tile>(x, w, ours, m, n, k, ld);
    CHECK(cudaDeviceSynchronize());
    compare<<<1024, 256>>>((uint32_t *)ours, (uint32_t *)theirs, (int64_t)m * n, out);
    CHECK(cudaMemcpy(host, out, 16, cudaMemcpyDeviceToHost));
    float pair[2] = {0, 0};
    if (host[0]) {
        CHECK(cudaMemcpy(pair, ours + host[1], 4, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(pair + 1, theirs + host[1], 4, cudaMemcpyDeviceToHost));
    }
    printf("check %s m%d n%d k%d ld%d: %llu of %lld differ", name, m, n, k, ld, host[0], (long long)m * n);
    if (host[0]) printf("; first (%llu, %llu): %.9g, %.9g", host[1] / n, host[1] % n, pair[0], pair[1]);
    printf("\n");
    for (void *p : {(void *)x, (void *)w, (void *)ours, (void *)theirs, (void *)out}) CHECK(cudaFree(p));
    return host[0] != 0;
}

/* The rows of one problem on a grid, as the merge leaves them. */
static std::vector<uint8_t> forward_rows(const void *x, const void *w, const int64_t *ids, int m, int n,
                                         int k, bool options, int pace) {
    const size_t bytes = (size_t)m * sizeof(lli_cuda_row);
    lli_cuda_row *rows = (lli_cuda_row *)take(bytes);
    lli_cuda_slot *slots = (lli_cuda_slot *)take((size_t)132 * m * sizeof(lli_cuda_slot));
    std::vector<uint8_t> result(bytes);
    CHECK(cudaMemset(rows, 0, bytes));
    run_forward(x, w, ids, slots, rows, m, n, k, options, pace);
    CHECK(cudaMemcpy(result.data(), rows, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(rows));
    CHECK(cudaFree(slots));
    return result;
}

static int64_t *make_ids(int m, int n) {
    std::vector<int64_t> host(m);
    for (int i = 0; i < m; i++) host[i] = i % 9 == 8 ? -100 : (int64_t)i * 7919 % n;
    int64_t *ids = (int64_t *)take(host.size() * 8);
    CHECK(cudaMemcpy(ids, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
    return ids;
}

static int check_grids(int m, int n, int k) {
    __nv_bfloat16 *x = (__nv_bfloat16 *)take((size_t)m * k * 2),
                  *w = (__nv_bfloat16 *)take((size_t)n * k * 2);
    int64_t *ids = make_ids(m, n);
    int failed = 0;
    fill<<<1024, 256>>>(x, (int64_t)m * k, 1.0f, 31);
    fill<<<1024, 256>>>(w, (int64_t)n * k, 1.5f / sqrtf((float)k), 32);
    std::vector<uint8_t> want;
    for (int blocks : {132, 132, 130, 128, 26, 2}) {
        for (int rows : {8, 1, 2, 3, 16}) {
            grid_blocks = blocks;
            group_rows = rows;
            const std::vector<uint8_t> got = forward_rows(x, w, ids, m, n, k, true, 4);
            if (want.empty()) want = got;
            if (got != want)
                printf("FAIL forward m%d n%d k%d: blocks %d, groups of %d\n", m, n, k, blocks, rows);
            failed += got != want;
        }
    }
    grid_blocks = 132;
    group_rows = 8;
    want = forward_rows(x, w, ids, m, n, k, false, 16);
    for (int pace : {16, 1, 2, 4, 8}) failed += forward_rows(x, w, ids, m, n, k, false, pace) != want;
    printf("check forward m%d n%d k%d: %d of 35 grids and paces differ\n", m, n, k, failed);
    for (void *p : {(void *)x, (void *)w, (void *)ids}) CHECK(cudaFree(p));
    return failed;
}

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

typedef struct variant {
    const char *name;
    int kind, group_rows, pace;
} variant;

static const variant variants[] = {
    {"cuBLASLt", 0, 8, 0},
    {"sums only 128x192", 1, 8, 0},
    {"sums only 128x256", 2, 8, 0},
    {"forward", 3, 8, 16},
    {"forward", 3, 8, 1},
    {"forward", 3, 8, 2},
    {"forward", 3, 8, 4},
    {"forward", 3, 8, 8},
    {"forward, argmax too", 4, 8, 16},
    {"forward, argmax too", 4, 8, 4},
};
enum { kVariants = sizeof variants / sizeof variants[0] };

static void time_all(int m, int n, int k, int rounds) {
    __nv_bfloat16 *x = (__nv_bfloat16 *)take((size_t)m * k * 2),
                  *w = (__nv_bfloat16 *)take((size_t)n * k * 2);
    void *c = take((size_t)m * n * 2);
    int64_t *ids = make_ids(m, n);
    lli_cuda_row *rows = (lli_cuda_row *)take((size_t)m * sizeof(lli_cuda_row));
    lli_cuda_slot *slots = (lli_cuda_slot *)take((size_t)132 * m * sizeof(lli_cuda_slot));
    fill<<<1024, 256>>>(x, (int64_t)m * k, 1.0f, 21);
    fill<<<1024, 256>>>(w, (int64_t)n * k, 1.5f / sqrtf((float)k), 22);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times[kVariants];
    for (int round = -4; round < rounds; round++) {
        for (int which = 0; which < kVariants; which++) {
            const variant *v = &variants[which];
            float ms = 0;
            group_rows = v->group_rows;
            CHECK(cudaEventRecord(begin));
            if (v->kind == 0) run_lt(x, w, c, m, n, k, k, false);
            if (v->kind == 1) run_ours<turns_192>(x, w, nullptr, m, n, k, k);
            if (v->kind == 2) run_ours<halves_256>(x, w, nullptr, m, n, k, k);
            if (v->kind > 2) run_forward(x, w, ids, slots, rows, m, n, k, v->kind > 3, v->pace);
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            if (round >= 0) times[which].push_back(ms);
        }
    }
    for (int which = 0; which < kVariants; which++) {
        const double ms = median(times[which]);
        printf("m%d n%d k%d %-20s groups of %2d, pace %2d %8.3f ms  %6.1f TFLOP/s  %.3f of "
               "cuBLASLt\n",
               m, n, k, variants[which].name, variants[which].group_rows, variants[which].pace, ms,
               2e-9 * m * n * k / ms, ms / median(times[0]));
    }
    for (void *p : {(void *)x, (void *)w, c, (void *)ids, (void *)rows, (void *)slots}) CHECK(cudaFree(p));
}

int main(int argc, char **argv) {
    int failed = 0;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cublasLtCreate(&lt));
    lt_workspace = take(lt_workspace_bytes);
    if (argc < 2 || strcmp(argv[1], "check") == 0) {
        for (int blocks : {132, 128, 2}) {
            grid_blocks = blocks;
            failed += check<turns_192>("turns 128x192", 300, 1000, 520, 528);
            failed += check<halves_256>("halves 128x256", 300, 1000, 520, 528);
        }
        grid_blocks = 132;
        for (int k : {64, 1000, 2048, 4096, 7168}) {
            failed += check<turns_192>("turns 128x192", 1024, 8192, k, k);
            failed += check<halves_256>("halves 128x256", 1024, 8192, k, k);
        }
        failed += check<turns_192>("turns 128x192", 1, 8000, 4096, 4096);
        failed += check<turns_192>("turns 128x192", 4096, 8192, 512, 512);
        failed += check_grids(1100, 5000, 512) + check_grids(3333, 2999, 128) + check_grids(17, 700, 64);
    }
    if (argc < 2 || strcmp(argv[1], "time") == 0) {
        time_all(4096, 131072, 4096, 15);
        time_all(8192, 151936, 2048, 7);
    }
    return failed ? 1 : 0;
}
