/* The operations of `self` and of `threads` against their definitions, for sizes of groups and arrays around
 * all the cuts. */
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { kRepeats = 20 };

typedef struct expected {
    int32_t size;
    int64_t n;
    int32_t *max;
    int64_t *sum;
    float *sum_f32;
    unsigned char *all;
} expected;

static void *room(int64_t n, size_t element_bytes) {
    void *memory = malloc((size_t)n * element_bytes + 1); /* + 1: never NULL */
    assert_non_null(memory);
    return memory;
}

static expected expect(int32_t size, int64_t n) {
    expected e = {size, n, room(n, 4), room(n, 8), room(n, 4), room(n * size, 1)};
    for (int64_t i = 0; i < n; i++) {
        e.max[i] = INT32_MIN;
        e.sum[i] = 0;
        e.sum_f32[i] = value_f32(0, i);
        for (int32_t r = 0; r < size; r++) {
            const int32_t value = value_i32(r, i);
            if (value > e.max[i]) e.max[i] = value;
            e.sum[i] += value_i64(r, i);
            if (r > 0) e.sum_f32[i] += value_f32(r, i);
            e.all[(int64_t)r * n + i] = (unsigned char)value;
        }
    }
    return e;
}

static void forget(expected *e) {
    free(e->max);
    free(e->sum);
    free(e->sum_f32);
    free(e->all);
}

static void max_and_sum(rank_run *run, const expected *e) {
    const ll_comm *comm = run->comm;
    int32_t *max = malloc((size_t)e->n * 4 + 1);
    int64_t *sum = malloc((size_t)e->n * 8 + 1);
    for (int64_t i = 0; i < e->n; i++) {
        max[i] = value_i32(run->rank, i);
        sum[i] = value_i64(run->rank, i);
    }
    CHECK(run, comm->max_i32(comm->self, max, e->n, NULL) == LL_STATUS_OK);
    CHECK(run, memcmp(max, e->max, (size_t)e->n * 4) == 0);
    CHECK(run, comm->sum_i64(comm->self, sum, e->n, NULL) == LL_STATUS_OK);
    CHECK(run, memcmp(sum, e->sum, (size_t)e->n * 8) == 0);
    free(max);
    free(sum);
}

static void gather(rank_run *run, const expected *e) {
    const ll_comm *comm = run->comm;
    const size_t bytes = (size_t)e->n;
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)e->size + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)value_i32(run->rank, (int64_t)i);
    all[bytes * (size_t)e->size] = 77;
    CHECK(run, comm->all_gather(comm->self, mine, all, bytes) == LL_STATUS_OK);
    CHECK(run, memcmp(all, e->all, bytes * (size_t)e->size) == 0);
    CHECK(run, all[bytes * (size_t)e->size] == 77);
    free(mine);
    free(all);
}

static void sum_of_f32(rank_run *run, const expected *e) {
    const ll_comm *comm = run->comm;
    float *mine = malloc((size_t)e->n * 4 + 1), *sum = malloc((size_t)e->n * 4 + 1);
    for (int64_t i = 0; i < e->n; i++) mine[i] = value_f32(run->rank, i);
    for (int repeat = 0; repeat < kRepeats; repeat++) {
        memcpy(sum, mine, (size_t)e->n * 4);
        CHECK(run, comm->sum_f32(comm->self, sum, e->n, NULL) == LL_STATUS_OK);
        CHECK(run, memcmp(sum, e->sum_f32, (size_t)e->n * 4) == 0);
    }
    free(mine);
    free(sum);
}

static void all_operations(rank_run *run) {
    const expected *e = run->context;
    max_and_sum(run, e);
    gather(run, e);
    sum_of_f32(run, e);
    CHECK(run, strcmp(run->comm->error(run->comm->self), "") == 0);
}

static void test_size(int32_t size) {
    const int64_t counts[] = {0, 1, size - 1, size, size + 1, 1000, 100003};
    ll_comm comms[kRanksMax];
    make_world(size, 0, comms);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        expected e = expect(size, counts[i]);
        run_checked(comms, size, all_operations, &e);
        forget(&e);
    }
    destroy_all(comms, size);
}

static void sizes(void **unused) {
    (void)unused;
    static const int32_t all[] = {1, 2, 3, 7, 16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_size(all[i]);
}

static void self(void **unused) {
    (void)unused;
    const int64_t counts[] = {0, 1, 1000, 100003};
    ll_comm comm, group;
    assert_int_equal(ll_comm_self(&comm), LL_STATUS_OK);
    assert_int_equal(comm.rank, 0);
    assert_int_equal(comm.size, 1);
    assert_int_equal(comm.debug, 0);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        expected e = expect(1, counts[i]);
        run_checked(&comm, 1, all_operations, &e);
        forget(&e);
    }
    const int32_t zero = 0;
    assert_int_equal(ll_comm_group(&comm, &zero, 1, &group), LL_STATUS_OK);
    assert_int_equal(group.size, 1);
    ll_comm_abort(&comm, "no peer to hear it");
    ll_comm_destroy(&comm);
    int32_t value = 5;
    assert_int_equal(group.max_i32(group.self, &value, 1, NULL), LL_STATUS_OK);
    assert_int_equal(value, 5);
    ll_comm_destroy(&group);
}

/* Special values: -0 stays, infinities and NaN come through on all ranks with the same bits. */
static void special_f32(rank_run *run) {
    const float mine[] = {-0.0f, run->rank ? 1.0f : __builtin_inff(),
                          run->rank == 1 ? __builtin_nanf("") : 1.0f};
    uint32_t *bits = (uint32_t *)run->context + 3 * run->rank;
    float sum[3];
    memcpy(sum, mine, sizeof sum);
    CHECK(run, run->comm->sum_f32(run->comm->self, sum, 3, NULL) == LL_STATUS_OK);
    memcpy(bits, sum, sizeof sum);
    CHECK(run, bits[0] == 0x80000000u);
    CHECK(run, bits[1] == 0x7f800000u);
    CHECK(run, sum[2] != sum[2]);
}

static void special_values(void **unused) {
    (void)unused;
    ll_comm comms[3];
    uint32_t bits[9];
    make_world(3, 0, comms);
    run_checked(comms, 3, special_f32, bits);
    assert_memory_equal(bits, bits + 3, 12);
    assert_memory_equal(bits, bits + 6, 12);
    destroy_all(comms, 3);
}

/* Many small operations with more threads than cores: they sleep instead of spinning, or this takes minutes.
 */
static void many_small(rank_run *run) {
    for (int32_t i = 0; i < 2000; i++) {
        int64_t value = i;
        CHECK(run, run->comm->sum_i64(run->comm->self, &value, 1, NULL) == LL_STATUS_OK);
        CHECK(run, value == (int64_t)i * run->comm->size);
    }
}

static void many_operations(void **unused) {
    (void)unused;
    ll_comm comms[kRanksMax];
    make_world(kRanksMax, 0, comms);
    const double begin = seconds_now();
    run_checked(comms, kRanksMax, many_small, NULL);
    printf("    16 ranks: %.1f us an operation\n", (seconds_now() - begin) * 1e6 / 2000);
    destroy_all(comms, kRanksMax);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(self),
        cmocka_unit_test(sizes),
        cmocka_unit_test(special_values),
        cmocka_unit_test(many_operations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
