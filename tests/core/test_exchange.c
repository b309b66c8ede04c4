/* One row over ranks through the integers of core/exchange.h alone, without kernels and communicators: random
 * partitions of random and of hard rows give the state of one rank, bit for bit. The soft sum of a tile is
 * done here once more, straight from its definition. */
#include "core/dtype.h"
#include "core/exchange.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { kCols = 300, kPadded = 320, kRanks = 12, kMaxInts = 64, kSumInts = 96 };

static uint64_t state = 88172645463325252u;

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static float uniform(void) {
    return (float)(draw() >> 40) / (float)(1 << 23) - 1.0f;
}

/* A row: logits, class weights, target. */
typedef struct row {
    float z[kPadded], cw[kPadded];
    int64_t target;
    const char *name;
} row;

static const char *const kinds[] = {"plain",
                                    "far apart",
                                    "offset",
                                    "wide",
                                    "double",
                                    "tiny terms",
                                    "some are -inf",
                                    "NaN",
                                    "+inf",
                                    "all -inf",
                                    "zeros",
                                    "target dominates",
                                    "cw mostly 0, -inf there"};
enum { kKinds = sizeof kinds / sizeof *kinds };

static void make_row(row *r, int kind) {
    static const float scales[kKinds] = {4, 300, 2, 1e12f, 1e7f, 1e-30f, 3, 3, 3, 1, 0, 1, 5};
    r->name = kinds[kind];
    r->target = (int64_t)(draw() % kCols);
    for (int64_t v = 0; v < kPadded; v++) {
        r->z[v] = scales[kind] * uniform() + (kind == 2 ? 1e4f : 0.0f);
        r->cw[v] = draw() % 5 == 0 ? 0.0f : 1.0f + uniform();
        if (kind == 6 && draw() % 3 == 0) r->z[v] = -INFINITY;
        if (kind == 9) r->z[v] = -INFINITY;
        if (kind == 12 && draw() % 4) {
            r->cw[v] = 0.0f;
            r->z[v] = -INFINITY;
        }
    }
    const int64_t at = (int64_t)(draw() % kCols);
    if (kind == 7) r->z[at] = draw() & 1 ? NAN : -NAN;
    if (kind == 8) r->z[at] = INFINITY;
    if (kind == 11) r->z[r->target] = 90;
}

/* sum += the tile's cw z on its grid; columns [begin, end) of the row, all in one tile. */
static void soft_tile(const row *r, int64_t begin, int64_t end, lli_exact *sum) {
    float x[kTileCols] = {0}, largest = 0.0f;
    int64_t total = 0;
    for (int64_t v = begin; v < end; v++) {
        x[v - begin] = r->cw[v] == 0.0f ? 0.0f : r->cw[v] * r->z[v];
        if (!isnan(largest) && !(fabsf(x[v - begin]) <= largest)) largest = fabsf(x[v - begin]);
    }
    if (!(largest < INFINITY)) {
        for (int64_t v = 0; v < end - begin; v++) {
            if (!(fabsf(x[v]) < INFINITY)) lli_exact_add_f32(sum, x[v]);
        }
        return;
    }
    if (largest == 0.0f) return;
    int exponent;
    (void)frexpf(largest, &exponent); /* largest < 2^exponent */
    if (exponent < -90) exponent = -90;
    for (int64_t v = 0; v < end - begin; v++) total += (int64_t)rint(ldexp((double)x[v], 30 - exponent));
    lli_exact_add(sum, total, exponent - 30);
}

static float largest_of(const float *z) {
    float max = -INFINITY;
    for (int64_t v = 0; v < kTileCols; v++) {
        if (z[v] != z[v]) return NAN;
        if (z[v] > max) max = z[v];
    }
    return max;
}

/* Largest logit, its column and the target's logit, of [begin, end). */
static void scan(const row *r, int64_t begin, int64_t end, lli_row_part *part) {
    for (int64_t v = begin; v < end; v++) {
        if (r->z[v] == r->z[v] && (part->argmax < 0 || r->z[v] > part->max)) {
            part->max = r->z[v];
            part->argmax = v;
        }
        if (v == r->target) {
            part->has_target = 1;
            part->z = r->z[v];
        }
    }
}

/* The part of a rank that holds [begin, end): its edges, and the tiles that are not in the list of shared
 * ones. */
static lli_row_part part_of(const row *r, const lli_shards *shards, int64_t begin, int64_t end,
                            float edges[2][kTileCols]) {
    lli_row_part part = {.max = -INFINITY, .argmax = -1, .edges = {edges[0], edges[1]}};
    lli_softmax_clear(&part.whole);
    lli_softmax_clear(&part.rest);
    scan(r, begin, end, &part);
    const int64_t first = begin / kTileCols, last = begin < end ? (end - 1) / kTileCols : first - 1;
    for (int64_t t = first; t <= last; t++) {
        float z[kTileCols];
        const int64_t from = t * kTileCols > begin ? t * kTileCols : begin;
        const int64_t to = (t + 1) * kTileCols < end ? (t + 1) * kTileCols : end;
        for (int64_t v = 0; v < kTileCols; v++) {
            const int64_t column = t * kTileCols + v;
            z[v] = column >= from && column < to ? r->z[column] : -INFINITY;
        }
        if (lli_shards_find(shards, t) >= 0) {
            if (t == first) memcpy(edges[0], z, sizeof z);
            if (t == last) memcpy(edges[1], z, sizeof z);
            continue;
        }
        lli_softmax_tile(&part.whole, z, kTileCols, largest_of(z));
        if (r->target >= from && r->target < to) z[r->target - t * kTileCols] = -INFINITY;
        lli_softmax_tile(&part.rest, z, kTileCols, largest_of(z));
        soft_tile(r, from, to, &part.soft);
    }
    return part;
}

static void make_shards(const lli_shard *table, int32_t n, lli_shards *shards) {
    assert_int_equal(lli_shards_check(table, n, kCols), LL_STATUS_OK);
    for (int32_t k = 0; k < n; k++) {
        assert_int_equal(lli_shards_make(table, n, k, kCols, &shards[k]), LL_STATUS_OK);
    }
}

/* All that ranks would do, one after the other. */
static lli_row_part over_ranks(const row *r, const lli_shard *table, int32_t n, bool smoothing,
                               int64_t *argmax) {
    static float edges[kRanks][2][kTileCols];
    lli_shards shards[kRanks] = {{0}};
    lli_row_part parts[kRanks], result;
    int32_t max[kMaxInts], mine[kMaxInts], index = lli_softmax_key_none;
    int64_t sum[kSumInts] = {0}, addend[kSumInts];
    make_shards(table, n, shards);
    const int64_t n_max = lli_exchange_n_max(shards[0].n_shared, smoothing);
    const int64_t n_sum = lli_exchange_n_sum(shards[0].n_shared, smoothing);
    assert_true(n_max <= kMaxInts && n_sum <= kSumInts);
    for (int32_t k = 0; k < n; k++) {
        const lli_exchange exchange = {&shards[k], r->cw, smoothing};
        parts[k] = part_of(r, &shards[k], shards[k].begin, shards[k].end, edges[k]);
        lli_exchange_max(&exchange, &parts[k], r->target, mine);
        for (int64_t i = 0; i < n_max; i++) max[i] = k == 0 || mine[i] > max[i] ? mine[i] : max[i];
    }
    for (int32_t k = 0; k < n; k++) {
        const lli_exchange exchange = {&shards[k], r->cw, smoothing};
        lli_exchange_sum(&exchange, &parts[k], r->target, max, addend);
        for (int64_t i = 0; i < n_sum; i++) sum[i] += addend[i];
        const int32_t at = lli_exchange_index(&parts[k], max);
        if (at > index) index = at;
    }
    const lli_exchange exchange = {&shards[0], r->cw, smoothing};
    lli_exchange_row(&exchange, max, sum, r->target, &result);
    *argmax = index == lli_softmax_key_none ? -1 : -(int64_t)index;
    for (int32_t k = 0; k < n; k++) lli_shards_free(&shards[k]);
    return result;
}

static bool same_softmax(const lli_softmax *a, const lli_softmax *b, bool with_u) {
    if (a->top == LLI_TOP_NAN || b->top == LLI_TOP_NAN) return a->top == b->top;
    return a->top == b->top && memcmp(a->s, b->s, sizeof a->s) == 0 &&
           (!with_u || memcmp(a->u, b->u, sizeof a->u) == 0);
}

static int by_value(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static int32_t random_table(lli_shard table[kRanks]) {
    int64_t edges[kRanks + 1] = {0};
    const int32_t n = 1 + (int32_t)(draw() % kRanks);
    for (int32_t k = 1; k < n; k++) edges[k] = (int64_t)(draw() % (kCols + 1));
    edges[n] = kCols;
    qsort(edges, (size_t)n, sizeof *edges, by_value);
    for (int32_t k = 0; k < n; k++) table[n - 1 - k] = (lli_shard){edges[k], edges[k + 1] - edges[k]};
    return n;
}

static void any_partition_of_any_row(void **unused) {
    (void)unused;
    const lli_shards none = {.first_shared = -1, .last_shared = -1};
    for (int repeat = 0; repeat < 4000; repeat++) {
        row r;
        float edges[2][kTileCols];
        lli_shard table[kRanks];
        int64_t argmax;
        make_row(&r, repeat % kKinds);
        const lli_row_part want = part_of(&r, &none, 0, kCols, edges);
        const int32_t n = random_table(table);
        const bool smoothing = repeat / kKinds % 2;
        const lli_row_part got = over_ranks(&r, table, n, smoothing, &argmax);
        const bool fine = same_softmax(&got.whole, &want.whole, true) &&
                          same_softmax(&got.rest, &want.rest, false) && lli_bits(got.z) == lli_bits(want.z) &&
                          argmax == want.argmax;
        if (!fine) fail_msg("repeat %d, %s, %d ranks: not the state of one rank", repeat, r.name, n);
        const double soft = lli_exact_value(&got.soft), want_soft = lli_exact_value(&want.soft);
        if (smoothing && soft != want_soft && !(isnan(soft) && isnan(want_soft))) {
            fail_msg("repeat %d, %s, %d ranks: soft sum %a, want %a", repeat, r.name, n, soft, want_soft);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_partition_of_any_row)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
