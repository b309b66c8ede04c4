/* Parses problem strings and makes their operands; see problems.h. Leaves out what a right result is. */
#include "problems.h"
#include "core/dtype.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Parsing ------------------------------------------------------------------------------------ */

enum option_kind {
    OPTION_I64,
    OPTION_F32,
    OPTION_F64,
    OPTION_FLAG,
    OPTION_SET_I32,
    OPTION_OR_I32,
    OPTION_DTYPE
};

struct option {
    const char *name; /* followed by a number if the kind is I64, F32 or F64 */
    enum option_kind kind;
    size_t offset;
    int32_t value; /* of SET, OR and DTYPE */
};

#define AT(field) offsetof(struct problem, field)

static const struct option options[] = {
    {"n", OPTION_I64, AT(n_tokens), 0},
    {"d", OPTION_I64, AT(n_hidden), 0},
    {"v", OPTION_I64, AT(v_total), 0},
    {"pad", OPTION_I64, AT(v_pad), 0},
    {"cap", OPTION_F32, AT(loss.softcap), 0},
    {"t", OPTION_F32, AT(loss.temperature), 0},
    {"zl", OPTION_F32, AT(loss.z_loss), 0},
    {"ls", OPTION_F32, AT(loss.label_smoothing), 0},
    {"lso", OPTION_F32, AT(loss.label_smoothing), 0}, /* and the rule, set after parsing */
    {"mean", OPTION_SET_I32, AT(loss.reduction), LL_REDUCTION_MEAN},
    {"sum", OPTION_SET_I32, AT(loss.reduction), LL_REDUCTION_SUM},
    {"none", OPTION_SET_I32, AT(loss.reduction), LL_REDUCTION_NONE},
    {"div", OPTION_F64, AT(divisor), 0},
    {"cw", OPTION_FLAG, AT(class_weight), 0},
    {"cw0", OPTION_FLAG, AT(zero_class_weight), 0},
    {"tw", OPTION_FLAG, AT(token_weight), 0},
    {"tw0", OPTION_FLAG, AT(zero_token_weight), 0},
    {"ts", OPTION_SET_I32, AT(loss.token_scaling), 1},
    {"bias", OPTION_DTYPE, AT(bias_dtype), LL_DTYPE_NONE},
    {"biasf32", OPTION_DTYPE, AT(bias_dtype), LL_DTYPE_F32},
    {"ninf", OPTION_I64, AT(finite_every), 0},
    {"ign", OPTION_I64, AT(ignore_every), 0},
    {"ignall", OPTION_FLAG, AT(ignore_all), 0},
    {"id", OPTION_I64, AT(loss.ignore_index), 0},
    {"nan", OPTION_I64, AT(nan_every), 0},
    {"i32", OPTION_DTYPE, AT(target_dtype), LL_DTYPE_I32},
    {"up", OPTION_FLAG, AT(upstream), 0},
    {"noloss", OPTION_FLAG, AT(no_up_loss), 0},
    {"gxf32", OPTION_DTYPE, AT(grad_x_dtype), LL_DTYPE_F32},
    {"gwf32", OPTION_DTYPE, AT(grad_w_dtype), LL_DTYPE_F32},
    {"gbf32", OPTION_DTYPE, AT(grad_bias_dtype), LL_DTYPE_F32},
    {"fx", OPTION_OR_I32, AT(frozen), LL_FROZEN_X},
    {"fw", OPTION_OR_I32, AT(frozen), LL_FROZEN_W},
    {"fb", OPTION_OR_I32, AT(frozen), LL_FROZEN_BIAS},
    {"acc", OPTION_FLAG, AT(accumulate), 0},
    {"sx", OPTION_I64, AT(x_gap), 0},
    {"sw", OPTION_I64, AT(w_gap), 0},
    {"sy", OPTION_I64, AT(target_step), 0},
    {"sb", OPTION_I64, AT(bias_step), 0},
    {"sgx", OPTION_I64, AT(grad_x_gap), 0},
    {"sgw", OPTION_I64, AT(grad_w_gap), 0},
    {"sgb", OPTION_I64, AT(grad_bias_step), 0},
    {"off1", OPTION_FLAG, AT(misaligned), 0},
    {"scale", OPTION_F64, AT(scale), 0},
    {"add", OPTION_F64, AT(offset), 0},
    {"conf", OPTION_F64, AT(confidence), 0},
    {"tie", OPTION_FLAG, AT(tie), 0},
    {"ids", OPTION_SET_I32, AT(n_ids), -1},
    {"top", OPTION_SET_I32, AT(n_top), -1},
    {"inplace", OPTION_FLAG, AT(in_place), 0},
    {"th", OPTION_SET_I32, AT(n_threads), -1}, /* -1: the number that follows */
    {"ws", OPTION_I64, AT(workspace_kib), 0},
    {"seed", OPTION_I64, AT(seed), 0},
};

static bool takes_number(const struct option *option) {
    return option->kind <= OPTION_F64 || (option->kind == OPTION_SET_I32 && option->value == -1);
}

/* Does the part [part, part + length) give this option? */
static bool option_set(const struct option *option, const char *part, size_t length,
                       struct problem *problem) {
    size_t name_length = strlen(option->name);
    char *field = (char *)problem + option->offset, *end = NULL;
    if (length < name_length || memcmp(part, option->name, name_length) != 0) return false;
    if (!takes_number(option)) {
        if (length != name_length) return false;
        if (option->kind == OPTION_FLAG) *(bool *)field = true;
        if (option->kind == OPTION_SET_I32) *(int32_t *)field = option->value;
        if (option->kind == OPTION_OR_I32) *(int32_t *)field |= option->value;
        if (option->kind == OPTION_DTYPE)
            *(ll_dtype *)field = option->value ? (ll_dtype)option->value : problem->w_dtype;
        return true;
    }
    if (length == name_length || !strchr("-.0123456789", part[name_length]))
        return false; /* not "inf", "nan" */
    double number = strtod(part + name_length, &end);
    if (end != part + length) return false;
    if (option->kind == OPTION_I64) *(int64_t *)field = (int64_t)number;
    if (option->kind == OPTION_F32) *(float *)field = (float)number;
    if (option->kind == OPTION_F64) *(double *)field = number;
    if (option->kind == OPTION_SET_I32) *(int32_t *)field = (int32_t)number;
    if (strcmp(option->name, "lso") == 0) problem->loss.smoothing_rule = LL_SMOOTHING_OTHERS;
    return true;
}

static bool parse_dtype(const char *part, size_t length, ll_dtype *dtype) {
    for (int32_t d = LL_DTYPE_F32; d <= LL_DTYPE_F16; ++d) {
        const char *name = ll_dtype_name((ll_dtype)d);
        if (strlen(name) == length && memcmp(name, part, length) == 0) {
            *dtype = (ll_dtype)d;
            return true;
        }
    }
    return false;
}

static bool parse_dtypes(const char *part, size_t length, struct problem *problem) {
    const char *dash = memchr(part, '-', length);
    size_t first = dash ? (size_t)(dash - part) : length;
    if (!parse_dtype(part, first, &problem->x_dtype)) return false;
    problem->w_dtype = problem->x_dtype;
    return !dash || parse_dtype(dash + 1, length - first - 1, &problem->w_dtype);
}

static bool parse_part(const char *part, size_t length, int32_t index, struct problem *problem) {
    static const char *const passes[] = {"fwd", "bwd", "fb", "cef", "ceb", "ce"};
    for (int32_t pass = 0; index == 0 && pass < 6; ++pass) {
        if (strlen(passes[pass]) == length && memcmp(part, passes[pass], length) == 0) {
            problem->pass = (ll_pass)(pass % 3);
            problem->op = (ll_op)(pass / 3);
            return true;
        }
    }
    if (index == 1) return parse_dtypes(part, length, problem);
    for (size_t o = 0; index > 1 && o < sizeof options / sizeof options[0]; ++o) {
        if (option_set(&options[o], part, length, problem)) return true;
    }
    return false;
}

const char *problem_parse(const char *text, struct problem *problem) {
    static _Thread_local char why[256];
    ll_loss loss = LL_LOSS_INIT;
    *problem = (struct problem){.loss = loss, .target_dtype = LL_DTYPE_I64, .target_step = 1, .bias_step = 1};
    problem->grad_bias_step = 1;
    problem->scale = 2.0;
    if (strlen(text) >= sizeof problem->text) return "problem string too long";
    strcpy(problem->text, text);
    int32_t index = 0;
    for (const char *part = text; part; ++index) {
        const char *colon = strchr(part, ':');
        size_t length = colon ? (size_t)(colon - part) : strlen(part);
        if (!parse_part(part, length, index, problem)) {
            snprintf(why, sizeof why, "problem %s: part %d, '%.*s', is not understood", text, index,
                     (int)length, part);
            return why;
        }
        part = colon ? colon + 1 : NULL;
    }
    if (problem->v_total < 1) return "problem: v must be given";
    if ((problem->n_hidden < 1) != (problem->op == LL_OP_CE))
        return problem->op == LL_OP_CE ? "problem: ce has no d" : "problem: d must be given";
    if (problem->finite_every && problem->op != LL_OP_CE && problem->bias_dtype == LL_DTYPE_NONE)
        problem->bias_dtype = problem->w_dtype;
    problem->class_weight |= problem->zero_class_weight;
    problem->token_weight |= problem->zero_token_weight;
    if (problem->seed == 0) { /* FNV-1a of the text */
        problem->seed = 0xcbf29ce484222325u;
        for (const char *c = text; *c; ++c) problem->seed = (problem->seed ^ (uint8_t)*c) * 0x100000001b3u;
    }
    return NULL;
}

void problem_desc(const struct problem *problem, ll_plan_desc *desc) {
    ll_plan_desc filled = LL_PLAN_DESC_INIT;
    filled.n_tokens_max = problem->n_tokens;
    filled.n_hidden = problem->n_hidden;
    filled.v_local = problem->v_total + problem->v_pad;
    filled.v_total = problem->v_total;
    filled.x_dtype = (int32_t)problem->x_dtype;
    filled.w_dtype = (int32_t)problem->w_dtype;
    filled.bias_dtype = (int32_t)problem->bias_dtype;
    filled.grad_x_dtype = (int32_t)problem->grad_x_dtype;
    filled.grad_w_dtype = (int32_t)problem->grad_w_dtype;
    filled.grad_bias_dtype = (int32_t)problem->grad_bias_dtype;
    filled.frozen = problem->frozen;
    filled.n_threads = problem->n_threads;
    filled.workspace_budget_bytes = (size_t)problem->workspace_kib * 1024;
    filled.loss = &problem->loss;
    *desc = filled;
}

/* ---- Arguments ---------------------------------------------------------------------------------- */

ll_linear_ce_args problem_args(const struct problem *problem, const struct operands *operands,
                               const struct results *results, ll_pass pass) {
    ll_linear_ce_args args = operands->args;
    args.nll = results->nll;
    args.lse = results->lse;
    args.lse_lo = results->lse_lo;
    args.entropy = results->entropy;
    if (pass != LL_PASS_BACKWARD) {
        args.loss = results->loss;
        args.z_loss = results->z_loss;
        args.argmax = results->argmax;
        args.sums = results->sums;
    }
    if (pass == LL_PASS_FORWARD) {
        args.up_loss = args.up_nll = args.up_lse = args.up_entropy = NULL;
    } else {
        args.grad_x = results->grad_x;
        args.grad_w = results->grad_w;
        args.grad_bias = results->grad_bias;
        if (problem->accumulate) args.accumulate = LL_ACCUMULATE_X | LL_ACCUMULATE_W | LL_ACCUMULATE_BIAS;
        if (!args.grad_x.data) args.accumulate &= ~LL_ACCUMULATE_X;
        if (!args.grad_w.data) args.accumulate &= ~LL_ACCUMULATE_W;
        if (!args.grad_bias.data) args.accumulate &= ~LL_ACCUMULATE_BIAS;
    }
    return args;
}

static void slice_view(ll_view *view, int64_t first, int64_t count) {
    if (!view->data) return;
    view->data =
        (char *)view->data + (size_t)(first * view->row_stride) * ll_dtype_bytes((ll_dtype)view->dtype);
    view->rows = count;
}

static const float *floats_from(const float *values, int64_t first) {
    return values ? values + first : NULL;
}

void problem_slice(const struct problem *problem, ll_linear_ce_args *args, int64_t first, int64_t count) {
    slice_view(&args->x, first, count);
    slice_view(&args->target, first, count);
    slice_view(&args->grad_x, first, count);
    args->nll = (float *)floats_from(args->nll, first);
    args->lse = (float *)floats_from(args->lse, first);
    args->lse_lo = (float *)floats_from(args->lse_lo, first);
    args->entropy = (float *)floats_from(args->entropy, first);
    args->z_loss = (float *)floats_from(args->z_loss, first);
    if (args->argmax) args->argmax += first;
    args->token_weight = floats_from(args->token_weight, first);
    args->up_nll = floats_from(args->up_nll, first);
    args->up_lse = floats_from(args->up_lse, first);
    args->up_entropy = floats_from(args->up_entropy, first);
    if (problem->loss.reduction == LL_REDUCTION_NONE) {
        args->loss = (float *)floats_from(args->loss, first);
        args->up_loss = floats_from(args->up_loss, first);
    }
}

/* ---- Random inputs ------------------------------------------------------------------------------ */

uint64_t problem_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

double problem_normal(uint64_t *state) { /* the sum of four uniform numbers, scaled to variance 1 */
    uint64_t bits = problem_random(state);
    int64_t sum = 0;
    for (int32_t part = 0; part < 4; ++part) sum += (int64_t)(bits >> (16 * part) & 0xffffu);
    return (double)(sum - 2 * 65535) / 65536.0 * 1.7320508075688772;
}

static double problem_uniform(uint64_t *state, double low, double high) {
    return low + (high - low) * (double)(problem_random(state) >> 11) * 0x1p-53;
}

static void store(const ll_view *view, int64_t r, int64_t c, double value) {
    lli_store(view->data, view->dtype, r * view->row_stride + c, (float)value);
}

static double load(const ll_view *view, int64_t r, int64_t c) {
    return (double)lli_load(view->data, view->dtype, r * view->row_stride + c);
}

static void fill_weights(const struct problem *problem, const ll_view *w, const ll_view *bias,
                         uint64_t *state) {
    double scale = problem->scale / sqrt((double)problem->n_hidden);
    for (int64_t v = 0; v < problem->v_total; ++v) { /* padding rows stay NaN */
        bool copy = problem->tie && v % 2 == 1;
        for (int64_t k = 0; k < w->cols; ++k)
            store(w, v, k, copy ? load(w, v - 1, k) : problem_normal(state) * scale);
        if (problem->offset != 0.0) store(w, v, 0, problem->offset);
        if (!bias->data) continue;
        store(bias, v, 0, copy ? load(bias, v - 1, 0) : 0.5 * problem_normal(state));
        if (problem->finite_every && v % problem->finite_every != 0) store(bias, v, 0, -(double)INFINITY);
    }
}

static int64_t pick_target(const struct problem *problem, int64_t i, uint64_t *state) {
    int64_t target = (int64_t)(problem_random(state) % (uint64_t)problem->v_total);
    bool ignored = problem->ignore_every && i % problem->ignore_every == problem->ignore_every / 2;
    if (ignored || problem->ignore_all) return problem->loss.ignore_index;
    if (problem->finite_every) target -= target % problem->finite_every;
    if (problem->finite_every && i == 1 && target + 1 < problem->v_total) target += 1;
    return target;
}

static void fill_tokens(const struct problem *problem, ll_linear_ce_args *args, uint64_t *state) {
    for (int64_t i = 0; i < problem->n_tokens; ++i) {
        int64_t target = pick_target(problem, i, state);
        if (problem->target_dtype == LL_DTYPE_I64) {
            ((int64_t *)args->target.data)[i * problem->target_step] = target;
        } else {
            ((int32_t *)args->target.data)[i * problem->target_step] = (int32_t)target;
        }
        if (target == problem->loss.ignore_index) continue; /* its row stays NaN: it must reach nothing */
        bool confident = problem->confidence != 0.0 && i % 2 == 0;
        double norm = problem->scale * problem->scale;
        for (int64_t k = 0; k < problem->n_hidden; ++k) {
            double value = problem_normal(state);
            if (confident) value += problem->confidence / norm * load(&args->w, target, k);
            store(&args->x, i, k, problem->offset != 0.0 && k == 0 ? 1.0 : value);
        }
        if (problem->nan_every && i % problem->nan_every == 0)
            store(&args->x, i, problem->n_hidden / 2, (double)NAN);
    }
}

/* An f32 array of n numbers: uniform in [low, high), or normal where low = high. */
static const float *random_floats(struct guarded *buffer, int64_t n, double low, double high,
                                  uint64_t *state) {
    float *values = guarded_alloc(buffer, n, sizeof *values, false);
    for (int64_t i = 0; values && i < n; ++i) {
        values[i] = (float)(low < high ? problem_uniform(state, low, high) : problem_normal(state));
    }
    return values;
}

static uint64_t checksum(const struct operands *operands) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t b = 0; b < kProblemInputs; ++b) hash = guarded_hash(&operands->buffers[b], hash);
    return hash;
}

bool operands_create(const struct problem *problem, struct operands *operands) {
    const struct problem *p = problem;
    uint64_t state = p->seed | 1u;
    int64_t n = p->n_tokens, v_local = p->v_total + p->v_pad;
    int64_t n_loss = p->loss.reduction == LL_REDUCTION_NONE ? n : 1;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    *operands = (struct operands){.args = args, .divisor = p->divisor};
    struct guarded *b = operands->buffers;
    ll_linear_ce_args *a = &operands->args;
    bool fine = guarded_matrix(&b[0], &a->x, p->x_dtype, n, p->n_hidden, p->x_gap, p->misaligned) &&
                guarded_matrix(&b[1], &a->w, p->w_dtype, v_local, p->n_hidden, p->w_gap, p->misaligned) &&
                guarded_vector(&b[2], &a->target, p->target_dtype, n, p->target_step);
    if (p->bias_dtype) fine = fine && guarded_vector(&b[3], &a->bias, p->bias_dtype, v_local, p->bias_step);
    if (!fine) return false;
    fill_weights(p, &a->w, &a->bias, &state);
    fill_tokens(p, a, &state);
    if (p->class_weight)
        fine = (a->class_weight = random_floats(&b[4], p->v_total, 0.25, 2.0, &state)) && fine;
    for (int64_t v = 0; fine && p->zero_class_weight && v < p->v_total; v += 3)
        ((float *)b[4].data)[v] = 0.0f;
    if (p->token_weight) fine = (a->token_weight = random_floats(&b[5], n, -0.5, 1.5, &state)) && fine;
    for (int64_t i = 0; fine && p->zero_token_weight && i < n; i += 3) ((float *)b[5].data)[i] = 0.0f;
    if (!p->no_up_loss) fine = (a->up_loss = random_floats(&b[6], n_loss, 0.5, 1.5, &state)) && fine;
    if (p->upstream) {
        fine = (a->up_nll = random_floats(&b[7], n, 0.0, 0.0, &state)) && fine;
        fine = (a->up_lse = random_floats(&b[8], n, 0.0, 0.0, &state)) && fine;
        fine = (a->up_entropy = random_floats(&b[9], n, 0.0, 0.0, &state)) && fine;
    }
    if (p->divisor != 0.0) a->divisor = &operands->divisor;
    operands->checksum = checksum(operands);
    return fine;
}

void operands_destroy(struct operands *operands) {
    guarded_free(operands->buffers, kProblemInputs);
}

bool operands_intact(const struct operands *operands) {
    for (int64_t b = 0; b < kProblemInputs; ++b) {
        if (!guarded_intact(&operands->buffers[b])) return false;
    }
    return checksum(operands) == operands->checksum;
}

/* ---- Outputs ------------------------------------------------------------------------------------ */

bool results_create(const struct problem *problem, struct results *results) {
    const struct problem *p = problem;
    int64_t n = p->n_tokens, v_local = p->v_total + p->v_pad;
    *results = (struct results){.n_loss = p->loss.reduction == LL_REDUCTION_NONE ? n : 1};
    struct guarded *b = results->buffers;
    float **floats[] = {&results->nll, &results->lse, &results->lse_lo, &results->entropy, &results->z_loss};
    bool fine = (results->loss = guarded_alloc(&b[0], results->n_loss, sizeof(float), false)) != NULL;
    for (int32_t f = 0; f < 5; ++f)
        fine = (*floats[f] = guarded_alloc(&b[1 + f], n, sizeof(float), false)) && fine;
    fine = (results->argmax = guarded_alloc(&b[6], n, sizeof(int64_t), false)) && fine;
    fine = (results->sums = guarded_alloc(&b[7], 1, sizeof(ll_sums), false)) && fine;
    ll_dtype x_dtype = p->grad_x_dtype ? p->grad_x_dtype : p->x_dtype;
    ll_dtype w_dtype = p->grad_w_dtype ? p->grad_w_dtype : p->w_dtype;
    ll_dtype bias_dtype = p->grad_bias_dtype ? p->grad_bias_dtype : p->bias_dtype;
    bool want_x = !(p->frozen & LL_FROZEN_X), want_w = !(p->frozen & LL_FROZEN_W);
    bool want_bias = p->bias_dtype && !(p->frozen & LL_FROZEN_BIAS), odd = p->misaligned;
    if (want_x)
        fine = guarded_matrix(&b[8], &results->grad_x, x_dtype, n, p->n_hidden, p->grad_x_gap, odd) && fine;
    if (want_w)
        fine = guarded_matrix(&b[9], &results->grad_w, w_dtype, v_local, p->n_hidden, p->grad_w_gap, odd) &&
               fine;
    if (want_bias)
        fine = guarded_vector(&b[10], &results->grad_bias, bias_dtype, v_local, p->grad_bias_step) && fine;
    uint64_t state = p->seed ^ 0x5bd1e995u;
    const ll_view *gradients[] = {&results->grad_x, &results->grad_w, &results->grad_bias};
    for (int32_t g = 0; fine && p->accumulate && g < 3; ++g) {
        for (int64_t r = 0; gradients[g]->data && r < gradients[g]->rows; ++r) {
            for (int64_t c = 0; c < gradients[g]->cols; ++c)
                store(gradients[g], r, c, problem_normal(&state));
        }
    }
    for (int64_t i = 0; fine && i < n; ++i) results->argmax[i] = INT64_MIN; /* -1 is a result */
    return fine;
}

void results_destroy(struct results *results) {
    guarded_free(results->buffers, kProblemOutputs);
}

bool results_intact(const struct results *results) {
    for (int64_t b = 0; b < kProblemOutputs; ++b) {
        if (!guarded_intact(&results->buffers[b])) return false;
    }
    return guarded_gaps_intact(&results->grad_x) && guarded_gaps_intact(&results->grad_w) &&
           guarded_gaps_intact(&results->grad_bias);
}
