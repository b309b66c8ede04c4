/* What the programs that run under mpirun share: checks that count and say which rank failed. cmocka would
 * leave a test at its first failure, and the other ranks would wait for it. */
#ifndef LLI_TESTS_MPI_TEST_H
#define LLI_TESTS_MPI_TEST_H

#include <logitless/comm_mpi.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

extern int32_t mpi_test_rank;
extern int mpi_test_failures;

#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            mpi_test_failures++;                                                                             \
            fprintf(stderr, "FAIL rank %d, %s:%d: %s: ", mpi_test_rank, __FILE__, __LINE__, #condition);     \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fprintf(stderr, "\n");                                                                           \
        }                                                                                                    \
    } while (0)

static inline int64_t test_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline void test_sleep_ms(int64_t ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* One pseudo-random number for each (rank, i): every rank can work out what all others hand in. */
static inline uint64_t test_value(int64_t rank, int64_t i) {
    uint64_t z = (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)i * 0xd1b54a32d192ed03u + 1;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline void *test_array(size_t bytes) {
    void *array = malloc(bytes ? bytes : 1);
    if (!array) {
        fprintf(stderr, "rank %d: no memory for %zu bytes\n", mpi_test_rank, bytes);
        exit(2);
    }
    return array;
}

#endif
