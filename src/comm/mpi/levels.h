/* Which ranks of a group share a host, and whether sums go over two levels. Pure functions of a table without
 * MPI, so that placements of any size can be tested on one machine.
 *
 *   rank of the group   0 1 2 3 4 5        row 0 (A): 0 2 5        column 0: 0 1
 *   host                A B A B B A        row 1 (B): 1 3 4        column 1: 2 3     column 2: 5 4
 *
 * Rows are the ranks of a host, ascending; hosts stand in the order of their first ranks. Column i holds the
 * i-th rank of every host. Ranks are those of the group, never of the world: a strided group has hosts of its
 * own number and size. */
#ifndef LLI_COMM_MPI_LEVELS_H
#define LLI_COMM_MPI_LEVELS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct lli_place {
    int32_t row, column;
} lli_place;

typedef struct lli_levels {
    int32_t n_levels;          /* 2, or 1: one row of all ranks */
    int32_t n_rows, n_columns; /* n_rows * n_columns ranks */
    char sentence[128];        /* "two levels: ...", or "one level: " and why */
} lli_levels;

/* host_of[rank], any labels -> places[rank], for `size` >= 1 ranks. False: no memory. Two levels need equally
 * many ranks on every host: with uneven rows a column would lack ranks. */
bool lli_levels_derive(const uint64_t *host_of, int32_t size, lli_place *places, lli_levels *levels);

#endif
