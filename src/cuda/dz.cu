/* Gradients with respect to raw logits, from a block of f32 logits and the rows' coefficients, in the
 * operands' dtype: what src/cpu/micro_row.h (gradient) computes, in the same operations, then rounded once;
 * in plain problems of bf16 operands from the rounded exponentials of a canonical tile (dz.cuh). The target's
 * element is the exact one of core/loss.c.
 *
 *   a thread      4 neighbouring columns of kBiasRows rows; 16: a canonical tile; a block: kBlockCols columns
 *   grad_bias     each thread adds up its columns over its rows, ascending, before rounding
 *
 * f16 has 5 bits of exponent, and dz of a mean over many tokens lies below its range. A row is therefore kept
 * as dz 2^-e with a power of two of its own (finish.cu): exact, and undone exactly, in grad_x's row and,
 * through x's row, in grad_w. */
#include "cuda/dz.cuh"
#include "cuda/ptx/max_nan.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { kThreads = 256, kCols = 4, kBlockCols = kThreads * kCols, kAhead = 2 };

static __device__ inline void store4(const lli_cuda_dz *args, int64_t r, int64_t c, const float *dz,
                                     float scale) {
    const int64_t at = r * args->dz_ld + c;
    if (args->dtype == LL_DTYPE_F32) {
        *(float4 *)((float *)args->dz + at) = make_float4(dz[0], dz[1], dz[2], dz[3]);
    } else if (args->dtype == LL_DTYPE_BF16) {
        __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(dz[0], dz[1]), __floats2bfloat162_rn(dz[2], dz[3])};
        *(uint2 *)((uint16_t *)args->dz + at) = *(uint2 *)pair;
    } else {
        __half2 pair[2] = {__floats2half2_rn(dz[0] * scale, dz[1] * scale),
                           __floats2half2_rn(dz[2] * scale, dz[3] * scale)};
        *(uint2 *)((uint16_t *)args->dz + at) = *(uint2 *)pair;
    }
}

/* From rounded exponentials. Every one of a tile's 16 threads calls it, for the tile's largest logit. */
static __device__ inline void row_dz_rounded(const lli_cuda_dz *args, const dz_row *row, float *z, int32_t c,
                                             float *dz) {
    const unsigned lanes = 0xffffu << (threadIdx.x & 16);
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCols; i++) {
        if (c + i >= args->n_cols) z[i] = -INFINITY;
        max = ptx_max_nan_f32(max, z[i]);
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) max = ptx_max_nan_f32(max, __shfl_xor_sync(lanes, max, mask));
    if (row->apart) {
        for (int i = 0; i < kCols; i++) dz[i] = apart_dz(row, z[i], max);
        return;
    }
    const dz_factor factor = factor_of(row, kept_anchor(max));
    const float minus_k = -bounded_anchor(max);
#pragma unroll
    for (int i = 0; i < kCols; i++) {
        float d;
        const float p = exp16_value(exp16_of(grid_power(z[i], minus_k, &d)));
        dz[i] = row->gamma != 0.0f ? dz_from<true>(&factor, row, p) : dz_from<false>(&factor, row, p);
    }
}

/* A row's dz in the thread's columns, from their raw products. */
template <bool kPlain, bool kRounded>
static __device__ inline void row_dz(const lli_cuda_dz *args, const dz_row *shared, const float4 raw4,
                                     int32_t c, const float *bias, const float *cw, float *dz) {
    const dz_row row = *shared;
    float raw[kCols] = {raw4.x, raw4.y, raw4.z, raw4.w};
    if (!kPlain && args->bias) {
#pragma unroll
        for (int i = 0; i < kCols; i++) raw[i] = raw[i] + bias[i];
    }
    if (row.dead) {
#pragma unroll
        for (int i = 0; i < kCols; i++) dz[i] = 0.0f;
        return;
    }
    if (kRounded) {
        row_dz_rounded(args, &row, raw, c, dz);
    } else if (row.wide) {
        for (int i = 0; i < kCols; i++) dz[i] = wide_dz_of(&args->transform, &row, raw[i], cw[i]);
    } else if (row.gamma != 0.0f) {
#pragma unroll
        for (int i = 0; i < kCols; i++) dz[i] = dz_of<true, kPlain>(&args->transform, &row, raw[i], cw[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kCols; i++) dz[i] = dz_of<false, kPlain>(&args->transform, &row, raw[i], cw[i]);
    }
    if ((uint32_t)(row.target - c) < kCols) {
#pragma unroll
        for (int i = 0; i < kCols; i++) {
            if (row.target == c + i) dz[i] = target_dz_of(&args->transform, &row, raw[i]);
        }
    }
    if (c + kCols > args->n_cols) {
        for (int i = 0; i < kCols; i++) {
            if (c + i >= args->n_cols) dz[i] = 0.0f;
        }
    }
}

/* The thread's columns of kAhead rows: on their way while the rows before are worked on. */
static __device__ inline void load_ahead(const lli_cuda_dz *args, int64_t r, int32_t c, float4 *ahead) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        const bool there = r + i < args->n_rows && c < args->n_cols;
        ahead[i] = there ? *(const float4 *)(args->logits + (r + i) * args->ld + c)
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

template <bool kPlain, bool kRounded>
static __global__ void __launch_bounds__(kThreads, 3) dz(const __grid_constant__ lli_cuda_dz args) {
    __shared__ dz_row rows[kBiasRows];
    const int32_t c = (int32_t)blockIdx.x * kBlockCols + threadIdx.x * kCols;
    const int64_t first = (int64_t)blockIdx.y * kBiasRows;
    float4 ahead[kAhead];
    load_ahead(&args, first, c, ahead);
    if (threadIdx.x < kBiasRows) load_row(&args, first + threadIdx.x, &rows[threadIdx.x]);
    __syncthreads();                   /* the rows' coefficients, read by every thread */
    if (c >= args.padded_cols) return; /* whole tiles */
    float bias[kCols], cw[kCols], sum[kCols] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < kCols; i++) {
        const bool inside = c + i < args.n_cols;
        bias[i] = inside && args.bias ? args.bias[c + i] : 0.0f;
        cw[i] = inside && args.class_weight ? args.class_weight[args.column + c + i] : 1.0f;
    }
#pragma unroll 1
    for (int r0 = 0; r0 < kBiasRows; r0 += kAhead) {
        float4 raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) raw[i] = ahead[i];
        if (r0 + kAhead < kBiasRows) load_ahead(&args, first + r0 + kAhead, c, ahead);
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            float dz[kCols];
            row_dz<kPlain, kRounded>(&args, &rows[r0 + i], raw[i], c, bias, cw, dz);
            if (args.bias_parts) {
                for (int j = 0; j < kCols; j++) sum[j] = sum[j] + dz[j];
            }
            if (first + r0 + i < args.padded_rows) store4(&args, first + r0 + i, c, dz, rows[r0 + i].scale);
        }
    }
    if (args.bias_parts && first < args.n_rows) {
        *(float4 *)(args.bias_parts + blockIdx.y * (int64_t)kDzCols + c) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

static __global__ void bias_add(const float *parts, int64_t n_parts, int64_t n_cols, float *sum,
                                int32_t fresh) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= n_cols) return;
    float total = 0.0f;
    for (int64_t part = 0; part < n_parts; part++) total = total + parts[part * kDzCols + c];
    sum[c] = fresh ? total : sum[c] + total;
}

extern "C" int lli_cuda_dz_launch(const lli_cuda_dz *args, cudaStream_t stream) {
    const dim3 grid((unsigned)blocks_for(args->padded_cols, kBlockCols),
                    (unsigned)blocks_for(args->padded_rows, kBiasRows));
    const bool plain = lli_cuda_dz_plain(args);
    if (!plain) return launch(dz<false, false>, grid, dim3(kThreads), 0, stream, *args);
    if (args->dtype != LL_DTYPE_BF16) return launch(dz<true, false>, grid, dim3(kThreads), 0, stream, *args);
    return launch(dz<true, true>, grid, dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_bias_add_launch(const float *parts, int64_t n_parts, int64_t n_cols, float *sum,
                                        int32_t fresh, cudaStream_t stream) {
    return launch(bias_add, dim3((unsigned)blocks_for(n_cols, 64)), dim3(64), 0, stream, parts, n_parts,
                  n_cols, sum, fresh);
}

extern "C" int lli_cuda_load_dz(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, dz<true, true>);
    if (!status) status = (int)cudaFuncGetAttributes(&a, dz<true, false>);
    if (!status) status = (int)cudaFuncGetAttributes(&a, dz<false, false>);
    return status ? status : (int)cudaFuncGetAttributes(&a, bias_add);
}
