/* test_failures: ranks that abort or stay away, in groups of a program that starts and ends MPI itself; no
 * operation may outlast its limit, whatever the others do.
 * test_failures killed FOLDER: rank 1 is killed (SIGKILL) between two operations; every survivor writes the
 * status, milliseconds and sentence of its next operation to FOLDER/<rank>. */
#define _POSIX_C_SOURCE 200809L /* kill, nanosleep */
#include "mpi_test.h"

#include <mpi.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { kLongMs = 60000, kLimitMs = 800, kAwayMs = 2400, kSoonMs = 20000, kKilledMs = 2000 };

int32_t mpi_test_rank;
int mpi_test_failures;

static ll_comm make(MPI_Comm over, int32_t timeout_ms) {
    ll_comm comm = LL_COMM_INIT;
    char why[512] = "";
    if (ll_comm_mpi_create(&over, timeout_ms, &comm, why, sizeof why) != LL_STATUS_OK) {
        fprintf(stderr, "FAIL rank %d: ll_comm_mpi_create: %s\n", mpi_test_rank, why);
        exit(1);
    }
    return comm;
}

/* Operation 0 .. 4 on an array of its own that is freed at once: MPI must not touch it afterwards. */
static ll_status operate(const ll_comm *comm, int operation) {
    enum { kElems = 3000 };
    void *values = calloc(kElems, 8), *all = calloc((size_t)comm->size * kElems, 8);
    int32_t *ranks = test_array((size_t)comm->size * sizeof *ranks);
    ll_comm group = LL_COMM_INIT;
    ll_status status = LL_STATUS_INTERNAL;
    for (int32_t i = 0; i < comm->size; i++) ranks[i] = i;
    switch (operation) {
    case 0:
        status = comm->max_i32(comm->self, values, kElems, NULL);
        break;
    case 1:
        status = comm->sum_i64(comm->self, values, kElems, NULL);
        break;
    case 2:
        status = comm->all_gather(comm->self, values, all, (size_t)kElems * 8);
        break;
    case 3:
        status = comm->sum_f32(comm->self, values, kElems, NULL);
        break;
    case 4:
        status = comm->group(comm->self, ranks, comm->size, &group);
        if (status == LL_STATUS_OK) group.destroy(group.self);
        break;
    }
    free(values);
    free(all);
    free(ranks);
    return status;
}

static const char *const operation_names[] = {"max_i32", "sum_i64", "all_gather", "sum_f32", "group"};
enum { kOperations = 5 };

/* Every operation fails at once with the sentence that is there. */
static void check_dead(const ll_comm *comm) {
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", comm->error(comm->self));
    for (int operation = 0; operation < kOperations; operation++) {
        const int64_t start = test_now_ms();
        const ll_status status = operate(comm, operation);
        CHECK(status == LL_STATUS_COMM, "%s: status %d", operation_names[operation], status);
        CHECK(test_now_ms() - start < kSoonMs, "%s waited on a dead group", operation_names[operation]);
        CHECK(strcmp(comm->error(comm->self), sentence) == 0, "the sentence became \"%s\"",
              comm->error(comm->self));
    }
    comm->abort(comm->self, "a second abort changes nothing");
    CHECK(strcmp(comm->error(comm->self), sentence) == 0, "the sentence became \"%s\"",
          comm->error(comm->self));
}

/* The last rank aborts while the others wait in an operation of a minute's limit. */
static void abort_wakes(const ll_comm *world, int operation, const char *sentence) {
    ll_comm comm = make(MPI_COMM_WORLD, kLongMs);
    const int64_t start = test_now_ms();
    if (comm.rank == comm.size - 1) {
        test_sleep_ms(300);
        comm.abort(comm.self, sentence);
        CHECK(operate(&comm, operation) == LL_STATUS_COMM, "the rank that aborted goes on");
    } else {
        CHECK(operate(&comm, operation) == LL_STATUS_COMM, "%s was not aborted", operation_names[operation]);
    }
    CHECK(test_now_ms() - start < kSoonMs, "%s waited for its limit", operation_names[operation]);
    CHECK(strcmp(comm.error(comm.self), sentence ? sentence : "") == 0, "\"%s\"", comm.error(comm.self));
    check_dead(&comm);
    comm.destroy(comm.self);
    CHECK(operate(world, 1) == LL_STATUS_OK, "the abort reached another group: %s",
          world->error(world->self));
}

/* The last rank comes three limits late: the others fail in time, and it fails when it comes. */
static void time_out(const ll_comm *world, int operation) {
    ll_comm comm = make(MPI_COMM_WORLD, kLimitMs);
    CHECK(operate(&comm, operation) == LL_STATUS_OK, "%s", comm.error(comm.self));
    const bool away = comm.rank == comm.size - 1;
    if (away) test_sleep_ms(kAwayMs);
    const int64_t start = test_now_ms();
    CHECK(operate(&comm, operation) == LL_STATUS_COMM, "%s without the last rank",
          operation_names[operation]);
    const int64_t ms = test_now_ms() - start;
    CHECK(ms < kSoonMs, "%s took %lld ms", operation_names[operation], (long long)ms);
    const char *sentence = comm.error(comm.self);
    char want[64];
    snprintf(want, sizeof want, "%s: rank ", operation_names[operation]);
    CHECK(strstr(sentence, want) == sentence, "\"%s\" does not begin with \"%s\"", sentence, want);
    CHECK(strstr(sentence, "800 ms, the time limit"), "\"%s\"", sentence);
    snprintf(want, sizeof want, "rank %d of", comm.size - 1);
    CHECK(!strstr(sentence, want), "\"%s\" is not the sentence of those who waited", sentence);
    check_dead(&comm);
    comm.destroy(comm.self);
    CHECK(operate(world, 1) == LL_STATUS_OK, "the time-out reached another group: %s",
          world->error(world->self));
}

/* A group of one: a peer might hear of it before it has ended the call that makes a larger one. */
static void device_memory(void) {
    ll_comm comm = make(MPI_COMM_SELF, kLongMs);
    int stream = 0;
    int32_t value = 0;
    const ll_status status = comm.max_i32(comm.self, &value, 1, (ll_stream)(void *)&stream);
    CHECK(status == LL_STATUS_COMM, "status %d", status);
    CHECK(strstr(comm.error(comm.self), "host memory only"), "\"%s\"", comm.error(comm.self));
    comm.destroy(comm.self);
}

static void living_ranks(void) {
    ll_comm world = make(MPI_COMM_WORLD, kLongMs);
    for (int operation = 0; operation < kOperations; operation++) {
        char sentence[64];
        snprintf(sentence, sizeof sentence, "rank %d has had enough of %s", world.size - 1,
                 operation_names[operation]);
        abort_wakes(&world, operation, operation ? sentence : NULL);
        time_out(&world, operation);
    }
    device_memory();
    world.destroy(world.self);
}

/* Renamed into place, so that a file that is there is whole. */
static void write_report(const char *folder, const ll_comm *comm, ll_status status, int64_t ms) {
    char path[600], final[600];
    snprintf(path, sizeof path, "%s/.%d", folder, comm->rank);
    snprintf(final, sizeof final, "%s/%d", folder, comm->rank);
    FILE *file = fopen(path, "w");
    if (!file) exit(2);
    fprintf(file, "%d %lld %s\n", (int)status, (long long)ms, comm->error(comm->self));
    fclose(file);
    rename(path, final);
}

/* Leaves without MPI_Finalize, which could wait for the dead rank, and only after all survivors have written:
 * mpirun ends a job when a rank leaves like that. */
static void killed_rank(const char *folder) {
    ll_comm comm = make(MPI_COMM_WORLD, kKilledMs);
    for (int i = 0; i < 5; i++) CHECK(operate(&comm, i % 4) == LL_STATUS_OK, "%s", comm.error(comm.self));
    if (comm.rank == 1) kill(getpid(), SIGKILL);
    const int64_t start = test_now_ms();
    const ll_status status = operate(&comm, 1);
    write_report(folder, &comm, status, test_now_ms() - start);
    for (int wait = 0, missing = 1; missing && wait < 1000; wait++) {
        missing = 0;
        for (int32_t rank = 0; rank < comm.size; rank++) {
            char path[600];
            snprintf(path, sizeof path, "%s/%d", folder, rank);
            missing += rank != 1 && access(path, F_OK) != 0;
        }
        test_sleep_ms(10);
    }
    comm.destroy(comm.self);
    _exit(0);
}

int main(int argc, char **argv) {
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi_test_rank);
    if (argc == 3 && strcmp(argv[1], "killed") == 0) killed_rank(argv[2]);
    living_ranks();
    if (mpi_test_rank == 0) printf("aborts and time-outs: %d failures on rank 0\n", mpi_test_failures);
    /* Every rank lives: MPI can be ended although some of its groups died. */
    MPI_Finalize();
    return mpi_test_failures ? 1 : 0;
}
