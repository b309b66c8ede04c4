/* Making and releasing the groups of ranks of one process, and their ends.
 *
 * A group of a world is made by the first member that asks. It stands in the world's list of offers until the
 * last member has its end; then only the ends hold it. The world may go first: it gives its offers back. */
#define _GNU_SOURCE /* pthread_condattr_setclock */
#include "comm/threads.h"
#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The k-th call of a member with a list belongs to the k-th offer of that list: it takes the oldest one that
 * it has not taken, and an offer that all have taken is gone. */
typedef struct lli_offer {
    struct lli_offer *next; /* younger */
    lli_ranks *group;
    int32_t n_ranks, n_taken;
    struct {
        int32_t rank;
        bool taken;
    } members[];
} lli_offer;

/* NULL: no memory. With one reference, the caller's. */
static lli_ranks *create(int32_t size, int32_t timeout_ms) {
    lli_ranks *all = calloc(1, sizeof *all + (size_t)size * sizeof all->slots[0]);
    if (!all) return NULL;
    all->size = size;
    all->timeout_ms = timeout_ms;
    all->n_references = 1;
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) goto no_attributes;
    /* The wall clock may be set while ranks wait, and a step forward would end all their waits at once. */
    if (pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0) goto no_cond;
    if (pthread_cond_init(&all->changed, &attributes) != 0) goto no_cond;
    if (pthread_mutex_init(&all->mutex, NULL) != 0) goto no_mutex;
    pthread_condattr_destroy(&attributes);
    return all;
no_mutex:
    pthread_cond_destroy(&all->changed);
no_cond:
    pthread_condattr_destroy(&attributes);
no_attributes:
    free(all);
    return NULL;
}

/* Gives a reference back. rank >= 0: that of this rank's end, and peers that wait for it need not wait on. */
static void release(lli_ranks *all, int32_t rank) {
    pthread_mutex_lock(&all->mutex);
    if (rank >= 0) {
        all->slots[rank].arrival = -1;
        all->n_gone++;
        pthread_cond_broadcast(&all->changed);
    }
    const bool last = --all->n_references == 0;
    pthread_mutex_unlock(&all->mutex);
    if (!last) return;
    for (lli_offer *offer = all->offers, *next; offer; offer = next) {
        next = offer->next;
        release(offer->group, -1);
        free(offer);
    }
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->mutex);
    free(all);
}

static void threads_destroy(void *self) {
    lli_end *me = self;
    release(me->all, me->rank);
    free(me);
}

static ll_status threads_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group);

/* False: no memory. The reference that the end holds is the caller's to count. */
static bool make_end(lli_ranks *all, int32_t rank, ll_comm *comm) {
    lli_end *me = calloc(1, sizeof *me);
    if (!me) return false;
    me->all = all;
    me->rank = rank;
    *comm = (ll_comm){.struct_bytes = sizeof *comm,
                      .rank = rank,
                      .size = all->size,
                      .self = me,
                      .max_i32 = lli_threads_max_i32,
                      .sum_i64 = lli_threads_sum_i64,
                      .all_gather = lli_threads_all_gather,
                      .sum_f32 = lli_threads_sum_f32,
                      .abort = lli_threads_abort,
                      .error = lli_threads_error,
                      .group = threads_group,
                      .destroy = threads_destroy};
    return true;
}

static bool is_for(const lli_offer *offer, const int32_t *ranks, int32_t n_ranks, int32_t mine) {
    if (offer->n_ranks != n_ranks || offer->members[mine].taken) return false;
    for (int32_t i = 0; i < n_ranks; i++) {
        if (offer->members[i].rank != ranks[i]) return false;
    }
    return true;
}

/* Where in the list of `world` this member's offer hangs; a new one at the end if it is the first to ask.
 * NULL: no memory. */
static lli_offer **find_offer(lli_ranks *world, const int32_t *ranks, int32_t n_ranks, int32_t mine) {
    lli_offer **place = &world->offers;
    while (*place && !is_for(*place, ranks, n_ranks, mine)) place = &(*place)->next;
    if (*place) return place;
    lli_offer *offer = calloc(1, sizeof *offer + (size_t)n_ranks * sizeof offer->members[0]);
    lli_ranks *group = offer ? create(n_ranks, world->timeout_ms) : NULL;
    if (!group) {
        free(offer);
        return NULL;
    }
    offer->group = group;
    offer->n_ranks = n_ranks;
    for (int32_t i = 0; i < n_ranks; i++) offer->members[i].rank = ranks[i];
    *place = offer;
    return place;
}

/* With the mutex of `world` held. False: no memory; an offer that was made stays for the others. */
static bool take_offer(lli_ranks *world, const int32_t *ranks, int32_t n_ranks, int32_t mine, ll_comm *comm) {
    lli_offer **place = find_offer(world, ranks, n_ranks, mine);
    if (!place || !make_end((*place)->group, mine, comm)) return false;
    lli_offer *offer = *place;
    pthread_mutex_lock(&offer->group->mutex);
    offer->group->n_references++;
    pthread_mutex_unlock(&offer->group->mutex);
    offer->members[mine].taken = true;
    if (++offer->n_taken == n_ranks) {
        *place = offer->next;
        release(offer->group, -1);
        free(offer);
    }
    return true;
}

static ll_status threads_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    lli_end *me = self;
    int32_t mine = 0;
    while (mine < n_ranks && ranks[mine] != me->rank) mine++;
    if (mine >= n_ranks) {
        snprintf(me->sentence, sizeof me->sentence, "group: rank %d is not in the list", me->rank);
        return lli_fail(LL_STATUS_INVALID_ARG, "%s", me->sentence);
    }
    pthread_mutex_lock(&me->all->mutex);
    const bool taken = take_offer(me->all, ranks, n_ranks, mine, group);
    pthread_mutex_unlock(&me->all->mutex);
    if (taken) return LL_STATUS_OK;
    snprintf(me->sentence, sizeof me->sentence, "group: no memory for a group of %d ranks", n_ranks);
    return lli_fail(LL_STATUS_MEMORY, "%s", me->sentence);
}

ll_status ll_comm_threads(int32_t size, int32_t timeout_ms, ll_comm *comms) {
    LLI_REQUIRE(comms, LL_STATUS_INVALID_ARG, "ll_comm_threads: comms is NULL");
    LLI_REQUIRE(size >= 1 && size <= LL_COMM_RANKS_MAX, LL_STATUS_INVALID_ARG,
                "ll_comm_threads: size is %d, want 1 .. %d", size, LL_COMM_RANKS_MAX);
    memset(comms, 0, (size_t)size * sizeof *comms);
    LLI_REQUIRE(timeout_ms >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_threads: timeout_ms is %d, want 0 (for %d) or more", timeout_ms, LL_COMM_TIMEOUT_MS);
    lli_ranks *all = create(size, timeout_ms ? timeout_ms : LL_COMM_TIMEOUT_MS);
    int32_t made = 0;
    while (all && made < size && make_end(all, made, &comms[made])) made++;
    if (made == size) {
        all->n_references = size;
        return LL_STATUS_OK;
    }
    while (made > 0) free(comms[--made].self);
    if (all) release(all, -1);
    memset(comms, 0, (size_t)size * sizeof *comms);
    return lli_fail(LL_STATUS_MEMORY, "ll_comm_threads: no memory for %d ranks", size);
}
