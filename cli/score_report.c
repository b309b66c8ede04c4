/* What `logitless score` says at the end: totals over all tokens from the per-token results, so that they
 * do not depend on the chunks; the file of --out; text or JSON. */
#include "score.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct totals {
    double loss, mean_nll, perplexity, mean_entropy; /* NaN: nothing to say */
    int64_t n_nonfinite;
    uint64_t digest;
} totals;

/* Sum of class_weight[y] over valid tokens, by the exact sum: it takes the room of the losses. */
static ll_status sum_class_weights(const score_options *options, const score_inputs *in, float *room,
                                   double *sum) {
    const float *class_weight = in->class_weight.tensor.data;
    for (int64_t i = 0; i < in->n_tokens; i++) {
        int64_t target = score_target(in, i);
        room[i] = target == options->ignore_index ? 0.0f : class_weight[target];
    }
    return ll_sum_f32(room, in->n_tokens, 1, sum);
}

static ll_status add_up(const score_options *options, const score_inputs *in, score_results *results,
                        totals *out) {
    double n_valid = (double)in->n_valid, divisor = n_valid, sum;
    *out = (totals){0};
    LLI_TRY(ll_sum_f32(results->loss, in->n_tokens, 1, &out->loss));
    if (strcmp(options->reduction, "mean") == 0 && in->n_valid) {
        if (in->class_weight.file) LLI_TRY(sum_class_weights(options, in, results->loss, &divisor));
        out->loss = divisor == 0 ? 0 : out->loss / divisor; /* as the library: weights that are all 0 */
    }
    LLI_TRY(ll_sum_f32(results->nll, in->n_tokens, 1, &sum));
    out->mean_nll = in->n_valid ? sum / n_valid : NAN;
    out->perplexity = exp(out->mean_nll);
    out->mean_entropy = NAN;
    if (options->entropy) {
        LLI_TRY(ll_sum_f32(results->entropy, in->n_tokens, 1, &sum));
        out->mean_entropy = in->n_valid ? sum / n_valid : NAN;
    }
    for (int64_t i = 0; i < in->n_tokens; i++) out->n_nonfinite += !isfinite(results->nll[i]);
    out->digest = cli_digest(results->nll, in->n_tokens);
    return LL_STATUS_OK;
}

static ll_status write_out(const score_options *options, const score_inputs *in, const score_results *results,
                           const cli_ranks *ranks) {
    const int64_t n = in->n_tokens;
    const lli_tensor tensors[] = {
        {"nll", results->nll, LL_DTYPE_F32, 1, {n}},
        {"lse", results->lse, LL_DTYPE_F32, 1, {n}},
        {"entropy", results->entropy, LL_DTYPE_F32, 1, {n}},
        {"argmax", results->argmax, LL_DTYPE_I64, 1, {n}},
    };
    const char *const metadata[] = {"logitless", ll_version(), "numerics",
                                    ll_plan_numerics(cli_ranks_plan(ranks))};
    return lli_safetensors_write(options->out, tensors, sizeof tensors / sizeof tensors[0], metadata, 2);
}

static const char *backend_of(const ll_plan *plan) {
    ll_kernel_info info;
    for (int32_t i = 0; ll_kernel_get(i, &info) == LL_STATUS_OK; i++) {
        if (strcmp(info.name, ll_plan_kernel(plan)) == 0) return info.backend;
    }
    return "unknown";
}

/* JSON has no NaN and no infinity. */
static void add_number(cJSON *object, const char *name, double value) {
    if (isfinite(value)) {
        cJSON_AddNumberToObject(object, name, value);
    } else {
        cJSON_AddNullToObject(object, name);
    }
}

static int print_json(const score_inputs *in, const score_results *results, const cli_ranks *ranks,
                      const totals *all) {
    const ll_plan *plan = cli_ranks_plan(ranks);
    char digest[17];
    cJSON *object = cJSON_CreateObject();
    snprintf(digest, sizeof digest, "%016" PRIx64, all->digest);
    cJSON_AddNumberToObject(object, "tokens", (double)in->n_tokens);
    cJSON_AddNumberToObject(object, "valid", (double)in->n_valid);
    add_number(object, "loss", all->loss);
    add_number(object, "mean_nll", all->mean_nll);
    add_number(object, "perplexity", all->perplexity);
    add_number(object, "mean_entropy", all->mean_entropy);
    cJSON_AddNumberToObject(object, "nonfinite_rows", (double)all->n_nonfinite);
    cJSON_AddStringToObject(object, "backend", backend_of(plan));
    cJSON_AddStringToObject(object, "kernel", ll_plan_kernel(plan));
    cJSON_AddStringToObject(object, "numerics", ll_plan_numerics(plan));
    cJSON_AddNumberToObject(object, "ranks", in->cut.n_ranks);
    cJSON_AddItemToObject(object, "shards", cli_cut_json(&in->cut));
    cJSON_AddNumberToObject(object, "threads", cli_ranks_n_threads(ranks));
    cJSON_AddNumberToObject(object, "workspace_bytes", (double)cli_ranks_workspace_bytes(ranks));
    add_number(object, "seconds", results->seconds);
    cJSON_AddStringToObject(object, "digest", digest);
    return cli_print_json(object);
}

static int print_text(const score_options *options, const score_inputs *in, const score_results *results,
                      const cli_ranks *ranks, const totals *all) {
    const ll_plan *plan = cli_ranks_plan(ranks);
    printf("tokens        %" PRId64 ", %" PRId64 " valid\n", in->n_tokens, in->n_valid);
    printf("loss          %.9g (%s)\n", all->loss, options->reduction);
    if (in->n_valid) {
        printf("mean nll      %.9g\n", all->mean_nll);
        printf("perplexity    %.9g\n", all->perplexity);
        if (options->entropy) printf("mean entropy  %.9g\n", all->mean_entropy);
    }
    if (all->n_nonfinite) printf("not finite    %" PRId64 " rows\n", all->n_nonfinite);
    printf("digest        %016" PRIx64 "\n", all->digest);
    printf("kernel        %s (%s), %d threads, workspace %.1f MiB\n", ll_plan_kernel(plan),
           ll_plan_numerics(plan), (int)cli_ranks_n_threads(ranks),
           (double)cli_ranks_workspace_bytes(ranks) / 0x1p20);
    printf("ranks         %d, shards ", (int)in->cut.n_ranks);
    cli_cut_print(&in->cut);
    printf("\n");
    printf("seconds       %.3f\n", results->seconds);
    if (options->out) printf("written       %s\n", options->out);
    return CLI_EXIT_OK;
}

int score_report(const score_options *options, const score_inputs *in, score_results *results,
                 const cli_ranks *ranks) {
    totals all;
    ll_status status = add_up(options, in, results, &all);
    if (status == LL_STATUS_OK && options->out) status = write_out(options, in, results, ranks);
    if (status != LL_STATUS_OK) return cli_fail_status(status);
    if (options->json) return print_json(in, results, ranks, &all);
    return print_text(options, in, results, ranks, &all);
}
