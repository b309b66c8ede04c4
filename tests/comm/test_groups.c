/* Groups of a world: side by side, with equal lists, permuted, nested, and in any order of destruction.
 * Making a group waits for nobody, so the ends are made on one thread here. */
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* groups[i]: the end of world rank ranks[i]. */
static void make_groups(const ll_comm *world, const int32_t *ranks, int32_t n_ranks, ll_comm *groups) {
    for (int32_t i = 0; i < n_ranks; i++) {
        assert_int_equal(ll_comm_group(&world[ranks[i]], ranks, n_ranks, &groups[i]), LL_STATUS_OK);
        assert_int_equal(groups[i].rank, i);
        assert_int_equal(groups[i].size, n_ranks);
    }
}

/* Each rank hands in its number in the world, which must come back in the group's order. */
typedef struct membership {
    const int32_t *ranks;
    int32_t n_ranks;
} membership;

static void check_members(rank_run *run) {
    const membership *m = run->context;
    int32_t mine = m->ranks[run->rank], all[kRanksMax];
    float sum = value_f32(mine, 5), chain = value_f32(m->ranks[0], 5);
    for (int32_t i = 1; i < m->n_ranks; i++) chain += value_f32(m->ranks[i], 5);
    CHECK(run, run->comm->all_gather(run->comm->self, &mine, all, sizeof mine) == LL_STATUS_OK);
    CHECK(run, memcmp(all, m->ranks, (size_t)m->n_ranks * sizeof *all) == 0);
    CHECK(run, run->comm->sum_f32(run->comm->self, &sum, 1, NULL) == LL_STATUS_OK);
    CHECK(run, memcmp(&sum, &chain, sizeof sum) == 0);
}

static void orders(void **unused) {
    (void)unused;
    static const int32_t lists[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {5, 0, 6, 2}, {6, 4, 2, 0}, {1, 6, 3, 4}};
    ll_comm world[7], group[4];
    make_world(7, 0, world);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        for (int32_t n = 1; n <= 4; n++) {
            membership m = {lists[i], n};
            make_groups(world, lists[i], n, group);
            run_checked(group, n, check_members, &m);
            destroy_all(group, n);
        }
    }
    destroy_all(world, 7);
}

/* ---- Side by side ------------------------------------------------------------------------------- */

typedef struct strides {
    atomic_int n_done;      /* ranks of the groups in time */
    atomic_int late_waited; /* ranks of the late group that found them done */
} strides;

static void strided_rank(rank_run *run) {
    strides *s = run->context;
    const int32_t first = run->rank % 4;
    const int32_t ranks[4] = {first, first + 4, first + 8, first + 12};
    const double begin = seconds_now();
    ll_comm group;
    if (first == 3) {
        while (seconds_now() - begin < 0.5 ||
               (atomic_load(&s->n_done) < 12 && seconds_now() - begin < 30.0)) {
            sleep_ms(5);
        }
        if (atomic_load(&s->n_done) == 12) atomic_fetch_add(&s->late_waited, 1);
    }
    CHECK(run, ll_comm_group(run->comm, ranks, 4, &group) == LL_STATUS_OK);
    for (int32_t i = 0; i < 50 && !run->bad_line; i++) {
        int64_t sum = run->rank;
        CHECK(run, group.sum_i64(group.self, &sum, 1, NULL) == LL_STATUS_OK);
        CHECK(run, sum == 4 * first + 24);
    }
    if (first != 3) atomic_fetch_add(&s->n_done, 1);
    ll_comm_destroy(&group);
}

/* {0,4,8,12} .. {3,7,11,15} at the same time; the last one starts half a second late, and only when the
 * others are done: had they to wait for it, it would give up waiting for them. */
static void side_by_side(void **unused) {
    (void)unused;
    ll_comm world[16];
    rank_run runs[16];
    strides s = {0, 0};
    make_world(16, 60000, world);
    run_ranks(world, 16, strided_rank, &s, runs);
    double in_time = 0, late = 60;
    for (int32_t rank = 0; rank < 16; rank++) {
        assert_int_equal(runs[rank].bad_line, 0);
        if (rank % 4 != 3 && runs[rank].seconds > in_time) in_time = runs[rank].seconds;
        if (rank % 4 == 3 && runs[rank].seconds < late) late = runs[rank].seconds;
    }
    printf("    groups in time took %.3f s, the late one %.3f s\n", in_time, late);
    assert_int_equal(s.late_waited, 4);
    assert_true(late >= 0.5);
    destroy_all(world, 16);
}

/* ---- Equal lists -------------------------------------------------------------------------------- */

typedef struct pair {
    ll_comm *second; /* [3] */
    atomic_int n_met;
} pair;

/* In both groups at the same time, in an order that differs between ranks would wait for ever; so the first
 * operation of each group in turn, with what tells the groups apart. */
static void in_both(rank_run *run) {
    pair *p = run->context;
    ll_comm *second = &p->second[run->rank];
    for (int32_t i = 0; i < 20; i++) {
        int32_t mine[2] = {1, run->rank}, all[6], mine_2[2] = {2, run->rank}, all_2[6];
        CHECK(run, run->comm->all_gather(run->comm->self, mine, all, sizeof mine) == LL_STATUS_OK);
        CHECK(run, second->all_gather(second->self, mine_2, all_2, sizeof mine_2) == LL_STATUS_OK);
        for (int32_t r = 0; r < 3; r++) {
            CHECK(run, all[2 * r] == 1 && all[2 * r + 1] == r);
            CHECK(run, all_2[2 * r] == 2 && all_2[2 * r + 1] == r);
        }
    }
    /* one group is dead, the other one lives, and so does the world */
    ll_comm_abort(run->comm, "first");
    int32_t mine = run->rank, all[3];
    CHECK(run, run->comm->all_gather(run->comm->self, &mine, all, 4) == LL_STATUS_COMM);
    CHECK(run, second->all_gather(second->self, &mine, all, 4) == LL_STATUS_OK);
}

/* Rank by rank, as ranks that run far ahead of others would: the k-th call of each belongs together. */
static void equal_lists(void **unused) {
    (void)unused;
    static const int32_t list[] = {0, 1, 2}, other[] = {2, 1, 0};
    ll_comm world[3], first[3], second[3], between[3];
    make_world(3, 0, world);
    for (int32_t rank = 0; rank < 3; rank++) {
        assert_int_equal(ll_comm_group(&world[rank], list, 3, &first[rank]), LL_STATUS_OK);
        assert_int_equal(ll_comm_group(&world[rank], other, 3, &between[2 - rank]), LL_STATUS_OK);
        assert_int_equal(ll_comm_group(&world[rank], list, 3, &second[rank]), LL_STATUS_OK);
    }
    pair p = {second, 0};
    run_checked(first, 3, in_both, &p);
    membership m = {other, 3}, of_world = {list, 3};
    run_checked(between, 3, check_members, &m);
    run_checked(world, 3, check_members, &of_world);
    destroy_all(first, 3);
    destroy_all(second, 3);
    destroy_all(between, 3);
    destroy_all(world, 3);
}

/* ---- Life --------------------------------------------------------------------------------------- */

static void world_goes_first(void **unused) {
    (void)unused;
    static const int32_t list[] = {3, 1, 2}, inner_list[] = {2, 0}, world_of_inner[] = {2, 3};
    ll_comm world[4], group[3], inner[3];
    membership m = {list, 3}, of_inner = {world_of_inner, 2};
    make_world(4, 0, world);
    ll_comm_destroy(&world[0]); /* before a group is made: it is no member */
    assert_int_equal(ll_comm_group(&world[3], list, 3, &group[0]), LL_STATUS_OK);
    ll_comm_destroy(&world[3]); /* before the other members ask for theirs */
    assert_int_equal(ll_comm_group(&world[2], list, 3, &group[2]), LL_STATUS_OK);
    assert_int_equal(ll_comm_group(&world[1], list, 3, &group[1]), LL_STATUS_OK);
    destroy_all(world, 4);
    run_checked(group, 3, check_members, &m);
    /* a group of a group: its ranks 2 and 0 are ranks 2 and 3 of the world */
    assert_int_equal(ll_comm_group(&group[0], inner_list, 2, &inner[1]), LL_STATUS_OK);
    assert_int_equal(ll_comm_group(&group[2], inner_list, 2, &inner[0]), LL_STATUS_OK);
    destroy_all(group, 3);
    run_checked(inner, 2, check_members, &of_inner);
    destroy_all(inner, 2);
}

/* Offers that some members never take up, nested ones too, are given back with the last end (AddressSanitizer
 * would see them). */
static void unfinished_groups(void **unused) {
    (void)unused;
    static const int32_t list[] = {0, 2}, inner_list[] = {1, 0};
    ll_comm world[3], group[2], again, inner;
    make_world(3, 0, world);
    make_groups(world, list, 2, group);
    assert_int_equal(ll_comm_group(&world[0], list, 2, &again), LL_STATUS_OK);
    assert_int_equal(ll_comm_group(&group[1], inner_list, 2, &inner), LL_STATUS_OK);
    destroy_all(world, 3);
    destroy_all(group, 2);
    ll_comm_destroy(&again);
    ll_comm_destroy(&inner);
    make_world(3, 0, world);
    assert_int_equal(ll_comm_group(&world[2], list, 2, &again), LL_STATUS_OK);
    ll_comm_destroy(&again);
    destroy_all(world, 3);
}

static void waits_alone(rank_run *run) {
    int64_t value = 1;
    if (run->rank == 0) note_status(run, run->comm->sum_i64(run->comm->self, &value, 1, NULL));
}

/* The world's time limit is the group's, a dead world still makes groups, and debug is handed on. */
static void inheritance(void **unused) {
    (void)unused;
    static const int32_t list[] = {2, 0};
    ll_comm world[3], group[2];
    rank_run runs[2];
    membership m = {list, 2};
    make_world(3, 150, world);
    for (int32_t rank = 0; rank < 3; rank++) world[rank].debug = 1;
    ll_comm_abort(&world[1], "the world is dead");
    make_groups(world, list, 2, group);
    assert_int_equal(group[0].debug, 1);
    run_checked(group, 2, check_members, &m);
    run_ranks(group, 2, waits_alone, NULL, runs);
    assert_int_equal(runs[0].status, LL_STATUS_COMM);
    assert_string_equal(runs[0].sentence, "sum_i64: rank 0 waited 150 ms for rank 1 of 2");
    assert_true(runs[0].seconds < 2.0);
    int64_t value = 1;
    assert_int_equal(world[0].sum_i64(world[0].self, &value, 1, NULL), LL_STATUS_COMM);
    assert_string_equal(world[0].error(world[0].self), "the world is dead");
    destroy_all(group, 2);
    destroy_all(world, 3);
}

static void makes_many(rank_run *run) {
    const int32_t list[] = {0, 1, 2, 3}, odd[] = {3, 1}, even[] = {0, 2};
    for (int32_t i = 0; i < 200 && !run->bad_line; i++) {
        ll_comm all, half;
        CHECK(run, ll_comm_group(run->comm, list, 4, &all) == LL_STATUS_OK);
        CHECK(run, ll_comm_group(run->comm, run->rank % 2 ? odd : even, 2, &half) == LL_STATUS_OK);
        int64_t sum = 1 + run->rank + i, part = 1 + run->rank;
        CHECK(run, half.sum_i64(half.self, &part, 1, NULL) == LL_STATUS_OK);
        CHECK(run, part == (run->rank % 2 ? 6 : 4));
        if (i % 3) CHECK(run, all.sum_i64(all.self, &sum, 1, NULL) == LL_STATUS_OK && sum == 10 + 4 * i);
        ll_comm_destroy(&all);
        ll_comm_destroy(&half);
    }
}

static void many_groups(void **unused) {
    (void)unused;
    ll_comm world[4];
    make_world(4, 0, world);
    run_checked(world, 4, makes_many, NULL);
    destroy_all(world, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders),
        cmocka_unit_test(side_by_side),
        cmocka_unit_test(equal_lists),
        cmocka_unit_test(world_goes_first),
        cmocka_unit_test(unfinished_groups),
        cmocka_unit_test(inheritance),
        cmocka_unit_test(many_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
