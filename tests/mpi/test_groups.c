/* test_groups LATE_MS [LEVELS]: groups of any lists of ranks, made and used at once. Of the strided groups
 * {0, 4, 8, 12}, {1, 5, 9, 13}, ... (of 16 ranks) one comes LATE_MS late, which must hold up no other.
 * LEVELS: the sentence on levels that each of them must have. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "mpi_test.h"

#include <string.h>

enum { kLimitMs = 60000, kGroupSize = 4 };

int32_t mpi_test_rank;
int mpi_test_failures;

/* Every operation, against what the members must get; ranks[new rank]: world rank. */
static void check_group(const ll_comm *group, const int32_t *ranks, int32_t n_ranks) {
    CHECK(group->size == n_ranks && group->rank >= 0 && group->rank < n_ranks &&
              ranks[group->rank] == mpi_test_rank,
          "rank %d of %d", group->rank, group->size);
    int32_t max = 3 * mpi_test_rank, want_max = 0, *all = test_array((size_t)n_ranks * sizeof *all);
    int64_t sum = (int64_t)1 << mpi_test_rank, want_sum = 0;
    float part = (float)(mpi_test_rank + 1), want_part = 0; /* small integers: exact in any order */
    for (int32_t i = 0; i < n_ranks; i++) {
        if (3 * ranks[i] > want_max) want_max = 3 * ranks[i];
        want_sum += (int64_t)1 << ranks[i];
        want_part += (float)(ranks[i] + 1);
    }
    const ll_status status[] = {group->max_i32(group->self, &max, 1, NULL),
                                group->sum_i64(group->self, &sum, 1, NULL),
                                group->sum_f32(group->self, &part, 1, NULL),
                                group->all_gather(group->self, &mpi_test_rank, all, sizeof *all)};
    for (int i = 0; i < 4; i++) CHECK(status[i] == LL_STATUS_OK, "%d: %s", i, group->error(group->self));
    CHECK(max == want_max, "max %d, want %d", max, want_max);
    CHECK(sum == want_sum, "sum %lld, want %lld", (long long)sum, (long long)want_sum);
    CHECK(part == want_part, "sum %g, want %g", (double)part, (double)want_part);
    CHECK(memcmp(all, ranks, (size_t)n_ranks * sizeof *all) == 0, "all_gather: other ranks");
    free(all);
}

/* Made, checked, destroyed. */
static void check_list(const ll_comm *world, const int32_t *ranks, int32_t n_ranks) {
    ll_comm group = LL_COMM_INIT;
    const ll_status status = world->group(world->self, ranks, n_ranks, &group);
    CHECK(status == LL_STATUS_OK, "%s", world->error(world->self));
    if (status != LL_STATUS_OK) return;
    check_group(&group, ranks, n_ranks);
    group.destroy(group.self);
}

static void meet(const ll_comm *comm) {
    int32_t nothing = 0;
    CHECK(comm->max_i32(comm->self, &nothing, 1, NULL) == LL_STATUS_OK, "%s", comm->error(comm->self));
}

static void strided_groups(const ll_comm *world, int64_t late_ms, const char *levels) {
    const int32_t n_groups = world->size / kGroupSize, mine = world->rank % n_groups;
    int32_t ranks[kGroupSize];
    for (int32_t i = 0; i < kGroupSize; i++) ranks[i] = mine + i * n_groups;
    const bool late = n_groups > 1 && mine == 1;
    meet(world);
    const int64_t start = test_now_ms();
    if (late) test_sleep_ms(late_ms);
    ll_comm group = LL_COMM_INIT;
    const ll_status status = world->group(world->self, ranks, kGroupSize, &group);
    CHECK(status == LL_STATUS_OK, "%s", world->error(world->self));
    if (status != LL_STATUS_OK) return;
    check_group(&group, ranks, kGroupSize);
    const int64_t ms = test_now_ms() - start;
    CHECK(late || ms < late_ms, "a group took %lld ms, as if it had waited for the late one", (long long)ms);
    char text[128] = "";
    ll_comm_mpi_describe(&group, text, sizeof text);
    if (group.rank == 0) {
        printf("{%d, %d, %d, %d}: %lld ms, %s\n", ranks[0], ranks[1], ranks[2], ranks[3], (long long)ms,
               text);
    }
    if (levels) CHECK(strcmp(text, levels) == 0, "\"%s\", want \"%s\"", text, levels);
    /* A group of the group, in an order of its own. */
    if (group.rank != 2) {
        const int32_t inner[] = {3, 0, 1}, inner_world[] = {ranks[3], ranks[0], ranks[1]};
        ll_comm within = LL_COMM_INIT;
        CHECK(group.group(group.self, inner, 3, &within) == LL_STATUS_OK, "%s", group.error(group.self));
        if (within.self) {
            check_group(&within, inner_world, 3);
            within.destroy(within.self);
        }
    }
    check_group(&group, ranks, kGroupSize);
    group.destroy(group.self);
}

/* Two groups of one list are two: operations on them may be taken in turns. */
static void same_list_twice(const ll_comm *world) {
    int32_t *ranks = test_array((size_t)world->size * sizeof *ranks);
    for (int32_t i = 0; i < world->size; i++) ranks[i] = world->size - 1 - i;
    ll_comm first = LL_COMM_INIT, second = LL_COMM_INIT;
    CHECK(world->group(world->self, ranks, world->size, &first) == LL_STATUS_OK, "first");
    CHECK(world->group(world->self, ranks, world->size, &second) == LL_STATUS_OK, "second");
    for (int i = 0; i < 2; i++) {
        check_group(&second, ranks, world->size);
        check_group(&first, ranks, world->size);
    }
    first.destroy(first.self);
    check_group(&second, ranks, world->size);
    second.destroy(second.self);
    free(ranks);
}

/* Overlapping pairs around a ring; every rank makes the lower one first, or nobody would ever be done. */
static void overlapping_pairs(const ll_comm *world) {
    for (int32_t low = 0; low + 1 < world->size; low++) {
        const int32_t pair[] = {low + 1, low};
        if (world->rank == low || world->rank == low + 1) check_list(world, pair, 2);
    }
}

static void refuse_list(const ll_comm *world, const int32_t *ranks, int32_t n_ranks, const char *words) {
    ll_comm group = LL_COMM_INIT;
    const ll_status status = world->group(world->self, ranks, n_ranks, &group);
    CHECK(status == LL_STATUS_INVALID_ARG, "status %d", status);
    CHECK(strstr(world->error(world->self), words), "\"%s\" lacks \"%s\"", world->error(world->self), words);
    CHECK(!group.self, "a group was made");
}

/* A bad list is refused at once on the rank that gave it, and the communicator stays usable. */
static void bad_lists(const ll_comm *world) {
    const int32_t self = world->rank, outside[] = {self, world->size}, negative[] = {-1, self};
    const int32_t twice[] = {self, self}, other = (self + 1) % world->size;
    refuse_list(world, outside, 2, "want a rank of the communicator");
    refuse_list(world, negative, 2, "ranks[0] is -1");
    refuse_list(world, twice, 2, "want every rank once");
    if (other != self) refuse_list(world, &other, 1, "is not in the list");
    meet(world);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    ll_comm world = LL_COMM_INIT;
    char why[512] = "";
    if (ll_comm_mpi_open(kLimitMs, &world, why, sizeof why) != LL_STATUS_OK) {
        fprintf(stderr, "ll_comm_mpi_open: %s\n", why);
        return 2;
    }
    mpi_test_rank = world.rank;
    check_list(&world, &world.rank, 1);
    same_list_twice(&world);
    overlapping_pairs(&world);
    bad_lists(&world);
    if (world.size >= kGroupSize) strided_groups(&world, atoi(argv[1]), argc > 2 ? argv[2] : NULL);
    /* MPI is ended with the last end, whichever that is. */
    ll_comm last = LL_COMM_INIT;
    CHECK(world.group(world.self, &world.rank, 1, &last) == LL_STATUS_OK, "%s", world.error(world.self));
    world.destroy(world.self);
    check_group(&last, &mpi_test_rank, 1);
    last.destroy(last.self);
    return mpi_test_failures ? 1 : 0;
}
