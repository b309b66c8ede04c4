/* Checks of a plan description. */
#include "core/problem.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

#define BAD(...) return lli_fail(LL_STATUS_INVALID_ARG, "ll_plan_create: " __VA_ARGS__)

ll_status lli_struct_copy(void *to, size_t to_bytes, const void *from, size_t least, const char *what) {
    size_t from_bytes;
    memcpy(&from_bytes, from, sizeof from_bytes);
    LLI_REQUIRE(from_bytes >= least && from_bytes <= 65536, LL_STATUS_INVALID_ARG,
                "%s: struct_bytes is %zu, want at least %zu (set by the _INIT macro)", what, from_bytes,
                least);
    const unsigned char *bytes = from;
    for (size_t i = to_bytes; i < from_bytes; i++) {
        LLI_REQUIRE(bytes[i] == 0, LL_STATUS_INVALID_ARG,
                    "%s: byte %zu is set, but this library knows %zu bytes (newer header than library %s)",
                    what, i, to_bytes, ll_version());
    }
    memset(to, 0, to_bytes);
    memcpy(to, from, from_bytes < to_bytes ? from_bytes : to_bytes);
    return LL_STATUS_OK;
}

static bool is_float_dtype(int32_t dtype) {
    return dtype == LL_DTYPE_F32 || dtype == LL_DTYPE_BF16 || dtype == LL_DTYPE_F16;
}

static ll_status check_loss(const ll_loss *loss, int64_t v_total) {
    if (!(loss->temperature > 0.0f && loss->temperature <= FLT_MAX && 1.0f / loss->temperature <= FLT_MAX)) {
        BAD("temperature is %g, want > 0 and finite, with a finite 1/T (LL_LOSS_INIT sets 1)",
            (double)loss->temperature);
    }
    if (!(loss->softcap >= 0.0f && loss->softcap <= FLT_MAX)) {
        BAD("softcap is %g, want >= 0 and finite", (double)loss->softcap);
    }
    if (!(loss->label_smoothing >= 0.0f && loss->label_smoothing <= 1.0f)) {
        BAD("label_smoothing is %g, want 0 .. 1", (double)loss->label_smoothing);
    }
    if (!(loss->z_loss >= 0.0f && loss->z_loss <= FLT_MAX)) {
        BAD("z_loss is %g, want >= 0 and finite", (double)loss->z_loss);
    }
    if (loss->smoothing_rule != LL_SMOOTHING_ALL && loss->smoothing_rule != LL_SMOOTHING_OTHERS) {
        BAD("smoothing_rule is %d, want an ll_smoothing", loss->smoothing_rule);
    }
    if (loss->smoothing_rule == LL_SMOOTHING_OTHERS && loss->label_smoothing > 0.0f && v_total < 2) {
        BAD("LL_SMOOTHING_OTHERS with v_total 1: there is no other class to give mass to");
    }
    if (loss->reduction < LL_REDUCTION_MEAN || loss->reduction > LL_REDUCTION_NONE) {
        BAD("reduction is %d, want an ll_reduction", loss->reduction);
    }
    if (loss->token_scaling != 0 && loss->token_scaling != 1) {
        BAD("token_scaling is %d, want 0 or 1", loss->token_scaling);
    }
    if (loss->reserved != 0) BAD("ll_loss.reserved is %d, want 0", loss->reserved);
    return LL_STATUS_OK;
}

static ll_status check_grad_dtype(const char *name, int32_t input, int32_t *grad) {
    if (*grad == LL_DTYPE_NONE) *grad = input;
    if (*grad != input && *grad != LL_DTYPE_F32) {
        BAD("%s is %s, want that of its input (%s) or f32", name, ll_dtype_name((ll_dtype)*grad),
            ll_dtype_name((ll_dtype)input));
    }
    return LL_STATUS_OK;
}

static ll_status check_shape(const ll_plan_desc *desc) {
    /* Bounds that keep every product of two sizes and an element size inside int64. */
    const int64_t size_max = (int64_t)1 << 40;
    if (desc->n_tokens_max < 0 || desc->n_tokens_max > size_max) {
        BAD("n_tokens_max is %lld, want 0 .. 2^40", (long long)desc->n_tokens_max);
    }
    if (desc->v_total < 1 || desc->v_total > LL_VOCAB_MAX) {
        BAD("v_total is %lld, want 1 .. %lld", (long long)desc->v_total, (long long)LL_VOCAB_MAX);
    }
    if (desc->v_begin < 0 || desc->v_begin > 4 * LL_VOCAB_MAX || desc->v_local < 0 ||
        desc->v_local > 2 * LL_VOCAB_MAX) {
        BAD("shard [%lld, %lld + %lld) is no range of columns", (long long)desc->v_begin,
            (long long)desc->v_begin, (long long)desc->v_local);
    }
    if (!desc->comm && (desc->v_begin != 0 || desc->v_local < desc->v_total)) {
        BAD("without a communicator the shard must cover the vocabulary: v_begin %lld, v_local %lld; want 0 "
            "and at least v_total %lld",
            (long long)desc->v_begin, (long long)desc->v_local, (long long)desc->v_total);
    }
    return LL_STATUS_OK;
}

static ll_status check_linear_ce(const ll_plan_desc *desc, lli_problem *problem) {
    if (desc->n_hidden < 1 || desc->n_hidden > (int64_t)1 << 20) {
        BAD("n_hidden is %lld, want 1 .. 2^20", (long long)desc->n_hidden);
    }
    if (!is_float_dtype(desc->x_dtype) || !is_float_dtype(desc->w_dtype)) {
        BAD("x_dtype is %s and w_dtype %s, want f32, bf16 or f16", ll_dtype_name((ll_dtype)desc->x_dtype),
            ll_dtype_name((ll_dtype)desc->w_dtype));
    }
    if (desc->bias_dtype != LL_DTYPE_NONE && !is_float_dtype(desc->bias_dtype)) {
        BAD("bias_dtype is %s, want none, f32, bf16 or f16", ll_dtype_name((ll_dtype)desc->bias_dtype));
    }
    LLI_TRY(check_grad_dtype("grad_x_dtype", desc->x_dtype, &problem->grad_x_dtype));
    LLI_TRY(check_grad_dtype("grad_w_dtype", desc->w_dtype, &problem->grad_w_dtype));
    if (desc->bias_dtype == LL_DTYPE_NONE && desc->grad_bias_dtype != LL_DTYPE_NONE) {
        BAD("grad_bias_dtype is %s, but there is no bias", ll_dtype_name((ll_dtype)desc->grad_bias_dtype));
    }
    LLI_TRY(check_grad_dtype("grad_bias_dtype", desc->bias_dtype, &problem->grad_bias_dtype));
    if (desc->frozen & ~(LL_FROZEN_X | LL_FROZEN_W | LL_FROZEN_BIAS)) {
        BAD("frozen is %#x, want LL_FROZEN_ bits", (unsigned)desc->frozen);
    }
    return LL_STATUS_OK;
}

static ll_status check_ce(const ll_plan_desc *desc, lli_problem *problem) {
    if (!is_float_dtype(desc->logits_dtype)) {
        BAD("logits_dtype is %s, want f32, bf16 or f16", ll_dtype_name((ll_dtype)desc->logits_dtype));
    }
    LLI_TRY(check_grad_dtype("grad_logits_dtype", desc->logits_dtype, &problem->grad_logits_dtype));
    if (desc->n_ids < 0 || desc->n_ids > LL_CE_IDS_MAX) {
        BAD("n_ids is %d, want 0 .. %d", desc->n_ids, LL_CE_IDS_MAX);
    }
    if (desc->n_top < 0 || desc->n_top > LL_CE_TOP_MAX || desc->n_top > desc->v_total) {
        BAD("n_top is %d, want 0 .. %d and at most v_total %lld", desc->n_top, LL_CE_TOP_MAX,
            (long long)desc->v_total);
    }
    return LL_STATUS_OK;
}

/* A field of the other operation that is set: the caller believes that it does something. */
static ll_status check_other_op(const ll_plan_desc *desc) {
    const bool ce = desc->op == LL_OP_CE;
    const struct {
        const char *name;
        bool of_ce;
        int64_t value;
    } fields[] = {
        {"n_hidden", false, desc->n_hidden},
        {"x_dtype", false, desc->x_dtype},
        {"w_dtype", false, desc->w_dtype},
        {"bias_dtype", false, desc->bias_dtype},
        {"grad_x_dtype", false, desc->grad_x_dtype},
        {"grad_w_dtype", false, desc->grad_w_dtype},
        {"grad_bias_dtype", false, desc->grad_bias_dtype},
        {"frozen", false, desc->frozen},
        {"logits_dtype", true, desc->logits_dtype},
        {"grad_logits_dtype", true, desc->grad_logits_dtype},
        {"n_ids", true, desc->n_ids},
        {"n_top", true, desc->n_top},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].of_ce != ce && fields[i].value != 0) {
            BAD("%s is %lld, want 0 for %s", fields[i].name, (long long)fields[i].value,
                ce ? "LL_OP_CE" : "LL_OP_LINEAR_CE");
        }
    }
    return LL_STATUS_OK;
}

ll_status lli_problem_check(const ll_plan_desc *desc, lli_problem *problem) {
    if (desc->op != LL_OP_LINEAR_CE && desc->op != LL_OP_CE) BAD("op is %d, want an ll_op", desc->op);
    if (desc->backend < LL_BACKEND_AUTO || desc->backend > LL_BACKEND_CUDA) {
        BAD("backend is %d, want an ll_backend", desc->backend);
    }
    LLI_TRY(check_shape(desc));
    LLI_TRY(check_other_op(desc));
    *problem = (lli_problem){
        .n_tokens_max = desc->n_tokens_max,
        .n_hidden = desc->n_hidden,
        .v_begin = desc->v_begin,
        .v_local = desc->v_local,
        .v_total = desc->v_total,
        .x_dtype = desc->x_dtype,
        .w_dtype = desc->w_dtype,
        .bias_dtype = desc->bias_dtype,
        .grad_x_dtype = desc->grad_x_dtype,
        .grad_w_dtype = desc->grad_w_dtype,
        .grad_bias_dtype = desc->grad_bias_dtype,
        .frozen = desc->frozen,
        .backend = desc->backend,
        .n_threads = desc->n_threads,
        .budget_bytes = desc->workspace_budget_bytes,
        .loss = LL_LOSS_INIT,
        .in_group = desc->comm != NULL,
        .op = desc->op,
        .logits_dtype = desc->logits_dtype,
        .grad_logits_dtype = desc->grad_logits_dtype,
        .n_ids = desc->n_ids,
        .n_top = desc->n_top,
    };
    LLI_TRY(desc->op == LL_OP_CE ? check_ce(desc, problem) : check_linear_ce(desc, problem));
    if (desc->loss) {
        LLI_TRY(lli_struct_copy(&problem->loss, sizeof problem->loss, desc->loss, sizeof(size_t),
                                "ll_plan_create: ll_loss"));
    }
    LLI_TRY(check_loss(&problem->loss, problem->v_total));
    if (desc->n_threads < 0 || desc->n_threads > kPoolMaxThreads) {
        BAD("n_threads is %d, want 0 .. %d", desc->n_threads, kPoolMaxThreads);
    }
    if (problem->n_threads == 0) LLI_TRY(lli_pool_default_threads(&problem->n_threads));
    return LL_STATUS_OK;
}
