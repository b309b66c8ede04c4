/* Ranks that want different things, do not come, leave or abort: one sentence on every rank, soon, and for
 * good. */
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { kValues = 8, kLimitMs = 200 };

/* Rank `odd` does `other`, all others `usual`. */
typedef enum wish {
    MAX_8,
    MAX_7,
    SUM_8,
    SUM_F32_8,
    GATHER_8,
    GATHER_9,
    MAX_NULL,
    MAX_NEGATIVE,
    MAX_STREAM
} wish;
typedef struct quarrel {
    wish usual, other;
    const char *sentence; /* on all ranks */
} quarrel;

enum { kOdd = 2 };

static ll_status do_wish(const ll_comm *comm, wish what, void *values, void *all) {
    switch (what) {
    case MAX_8:
        return comm->max_i32(comm->self, values, 8, NULL);
    case MAX_7:
        return comm->max_i32(comm->self, values, 7, NULL);
    case SUM_8:
        return comm->sum_i64(comm->self, values, 8, NULL);
    case SUM_F32_8:
        return comm->sum_f32(comm->self, values, 8, NULL);
    case GATHER_8:
        return comm->all_gather(comm->self, values, all, 8);
    case GATHER_9:
        return comm->all_gather(comm->self, values, all, 9);
    case MAX_NULL:
        return comm->max_i32(comm->self, NULL, 8, NULL);
    case MAX_NEGATIVE:
        return comm->max_i32(comm->self, values, -8, NULL);
    case MAX_STREAM:
        return comm->max_i32(comm->self, values, 8, (ll_stream)values);
    }
    return LL_STATUS_INTERNAL;
}

static void quarrel_rank(rank_run *run) {
    const quarrel *q = run->context;
    int64_t values[kValues], all[4 * kValues], values_before[kValues], all_before[4 * kValues];
    for (int i = 0; i < kValues; i++) values[i] = value_i64(run->rank, i);
    for (int i = 0; i < 4 * kValues; i++) all[i] = value_i64(run->rank, 100 + i);
    memcpy(values_before, values, sizeof values);
    memcpy(all_before, all, sizeof all);
    note_status(run, do_wish(run->comm, run->rank == kOdd ? q->other : q->usual, values, all));
    CHECK(run, run->status == LL_STATUS_COMM);
    CHECK(run, strcmp(run->sentence, q->sentence) == 0);
    CHECK(run, strcmp(ll_last_error(), q->sentence) == 0);
    CHECK(run, memcmp(values, values_before, sizeof values) == 0);
    CHECK(run, memcmp(all, all_before, sizeof all) == 0);
    /* dead: at once and with the same sentence, whatever is asked now */
    CHECK(run, do_wish(run->comm, GATHER_8, values, all) == LL_STATUS_COMM);
    CHECK(run, strcmp(run->comm->error(run->comm->self), q->sentence) == 0);
    CHECK(run, memcmp(all, all_before, sizeof all) == 0);
}

#define DIFFER "ranks of a group of 4 want different things: ranks 0, 1, 3: "

static void quarrels(void **unused) {
    (void)unused;
    static const quarrel all[] = {
        {MAX_8, MAX_7, DIFFER "max_i32 of 8; rank 2: max_i32 of 7"},
        {MAX_8, SUM_8, DIFFER "max_i32 of 8; rank 2: sum_i64 of 8"},
        {SUM_8, SUM_F32_8, DIFFER "sum_i64 of 8; rank 2: sum_f32 of 8"},
        {SUM_F32_8, GATHER_8, DIFFER "sum_f32 of 8; rank 2: all_gather of 8 bytes"},
        {GATHER_8, GATHER_9, DIFFER "all_gather of 8 bytes; rank 2: all_gather of 9 bytes"},
        {MAX_8, MAX_NULL, "max_i32: rank 2 of 4: values is NULL, want n of them"},
        {MAX_8, MAX_NEGATIVE, "max_i32: rank 2 of 4: n is negative, want 0 or more"},
        {MAX_8, MAX_STREAM,
         "max_i32: rank 2 of 4: stream is set, want NULL: ranks of one process meet in host memory"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ll_comm comms[4];
        quarrel q = all[i];
        make_world(4, 0, comms); /* 60 s: only a verdict, no time limit, ends this soon */
        const double begin = seconds_now();
        run_checked(comms, 4, quarrel_rank, &q);
        assert_true(seconds_now() - begin < 10.0);
        destroy_all(comms, 4);
    }
}

static void each_its_own(rank_run *run) {
    int32_t values[kRanksMax] = {0};
    note_status(run, run->comm->max_i32(run->comm->self, values, run->rank, NULL));
}

/* More wishes than a sentence holds. */
static void many_wishes(void **unused) {
    (void)unused;
    ll_comm comms[kRanksMax];
    rank_run runs[kRanksMax];
    make_world(kRanksMax, 0, comms);
    run_ranks(comms, kRanksMax, each_its_own, NULL, runs);
    for (int32_t rank = 0; rank < kRanksMax; rank++) {
        assert_int_equal(runs[rank].status, LL_STATUS_COMM);
        assert_string_equal(
            runs[rank].sentence,
            "ranks of a group of 16 want different things: rank 0: max_i32 of 0; rank 1: max_i32 "
            "of 1; rank 2: max_i32 of 2; and more");
    }
    destroy_all(comms, kRanksMax);
}

/* ---- Ranks that do not come --------------------------------------------------------------------- */

typedef struct absence {
    int32_t first_absent; /* it and all above do not come */
    wish what;
} absence;

static void absent_rank(rank_run *run) {
    const absence *a = run->context;
    int64_t values[kValues] = {1, 2, 3, 4, 5, 6, 7, 8}, all[kRanksMax * kValues] = {0};
    if (run->rank >= a->first_absent) return;
    note_status(run, do_wish(run->comm, a->what, values, all));
    CHECK(run, values[0] == 1 && values[7] == 8 && all[0] == 0);
}

static void test_absence(int32_t size, int32_t first_absent, wish what, const char *before,
                         const char *after) {
    ll_comm comms[kRanksMax];
    rank_run runs[kRanksMax];
    absence a = {first_absent, what};
    make_world(size, kLimitMs, comms);
    run_ranks(comms, size, absent_rank, &a, runs);
    for (int32_t rank = 0; rank < first_absent; rank++) {
        assert_int_equal(runs[rank].bad_line, 0);
        assert_int_equal(runs[rank].status, LL_STATUS_COMM);
        assert_string_equal(runs[rank].sentence, runs[0].sentence);
        assert_true(runs[rank].seconds < 2.0);
    }
    assert_int_equal(strncmp(runs[0].sentence, before, strlen(before)), 0);
    assert_non_null(strstr(runs[0].sentence, after));
    /* whoever comes later learns it at once */
    int32_t value = 3;
    const double begin = seconds_now();
    ll_comm *late = &comms[size - 1];
    assert_int_equal(late->max_i32(late->self, &value, 1, NULL), LL_STATUS_COMM);
    assert_true(seconds_now() - begin < 0.1);
    assert_string_equal(late->error(late->self), runs[0].sentence);
    assert_int_equal(value, 3);
    destroy_all(comms, size);
}

static void absences(void **unused) {
    (void)unused;
    test_absence(2, 1, SUM_8, "sum_i64: rank 0 waited 200 ms for rank 1 of 2", "");
    test_absence(4, 2, MAX_8, "max_i32: rank ", " waited 200 ms for ranks 2, 3 of 4");
    test_absence(7, 6, SUM_F32_8, "sum_f32: rank ", " waited 200 ms for rank 6 of 7");
    test_absence(16, 1, GATHER_8,
                 "all_gather: rank 0 waited 200 ms for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 7 more of 16", "");
}

static void comes_late(rank_run *run) {
    int64_t values[kValues] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (run->rank == 1) sleep_ms(100);
    note_status(run, do_wish(run->comm, SUM_8, values, NULL));
    CHECK(run, run->status == LL_STATUS_OK && values[3] == 3);
}

static void within_the_limit(void **unused) {
    (void)unused;
    ll_comm comms[3];
    make_world(3, 5000, comms);
    run_checked(comms, 3, comes_late, NULL);
    destroy_all(comms, 3);
}

/* ---- Abort and destroyed ends ------------------------------------------------------------------- */

static void waits_for_abort(rank_run *run) {
    int64_t values[kValues] = {0};
    if (run->rank == kOdd) {
        sleep_ms(50);
        ll_comm_abort(run->comm, run->context);
        CHECK(run, strcmp(run->comm->error(run->comm->self), "") == 0); /* no operation has failed here */
    }
    note_status(run, do_wish(run->comm, SUM_8, values, NULL));
    CHECK(run, run->status == LL_STATUS_COMM);
    ll_comm_abort(run->comm, "a second sentence changes nothing");
    CHECK(run, do_wish(run->comm, SUM_8, values, NULL) == LL_STATUS_COMM);
    CHECK(run, strcmp(run->sentence, run->context ? run->context : "") == 0);
    CHECK(run, strcmp(run->comm->error(run->comm->self), run->sentence) == 0);
}

static void aborts(void **unused) {
    (void)unused;
    char sentence[] = "rank 2 found that its 3% of w are not there: %s%n";
    for (int with = 0; with < 2; with++) {
        ll_comm comms[7];
        const double begin = seconds_now();
        make_world(7, 0, comms);
        run_checked(comms, 7, waits_for_abort, with ? sentence : NULL);
        assert_true(seconds_now() - begin < 10.0);
        destroy_all(comms, 7);
    }
}

typedef struct loop {
    int64_t abort_after; /* operations; 0: rank 1 does not */
    int64_t operations[4];
} loop;

static void loops_until_dead(rank_run *run) {
    loop *l = run->context;
    int64_t value = 0;
    for (;;) {
        int32_t values[40];
        for (int i = 0; i < 40; i++) values[i] = run->rank;
        const ll_status status = run->comm->max_i32(run->comm->self, values, 40, NULL);
        if (status != LL_STATUS_OK) {
            note_status(run, status);
            break;
        }
        CHECK(run, values[0] == 3 && values[39] == 3);
        if (++value == l->abort_after && run->rank == 1) ll_comm_abort(run->comm, "enough");
    }
    l->operations[run->rank] = value;
}

/* An abort at any moment leaves no operation done on some ranks only. */
static void abort_while_working(void **unused) {
    (void)unused;
    for (int round = 0; round < 100; round++) {
        ll_comm comms[4];
        loop l = {20, {0}};
        rank_run runs[4];
        make_world(4, 0, comms);
        run_ranks(comms, 4, loops_until_dead, &l, runs);
        for (int32_t rank = 0; rank < 4; rank++) {
            assert_int_equal(runs[rank].bad_line, 0);
            assert_int_equal(runs[rank].status, LL_STATUS_COMM);
            assert_string_equal(runs[rank].sentence, "enough");
            assert_int_equal(l.operations[rank], l.operations[0]);
        }
        assert_true(l.operations[0] >= 20);
        destroy_all(comms, 4);
    }
}

/* An abort from a thread that does nothing else, at a random moment. */
static void disturbed(rank_run *run) {
    if (run->rank < 4) {
        loops_until_dead(run);
        return;
    }
    sleep_ms(1);
    ll_comm_abort(run->comm, "from outside");
}

static void abort_from_outside(void **unused) {
    (void)unused;
    for (int round = 0; round < 100; round++) {
        ll_comm comms[5];
        loop l = {0, {0}};
        rank_run runs[5];
        make_world(4, 0, comms);
        comms[4] = comms[round % 4]; /* the same end: abort may come at any time */
        comms[4].rank = 4;
        run_ranks(comms, 5, disturbed, &l, runs);
        for (int32_t rank = 0; rank < 4; rank++) {
            assert_int_equal(runs[rank].bad_line, 0);
            assert_string_equal(runs[rank].sentence, "from outside");
            assert_int_equal(l.operations[rank], l.operations[0]);
        }
        destroy_all(comms, 4);
    }
}

static void leaves(rank_run *run) {
    int64_t values[kValues] = {0};
    note_status(run,
                do_wish(run->comm, SUM_8, values, NULL)); /* its last one: peers may still wake from it */
    CHECK(run, run->status == LL_STATUS_OK);
    if (run->rank == kOdd) {
        ll_comm_destroy(run->comm);
        return;
    }
    note_status(run, do_wish(run->comm, SUM_8, values, NULL));
    CHECK(run, run->status == LL_STATUS_COMM);
    CHECK(run, strstr(run->sentence, " waits for rank 2 of 4, which destroyed its end of the group") != NULL);
}

static void destroyed_end(void **unused) {
    (void)unused;
    for (int round = 0; round < 50; round++) {
        ll_comm comms[4];
        make_world(4, 0, comms);
        const double begin = seconds_now();
        run_checked(comms, 4, leaves, NULL);
        assert_true(seconds_now() - begin < 10.0);
        destroy_all(comms, 4);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quarrels),
        cmocka_unit_test(many_wishes),
        cmocka_unit_test(absences),
        cmocka_unit_test(within_the_limit),
        cmocka_unit_test(aborts),
        cmocka_unit_test(abort_while_working),
        cmocka_unit_test(abort_from_outside),
        cmocka_unit_test(destroyed_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
