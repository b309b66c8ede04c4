/* grad_sm90 [check|time]: src/cuda/grad_sm90.cu, the two products of the gradients, against cuBLASLt.
 *
 *   check   every f32 and bf16 sum bit for bit, ragged sizes too, on poisoned outputs, overwritten and added
 *           to; samples against double
 *   time    all columns of a pass, in one launch and in several, in turn with cuBLASLt as gradient.c calls
 * it, medians; dz are there
 *
 * build: nvcc -O3 -std=c++20 -fmad=false -I../../src -I../../include -gencode=arch=compute_90a,code=sm_90a
 *        --diag-suppress=177 grad_sm90.cu -lcublasLt */
#include "cuda/grad_sm90.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublasLt.h>
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

typedef __nv_bfloat16 bf16;

static void *take(size_t bytes) {
    void *data = nullptr;
    CHECK(cudaMalloc(&data, bytes));
    return data;
}

/* ---- Our kernel --------------------------------------------------------------------------------- */

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static CUtensorMap encode(int rank, const void *base, const cuuint64_t *sizes, const cuuint64_t *strides,
                          const cuuint32_t *box) {
    static encode_fn *function;
    CUtensorMap map;
    const cuuint32_t steps[3] = {1, 1, 1};
    if (!function) {
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&function, 12000,
                                               cudaEnableDefault, &found));
        CHECK(found != cudaDriverEntryPointSuccess);
    }
    CHECK(function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void *)base, sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

static CUtensorMap plain_map(const void *base, int64_t rows, int64_t k, int64_t ld) {
    const cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)ld * 2};
    const cuuint32_t box[2] = {kProductDepth, kProductRows};
    return encode(2, base, sizes, strides, box);
}

static CUtensorMap turned_map(const void *base, int64_t k, int64_t cols, int64_t ld, int k_box, int blocks) {
    const cuuint64_t sizes[3] = {kGradBlock, (cuuint64_t)k, (cuuint64_t)cols / kGradBlock},
                     strides[2] = {(cuuint64_t)ld * 2, kGradBlock * 2};
    const cuuint32_t box[3] = {kGradBlock, (cuuint32_t)k_box, (cuuint32_t)blocks};
    return encode(3, base, sizes, strides, box);
}

static int grid_clusters = 66, group_rows = 8;
static lli_cuda_grad_queue *queue;

typedef struct problem {
    int n, d, v; /* v: columns; those of grad_x are a multiple of 64 */
    const bf16 *dz, *w, *x;
    int64_t dz_ld, w_ld;
    float *grad_x;
    void *grad_w;
    int form_x, form_w; /* -1: not wanted */
} problem;

static int64_t padded(int64_t n) {
    return (n + 63) / 64 * 64;
}

/* All columns in one launch; block b's dz are columns b % 2 * kSumCols on. */
static void run_ours(const problem *p) {
    lli_cuda_grad_products g = {};
    const int64_t n = padded(p->n), blocks = (p->v + kSumCols - 1) / kSumCols;
    const bool x = p->form_x >= 0, w = p->form_w >= 0;
    if (x) {
        g.of[0] = {.a = plain_map(p->dz, n, p->dz_ld, p->dz_ld),
                   .b = turned_map(p->w, p->v, p->d, p->w_ld, 32, 3),
                   .c = p->grad_x,
                   .c_ld = p->d,
                   .n_rows = p->n,
                   .group_rows = (uint32_t)std::min(group_rows, (p->n + 255) / 256),
                   .form = p->form_x};
    }
    if (w) {
        g.of[1] = {.a = turned_map(p->dz, n, p->dz_ld, p->dz_ld, 64, 2),
                   .b = turned_map(p->x, n, p->d, p->d, 32, 3),
                   .c = p->grad_w,
                   .c_ld = p->d,
                   .n_rows = p->v,
                   .group_rows = (uint32_t)group_rows,
                   .form = p->form_w};
    }
    g.block = lli_cuda_grad_block_of(p->n, kSumCols, p->d, x, w);
    g.last = lli_cuda_grad_block_of(p->n, p->v - (blocks - 1) * kSumCols, p->d, x, w);
    g.n_blocks = g.ready = (uint32_t)blocks;
    g.clusters = (uint32_t)std::min<int64_t>(grid_clusters, (blocks - 1) * g.block.tiles + g.last.tiles);
    g.queue = queue;
    if (!g.clusters) return;
    CHECK(lli_cuda_grad_launch(&g, 0));
}

/* ---- cuBLASLt ----------------------------------------------------------------------------------- */

static cublasLtHandle_t lt;

/* Row-major c [rows, cols] (+)= a b, as gemm.c. */
static void run_lt(bool turned_a, bool narrow, bool add, const void *a, int64_t a_ld, const void *b,
                   int64_t b_ld, void *c, int rows, int cols, int k) {
    static struct known {
        bool turned_a, narrow, add;
        int cols;
        cublasLtMatmulAlgo_t algo;
    } knowns[64];
    static int n_known;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t al, bl, cl;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const float one = 1, zero = 0;
    const cudaDataType_t out = narrow ? CUDA_R_16BF : CUDA_R_32F;
    CHECK(cublasLtMatmulDescInit(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (turned_a)
        CHECK(cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSB, &turned, sizeof turned));
    known *it = nullptr;
    for (int i = 0; i < n_known; i++) {
        known *x = &knowns[i];
        if (x->turned_a == turned_a && x->narrow == narrow && x->add == add && x->cols == cols) it = x;
    }
    const bool choose = !it;
    if (choose) {
        it = &knowns[n_known++];
        *it = {turned_a, narrow, add, cols};
        const int nr = turned_a ? 16384 : 4096, nk = turned_a ? 4096 : 8192; /* nominal */
        cublasLtMatmulPreferenceOpaque_t wish;
        cublasLtMatmulHeuristicResult_t results[16];
        int count = 0, got = -1;
        const size_t bytes = 0;
        const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
        CHECK(cublasLtMatrixLayoutInit(&bl, CUDA_R_16BF, cols, nk, cols));
        CHECK(cublasLtMatrixLayoutInit(&al, CUDA_R_16BF, turned_a ? nr : nk, turned_a ? nk : nr,
                                       turned_a ? nr : nk));
        CHECK(cublasLtMatrixLayoutInit(&cl, out, cols, nr, cols));
        CHECK(cublasLtMatmulPreferenceInit(&wish));
        CHECK(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                   sizeof bytes));
        CHECK(cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                   &no_reduction, sizeof no_reduction));
        CHECK(cublasLtMatmulAlgoGetHeuristic(lt, &desc, &bl, &al, &cl, &cl, &wish, 16, results, &count));
        for (int i = count - 1; i >= 0; i--) {
            int32_t splits = 0;
            size_t written;
            CHECK(cublasLtMatmulAlgoConfigGetAttribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                       &splits, sizeof splits, &written));
            if (splits <= 1 && results[i].workspaceSize == 0) got = i;
        }
        CHECK(got < 0);
        it->algo = results[got].algo;
    }
    CHECK(cublasLtMatrixLayoutInit(&bl, CUDA_R_16BF, cols, k, b_ld));
    CHECK(cublasLtMatrixLayoutInit(&al, CUDA_R_16BF, turned_a ? rows : k, turned_a ? k : rows, a_ld));
    CHECK(cublasLtMatrixLayoutInit(&cl, out, cols, rows, cols));
    CHECK(cublasLtMatmul(lt, &desc, &one, b, &bl, a, &al, add ? &one : &zero, c, &cl, c, &cl, &it->algo,
                         nullptr, 0, 0));
}

static void run_theirs(const problem *p) {
    for (int64_t c = 0; p->form_x >= 0 && c < p->v; c += kSumCols) {
        const int whole = (int)std::min<int64_t>(kSumCols, p->v - c) / 64 * 64;
        if (!whole) break;
        run_lt(false, false, c || p->form_x == kGradAdd, p->dz + c, p->dz_ld, p->w + c * p->w_ld, p->w_ld,
               p->grad_x, p->n, p->d, whole);
    }
    if (p->form_w >= 0) {
        run_lt(true, p->form_w == kGradNarrow, p->form_w == kGradAdd, p->dz, p->dz_ld, p->x, p->d, p->grad_w,
               p->v, p->d, (int)padded(p->n));
    }
}

/* ---- Checks ------------------------------------------------------------------------------------- */

static __global__ void fill(bf16 *data, int64_t count, float scale, uint64_t seed) {
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

static __global__ void compare(const uint16_t *a, const uint16_t *b, int64_t count, unsigned long long *out) {
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

/* Element (r, c) of dz w or dz^T x in double, and the sum of magnitudes; one block, row by row of k. */
static __global__ void reference(const bf16 *a, int64_t a_row, int64_t a_k, const bf16 *b, int64_t b_k, int k,
                                 int64_t r, int64_t c, double *out) {
    __shared__ double sum[256], size[256];
    double s = 0, m = 0;
    for (int i = threadIdx.x; i < k; i += 256) {
        const double t = (double)__bfloat162float(a[r * a_row + i * a_k]) * __bfloat162float(b[i * b_k + c]);
        s += t;
        m += fabs(t);
    }
    sum[threadIdx.x] = s;
    size[threadIdx.x] = m;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 256; i++) s += sum[i], m += size[i];
        out[0] = s;
        out[1] = m;
    }
}

static int differing(const char *what, const problem *p, const void *a, const void *b, int64_t bytes) {
    static unsigned long long *out;
    unsigned long long host[2];
    if (!out) out = (unsigned long long *)take(16);
    CHECK(cudaMemset(out, 0, 8));
    CHECK(cudaMemset(out + 1, 0xff, 8));
    compare<<<1024, 256>>>((const uint16_t *)a, (const uint16_t *)b, bytes / 2, out);
    CHECK(cudaMemcpy(host, out, 16, cudaMemcpyDeviceToHost));
    if (host[0]) {
        printf("FAIL %s n%d d%d v%d forms %d %d, %d clusters: %llu of %lld halves differ, first %llu\n", what,
               p->n, p->d, p->v, p->form_x, p->form_w, grid_clusters, host[0], (long long)bytes / 2, host[1]);
    }
    return host[0] != 0;
}

static int check(int n, int d, int v) {
    const int64_t ld = padded(v) + 64, rows = padded(n), w_ld = d + 8;
    bf16 *dz = (bf16 *)take(rows * ld * 2), *w = (bf16 *)take((int64_t)v * w_ld * 2),
         *x = (bf16 *)take(rows * d * 2);
    const int64_t x_bytes = (int64_t)n * d * 4 + 4096, w_bytes = (int64_t)v * d * 4 + 4096;
    char *xs[2] = {(char *)take(x_bytes), (char *)take(x_bytes)},
         *ws[2] = {(char *)take(w_bytes), (char *)take(w_bytes)};
    double *out = (double *)take(16), worst = 0;
    int failed = 0;
    fill<<<1024, 256>>>(dz, rows * ld, 0.01f, 11);
    fill<<<1024, 256>>>(w, (int64_t)v * w_ld, 1.5f / sqrtf((float)d), 12);
    fill<<<1024, 256>>>(x, rows * d, 1.0f, 13);
    for (int64_t r = n; r < rows; r++) CHECK(cudaMemset(dz + r * ld, 0, ld * 2)); /* as dz's makers pad it */
    CHECK(cudaMemset2D(dz + v, ld * 2, 0, (padded(v) - v) * 2, rows));
    static const int forms[][2] = {{kGradOverwrite, kGradOverwrite},
                                   {kGradAdd, kGradAdd},
                                   {kGradAdd, kGradNarrow},
                                   {kGradAdd, -1},
                                   {-1, kGradOverwrite}};
    for (const int *form : forms) {
        problem p = {n, d, v, dz, w, x, ld, w_ld, nullptr, nullptr, form[0], form[1]};
        for (int who = 0; who < 2; who++) {
            fill<<<1024, 256>>>((bf16 *)xs[who], x_bytes / 2, 1.0f, 21);
            fill<<<1024, 256>>>((bf16 *)ws[who], w_bytes / 2, 1.0f, 22);
            p.grad_x = (float *)xs[who];
            p.grad_w = ws[who];
            if (who == 0) run_ours(&p);
            if (who == 1) run_theirs(&p);
            CHECK(cudaDeviceSynchronize());
        }
        failed +=
            differing("grad_x", &p, xs[0], xs[1], x_bytes) + differing("grad_w", &p, ws[0], ws[1], w_bytes);
        if (form[0] != kGradOverwrite) continue;
        for (int i = 0; i < 24; i++) {
            const bool of_w = i % 2;
            const int64_t m = of_w ? v : n, r = i < 2 ? m - 1 : i * 7919 % m,
                          c = i < 4 ? d - 1 : i * 104729 % d;
            double want[2];
            float got;
            if (of_w)
                reference<<<1, 256>>>(dz, 1, ld, x, d, n, r, c, out);
            else
                reference<<<1, 256>>>(dz, ld, 1, w, w_ld, v / 64 * 64, r, c, out);
            CHECK(cudaMemcpy(want, out, 16, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(&got, (of_w ? ws : xs)[0] + (r * d + c) * 4, 4, cudaMemcpyDeviceToHost));
            if (!of_w && (v < 64 || v > kSumCols)) continue; /* a sum of one block */
            const double error = fabs(got - want[0]) / (want[1] + 1e-30);
            worst = error == error ? std::max(worst, error) : 1e30;
        }
    }
    failed += worst > 1e-5;
    printf("check n%d d%d v%d, %d clusters: %s; error %.1e of the terms' magnitude\n", n, d, v, grid_clusters,
           failed ? "FAILED" : "bits equal", worst);
    for (void *q : {(void *)dz, (void *)w, (void *)x, (void *)xs[0], (void *)xs[1], (void *)ws[0],
                    (void *)ws[1], (void *)out})
        CHECK(cudaFree(q));
    return failed;
}

/* ---- Times -------------------------------------------------------------------------------------- */

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

typedef struct variant {
    const char *name;
    int theirs, columns, group_rows; /* columns: of a launch */
    bool x, w;
} variant;

static const variant variants[] = {
    {"cuBLASLt", 1, 16384, 8, true, true},
    {"a launch of 8192", 0, 8192, 8, true, true},
    {"a launch of 16384", 0, 16384, 8, true, true},
    {"one launch", 0, INT32_MAX, 8, true, true},
    {"one launch", 0, INT32_MAX, 4, true, true},
    {"cuBLASLt, grad_x", 1, 16384, 8, true, false},
    {"one launch, grad_x", 0, INT32_MAX, 8, true, false},
    {"cuBLASLt, grad_w", 1, 16384, 8, false, true},
    {"one launch, grad_w", 0, INT32_MAX, 8, false, true},
};
enum { kVariants = sizeof variants / sizeof variants[0] };

/* dz of 16384 columns, over and over. */
static void pass(const variant *v, const problem *p, int form_w) {
    group_rows = v->group_rows;
    for (int64_t c = 0, n; c < p->v; c += n) {
        n = std::min<int64_t>(v->columns, p->v - c);
        problem q = *p;
        q.v = (int)n;
        q.dz += c % 16384;
        q.w += c * p->w_ld;
        q.grad_w = (char *)p->grad_w + c * p->d * (form_w == kGradNarrow ? 2 : 4);
        q.form_x = !v->x ? -1 : c ? kGradAdd : kGradOverwrite;
        q.form_w = v->w ? form_w : -1;
        if (v->theirs)
            run_theirs(&q);
        else
            run_ours(&q);
    }
}

static void time_all(int n, int d, int columns, int form_w, int rounds) {
    problem p = {n, d, columns};
    p.dz_ld = 16384;
    p.w_ld = d;
    bf16 *dz = (bf16 *)take((size_t)n * 16384 * 2), *w = (bf16 *)take((size_t)columns * d * 2),
         *x = (bf16 *)take((size_t)n * d * 2);
    p.dz = dz, p.w = w, p.x = x;
    p.grad_x = (float *)take((size_t)n * d * 4);
    p.grad_w = take((size_t)columns * d * 4);
    fill<<<1024, 256>>>(dz, (int64_t)n * 16384, 1e-5f, 31);
    fill<<<1024, 256>>>(w, (int64_t)columns * d, 1.5f / sqrtf((float)d), 32);
    fill<<<1024, 256>>>(x, (int64_t)n * d, 1.0f, 33);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times[kVariants];
    for (int round = -2; round < rounds; round++) {
        for (int which = 0; which < kVariants; which++) {
            float ms = 0;
            CHECK(cudaEventRecord(begin));
            pass(&variants[which], &p, form_w);
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            if (round >= 0) times[which].push_back(ms);
        }
    }
    for (int which = 0; which < kVariants; which++) {
        const variant *v = &variants[which], *theirs = v;
        while (!theirs->theirs) theirs--; /* the one before */
        const double ms = median(times[which]), base = median(times[theirs - variants]);
        printf("time n%d d%d v%d %s %-18s groups of %d %8.3f ms  %6.1f TFLOP/s  %.3f of cuBLASLt\n", n, d,
               columns, form_w == kGradNarrow ? "bf16" : "f32", v->name, v->group_rows, ms,
               2e-9 * n * d * columns * (v->x + v->w) / ms, ms / base);
    }
    for (void *q : {(void *)dz, (void *)w, (void *)x, (void *)p.grad_x, p.grad_w}) CHECK(cudaFree(q));
}

int main(int argc, char **argv) {
    int failed = 0;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cublasLtCreate(&lt));
    CHECK(lli_cuda_load_grad());
    queue = (lli_cuda_grad_queue *)take(sizeof *queue);
    CHECK(cudaMemset(queue, 0, sizeof *queue));
    if (argc < 2 || strcmp(argv[1], "check") == 0) {
        for (int clusters : {66, 61, 1}) {
            grid_clusters = clusters;
            failed += check(300, 320, 1000) + check(17, 64, 8);
        }
        grid_clusters = 66;
        for (int d : {64, 128, 192, 256, 448, 2048, 4096, 5120, 7168}) failed += check(257, d, 777);
        for (int n : {1, 2, 17, 64, 129, 1024}) failed += check(n, 512, 3000);
        failed += check(4095, 4096, 8192) + check(1000, 2048, 8192) + check(2048, 448, 16383) +
                  check(9000, 256, 200);
    }
    if (argc < 2 || strcmp(argv[1], "time") == 0) {
        time_all(4096, 4096, 131072, kGradOverwrite, 7);
        time_all(4096, 4096, 131072, kGradNarrow, 5);
        time_all(8192, 2048, 131072, kGradOverwrite, 5);
        time_all(4096, 7168, 65536, kGradOverwrite, 5);
    }
    return failed ? 1 : 0;
}
