/* Makes the operands of ce's problems; see ce_problems.h. */
#include "ce_problems.h"

#include <math.h>

void ce_problem_desc(const struct problem *problem, ll_plan_desc *desc) {
    ll_plan_desc filled = LL_PLAN_DESC_INIT;
    filled.op = LL_OP_CE;
    filled.n_tokens_max = problem->n_tokens;
    filled.v_local = problem->v_total + problem->v_pad;
    filled.v_total = problem->v_total;
    filled.logits_dtype = (int32_t)problem->x_dtype;
    filled.grad_logits_dtype = (int32_t)problem->grad_x_dtype;
    filled.n_ids = problem->n_ids;
    filled.n_top = problem->n_top;
    filled.n_threads = problem->n_threads;
    filled.workspace_budget_bytes = (size_t)problem->workspace_kib * 1024;
    filled.loss = &problem->loss;
    *desc = filled;
}

/* ---- Arguments ---------------------------------------------------------------------------------- */

ll_ce_args ce_problem_args(const struct problem *problem, const struct ce_operands *operands,
                           struct ce_results *results, ll_pass pass) {
    ll_ce_args args = operands->args;
    const bool forward = pass != LL_PASS_BACKWARD;
    if (problem->in_place) {
        args.logits = results->grad_logits;
        args.state = &results->state;
    }
    args.nll = results->nll;
    args.lse = results->lse;
    args.lse_lo = results->lse_lo;
    args.entropy = results->entropy;
    args.loss = forward ? results->loss : NULL;
    args.z_loss = forward ? results->z_loss : NULL;
    args.argmax = forward ? results->argmax : NULL;
    args.sums = forward ? results->sums : NULL;
    args.id_logp = forward ? results->id_logp : NULL;
    args.id_rank = forward ? results->id_rank : NULL;
    args.top_ids = forward ? results->top_ids : NULL;
    args.top_logp = forward ? results->top_logp : NULL;
    if (!forward) args.ids = (ll_view){0};
    if (pass == LL_PASS_FORWARD) {
        args.up_loss = args.up_nll = args.up_lse = args.up_entropy = NULL;
    } else {
        args.grad_logits = results->grad_logits;
        args.in_place = problem->in_place;
    }
    return args;
}

static void slice_view(ll_view *view, int64_t first, int64_t count) {
    if (!view->data) return;
    view->data = (void *)lli_row(view, first);
    view->rows = count;
}

#define MOVE(field, by)                                                                                      \
    do {                                                                                                     \
        if (args->field) args->field += (by);                                                                \
    } while (0)

void ce_problem_slice(const struct problem *problem, ll_ce_args *args, int64_t first, int64_t count) {
    const int64_t m = args->ids.cols, k = problem->n_top;
    slice_view(&args->logits, first, count);
    slice_view(&args->target, first, count);
    slice_view(&args->grad_logits, first, count);
    slice_view(&args->ids, first, count);
    MOVE(nll, first);
    MOVE(lse, first);
    MOVE(lse_lo, first);
    MOVE(entropy, first);
    MOVE(z_loss, first);
    MOVE(argmax, first);
    MOVE(token_weight, first);
    MOVE(up_nll, first);
    MOVE(up_lse, first);
    MOVE(up_entropy, first);
    MOVE(id_logp, first * m);
    MOVE(id_rank, first * m);
    MOVE(top_ids, first * k);
    MOVE(top_logp, first * k);
    if (problem->loss.reduction == LL_REDUCTION_NONE) {
        MOVE(loss, first);
        MOVE(up_loss, first);
    }
}

/* ---- Inputs ------------------------------------------------------------------------------------- */

static double uniform(uint64_t *state, double low, double high) {
    return low + (high - low) * (double)(problem_random(state) >> 11) * 0x1p-53;
}

static void store(const ll_view *view, int64_t r, int64_t c, double value) {
    lli_store(view->data, view->dtype, r * view->row_stride + c, (float)value);
}

static void store_id(const ll_view *view, int64_t at, int64_t id) {
    if (view->dtype == LL_DTYPE_I64) {
        ((int64_t *)view->data)[at] = id;
    } else {
        ((int32_t *)view->data)[at] = (int32_t)id;
    }
}

static int64_t pick_target(const struct problem *p, int64_t i, uint64_t *state) {
    int64_t target = (int64_t)(problem_random(state) % (uint64_t)p->v_total);
    if (p->ignore_all || (p->ignore_every && i % p->ignore_every == p->ignore_every / 2)) {
        return p->loss.ignore_index;
    }
    if (p->finite_every) target -= target % p->finite_every;
    if (p->finite_every && i == 1 && target + 1 < p->v_total) target += 1;
    return target;
}

static void fill_row(const struct problem *p, const ll_view *logits, int64_t i, int64_t target,
                     uint64_t *state) {
    double last = 0.0;
    for (int64_t v = 0; v < p->v_total; ++v) {
        double value = p->tie && v % 2 == 1 ? last : problem_normal(state) * p->scale + p->offset;
        last = value;
        if (p->confidence != 0.0 && i % 2 == 0 && v == target) value += p->confidence;
        if (p->finite_every && v % p->finite_every != 0) value = -(double)INFINITY;
        store(logits, i, v, value);
    }
    if (p->nan_every && i % p->nan_every == 0) store(logits, i, p->v_total / 2, (double)NAN);
}

/* Rows of logits of ignored tokens stay NaN, and so does padding: neither may reach anything. Every third
 * row's first id is the target, every seventh id none. */
static void fill_tokens(const struct problem *p, ll_ce_args *a, uint64_t *state) {
    for (int64_t i = 0; i < p->n_tokens; ++i) {
        const int64_t target = pick_target(p, i, state);
        store_id(&a->target, i * p->target_step, target);
        const bool ignored = target == p->loss.ignore_index;
        if (!ignored) fill_row(p, &a->logits, i, target, state);
        for (int64_t j = 0; j < p->n_ids && !ignored; ++j) {
            int64_t id = (int64_t)(problem_random(state) % (uint64_t)p->v_total);
            if (i % 3 == 0 && j == 0) id = target;
            if ((i + j) % 7 == 6) id = p->loss.ignore_index;
            store_id(&a->ids, i * a->ids.row_stride + j, id);
        }
    }
}

static const float *random_floats(struct guarded *buffer, int64_t n, double low, double high,
                                  uint64_t *state) {
    float *values = guarded_alloc(buffer, n, sizeof *values, false);
    for (int64_t i = 0; values && i < n; ++i) {
        values[i] = (float)(low < high ? uniform(state, low, high) : problem_normal(state));
    }
    return values;
}

static uint64_t checksum(const struct ce_operands *operands) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t b = 0; b < kCeInputs; ++b) hash = guarded_hash(&operands->buffers[b], hash);
    return hash;
}

bool ce_operands_create(const struct problem *problem, struct ce_operands *operands) {
    const struct problem *p = problem;
    uint64_t state = p->seed | 1u;
    const int64_t n = p->n_tokens, n_loss = p->loss.reduction == LL_REDUCTION_NONE ? n : 1;
    ll_ce_args args = LL_CE_ARGS_INIT;
    *operands = (struct ce_operands){.args = args, .divisor = p->divisor};
    struct guarded *b = operands->buffers;
    ll_ce_args *a = &operands->args;
    bool fine =
        guarded_matrix(&b[0], &a->logits, p->x_dtype, n, p->v_total + p->v_pad, p->x_gap, p->misaligned) &&
        guarded_vector(&b[1], &a->target, p->target_dtype, n, p->target_step);
    if (p->n_ids)
        fine = fine && guarded_matrix(&b[2], &a->ids, p->target_dtype, n, p->n_ids, p->x_gap, false);
    if (!fine) return false;
    fill_tokens(p, a, &state);
    if (p->class_weight)
        fine = (a->class_weight = random_floats(&b[3], p->v_total, 0.25, 2.0, &state)) && fine;
    for (int64_t v = 0; fine && p->zero_class_weight && v < p->v_total; v += 3)
        ((float *)b[3].data)[v] = 0.0f;
    if (p->token_weight) fine = (a->token_weight = random_floats(&b[4], n, -0.5, 1.5, &state)) && fine;
    for (int64_t i = 0; fine && p->zero_token_weight && i < n; i += 3) ((float *)b[4].data)[i] = 0.0f;
    if (!p->no_up_loss) fine = (a->up_loss = random_floats(&b[5], n_loss, 0.5, 1.5, &state)) && fine;
    if (p->upstream) {
        fine = (a->up_nll = random_floats(&b[6], n, 0.0, 0.0, &state)) && fine;
        fine = (a->up_lse = random_floats(&b[7], n, 0.0, 0.0, &state)) && fine;
        fine = (a->up_entropy = random_floats(&b[8], n, 0.0, 0.0, &state)) && fine;
    }
    if (p->divisor != 0.0) a->divisor = &operands->divisor;
    operands->checksum = checksum(operands);
    return fine;
}

void ce_operands_destroy(struct ce_operands *operands) {
    guarded_free(operands->buffers, kCeInputs);
}

bool ce_operands_intact(const struct ce_operands *operands) {
    for (int64_t b = 0; b < kCeInputs; ++b) {
        if (!guarded_intact(&operands->buffers[b])) return false;
    }
    return checksum(operands) == operands->checksum;
}

/* ---- Outputs ------------------------------------------------------------------------------------ */

bool ce_results_create(const struct problem *problem, const struct ce_operands *operands,
                       struct ce_results *results) {
    const struct problem *p = problem;
    const int64_t n = p->n_tokens, v_local = p->v_total + p->v_pad, ids = n * p->n_ids, top = n * p->n_top;
    const ll_dtype dtype = p->grad_x_dtype ? p->grad_x_dtype : p->x_dtype;
    const ll_ce_state state = LL_CE_STATE_INIT;
    *results = (struct ce_results){.n_loss = p->loss.reduction == LL_REDUCTION_NONE ? n : 1, .state = state};
    struct guarded *b = results->buffers;
    float **floats[] = {&results->nll, &results->lse, &results->lse_lo, &results->entropy, &results->z_loss};
    bool fine = (results->loss = guarded_alloc(&b[0], results->n_loss, sizeof(float), false)) != NULL;
    for (int32_t f = 0; f < 5; ++f)
        fine = (*floats[f] = guarded_alloc(&b[1 + f], n, sizeof(float), false)) && fine;
    fine = (results->argmax = guarded_alloc(&b[6], n, sizeof(int64_t), false)) && fine;
    fine = (results->sums = guarded_alloc(&b[7], 1, sizeof(ll_sums), false)) && fine;
    if (ids) {
        fine = (results->id_logp = guarded_alloc(&b[8], ids, sizeof(float), false)) && fine;
        fine = (results->id_rank = guarded_alloc(&b[9], ids, sizeof(int64_t), false)) && fine;
    }
    if (top) {
        fine = (results->top_ids = guarded_alloc(&b[10], top, sizeof(int64_t), false)) && fine;
        fine = (results->top_logp = guarded_alloc(&b[11], top, sizeof(float), false)) && fine;
    }
    const int64_t gap = p->in_place ? p->x_gap : p->grad_x_gap;
    fine = guarded_matrix(&b[12], &results->grad_logits, dtype, n, v_local, gap, p->misaligned) && fine;
    if (!fine) return false;
    if (p->in_place) memcpy(b[12].data, operands->buffers[0].data, b[12].bytes);
    for (int64_t i = 0; i < n; ++i) results->argmax[i] = INT64_MIN; /* -1 is a result */
    for (int64_t i = 0; i < top; ++i) results->top_ids[i] = INT64_MIN;
    return true;
}

void ce_results_destroy(struct ce_results *results) {
    guarded_free(results->buffers, kCeOutputs);
}

bool ce_results_intact(const struct ce_results *results) {
    for (int64_t b = 0; b < kCeOutputs; ++b) {
        if (!guarded_intact(&results->buffers[b])) return false;
    }
    return guarded_gaps_intact(&results->grad_logits);
}
