/* The shard table: what covers a vocabulary and what does not, and which tiles a cut goes through. Expected
 * values by hand. Leaves out what ranks do with it (test_ranks.c). */
#include "core/shards.h"
#include "core/softmax.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static void accepts(const lli_shard *shards, int32_t n, int64_t v_total) {
    if (lli_shards_check(shards, n, v_total) != LL_STATUS_OK) fail_msg("%s", ll_last_error());
}

static void refuses(const lli_shard *shards, int32_t n, int64_t v_total, const char *words) {
    assert_int_equal(lli_shards_check(shards, n, v_total), LL_STATUS_INVALID_ARG);
    if (!strstr(ll_last_error(), words)) fail_msg("\"%s\" lacks \"%s\"", ll_last_error(), words);
}

static void covers(void **state) {
    (void)state;
    const lli_shard one[] = {{0, 100}}, padded[] = {{0, 60}, {60, 68}},
                    permuted[] = {{70, 30}, {0, 7}, {7, 63}};
    const lli_shard empty[] = {{0, 0}, {0, 50}, {50, 0}, {50, 50}, {100, 0}, {900, 0}};
    const lli_shard all_padding[] = {{0, 4}, {4, 4}, {8, 4}, {12, 4}};
    accepts(one, 1, 100);
    accepts(one, 1, 93);
    accepts(padded, 2, 100);
    accepts(permuted, 3, 100);
    accepts(empty, COUNT(empty), 100);
    accepts(all_padding, 4, 10);
}

static void gaps_overlaps_and_full_weights(void **state) {
    (void)state;
    const lli_shard gap[] = {{0, 50}, {51, 49}}, late[] = {{1, 99}}, shorter[] = {{0, 50}, {50, 49}};
    const lli_shard overlap[] = {{50, 50}, {0, 51}}, twice[] = {{0, 60}, {0, 60}}, none[] = {{0, 0}, {0, 0}};
    const lli_shard inside[] = {{0, 99}, {40, 10}, {99, 1}};
    const lli_shard full[] = {{0, 100}, {100, 100}}, full_again[] = {{0, 100}, {0, 100}};
    refuses(gap, 2, 100, "no rank holds the columns [50, 51)");
    refuses(late, 1, 100, "no rank holds the columns [0, 1)");
    refuses(shorter, 2, 100, "end at column 99");
    refuses(none, 2, 100, "end at column 0");
    refuses(overlap, 2, 100, "ranks 0 [50, 100) and 1 [0, 51) overlap");
    refuses(twice, 2, 100, "overlap");
    refuses(inside, 3, 100, "ranks 0 [0, 99) and 1 [40, 50) overlap");
    refuses(full, 2, 100, "2 ranks hold at least v_total 100");
    refuses(full_again, 2, 100, "200 in all");
}

static void check_shared(const lli_shard *shards, int32_t n, int32_t rank, int64_t v_total,
                         const char *want) {
    lli_shards table;
    char got[160];
    int used = 0;
    assert_int_equal(lli_shards_make(shards, n, rank, v_total, &table), LL_STATUS_OK);
    for (int32_t i = 0; i < table.n_shared; i++) {
        used += snprintf(got + used, sizeof got - (size_t)used, "%d ", (int)table.shared[i]);
    }
    snprintf(got + used, sizeof got - (size_t)used, "| %d %d | %d..%d", table.first_shared, table.last_shared,
             (int)table.begin, (int)table.end);
    assert_string_equal(got, want);
    lli_shards_free(&table);
}

static void tiles_that_a_cut_goes_through(void **state) {
    (void)state;
    const lli_shard aligned[] = {{0, 64}, {64, 128}, {192, 20}};
    check_shared(aligned, 3, 1, 212, "| -1 -1 | 64..192");
    const lli_shard cut[] = {{0, 65}, {65, 60}, {125, 3}, {128, 72}};
    check_shared(cut, 4, 0, 200, "1 | -1 0 | 0..65");
    check_shared(cut, 4, 1, 200, "1 | 0 0 | 65..125");
    check_shared(cut, 4, 2, 200, "1 | 0 0 | 125..128");
    check_shared(cut, 4, 3, 200, "1 | -1 -1 | 128..200");
    const lli_shard mixed[] = {{300, 30}, {0, 10}, {10, 0}, {10, 290}};
    check_shared(mixed, 4, 0, 320, "0 4 | 1 1 | 300..320"); /* padding behind column 320 */
    check_shared(mixed, 4, 1, 320, "0 4 | 0 0 | 0..10");
    check_shared(mixed, 4, 2, 320, "0 4 | -1 -1 | 0..0");
    check_shared(mixed, 4, 3, 320, "0 4 | 0 1 | 10..300");
    const lli_shard in_padding[] = {{0, 70}, {70, 10}}; /* the cut is behind the vocabulary */
    check_shared(in_padding, 2, 0, 66, "| -1 -1 | 0..66");
    check_shared(in_padding, 2, 1, 66, "| -1 -1 | 0..0");
}

static void keys_order_as_floats(void **state) {
    (void)state;
    const float ascending[] = {-INFINITY, -3e38f, -1.5f, -1e-45f, 0.0f, 1e-45f, 1.0f, 3e38f, INFINITY};
    for (size_t i = 0; i < COUNT(ascending); i++) {
        const int32_t key = lli_softmax_key(ascending[i]);
        assert_true(key > lli_softmax_key_none && key < lli_softmax_key(NAN));
        assert_true(lli_softmax_key_value(key) == ascending[i]);
        if (i) assert_true(key > lli_softmax_key(ascending[i - 1]));
    }
    assert_int_equal(lli_softmax_key(-0.0f), lli_softmax_key(0.0f));
    assert_true(isnan(lli_softmax_key_value(lli_softmax_key(NAN))));
    assert_int_equal(lli_softmax_key(-NAN), lli_softmax_key(NAN)); /* the sign of a NaN means nothing */
}

/* A tile in parts: the integers of the parts, added before the tile enters, give the tile; of every range of
 * logits. Parts that enter one by one need not. */
static void a_tile_in_parts(void **state) {
    (void)state;
    const float scales[] = {1.0f, 40.0f, 1e5f, 1e7f, 1e20f};
    uint32_t random = 1;
    for (size_t s = 0; s < COUNT(scales); s++) {
        for (int cut = 0; cut <= kTileCols; cut++) {
            float z[kTileCols], zmax = -INFINITY, parts[2][kTileCols];
            for (int v = 0; v < kTileCols; v++) {
                random = random * 1664525u + 1013904223u;
                z[v] = scales[s] * ((float)(random >> 8) / (float)(1 << 24) - 0.5f);
                zmax = z[v] > zmax ? z[v] : zmax;
                parts[0][v] = v < cut ? z[v] : -INFINITY;
                parts[1][v] = v < cut ? -INFINITY : z[v];
            }
            lli_softmax whole, joined;
            int64_t sum[2] = {0, 0}, part[2];
            lli_softmax_clear(&whole);
            lli_softmax_clear(&joined);
            lli_softmax_tile(&whole, z, kTileCols, zmax);
            for (int p = 0; p < 2; p++) {
                lli_softmax_tile_sums(parts[p], kTileCols, zmax, &part[0], &part[1]);
                sum[0] += part[0];
                sum[1] += part[1];
            }
            lli_softmax_tile_add(&joined, zmax, sum[0], sum[1]);
            assert_memory_equal(&whole, &joined, sizeof whole);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(covers),
        cmocka_unit_test(gaps_overlaps_and_full_weights),
        cmocka_unit_test(tiles_that_a_cut_goes_through),
        cmocka_unit_test(keys_order_as_floats),
        cmocka_unit_test(a_tile_in_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
