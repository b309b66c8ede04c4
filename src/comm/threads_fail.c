/* Why a meeting of threads fails, as one sentence that names the ranks. */
#include "comm/threads.h"

#include <stdarg.h>
#include <stdio.h>

enum {
    kRanksNamed = 8, /* of a list; lists of a large group must leave room for the rest of the sentence */
    kWantsNamed = 3, /* of the different ones */
    kListBytes = kRanksNamed * 16 + 40
};

void lli_ranks_kill(lli_ranks *all, const char *format, ...) {
    if (all->dead) return;
    va_list args;
    va_start(args, format);
    vsnprintf(all->sentence, sizeof all->sentence, format, args);
    va_end(args);
    all->dead = true;
    pthread_cond_broadcast(&all->changed);
}

typedef bool pick_fn(const lli_ranks *all, const lli_slot *slot, const lli_slot *like);

static bool is_missing(const lli_ranks *all, const lli_slot *slot, const lli_slot *like) {
    (void)like;
    return slot->arrival != all->step + 1;
}

static bool is_gone(const lli_ranks *all, const lli_slot *slot, const lli_slot *like) {
    (void)all, (void)like;
    return slot->arrival < 0;
}

static bool wants_the_same(const lli_ranks *all, const lli_slot *slot, const lli_slot *like) {
    (void)all;
    return slot->kind == like->kind && slot->n == like->n;
}

/* "rank 2", "ranks 0, 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" */
static void name_ranks(const lli_ranks *all, pick_fn *pick, const lli_slot *like, char text[kListBytes]) {
    int32_t count = 0;
    size_t used = 0;
    char list[kRanksNamed * 16] = "";
    for (int32_t rank = 0; rank < all->size; rank++) {
        if (!pick(all, &all->slots[rank], like) || count++ >= kRanksNamed) continue;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", rank);
    }
    if (count > kRanksNamed) {
        snprintf(text, kListBytes, "ranks %s and %d more", list, count - kRanksNamed);
    } else {
        snprintf(text, kListBytes, "%s %s", count == 1 ? "rank" : "ranks", list);
    }
}

void lli_ranks_kill_late(lli_ranks *all, int32_t rank) {
    char ranks[kListBytes];
    name_ranks(all, is_missing, NULL, ranks);
    lli_ranks_kill(all, "%s: rank %d waited %d ms for %s of %d", lli_comm_kind_names[all->slots[rank].kind],
                   rank, all->timeout_ms, ranks, all->size);
}

void lli_ranks_kill_gone(lli_ranks *all, int32_t rank) {
    char ranks[kListBytes];
    name_ranks(all, is_gone, NULL, ranks);
    lli_ranks_kill(all, "%s: rank %d waits for %s of %d, which destroyed its end of the group",
                   lli_comm_kind_names[all->slots[rank].kind], rank, ranks, all->size);
}

static void kill_different(lli_ranks *all, const lli_slot *const *wants, int32_t n_wants, bool more) {
    char text[kCommSentenceBytes] = "";
    size_t used = 0;
    for (int32_t i = 0; i < n_wants && used < sizeof text; i++) {
        char ranks[kListBytes];
        name_ranks(all, wants_the_same, wants[i], ranks);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s: %s of %lld%s", i ? "; " : "", ranks,
                                 lli_comm_kind_names[wants[i]->kind], (long long)wants[i]->n,
                                 wants[i]->kind == LLI_COMM_ALL_GATHER ? " bytes" : "");
    }
    lli_ranks_kill(all, "ranks of a group of %d want different things: %.440s%s", all->size, text,
                   more ? "; and more" : "");
}

void lli_ranks_judge(lli_ranks *all) {
    const lli_slot *wants[kWantsNamed]; /* the different ones so far */
    int32_t n_wants = 0;
    bool more = false;
    for (int32_t rank = 0; rank < all->size; rank++) {
        const lli_slot *slot = &all->slots[rank];
        if (slot->fault) {
            lli_ranks_kill(all, "%s: rank %d of %d: %s", lli_comm_kind_names[slot->kind], rank, all->size,
                           slot->fault);
            return;
        }
        int32_t i = 0;
        while (i < n_wants && !wants_the_same(all, slot, wants[i])) i++;
        if (i == kWantsNamed)
            more = true;
        else if (i == n_wants)
            wants[n_wants++] = slot;
    }
    if (n_wants > 1) kill_different(all, wants, n_wants, more);
}
