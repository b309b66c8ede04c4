/* How the rows of a head are cut over ranks: --ranks N (evenly) or --shards 0,3,7 (as given). */
#ifndef LL_CLI_CUT_H
#define LL_CLI_CUT_H

#include "options.h"

/* Every rank of --ranks and --shards is a thread of this process, and asks for a workspace of its own. */
enum { kRanksMax = 256 };

/* Rank r has the rows [begins[r], begins[r + 1]); equal neighbours: a rank without a row. */
typedef struct cli_cut {
    int32_t n_ranks;
    int64_t *begins; /* [n_ranks + 1] */
    bool nccl;       /* the ranks are on GPUs of their own, joined by NCCL */
} cli_cut;

/* What the options were given; 0 and NULL: not. comm: "threads" before they are read. */
typedef struct cli_cut_options {
    int64_t ranks;
    const char *shards, *comm;
} cli_cut_options;

/* The lines of an option table. */
#define CLI_CUT_OPTIONS(cut_options)                                                                         \
    {.name = "ranks",                                                                                        \
     .type = CLI_INT64,                                                                                      \
     .value = &(cut_options).ranks,                                                                          \
     .metavar = "N",                                                                                         \
     .help = "cut the vocabulary evenly over N ranks, threads of this process; default 1",                   \
     .min = 1,                                                                                               \
     .max = kRanksMax},                                                                                      \
        {.name = "shards",                                                                                   \
         .type = CLI_STRING,                                                                                 \
         .value = &(cut_options).shards,                                                                     \
         .metavar = "0,B,...,V",                                                                             \
         .help = "cut it at these rows instead; equal neighbours are an empty rank"},                        \
    {                                                                                                        \
        .name = "comm", .type = CLI_STRING, .value = &(cut_options).comm, .metavar = "threads|nccl",         \
        .help = "what joins the ranks: host memory, or NCCL with a GPU each; default threads"                \
    }

/* The cut of n_rows rows; `rows` says whose they are ("rows of --weight w.npy"). One rank has all of them
 * if neither option is given. The exit code of a reported error, or CLI_EXIT_OK. */
int cli_cut_make(const cli_cut_options *options, int64_t n_rows, const char *rows, cli_cut *cut);

/* n_ranks parts as equal as can be, the larger ones first; memory in `begins`. False without memory. */
bool cli_cut_even(int64_t n_rows, int32_t n_ranks, cli_cut *cut);
void cli_cut_free(cli_cut *cut);

/* "0,3,7" on stdout; the same as a JSON array. */
void cli_cut_print(const cli_cut *cut);
struct cJSON *cli_cut_json(const cli_cut *cut);

#endif
