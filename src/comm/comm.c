/* The calls that every communicator shares: checks first, then the communicator's own function. */
#include "comm/comm_internal.h"
#include "core/problem.h"
#include "core/status.h"

#include <string.h>

const char *const lli_comm_kind_names[4] = {"max_i32", "sum_i64", "all_gather", "sum_f32"};

ll_status lli_comm_check(const ll_comm *comm, const char *where) {
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "%s is NULL", where);
    ll_comm whole;
    LLI_TRY(lli_struct_copy(&whole, sizeof whole, comm, sizeof whole, where));
    LLI_REQUIRE(whole.size >= 1 && whole.size <= LL_COMM_RANKS_MAX, LL_STATUS_INVALID_ARG,
                "%s.size is %d, want 1 .. %d", where, whole.size, LL_COMM_RANKS_MAX);
    LLI_REQUIRE(whole.rank >= 0 && whole.rank < whole.size, LL_STATUS_INVALID_ARG,
                "%s.rank is %d, want 0 .. %d", where, whole.rank, whole.size - 1);
    LLI_REQUIRE(whole.debug == 0 || whole.debug == 1, LL_STATUS_INVALID_ARG, "%s.debug is %d, want 0 or 1",
                where, whole.debug);
    LLI_REQUIRE(whole.memory >= LL_COMM_MEMORY_HOST && whole.memory <= LL_COMM_MEMORY_ANY,
                LL_STATUS_INVALID_ARG, "%s.memory is %d, want an ll_comm_memory", where, whole.memory);
    const char *missing = !whole.max_i32      ? "max_i32"
                          : !whole.sum_i64    ? "sum_i64"
                          : !whole.all_gather ? "all_gather"
                          : !whole.sum_f32    ? "sum_f32"
                                              : NULL;
    LLI_REQUIRE(!missing, LL_STATUS_INVALID_ARG, "%s.%s is NULL, want a function", where, missing);
    return LL_STATUS_OK;
}

/* *mine: the new rank of world rank `rank`. */
static ll_status check_ranks(int32_t rank, int32_t size, const int32_t *ranks, int32_t n_ranks,
                             int32_t *mine) {
    uint64_t seen[(LL_COMM_RANKS_MAX + 63) / 64] = {0};
    *mine = -1;
    for (int32_t i = 0; i < n_ranks; i++) {
        LLI_REQUIRE(ranks[i] >= 0 && ranks[i] < size, LL_STATUS_INVALID_ARG,
                    "ll_comm_group: ranks[%d] is %d, want 0 .. %d", i, ranks[i], size - 1);
        uint64_t *word = &seen[ranks[i] / 64], bit = (uint64_t)1 << (ranks[i] % 64);
        LLI_REQUIRE(!(*word & bit), LL_STATUS_INVALID_ARG,
                    "ll_comm_group: ranks[%d] is %d, which is in the list already", i, ranks[i]);
        *word |= bit;
        if (ranks[i] == rank) *mine = i;
    }
    LLI_REQUIRE(*mine >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_group: ranks has %d of %d ranks, but not this one, %d (only members call)", n_ranks,
                size, rank);
    return LL_STATUS_OK;
}

ll_status ll_comm_group(const ll_comm *world, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    LLI_REQUIRE(group, LL_STATUS_INVALID_ARG, "ll_comm_group: group is NULL");
    LLI_REQUIRE(group != world, LL_STATUS_INVALID_ARG, "ll_comm_group: group is world, want another struct");
    memset(group, 0, sizeof *group);
    LLI_TRY(lli_comm_check(world, "ll_comm_group: world"));
    LLI_REQUIRE(ranks, LL_STATUS_INVALID_ARG, "ll_comm_group: ranks is NULL");
    LLI_REQUIRE(n_ranks >= 1 && n_ranks <= world->size, LL_STATUS_INVALID_ARG,
                "ll_comm_group: n_ranks is %d, want 1 .. %d", n_ranks, world->size);
    int32_t mine;
    LLI_TRY(check_ranks(world->rank, world->size, ranks, n_ranks, &mine));
    LLI_REQUIRE(world->group, LL_STATUS_UNSUPPORTED,
                "ll_comm_group: world.group is NULL: this communicator makes no groups");
    ll_comm made = LL_COMM_INIT;
    const ll_status status = world->group(world->self, ranks, n_ranks, &made);
    if (status != LL_STATUS_OK) {
        const char *why = world->error ? world->error(world->self) : "";
        return lli_fail(status, "ll_comm_group: %s", why && *why ? why : ll_status_name(status));
    }
    if (made.rank != mine || made.size != n_ranks) {
        const int32_t rank = made.rank, size = made.size;
        ll_comm_destroy(&made);
        return lli_fail(LL_STATUS_COMM, "ll_comm_group: world.group made rank %d of %d, want rank %d of %d",
                        rank, size, mine, n_ranks);
    }
    made.debug = world->debug;
    *group = made;
    return LL_STATUS_OK;
}

void ll_comm_abort(const ll_comm *comm, const char *sentence) {
    if (comm && comm->abort) comm->abort(comm->self, sentence ? sentence : "");
}

void ll_comm_destroy(ll_comm *comm) {
    if (!comm) return;
    if (comm->destroy) comm->destroy(comm->self);
    memset(comm, 0, sizeof *comm);
}
