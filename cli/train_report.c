/* What `logitless train` prints: a table line after every epoch, or one JSON object at the end. */
#include "train.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>

void train_report_begin(const train_run *run, const cli_text *text) {
    const cli_lm *lm = &run->lm;
    printf("text    %" PRId64 " paragraphs, %" PRId64 " repeated ones left out; %" PRId64
           " tokens to train on, %" PRId64 " held out\n",
           text->paragraphs.n, text->n_repeated, run->corpus.n_train, run->corpus.n_heldout);
    printf("model   vocabulary %" PRId64 ", context %" PRId64 ", embedding %" PRId64 ", hidden %" PRId64
           ": %" PRId64 " parameters\n",
           lm->config.n_vocab, lm->config.n_context, lm->config.n_embed, lm->config.n_hidden,
           lm->n_parameters);
    const ll_plan *plan = cli_ranks_plan(lm->train);
    printf("head    %s, %s (%s), ranks %d, threads %d\n\n", ll_dtype_name(lm->config.head_dtype),
           ll_plan_kernel(plan), ll_plan_numerics(plan), (int)lm->config.n_ranks,
           (int)cli_ranks_n_threads(lm->train));
    printf("epoch    step  train loss  held-out loss  perplexity  tokens/s\n");
}

void train_report_row(train_run *run, const train_row *row) {
    if (run->epochs) {
        cJSON *object = cJSON_CreateObject();
        cJSON_AddNumberToObject(object, "epoch", (double)row->epoch);
        cJSON_AddNumberToObject(object, "step", (double)row->step);
        if (row->epoch) {
            cJSON_AddNumberToObject(object, "train_loss", row->train_loss);
            cJSON_AddNumberToObject(object, "tokens_per_second", row->tokens_per_second);
        }
        cJSON_AddNumberToObject(object, "heldout_loss", run->result.loss);
        cJSON_AddNumberToObject(object, "perplexity", run->result.perplexity);
        cJSON_AddItemToArray(run->epochs, object);
        return;
    }
    if (row->epoch) {
        printf("%5" PRId64 " %7" PRId64 " %11.4f %14.4f %11.2f %9.0f\n", row->epoch, row->step,
               row->train_loss, run->result.loss, run->result.perplexity, row->tokens_per_second);
    } else {
        printf("%5d %7d %11s %14.4f %11.2f\n", 0, 0, "-", run->result.loss, run->result.perplexity);
    }
    fflush(stdout);
}

int train_report_end(train_run *run) {
    const train_options *options = run->options;
    double seconds = cli_seconds() - run->begin_s;
    char digest[17];
    snprintf(digest, sizeof digest, "%016" PRIx64, run->result.digest);
    if (!run->epochs) {
        printf("\nheld-out loss %.9g\nperplexity    %.9g\ndigest        %s\nseconds       %.1f\n",
               run->result.loss, run->result.perplexity, digest, seconds);
        if (options->save) printf("written       %s\n", options->save);
        if (options->save_heldout) printf("written       %s\n", options->save_heldout);
        return CLI_EXIT_OK;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "vocabulary", (double)run->lm.config.n_vocab);
    cJSON_AddNumberToObject(object, "parameters", (double)run->lm.n_parameters);
    cJSON_AddNumberToObject(object, "train_tokens", (double)run->corpus.n_train);
    cJSON_AddNumberToObject(object, "heldout_tokens", (double)run->corpus.n_heldout);
    cJSON_AddItemToObject(object, "epochs", run->epochs);
    run->epochs = NULL;
    cJSON_AddNumberToObject(object, "steps", (double)run->lm.n_steps);
    cJSON_AddNumberToObject(object, "heldout_loss", run->result.loss);
    cJSON_AddNumberToObject(object, "perplexity", run->result.perplexity);
    cJSON_AddStringToObject(object, "digest", digest);
    cJSON_AddStringToObject(object, "kernel", ll_plan_kernel(cli_ranks_plan(run->lm.train)));
    cJSON_AddStringToObject(object, "numerics", ll_plan_numerics(cli_ranks_plan(run->lm.train)));
    cJSON_AddNumberToObject(object, "ranks", run->lm.config.n_ranks);
    cJSON_AddNumberToObject(object, "threads", cli_ranks_n_threads(run->lm.train));
    cJSON_AddNumberToObject(object, "seconds", seconds);
    return cli_print_json(object);
}
