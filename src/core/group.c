/* Meetings and operations of group.h. */
#include "core/group.h"
#include "comm/comm_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of one size in every meeting, so that two ranks in different calls still meet and can tell. */
struct lli_record {
    int32_t status, n_facts;
    int64_t value[kFactsMax], vote[kVotesMax];
    char sentence[kSentenceBytes];
};

lli_facts lli_facts_begin(lli_call_name call) {
    lli_facts facts = {0};
    lli_fact_add(&facts, "the call", LLI_FACT_CALL, (int64_t)call);
    return facts;
}

void lli_fact_add(lli_facts *facts, const char *name, lli_fact_kind kind, int64_t value) {
    facts->fact[facts->n_facts++] = (lli_fact){name, kind, value};
}

int64_t lli_hash(const void *data, size_t bytes, int64_t seed) {
    const unsigned char *at = data;
    uint64_t hash = (uint64_t)seed ^ UINT64_C(0xcbf29ce484222325);
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29; /* high bits of a word must reach low bits of the hash */
    }
    for (; bytes; bytes--, at++) hash = (hash ^ *at) * UINT64_C(0x100000001b3);
    return (int64_t)hash;
}

/* ---- Life --------------------------------------------------------------------------------------- */

ll_status lli_group_create(const ll_comm *comm, lli_group **result) {
    *result = NULL;
    LLI_TRY(lli_comm_check(comm, "ll_plan_create: comm"));
    lli_group *group = calloc(1, sizeof *group);
    lli_record *records = calloc((size_t)comm->size + 1, sizeof *records);
    if (!group || !records) {
        free(group);
        free(records);
        ll_comm_abort(comm, "ll_plan_create: a rank has no memory for the records of its group");
        return lli_fail(LL_STATUS_MEMORY, "ll_plan_create: no memory for the records of %d ranks",
                        comm->size);
    }
    const char *debug = getenv("LL_COMM_DEBUG");
    group->comm = *comm;
    group->debug = comm->debug || (debug && *debug && strcmp(debug, "0") != 0);
    group->shards = (lli_shards){.first_shared = -1, .last_shared = -1};
    group->records = records;
    atomic_flag_clear(&group->busy);
    *result = group;
    return LL_STATUS_OK;
}

void lli_group_destroy(lli_group *group) {
    if (!group) return;
    lli_shards_free(&group->shards);
    free(group->records);
    free(group);
}

/* ---- Failing ------------------------------------------------------------------------------------ */

/* A failed operation: the sentence is passed on to the peers, which may still be waiting. */
static ll_status broken(lli_group *group, const char *operation, ll_status status) {
    const ll_comm *comm = &group->comm;
    const char *why = comm->error ? comm->error(comm->self) : "";
    lli_fail(LL_STATUS_COMM, "%s: rank %d of %d: %s failed: %s", group->what, comm->rank, comm->size,
             operation, why && *why ? why : ll_status_name(status));
    ll_comm_abort(comm, ll_last_error());
    return LL_STATUS_COMM;
}

static const char *const calls[] = {
    "an operation inside a call",    "ll_plan_create",       "ll_plan_create, cuts",
    "ll_plan_create, end",           "ll_linear_ce_forward", "ll_linear_ce_backward",
    "ll_linear_ce_forward_backward", "ll_ce_forward",        "ll_ce_backward",
    "ll_ce_forward_backward"};

static void show(const lli_fact *fact, int64_t value, char *text, size_t text_bytes) {
    const uint32_t low = (uint32_t)value;
    float narrow;
    double wide;
    memcpy(&narrow, &low, sizeof narrow);
    memcpy(&wide, &value, sizeof wide);
    switch (fact->kind) {
    case LLI_FACT_INT:
        snprintf(text, text_bytes, "%lld", (long long)value);
        break;
    case LLI_FACT_F32:
        snprintf(text, text_bytes, "%.9g", (double)narrow);
        break;
    case LLI_FACT_F64:
        snprintf(text, text_bytes, "%.17g", wide);
        break;
    case LLI_FACT_CONTENT:
        text[0] = 0;
        break;
    case LLI_FACT_CALL:
        snprintf(text, text_bytes, "%s",
                 value >= 0 && value < (int64_t)(sizeof calls / sizeof calls[0]) ? calls[value]
                                                                                 : "an unknown one");
        break;
    }
}

static ll_status differ(const lli_group *group, const lli_fact *fact, int32_t index, int32_t rank) {
    char first[40], other[40];
    show(fact, group->records[0].value[index], first, sizeof first);
    show(fact, group->records[rank].value[index], other, sizeof other);
    if (fact->kind == LLI_FACT_CONTENT) {
        return lli_fail(LL_STATUS_INVALID_ARG, "%s: ranks 0 and %d differ in %s, want the same on every rank",
                        group->what, rank, fact->name);
    }
    return lli_fail(LL_STATUS_INVALID_ARG, "%s: ranks 0 and %d differ in %s: %s and %s", group->what, rank,
                    fact->name, first, other);
}

/* ---- Meetings ----------------------------------------------------------------------------------- */

/* Every rank's record into group->records. */
static ll_status gather(lli_group *group, ll_status mine, const lli_facts *facts) {
    lli_record *own = &group->records[group->comm.size];
    memset(own, 0, sizeof *own);
    own->status = (int32_t)mine;
    own->n_facts = facts->n_facts;
    for (int32_t i = 0; i < facts->n_facts; i++) own->value[i] = facts->fact[i].value;
    memcpy(own->vote, facts->vote, sizeof own->vote);
    if (mine != LL_STATUS_OK) snprintf(own->sentence, sizeof own->sentence, "%s", ll_last_error());
    const ll_status status = group->comm.all_gather(group->comm.self, own, group->records, sizeof *own);
    return status == LL_STATUS_OK ? status : broken(group, "all_gather", status);
}

/* The first rank that failed decides, then the first fact that differs from rank 0's. */
static ll_status verdict(const lli_group *group, const lli_facts *facts) {
    const lli_record *records = group->records;
    const int32_t size = group->comm.size;
    for (int32_t rank = 0; rank < size; rank++) {
        if (records[rank].status != LL_STATUS_OK) {
            return lli_fail((ll_status)records[rank].status, "%.*s (rank %d of %d)", kSentenceBytes,
                            records[rank].sentence, rank, size);
        }
    }
    for (int32_t i = 0; i < facts->n_facts; i++) {
        for (int32_t rank = 1; rank < size; rank++) {
            if (records[rank].value[i] != records[0].value[i]) return differ(group, &facts->fact[i], i, rank);
        }
    }
    return LL_STATUS_OK;
}

ll_status lli_group_agree(lli_group *group, const char *what, ll_status mine, const lli_facts *facts) {
    group->what = what;
    LLI_TRY(gather(group, mine, facts));
    return verdict(group, facts);
}

int64_t lli_group_vote(const lli_group *group, int32_t rank, int32_t index) {
    return group->records[rank].vote[index];
}

int64_t lli_group_vote_min(const lli_group *group, int32_t index) {
    int64_t least = lli_group_vote(group, 0, index);
    for (int32_t rank = 1; rank < group->comm.size; rank++) {
        if (lli_group_vote(group, rank, index) < least) least = lli_group_vote(group, rank, index);
    }
    return least;
}

int64_t lli_group_vote_max(const lli_group *group, int32_t index) {
    int64_t most = lli_group_vote(group, 0, index);
    for (int32_t rank = 1; rank < group->comm.size; rank++) {
        if (lli_group_vote(group, rank, index) > most) most = lli_group_vote(group, rank, index);
    }
    return most;
}

/* ---- Operations --------------------------------------------------------------------------------- */

enum { kOperationMax = 1, kOperationSum = 2, kOperationSumF32 = 3 };

/* In debug mode: the same operation of the same size? A record like
 * those of calls, so that a rank that starts another call meanwhile is told apart and not waited for. */
static ll_status announce(lli_group *group, int64_t operation, int64_t n) {
    if (!group->debug) return LL_STATUS_OK;
    lli_facts facts = lli_facts_begin(LLI_CALL_OPERATION);
    lli_fact_add(&facts, "the next operation (1 max_i32, 2 sum_i64, 3 sum_f32)", LLI_FACT_INT, operation);
    lli_fact_add(&facts, "the size of the next operation", LLI_FACT_INT, n);
    LLI_TRY(gather(group, LL_STATUS_OK, &facts));
    return verdict(group, &facts);
}

ll_status lli_group_max(lli_group *group, int32_t *values, int64_t n, ll_stream stream) {
    LLI_TRY(announce(group, kOperationMax, n));
    const ll_status status = group->comm.max_i32(group->comm.self, values, n, stream);
    return status == LL_STATUS_OK ? status : broken(group, "max_i32", status);
}

ll_status lli_group_sum(lli_group *group, int64_t *values, int64_t n, ll_stream stream) {
    LLI_TRY(announce(group, kOperationSum, n));
    const ll_status status = group->comm.sum_i64(group->comm.self, values, n, stream);
    return status == LL_STATUS_OK ? status : broken(group, "sum_i64", status);
}

ll_status lli_group_sum_f32(lli_group *group, float *values, int64_t n, ll_stream stream) {
    LLI_TRY(announce(group, kOperationSumF32, n));
    const ll_status status = group->comm.sum_f32(group->comm.self, values, n, stream);
    return status == LL_STATUS_OK ? status : broken(group, "sum_f32", status);
}
