/* What the files of `logitless train` share: the options and the run. */
#ifndef LL_CLI_TRAIN_H
#define LL_CLI_TRAIN_H

#include "options.h"
#include "train_model.h"
#include "train_tokens.h"

typedef struct train_options {
    cli_strings text;
    int64_t steps, epochs; /* 0: not given */
    int64_t batch, context, embed, hidden_size, vocab, seed, threads, ranks;
    double learning_rate;
    const char *dtype, *save, *save_heldout;
    bool json;
} train_options;

/* Held-out text after some step. loss and perplexity are the doubles that `score` computes. */
typedef struct train_result {
    double loss, perplexity;
    uint64_t digest; /* of the log-probs, as `score` prints it */
} train_result;

typedef struct train_run {
    const train_options *options;
    cli_corpus corpus;
    cli_lm lm;
    int64_t *positions; /* of the training tokens, shuffled anew every epoch */
    float *nll;         /* of the held-out tokens */
    int64_t n_steps_total;
    uint64_t random;
    train_result result;
    double begin_s;
    struct cJSON *epochs; /* NULL: text output */
} train_run;

/* What one epoch showed. */
typedef struct train_row {
    int64_t epoch, step;
    double train_loss, tokens_per_second; /* NaN before the first step */
} train_row;

/* Whether --save and --save-heldout can be written without harm; reports and returns an exit code. */
int train_save_check(const train_options *options);
/* Writes the files of --save and --save-heldout, where given. */
ll_status train_save(train_run *run);

void train_report_begin(const train_run *run, const cli_text *text);
void train_report_row(train_run *run, const train_row *row);
/* Takes run->epochs. An exit code. */
int train_report_end(train_run *run);

#endif
