/* The test double: what it does to results (nothing), to order and time, and how it fails. */
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { kRanks = 5, kN = 321 };

static void make_doubles(const ll_comm *inner, int32_t size, ll_comm_double script, ll_comm *doubles) {
    script.struct_bytes = sizeof script;
    for (int32_t rank = 0; rank < size; rank++) {
        assert_int_equal(ll_comm_double_create(&inner[rank], &script, &doubles[rank]), LL_STATUS_OK);
    }
}

static ll_comm_counts counts_of(const ll_comm *comm) {
    ll_comm_counts counts;
    assert_int_equal(ll_comm_double_counts(comm, &counts), LL_STATUS_OK);
    return counts;
}

static void check_reductions(rank_run *run, int64_t n) {
    const ll_comm *comm = run->comm;
    int32_t max[kN];
    int64_t sum[kN];
    for (int64_t i = 0; i < n; i++) {
        max[i] = value_i32(run->rank, i);
        sum[i] = value_i64(run->rank, i);
    }
    CHECK(run, comm->max_i32(comm->self, max, n, NULL) == LL_STATUS_OK);
    CHECK(run, comm->sum_i64(comm->self, sum, n, NULL) == LL_STATUS_OK);
    for (int64_t i = 0; i < n; i++) {
        int32_t most = INT32_MIN;
        int64_t total = 0;
        for (int32_t r = 0; r < comm->size; r++) {
            if (value_i32(r, i) > most) most = value_i32(r, i);
            total += value_i64(r, i);
        }
        CHECK(run, max[i] == most);
        CHECK(run, sum[i] == total);
    }
}

/* reversed: the inner communicator adds in its own order, which is the other way round. */
static void check_gather_and_f32(rank_run *run, int64_t n, int32_t reversed) {
    const ll_comm *comm = run->comm;
    float sum[kN], all[kN * kRanks];
    for (int64_t i = 0; i < n; i++) sum[i] = value_f32(run->rank, i);
    CHECK(run, comm->all_gather(comm->self, sum, all, (size_t)n * sizeof *sum) == LL_STATUS_OK);
    CHECK(run, comm->sum_f32(comm->self, sum, n, NULL) == LL_STATUS_OK);
    for (int64_t i = 0; i < n; i++) {
        float chain = 0;
        for (int32_t k = 0; k < comm->size; k++) {
            const int32_t r = reversed ? comm->size - 1 - k : k;
            chain = k ? chain + value_f32(r, i) : value_f32(r, i);
            CHECK(run, all[r * n + i] == value_f32(r, i));
        }
        CHECK(run, memcmp(&chain, &sum[i], sizeof chain) == 0);
    }
}

static void all_operations(rank_run *run) {
    const ll_comm_double *script = run->context;
    const int64_t counts[] = {kN, 0, 1, 2, 40};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        check_reductions(run, counts[i]);
        check_gather_and_f32(run, counts[i], script->reverse);
    }
    CHECK(run, strcmp(run->comm->error(run->comm->self), "") == 0);
}

/* Results are those of the definition whatever the script; all ranks did the same operations, also the inner
 * ones, which a second double counts. */
static void test_script(int32_t size, ll_comm_double script) {
    ll_comm world[kRanks], inner[kRanks], doubles[kRanks];
    make_world(size, 0, world);
    make_doubles(world, size, (ll_comm_double){0}, inner);
    make_doubles(inner, size, script, doubles);
    for (int32_t rank = 0; rank < size; rank++) {
        assert_int_equal(doubles[rank].rank, script.reverse ? size - 1 - rank : rank);
        assert_int_equal(doubles[rank].size, size);
    }
    run_checked(doubles, size, all_operations, &script);
    const ll_comm_counts outer_0 = counts_of(&doubles[0]), inner_0 = counts_of(&inner[0]);
    assert_int_equal(outer_0.max_i32, 5);
    assert_int_equal(outer_0.sum_i64, 5);
    assert_int_equal(outer_0.all_gather, 5);
    assert_int_equal(outer_0.sum_f32, 5);
    assert_int_equal(outer_0.max_bytes, 4 * (kN + 43));
    assert_int_equal(outer_0.sum_bytes, 8 * (kN + 43));
    assert_int_equal(outer_0.gather_bytes, 4 * (kN + 43));
    assert_int_equal(outer_0.grad_bytes, 4 * (kN + 43));
    if (script.pieces > 1) {
        assert_true(inner_0.max_i32 > 5 && inner_0.max_i32 <= 5 * script.pieces);
        assert_true(inner_0.sum_i64 > 5 && inner_0.sum_i64 <= 5 * script.pieces);
        assert_true(inner_0.order != outer_0.order);
    } else {
        assert_memory_equal(&inner_0, &outer_0, sizeof inner_0);
    }
    assert_int_equal(inner_0.max_bytes, outer_0.max_bytes);
    assert_int_equal(inner_0.sum_bytes, outer_0.sum_bytes);
    for (int32_t rank = 1; rank < size; rank++) {
        const ll_comm_counts outer_r = counts_of(&doubles[rank]), inner_r = counts_of(&inner[rank]);
        assert_memory_equal(&outer_r, &outer_0, sizeof outer_r);
        assert_memory_equal(&inner_r, &inner_0, sizeof inner_r);
    }
    destroy_all(doubles, size);
    destroy_all(inner, size);
    destroy_all(world, size);
}

static void scripts(void **unused) {
    (void)unused;
    for (int32_t size = 1; size <= kRanks; size++) {
        for (uint64_t seed = 1; seed <= 3; seed++) {
            test_script(size, (ll_comm_double){.seed = seed});
            test_script(size, (ll_comm_double){.seed = seed, .delay_us = 300});
            test_script(size, (ll_comm_double){.seed = seed, .pieces = 9});
            test_script(size, (ll_comm_double){.seed = seed, .pieces = 1000});
            test_script(size, (ll_comm_double){.seed = seed, .reverse = 1});
            test_script(size, (ll_comm_double){.seed = seed, .delay_us = 300, .pieces = 9, .reverse = 1});
        }
    }
}

/* The hash tells kinds, sizes and their order apart, and the pieces of another seed are others. */
static void orders_differ(void **unused) {
    (void)unused;
    ll_comm self, comm[6];
    int64_t values[64] = {0};
    uint64_t order[6];
    assert_int_equal(ll_comm_self(&self), LL_STATUS_OK);
    for (int i = 0; i < 6; i++)
        make_doubles(&self, 1, (ll_comm_double){.seed = (uint64_t)i, .pieces = 8}, &comm[i]);
    for (int i = 1; i < 6; i++) {
        const int first = i == 2;
        if (first) comm[i].sum_i64(comm[i].self, values, 3, NULL);
        if (i != 5) comm[i].max_i32(comm[i].self, (int32_t *)values, i == 3 ? 4 : 2, NULL);
        if (!first) comm[i].sum_i64(comm[i].self, values, i == 4 ? 2 : 3, NULL);
    }
    for (int i = 0; i < 6; i++) {
        order[i] = counts_of(&comm[i]).order;
        for (int j = 0; j < i; j++) assert_true(order[i] != order[j]);
        ll_comm_destroy(&comm[i]);
    }
    for (int i = 0; i < 4; i++) {
        ll_comm counting;
        make_doubles(&self, 1, (ll_comm_double){0}, &counting);
        make_doubles(&counting, 1, (ll_comm_double){.seed = i < 2 ? 7 : (uint64_t)i, .pieces = 8}, &comm[0]);
        for (int k = 0; k < 5; k++) comm[0].sum_i64(comm[0].self, values, 64, NULL);
        order[i] = counts_of(&counting).order;
        ll_comm_destroy(&comm[0]);
        ll_comm_destroy(&counting);
    }
    assert_true(order[0] == order[1]);
    assert_true(order[2] != order[0] && order[3] != order[0] && order[2] != order[3]);
}

/* ---- Time and failure --------------------------------------------------------------------------- */

/* Sums until one fails, five at most; notes the failure's outcome and time. */
static void five_sums(rank_run *run) {
    int64_t *n_done = run->context;
    for (int64_t i = 0; i < 5; i++) {
        int64_t value[3] = {1, 2, 3};
        note_status(run, run->comm->sum_i64(run->comm->self, value, 3, NULL));
        if (run->status != LL_STATUS_OK) {
            CHECK(run, value[0] == 1 && value[1] == 2 && value[2] == 3);
            break;
        }
        CHECK(run, value[0] == run->comm->size && value[2] == 3 * run->comm->size);
        n_done[run->rank]++;
    }
}

static void delays(void **unused) {
    (void)unused;
    ll_comm world[2], doubles[2];
    rank_run runs[2];
    int64_t n_done[2] = {0};
    make_world(2, 0, world);
    make_doubles(world, 2, (ll_comm_double){.seed = 3, .delay_us = 100000}, doubles);
    run_ranks(doubles, 2, five_sums, n_done, runs);
    /* 5 times the later of two draws up to 100 ms: 333 ms expected */
    printf("    delays of up to 100 ms, 5 operations of 2 ranks: %.0f ms\n", runs[0].seconds * 1e3);
    assert_true(runs[0].seconds > 0.1 && n_done[0] == 5 && n_done[1] == 5);
    destroy_all(doubles, 2);
    destroy_all(world, 2);
}

/* All ranks fail at the same operation, as the header asks for, or one alone does and its peers time out. */
static void failures(void **unused) {
    (void)unused;
    for (int32_t alone = 0; alone < 2; alone++) {
        ll_comm world[3], doubles[3];
        rank_run runs[3];
        int64_t n_done[3] = {0};
        make_world(3, 200, world);
        make_doubles(world, 3, (ll_comm_double){.fail_at = alone ? 0 : 3}, doubles);
        if (alone) {
            ll_comm_destroy(&doubles[1]);
            make_doubles(&world[1], 1, (ll_comm_double){.fail_at = 3}, &doubles[1]);
        }
        run_ranks(doubles, 3, five_sums, n_done, runs);
        for (int32_t rank = 0; rank < 3; rank++) {
            assert_int_equal(runs[rank].bad_line, 0);
            assert_int_equal(runs[rank].status, LL_STATUS_COMM);
            assert_int_equal(n_done[rank], 2);
            assert_true(runs[rank].seconds < 2.0);
            assert_non_null(strstr(runs[rank].sentence,
                                   alone && rank != 1 ? "waited 200 ms for rank 1 of 3"
                                                      : "fails by the test double's script (fail_at 3)"));
        }
        int32_t value = 1;
        assert_int_equal(doubles[1].max_i32(doubles[1].self, &value, 1, NULL), LL_STATUS_COMM);
        assert_string_equal(doubles[1].error(doubles[1].self),
                            "max_i32: operation 4 of rank 1 fails by the test double's script (fail_at 3)");
        destroy_all(doubles, 3);
        destroy_all(world, 3);
    }
}

static void stalls(void **unused) {
    (void)unused;
    static const int32_t limits_ms[] = {10000, 200};
    for (int i = 0; i < 2; i++) {
        ll_comm world[3], doubles[3];
        rank_run runs[3];
        int64_t n_done[3] = {0};
        make_world(3, limits_ms[i], world);
        make_doubles(world, 2, (ll_comm_double){0}, doubles);
        make_doubles(&world[2], 1, (ll_comm_double){.stall_at = 2, .stall_ms = 600}, &doubles[2]);
        run_ranks(doubles, 3, five_sums, n_done, runs);
        for (int32_t rank = 0; rank < 3; rank++) {
            assert_int_equal(runs[rank].bad_line, 0);
            assert_int_equal(runs[rank].status, i == 0 ? LL_STATUS_OK : LL_STATUS_COMM);
            assert_int_equal(n_done[rank], i == 0 ? 5 : 1);
            if (i == 0) assert_true(runs[rank].seconds >= 0.6);
            if (i == 1) assert_non_null(strstr(runs[rank].sentence, "waited 200 ms for rank 2 of 3"));
        }
        assert_true(runs[2].seconds >= 0.6);
        destroy_all(doubles, 3);
        destroy_all(world, 3);
    }
}

static void abort_passes(void **unused) {
    (void)unused;
    ll_comm world[2], doubles[2];
    int64_t value = 1;
    make_world(2, 0, world);
    make_doubles(world, 2, (ll_comm_double){.reverse = 1}, doubles);
    ll_comm_abort(&doubles[0], "no more");
    assert_int_equal(doubles[1].sum_i64(doubles[1].self, &value, 1, NULL), LL_STATUS_COMM);
    assert_string_equal(doubles[1].error(doubles[1].self), "no more");
    destroy_all(doubles, 2);
    destroy_all(world, 2);
}

/* ---- Groups ------------------------------------------------------------------------------------- */

static const int32_t group_list[] = {3, 0, 4};

static void group_members(rank_run *run) {
    int32_t mine = group_list[run->rank], all[3];
    CHECK(run, run->comm->all_gather(run->comm->self, &mine, all, sizeof mine) == LL_STATUS_OK);
    CHECK(run, memcmp(all, group_list, sizeof all) == 0);
    check_reductions(run, kN);
}

/* The script goes with the group; the group's inner communicator goes with the group's double. */
static void groups(void **unused) {
    (void)unused;
    for (int32_t reverse = 0; reverse < 2; reverse++) {
        ll_comm world[kRanks], doubles[kRanks], group[3];
        ll_comm_double script = {.seed = 5, .pieces = 4, .reverse = reverse, .fail_at = 4};
        make_world(kRanks, 0, world);
        make_doubles(world, kRanks, script, doubles);
        for (int32_t i = 0; i < 3; i++) {
            const int32_t place = reverse ? kRanks - 1 - group_list[i] : group_list[i];
            assert_int_equal(doubles[place].rank, group_list[i]);
            assert_int_equal(ll_comm_group(&doubles[place], group_list, 3, &group[i]), LL_STATUS_OK);
            assert_int_equal(group[i].rank, i);
            assert_int_equal(group[i].size, 3);
        }
        destroy_all(doubles, kRanks);
        destroy_all(world, kRanks);
        run_checked(group, 3, group_members, NULL);
        assert_int_equal(counts_of(&group[0]).all_gather, 1);
        assert_true(counts_of(&group[0]).order == counts_of(&group[2]).order);
        int64_t value = 1; /* operation 4 */
        assert_int_equal(group[0].sum_i64(group[0].self, &value, 1, NULL), LL_STATUS_COMM);
        destroy_all(group, 3);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scripts),  cmocka_unit_test(orders_differ), cmocka_unit_test(delays),
        cmocka_unit_test(failures), cmocka_unit_test(stalls),        cmocka_unit_test(abort_passes),
        cmocka_unit_test(groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
