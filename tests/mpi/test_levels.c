/* The two-level scheme from tables of hosts: rows, columns and the reasons for one level. */
#include "comm/mpi/levels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { kMost = 16 };

/* The members of a group and the hosts of the whole world, by world rank. */
typedef struct placement {
    int32_t n, world[kMost]; /* n members */
    const char *host;        /* host[world rank], one letter */
} placement;

typedef struct derived {
    lli_levels levels;
    lli_place places[kMost];
} derived;

static derived derive(const placement *p) {
    derived d;
    uint64_t host_of[kMost];
    for (int32_t i = 0; i < p->n; i++) host_of[i] = (uint64_t)p->host[p->world[i]] * 0x9e3779b97f4a7c15u;
    assert_true(lli_levels_derive(host_of, p->n, d.places, &d.levels));
    return d;
}

/* "0,4" or "0,4 / 8,12": world ranks by rows or by columns, each in the order in which values are added. */
static void print_groups(const placement *p, const derived *d, bool columns, char *text) {
    const int32_t n_groups = columns ? d->levels.n_columns : d->levels.n_rows;
    const int32_t n_places = columns ? d->levels.n_rows : d->levels.n_columns;
    *text = 0;
    for (int32_t group = 0; group < n_groups; group++) {
        for (int32_t place = 0; place < n_places; place++) {
            for (int32_t i = 0; i < p->n; i++) {
                const int32_t row = columns ? place : group, column = columns ? group : place;
                if (d->places[i].row != row || d->places[i].column != column) continue;
                sprintf(text + strlen(text), "%s%d", place ? "," : group ? " / " : "", p->world[i]);
            }
        }
    }
}

static void assert_groups(const placement *p, const char *rows, const char *columns) {
    const derived d = derive(p);
    char text[256];
    assert_int_equal(d.levels.n_levels, 2);
    assert_int_equal(d.levels.n_rows * d.levels.n_columns, p->n);
    print_groups(p, &d, false, text);
    assert_string_equal(text, rows);
    print_groups(p, &d, true, text);
    assert_string_equal(text, columns);
}

static void assert_one_level(const placement *p, const char *sentence) {
    const derived d = derive(p);
    assert_int_equal(d.levels.n_levels, 1);
    assert_int_equal(d.levels.n_rows, 1);
    assert_int_equal(d.levels.n_columns, p->n);
    assert_string_equal(d.levels.sentence, sentence);
    for (int32_t i = 0; i < p->n; i++) {
        assert_int_equal(d.places[i].row, 0);
        assert_int_equal(d.places[i].column, i);
    }
}

static void strided_group_of_two_hosts(void **unused) {
    (void)unused;
    const placement p = {4, {0, 4, 8, 12}, "AAAAAAAABBBBBBBB"};
    assert_groups(&p, "0,4 / 8,12", "0,8 / 4,12");
    assert_string_equal(derive(&p).levels.sentence, "two levels: 2 hosts of 2 ranks each");
    const placement world = {16, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, "AAAAAAAABBBBBBBB"};
    assert_groups(&world, "0,1,2,3,4,5,6,7 / 8,9,10,11,12,13,14,15",
                  "0,8 / 1,9 / 2,10 / 3,11 / 4,12 / 5,13 / 6,14 / 7,15");
}

static void interleaved_hosts(void **unused) {
    (void)unused;
    const placement p = {8, {0, 1, 2, 3, 4, 5, 6, 7}, "ABABABAB"};
    assert_groups(&p, "0,2,4,6 / 1,3,5,7", "0,1 / 2,3 / 4,5 / 6,7");
    /* Every other rank of interleaved hosts: one host. */
    const placement even = {4, {0, 2, 4, 6}, "ABABABAB"};
    assert_one_level(&even, "one level: all 4 ranks are on one host");
}

/* Hosts are ordered by their first ranks, whatever their labels and however their other ranks lie. */
static void hosts_by_first_rank(void **unused) {
    (void)unused;
    const placement folded = {6, {0, 1, 2, 3, 4, 5}, "ZBZBBZ"};
    assert_groups(&folded, "0,2,5 / 1,3,4", "0,1 / 2,3 / 5,4");
    const placement three = {6, {0, 1, 2, 3, 4, 5}, "CABBAC"};
    assert_groups(&three, "0,5 / 1,4 / 2,3", "0,1,2 / 5,4,3");
    /* New ranks in an order of their own: {12, 8, 4, 0} begins on host B. */
    const placement reversed = {4, {12, 8, 4, 0}, "AAAAAAAABBBBBBBB"};
    assert_groups(&reversed, "12,8 / 4,0", "12,4 / 8,0");
}

static void reasons_for_one_level(void **unused) {
    (void)unused;
    const placement uneven = {4, {0, 1, 2, 3}, "AAAB"};
    assert_one_level(&uneven, "one level: 4 ranks are spread unevenly over 2 hosts, 1 to 3 on each");
    const placement one_host = {4, {0, 1, 2, 3}, "AAAA"};
    assert_one_level(&one_host, "one level: all 4 ranks are on one host");
    const placement one_each = {3, {0, 1, 2}, "ABC"};
    assert_one_level(&one_each, "one level: each of the 3 ranks has a host of its own");
    const placement alone = {1, {2}, "ABC"};
    assert_one_level(&alone, "one level: one rank");
}

/* As many ranks as a group may have, dealt over hosts like cards: no step may be quadratic. */
static void many_ranks(void **unused) {
    (void)unused;
    enum { kRanks = 65536, kHosts = 32768 };
    uint64_t *host_of = malloc(kRanks * sizeof *host_of);
    lli_place *places = malloc(kRanks * sizeof *places);
    assert_true(host_of && places);
    for (int32_t i = 0; i < kRanks; i++) host_of[i] = (uint64_t)(i % kHosts) * 0x9e3779b97f4a7c15u;
    lli_levels levels;
    assert_true(lli_levels_derive(host_of, kRanks, places, &levels));
    assert_string_equal(levels.sentence, "two levels: 32768 hosts of 2 ranks each");
    for (int32_t i = 0; i < kRanks; i++) {
        assert_int_equal(places[i].row, i % kHosts);
        assert_int_equal(places[i].column, i / kHosts);
    }
    free(host_of);
    free(places);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strided_group_of_two_hosts),
        cmocka_unit_test(interleaved_hosts),
        cmocka_unit_test(hosts_by_first_rank),
        cmocka_unit_test(reasons_for_one_level),
        cmocka_unit_test(many_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
