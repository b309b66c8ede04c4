/* test_operations [LEVELS]: every operation over all ranks that mpirun started, against what each rank works
 * out by itself; arrays on both sides of the borders between pieces. LEVELS: the sentence on the levels that
 * must have been chosen. */
#define _POSIX_C_SOURCE 200809L /* nanosleep, stat */
#include "comm/mpi/levels.h"
#include "mpi_test.h"

#include <fenv.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The library moves 4 MiB at a time. */
enum { kPieceBytes = 4 << 20, kLimitMs = 60000, kRepeats = 20 };

int32_t mpi_test_rank;
int mpi_test_failures;

static void check_max_i32(const ll_comm *comm, int64_t n) {
    int32_t *values = test_array((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = (int32_t)test_value(comm->rank, i);
    CHECK(comm->max_i32(comm->self, values, n, NULL) == LL_STATUS_OK, "n %lld: %s", (long long)n,
          comm->error(comm->self));
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t want = INT32_MIN;
        for (int32_t rank = 0; rank < comm->size; rank++) {
            const int32_t value = (int32_t)test_value(rank, i);
            if (value > want) want = value;
        }
        wrong += values[i] != want;
    }
    CHECK(!wrong, "max_i32, n %lld: %lld wrong", (long long)n, (long long)wrong);
    free(values);
}

/* Below 2^57: 64 ranks cannot wrap. */
static int64_t sum_value(int32_t rank, int64_t i) {
    return (int64_t)(test_value(rank, i) >> 6) - ((int64_t)1 << 57);
}

static void check_sum_i64(const ll_comm *comm, int64_t n) {
    int64_t *values = test_array((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = sum_value(comm->rank, i);
    CHECK(comm->sum_i64(comm->self, values, n, NULL) == LL_STATUS_OK, "n %lld: %s", (long long)n,
          comm->error(comm->self));
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t want = 0;
        for (int32_t rank = 0; rank < comm->size; rank++) want += sum_value(rank, i);
        wrong += values[i] != want;
    }
    CHECK(!wrong, "sum_i64, n %lld: %lld wrong", (long long)n, (long long)wrong);
    free(values);
}

static void check_all_gather(const ll_comm *comm, size_t bytes) {
    unsigned char *mine = test_array(bytes), *all = test_array(bytes * (size_t)comm->size);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)test_value(comm->rank, (int64_t)i);
    CHECK(comm->all_gather(comm->self, mine, all, bytes) == LL_STATUS_OK, "bytes %zu: %s", bytes,
          comm->error(comm->self));
    int64_t wrong = 0;
    for (int32_t rank = 0; rank < comm->size; rank++) {
        for (size_t i = 0; i < bytes; i++)
            wrong += all[(size_t)rank * bytes + i] != (unsigned char)test_value(rank, (int64_t)i);
    }
    CHECK(!wrong, "all_gather, %zu bytes: %lld wrong", bytes, (long long)wrong);
    free(mine);
    free(all);
}

/* Magnitudes from 2^-8 to 2^7 of both signs, so that nearly every addition rounds and no order gives the sum
 * of another; every 16th element is -0 on all ranks. */
static float grad_value(int32_t rank, int64_t i) {
    const uint64_t bits = test_value(rank, i);
    if (i % 16 == 15) return -0.0f;
    const float magnitude = (float)(1 << (bits >> 8 & 15)) / 256.0f;
    return (bits & 1 ? -magnitude : magnitude) * (1.0f + (float)(bits >> 40) / 16777216.0f);
}

/* What the header promises: rows ascending, then the rows' sums ascending. */
static float wanted_sum(const int32_t *rank_at, const lli_levels *levels, int64_t i) {
    float sum = 0;
    for (int32_t row = 0; row < levels->n_rows; row++) {
        const int32_t *ranks = rank_at + (ptrdiff_t)row * levels->n_columns;
        float row_sum = grad_value(ranks[0], i);
        for (int32_t column = 1; column < levels->n_columns; column++)
            row_sum += grad_value(ranks[column], i);
        sum = row ? sum + row_sum : row_sum;
    }
    return sum;
}

static void check_sum_f32(const ll_comm *comm, const int32_t *rank_at, const lli_levels *levels, int64_t n,
                          int repeats) {
    float *values = test_array((size_t)n * sizeof *values), *want = test_array((size_t)n * sizeof *want);
    for (int64_t i = 0; i < n; i++) want[i] = wanted_sum(rank_at, levels, i);
    for (int repeat = 0; repeat < repeats; repeat++) {
        for (int64_t i = 0; i < n; i++) values[i] = grad_value(comm->rank, i);
        /* Rounding modes of the callers must not reach the sum. */
        if (comm->rank % 2 == repeat % 2) fesetround(FE_UPWARD);
        const ll_status status = comm->sum_f32(comm->self, values, n, NULL);
        fesetround(FE_TONEAREST);
        CHECK(status == LL_STATUS_OK, "n %lld: %s", (long long)n, comm->error(comm->self));
        int64_t wrong = 0, first = -1;
        for (int64_t i = 0; i < n; i++) {
            if (memcmp(&values[i], &want[i], sizeof *want) == 0) continue;
            if (!wrong++) first = i;
        }
        CHECK(!wrong, "sum_f32, n %lld, repeat %d: %lld wrong, [%lld] is %a, want %a", (long long)n, repeat,
              (long long)wrong, (long long)first, (double)values[first], (double)want[first]);
    }
    free(values);
    free(want);
}

/* rank_at[row][column] from what this program itself says of hosts. */
static void find_levels(const ll_comm *comm, int32_t *rank_at, lli_levels *levels) {
    char mine[64] = "";
    const char *given = getenv("LL_COMM_HOST");
    struct stat net;
    if (given) {
        snprintf(mine, sizeof mine, "%s", given);
    } else if (stat("/proc/self/ns/net", &net) == 0) {
        snprintf(mine, sizeof mine, "%ju", (uintmax_t)net.st_ino);
    }
    char *all = test_array((size_t)comm->size * sizeof mine);
    uint64_t *host_of = test_array((size_t)comm->size * sizeof *host_of);
    lli_place *places = test_array((size_t)comm->size * sizeof *places);
    comm->all_gather(comm->self, mine, all, sizeof mine);
    for (int32_t rank = 0; rank < comm->size; rank++) {
        int32_t same = 0;
        while (strcmp(all + (size_t)same * sizeof mine, all + (size_t)rank * sizeof mine) != 0) same++;
        host_of[rank] = (uint64_t)same;
    }
    CHECK(lli_levels_derive(host_of, comm->size, places, levels), "no memory");
    for (int32_t rank = 0; rank < comm->size; rank++)
        rank_at[places[rank].row * levels->n_columns + places[rank].column] = rank;
    free(all);
    free(host_of);
    free(places);
}

static void check_operations(const ll_comm *comm, const int32_t *rank_at, const lli_levels *levels) {
    const int64_t i32s = kPieceBytes / 4, i64s = kPieceBytes / 8, f32s = i32s / comm->size * comm->size;
    const int64_t sizes[] = {0, 1, 2, 3, 5, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_max_i32(comm, sizes[i]);
        check_sum_i64(comm, sizes[i]);
        check_all_gather(comm, (size_t)sizes[i]);
        check_sum_f32(comm, rank_at, levels, sizes[i], kRepeats);
    }
    const size_t slot = kPieceBytes / (size_t)comm->size;
    for (int64_t more = -1; more <= 1; more++) {
        check_max_i32(comm, i32s + more);
        check_sum_i64(comm, i64s + more);
        check_all_gather(comm, slot + (size_t)more);
        check_sum_f32(comm, rank_at, levels, f32s + more, 2);
    }
    check_max_i32(comm, 2 * i32s + 77);
    check_sum_i64(comm, 2 * i64s + 77);
    check_all_gather(comm, 2 * slot + 77);
    check_sum_f32(comm, rank_at, levels, 2 * f32s + 77, kRepeats);
    CHECK(strcmp(comm->error(comm->self), "") == 0, "error says %s", comm->error(comm->self));
}

static void check_arguments(void) {
    char why[200] = "";
    ll_comm comm = LL_COMM_INIT;
    CHECK(ll_comm_mpi_open(-1, &comm, why, sizeof why) == LL_STATUS_INVALID_ARG, "%s", why);
    CHECK(strstr(why, "timeout_ms is -1"), "%s", why);
    CHECK(ll_comm_mpi_open(0, NULL, why, sizeof why) == LL_STATUS_INVALID_ARG, "%s", why);
    CHECK(ll_comm_mpi_create(NULL, 0, &comm, why, sizeof why) == LL_STATUS_INVALID_ARG, "%s", why);
    comm.struct_bytes = 8;
    CHECK(ll_comm_mpi_open(0, &comm, NULL, 0) == LL_STATUS_INVALID_ARG, "struct_bytes 8 was taken");
    CHECK(ll_comm_mpi_describe(&comm, why, sizeof why) == LL_STATUS_INVALID_ARG, "a stranger was described");
}

int main(int argc, char **argv) {
    check_arguments();
    ll_comm comm = LL_COMM_INIT;
    char text[512] = "";
    if (ll_comm_mpi_open(kLimitMs, &comm, text, sizeof text) != LL_STATUS_OK) {
        fprintf(stderr, "ll_comm_mpi_open: %s\n", text);
        return 2;
    }
    mpi_test_rank = comm.rank;
    CHECK(comm.struct_bytes == sizeof comm && comm.debug == 0 && comm.memory == LL_COMM_MEMORY_HOST,
          "debug %d", comm.debug);
    CHECK(ll_comm_mpi_describe(&comm, text, sizeof text) == LL_STATUS_OK, "no description");
    if (comm.rank == 0) printf("%d ranks, %s\n", comm.size, text);
    int32_t *rank_at = test_array((size_t)comm.size * sizeof *rank_at);
    lli_levels levels;
    find_levels(&comm, rank_at, &levels);
    CHECK(strcmp(text, levels.sentence) == 0, "\"%s\", want \"%s\"", text, levels.sentence);
    if (argc > 1) CHECK(strcmp(text, argv[1]) == 0, "\"%s\", want \"%s\"", text, argv[1]);
    check_operations(&comm, rank_at, &levels);
    free(rank_at);
    comm.destroy(comm.self);
    return mpi_test_failures ? 1 : 0;
}
