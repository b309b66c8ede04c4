/* The gradient of given logits from the rows' coefficients: for a backward pass, and for rows whose
 * statistics ce_stats.cu made. Reads each logit once and writes its gradient once, in place too: a thread
 * reads what it then writes.
 *
 *   a block       8192 columns of a row
 *   a thread      16 bytes of logits at a time where rows lie on 16 bytes, else one column at a time */
#include "cuda/ce_tile.cuh"

enum { kThreads = 256, kColumns = 8192 };

/* The row's coefficients, and its target's own entry where that is one of columns [c, end): in place, the
 * target's logit may be gone for other blocks. By one thread. */
static __device__ inline void load_row(const lli_cuda_ce *args, int64_t i, int64_t c, int64_t end,
                                       ce_grad_row *row) {
    const int64_t y = target_of(&args->row.targets, i);
    row->grad = args->row.grads[i].row;
    row->target = y >= c && y < end && row->grad.has_target ? y : kNoTarget;
    set_way(args, row);
    if (row->target >= 0) put_target(args, i, y, row->grad.target_dz);
}

/* 16 bytes at a time of a block's columns, whose logits are asked for before anything else: what they become
 * needs the row's coefficients, two reads away. In place, the last of them is read before the first is
 * written. */
template <typename E> struct block_pieces {
    enum { kCount = piece_of<E>::kCount, kPieces = kColumns / (kThreads * kCount) };
    uint4 pieces[kPieces];

    static __device__ inline int64_t column(int64_t c, int p) {
        return c + (p * kThreads + (int)threadIdx.x) * kCount;
    }
    /* Of columns [c, end), a multiple of 16 bytes. */
    __device__ inline void load(const E *from, int64_t c, int64_t end) {
#pragma unroll
        for (int p = 0; p < kPieces; p++) {
            const int64_t at = column(c, p);
            if (at < end) pieces[p] = *(const uint4 *)(from + at);
        }
    }
};

template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void by_pieces(const lli_cuda_ce *args, const ce_grad_row *row,
                                        const block_pieces<E> *block, char *to, int64_t c, int64_t end) {
    const float *class_weight = args->row.call.class_weight;
    const int64_t to_bytes = args->grad.dtype == LL_DTYPE_F32 ? 4 : 2;
#pragma unroll
    for (int p = 0; p < block_pieces<E>::kPieces; p++) {
        const int64_t at = block_pieces<E>::column(c, p);
        if (at >= end) return;
        ce_dz_piece<E, kPlain, kWay>(&args->row.transform, row, block->pieces[p],
                                     class_weight ? class_weight + at : NULL, at, args->grad.dtype,
                                     to + at * to_bytes);
    }
}

template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void by_columns(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                         char *to, int64_t c, int64_t end) {
#pragma unroll 4
    for (c += threadIdx.x; c < end; c += kThreads) {
        const float z = element_at(from, args->logits.dtype, c);
        ce_dz_column<E, kPlain, kWay>(&args->row.transform, row, z, args->row.call.class_weight, c,
                                      args->grad.dtype, to);
    }
}

/* Columns [c, whole) by pieces, [whole, end) one by one. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void columns(const lli_cuda_ce *args, const ce_grad_row *row,
                                      const block_pieces<E> *block, const E *from, char *to, int64_t c,
                                      int64_t whole, int64_t end) {
    by_pieces<E, kPlain, kWay>(args, row, block, to, c, whole);
    by_columns<E, kPlain, kWay>(args, row, from, to, whole, end);
}

template <typename E, bool kPlain>
static __global__ void __launch_bounds__(kThreads)
    dz(const __grid_constant__ lli_cuda_ce args, const int32_t aligned) {
    enum { kCount = piece_of<E>::kCount };
    __shared__ ce_grad_row row;
    const int64_t i = args.row.first + blockIdx.x, c = (int64_t)blockIdx.y * kColumns;
    const int64_t stop = c + kColumns < args.grad.cols ? c + kColumns : args.grad.cols;
    const int64_t end = stop < args.v ? stop : args.v;
    const int64_t whole = aligned && end > c ? c + (end - c) / kCount * kCount : c;
    const E *from = (const E *)logits_row_at(&args, i);
    char *to = grad_row_at(&args, i);
    block_pieces<E> block;
    block.load(from, c, whole);
    if (threadIdx.x == 0) load_row(&args, i, c, end, &row);
    __syncthreads();                         /* the coefficients are there */
    const ce_grad_row local = row;           /* in registers: hence not for the wide, who call */
    int64_t zeros = c > args.v ? c : args.v; /* padding */
    switch (row.way) {
    case CE_DEAD:
        zeros = c;
        break;
    case CE_SHORT:
        columns<E, kPlain, CE_SHORT>(&args, &local, &block, from, to, c, whole, end);
        break;
    case CE_PLAIN:
        columns<E, kPlain, CE_PLAIN>(&args, &local, &block, from, to, c, whole, end);
        break;
    case CE_GAMMA:
        columns<E, kPlain, CE_GAMMA>(&args, &local, &block, from, to, c, whole, end);
        break;
    case CE_WIDE:
        columns<E, kPlain, CE_WIDE>(&args, &row, &block, from, to, c, whole, end);
        break;
    }
    for (int64_t v = zeros + threadIdx.x; v < stop; v += kThreads) put_element(to, args.grad.dtype, v, 0.0f);
}

/* The targets' entries, which ce_rows.cu leaves out: their logits are still where they were, in place too. */
static __global__ void __launch_bounds__(kThreads) targets(const __grid_constant__ lli_cuda_ce args) {
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x, i = args.row.first + r;
    if (r >= args.row.n_rows) return;
    const int64_t y = target_of(&args.row.targets, i);
    const lli_row_grad *grad = &args.row.grads[i].row;
    if (y >= 0 && grad->has_target) put_target(&args, i, y, grad->target_dz);
}

typedef void dz_kernel(const lli_cuda_ce, int32_t);

static dz_kernel *kernel_for(int32_t dtype, bool plain) {
    if (dtype == LL_DTYPE_F32) return plain ? dz<float, true> : dz<float, false>;
    if (dtype == LL_DTYPE_BF16) return plain ? dz<__nv_bfloat16, true> : dz<__nv_bfloat16, false>;
    return plain ? dz<__half, true> : dz<__half, false>;
}

extern "C" int lli_cuda_ce_dz_launch(const lli_cuda_ce *args, cudaStream_t stream) {
    const dim3 grid((unsigned)args->row.n_rows, (unsigned)blocks_for(args->grad.cols, kColumns));
    const int32_t aligned = lli_cuda_on_16_bytes(&args->logits) && lli_cuda_on_16_bytes(&args->grad);
    return launch(kernel_for(args->logits.dtype, is_plain(&args->row)), grid, dim3(kThreads), 0, stream,
                  *args, aligned);
}

extern "C" int lli_cuda_ce_targets_launch(const lli_cuda_ce *args, cudaStream_t stream) {
    return launch(targets, dim3((unsigned)blocks_for(args->row.n_rows, kThreads)), dim3(kThreads), 0, stream,
                  *args);
}

extern "C" int lli_cuda_load_ce_dz(void) {
    static const int32_t dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, targets);
    for (int i = 0; i < 6 && !status; i++) {
        status = (int)cudaFuncGetAttributes(&a, kernel_for(dtypes[i / 2], i % 2));
    }
    return status;
}
