/* First and last kernel of a call: what depends on all targets (counts, the sum of class weights, the
 * divisor), and the reduced loss. Sums are exact, by integer additions: neither blocks nor their order
 * matter. */
#include "cuda/device.cuh"

enum { kThreads = 256, kBlocksMax = 128 };

static __device__ void scalars(const lli_cuda_begin *args) {
    lli_cuda_totals *t = args->totals;
    t->weight_value = args->class_weight ? lli_exact_value(&t->weight) : (double)t->n_valid;
    t->class_total_value =
        args->class_weight ? lli_exact_value(&t->class_total) : (double)args->targets.v_total;
    t->divisor = !args->mean ? 1.0 : args->divisor ? *args->divisor : t->weight_value;
    t->inv_divisor = t->divisor > 0.0 ? 1.0 / t->divisor : 0.0;
    t->zero = 0.0f;
    t->one = t->alpha = 1.0f;
    if (args->bad_targets) *args->bad_targets += (int64_t)t->n_bad;
}

static __global__ void __launch_bounds__(kThreads) begin(const __grid_constant__ lli_cuda_begin args) {
    __shared__ lli_exact weight, class_total;
    __shared__ unsigned long long n_valid, n_bad;
    __shared__ uint32_t max_weight, last;
    if (threadIdx.x == 0) {
        n_valid = n_bad = 0;
        max_weight = 0;
    }
    if (threadIdx.x < kExactLimbs) weight.limb[threadIdx.x] = class_total.limb[threadIdx.x] = 0;
    if (threadIdx.x == 0) weight.flags = class_total.flags = 0;
    __syncthreads(); /* the block's sums are zero before anybody adds */
    const int64_t step = (int64_t)gridDim.x * kThreads, start = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    for (int64_t i = start; i < args.n_tokens; i += step) {
        const int64_t y = target_of(&args.targets, i);
        if (y == kIgnored) continue;
        atomicAdd(&n_valid, 1ull);
        if (y == kBad) atomicAdd(&n_bad, 1ull);
        if (args.class_weight) {
            exact_add_parts(&weight, lli_exact_split_f32(y == kBad ? 1.0f : args.class_weight[y]));
        }
    }
    const bool by_class = args.class_weight && (args.want_class_total || args.want_max_weight);
    for (int64_t v = start; by_class && v < args.targets.v_total; v += step) {
        exact_add_parts(&class_total, lli_exact_split_f32(args.class_weight[v]));
        atomicMax(&max_weight, __float_as_uint(fabsf(args.class_weight[v])));
    }
    __syncthreads(); /* all have added */
    exact_flush(&args.totals->weight, &weight);
    exact_flush(&args.totals->class_total, &class_total);
    if (threadIdx.x == 0) {
        atomicAdd(&args.totals->n_valid, n_valid);
        atomicAdd(&args.totals->n_bad, n_bad);
        atomicMax(&args.totals->max_class_weight, max_weight);
    }
    __threadfence(); /* the block's additions before its arrival */
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&args.totals->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    __threadfence(); /* the arrivals before the reading of what the others added */
    scalars(&args);
}

static __global__ void end(const __grid_constant__ lli_cuda_end args) {
    const lli_cuda_totals *t = args.totals;
    const double loss = lli_exact_value(&t->loss);
    if (args.loss) *args.loss = t->divisor > 0.0 ? (float)(loss / t->divisor) : 0.0f;
    if (args.sums) {
        args.sums->loss = loss;
        args.sums->z_loss = lli_exact_value(&t->z_loss);
        args.sums->weight = t->weight_value;
        args.sums->n_valid = (int64_t)t->n_valid;
        args.sums->n_ignored = args.n_tokens - (int64_t)t->n_valid;
    }
}

extern "C" int lli_cuda_begin_launch(const lli_cuda_begin *args, cudaStream_t stream) {
    const int64_t n = args->n_tokens > args->targets.v_total || !args->class_weight ? args->n_tokens
                                                                                    : args->targets.v_total;
    int64_t blocks = blocks_for(n, 4 * kThreads);
    blocks = blocks < 1 ? 1 : blocks > kBlocksMax ? kBlocksMax : blocks;
    return launch(begin, dim3((unsigned)blocks), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_end_launch(const lli_cuda_end *args, cudaStream_t stream) {
    return launch(end, dim3(1), dim3(1), 0, stream, *args);
}

extern "C" int lli_cuda_load_begin(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, begin);
    if (!status) status = (int)cudaFuncGetAttributes(&a, end);
    return status;
}
