/* What `logitless check` says: a header, one PASS or FAIL line for everything that was looked at, the
 * verdict; or one JSON object with the same. */
#include "check.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static bool has_line(const check_world *world, int line) {
    return line != CHECK_BIAS_GRAD || world->shape.bias;
}

typedef struct stress_totals {
    double seconds[2];
    uint64_t workspace_bytes, data_bytes, peak_bytes;
    bool finite, repeats, equal; /* equal: the shared results of all ranks */
} stress_totals;

/* The slowest rank's time, all ranks' workspaces, the largest process. */
static stress_totals add_up(const check_world *world, const check_report *report) {
    stress_totals all = {.finite = true, .repeats = true, .equal = true};
    for (int32_t r = 0; r < world->cut.n_ranks; r++) {
        const check_stress *stress = &report->stress[r];
        for (int run = 0; run < 2; run++) all.seconds[run] = fmax(all.seconds[run], stress->seconds[run]);
        all.workspace_bytes += stress->workspace_bytes;
        all.data_bytes += stress->data_bytes;
        if (stress->peak_bytes > all.peak_bytes) all.peak_bytes = stress->peak_bytes;
        all.finite = all.finite && stress->n_not_finite == 0;
        all.repeats = all.repeats && stress->rank_hash[0] == stress->rank_hash[1];
        all.equal = all.equal && stress->shared_hash == report->stress[0].shared_hash;
    }
    return all;
}

static const char *yes(bool value) {
    return value ? "yes" : "no";
}

static const char *verdict(bool passes) {
    return passes ? "PASS" : "FAIL";
}

void check_print_header(const check_world *world, const ll_comm *comm, const check_report *report) {
    const check_options *options = world->options;
    const check_shape *shape = &world->shape;
    printf("problem       %s, tokens %" PRId64 " (%" PRId64 " ignored), hidden size %" PRId64
           ", vocabulary %" PRId64 ", bias %s, seed %" PRIu64 "\n",
           options->dtype, shape->n_tokens, shape->n_tokens - world->inputs.n_valid, shape->n_hidden,
           shape->n_vocab, yes(shape->bias), shape->seed);
    printf("reference     %s\n",
           strcmp(options->reference_mode, "matching") == 0
               ? "matching: materialised logits, rounded where a framework in this dtype rounds"
               : "fp32: inputs as they are, double precision");
    printf("ranks         %d over %s, threads of each %d, shards ", (int)comm->size, options->comm,
           (int)report->records[0].n_threads);
    cli_cut_print(&world->cut);
    printf("\nkernel        %s (%s)\n", report->kernel, report->numerics);
    printf("tolerances    |got - want| <= atol%s + rtol |want|%s\n\n", options->atol >= 0 ? "" : " s",
           options->atol >= 0 ? "" : ", s: 1, or the scale of a gradient's row (docs/runbook.md)");
}

/* The element that used most of the tolerance, where there is something to explain. */
static void print_worst(const check_line *line) {
    printf("      at %s[%" PRId64, check_part_names[line->part], line->row);
    if (line->part >= CHECK_GRAD_X) printf(", %" PRId64, line->col);
    printf("] on rank %d: got %.9g, want %.9g\n", (int)line->rank, line->got, line->want);
}

static void print_difference(const char *against, const check_difference *difference, int32_t rank) {
    const int digits = difference->part == CHECK_ARGMAX ? 16 : 8; /* argmax is an i64 */
    printf("      first on rank %d: %s[%" PRId64, (int)rank, check_part_names[difference->part],
           difference->row);
    if (difference->part >= CHECK_GRAD_X) printf(", %" PRId64, difference->col);
    printf("] has bits %0*" PRIx64 ", %s %0*" PRIx64 "\n", digits, difference->got, against, digits,
           difference->want);
}

void check_print_lines(const check_world *world, const check_report *report) {
    for (int l = 0; l < CHECK_LINES; l++) {
        const check_line *line = &report->lines[l];
        if (!has_line(world, l)) {
            printf("SKIP  %-12s no bias\n", check_line_names[l]);
            continue;
        }
        printf("%s  %-12s max_abs %.2e  max_rel %.2e  atol %.2e  rtol %.2e  tolerance used %.0f %%\n",
               verdict(check_line_passes(line)), check_line_names[l], line->max_abs, line->max_rel,
               line->atol, line->rtol, 100 * line->used);
        if (!check_line_passes(line)) print_worst(line);
    }
    const int32_t one = report->one_rank_at, passes = report->passes_at, shared = report->shared_at;
    printf("%s  invariance   bits equal to one rank: %s\n", verdict(one < 0), yes(one < 0));
    if (one >= 0) print_difference("one rank", &report->records[one].one_rank, one);
    printf("%s  ranks        outputs and hidden_grad equal on all ranks: %s\n", verdict(shared < 0),
           yes(shared < 0));
    if (shared >= 0) {
        printf("      first on rank %d: hash %016" PRIx64 ", rank 0 %016" PRIx64 "\n", (int)shared,
               report->records[shared].shared_hash, report->records[0].shared_hash);
    }
    printf("%s  passes       forward + backward equal forward_backward: %s\n", verdict(passes < 0),
           yes(passes < 0));
    if (passes >= 0) print_difference("forward_backward", &report->records[passes].passes, passes);
    fflush(stdout);
}

static double logits_mib(const check_shape *shape) {
    return (double)shape->n_tokens * (double)shape->n_vocab * 4 / 0x1p20;
}

void check_print_stress(const check_world *world, const check_report *report) {
    const check_shape *shape = &world->stress_shape;
    const stress_totals all = add_up(world, report);
    printf("%s  stress       finite: %s, second run equal: %s, all ranks equal: %s\n",
           verdict(all.finite && all.repeats && all.equal), yes(all.finite), yes(all.repeats),
           yes(all.equal));
    printf("      tokens %" PRId64 ", hidden size %" PRId64 ", vocabulary %" PRId64
           ": %.3f s and %.3f s forward_backward\n",
           shape->n_tokens, shape->n_hidden, shape->n_vocab, all.seconds[0], all.seconds[1]);
    printf("      workspace of all ranks %.1f MiB; logits in f32 would take %.1f MiB, and their gradient as "
           "much\n",
           (double)all.workspace_bytes / 0x1p20, logits_mib(shape));
    printf("      inputs and gradients %.1f MiB; peak resident memory of the largest process %.1f MiB\n",
           (double)all.data_bytes / 0x1p20, (double)all.peak_bytes / 0x1p20);
    fflush(stdout);
}

/* Names of the lines that failed, by commas; how many. */
static int list_failures(const check_world *world, const check_report *report, char *text,
                         size_t text_bytes) {
    const stress_totals all = add_up(world, report);
    const struct {
        const char *name;
        bool fails;
    } lines[] = {
        {check_line_names[0], !check_line_passes(&report->lines[0])},
        {check_line_names[1], !check_line_passes(&report->lines[1])},
        {check_line_names[2], !check_line_passes(&report->lines[2])},
        {check_line_names[3], has_line(world, 3) && !check_line_passes(&report->lines[3])},
        {"invariance", report->one_rank_at >= 0},
        {"ranks", report->shared_at >= 0},
        {"passes", report->passes_at >= 0},
        {"stress", report->stress_ran && !(all.finite && all.repeats && all.equal)},
    };
    int count = 0;
    size_t used = 0;
    text[0] = 0;
    for (size_t l = 0; l < sizeof lines / sizeof lines[0]; l++) {
        if (!lines[l].fails) continue;
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%s", count++ ? ", " : "", lines[l].name);
    }
    return count;
}

/* JSON has no infinity. */
static void add_number(cJSON *object, const char *name, double value) {
    if (isfinite(value)) {
        cJSON_AddNumberToObject(object, name, value);
    } else {
        cJSON_AddNullToObject(object, name);
    }
}

static void add_lines(cJSON *object, const check_world *world, const check_report *report) {
    for (int l = 0; l < CHECK_LINES; l++) {
        const check_line *line = &report->lines[l];
        if (!has_line(world, l)) {
            cJSON_AddNullToObject(object, check_line_names[l]);
            continue;
        }
        cJSON *item = cJSON_AddObjectToObject(object, check_line_names[l]);
        cJSON_AddBoolToObject(item, "pass", check_line_passes(line));
        add_number(item, "max_abs", line->max_abs);
        add_number(item, "max_rel", line->max_rel);
        add_number(item, "atol", line->atol);
        add_number(item, "rtol", line->rtol);
        add_number(item, "tolerance_used", line->used);
    }
}

static void add_stress(cJSON *object, const check_world *world, const check_report *report) {
    const stress_totals all = add_up(world, report);
    if (!report->stress_ran) {
        cJSON_AddNullToObject(object, "stress");
        return;
    }
    cJSON *item = cJSON_AddObjectToObject(object, "stress");
    cJSON_AddBoolToObject(item, "pass", all.finite && all.repeats && all.equal);
    cJSON_AddBoolToObject(item, "finite", all.finite);
    cJSON_AddBoolToObject(item, "second_run_equal", all.repeats);
    cJSON_AddBoolToObject(item, "ranks_equal", all.equal);
    cJSON_AddNumberToObject(item, "tokens", (double)world->stress_shape.n_tokens);
    cJSON_AddNumberToObject(item, "hidden_size", (double)world->stress_shape.n_hidden);
    cJSON_AddNumberToObject(item, "vocab_size", (double)world->stress_shape.n_vocab);
    cJSON_AddItemToObject(item, "seconds", cJSON_CreateDoubleArray(all.seconds, 2));
    cJSON_AddNumberToObject(item, "workspace_bytes", (double)all.workspace_bytes);
    cJSON_AddNumberToObject(item, "peak_resident_bytes", (double)all.peak_bytes);
    cJSON_AddNumberToObject(item, "logits_bytes", logits_mib(&world->stress_shape) * 0x1p20);
}

static int print_json(const check_world *world, const check_report *report, bool pass) {
    const check_options *options = world->options;
    const check_shape *shape = &world->shape;
    char digest[17];
    cJSON *object = cJSON_CreateObject();
    snprintf(digest, sizeof digest, "%016" PRIx64, report->digest);
    cJSON_AddBoolToObject(object, "pass", pass);
    cJSON_AddStringToObject(object, "dtype", options->dtype);
    cJSON_AddStringToObject(object, "reference_mode", options->reference_mode);
    cJSON_AddNumberToObject(object, "tokens", (double)shape->n_tokens);
    cJSON_AddNumberToObject(object, "valid", (double)world->inputs.n_valid);
    cJSON_AddNumberToObject(object, "hidden_size", (double)shape->n_hidden);
    cJSON_AddNumberToObject(object, "vocab_size", (double)shape->n_vocab);
    cJSON_AddBoolToObject(object, "bias", shape->bias);
    cJSON_AddNumberToObject(object, "seed", (double)shape->seed);
    cJSON_AddStringToObject(object, "comm", options->comm);
    cJSON_AddNumberToObject(object, "ranks", world->cut.n_ranks);
    cJSON_AddItemToObject(object, "shards", cli_cut_json(&world->cut));
    cJSON_AddNumberToObject(object, "threads_per_rank", report->records[0].n_threads);
    cJSON_AddStringToObject(object, "kernel", report->kernel);
    cJSON_AddStringToObject(object, "numerics", report->numerics);
    add_lines(object, world, report);
    cJSON_AddBoolToObject(object, "equal_to_one_rank", report->one_rank_at < 0);
    cJSON_AddBoolToObject(object, "equal_on_all_ranks", report->shared_at < 0);
    cJSON_AddBoolToObject(object, "passes_equal", report->passes_at < 0);
    cJSON_AddStringToObject(object, "digest", digest);
    add_stress(object, world, report);
    return cli_print_json(object);
}

int check_print_verdict(const check_world *world, const check_report *report, bool speaks) {
    char names[128];
    const int failures = list_failures(world, report, names, sizeof names);
    if (!speaks) return failures ? CLI_EXIT_CHECK : CLI_EXIT_OK;
    if (world->options->json) {
        int code = print_json(world, report, failures == 0);
        if (code != CLI_EXIT_OK) return code;
    } else {
        printf("\ndigest        %016" PRIx64 " of the log-probs: the same for every number of ranks\n",
               report->digest);
        printf("%s\n", verdict(failures == 0));
    }
    if (!failures) return CLI_EXIT_OK;
    return cli_fail(CLI_EXIT_CHECK, "check failed: %s", names);
}
