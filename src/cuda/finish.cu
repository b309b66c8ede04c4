/* Results of rows and the coefficients of their gradients (finish.cuh), one thread a row. */
#include "cuda/finish.cuh"

enum { kThreads = 64, kScaleThreads = 256 };

/* A power of two that brings the row's largest dz to [2^14, 2^15) or below, as far as a bound knows it: f16
 * then keeps 11 bits of every dz down to 2^-28 of the largest. */
static __device__ int32_t exponent_of(const lli_cuda_finish *args, const lli_row_grad *grad) {
    const float cw = __uint_as_float(args->totals->max_class_weight);
    const float epsilon = fabsf(grad->epsilon) * (args->call.class_weight ? cw : 1.0f);
    float bound = fabsf(grad->alpha) + fabsf(grad->gamma) * (0.6f + fabsf(grad->entropy)) + epsilon;
    if (grad->has_target) bound = fmaxf(bound, fabsf(grad->target_dz));
    bound = bound / args->transform.temperature;
    if (!(bound > 0.0f && bound < INFINITY)) return 0;
    const int32_t exponent = (int32_t)(__float_as_uint(bound) >> 23) - 127 - 14;
    return exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
}

static __device__ void set_grad(const lli_cuda_finish *args, const lli_loss_terms *terms,
                                const lli_row_result *saved, int64_t token, int64_t y) {
    lli_cuda_grad grad = {};
    if (y == kIgnored) {
        grad.row.dead = 1;
    } else {
        grad.row = lli_row_gradient(terms, saved, token, y == kBad ? 0 : y);
        if (args->scaled && !grad.row.dead) grad.exponent = exponent_of(args, &grad.row);
    }
    args->grads[token] = grad;
}

/* The row's parts together. A row whose logits are all -inf, or that holds NaN or +inf, is NaN. */
static __device__ lli_row_result merge_parts(const lli_cuda_finish *args, int64_t r, const double class_total,
                                             int64_t *argmax) {
    lli_softmax whole, rest;
    lli_softmax_clear(&whole);
    lli_softmax_clear(&rest);
    float max = -INFINITY, z = 0.0f;
    *argmax = -1;
    for (int32_t part = 0; part < args->parts; part++) {
        const lli_cuda_row *row = &args->rows[part * args->row_stride + r];
        lli_softmax_merge(&whole, &row->others);
        lli_softmax_merge(&rest, &row->others);
        if (row->has_target) {
            lli_softmax_merge(&whole, &row->whole);
            lli_softmax_merge(&rest, &row->rest);
            z = row->z;
        }
        if (row->argmax >= 0 &&
            (*argmax < 0 || row->max > max || (row->max == max && row->argmax < *argmax))) {
            max = row->max;
            *argmax = row->argmax;
        }
    }
    const double soft = args->smoothing ? lli_exact_value(&args->soft[r]) : 0.0;
    const lli_row_result result =
        result_of(args, lli_softmax_lse(&whole), lli_softmax_lse(&rest),
                  args->want_entropy ? lli_softmax_entropy(&whole) : 0.0, z, class_total, soft);
    if (result.lse != result.lse) *argmax = -1;
    return result;
}

static __global__ void __launch_bounds__(kThreads) finish(const __grid_constant__ lli_cuda_finish args) {
    __shared__ lli_exact loss_sum, z_sum;
    if (threadIdx.x < kExactLimbs) loss_sum.limb[threadIdx.x] = z_sum.limb[threadIdx.x] = 0;
    if (threadIdx.x == 0) loss_sum.flags = z_sum.flags = 0;
    __syncthreads(); /* the block's sums are zero before anybody adds */
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x, i = args.first + r;
    if (r < args.n_rows) {
        const int64_t y = target_of(&args.targets, i);
        ll_linear_ce_args plain;
        const lli_loss_terms terms = terms_of(&args, y, &plain);
        lli_row_result result = {}, saved = {};
        double loss = 0.0, z_loss = 0.0;
        int64_t argmax = -1;
        if (y != kIgnored) {
            if (y == kBad) {
                result.lse = result.nll = result.entropy = result.soft_sum = kNan;
            } else {
                result = merge_parts(&args, r, terms.class_total, &argmax);
            }
            lli_row_loss(&terms, &result, i, y == kBad ? 0 : y, &loss, &z_loss);
            exact_add_parts(&loss_sum, lli_exact_split_f32((float)loss));
            exact_add_parts(&z_sum, lli_exact_split_f32((float)z_loss));
            saved = as_saved(&result);
        }
        write_row(&args, i, y, &result, &terms, loss, argmax);
        if (args.grads) set_grad(&args, &terms, &saved, i, y);
    }
    __syncthreads(); /* all have added */
    exact_flush(&args.totals->loss, &loss_sum);
    exact_flush(&args.totals->z_loss, &z_sum);
}

static __global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ lli_cuda_finish args) {
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x, i = args.first + r;
    if (r >= args.n_rows) return;
    const ll_linear_ce_args *in = &args.call;
    const int64_t y = target_of(&args.targets, i);
    ll_linear_ce_args plain;
    const lli_loss_terms terms = terms_of(&args, y, &plain);
    lli_row_result saved = {};
    if (y == kBad) {
        saved.lse = saved.nll = saved.entropy = kNan;
    } else if (y != kIgnored) {
        saved.lse = (double)in->lse[i] + (in->lse_lo ? (double)in->lse_lo[i] : 0.0);
        saved.nll = in->nll ? (double)in->nll[i] : 0.0;
        saved.entropy = in->entropy ? (double)in->entropy[i] : 0.0;
    }
    set_grad(&args, &terms, &saved, i, y);
}

static __global__ void __launch_bounds__(kScaleThreads)
    chunk_scale(const lli_cuda_grad *grads, int64_t n_rows, lli_cuda_totals *totals) {
    __shared__ int32_t most;
    if (threadIdx.x == 0) most = -1000;
    __syncthreads(); /* set before the first maximum */
    for (int64_t r = threadIdx.x; r < n_rows; r += kScaleThreads) {
        if (!grads[r].row.dead) atomicMax(&most, grads[r].exponent);
    }
    __syncthreads(); /* every row is in */
    if (threadIdx.x != 0) return;
    const int32_t exponent = most == -1000 ? 0 : most;
    totals->chunk_exponent = exponent;
    totals->alpha = __uint_as_float((uint32_t)(exponent + 127) << 23);
}

extern "C" int lli_cuda_finish_launch(const lli_cuda_finish *args, cudaStream_t stream) {
    return launch(finish, dim3((unsigned)blocks_for(args->n_rows, kThreads)), dim3(kThreads), 0, stream,
                  *args);
}

extern "C" int lli_cuda_prepare_launch(const lli_cuda_finish *args, cudaStream_t stream) {
    return launch(prepare, dim3((unsigned)blocks_for(args->n_rows, kThreads)), dim3(kThreads), 0, stream,
                  *args);
}

extern "C" int lli_cuda_chunk_scale_launch(const lli_cuda_grad *grads, int64_t n_rows,
                                           lli_cuda_totals *totals, cudaStream_t stream) {
    return launch(chunk_scale, dim3(1), dim3(kScaleThreads), 0, stream, grads, n_rows, totals);
}

extern "C" int lli_cuda_load_finish(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, finish);
    if (!status) status = (int)cudaFuncGetAttributes(&a, prepare);
    if (!status) status = (int)cudaFuncGetAttributes(&a, chunk_scale);
    return status;
}
