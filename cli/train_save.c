/* The files of `logitless train`. Together they are what `logitless score` takes:
 *
 *   --save          embedding [V, n_embed], hidden.weight [C n_embed, n_hidden], hidden.bias [n_hidden],
 *                   head.weight [V, n_hidden], head.bias [V]; the words in the metadata
 *   --save-heldout  hidden [tokens, n_hidden], targets [tokens]
 *
 * head.weight and hidden have the head's dtype, so that score sees the very numbers that train used. */
#define _POSIX_C_SOURCE 200809L
#include "train.h"

#include "io/tensor_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Existing files are compared by what they are: a link's other name is the same file. */
static bool is_same_file(const char *left, const char *right) {
    struct stat a, b;
    if (strcmp(left, right) == 0) return true;
    return stat(left, &a) == 0 && stat(right, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Before the training and not after it: a mistyped folder, and a text that the result would replace. */
static int check_output(const train_options *options, const char *option, const char *path) {
    struct stat about;
    if (!path) return CLI_EXIT_OK;
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode)) {
        return cli_fail(CLI_EXIT_USAGE, "--%s %s: found a directory, wanted a file name", option, path);
    }
    for (int i = 0; i < options->text.count; i++) {
        if (is_same_file(path, options->text.items[i])) {
            return cli_fail(CLI_EXIT_USAGE, "--%s %s: found a file of --text, wanted another", option, path);
        }
    }
    const char *slash = strrchr(path, '/');
    char *folder = strndup(slash ? path : ".", !slash || slash == path ? 1 : (size_t)(slash - path));
    int code = CLI_EXIT_OK;
    if (!folder || access(folder, W_OK | X_OK) != 0) {
        code = cli_fail(CLI_EXIT_RUNTIME, "--%s %s: cannot write there: %s", option, path, strerror(errno));
    }
    free(folder);
    return code;
}

int train_save_check(const train_options *options) {
    int code = check_output(options, "save", options->save);
    if (code == CLI_EXIT_OK) code = check_output(options, "save-heldout", options->save_heldout);
    if (code == CLI_EXIT_OK && options->save && options->save_heldout &&
        is_same_file(options->save, options->save_heldout)) {
        code = cli_fail(CLI_EXIT_USAGE, "--save-heldout %s: found the file of --save, wanted another",
                        options->save_heldout);
    }
    return code;
}

static ll_status save_model(const char *path, const cli_corpus *corpus, cli_lm *lm,
                            const train_result *result) {
    const cli_lm_config *config = &lm->config;
    const cli_lm_tensors *parameters = &lm->parameters;
    const int64_t n_vocab = config->n_vocab, n_hidden = config->n_hidden;
    const lli_tensor tensors[] = {
        {"embedding", parameters->embedding, LL_DTYPE_F32, 2, {n_vocab, config->n_embed}},
        {"hidden.weight", parameters->hidden_weight, LL_DTYPE_F32, 2, {lm->n_input, n_hidden}},
        {"hidden.bias", parameters->hidden_bias, LL_DTYPE_F32, 1, {n_hidden}},
        {"head.weight", cli_lm_head_weight(lm), config->head_dtype, 2, {n_vocab, n_hidden}},
        {"head.bias", parameters->head_bias, LL_DTYPE_F32, 1, {n_vocab}},
    };
    char context[32], first_word[32], loss[32], digest[32];
    snprintf(context, sizeof context, "%" PRId64, config->n_context);
    snprintf(first_word, sizeof first_word, "%d", kFirstWord);
    snprintf(loss, sizeof loss, "%.9g", result->loss);
    snprintf(digest, sizeof digest, "%016" PRIx64, result->digest);
    const char *const metadata[] = {
        "logitless",    ll_version(),
        "context",      context,
        "first_word",   first_word,
        "words",        corpus->vocabulary,
        "heldout_loss", loss,
        "digest",       digest,
        "numerics",     ll_plan_numerics(cli_ranks_plan(lm->score)),
    };
    return lli_safetensors_write(path, tensors, sizeof tensors / sizeof tensors[0], metadata,
                                 sizeof metadata / sizeof metadata[0] / 2);
}

static ll_status save_heldout(const char *path, const cli_corpus *corpus, cli_lm *lm) {
    const int64_t n = corpus->n_heldout, n_hidden = lm->config.n_hidden;
    const ll_dtype dtype = lm->config.head_dtype;
    ll_status status;
    void *hidden = malloc((size_t)(n * n_hidden) * ll_dtype_bytes(dtype));
    float *nll = malloc((size_t)n * sizeof *nll);
    int64_t *targets = malloc((size_t)n * sizeof *targets);
    if (!hidden || !nll || !targets) {
        status = lli_fail(LL_STATUS_MEMORY, "train: no memory for %lld hidden states", (long long)n);
        goto release;
    }
    for (int64_t i = 0; i < n; i++) targets[i] = corpus->heldout[i];
    status = cli_lm_score(lm, corpus->heldout, n, nll, hidden);
    if (status == LL_STATUS_OK) {
        const lli_tensor tensors[] = {
            {"hidden", hidden, dtype, 2, {n, n_hidden}},
            {"targets", targets, LL_DTYPE_I64, 1, {n}},
        };
        status = lli_safetensors_write(path, tensors, sizeof tensors / sizeof tensors[0], NULL, 0);
    }
release:
    free(targets);
    free(nll);
    free(hidden);
    return status;
}

ll_status train_save(train_run *run) {
    const train_options *options = run->options;
    if (options->save) LLI_TRY(save_model(options->save, &run->corpus, &run->lm, &run->result));
    if (options->save_heldout) LLI_TRY(save_heldout(options->save_heldout, &run->corpus, &run->lm));
    return LL_STATUS_OK;
}
