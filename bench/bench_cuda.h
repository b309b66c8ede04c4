/* What the benchmarks on a GPU share. */
#ifndef LL_BENCH_BENCH_CUDA_H
#define LL_BENCH_BENCH_CUDA_H

#include <logitless/logitless.h>

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const int check_status = (int)(call);                                                                \
        if (check_status) {                                                                                  \
            fprintf(stderr, "%s:%d: %s gave %d (%s)\n", __FILE__, __LINE__, #call, check_status,             \
                    ll_last_error());                                                                        \
            exit(3);                                                                                         \
        }                                                                                                    \
    } while (0)

static inline void *take(size_t bytes) {
    void *data = NULL;
    CHECK(cudaMalloc(&data, bytes ? bytes : 1));
    return data;
}

/* A matrix of random bf16 is a stretch of an odd length over and over, so that no two rows are equal. */
enum { kStretch = 4194301 };

static inline uint64_t random_bits(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

/* Nearly normal, mean 0, standard deviation `scale`. The caller frees it. */
static inline uint16_t *make_stretch(float scale, uint64_t seed) {
    uint16_t *stretch = malloc(kStretch * sizeof *stretch);
    for (int64_t i = 0; i < kStretch; i++) {
        const uint64_t bits = random_bits(&seed);
        float sum = 0, value;
        uint32_t word;
        for (int part = 0; part < 4; part++) sum += (float)(bits >> (16 * part) & 0xffffu);
        value = (sum - 131070.0f) / 65536.0f * 1.7320508f * scale;
        memcpy(&word, &value, sizeof word);
        stretch[i] = (uint16_t)(word >> 16);
    }
    return stretch;
}

/* data[0, count) = elements [first, first + count) of the matrix. */
static inline void fill(uint16_t *data, int64_t first, int64_t count, const uint16_t *stretch) {
    for (int64_t at = 0; at < count;) {
        const int64_t offset = (first + at) % kStretch, left = kStretch - offset;
        const int64_t n = count - at < left ? count - at : left;
        CHECK(cudaMemcpy(data + at, stretch + offset, (size_t)n * 2, cudaMemcpyHostToDevice));
        at += n;
    }
}

/* Of two events, once the later one has come. */
static inline double elapsed_ms(cudaEvent_t begin, cudaEvent_t end) {
    float ms = 0;
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return (double)ms;
}

static inline int by_value(const void *left, const void *right) {
    const double p = *(const double *)left, q = *(const double *)right;
    return (p > q) - (p < q);
}

static inline double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

#endif
