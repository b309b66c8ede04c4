/* One row of given logits: its statistics, ids, top and gradient (ce.h). */
#include "cpu/ce.h"

#include <math.h>
#include <string.h>

/* ---- Reading ------------------------------------------------------------------------------------ */

static const char *element(const ll_view *view, int64_t i, int64_t e) {
    return lli_row(view, i) + (size_t)e * lli_dtype_bytes(view->dtype);
}

/* f32 logits of columns [c, c + n), readable up to the next multiple of 64: in the caller's memory, or in
 * buffer. */
static const float *block(const lli_ce_run *run, int64_t i, int64_t c, int64_t n, float buffer[kBlockCols]) {
    const ll_view *logits = &run->call->ce->logits;
    const char *from = element(logits, i, c - run->cut.lead);
    if (logits->dtype == LL_DTYPE_F32 && n % kTileCols == 0) return (const float *)from;
    run->micro->widen(from, logits->dtype, n, buffer);
    for (int64_t v = n; v < lli_round_up(n, kTileCols); v++) buffer[v] = 0.0f;
    return buffer;
}

bool lli_ce_raw(const lli_ce_run *run, int64_t i, int64_t column, float *raw) {
    const ll_view *logits = &run->call->ce->logits;
    const int64_t c = column - run->cut.base;
    if (c < run->cut.lead || c >= run->cut.v_end) return false;
    *raw = lli_load(lli_row(logits, i), logits->dtype, c - run->cut.lead);
    return true;
}

/* ---- The top ------------------------------------------------------------------------------------ */

/* An element of the top in an integer: greater logits are greater, and of equal ones the lower column. */
static int64_t pack(float raw, int64_t column) {
    return (int64_t)((uint64_t)(uint32_t)lli_softmax_key(raw) << 32 | (uint32_t) ~(uint32_t)column);
}

static float packed_raw(int64_t packed) {
    return lli_softmax_key_value((int32_t)(packed >> 32));
}

static int64_t packed_column(int64_t packed) {
    return (int64_t) ~(uint32_t)packed;
}

static void insert(int64_t *top, int64_t n_top, int64_t packed) {
    int64_t at = n_top - 1;
    if (packed <= top[at]) return;
    for (; at > 0 && top[at - 1] < packed; at--) top[at] = top[at - 1];
    top[at] = packed;
}

/* Columns come in ascending order, so a logit equal to the least one held comes too late. */
static void top_add(const lli_ce_run *run, int64_t *top, const float *raw, int64_t n, int64_t column) {
    const int64_t n_top = run->cut.n_top;
    for (int64_t tile = 0; tile < n; tile += kTileCols) {
        const int64_t end = lli_min(n, tile + kTileCols);
        int64_t least = top[n_top - 1];
        if (least != INT64_MIN && !run->micro->count_greater(raw + tile, end - tile, packed_raw(least)))
            continue;
        for (int64_t v = tile; v < end; v++) {
            if (least != INT64_MIN && !(raw[v] > packed_raw(least))) continue;
            insert(top, n_top, pack(raw[v], column + v));
            least = top[n_top - 1];
        }
    }
}

void lli_ce_top_merge(int64_t *top, int64_t n_top, const int64_t *from) {
    for (int64_t k = 0; k < n_top; k++) insert(top, n_top, from[k]);
}

/* ---- Counting ----------------------------------------------------------------------------------- */

static void count_block(const lli_ce_run *run, const float *raw, int64_t n, const lli_ce_count *count) {
    for (int64_t j = 0; j < count->n; j++) {
        count->greater[j] += run->micro->count_greater(raw, n, count->raw[j]);
    }
}

void lli_ce_count_row(const lli_ce_run *run, int64_t i, const lli_ce_count *count) {
    float buffer[kBlockCols];
    for (int64_t c = run->cut.lead; c < run->cut.v_end; c += kBlockCols) {
        const int64_t n = lli_min(kBlockCols, run->cut.v_end - c);
        count_block(run, block(run, i, c, n, buffer), n, count);
    }
}

/* ---- Statistics --------------------------------------------------------------------------------- */

/* What a row gathers. */
typedef struct gathering {
    lli_row_sums sums;
    lli_row_target target;
    lli_row_part part;
    int64_t *top;
} gathering;

/* A tile that another rank shares: its logits are kept until the ranks have met (core/exchange.h). */
static void gather_edge(const lli_ce_run *run, int64_t i, int64_t tile, float *z, gathering *g) {
    const lli_ce_cut *cut = &run->cut;
    const int64_t own = lli_max(tile, cut->lead), end = lli_min(tile + kTileCols, cut->v_end);
    const ll_view *logits = &run->call->ce->logits;
    const int64_t y = lli_ce_target(run, i) - cut->base;
    float raw[kTileCols] = {0};
    run->micro->widen(element(logits, i, own - cut->lead), logits->dtype, end - own, raw + (own - tile));
    run->micro->logits(&run->transform, raw, NULL, z);
    for (int64_t v = 0; v < kTileCols; v++) {
        const bool mine = tile + v >= own && tile + v < end;
        if (!mine) z[v] = -INFINITY;
        if (mine && z[v] == z[v] && (z[v] > g->sums.max || g->sums.argmax < 0)) {
            g->sums.max = z[v];
            g->sums.argmax = cut->base + tile + v;
        }
    }
    if (g->top) top_add(run, g->top, raw + (own - tile), end - own, cut->base + own);
    if (y >= own && y < end) {
        g->part.z = z[y - tile];
        g->part.has_target = 1;
    }
}

lli_row_part lli_ce_gather(const lli_ce_run *run, int64_t i, float *edges, int64_t *top,
                           const lli_ce_count *count) {
    const lli_ce_cut *cut = &run->cut;
    const lli_shards *shards = run->exchange.shards;
    const float *class_weight = run->call->args->class_weight;
    float buffer[kBlockCols];
    gathering g = {.sums = {.max = -INFINITY, .argmax = -1}, .top = top};
    lli_softmax_clear(&g.sums.others);
    lli_softmax_clear(&g.target.whole);
    lli_softmax_clear(&g.target.rest);
    for (int64_t k = 0; top && k < cut->n_top; k++) top[k] = INT64_MIN;
    if (shards && shards->first_shared >= 0) gather_edge(run, i, 0, edges, &g);
    for (int64_t c = cut->whole_begin; c < cut->whole_end; c += kBlockCols) {
        const int64_t n = lli_min(kBlockCols, cut->whole_end - c);
        const lli_stretch stretch = {
            .raw = block(run, i, c, n, buffer),
            .class_weight = class_weight ? class_weight + cut->base + c : NULL,
            .column = cut->base + c,
            .n_cols = n,
            .target = lli_ce_target(run, i),
        };
        run->micro->stats(&run->transform, &stretch, run->finish.want, &g.sums, &g.target, &g.part.soft);
        if (count) count_block(run, stretch.raw, n, count);
        if (top) top_add(run, top, stretch.raw, n, cut->base + c);
    }
    const int64_t last = cut->v_cols - kTileCols;
    const bool last_apart = shards && shards->last_shared >= 0 && shards->last_shared != shards->first_shared;
    if (last_apart) gather_edge(run, i, last, edges + kTileCols, &g);
    if (g.target.mine) {
        g.part.z = g.target.z;
        g.part.has_target = 1;
    }
    g.part.whole = g.target.whole;
    g.part.rest = g.target.rest;
    lli_softmax_merge(&g.part.whole, &g.sums.others);
    lli_softmax_merge(&g.part.rest, &g.sums.others);
    g.part.max = g.sums.max;
    g.part.argmax = g.sums.argmax;
    g.part.edges[0] = edges;
    g.part.edges[1] = edges ? edges + kTileCols : NULL;
    return g.part;
}

/* ---- Writing ids and the top -------------------------------------------------------------------- */

/* log p of n raw logits, at most 64: no logit is above the row's lse but for its rounding. */
static void log_probs(const lli_ce_run *run, double lse, const float *raw, int64_t n, float *logp) {
    float padded[kTileCols] = {0}, z[kTileCols];
    memcpy(padded, raw, sizeof *raw * (size_t)n);
    run->micro->logits(&run->transform, padded, NULL, z);
    for (int64_t k = 0; k < n; k++) {
        const double value = (double)z[k] - lse;
        logp[k] = value > 0.0 ? 0.0f : (float)value;
    }
}

void lli_ce_write_ids(const lli_ce_run *run, int64_t i, double lse, const float *raw,
                      const int64_t *greater) {
    const ll_ce_args *args = run->call->ce;
    const int64_t m = run->n_ids;
    float logp[kTileCols];
    for (int64_t j = 0; j < m; j++) {
        if (j % kTileCols == 0) log_probs(run, lse, raw + j, lli_min(kTileCols, m - j), logp);
        const int64_t id = lli_id_at(&args->ids, i, j);
        const bool none = id < 0 || id >= run->problem->v_total; /* ignore_index */
        if (args->id_logp) args->id_logp[i * m + j] = none ? 0.0f : logp[j % kTileCols];
        if (args->id_rank) args->id_rank[i * m + j] = none || lse != lse ? 0 : 1 + greater[j];
    }
}

void lli_ce_write_top(const lli_ce_run *run, int64_t i, double lse, const int64_t *top) {
    const ll_ce_args *args = run->call->ce;
    const int64_t n_top = run->cut.n_top;
    float raw[kTileCols], logp[kTileCols];
    for (int64_t k0 = 0; k0 < n_top; k0 += kTileCols) {
        const int64_t n = lli_min(kTileCols, n_top - k0), at = i * n_top + k0;
        for (int64_t k = 0; k < n; k++) raw[k] = packed_raw(top[k0 + k]);
        log_probs(run, lse, raw, n, logp);
        for (int64_t k = 0; k < n; k++) {
            if (args->top_ids) args->top_ids[at + k] = lse == lse ? packed_column(top[k0 + k]) : -1;
            if (args->top_logp) args->top_logp[at + k] = logp[k];
        }
    }
}

void lli_ce_write_ignored(const lli_ce_run *run, int64_t i) {
    const ll_ce_args *args = run->call->ce;
    lli_finish_ignored(&run->finish, i);
    for (int64_t at = i * run->n_ids; at < (i + 1) * run->n_ids; at++) {
        if (args->id_logp) args->id_logp[at] = 0.0f;
        if (args->id_rank) args->id_rank[at] = 0;
    }
    for (int64_t at = i * run->cut.n_top; at < (i + 1) * run->cut.n_top; at++) {
        if (args->top_ids) args->top_ids[at] = -1;
        if (args->top_logp) args->top_logp[at] = 0.0f;
    }
}

/* ---- Gradient ----------------------------------------------------------------------------------- */

void lli_ce_gradient_zero(const lli_ce_run *run, int64_t i) {
    const ll_view *grad = &run->call->ce->grad_logits;
    if (grad->cols == 0) return; /* an empty shard's data may be NULL */
    memset((void *)lli_row(grad, i), 0, (size_t)grad->cols * lli_dtype_bytes(grad->dtype));
}

void lli_ce_gradient(const lli_ce_run *run, int64_t i, const lli_row_result *saved) {
    const ll_view *logits = &run->call->ce->logits, *grad = &run->call->ce->grad_logits;
    const float *class_weight = run->call->args->class_weight;
    const int64_t v_begin = run->cut.base + run->cut.lead, y = lli_ce_target(run, i);
    const lli_row_grad row = lli_row_gradient(&run->terms, saved, i, y);
    float buffer[kBlockCols];
    for (int64_t e = 0; e < run->cut.v; e += kBlockCols) {
        const int64_t n = lli_min(kBlockCols, run->cut.v - e);
        const char *from = element(logits, i, e);
        void *to = (void *)element(grad, i, e);
        float *dz = grad->dtype == LL_DTYPE_F32 ? to : buffer;
        if (from != (const char *)dz) run->micro->widen(from, logits->dtype, n, dz);
        const lli_stretch stretch = {
            .raw = dz,
            .class_weight = class_weight ? class_weight + v_begin + e : NULL,
            .column = v_begin + e,
            .n_cols = n,
            .target = y,
        };
        run->micro->gradient(&run->transform, &stretch, &row, dz);
        if (dz == buffer) run->micro->narrow(buffer, n, to, grad->dtype);
    }
    if (grad->cols > run->cut.v) {
        memset((void *)element(grad, i, run->cut.v), 0,
               (size_t)(grad->cols - run->cut.v) * lli_dtype_bytes(grad->dtype));
    }
}
