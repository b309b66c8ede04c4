#include "comm/mpi/levels.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct labelled {
    uint64_t label;
    int32_t rank;
} labelled;

static int by_label_then_rank(const void *a, const void *b) {
    const labelled *x = a, *y = b;
    if (x->label != y->label) return x->label < y->label ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* What the table says of its hosts. */
typedef struct host_counts {
    int32_t n_hosts, least, most; /* ranks on the emptiest and on the fullest host */
} host_counts;

/* places[rank].row = the first rank on the host of `rank`, .column = how many of its ranks come before. */
static host_counts find_hosts(const labelled *sorted, int32_t size, lli_place *places) {
    host_counts counts = {0, size, 0};
    for (int32_t begin = 0, end; begin < size; begin = end) {
        for (end = begin; end < size && sorted[end].label == sorted[begin].label; end++)
            places[sorted[end].rank] = (lli_place){sorted[begin].rank, end - begin};
        if (end - begin < counts.least) counts.least = end - begin;
        if (end - begin > counts.most) counts.most = end - begin;
        counts.n_hosts++;
    }
    return counts;
}

/* Rows are numbered by their first ranks; a first rank comes before all others of its row. */
static void number_rows(lli_place *places, int32_t size) {
    int32_t n_rows = 0;
    for (int32_t rank = 0; rank < size; rank++)
        places[rank].row = places[rank].row == rank ? n_rows++ : places[places[rank].row].row;
}

static void one_level(int32_t size, lli_place *places, lli_levels *levels) {
    levels->n_levels = 1;
    levels->n_rows = 1;
    levels->n_columns = size;
    for (int32_t rank = 0; rank < size; rank++) places[rank] = (lli_place){0, rank};
}

bool lli_levels_derive(const uint64_t *host_of, int32_t size, lli_place *places, lli_levels *levels) {
    labelled *sorted = malloc((size_t)size * sizeof *sorted);
    if (!sorted) return false;
    for (int32_t rank = 0; rank < size; rank++) sorted[rank] = (labelled){host_of[rank], rank};
    qsort(sorted, (size_t)size, sizeof *sorted, by_label_then_rank);
    const host_counts counts = find_hosts(sorted, size, places);
    free(sorted);

    char *text = levels->sentence;
    const size_t bytes = sizeof levels->sentence;
    if (size == 1) {
        snprintf(text, bytes, "one level: one rank");
    } else if (counts.n_hosts == 1) {
        snprintf(text, bytes, "one level: all %d ranks are on one host", size);
    } else if (counts.most == 1) {
        snprintf(text, bytes, "one level: each of the %d ranks has a host of its own", size);
    } else if (counts.least != counts.most) {
        snprintf(text, bytes, "one level: %d ranks are spread unevenly over %d hosts, %d to %d on each", size,
                 counts.n_hosts, counts.least, counts.most);
    } else {
        levels->n_levels = 2;
        levels->n_rows = counts.n_hosts;
        levels->n_columns = counts.most;
        snprintf(text, bytes, "two levels: %d hosts of %d ranks each", counts.n_hosts, counts.most);
        number_rows(places, size);
        return true;
    }
    one_level(size, places, levels);
    return true;
}
