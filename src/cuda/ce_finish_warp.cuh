/* The finish warps of ce_rows.cu: results of a row from all tile warps' records, and the coefficients of its
 * gradient. */
#ifndef LLI_CUDA_CE_FINISH_WARP_CUH
#define LLI_CUDA_CE_FINISH_WARP_CUH

#include "cuda/ce_block.cuh"
#include "cuda/finish.cuh"
#include "cuda/lanes.cuh"

/* Results of a row from all records; every lane gets them. */
template <bool kEntropy>
static __device__ inline lli_row_result merge_records(const lli_cuda_ce *args, const warp_record *records,
                                                      int32_t n_records, const target_record *target,
                                                      double class_total, int64_t *argmax) {
    lli_softmax row;
    float max = -INFINITY;
    int32_t at = -1;
    lli_softmax_clear(&row);
    for (int32_t r = lane_of(); r < n_records; r += 32) {
        const warp_record *record = &records[r];
        lli_softmax sums;
        lli_softmax_clear(&sums);
        sums.top = record->top;
#pragma unroll
        for (int j = 0; j < 3; j++) {
            sums.s[j] = record->s[j];
            if (kEntropy) sums.u[j] = record->u[j];
        }
        if (r < 32) {
            row = sums;
        } else {
            lli_softmax_merge(&row, &sums);
        }
        if (record->argmax >= 0 &&
            (at < 0 || record->max > max || (record->max == max && record->argmax < at))) {
            max = record->max;
            at = record->argmax;
        }
    }
    sum_lanes_softmax(&row, kEntropy);
    /* even lanes take the whole row, odd ones the row without its target */
    const lli_softmax tile = lane_of() % 2 ? target->rest : target->whole;
    lli_softmax_merge(&row, &tile);
    const double lse = lli_softmax_lse(&row), lse_whole = __shfl_sync(kAllLanes, lse, 0);
    const double entropy = kEntropy ? __shfl_sync(kAllLanes, lli_softmax_entropy(&row), 0) : 0.0;
    *argmax = -1;
    if (args->want_argmax) {
        max_lanes(&max, &at);
        if (lse_whole == lse_whole && lse_whole > -INFINITY) *argmax = at;
    }
    return result_of(&args->row, lse_whole, __shfl_sync(kAllLanes, lse, 1), entropy, target->z, class_total,
                     0.0);
}

/* Results out. By one thread. */
static __device__ inline void put_results(const lli_cuda_finish *args, int64_t i, int64_t y,
                                          const lli_loss_terms *terms, const lli_row_result *result,
                                          int64_t argmax) {
    double loss = 0.0, z_loss = 0.0;
    if (y != kIgnored) {
        lli_row_loss(terms, result, i, y < 0 ? 0 : y, &loss, &z_loss);
        exact_add_parts(&args->totals->loss, lli_exact_split_f32((float)loss));
        exact_add_parts(&args->totals->z_loss, lli_exact_split_f32((float)z_loss));
    }
    write_row(args, i, y, result, terms, loss, argmax);
}

/* The coefficients of the gradient. By one thread. */
static __device__ inline void put_coefficients(int64_t i, int64_t y, const lli_loss_terms *terms,
                                               const lli_row_result *result, ce_grad_row *grad) {
    grad->dead = y == kIgnored;
    if (grad->dead) return;
    const lli_row_result saved = as_saved(result);
    grad->grad = lli_row_gradient(terms, &saved, i, y < 0 ? 0 : y);
    grad->dead = grad->grad.dead;
    grad->target = y >= 0 && grad->grad.has_target ? y : kNoTarget;
}

/* A row with a target outside the vocabulary has terms of its own. Apart, because they take a copy of the
 * call's arguments. */
static __device__ __noinline__ void put_bad_row(const lli_cuda_finish *args, int64_t i, ce_grad_row *grad) {
    ll_linear_ce_args plain;
    const lli_loss_terms terms = terms_of(args, kBad, &plain);
    const lli_row_result result = {kNan, kNan, kNan, kNan};
    if (args->grads) put_coefficients(i, kBad, &terms, &result, grad);
    put_results(args, i, kBad, &terms, &result, -1);
}

template <typename E, bool kEntropy>
static __device__ inline void finish_warp(const ce_block<E> *block, int32_t which, int64_t i) {
    const lli_cuda_ce *args = block->args;
    const int64_t stride = (int64_t)kFinishWarps * block->cluster * block->step;
    gather_state *gather = &block->state->gathers[which];
    const int32_t n_records = block->cluster * block->n_warps, mine = which * block->cluster + block->rank;
    const uint32_t bytes = (uint32_t)(n_records * sizeof(warp_record));
    const lli_loss_terms terms = terms_of(&args->row, 0, NULL);
    int32_t slot = mine % block->slots;
    uint32_t phase = 0;
    i += mine * block->step;
    int64_t next = raw_target(&args->row, i);
    for (; i < args->row.n_rows; i += stride) {
        const int64_t y = target_from(&args->row.targets, next);
        next = raw_target(&args->row, i + stride);
        const bool first_lane = lane_of() == 0;
        lli_row_result result = {};
        int64_t argmax = -1;
        /* Also of a row without a target, whose records say nothing: coefficients sent before the row's slot
         * is its own would go to the row before it. */
        if (first_lane) {
            ptx_mbarrier_arrive_expect_tx(address_of(&gather->gathered),
                                          bytes + (y >= 0 ? (uint32_t)sizeof(target_record) : 0u));
        }
        await(&gather->gathered, phase);
        phase ^= 1;
        if (y >= 0) {
            result = merge_records<kEntropy>(args, block->records + (int64_t)which * n_records, n_records,
                                             &gather->target, terms.class_total, &argmax);
        }
        if (first_lane && y == kBad) put_bad_row(&args->row, i, &gather->grad);
        if (first_lane && y != kBad && args->grad.data)
            put_coefficients(i, y, &terms, &result, &gather->grad);
        __syncwarp(); /* whole before they are sent */
        for (int32_t peer = 0; peer < block->cluster; peer++) {
            slot_state *to = &block->state->slots[slot];
            send(&gather->grad, &to->grad, kGradPieces, &to->ready, (uint32_t)peer);
        }
        __syncwarp(); /* sent before the next row's are written */
        /* Results come last: nobody waits for them. */
        if (first_lane && y != kBad) put_results(&args->row, i, y, &terms, &result, argmax);
        slot = (slot + kFinishWarps * block->cluster) % block->slots;
    }
}

#endif
