/* Facts and votes of agree.h. */
#include "core/agree.h"
#include "core/dtype.h"
#include "core/problem.h"

#include <stdlib.h>
#include <string.h>

static int64_t f32_bits(float value) {
    return (int64_t)lli_bits(value);
}

/* ---- Plans -------------------------------------------------------------------------------------- */

static void add_loss(lli_facts *facts, const ll_loss *loss) {
    lli_fact_add(facts, "ignore_index", LLI_FACT_INT, loss->ignore_index);
    lli_fact_add(facts, "temperature", LLI_FACT_F32, f32_bits(loss->temperature));
    lli_fact_add(facts, "softcap", LLI_FACT_F32, f32_bits(loss->softcap));
    lli_fact_add(facts, "label_smoothing", LLI_FACT_F32, f32_bits(loss->label_smoothing));
    lli_fact_add(facts, "z_loss", LLI_FACT_F32, f32_bits(loss->z_loss));
    lli_fact_add(facts, "smoothing_rule", LLI_FACT_INT, loss->smoothing_rule);
    lli_fact_add(facts, "reduction", LLI_FACT_INT, loss->reduction);
    lli_fact_add(facts, "token_scaling", LLI_FACT_INT, loss->token_scaling);
}

enum { kVoteBegin, kVoteCount, kVoteDebug };

/* What decides about results or about the number of operations. Shards, budgets, threads, frozen weights and
 * their gradients' dtypes are each rank's own. */
static lli_facts plan_facts(const lli_group *group, const lli_problem *p, const lli_kernel *kernel) {
    lli_facts facts = lli_facts_begin(LLI_CALL_PLAN);
    lli_fact_add(&facts, "the library's version", LLI_FACT_INT,
                 10000 * LL_VERSION_MAJOR + 100 * LL_VERSION_MINOR + LL_VERSION_PATCH);
    lli_fact_add(&facts, "the size of the group", LLI_FACT_INT, group->comm.size);
    lli_fact_add(&facts, "op (ll_op)", LLI_FACT_INT, p->op);
    lli_fact_add(&facts, "n_tokens_max", LLI_FACT_INT, p->n_tokens_max);
    lli_fact_add(&facts, "n_hidden", LLI_FACT_INT, p->n_hidden);
    lli_fact_add(&facts, "v_total", LLI_FACT_INT, p->v_total);
    lli_fact_add(&facts, "x_dtype (ll_dtype)", LLI_FACT_INT, p->x_dtype);
    lli_fact_add(&facts, "w_dtype (ll_dtype)", LLI_FACT_INT, p->w_dtype);
    lli_fact_add(&facts, "bias_dtype (ll_dtype)", LLI_FACT_INT, p->bias_dtype);
    lli_fact_add(&facts, "grad_x_dtype (ll_dtype)", LLI_FACT_INT, p->grad_x_dtype);
    lli_fact_add(&facts, "frozen grad_x", LLI_FACT_INT, (p->frozen & LL_FROZEN_X) != 0);
    lli_fact_add(&facts, "logits_dtype (ll_dtype)", LLI_FACT_INT, p->logits_dtype);
    lli_fact_add(&facts, "n_ids", LLI_FACT_INT, p->n_ids);
    lli_fact_add(&facts, "n_top", LLI_FACT_INT, p->n_top);
    add_loss(&facts, &p->loss);
    const char *numerics = !kernel ? "" : kernel->numerics ? kernel->numerics : kernel->numerics_here();
    lli_fact_add(&facts, "the kernel's numerics", LLI_FACT_CONTENT, lli_hash(numerics, strlen(numerics), 0));
    facts.vote[kVoteBegin] = p->v_begin;
    facts.vote[kVoteCount] = p->v_local;
    facts.vote[kVoteDebug] = group->debug;
    return facts;
}

ll_status lli_agree_plan(lli_group *group, ll_status mine, const lli_problem *problem,
                         const lli_kernel *kernel) {
    const int32_t size = group->comm.size;
    lli_shard *table = calloc((size_t)size, sizeof *table);
    if (!table && mine == LL_STATUS_OK) {
        mine = lli_fail(LL_STATUS_MEMORY, "ll_plan_create: no memory for the shards of %d ranks", size);
    }
    const lli_facts facts = plan_facts(group, problem, kernel);
    ll_status status = lli_group_agree(group, "ll_plan_create", mine, &facts);
    if (status == LL_STATUS_OK && table) {
        for (int32_t rank = 0; rank < size; rank++) {
            table[rank] =
                (lli_shard){lli_group_vote(group, rank, kVoteBegin), lli_group_vote(group, rank, kVoteCount)};
        }
        group->debug = lli_group_vote_max(group, kVoteDebug) != 0;
        status = lli_shards_check(table, size, problem->v_total);
    }
    /* Out of memory here is one rank's own fault: it goes into the next meeting. */
    if (status == LL_STATUS_OK && table) {
        (void)lli_shards_make(table, size, group->comm.rank, problem->v_total, &group->shards);
    }
    free(table);
    return status;
}

enum { kVoteForward, kVoteOnePass, kVoteOnePassTokens, kVoteGradTokens, kVoteColumnsOutside };

ll_status lli_agree_cuts(lli_group *group, ll_status mine, lli_config *config) {
    lli_facts facts = lli_facts_begin(LLI_CALL_PLAN_CUTS);
    facts.vote[kVoteForward] = config->forward_tokens;
    facts.vote[kVoteOnePass] = config->one_pass;
    facts.vote[kVoteOnePassTokens] = config->one_pass_tokens;
    facts.vote[kVoteGradTokens] = config->grad_tokens;
    facts.vote[kVoteColumnsOutside] = config->columns_outside;
    LLI_TRY(lli_group_agree(group, "ll_plan_create", mine, &facts));
    config->forward_tokens = lli_group_vote_min(group, kVoteForward);
    config->one_pass = (int32_t)lli_group_vote_min(group, kVoteOnePass);
    config->one_pass_tokens = config->one_pass ? lli_group_vote_min(group, kVoteOnePassTokens) : 0;
    config->grad_tokens = lli_group_vote_min(group, kVoteGradTokens);
    config->columns_outside = (int32_t)lli_group_vote_max(group, kVoteColumnsOutside);
    return LL_STATUS_OK;
}

ll_status lli_agree_ready(lli_group *group, ll_status mine, lli_config *config) {
    lli_facts facts = lli_facts_begin(LLI_CALL_PLAN_READY);
    facts.vote[kVoteOnePass] = config->one_pass;
    LLI_TRY(lli_group_agree(group, "ll_plan_create", mine, &facts));
    config->one_pass = (int32_t)lli_group_vote_min(group, kVoteOnePass);
    if (!config->one_pass) config->one_pass_tokens = 0;
    return LL_STATUS_OK;
}

/* ---- Calls -------------------------------------------------------------------------------------- */

/* Which arguments are given: their presence decides what is computed. */
static void add_given(lli_facts *facts, const ll_linear_ce_args *a, ll_pass pass) {
    lli_fact_add(facts, "class_weight given", LLI_FACT_INT, a->class_weight != NULL);
    lli_fact_add(facts, "token_weight given", LLI_FACT_INT, a->token_weight != NULL);
    lli_fact_add(facts, "divisor given", LLI_FACT_INT, a->divisor != NULL);
    if (pass == LL_PASS_FORWARD) return;
    lli_fact_add(facts, "up_loss given", LLI_FACT_INT, a->up_loss != NULL);
    lli_fact_add(facts, "up_nll given", LLI_FACT_INT, a->up_nll != NULL);
    lli_fact_add(facts, "up_lse given", LLI_FACT_INT, a->up_lse != NULL);
    lli_fact_add(facts, "up_entropy given", LLI_FACT_INT, a->up_entropy != NULL);
    lli_fact_add(facts, "grad_x asked for", LLI_FACT_INT, a->grad_x.data != NULL);
    if (pass == LL_PASS_BACKWARD) {
        lli_fact_add(facts, "lse_lo given", LLI_FACT_INT, a->lse_lo != NULL);
    }
}

static int64_t hash_targets(const lli_call *call) {
    const ll_view *target = &call->args->target;
    int64_t hash = 0;
    for (int64_t i = 0; i < call->n_tokens; i++) {
        const int64_t id = lli_id(target, i);
        hash = lli_hash(&id, sizeof id, hash);
    }
    return hash;
}

static int64_t hash_ids(const lli_call *call) {
    const ll_view *ids = &call->ce->ids;
    int64_t hash = 0;
    for (int64_t i = 0; i < ids->rows; i++) {
        for (int64_t j = 0; j < ids->cols; j++) {
            const int64_t id = lli_id_at(ids, i, j);
            hash = lli_hash(&id, sizeof id, hash);
        }
    }
    return hash;
}

static int64_t hash_floats(const float *values, int64_t n, int64_t hash) {
    return values && n ? lli_hash(values, (size_t)n * sizeof *values, hash) : hash;
}

static int64_t hash_x(const lli_call *call) {
    const ll_view *x = &call->args->x;
    int64_t hash = 0;
    for (int64_t i = 0; i < call->n_tokens; i++) {
        hash = lli_hash(lli_row(x, i), (size_t)x->cols * ll_dtype_bytes((ll_dtype)x->dtype), hash);
    }
    return hash;
}

static int64_t hash_upstreams(const ll_linear_ce_args *a, int64_t n, int64_t n_loss) {
    int64_t hash = hash_floats(a->up_loss, n_loss, 0);
    hash = hash_floats(a->up_nll, n, hash);
    hash = hash_floats(a->up_lse, n, hash);
    return hash_floats(a->up_entropy, n, hash);
}

static int64_t hash_saved(const ll_linear_ce_args *a, int64_t n) {
    int64_t hash = hash_floats(a->nll, n, 0);
    hash = hash_floats(a->lse, n, hash);
    hash = hash_floats(a->lse_lo, n, hash);
    return hash_floats(a->entropy, n, hash);
}

/* Reads everything that all ranks must share; x and weights only in debug mode, because that takes time. */
static void add_contents(lli_facts *facts, const lli_problem *problem, const lli_call *call) {
    const ll_linear_ce_args *a = call->args;
    const int64_t n = call->n_tokens, n_loss = problem->loss.reduction == LL_REDUCTION_NONE ? n : 1;
    if (!call->ce) lli_fact_add(facts, "x", LLI_FACT_CONTENT, hash_x(call)); /* logits are each rank's own */
    lli_fact_add(facts, "class_weight", LLI_FACT_CONTENT, hash_floats(a->class_weight, problem->v_total, 0));
    lli_fact_add(facts, "token_weight", LLI_FACT_CONTENT, hash_floats(a->token_weight, n, 0));
    if (call->pass != LL_PASS_FORWARD) {
        lli_fact_add(facts, "an upstream (up_loss, up_nll, up_lse, up_entropy)", LLI_FACT_CONTENT,
                     hash_upstreams(a, n, n_loss));
    }
    if (call->pass == LL_PASS_BACKWARD) {
        lli_fact_add(facts, "a saved result (nll, lse, lse_lo, entropy)", LLI_FACT_CONTENT, hash_saved(a, n));
    }
}

static void add_targets(lli_facts *facts, const lli_call *call) {
    int64_t divisor = 0;
    if (call->args->divisor) memcpy(&divisor, call->args->divisor, sizeof divisor);
    lli_fact_add(facts, "the target", LLI_FACT_CONTENT, hash_targets(call));
    lli_fact_add(facts, "the divisor", LLI_FACT_F64, divisor);
    if (call->ce) lli_fact_add(facts, "the ids", LLI_FACT_CONTENT, hash_ids(call));
}

enum { kVoteEntropy, kVoteArgmax, kVoteRank, kVoteTop };

ll_status lli_agree_call(lli_group *group, ll_status mine, const lli_problem *problem, ll_op op, bool on_host,
                         lli_call *call) {
    const ll_linear_ce_args *a = call->args;
    const int first = op == LL_OP_CE ? LLI_CALL_CE_FORWARD : LLI_CALL_FORWARD;
    lli_facts facts = lli_facts_begin((lli_call_name)(first + (int)call->pass));
    if (mine == LL_STATUS_OK) {
        lli_fact_add(&facts, call->ce ? "the rows of logits" : "the rows of x", LLI_FACT_INT, call->n_tokens);
        add_given(&facts, a, call->pass);
        if (call->ce) lli_fact_add(&facts, "the columns of ids", LLI_FACT_INT, call->ce->ids.cols);
        if (on_host) add_targets(&facts, call);
        if (on_host && group->debug) add_contents(&facts, problem, call);
    }
    facts.vote[kVoteEntropy] = call->want_entropy;
    facts.vote[kVoteArgmax] = call->want_argmax;
    facts.vote[kVoteRank] = call->want_rank;
    facts.vote[kVoteTop] = call->want_top;
    LLI_TRY(lli_group_agree(group, call->name, mine, &facts));
    call->want_entropy = lli_group_vote_max(group, kVoteEntropy) != 0;
    call->want_argmax = lli_group_vote_max(group, kVoteArgmax) != 0;
    call->want_rank = lli_group_vote_max(group, kVoteRank) != 0;
    call->want_top = lli_group_vote_max(group, kVoteTop) != 0;
    return LL_STATUS_OK;
}
