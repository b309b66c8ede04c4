/* Gradients with respect to raw logits, from a block of f32 logits and the rows' coefficients, in the operands'
 * dtype: what src/cpu/micro_row.h (gradient) computes, in the same operations, then rounded once. The target's
 * element is the exact one of core/loss.c.
 *
 *   a thread      4 neighbouring columns of kBiasRows rows; a block: kBlockCols columns of them
 *   grad_bias     each thread adds up its columns over its rows, ascending, before rounding
 *
 * f16 has 5 bits of exponent, and dz of a mean over many tokens lies below its range. A row is therefore kept
 * as dz 2^-e with a power of two of its own (finish.cu): exact, and undone exactly, in grad_x's row and, through
 * x's row, in grad_w. */
#include "cuda/device.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { kThreads = 256, kCols = 4, kBlockCols = kThreads * kCols, kAhead = 4 };

typedef struct dz_row {
    lli_row_grad grad;
    float scale;
    int32_t target; /* column in the block; -1: none of it */
} dz_row;

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T; d = (z - lse) log2 e carries lse - z. */
static __device__ inline float dz_of(const lli_cuda_transform *transform, const lli_row_grad *grad, float raw,
                                     float cw) {
    float slope;
    const float z = logit_of(transform, raw, &slope);
    float dz;
    if (grad->wide) {
        dz = lli_row_dz_wide(grad, z, cw);
    } else {
        float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -grad->k));
        d = d - grad->fraction;
        const float bounded = -126.0f > d ? -126.0f : d;
        const float p = d >= -126.0f ? exp2_grid(bounded, 0) : 0.0f;
        dz = p * grad->alpha;
        if (grad->gamma != 0.0f) {
            const float surprise = bounded * -0x1.62e430p-1f - grad->entropy;
            dz = fmaf(p * grad->gamma, surprise, dz);
        }
        if (grad->epsilon != 0.0f) dz = dz - grad->epsilon * cw;
    }
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

static __device__ inline float target_dz_of(const lli_cuda_transform *transform, const lli_row_grad *grad,
                                            float raw) {
    float slope, dz = grad->target_dz;
    (void)logit_of(transform, raw, &slope);
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

static __device__ inline void store4(const lli_cuda_dz *args, int64_t r, int64_t c, const float *dz, float scale) {
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

static __device__ inline void load_row(const lli_cuda_dz *args, int64_t r, dz_row *row) {
    row->target = -1;
    row->scale = 1.0f;
    row->grad.dead = 1;
    if (r >= args->n_rows) return;
    const int64_t y = target_of(&args->targets, args->first + r), at = y - args->column;
    row->grad = args->grads[r].row;
    row->scale = __uint_as_float((uint32_t)(127 - args->grads[r].exponent) << 23);
    if (y >= 0 && row->grad.has_target && at >= 0 && at < args->n_cols) row->target = (int32_t)at;
}

/* Row r of the block's rows: dz of the thread's columns from their raw products. */
static __device__ inline void row_dz(const lli_cuda_dz *args, const dz_row *row, const float4 raw4, int64_t c,
                                     const float *bias, const float *cw, float *dz) {
    const float raw[kCols] = {raw4.x, raw4.y, raw4.z, raw4.w};
#pragma unroll
    for (int i = 0; i < kCols; i++) {
        dz[i] = 0.0f;
        if (row->grad.dead || c + i >= args->n_cols) continue;
        const float value = args->bias ? raw[i] + bias[i] : raw[i];
        dz[i] = dz_of(&args->transform, &row->grad, value, cw[i]);
        if (row->target == c + i) dz[i] = target_dz_of(&args->transform, &row->grad, value);
    }
}

static __global__ void __launch_bounds__(kThreads) dz(const __grid_constant__ lli_cuda_dz args) {
    __shared__ dz_row rows[kBiasRows];
    const int64_t c = (int64_t)blockIdx.x * kBlockCols + threadIdx.x * kCols;
    const int64_t first = (int64_t)blockIdx.y * kBiasRows;
    if (threadIdx.x < kBiasRows) load_row(&args, first + threadIdx.x, &rows[threadIdx.x]);
    __syncthreads(); /* the rows' coefficients, read by every thread */
    if (c >= args.padded_cols) return;
    float bias[kCols], cw[kCols], sum[kCols] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < kCols; i++) {
        const bool inside = c + i < args.n_cols;
        bias[i] = inside && args.bias ? args.bias[args.column + c + i] : 0.0f;
        cw[i] = inside && args.class_weight ? args.class_weight[args.column + c + i] : 1.0f;
    }
    for (int r0 = 0; r0 < kBiasRows; r0 += kAhead) {
        float4 raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const bool wanted = !rows[r0 + i].grad.dead && c < args.n_cols;
            raw[i] = wanted ? *(const float4 *)(args.logits + (first + r0 + i) * args.ld + c)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            float dz[kCols];
            row_dz(&args, &rows[r0 + i], raw[i], c, bias, cw, dz);
            for (int j = 0; j < kCols; j++) sum[j] = sum[j] + dz[j];
            if (first + r0 + i < args.padded_rows) store4(&args, first + r0 + i, c, dz, rows[r0 + i].scale);
        }
    }
    if (args.bias_parts && first < args.n_rows) {
        *(float4 *)(args.bias_parts + blockIdx.y * (int64_t)kSumCols + c) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

static __global__ void bias_add(const float *parts, int64_t n_parts, int64_t n_cols, float *sum, int32_t fresh) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= n_cols) return;
    float total = 0.0f;
    for (int64_t part = 0; part < n_parts; part++) total = total + parts[part * kSumCols + c];
    sum[c] = fresh ? total : sum[c] + total;
}

extern "C" int lli_cuda_dz_launch(const lli_cuda_dz *args, cudaStream_t stream) {
    const dim3 grid((unsigned)blocks_for(args->padded_cols, kBlockCols),
                    (unsigned)blocks_for(args->padded_rows, kBiasRows));
    return launch(dz, grid, dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_bias_add_launch(const float *parts, int64_t n_parts, int64_t n_cols, float *sum,
                                        int32_t fresh, cudaStream_t stream) {
    return launch(bias_add, dim3((unsigned)blocks_for(n_cols, 64)), dim3(64), 0, stream, parts, n_parts, n_cols,
                  sum, fresh);
}

extern "C" int lli_cuda_load_dz(void) {
    cudaFuncAttributes a;
    const int status = (int)cudaFuncGetAttributes(&a, dz);
    return status ? status : (int)cudaFuncGetAttributes(&a, bias_add);
}
