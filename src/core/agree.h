/* What the ranks of a plan agree on: descriptions, shards and cuts when it is made, arguments in every call.
 */
#ifndef LLI_CORE_AGREE_H
#define LLI_CORE_AGREE_H

#include "core/group.h"
#include "core/plan.h"

/* First meeting of ll_plan_create: errors of any rank, descriptions, the shard table; fills group->shards. */
ll_status lli_agree_plan(lli_group *group, ll_status mine, const lli_problem *problem,
                         const lli_kernel *kernel);

/* Second meeting: from every rank's own choice of cuts to chunks of tokens that all ranks go through
 * together. */
ll_status lli_agree_cuts(lli_group *group, ll_status mine, lli_config *config);

/* Third meeting: the plan is ready on every rank, or on none. Where one rank's budget does not hold the
 * agreed chunk of one pass, no rank takes one pass. */
ll_status lli_agree_ready(lli_group *group, ll_status mine, lli_config *config);

/* The meeting that every pass starts with; sets what any rank wants. call->args may be NULL where `mine` is
 * an error. op: of the function that was called. on_host: operands may be read here; else their contents are
 * not compared. */
ll_status lli_agree_call(lli_group *group, ll_status mine, const lli_problem *problem, ll_op op, bool on_host,
                         lli_call *call);

#endif
