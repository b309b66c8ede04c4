/* Bad arguments of every public function of comm.h, communicators that an integrator got wrong, and such that
 * have the required functions only. */
#include "comm/comm_internal.h"
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define TEXT(x)    #x
#define TEXT_OF(x) TEXT(x)
#define MAX_TEXT   TEXT_OF(LL_COMM_RANKS_MAX)

#define REFUSED(call, status, sentence)                                                                      \
    do {                                                                                                     \
        assert_int_equal(call, status);                                                                      \
        assert_string_equal(ll_last_error(), sentence);                                                      \
    } while (0)

#define BAD(call, sentence) REFUSED(call, LL_STATUS_INVALID_ARG, sentence)

static void assert_zeroed(const ll_comm *comm) {
    static const ll_comm zero;
    assert_memory_equal(comm, &zero, sizeof zero);
}

/* ---- A communicator of an integrator: one rank that does nothing -------------------------------- */

static ll_status plain_max(void *self, int32_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_COMM;
}
static ll_status plain_sum(void *self, int64_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_OK;
}
static ll_status plain_gather(void *self, const void *mine, void *all, size_t bytes) {
    (void)self;
    memcpy(all, mine, bytes);
    return LL_STATUS_OK;
}
static ll_status plain_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_OK;
}

static ll_comm plain(void) {
    ll_comm comm = LL_COMM_INIT;
    comm.rank = 2;
    comm.size = 4;
    comm.max_i32 = plain_max;
    comm.sum_i64 = plain_sum;
    comm.all_gather = plain_gather;
    comm.sum_f32 = plain_sum_f32;
    return comm;
}

static int32_t n_destroyed;
static void plain_destroy(void *self) {
    (void)self;
    n_destroyed++;
}
static ll_status wrong_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    (void)self, (void)ranks;
    *group = plain();
    group->rank = 0;
    group->size = n_ranks;
    group->destroy = plain_destroy;
    return LL_STATUS_OK;
}
static ll_status no_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    (void)self, (void)ranks, (void)n_ranks, (void)group;
    return LL_STATUS_MEMORY;
}

/* ---- Tests -------------------------------------------------------------------------------------- */

typedef struct newer_comm {
    ll_comm known;
    int64_t unknown;
} newer_comm;

static void checked_struct(void **unused) {
    (void)unused;
    ll_comm good = plain(), bad;
    assert_int_equal(lli_comm_check(&good, "f: comm"), LL_STATUS_OK);
    BAD(lli_comm_check(NULL, "f: comm"), "f: comm is NULL");
#define BAD_FIELD(assignment, sentence)                                                                      \
    bad = good;                                                                                              \
    bad.assignment;                                                                                          \
    BAD(lli_comm_check(&bad, "f: comm"), sentence)
    bad = good;
    bad.struct_bytes = 0;
    assert_int_equal(lli_comm_check(&bad, "f: comm"), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "f: comm: struct_bytes is 0"));
    bad = good;
    bad.size = LL_COMM_RANKS_MAX + 1;
    assert_int_equal(lli_comm_check(&bad, "f: comm"), LL_STATUS_INVALID_ARG);
    bad.size = LL_COMM_RANKS_MAX;
    assert_int_equal(lli_comm_check(&bad, "f: comm"), LL_STATUS_OK);
    bad.struct_bytes = sizeof bad - sizeof bad.destroy;
    assert_int_equal(lli_comm_check(&bad, "f: comm"), LL_STATUS_INVALID_ARG);
    BAD_FIELD(size = 0, "f: comm.size is 0, want 1 .. " MAX_TEXT);
    BAD_FIELD(rank = -1, "f: comm.rank is -1, want 0 .. 3");
    BAD_FIELD(rank = 4, "f: comm.rank is 4, want 0 .. 3");
    BAD_FIELD(debug = 2, "f: comm.debug is 2, want 0 or 1");
    BAD_FIELD(memory = 3, "f: comm.memory is 3, want an ll_comm_memory");
    BAD_FIELD(memory = -1, "f: comm.memory is -1, want an ll_comm_memory");
    BAD_FIELD(max_i32 = NULL, "f: comm.max_i32 is NULL, want a function");
    BAD_FIELD(sum_i64 = NULL, "f: comm.sum_i64 is NULL, want a function");
    BAD_FIELD(all_gather = NULL, "f: comm.all_gather is NULL, want a function");
    BAD_FIELD(sum_f32 = NULL, "f: comm.sum_f32 is NULL, want a function");
#undef BAD_FIELD
    newer_comm newer = {good, 0};
    newer.known.struct_bytes = sizeof newer;
    assert_int_equal(lli_comm_check(&newer.known, "f: comm"), LL_STATUS_OK);
    newer.unknown = 1;
    assert_int_equal(lli_comm_check(&newer.known, "f: comm"), LL_STATUS_INVALID_ARG);
}

static void making(void **unused) {
    (void)unused;
    ll_comm comms[2];
    BAD(ll_comm_self(NULL), "ll_comm_self: comm is NULL");
    BAD(ll_comm_threads(2, 0, NULL), "ll_comm_threads: comms is NULL");
    BAD(ll_comm_threads(0, 0, comms), "ll_comm_threads: size is 0, want 1 .. " MAX_TEXT);
    assert_int_equal(ll_comm_threads(LL_COMM_RANKS_MAX + 1, 0, comms), LL_STATUS_INVALID_ARG);
    BAD(ll_comm_threads(2, -1, comms), "ll_comm_threads: timeout_ms is -1, want 0 (for 60000) or more");
    assert_zeroed(&comms[0]);
    assert_zeroed(&comms[1]);
    destroy_all(comms, 2);
}

static void group_lists(void **unused) {
    (void)unused;
    ll_comm world[4], group;
    static const int32_t fine[] = {2, 1}, twice[] = {1, 2, 1}, outside[] = {1, 4}, negative[] = {-1, 1},
                         others[] = {0, 2, 3};
    make_world(4, 0, world);
    ll_comm *one = &world[1];
    BAD(ll_comm_group(NULL, fine, 2, &group), "ll_comm_group: world is NULL");
    BAD(ll_comm_group(one, fine, 2, NULL), "ll_comm_group: group is NULL");
    BAD(ll_comm_group(one, fine, 2, one), "ll_comm_group: group is world, want another struct");
    memset(&group, 1, sizeof group);
    BAD(ll_comm_group(one, NULL, 2, &group), "ll_comm_group: ranks is NULL");
    assert_zeroed(&group);
    BAD(ll_comm_group(one, fine, 0, &group), "ll_comm_group: n_ranks is 0, want 1 .. 4");
    BAD(ll_comm_group(one, fine, 5, &group), "ll_comm_group: n_ranks is 5, want 1 .. 4");
    BAD(ll_comm_group(one, twice, 3, &group), "ll_comm_group: ranks[2] is 1, which is in the list already");
    BAD(ll_comm_group(one, outside, 2, &group), "ll_comm_group: ranks[1] is 4, want 0 .. 3");
    BAD(ll_comm_group(one, negative, 2, &group), "ll_comm_group: ranks[0] is -1, want 0 .. 3");
    BAD(ll_comm_group(one, others, 3, &group),
        "ll_comm_group: ranks has 3 of 4 ranks, but not this one, 1 (only members call)");
    assert_zeroed(&group);
    ll_comm broken = *one;
    broken.sum_i64 = NULL;
    BAD(ll_comm_group(&broken, fine, 2, &group), "ll_comm_group: world.sum_i64 is NULL, want a function");
    /* the function itself, past the checks */
    assert_int_equal(one->group(one->self, others, 3, &group), LL_STATUS_INVALID_ARG);
    assert_string_equal(one->error(one->self), "group: rank 1 is not in the list");
    destroy_all(world, 4);
}

static void integrators_groups(void **unused) {
    (void)unused;
    ll_comm world = plain(), group;
    static const int32_t list[] = {0, 2};
    REFUSED(ll_comm_group(&world, list, 2, &group), LL_STATUS_UNSUPPORTED,
            "ll_comm_group: world.group is NULL: this communicator makes no groups");
    world.group = no_group;
    REFUSED(ll_comm_group(&world, list, 2, &group), LL_STATUS_MEMORY, "ll_comm_group: LL_STATUS_MEMORY");
    world.group = wrong_group;
    n_destroyed = 0;
    REFUSED(ll_comm_group(&world, list, 2, &group), LL_STATUS_COMM,
            "ll_comm_group: world.group made rank 0 of 2, want rank 1 of 2");
    assert_int_equal(n_destroyed, 1);
    assert_zeroed(&group);
}

static void leaving(void **unused) {
    (void)unused;
    ll_comm comm = plain(), zero = {0};
    ll_comm_abort(NULL, "x");
    ll_comm_abort(&zero, "x");
    ll_comm_abort(&comm, "x");
    ll_comm_abort(&comm, NULL);
    ll_comm_destroy(NULL);
    ll_comm_destroy(&zero);
    n_destroyed = 0;
    comm.destroy = plain_destroy;
    ll_comm_destroy(&comm);
    assert_zeroed(&comm);
    ll_comm_destroy(&comm);
    assert_int_equal(n_destroyed, 1);
}

static void doubles(void **unused) {
    (void)unused;
    ll_comm inner = plain(), comm;
    ll_comm_double script = {.struct_bytes = sizeof script}, bad;
    ll_comm_counts counts;
    BAD(ll_comm_double_create(NULL, &script, &comm), "ll_comm_double_create: inner is NULL");
    BAD(ll_comm_double_create(&inner, NULL, &comm), "ll_comm_double_create: script is NULL");
    BAD(ll_comm_double_create(&inner, &script, NULL), "ll_comm_double_create: comm is NULL");
    BAD(ll_comm_double_create(&inner, &script, &inner),
        "ll_comm_double_create: comm is inner, want another struct");
#define BAD_SCRIPT(assignment, sentence)                                                                     \
    bad = script;                                                                                            \
    bad.assignment;                                                                                          \
    BAD(ll_comm_double_create(&inner, &bad, &comm), "ll_comm_double_create: script." sentence)
    BAD_SCRIPT(delay_us = -1, "delay_us is -1, want 0 or more");
    BAD_SCRIPT(pieces = -1, "pieces is -1, want 0 .. 65536");
    BAD_SCRIPT(pieces = 65537, "pieces is 65537, want 0 .. 65536");
    BAD_SCRIPT(reverse = 2, "reverse is 2, want 0 or 1");
    BAD_SCRIPT(fail_at = -1, "fail_at is -1, want 0 or more");
    BAD_SCRIPT(stall_at = -1, "stall_at is -1, want 0 or more");
    BAD_SCRIPT(stall_ms = -1, "stall_ms is -1, want 0 .. 9223372036854775");
#undef BAD_SCRIPT
    bad = script;
    bad.struct_bytes = 0;
    assert_int_equal(ll_comm_double_create(&inner, &bad, &comm), LL_STATUS_INVALID_ARG);
    assert_non_null(strstr(ll_last_error(), "ll_comm_double_create: script: struct_bytes is 0"));
    assert_zeroed(&comm);
    inner.sum_f32 = NULL;
    BAD(ll_comm_double_create(&inner, &script, &comm),
        "ll_comm_double_create: inner.sum_f32 is NULL, want a function");
    BAD(ll_comm_double_counts(NULL, &counts), "ll_comm_double_counts: comm is NULL");
    BAD(ll_comm_double_counts(&inner, NULL), "ll_comm_double_counts: counts is NULL");
    BAD(ll_comm_double_counts(&inner, &counts),
        "ll_comm_double_counts: comm is not a communicator of ll_comm_double_create");
}

/* Over a communicator without abort, error, group and destroy. */
static void double_of_the_least(void **unused) {
    (void)unused;
    ll_comm inner = plain(), comm, group;
    const ll_comm_double script = {.struct_bytes = sizeof script, .pieces = 3};
    const int32_t list[] = {2};
    int32_t value = 1;
    inner.debug = 1;
    assert_int_equal(ll_comm_double_create(&inner, &script, &comm), LL_STATUS_OK);
    assert_int_equal(comm.debug, 1);
    ll_comm_abort(&comm, "nobody hears it");
    assert_int_equal(comm.max_i32(comm.self, &value, 1, NULL), LL_STATUS_COMM);
    assert_string_equal(comm.error(comm.self), "");
    assert_int_equal(ll_comm_group(&comm, list, 1, &group), LL_STATUS_UNSUPPORTED);
    ll_comm_destroy(&comm);
}

static void operations_of_self(void **unused) {
    (void)unused;
    ll_comm comm;
    int32_t value = 0;
    assert_int_equal(ll_comm_self(&comm), LL_STATUS_OK);
    assert_int_equal(comm.max_i32(NULL, NULL, 0, NULL), LL_STATUS_OK);
    assert_int_equal(comm.all_gather(NULL, NULL, NULL, 0), LL_STATUS_OK);
    REFUSED(comm.max_i32(NULL, &value, -1, NULL), LL_STATUS_COMM, "max_i32: want values and n >= 0");
    REFUSED(comm.sum_i64(NULL, NULL, 1, NULL), LL_STATUS_COMM, "sum_i64: want values and n >= 0");
    REFUSED(comm.sum_f32(NULL, NULL, 1, NULL), LL_STATUS_COMM, "sum_f32: want values and n >= 0");
    REFUSED(comm.all_gather(NULL, NULL, &value, 1), LL_STATUS_COMM, "all_gather: want mine and all");
    assert_string_equal(comm.error(comm.self), "all_gather: want mine and all");
    const int32_t two[] = {0, 1}, one[] = {1};
    ll_comm group;
    assert_int_equal(comm.group(NULL, two, 2, &group), LL_STATUS_COMM);
    assert_int_equal(comm.group(NULL, one, 1, &group), LL_STATUS_COMM);
    BAD(ll_comm_group(&comm, one, 1, &group), "ll_comm_group: ranks[0] is 1, want 0 .. 0");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checked_struct),
        cmocka_unit_test(making),
        cmocka_unit_test(group_lists),
        cmocka_unit_test(integrators_groups),
        cmocka_unit_test(leaving),
        cmocka_unit_test(doubles),
        cmocka_unit_test(double_of_the_least),
        cmocka_unit_test(operations_of_self),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
