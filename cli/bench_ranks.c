/* logitless bench --ranks: what the cut of the vocabulary costs. The ranks are threads of this process and
 * run in turn with one rank that has as many threads in all, A B A B, so that a machine that slows down does
 * so for both. A count of what is exchanged comes from a counting communicator around the real one. */
#include "bench.h"
#include "ranks.h"

#include "core/status.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct ranks_row {
    char problem[kTextBytes], kernel[64];
    cli_cut cut;
    int32_t n_threads; /* of either side */
    int repeats;
    double one_ms, ranks_ms, one_mib, ranks_mib;
    double integer_bytes, gradient_bytes; /* per token and rank */
    double record_bytes;                  /* per call and rank */
} ranks_row;

/* The two sides and what they are called with. */
typedef struct ranks_run {
    cli_ranks *sides[2]; /* one rank, all ranks */
    ll_pass pass;
    ll_linear_ce_args args;
    const struct results *results;
    int64_t n_tokens;
} ranks_run;

/* Warms both sides up, and takes the second one's exchange. digests: of the log-probs. */
static ll_status first_calls(const ranks_run *run, uint64_t digests[2], ranks_row *row) {
    ll_comm_counts before, after;
    for (int side = 0; side < 2; side++) {
        LLI_TRY(cli_ranks_counts(run->sides[1], &before));
        LLI_TRY(cli_ranks_run(run->sides[side], run->pass, &run->args));
        LLI_TRY(cli_ranks_counts(run->sides[1], &after));
        digests[side] = cli_digest(run->results->nll, run->n_tokens);
    }
    const double n = (double)run->n_tokens;
    row->integer_bytes =
        (double)(after.max_bytes - before.max_bytes + after.sum_bytes - before.sum_bytes) / n;
    row->gradient_bytes = (double)(after.grad_bytes - before.grad_bytes) / n;
    row->record_bytes = (double)(after.gather_bytes - before.gather_bytes);
    return LL_STATUS_OK;
}

static ll_status time_in_turn(const ranks_run *run, double seconds, ranks_row *row) {
    double times[2][kMaxRepeats];
    const double begin_s = cli_seconds();
    do {
        for (int side = 0; side < 2; side++) {
            const double call_s = cli_seconds();
            LLI_TRY(cli_ranks_again(run->sides[side]));
            times[side][row->repeats] = cli_seconds() - call_s;
        }
        row->repeats++;
    } while (row->repeats < kMaxRepeats && (row->repeats < kMinRepeats || cli_seconds() - begin_s < seconds));
    row->one_ms = 1e3 * bench_median(times[0], row->repeats);
    row->ranks_ms = 1e3 * bench_median(times[1], row->repeats);
    return LL_STATUS_OK;
}

static ll_status create_sides(const bench_options *options, const struct problem *problem, ranks_run *run,
                              ranks_row *row) {
    ll_plan_desc desc;
    int32_t passes = 1 << problem->pass | CLI_FORWARD, per_rank;
    int64_t whole[] = {0, problem->v_total + problem->v_pad};
    const cli_cut one = {.n_ranks = 1, .begins = whole};
    problem_desc(problem, &desc);
    desc.backend = cli_backend(options->backend);
    LLI_TRY(cli_ranks_threads(desc.n_threads, row->cut.n_ranks, &per_rank));
    desc.n_threads = per_rank * row->cut.n_ranks;
    LLI_TRY(cli_ranks_create(&desc, &one, passes, false, &run->sides[0]));
    LLI_TRY(cli_ranks_create(&desc, &row->cut, passes, true, &run->sides[1]));
    snprintf(row->kernel, sizeof row->kernel, "%s", ll_plan_kernel(cli_ranks_plan(run->sides[1])));
    row->n_threads = cli_ranks_n_threads(run->sides[1]);
    row->one_mib = (double)cli_ranks_workspace_bytes(run->sides[0]) / 0x1p20;
    row->ranks_mib = (double)cli_ranks_workspace_bytes(run->sides[1]) / 0x1p20;
    return LL_STATUS_OK;
}

static int run_operands(const bench_options *options, const struct problem *problem, ranks_run *run,
                        const struct operands *operands, ranks_row *row) {
    uint64_t digests[2] = {0};
    ll_status status = create_sides(options, problem, run, row);
    if (status == LL_STATUS_OK && problem->pass == LL_PASS_BACKWARD) { /* for the saved values */
        run->args = bench_args(problem, operands, run->results, LL_PASS_FORWARD);
        run->pass = LL_PASS_FORWARD;
        status = cli_ranks_run(run->sides[0], LL_PASS_FORWARD, &run->args);
    }
    run->args = bench_args(problem, operands, run->results, problem->pass);
    run->pass = problem->pass;
    if (status == LL_STATUS_OK) status = first_calls(run, digests, row);
    if (status == LL_STATUS_OK && digests[0] != digests[1]) {
        return cli_fail(CLI_EXIT_CHECK,
                        "problem %s: %d ranks give log-probs of digest %016" PRIx64 ", one rank %016" PRIx64,
                        row->problem, (int)row->cut.n_ranks, digests[1], digests[0]);
    }
    if (status == LL_STATUS_OK) status = time_in_turn(run, options->seconds, row);
    return status == LL_STATUS_OK ? CLI_EXIT_OK : cli_fail_status(status);
}

/* Fills the row; its cut is the caller's to free. */
static int run_problem(const bench_options *options, const char *text, ranks_row *row) {
    struct problem problem;
    struct operands operands = {0};
    struct results results = {0};
    ranks_run run = {.results = &results};
    char rows[kTextBytes + 32];
    int code = bench_parse(text, &problem);
    *row = (ranks_row){0};
    if (code != CLI_EXIT_OK) return code;
    if (problem.op == LL_OP_CE)
        return cli_fail(CLI_EXIT_USAGE, "problem %s: ce over ranks is not timed", text);
    snprintf(row->problem, sizeof row->problem, "%s", text);
    snprintf(rows, sizeof rows, "rows of problem %s", text);
    code = cli_cut_make(&options->cut, problem.v_total + problem.v_pad, rows, &row->cut);
    if (code != CLI_EXIT_OK) return code;
    if (options->n_threads) problem.n_threads = options->n_threads;
    run.n_tokens = problem.n_tokens;
    if (operands_create(&problem, &operands) && results_create(&problem, &results)) {
        code = run_operands(options, &problem, &run, &operands, row);
    } else {
        code = cli_fail(CLI_EXIT_RUNTIME, "problem %s: out of memory", text);
    }
    cli_ranks_destroy(run.sides[1]);
    cli_ranks_destroy(run.sides[0]);
    results_destroy(&results);
    operands_destroy(&operands);
    return code;
}

static void print_row(const ranks_row *row) {
    printf("%-32s | %-24s | %5d | %7d | %10.2f | %10.2f | %5.2f | %7.1f | %7.1f | %9.1f | %9.1f\n",
           row->problem, row->kernel, (int)row->cut.n_ranks, (int)row->n_threads, row->one_ms, row->ranks_ms,
           row->ranks_ms / row->one_ms, row->one_mib, row->ranks_mib, row->integer_bytes,
           row->gradient_bytes);
    fflush(stdout);
}

static cJSON *row_json(const ranks_row *row) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "problem", row->problem);
    cJSON_AddStringToObject(object, "kernel", row->kernel);
    cJSON_AddNumberToObject(object, "ranks", row->cut.n_ranks);
    cJSON_AddItemToObject(object, "shards", cli_cut_json(&row->cut));
    cJSON_AddNumberToObject(object, "threads", row->n_threads);
    cJSON_AddNumberToObject(object, "repeats", row->repeats);
    cJSON_AddNumberToObject(object, "one_rank_ms", row->one_ms);
    cJSON_AddNumberToObject(object, "ranks_ms", row->ranks_ms);
    cJSON_AddNumberToObject(object, "ratio", row->ranks_ms / row->one_ms);
    cJSON_AddNumberToObject(object, "one_rank_workspace_mb", row->one_mib);
    cJSON_AddNumberToObject(object, "workspace_mb", row->ranks_mib);
    cJSON_AddNumberToObject(object, "integer_bytes_per_token", row->integer_bytes);
    cJSON_AddNumberToObject(object, "gradient_bytes_per_token", row->gradient_bytes);
    cJSON_AddNumberToObject(object, "record_bytes_per_call", row->record_bytes);
    return object;
}

int bench_ranks(const bench_options *options, const char *const *texts, int count) {
    cJSON *object = options->json ? cJSON_CreateObject() : NULL;
    cJSON *rows = object ? cJSON_AddArrayToObject(object, "problems") : NULL;
    int code = CLI_EXIT_OK;
    for (int i = 0; i < count && code == CLI_EXIT_OK; i++) {
        ranks_row row;
        code = run_problem(options, texts[i], &row);
        if (code == CLI_EXIT_OK && options->json) cJSON_AddItemToArray(rows, row_json(&row));
        if (code == CLI_EXIT_OK && !options->json) {
            if (i == 0) {
                printf("%-32s | %-24s | %5s | %7s | %10s | %10s | %5s | %7s | %7s | %9s | %9s\n", "problem",
                       "kernel", "ranks", "threads", "1 rank ms", "ranks ms", "ratio", "1 MiB", "all MiB",
                       "int B/tok", "grad B/tok");
            }
            print_row(&row);
        }
        cli_cut_free(&row.cut);
    }
    if (options->json && code == CLI_EXIT_OK) return cli_print_json(object);
    cJSON_Delete(object);
    return code;
}
