/* Chunk sizes within the budget, and the carving of the workspace (cut.h). */
#include "cuda/cut.h"
#include "core/dtype.h"
#include "cuda/backend.h"
#include "cuda/exchange.h"

enum {
    kDefaultBudgetMib = 512,
    kForwardTokens = 4096,
    kOnePassTokens =
        1024, /* grad_w is read and written once a chunk: below this that costs more than the product */
    kLogitsTokens = 4096,    /* of a pass that keeps logits */
    kRecomputeTokens = 8192, /* one chunk up to there: no sum of grad_w over chunks */
    kKeptStep = 256,         /* tokens of a cluster (fused.h): chunks that keep exponentials are a multiple */
    kKeptLeast = 768, /* fewer tokens a chunk cost more (passes over grad_w) than forming the logits again */
    kLeastTokens = 128,
    kKeptCols = 1024,
    kTileTokens = 128, /* of cuBLASLt's tiles, and the tiles that fill an H200 twice */
    kTileColumns = 256,
    kTiles = 264,
    kPackMib = 8,
    kScratchMib = 16,
    kStageCols = 2048, /* a step of stats.cu */
    kLineBytes = 128,
    kRowSlots = 6400 /* rows x parts that keep all multiprocessors busy with statistics */
};

static const int64_t kMib = 1 << 20;

int64_t lli_cuda_block_cols(const lli_cuda_cut *cut, int64_t n_rows) {
    const int64_t tile_rows = (lli_max(1, n_rows) + kTileTokens - 1) / kTileTokens;
    int64_t cols = lli_max(1, kTiles / tile_rows) * kTileColumns;
    if (cut->block_elems) cols = lli_min(cols, cut->block_elems / lli_max(1, n_rows) / kTileCols * kTileCols);
    if (cols > kStageCols) cols = cols / kStageCols * kStageCols;
    return lli_max(kTileCols, lli_min(cols, cut->v_cols));
}

int32_t lli_cuda_parts(const lli_cuda_cut *cut, int64_t n_rows, int64_t n_cols) {
    const int64_t stages = (n_cols + kStageCols - 1) / kStageCols;
    int64_t parts = lli_min(kParts, cut->row_slots / lli_max(1, n_rows));
    parts = lli_max(1, lli_min(parts, stages));
    return (int32_t)((stages + (stages + parts - 1) / parts - 1) / ((stages + parts - 1) / parts));
}

lli_cuda_ranges lli_cuda_ranges_of(const lli_problem *problem) {
    const lli_shards *shards = problem->shards;
    if (!shards)
        return (lli_cuda_ranges){.own.count = lli_max(0, lli_min(problem->v_local, problem->v_total))};
    lli_cuda_ranges ranges = {0};
    const int64_t n = shards->end - shards->begin;
    const bool first = shards->first_shared >= 0, last = shards->last_shared >= 0;
    int64_t before = 0, after = 0;
    if (first) before = lli_min(n, kTileCols - shards->begin % kTileCols);
    if (last && shards->last_shared != shards->first_shared) after = shards->end % kTileCols;
    if (before) ranges.edges[ranges.n_edges++] = (lli_cuda_range){0, before};
    if (after) ranges.edges[ranges.n_edges++] = (lli_cuda_range){n - after, after};
    ranges.own = (lli_cuda_range){before, n - before - after};
    return ranges;
}

static bool any_gradient(const lli_problem *p) {
    return !(p->frozen & LL_FROZEN_X) || !(p->frozen & LL_FROZEN_W) ||
           (p->bias_dtype != LL_DTYPE_NONE && !(p->frozen & LL_FROZEN_BIAS));
}

static size_t scratch_least(const lli_cuda_cut *cut) {
    const int64_t tile = kTileCols * cut->d_padded * 4,
                  narrow = cut->gradient ? cut->dz_cols * 8 * cut->element_bytes : 0;
    return (size_t)lli_max(tile, narrow);
}

lli_cuda_cut lli_cuda_cut_make(const lli_problem *p, const lli_config *config, ll_pass pass) {
    const int64_t element_bytes = (int64_t)lli_dtype_bytes(p->x_dtype);
    const lli_cuda_ranges ranges = lli_cuda_ranges_of(p);
    const int64_t v = ranges.own.count;
    lli_cuda_cut cut = {
        .d = p->n_hidden,
        .d_padded = lli_round_up(p->n_hidden, 16 / element_bytes),
        .element_bytes = element_bytes,
        .v = v,
        .v_cols = p->in_group ? lli_max(kTileCols, lli_round_up(v, kTileCols)) : lli_round_up(v, kTileCols),
        .v_real = v,
        .n_tokens_max = p->n_tokens_max,
        .gradient = pass != LL_PASS_FORWARD && any_gradient(p),
        .has_bias = p->bias_dtype != LL_DTYPE_NONE,
        .smoothing = p->loss.label_smoothing > 0.0f,
        .scaled = p->x_dtype == LL_DTYPE_F16,
        .n_edges = ranges.n_edges,
    };
    for (int32_t i = 0; i < ranges.n_edges; i++) cut.v_real += ranges.edges[i].count;
    if (p->shards) {
        cut.n_max = lli_exchange_n_max(p->shards->n_shared, cut.smoothing);
        cut.n_sum = lli_exchange_n_sum(p->shards->n_shared, cut.smoothing);
    }
    cut.one_pass = cut.gradient && pass == LL_PASS_FORWARD_BACKWARD && config->one_pass &&
                   !config->exponentials; /* whose cuts are lli_cuda_cut_kept's */
    if (pass != LL_PASS_BACKWARD && !cut.one_pass) {
        cut.forward_tokens = config->forward_tokens;
    }
    if (cut.gradient) {
        cut.want_x = !(p->frozen & LL_FROZEN_X);
        cut.want_w = !(p->frozen & LL_FROZEN_W);
        cut.want_bias = cut.has_bias && !(p->frozen & LL_FROZEN_BIAS);
        cut.grad_tokens = cut.one_pass ? config->one_pass_tokens : config->grad_tokens;
        cut.dz_cols = lli_min(config->dz_cols ? config->dz_cols : kDzCols, cut.v_cols);
        cut.kept_cols = !cut.one_pass ? 0 : config->kept_cols ? config->kept_cols : cut.v_cols;
        const bool chunks = cut.n_tokens_max > cut.grad_tokens;
        cut.columns_outside = !cut.one_pass && config->columns_outside;
        cut.keep_acc_w = cut.want_w && cut.columns_outside && chunks && p->grad_w_dtype != LL_DTYPE_F32;
        cut.acc_tokens = !cut.want_x ? 0 : cut.columns_outside ? cut.n_tokens_max : cut.grad_tokens;
    }
    const int64_t chunk = lli_max(cut.forward_tokens, cut.grad_tokens);
    cut.block_elems = lli_max(config->forward_tokens * config->forward_cols, chunk * kTileCols);
    cut.row_slots = pass == LL_PASS_BACKWARD ? 0 : lli_max(chunk, lli_min(kRowSlots, chunk * kParts));
    const int64_t row_bytes = cut.d_padded * element_bytes;
    cut.x_pack_rows = lli_min(lli_round_up(chunk, 64), lli_max(64, kPackMib * kMib / row_bytes));
    const int64_t all_w = lli_max(cut.dz_cols, lli_min(cut.v_cols, kDzCols)) * cut.d_padded * 4;
    const int64_t wish = lli_min(all_w, (cut.gradient ? kScratchMib : kPackMib) * kMib);
    cut.scratch_bytes = (size_t)lli_max(wish, (int64_t)scratch_least(&cut));
    return cut;
}

/* ---- Exponentials ------------------------------------------------------------------------------- */

static int64_t code_bytes_of(int64_t n_tokens) {
    return n_tokens * kTileCols * (int64_t)sizeof(uint16_t);
}

static int64_t tile_w_bytes(const lli_problem *p) {
    return kTileCols * p->n_hidden * (int64_t)lli_dtype_bytes(p->grad_w_dtype);
}

/* All that would fit, code_bytes of them in the workspace. */
static lli_cuda_places places_of(const lli_problem *p, const lli_cuda_cut *cut, int64_t n_tokens) {
    const int64_t tiles = cut->v_cols / kTileCols, codes = code_bytes_of(n_tokens);
    const int64_t in_sum = cut->want_x ? lli_min(cut->d_padded * (int64_t)sizeof(float) / code_bytes_of(1),
                                                 cut->dz_cols / kTileCols)
                                       : 0;
    lli_cuda_places places = {.sum_end = lli_min(tiles, in_sum)};
    places.w_end = places.sum_end;
    places.w_row = places.sum_end * kTileCols;
    if (cut->lent.w && cut->want_w) {
        const int64_t room = lli_max(0, cut->v - places.w_row) * (tile_w_bytes(p) / kTileCols);
        places.w_stride_bytes = lli_max(tile_w_bytes(p), codes);
        places.w_end = lli_min(tiles, places.sum_end + room / places.w_stride_bytes);
    }
    places.n_tiles = lli_min(tiles, places.w_end + cut->code_bytes / codes);
    return places;
}

lli_cuda_places lli_cuda_cut_places(const lli_problem *p, const lli_cuda_cut *cut, int64_t n_tokens) {
    lli_cuda_places places = places_of(p, cut, n_tokens);
    places.n_tiles = lli_min(places.n_tiles, cut->anchors / n_tokens);
    places.w_end = lli_min(places.w_end, places.n_tiles);
    places.sum_end = lli_min(places.sum_end, places.n_tiles);
    return places;
}

lli_cuda_cut lli_cuda_cut_kept(const lli_problem *p, int64_t dz_cols, int64_t n_tokens, int64_t code_bytes,
                               lli_cuda_lent lent) {
    const lli_config config = {.grad_tokens = n_tokens, .dz_cols = dz_cols};
    lli_cuda_cut cut = lli_cuda_cut_make(p, &config, LL_PASS_BACKWARD);
    /* Slots (fused.h) of 66 clusters: 33 of a row in groups of 2048, in the last group up to 132; where a
     * device wants more, fewer clusters work. */
    const int64_t last_rows = (n_tokens - 1) % 2048 + 1, last_blocks = (last_rows + 255) / 256;
    const int64_t odd = last_blocks % 2 ? 132 : last_blocks == 8 ? 33 : 66; /* or less: 3 blocks */
    const int64_t slots = (n_tokens - last_rows) * 33 + last_rows * odd;
    cut.block_elems = slots * (64 / (int64_t)sizeof(float));
    cut.row_slots = n_tokens;
    cut.x_pack_rows = 0;
    cut.keeps = true;
    cut.lent = lent;
    if (lent.w) cut.scratch_bytes = scratch_least(&cut); /* grad_w is written where it lies */
    cut.code_bytes = code_bytes;
    cut.anchors = places_of(p, &cut, n_tokens).n_tiles * n_tokens;
    return cut;
}

lli_cuda_cut lli_cuda_cut_chunk(const lli_problem *p, const lli_config *config, lli_cuda_lent lent) {
    const int64_t n = lent.w ? config->first_tokens : config->one_pass_tokens;
    const int64_t codes = lent.w ? config->first_code_bytes : config->code_bytes;
    const lli_cuda_cut cut = lli_cuda_cut_kept(p, config->dz_cols, n, 0, lent);
    const int64_t copy = cut.want_w ? lli_round_up(n, 64) * cut.d_padded * cut.element_bytes : 0;
    return lli_cuda_cut_kept(p, config->dz_cols, n, lent.x ? codes : lli_max(0, codes - copy), lent);
}

/* Matrices start on whole lines of the L2 cache: the copy engine asks for 128 bytes of a row at a time, which
 * would lie in two. */
static void *take_matrix(lli_arena *arena, int64_t count, size_t element_bytes) {
    arena->used = (size_t)lli_round_up((int64_t)arena->used, kLineBytes);
    return lli_take(arena, count, element_bytes);
}

size_t lli_cuda_cut_carve(const lli_cuda_cut *cut, void *base, lli_cuda_pieces *pieces) {
    lli_arena arena = {.base = base};
    const int64_t chunk = lli_max(cut->forward_tokens, cut->grad_tokens);
    const int64_t padded = lli_round_up(cut->grad_tokens, 64);
    const bool all_kept = cut->one_pass && cut->kept_cols >= cut->v_cols && !cut->n_edges;
    const bool exchanges = cut->n_max > 0 && cut->row_slots > 0;
    const int64_t edge_cols = (int64_t)cut->n_edges * kTileCols;
    const int64_t groups = (cut->grad_tokens + kBiasRows - 1) / kBiasRows;
    const size_t e = (size_t)cut->element_bytes;
    const int64_t slot_bytes = cut->keeps ? cut->block_elems * (int64_t)sizeof(float) : 0,
                  dz_bytes = lli_max(padded * cut->dz_cols * cut->element_bytes, slot_bytes);
    *pieces = (lli_cuda_pieces){
        .totals = lli_take(&arena, 1, sizeof(lli_cuda_totals)),
        .bias = cut->has_bias ? lli_take(&arena, cut->v_cols + edge_cols, sizeof(float)) : NULL,
        .grads = cut->gradient ? lli_take(&arena, cut->n_tokens_max, sizeof(lli_cuda_grad)) : NULL,
        .acc_bias = cut->want_bias ? lli_take(&arena, cut->v_cols + edge_cols, sizeof(float)) : NULL,
        /* from here on a chunk's own */
        .rows = lli_take(&arena, cut->row_slots, sizeof(lli_cuda_row)),
        .soft = cut->smoothing && cut->row_slots ? lli_take(&arena, chunk, sizeof(lli_exact)) : NULL,
        .logits = take_matrix(&arena, all_kept || cut->keeps ? 0 : cut->block_elems, sizeof(float)),
        .kept = take_matrix(&arena, cut->grad_tokens * cut->kept_cols, sizeof(float)),
        .dz = cut->gradient ? take_matrix(&arena, dz_bytes, 1) : NULL,
        .x_copy = cut->want_w && !cut->lent.x ? take_matrix(&arena, padded * cut->d_padded, e) : NULL,
        .acc_x = cut->want_x ? take_matrix(&arena, cut->acc_tokens * cut->d_padded, sizeof(float)) : NULL,
        .acc_w = cut->keep_acc_w ? take_matrix(&arena, cut->dz_cols * cut->d_padded, sizeof(float)) : NULL,
        .bias_parts = cut->want_bias ? lli_take(&arena, groups * kDzCols, sizeof(float)) : NULL,
        .codes = take_matrix(&arena, cut->code_bytes, 1),
        .anchors = lli_take(&arena, cut->anchors, sizeof(int32_t)),
        .edges = exchanges ? lli_take(&arena, chunk * edge_cols, sizeof(float)) : NULL,
        .max = exchanges ? lli_take(&arena, chunk * (cut->n_max + kGivenInts), sizeof(int32_t)) : NULL,
        .index = exchanges ? lli_take(&arena, chunk, sizeof(int32_t)) : NULL,
        .sum = exchanges ? lli_take(&arena, chunk * cut->n_sum, sizeof(int64_t)) : NULL,
        .x_pack = take_matrix(&arena, cut->x_pack_rows * cut->d_padded, e),
        .scratch = take_matrix(&arena, (int64_t)cut->scratch_bytes, 1),
    };
    if (cut->keeps)
        pieces->logits = pieces->dz; /* slots of the forward, which is done before there is a dz */
    return arena.used;
}

static size_t kept_bytes(const lli_problem *problem, int64_t dz_cols, int64_t n_tokens, int64_t code_bytes,
                         lli_cuda_lent lent) {
    lli_cuda_pieces pieces;
    const lli_cuda_cut cut = lli_cuda_cut_kept(problem, dz_cols, n_tokens, code_bytes, lent);
    return lli_cuda_cut_carve(&cut, NULL, &pieces);
}

size_t lli_cuda_workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                          ll_pass pass) {
    (void)kernel;
    lli_cuda_pieces pieces;
    const lli_cuda_cut cut = lli_cuda_cut_make(problem, config, pass);
    const size_t bytes = lli_cuda_cut_carve(&cut, NULL, &pieces);
    if (pass != LL_PASS_FORWARD_BACKWARD || !config->exponentials) return bytes;
    /* Which way a call goes is seen by its arguments (gradient.c). */
    size_t most = bytes;
    for (int way = 0; way < 4; way++) {
        const lli_cuda_lent lent = {.w = way & 1, .x = way & 2};
        const lli_cuda_cut chunk = lli_cuda_cut_chunk(problem, config, lent);
        const size_t needed = lli_cuda_cut_carve(&chunk, NULL, &pieces);
        if (needed > most) most = needed;
    }
    return most;
}

static size_t bytes_of(const lli_problem *problem, const lli_config *config, ll_pass pass) {
    return lli_cuda_workspace(NULL, problem, config, pass);
}

static int64_t smaller(int64_t n) {
    return lli_max(kLeastTokens, n / 2 / kLeastTokens * kLeastTokens);
}

/* As many columns as the budget keeps: all, or a multiple of kKeptCols. 0: not worth it. */
static int64_t fit_kept(const lli_problem *problem, const lli_config *one, size_t budget, int64_t v_cols) {
    lli_config c = *one;
    c.kept_cols = 0;
    if (bytes_of(problem, &c, LL_PASS_FORWARD_BACKWARD) <= budget) return v_cols;
    for (c.kept_cols = v_cols / kKeptCols * kKeptCols; c.kept_cols >= v_cols / 4 && c.kept_cols > 0;
         c.kept_cols -= kKeptCols) {
        if (bytes_of(problem, &c, LL_PASS_FORWARD_BACKWARD) <= budget) return c.kept_cols;
    }
    return 0;
}

/* What chunks that keep exponentials are fitted to. */
typedef struct room {
    const lli_problem *problem;
    size_t budget;
    int64_t v_cols, dz_cols;
} room;

static size_t bytes_in(const room *room, int64_t n_tokens, int64_t code_bytes, lli_cuda_lent lent) {
    return kept_bytes(room->problem, room->dz_cols, n_tokens, code_bytes, lent);
}

/* The bytes of exponentials of a whole chunk that the sums of grad_x and grad_w have no room for. */
static int64_t codes_of(const room *room, int64_t n_tokens, lli_cuda_lent lent) {
    const lli_cuda_cut cut = lli_cuda_cut_kept(room->problem, room->dz_cols, n_tokens, 0, lent);
    return (room->v_cols / kTileCols - cut.anchors / n_tokens) * code_bytes_of(n_tokens);
}

static bool fits(const room *room, int64_t n_tokens, lli_cuda_lent lent) {
    return bytes_in(room, n_tokens, codes_of(room, n_tokens, lent), lent) <= room->budget;
}

/* The most tokens of a chunk all of whose exponentials fit: all, or a multiple of kKeptStep. 0: none. */
static int64_t fit_tokens(const room *room, lli_cuda_lent lent) {
    const int64_t n = lli_max(1, room->problem->n_tokens_max);
    if (fits(room, n, lent)) return n;
    int64_t least = 0, most = (n - 1) / kKeptStep;
    while (least < most) {
        const int64_t middle = (least + most + 1) / 2;
        if (fits(room, middle * kKeptStep, lent)) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    return least * kKeptStep;
}

/* As many bytes as the budget leaves for those of n_tokens, whole tiles, at most all. */
static int64_t fit_codes(const room *room, int64_t n_tokens, lli_cuda_lent lent) {
    const size_t none = bytes_in(room, n_tokens, 0, lent);
    const int64_t left = room->budget > none ? (int64_t)(room->budget - none) : 0,
                  tile = code_bytes_of(n_tokens);
    int64_t bytes = lli_min(codes_of(room, n_tokens, lent), left / tile * tile);
    while (bytes > 0 && bytes_in(room, n_tokens, bytes, lent) > room->budget) {
        bytes -= lli_min(bytes, tile);
    }
    return bytes;
}

/* Chunks for exponentials. f32 sums of grad_w take any number of them; a narrow grad_w is written once, so it
 * wants one chunk, of which a part is not kept where it does not fit. False: they do not fit. */
static bool fit_exponentials(const room *room, bool narrow, lli_config *config) {
    const int64_t n = lli_max(1, room->problem->n_tokens_max);
    static const lli_cuda_lent none = {0}, in_w = {.w = true}, in_x = {.x = true}, both = {true, true};
    int64_t first = n, rest = n;
    if (!narrow) {
        first = fit_tokens(room, in_w);
        rest = fit_tokens(room, none);
        if (rest < lli_min(n, kKeptLeast)) rest = config->grad_tokens;
        if (first < rest) first = rest;
    }
    if (bytes_in(room, first, 0, in_w) > room->budget || bytes_in(room, rest, 0, none) > room->budget) {
        return false;
    }
    config->one_pass = config->exponentials = 1;
    config->dz_cols = room->dz_cols;
    config->first_tokens = first;
    config->one_pass_tokens = rest;
    config->first_code_bytes = fit_codes(room, first, both);
    config->code_bytes = fit_codes(room, rest, in_x);
    const lli_cuda_cut cut = lli_cuda_cut_chunk(room->problem, config, both);
    const int64_t kept = cut.anchors / first * kTileCols;
    config->kept_cols = kept < room->v_cols ? kept : 0;
    return true;
}

/* One pass by exponentials, with narrower blocks of dz where that keeps more of them. */
static bool try_exponentials(const lli_kernel *kernel, const lli_problem *problem, size_t budget,
                             int64_t v_cols, lli_config *config) {
    const lli_cuda_variant *variant = kernel->isa;
    const ll_loss *loss = &problem->loss;
    const bool plain = problem->bias_dtype == LL_DTYPE_NONE && loss->temperature == 1.0f &&
                       loss->softcap == 0.0f && loss->label_smoothing == 0.0f;
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    /* Ranks exchange what a pass that keeps logits, or none, has gathered. */
    if (!variant || !variant->exponentials || !plain || problem->in_group) return false;
    if (!any_gradient(problem) || v_cols == 0) return false;
    lli_config wide = *config, less = *config;
    room room = {problem, budget, v_cols, config->dz_cols ? config->dz_cols : kDzCols};
    const bool wide_fits = fit_exponentials(&room, narrow, &wide);
    if (wide_fits && wide.first_tokens >= problem->n_tokens_max && !wide.kept_cols) {
        *config = wide;
        return true;
    }
    room.dz_cols = kSumCols;
    if (!fit_exponentials(&room, narrow, &less)) return false;
    *config = less;
    return true;
}

/* 3 GEMMs (and a part of a fourth) where grad_w can be added to chunk by chunk in f32, or one chunk is all.
 */
static void try_one_pass(const lli_kernel *kernel, const lli_problem *problem, size_t budget, int64_t v_cols,
                         lli_config *config) {
    const lli_cuda_variant *variant = kernel->isa;
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    const int64_t n = lli_max(1, problem->n_tokens_max);
    lli_config one = *config;
    if (!any_gradient(problem)) return; /* the ranks of a group would go through other chunks than this one */
    one.one_pass = 1;
    one.one_pass_tokens = narrow ? n : lli_min(n, kLogitsTokens);
    if (one.one_pass_tokens > kLogitsTokens) return;
    int64_t kept = fit_kept(problem, &one, budget, v_cols);
    /* Fewer, larger chunks pass over grad_w less often, but only if no logits are formed twice for it. */
    while (!narrow && kept < v_cols && one.one_pass_tokens > kOnePassTokens) {
        one.one_pass_tokens = lli_max(kOnePassTokens, smaller(one.one_pass_tokens));
        kept = fit_kept(problem, &one, budget, v_cols);
    }
    /* Several chunks that keep a part lose to a recomputing pass with fewer, larger ones. */
    if (kept < v_cols && n > one.one_pass_tokens && variant && variant->cheap_logits) return;
    if (!kept) return;
    one.kept_cols = kept < v_cols ? kept : 0;
    *config = one;
}

/* What the ranks of a group go through together, within this rank's own choice. */
static void adopt(const lli_problem *problem, const lli_config *agreed, size_t budget, int64_t v_cols,
                  lli_config *config) {
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    config->forward_tokens = agreed->forward_tokens;
    config->grad_tokens = agreed->grad_tokens;
    config->columns_outside = agreed->columns_outside && problem->n_tokens_max > agreed->grad_tokens;
    lli_config one = *config;
    config->one_pass = 0;
    config->one_pass_tokens = config->kept_cols = 0;
    if (!agreed->one_pass || (narrow && agreed->one_pass_tokens < problem->n_tokens_max)) return;
    one.one_pass = 1;
    one.one_pass_tokens = agreed->one_pass_tokens;
    const int64_t kept = fit_kept(problem, &one, budget, v_cols);
    if (!kept) return; /* then no rank does it (lli_agree_ready) */
    one.kept_cols = kept < v_cols ? kept : 0;
    *config = one;
}

static bool over(const lli_problem *problem, const lli_config *config, size_t budget) {
    return bytes_of(problem, config, LL_PASS_BACKWARD) > budget ||
           bytes_of(problem, config, LL_PASS_FORWARD_BACKWARD) > budget;
}

ll_status lli_cuda_configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                             lli_config *config) {
    size_t budget = problem->budget_bytes ? problem->budget_bytes : (size_t)kDefaultBudgetMib * (size_t)kMib;
    const int64_t n = lli_max(1, problem->n_tokens_max);
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    lli_config c = {.forward_tokens = lli_min(n, kForwardTokens),
                    .grad_tokens = lli_min(n, kRecomputeTokens)};
    const lli_config none = {0};
    lli_cuda_cut cut = lli_cuda_cut_make(problem, &none, LL_PASS_FORWARD);
    cut.block_elems = 0;
    c.forward_cols = lli_cuda_block_cols(&cut, c.forward_tokens);
    while (bytes_of(problem, &c, LL_PASS_FORWARD) > budget) {
        if (c.forward_cols > kTileColumns) {
            c.forward_cols = lli_max(kTileColumns, c.forward_cols / 2 / kTileCols * kTileCols);
        } else if (c.forward_tokens > kLeastTokens) {
            c.forward_tokens = smaller(c.forward_tokens);
        } else {
            break;
        }
    }
    c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
    const lli_config wide = c;
    size_t most = bytes_of(problem, &c, LL_PASS_FORWARD);
    for (int pass = LL_PASS_BACKWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        while (bytes_of(problem, &c, (ll_pass)pass) > budget) {
            if (c.dz_cols != kSumCols) {
                c.dz_cols = kSumCols;
            } else if (c.grad_tokens > kOnePassTokens ||
                       (c.forward_cols <= kTileColumns && c.grad_tokens > kLeastTokens)) {
                c.grad_tokens = smaller(c.grad_tokens);
                c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
            } else if (c.forward_cols > kTileColumns) {
                c.forward_cols = lli_max(kTileColumns, c.forward_cols / 2 / kTileCols * kTileCols);
            } else if (c.forward_tokens > kLeastTokens) {
                c.forward_tokens = smaller(c.forward_tokens);
            } else {
                break;
            }
        }
    }
    /* The default budget is a wish: where not even the least cuts fit (f32 sums of a wide narrow grad_w),
     * small chunks would cost time and still not keep it; and one chunk of a narrow grad_w, which needs no
     * such sums, may take what it needs. */
    if (!problem->budget_bytes && narrow && n <= kRecomputeTokens && c.grad_tokens < n) {
        c = wide;
        c.dz_cols = kSumCols;
        const size_t alone = bytes_of(problem, &c, LL_PASS_BACKWARD),
                     kept = kept_bytes(problem, kSumCols, n, 0, (lli_cuda_lent){.w = true});
        budget = alone > kept ? alone : kept;
    } else if (!problem->budget_bytes && over(problem, &c, budget)) {
        c = wide;
        c.grad_tokens = lli_min(n, kOnePassTokens);
        c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
    }
    if (!try_exponentials(kernel, problem, budget, cut.v_cols, &c)) {
        try_one_pass(kernel, problem, budget, cut.v_cols, &c);
    }
    /* A wish: other ranks may want smaller chunks, of which there are then several. */
    if (problem->in_group && !agreed) c.columns_outside = narrow;
    if (agreed) adopt(problem, agreed, budget, cut.v_cols, &c);
    for (int pass = LL_PASS_BACKWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        const size_t bytes = bytes_of(problem, &c, (ll_pass)pass);
        if (bytes > most) most = bytes;
    }
    LLI_REQUIRE(!problem->budget_bytes || most <= budget, LL_STATUS_WORKSPACE,
                "ll_plan_create: workspace_budget_bytes is %zu, want at least %zu for n_tokens_max %lld, "
                "n_hidden %lld and v_local %lld on a GPU",
                problem->budget_bytes, most, (long long)problem->n_tokens_max, (long long)problem->n_hidden,
                (long long)problem->v_local);
    *config = c;
    return LL_STATUS_OK;
}
