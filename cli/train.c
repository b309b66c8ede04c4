/* logitless train: fits the small language model of train_model.h to text files and shows the loss of
 * training and held-out text after every epoch. An example of the library in use and a source of real
 * hidden states for `logitless score`; left out: checkpoints to go on from, and generating text. */
#include "train.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kEpochs = 10 };

static const char kAbout[] =
    "Trains a small language model on text files: the embeddings of the last tokens, one hidden layer, and\n"
    "the head's loss by logitless. Tokens are words, punctuation marks and, for rare words, letters. Of the\n"
    "paragraphs (parted by empty lines; repeated ones are left out) every tenth is held out. The same seed\n"
    "gives the same losses, whatever the number of threads; another number of ranks changes the last bits "
    "of\n"
    "the gradients, but log-probs of the saved model are the same over any ranks. Score the saved held-out "
    "text with\n"
    "  logitless score --hidden HELDOUT:hidden --targets HELDOUT:targets --weight MODEL:head.weight\n"
    "                  --bias MODEL:head.bias\n";

static void shuffle(train_run *run) {
    for (int64_t i = run->corpus.n_train - 1; i > 0; i--) {
        int64_t j = (int64_t)(cli_random(&run->random) % (uint64_t)(i + 1)), kept = run->positions[i];
        run->positions[i] = run->positions[j];
        run->positions[j] = kept;
    }
}

/* Steps until every training token was seen once or no step is left. The rate falls in a line to a tenth. */
static ll_status train_epoch(train_run *run, train_row *row) {
    const int64_t n_train = run->corpus.n_train, n_batch = run->options->batch;
    ll_status status = LL_STATUS_OK;
    char label[32];
    double sum = 0, begin_s = cli_seconds();
    int64_t seen = 0;
    snprintf(label, sizeof label, "epoch %" PRId64, row->epoch);
    cli_progress progress = cli_progress_begin(label, n_train);
    shuffle(run);
    while (seen < n_train && run->lm.n_steps < run->n_steps_total && status == LL_STATUS_OK) {
        int64_t n = n_train - seen < n_batch ? n_train - seen : n_batch;
        double done = (double)run->lm.n_steps / (double)run->n_steps_total, loss = 0;
        float rate = (float)(run->options->learning_rate * (1 - 0.9 * done));
        status = cli_lm_step(&run->lm, run->corpus.train, run->positions + seen, n, rate, &loss);
        if (status == LL_STATUS_OK && !isfinite(loss)) {
            status =
                lli_fail(LL_STATUS_INTERNAL, "--lr: with %g the loss of step %lld was not finite; try less",
                         run->options->learning_rate, (long long)run->lm.n_steps);
        }
        sum += loss;
        seen += n;
        cli_progress_update(&progress, seen);
    }
    cli_progress_end(&progress);
    row->step = run->lm.n_steps;
    row->train_loss = sum / (double)seen;
    row->tokens_per_second = (double)seen / (cli_seconds() - begin_s);
    return status;
}

/* As `score` adds up: the exact sum of the f32 losses, so that both print the same digits. */
static ll_status score_heldout(train_run *run) {
    const int64_t n = run->corpus.n_heldout;
    double sum;
    LLI_TRY(cli_lm_score(&run->lm, run->corpus.heldout, n, run->nll, NULL));
    LLI_TRY(ll_sum_f32(run->nll, n, 1, &sum));
    run->result.loss = sum / (double)n;
    run->result.perplexity = exp(run->result.loss);
    run->result.digest = cli_digest(run->nll, n);
    LLI_REQUIRE(isfinite(run->result.loss), LL_STATUS_INTERNAL,
                "--lr: with %g the held-out loss became %g; try less", run->options->learning_rate,
                run->result.loss);
    return LL_STATUS_OK;
}

static ll_status prepare(train_run *run) {
    const train_options *options = run->options;
    const cli_lm_config config = {
        .n_vocab = run->corpus.n_vocab,
        .n_context = options->context,
        .n_embed = options->embed,
        .n_hidden = options->hidden_size,
        .n_batch = options->batch,
        .head_dtype = strcmp(options->dtype, "bf16") == 0 ? LL_DTYPE_BF16 : LL_DTYPE_F32,
        .n_ranks = (int32_t)options->ranks,
        .n_threads = (int32_t)options->threads,
        .seed = (uint64_t)options->seed,
    };
    const int64_t n_train = run->corpus.n_train;
    const int64_t n_epoch_steps = (n_train + options->batch - 1) / options->batch;
    run->n_steps_total =
        options->steps ? options->steps : n_epoch_steps * (options->epochs ? options->epochs : kEpochs);
    run->random = ~config.seed; /* another sequence than the parameters' */
    run->positions = malloc((size_t)n_train * sizeof *run->positions);
    run->nll = malloc((size_t)run->corpus.n_heldout * sizeof *run->nll);
    if (options->json) run->epochs = cJSON_CreateArray();
    LLI_REQUIRE(run->positions && run->nll && (run->epochs || !options->json), LL_STATUS_MEMORY,
                "train: no memory for %lld tokens", (long long)n_train);
    for (int64_t i = 0; i < n_train; i++) run->positions[i] = i;
    return cli_lm_create(&config, &run->lm);
}

static ll_status train(train_run *run) {
    train_row row = {0};
    cli_text text;
    ll_status status = cli_text_read(run->options->text.items, run->options->text.count, &text);
    if (status == LL_STATUS_OK) status = cli_corpus_encode(&text, run->options->vocab, &run->corpus);
    if (status == LL_STATUS_OK) status = prepare(run);
    if (status == LL_STATUS_OK && !run->options->json) train_report_begin(run, &text);
    cli_text_free(&text);
    if (status == LL_STATUS_OK) status = score_heldout(run);
    if (status == LL_STATUS_OK) train_report_row(run, &row);
    while (status == LL_STATUS_OK && run->lm.n_steps < run->n_steps_total) {
        row.epoch++;
        LLI_TRY(train_epoch(run, &row));
        LLI_TRY(score_heldout(run));
        train_report_row(run, &row);
    }
    if (status == LL_STATUS_OK) status = train_save(run);
    return status;
}

static int run_train(const train_options *options) {
    train_run run = {.options = options, .begin_s = cli_seconds()};
    if (options->steps && options->epochs) {
        return cli_fail(CLI_EXIT_USAGE, "--steps and --epochs: found both, wanted one");
    }
    int code = train_save_check(options);
    if (code != CLI_EXIT_OK) return code;
    ll_status status = train(&run);
    code = status == LL_STATUS_OK ? train_report_end(&run) : cli_fail_status(status);
    cJSON_Delete(run.epochs);
    cli_lm_free(&run.lm);
    cli_corpus_free(&run.corpus);
    free(run.nll);
    free(run.positions);
    return code;
}

int ll_cmd_train(int argc, char **argv) {
    train_options o = {.batch = 256,
                       .context = 4,
                       .embed = 64,
                       .hidden_size = 192,
                       .vocab = 8000,
                       .ranks = 1,
                       .learning_rate = 0.003,
                       .dtype = "f32"};
    const cli_option options[] = {
        {"text", CLI_STRINGS, &o.text, "FILE...", "text files", .required = true},
        {"steps", CLI_INT64, &o.steps, "N", "batches to train on; default as many as the epochs have",
         .min = 1, .max = 1e9},
        {"epochs", CLI_INT64, &o.epochs, "N", "times through the text; default 10", .min = 1, .max = 1e6},
        {"batch", CLI_INT64, &o.batch, "N", "tokens of a step; default 256", .min = 1, .max = 65536},
        {"context", CLI_INT64, &o.context, "N", "tokens that a prediction sees; default 4", .min = 1,
         .max = 64},
        {"embed", CLI_INT64, &o.embed, "N", "width of a token's embedding; default 64", .min = 1,
         .max = 1024},
        {"hidden-size", CLI_INT64, &o.hidden_size, "N", "width of the hidden layer; default 192", .min = 1,
         .max = 16384},
        {"vocab", CLI_INT64, &o.vocab, "N", "most tokens with an id, 257 of them bytes; default 8000",
         .min = kFirstWord, .max = LL_VOCAB_MAX},
        {"lr", CLI_DOUBLE, &o.learning_rate, "X", "Adam's rate; falls to a tenth; default 0.003",
         .max = INFINITY, .above_min = true},
        {"seed", CLI_INT64, &o.seed, "N", "of the first parameters and the order; default 0", .max = 1e18},
        {"ranks", CLI_INT64, &o.ranks, "N",
         "cut the head's vocabulary evenly over N ranks, threads of this process; default 1", .min = 1,
         .max = kRanksMax},
        {"threads", CLI_INT64, &o.threads, "N",
         "of all ranks together; default LL_NUM_THREADS if set, else the CPUs of this process", .min = 1,
         .max = 1024},
        {"dtype", CLI_STRING, &o.dtype, "f32|bf16",
         .help = "of the head's weight and hidden states; default f32"},
        {"save", CLI_STRING, &o.save, "FILE", .help = "write the model (.safetensors); default none"},
        {"save-heldout", CLI_STRING, &o.save_heldout, "FILE",
         .help = "write hidden states and targets of the held-out text (.safetensors); default none"},
        {"json", CLI_FLAG, &o.json, .help = "print one JSON object at the end; default off"},
        {0},
    };
    const cli_usage usage = {"train --text FILE... [options]", kAbout, options, NULL};
    int code = cli_options_parse(&usage, argc, argv);
    if (code == CLI_GO_ON) code = run_train(&o);
    free(o.text.items);
    return code;
}
