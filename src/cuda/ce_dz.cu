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
    row->target = y >= 0 && row->grad.has_target ? y : kNoTarget;
}

/* dz of kCount neighbouring raw logits, column c the first one's; cw: their class weights. */
template <bool kPlain, int kCount>
static __device__ inline void dz_of(const lli_cuda_transform *transform, const ce_grad_row *row,
                                    const float *z, const float *cw, int64_t c, float *dz) {
    const ce_way way = way_of(row);
#pragma unroll
    for (int j = 0; j < kCount; j++) {
        const float weight = kPlain ? 1.0f : cw[j];
        if (way == CE_WIDE) {
            dz[j] = ce_dz_wide(transform, &row->grad, z[j], weight);
        } else if (way == CE_GAMMA) {
            dz[j] = ce_dz<kPlain, true>(transform, &row->grad, z[j], weight);
        } else {
            dz[j] = ce_dz<kPlain, false>(transform, &row->grad, z[j], weight);
        }
    }
    if ((uint64_t)(row->target - c) >= kCount) return;
#pragma unroll
    for (int j = 0; j < kCount; j++) {
        if (row->target == c + j) dz[j] = ce_target_dz(transform, &row->grad, z[j]);
    }
}

/* Columns [c, end) of a row, a multiple of 16 bytes and at most kColumns: all of a thread's pieces are on
 * their way before the first is stored, because in place the compiler may not move a load across a store. */
template <typename E, bool kPlain>
static __device__ inline void by_pieces(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                        void *to, int64_t c, int64_t end) {
    enum { kCount = piece_of<E>::kCount, kPieces = kColumns / (kThreads * kCount) };
    const float *class_weight = args->row.call.class_weight;
    uint4 pieces[kPieces];
    c += threadIdx.x * kCount;
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const int64_t at = c + p * kThreads * kCount;
        if (at < end) pieces[p] = *(const uint4 *)(from + at);
    }
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const int64_t at = c + p * kThreads * kCount;
        if (at >= end) return;
        float z[kCount], cw[kCount], dz[kCount];
        piece_of<E>::widen(pieces[p], z);
        if constexpr (!kPlain) {
#pragma unroll
            for (int j = 0; j < kCount; j++) cw[j] = class_weight ? class_weight[at + j] : 1.0f;
        }
        dz_of<kPlain, kCount>(&args->row.transform, row, z, cw, at, dz);
        if (sizeof(E) == 2 && args->grad.dtype == LL_DTYPE_F32) {
#pragma unroll
            for (int j = 0; j < kCount; j += 4) {
                *(float4 *)((float *)to + at + j) = make_float4(dz[j], dz[j + 1], dz[j + 2], dz[j + 3]);
            }
        } else {
            *(uint4 *)((E *)to + at) = piece_of<E>::narrow(dz);
        }
    }
}

template <typename E, bool kPlain>
static __device__ inline void by_columns(const lli_cuda_ce *args, const ce_grad_row *row, const E *from,
                                         void *to, int64_t c, int64_t end) {
    const float *class_weight = args->row.call.class_weight;
#pragma unroll 4
    for (c += threadIdx.x; c < end; c += kThreads) {
        const float z = element_at(from, args->logits.dtype, c), cw = class_weight ? class_weight[c] : 1.0f;
        float dz;
        dz_of<kPlain, 1>(&args->row.transform, row, &z, &cw, c, &dz);
        put_element(to, args->grad.dtype, c, dz);
    }
}

template <typename E, bool kPlain>
static __global__ void __launch_bounds__(kThreads)
    dz(const __grid_constant__ lli_cuda_ce args, const int32_t aligned) {
    __shared__ ce_grad_row row;
    const int64_t i = args.row.first + blockIdx.x, c = (int64_t)blockIdx.y * kColumns;
    const int64_t stop = c + kColumns < args.grad.cols ? c + kColumns : args.grad.cols;
    const int64_t end = stop < args.v ? stop : args.v;
    const int64_t out_bytes = args.grad.dtype == LL_DTYPE_F32 ? 4 : 2;
    const E *from = (const E *)args.logits.data + i * args.logits.row_stride;
    char *to = (char *)args.grad.data + i * args.grad.row_stride * out_bytes;
    if (threadIdx.x == 0) load_row(&args, i, &row);
    __syncthreads();                         /* the row's coefficients */
    int64_t zeros = c > args.v ? c : args.v; /* padding */
    if (row.dead) {
        zeros = c;
    } else if (aligned) {
        const int64_t whole = end > c ? c + (end - c) / piece_of<E>::kCount * piece_of<E>::kCount : c;
        by_pieces<E, kPlain>(&args, &row, from, to, c, whole);
        by_columns<E, kPlain>(&args, &row, from, to, whole, end);
    } else {
        by_columns<E, kPlain>(&args, &row, from, to, c, end);
    }
    for (int64_t v = zeros + threadIdx.x; v < stop; v += kThreads) put_element(to, args.grad.dtype, v, 0.0f);
}

typedef void dz_kernel(const lli_cuda_ce, int32_t);

static dz_kernel *kernel_for(int32_t dtype, bool plain) {
    if (dtype == LL_DTYPE_F32) return plain ? dz<float, true> : dz<float, false>;
    if (dtype == LL_DTYPE_BF16) return plain ? dz<__nv_bfloat16, true> : dz<__nv_bfloat16, false>;
    return plain ? dz<__half, true> : dz<__half, false>;
}

extern "C" int lli_cuda_ce_dz_launch(const lli_cuda_ce *args, cudaStream_t stream) {
    const lli_cuda_finish *row = &args->row;
    const bool plain =
        !row->smoothing && row->transform.softcap == 0.0f && row->transform.temperature == 1.0f;
    const dim3 grid((unsigned)row->n_rows, (unsigned)blocks_for(args->grad.cols, kColumns));
    const int32_t aligned = lli_cuda_on_16_bytes(&args->logits) && lli_cuda_on_16_bytes(&args->grad);
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
