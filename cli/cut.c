/* --ranks and --shards: from the options to a table of boundaries, with every fault named. */
#include "cut.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool cli_cut_even(int64_t n_rows, int32_t n_ranks, cli_cut *cut) {
    cut->n_ranks = n_ranks;
    cut->begins = calloc((size_t)n_ranks + 1, sizeof *cut->begins);
    if (!cut->begins) return false;
    for (int32_t r = 0; r < n_ranks; r++) {
        cut->begins[r + 1] = cut->begins[r] + n_rows / n_ranks + (r < n_rows % n_ranks);
    }
    return true;
}

void cli_cut_free(cli_cut *cut) {
    free(cut->begins);
    *cut = (cli_cut){0};
}

/* The numbers of "0,3,7" into begins[0..max); their count, or -1 if something else is between the commas. */
static int32_t read_numbers(const char *text, int64_t *begins, int32_t max) {
    int32_t count = 0;
    for (const char *next = text;; next++) {
        char *end;
        if (*next < '0' || *next > '9' || count == max) return -1; /* strtoll takes signs and blanks */
        errno = 0;
        begins[count++] = strtoll(next, &end, 10);
        if (errno || (*end && *end != ',')) return -1;
        if (!*end) return count;
        next = end;
    }
}

static int read_shards(const char *text, int64_t n_rows, const char *rows, cli_cut *cut) {
    cut->begins = calloc(kRanksMax + 1, sizeof *cut->begins);
    if (!cut->begins) return cli_fail(CLI_EXIT_RUNTIME, "--shards: out of memory");
    int32_t count = read_numbers(text, cut->begins, kRanksMax + 1);
    if (count < 2) {
        return cli_fail(CLI_EXIT_USAGE,
                        "--shards: found \"%s\", wanted 2 to %d row numbers parted by commas, 0,...,%lld",
                        text, kRanksMax + 1, (long long)n_rows);
    }
    cut->n_ranks = count - 1;
    if (cut->begins[0] != 0) {
        return cli_fail(CLI_EXIT_USAGE, "--shards: found %lld as the first boundary, wanted 0",
                        (long long)cut->begins[0]);
    }
    for (int32_t r = 0; r < cut->n_ranks; r++) {
        if (cut->begins[r + 1] >= cut->begins[r]) continue;
        return cli_fail(CLI_EXIT_USAGE, "--shards: found %lld behind %lld, wanted boundaries that never fall",
                        (long long)cut->begins[r + 1], (long long)cut->begins[r]);
    }
    if (cut->begins[cut->n_ranks] != n_rows) {
        return cli_fail(CLI_EXIT_USAGE, "--shards: found %lld as the last boundary, wanted %lld, the %s",
                        (long long)cut->begins[cut->n_ranks], (long long)n_rows, rows);
    }
    return CLI_EXIT_OK;
}

int cli_cut_make(const cli_cut_options *options, int64_t n_rows, const char *rows, cli_cut *cut) {
    *cut = (cli_cut){.nccl = options->comm && strcmp(options->comm, "nccl") == 0};
    if (options->ranks && options->shards) {
        return cli_fail(CLI_EXIT_USAGE, "--ranks and --shards: found both, wanted one");
    }
    if (!options->shards) {
        if (cli_cut_even(n_rows, options->ranks ? (int32_t)options->ranks : 1, cut)) return CLI_EXIT_OK;
        return cli_fail(CLI_EXIT_RUNTIME, "--ranks: out of memory");
    }
    int code = read_shards(options->shards, n_rows, rows, cut);
    if (code != CLI_EXIT_OK) cli_cut_free(cut);
    return code;
}

void cli_cut_print(const cli_cut *cut) {
    for (int32_t r = 0; r <= cut->n_ranks; r++) printf("%s%" PRId64, r ? "," : "", cut->begins[r]);
}

cJSON *cli_cut_json(const cli_cut *cut) {
    cJSON *array = cJSON_CreateArray();
    for (int32_t r = 0; r <= cut->n_ranks; r++) {
        cJSON_AddItemToArray(array, cJSON_CreateNumber((double)cut->begins[r]));
    }
    return array;
}
