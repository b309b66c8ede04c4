/* The gradient of given logits from the rows' coefficients: for a backward pass, and for rows whose
 * statistics ce_stats.cu made. Reads each logit once and writes its gradient once, in place too: a thread
 * reads what it then writes.
 *
 *   a block       8192 columns of a row
 *   a thread      16 bytes of logits at a time where rows lie on 16 bytes, else one column at a time */
#include "cuda/ce.h"
#include "cuda/ce_tile.cuh"

enum { kThreads = 256, kColumns = 8192 };

static __device__ inline void load_row(const lli_cuda_ce *args, int64_t i, ce_grad_row *row) {
    const int64_t y = target_of(&args->row.targets, i);
    row->grad = args->row.grads[i].row;
    row->dead = row->grad.dead;
    row->target = y >= 0 && row->grad.has_target ? y : -1;
}

/* Columns [c, end) of a row, whole pieces and at most kColumns: all of a thread's pieces are on their way
 * before the first is stored, because in place the compiler may not move a load across a store. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void by_pieces(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                        char *to, int64_t c, int64_t end) {
    enum { kCount = piece_of<E>::kCount, kPieces = kColumns / (kThreads * kCount) };
    const float *class_weight = args->row.call.class_weight;
    const int32_t dtype = args->grad.dtype;
    const int64_t bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    uint4 pieces[kPieces];
    c += threadIdx.x * kCount;
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const int64_t at = c + p * kThreads * kCount;
        if (kWay != CE_DEAD && at < end) pieces[p] = *(const uint4 *)(from + at);
    }
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const int64_t at = c + p * kThreads * kCount;
        if (at >= end) break;
        ce_dz_piece<E, kPlain, kWay>(&args->row.transform, row, pieces[p],
                                     class_weight ? class_weight + at : NULL, dtype, to + at * bytes);
        if (kWay != CE_DEAD && row->target >= at && row->target < at + kCount) {
            float z[kCount], raw = 0.0f;
            piece_of<E>::widen(pieces[p], z);
#pragma unroll
            for (int j = 0; j < kCount; j++) raw = row->target == at + j ? z[j] : raw;
            ce_dz_column(&args->row.transform, row, raw, 1.0f, true, dtype, to, row->target);
        }
    }
}

/* Columns [c, end) one by one, neighbouring threads neighbouring columns. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void by_columns(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                         char *to, int64_t c, int64_t end) {
    const float *class_weight = args->row.call.class_weight;
    const int32_t dtype = args->grad.dtype;
    for (c += threadIdx.x; c < end; c += kThreads) {
        const float z = kWay == CE_DEAD ? 0.0f : element_at(from, args->logits.dtype, c);
        const float cw = class_weight ? class_weight[c] : 1.0f;
        float dz;
        ce_dz_columns<kPlain, kWay, 1>(&args->row.transform, row, &z, &cw, &dz);
        put_element(to, dtype, c, dz);
        if (kWay != CE_DEAD && c == row->target)
            ce_dz_column(&args->row.transform, row, z, cw, true, dtype, to, c);
    }
}

/* Columns [c, end). The target is written over what its own thread has written there. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void columns(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                      char *to, int64_t c, int64_t end, bool aligned) {
    if (aligned && end > c) {
        const int64_t odd = c + (end - c) / piece_of<E>::kCount * piece_of<E>::kCount;
        by_pieces<E, kPlain, kWay>(args, row, from, to, c, odd);
        c = odd;
    }
    by_columns<E, kPlain, kWay>(args, row, from, to, c, end);
}

template <typename E, bool kPlain>
static __global__ void __launch_bounds__(kThreads, 4)
    dz(const __grid_constant__ lli_cuda_ce args, const int32_t aligned) {
    __shared__ ce_grad_row shared;
    const int64_t i = args.row.first + blockIdx.x, c = (int64_t)blockIdx.y * kColumns;
    const int64_t stop = c + kColumns < args.grad.cols ? c + kColumns : args.grad.cols;
    const int64_t end = stop < args.v ? stop : args.v;
    const int64_t out_bytes = args.grad.dtype == LL_DTYPE_F32 ? 4 : 2;
    const E *from = (const E *)args.logits.data + i * args.logits.row_stride;
    char *to = (char *)args.grad.data + i * args.grad.row_stride * out_bytes;
    if (threadIdx.x == 0) load_row(&args, i, &shared);
    __syncthreads();                /* the row's coefficients */
    const ce_grad_row row = shared; /* in registers */
    switch (way_of(&row)) {
    case CE_DEAD:
        columns<E, kPlain, CE_DEAD>(&args, &row, from, to, c, end, aligned);
        break;
    case CE_PLAIN:
        columns<E, kPlain, CE_PLAIN>(&args, &row, from, to, c, end, aligned);
        break;
    case CE_GAMMA:
        columns<E, kPlain, CE_GAMMA>(&args, &row, from, to, c, end, aligned);
        break;
    case CE_WIDE:
        columns<E, kPlain, CE_WIDE>(&args, &row, from, to, c, end, aligned);
        break;
    }
    for (int64_t v = (c > args.v ? c : args.v) + threadIdx.x; v < stop; v += kThreads) { /* padding */
        put_element(to, args.grad.dtype, v, 0.0f);
    }
}

typedef void dz_kernel(const lli_cuda_ce, int32_t);

static dz_kernel *kernel_for(int32_t dtype, bool plain) {
    if (dtype == LL_DTYPE_F32) return plain ? dz<float, true> : dz<float, false>;
    if (dtype == LL_DTYPE_BF16) return plain ? dz<__nv_bfloat16, true> : dz<__nv_bfloat16, false>;
    return plain ? dz<__half, true> : dz<__half, false>;
}

static bool on_16_bytes(const ll_view *view) {
    const int64_t bytes = view->dtype == LL_DTYPE_F32 ? 4 : 2;
    return (uintptr_t)view->data % 16 == 0 && view->row_stride * bytes % 16 == 0;
}

extern "C" int lli_cuda_ce_dz_launch(const lli_cuda_ce *args, cudaStream_t stream) {
    const lli_cuda_finish *row = &args->row;
    const bool plain =
        !row->smoothing && row->transform.softcap == 0.0f && row->transform.temperature == 1.0f;
    const dim3 grid((unsigned)row->n_rows, (unsigned)blocks_for(args->grad.cols, kColumns));
    const int32_t aligned = on_16_bytes(&args->logits) && on_16_bytes(&args->grad);
    return launch(kernel_for(args->logits.dtype, plain), grid, dim3(kThreads), 0, stream, *args, aligned);
}

extern "C" int lli_cuda_load_ce_dz(void) {
    static const int32_t dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    cudaFuncAttributes a;
    int status = 0;
    for (int i = 0; i < 6 && !status; i++) {
        status = (int)cudaFuncGetAttributes(&a, kernel_for(dtypes[i / 2], i % 2));
    }
    return status;
}
