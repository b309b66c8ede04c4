/* The integers of exchange.h; device code too (shared.h). */
#include "core/exchange.h"
#include "core/dtype.h"

#include <math.h>
#include <string.h>

/* S and U of a tile, by the arithmetic of the kernel's numerics id. */
#ifndef LLI_TILE_SUMS
#define LLI_TILE_SUMS lli_softmax_tile_sums
#endif

enum { kMaxFixed = 3, kSumFixed = 10, kSumSoft = kExactLimbs + 1 };

/* Where things lie in max[] and sum[]. */
enum { kTopWhole = 0, kTopRest = 1, kKeyLargest = 2, kKeyRest = 3, kKeyShared = 4 };
enum { kWhole = 0, kRest = 6, kTarget = 9, kSharedRest = 10, kShared = 11 };

LLI_SHARED int64_t lli_exchange_n_max(int32_t n_shared, bool smoothing) {
    return kMaxFixed + (n_shared ? 1 + (int64_t)n_shared * (smoothing ? 2 : 1) : 0);
}

LLI_SHARED int64_t lli_exchange_n_sum(int32_t n_shared, bool smoothing) {
    return kSumFixed + (n_shared ? 1 + (int64_t)n_shared * (smoothing ? 3 : 2) : 0) +
           (smoothing ? kSumSoft : 0);
}

/* ---- Shared tiles on one rank ------------------------------------------------------------------- */

/* One of the rank's shared tiles. */
typedef struct edge {
    const float *z;
    int32_t shared; /* position in the list */
    int64_t column; /* of z[0] */
} edge;

/* The rank's shared tiles, each once: a shard inside one tile has it as its first and as its last. */
LLI_LOCAL int edges_of(const lli_exchange *exchange, const lli_row_part *part, edge edges[2]) {
    const lli_shards *shards = exchange->shards;
    const int32_t at[2] = {shards->first_shared, shards->last_shared};
    int n = 0;
    for (int side = 0; side < 2; side++) {
        if (at[side] < 0 || (side == 1 && at[1] == at[0])) continue;
        edges[n].z = part->edges[side];
        edges[n].shared = at[side];
        edges[n].column = shards->shared[at[side]] * kTileCols;
        n++;
    }
    return n;
}

/* Largest logit; NaN if one is NaN. skip: a position left out, or -1. */
LLI_LOCAL float largest(const float *z, int64_t skip) {
    float max = -INFINITY;
    for (int64_t v = 0; v < kTileCols; v++) {
        if (v == skip) continue;
        if (z[v] != z[v]) return NAN;
        if (z[v] > max) max = z[v];
    }
    return max;
}

/* cw[v] z_v as the kernels form it: a weight of 0 takes the column out, and so does another rank. */
LLI_LOCAL float soft_term(const lli_exchange *exchange, const edge *e, int64_t v) {
    const float cw = exchange->class_weight ? exchange->class_weight[e->column + v] : 1.0f;
    return cw == 0.0f ? 0.0f : cw * e->z[v];
}

/* Columns of the tile that this rank holds. */
typedef struct range {
    int64_t begin, end;
} range;

LLI_LOCAL range own_columns(const lli_exchange *exchange, const edge *e) {
    const int64_t begin = exchange->shards->begin - e->column, end = exchange->shards->end - e->column;
    const range own = {begin > 0 ? begin : 0, end < kTileCols ? end : kTileCols};
    return own;
}

LLI_LOCAL int32_t soft_bits(const lli_exchange *exchange, const edge *e) {
    const range own = own_columns(exchange, e);
    uint32_t bits = 0;
    for (int64_t v = own.begin; v < own.end; v++) {
        const uint32_t magnitude = lli_bits(soft_term(exchange, e, v)) & 0x7fffffffu;
        if (magnitude > bits) bits = magnitude;
    }
    return (int32_t)bits;
}

/* ---- Maxima ------------------------------------------------------------------------------------- */

LLI_LOCAL void edge_max(const lli_exchange *exchange, const edge *e, int64_t target, int32_t *max) {
    const int32_t n_shared = exchange->shards->n_shared;
    const int64_t at = target - e->column;
    if (at >= 0 && at < kTileCols) max[kKeyRest] = lli_softmax_key(largest(e->z, at));
    max[kKeyShared + e->shared] = lli_softmax_key(largest(e->z, -1));
    if (exchange->smoothing) max[kKeyShared + n_shared + e->shared] = soft_bits(exchange, e);
}

LLI_SHARED void lli_exchange_max(const lli_exchange *exchange, const lli_row_part *part, int64_t target,
                                 int32_t *max) {
    const int64_t n = lli_exchange_n_max(exchange->shards->n_shared, exchange->smoothing);
    for (int64_t i = 0; i < n; i++) max[i] = lli_softmax_key_none;
    max[kTopWhole] = part->whole.top;
    max[kTopRest] = part->rest.top;
    max[kKeyLargest] = lli_softmax_key(part->max);
    edge edges[2];
    const int n_edges = edges_of(exchange, part, edges);
    for (int i = 0; i < n_edges; i++) edge_max(exchange, &edges[i], target, max);
}

/* ---- Sums --------------------------------------------------------------------------------------- */

LLI_LOCAL void pack_exact(const lli_exact *value, int64_t *limbs) {
    lli_exact carried;
    memset(&carried, 0, sizeof carried);
    lli_exact_merge(&carried, value); /* limbs in [0, 2^32): any number of ranks adds without overflow */
    memcpy(limbs, carried.limb, sizeof carried.limb);
    for (int bit = 0; bit < 3; bit++) {
        if (value->flags >> bit & 1) limbs[kExactLimbs] += (int64_t)1 << 20 * bit;
    }
}

LLI_LOCAL void unpack_exact(const int64_t *limbs, lli_exact *value) {
    memset(value, 0, sizeof *value);
    memcpy(value->limb, limbs, sizeof value->limb);
    for (int bit = 0; bit < 3; bit++) {
        if (limbs[kExactLimbs] >> 20 * bit & 0xfffff) value->flags |= 1 << bit;
    }
}

/* The grid of a tile's soft sum; the kernels' vector code does the same. largest < 2^exponent. */
LLI_LOCAL int32_t soft_exponent(int32_t largest_bits) {
    const int32_t exponent = (largest_bits >> 23) - 126;
    return exponent < -90 ? -90 : exponent;
}

/* Terms on the grid; where the group has an infinite or NaN term, the rank's own go to the flags. */
LLI_LOCAL int64_t soft_total(const lli_exchange *exchange, const edge *e, int32_t bits, lli_exact *specials) {
    const range own = own_columns(exchange, e);
    const int32_t shift = 30 - soft_exponent(bits), half = shift / 2;
    int64_t total = 0;
    for (int64_t v = own.begin; v < own.end; v++) {
        const float x = soft_term(exchange, e, v);
        if (bits >= 0x7f800000) {
            if (!(fabsf(x) < INFINITY)) lli_exact_add_f32(specials, x);
        } else if (bits > 0) {
            total += (int64_t)rintf(x * lli_float((uint32_t)(half + 127) << 23) *
                                    lli_float((uint32_t)(shift - half + 127) << 23));
        }
    }
    return total;
}

LLI_LOCAL void edge_sum(const lli_exchange *exchange, const edge *e, int64_t target, const int32_t *max,
                        int64_t *sum, lli_exact *soft) {
    const int32_t n_shared = exchange->shards->n_shared;
    const int64_t at = target - e->column;
    int64_t *tile = sum + kShared + 2 * (int64_t)e->shared, unused;
    LLI_TILE_SUMS(e->z, kTileCols, lli_softmax_key_value(max[kKeyShared + e->shared]), &tile[0], &tile[1]);
    if (at >= 0 && at < kTileCols) {
        float rest[kTileCols];
        memcpy(rest, e->z, sizeof rest);
        rest[at] = -INFINITY;
        LLI_TILE_SUMS(rest, kTileCols, lli_softmax_key_value(max[kKeyRest]), &sum[kSharedRest], &unused);
    }
    if (exchange->smoothing) {
        sum[kShared + 2 * n_shared + e->shared] =
            soft_total(exchange, e, max[kKeyShared + n_shared + e->shared], soft);
    }
}

LLI_SHARED void lli_exchange_sum(const lli_exchange *exchange, const lli_row_part *part, int64_t target,
                                 const int32_t *max, int64_t *sum) {
    const int64_t n = lli_exchange_n_sum(exchange->shards->n_shared, exchange->smoothing);
    lli_softmax whole = part->whole, rest = part->rest;
    lli_exact soft = part->soft;
    edge edges[2];
    memset(sum, 0, sizeof *sum * (size_t)n);
    lli_softmax_raise(&whole, max[kTopWhole]);
    lli_softmax_raise(&rest, max[kTopRest]);
    memcpy(sum + kWhole, whole.s, sizeof whole.s);
    memcpy(sum + kWhole + 3, whole.u, sizeof whole.u);
    memcpy(sum + kRest, rest.s, sizeof rest.s);
    if (part->has_target) sum[kTarget] = (int64_t)lli_bits(part->z);
    const int n_edges = edges_of(exchange, part, edges);
    for (int i = 0; i < n_edges; i++) edge_sum(exchange, &edges[i], target, max, sum, &soft);
    if (exchange->smoothing) pack_exact(&soft, sum + n - kSumSoft);
}

/* ---- The row ------------------------------------------------------------------------------------ */

LLI_SHARED void lli_exchange_row(const lli_exchange *exchange, const int32_t *max, const int64_t *sum,
                                 int64_t target, lli_row_part *row) {
    const lli_shards *shards = exchange->shards;
    const int32_t n_shared = shards->n_shared;
    memset(row, 0, sizeof *row);
    row->whole.top = max[kTopWhole];
    row->rest.top = max[kTopRest];
    row->z = lli_float((uint32_t)sum[kTarget]);
    row->max = lli_softmax_key_value(max[kKeyLargest]);
    row->argmax = -1;
    row->has_target = 1;
    memcpy(row->whole.s, sum + kWhole, sizeof row->whole.s);
    memcpy(row->whole.u, sum + kWhole + 3, sizeof row->whole.u);
    memcpy(row->rest.s, sum + kRest, sizeof row->rest.s);
    if (exchange->smoothing) {
        unpack_exact(sum + lli_exchange_n_sum(n_shared, true) - kSumSoft, &row->soft);
    }
    for (int32_t i = 0; i < n_shared; i++) {
        const float zmax = lli_softmax_key_value(max[kKeyShared + i]);
        const int64_t *tile = sum + kShared + 2 * (int64_t)i;
        lli_softmax_tile_add(&row->whole, zmax, tile[0], tile[1]);
        if (shards->shared[i] == target / kTileCols) {
            lli_softmax_tile_add(&row->rest, lli_softmax_key_value(max[kKeyRest]), sum[kSharedRest], 0);
        } else {
            lli_softmax_tile_add(&row->rest, zmax, tile[0], tile[1]);
        }
        if (exchange->smoothing) {
            lli_exact_add(&row->soft, sum[kShared + 2 * n_shared + i],
                          soft_exponent(max[kKeyShared + n_shared + i]) - 30);
        }
    }
}

LLI_SHARED int32_t lli_exchange_index(const lli_row_part *part, const int32_t *max) {
    const bool mine = part->argmax >= 0 && lli_softmax_key(part->max) == max[kKeyLargest];
    return mine ? -(int32_t)part->argmax : lli_softmax_key_none;
}
