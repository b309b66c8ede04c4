/* The ranks of a plan: collective operations with their errors, and agreeing before anything is done.
 *
 * Every collective call of the library starts with a record from each rank: the outcome of its own checks,
 * and facts that must be the same everywhere. From equal records every rank draws the same conclusion, so an
 * error is one error, with one sentence, on all of them, and nobody waits for a rank that has left. */
#ifndef LLI_CORE_GROUP_H
#define LLI_CORE_GROUP_H

#include "core/shards.h"

#include <logitless/comm.h>

#include <stdatomic.h>
#include <stdbool.h>

enum { kFactsMax = 40, kVotesMax = 6, kSentenceBytes = 320 };

/* How a fact is shown in a sentence. */
typedef enum lli_fact_kind {
    LLI_FACT_INT,
    LLI_FACT_F32,     /* bits of an f32 */
    LLI_FACT_F64,     /* bits of a double */
    LLI_FACT_CONTENT, /* a hash: only that it differs is shown */
    LLI_FACT_CALL     /* an lli_call_name */
} lli_fact_kind;

/* What a rank is doing when it hands in a record; always its first fact. */
typedef enum lli_call_name {
    LLI_CALL_OPERATION, /* announces an operation inside a call, in debug mode */
    LLI_CALL_PLAN,
    LLI_CALL_PLAN_CUTS,
    LLI_CALL_PLAN_READY,
    LLI_CALL_FORWARD, /* + ll_pass */
    LLI_CALL_BACKWARD,
    LLI_CALL_FORWARD_BACKWARD,
    LLI_CALL_CE_FORWARD, /* + ll_pass */
    LLI_CALL_CE_BACKWARD,
    LLI_CALL_CE_FORWARD_BACKWARD
} lli_call_name;

typedef struct lli_fact {
    const char *name; /* of the calling rank only */
    lli_fact_kind kind;
    int64_t value;
} lli_fact;

/* What a rank hands in. Facts must be equal on all ranks; votes need not be. */
typedef struct lli_facts {
    int32_t n_facts, n_votes;
    lli_fact fact[kFactsMax];
    int64_t vote[kVotesMax];
} lli_facts;

/* Facts of a call, the call itself among them. */
lli_facts lli_facts_begin(lli_call_name call);
void lli_fact_add(lli_facts *facts, const char *name, lli_fact_kind kind, int64_t value);

typedef struct lli_record lli_record;

/* Of a plan with a communicator. */
typedef struct lli_group {
    ll_comm comm;
    bool debug;
    lli_shards shards;
    lli_record *records; /* of all ranks: room for one meeting */
    const char *what;    /* name of the collective call in progress: the first words of its errors */
    atomic_flag busy;
} lli_group;

/* Copies and checks the communicator; MEMORY (the peers are told). */
ll_status lli_group_create(const ll_comm *comm, lli_group **group);
void lli_group_destroy(lli_group *group);

/* Meets all ranks under the name `what`. `mine`: the outcome of this rank's checks, its sentence in
 * ll_last_error. Returns OK with every rank's votes readable; or, on every rank alike, the first failing
 * rank's status and sentence, or INVALID_ARG naming two ranks and the fact in which they differ; or COMM. */
ll_status lli_group_agree(lli_group *group, const char *what, ll_status mine, const lli_facts *facts);

/* Vote `index` of a rank after lli_group_agree. */
int64_t lli_group_vote(const lli_group *group, int32_t rank, int32_t index);
int64_t lli_group_vote_min(const lli_group *group, int32_t index);
int64_t lli_group_vote_max(const lli_group *group, int32_t index);

/* The operations of ll_comm, announced first in debug mode. COMM with a sentence; the peers are told.
 * stream: NULL for host memory. */
ll_status lli_group_max(lli_group *group, int32_t *values, int64_t n, ll_stream stream);
ll_status lli_group_sum(lli_group *group, int64_t *values, int64_t n, ll_stream stream);
ll_status lli_group_sum_f32(lli_group *group, float *values, int64_t n, ll_stream stream);

/* FNV-1a over 64-bit words and a tail, for facts of kind CONTENT. */
int64_t lli_hash(const void *data, size_t bytes, int64_t seed);

#endif
