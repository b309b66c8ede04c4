/* Copies between the caller's memory and aligned, padded buffers: operands in, results out. cuBLASLt wants
 * rows on 16 bytes; what is not is packed, with zeros behind its end, which add nothing to a sum. */
#include "cuda/device.cuh"

enum { kThreads = 256, kEach = 4, kRowsMax = 32768 };

static __device__ inline bool dead_row(const lli_cuda_grad *grads, int64_t r) {
    return grads && grads[r].row.dead;
}

static __global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ lli_cuda_pack args) {
    const int64_t c = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (c >= args.padded_cols) return;
    for (int64_t r = blockIdx.y; r < args.padded_rows; r += gridDim.y) {
        const bool inside = r < args.n_rows && c < args.n_cols && !dead_row(args.grads, r);
        const int64_t from = r * args.from_ld + c, to = r * args.to_ld + c;
        if (args.dtype == LL_DTYPE_F32) {
            ((float *)args.to)[to] = inside ? ((const float *)args.from)[from] : 0.0f;
            continue;
        }
        uint16_t h = inside ? ((const uint16_t *)args.from)[from] : 0;
        if (inside && args.grads && args.dtype == LL_DTYPE_F16) {
            const int32_t down = args.totals->chunk_exponent - args.grads[r].exponent; /* >= 0 */
            const float scale = down > 126 ? 0.0f : __uint_as_float((uint32_t)(127 - down) << 23);
            if (down) h = lli_f32_to_f16(lli_f16_to_f32(h) * scale);
        }
        ((uint16_t *)args.to)[to] = h;
    }
}

/* The same for whole 16-byte pieces that need no scaling. */
static __global__ void __launch_bounds__(kThreads)
    pack_wide(const __grid_constant__ lli_cuda_pack args, int32_t each) {
    const int64_t c = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * each, bytes = 16 / each;
    if (c >= args.padded_cols) return;
    for (int64_t r = blockIdx.y; r < args.padded_rows; r += gridDim.y) {
        const bool inside = r < args.n_rows && c < args.n_cols && !dead_row(args.grads, r);
        const uint4 *from = (const uint4 *)((const char *)args.from + (r * args.from_ld + c) * bytes);
        *(uint4 *)((char *)args.to + (r * args.to_ld + c) * bytes) = inside ? *from : make_uint4(0, 0, 0, 0);
    }
}

static __global__ void __launch_bounds__(kThreads) emit(const __grid_constant__ lli_cuda_emit args) {
    const int64_t c0 = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kEach;
    for (int64_t r = blockIdx.y; r < args.n_rows; r += gridDim.y) {
        const bool dead = dead_row(args.grads, r);
        const float scale =
            args.grads ? __uint_as_float((uint32_t)(args.grads[r].exponent + 127) << 23) : 1.0f;
        for (int64_t c = c0; c < c0 + kEach && c < args.n_cols; c++) {
            const int64_t at = r * args.out_ld + c * args.out_step;
            float value = dead ? 0.0f : args.sum[r * args.sum_ld + c] * scale;
            if (args.accumulate && dead) continue;
            if (args.accumulate) value = lli_load(args.out, args.dtype, at) + value;
            lli_store(args.out, args.dtype, at, value);
        }
    }
}

static __global__ void __launch_bounds__(kThreads) clear(const ll_view view, int64_t begin, int64_t end) {
    const int64_t c = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (c >= view.cols) return;
    for (int64_t r = begin + blockIdx.y; r < end; r += gridDim.y) {
        const int64_t at = r * view.row_stride + c;
        if (view.dtype == LL_DTYPE_F32) {
            ((float *)view.data)[at] = 0.0f;
        } else {
            ((uint16_t *)view.data)[at] = 0;
        }
    }
}

static __global__ void __launch_bounds__(kThreads)
    widen(const ll_view from, int64_t n, int64_t padded, float *to) {
    const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (i < padded) to[i] = i < n ? lli_load(from.data, from.dtype, i * from.row_stride) : 0.0f;
}

static dim3 grid_of(int64_t n_cols, int64_t each, int64_t n_rows) {
    const int64_t rows = n_rows < kRowsMax ? n_rows : kRowsMax;
    return dim3((unsigned)blocks_for(n_cols, each * kThreads), (unsigned)rows);
}

extern "C" int lli_cuda_pack_launch(const lli_cuda_pack *args, cudaStream_t stream) {
    if (args->padded_rows == 0 || args->padded_cols == 0) return 0;
    const int32_t bytes = args->dtype == LL_DTYPE_F32 ? 4 : 2, each = 16 / bytes;
    const bool scaled = args->grads && args->dtype == LL_DTYPE_F16;
    const bool wide = !scaled && args->n_cols % each == 0 && args->padded_cols % each == 0 &&
                      args->from_ld % each == 0 && args->to_ld % each == 0 && (uintptr_t)args->from % 16 == 0;
    if (wide) {
        return launch(pack_wide, grid_of(args->padded_cols, each, args->padded_rows), dim3(kThreads), 0,
                      stream, *args, each);
    }
    return launch(pack, grid_of(args->padded_cols, 1, args->padded_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_emit_launch(const lli_cuda_emit *args, cudaStream_t stream) {
    if (args->n_rows == 0 || args->n_cols == 0) return 0;
    return launch(emit, grid_of(args->n_cols, kEach, args->n_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_clear_launch(const ll_view *view, int64_t begin, int64_t end, cudaStream_t stream) {
    if (begin >= end) return 0;
    return launch(clear, grid_of(view->cols, 1, end - begin), dim3(kThreads), 0, stream, *view, begin, end);
}

extern "C" int lli_cuda_widen_launch(const ll_view *from, int64_t n, int64_t padded, float *to,
                                     cudaStream_t stream) {
    return launch(widen, dim3((unsigned)blocks_for(padded, kThreads)), dim3(kThreads), 0, stream, *from, n,
                  padded, to);
}

extern "C" int lli_cuda_load_move(void) {
    const void *const kernels[] = {(const void *)pack, (const void *)pack_wide, (const void *)emit,
                                   (const void *)clear, (const void *)widen};
    cudaFuncAttributes a;
    for (const void *kernel : kernels) {
        const int status = (int)cudaFuncGetAttributes(&a, kernel);
        if (status) return status;
    }
    return 0;
}
