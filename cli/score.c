/* logitless score: loss, log-probs and entropy of hidden states in a file. Hidden states pass through in
 * chunks of tokens and are dropped from memory behind it, so that their file may be larger than memory; the
 * weights are mapped and read once a chunk, by every rank its rows. */
#define _POSIX_C_SOURCE 200809L
#include "options.h"
#include "score.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char kAbout[] =
    "Scores hidden states against a language-model head: z = softcap(hidden . weight + bias) / T,\n"
    "nll = lse(z) - z[target]. Files are .npy or .safetensors; FILE:NAME picks one tensor of a file.\n"
    "  hidden        [tokens, d] or [..., d]  f32, bf16, f16   leading dimensions are flattened\n"
    "  weight        [v, d]                   f32, bf16, f16\n"
    "  targets       one for each token       i64, i32         token ids or the ignored index\n"
    "  bias          [v]                      f32, bf16, f16\n"
    "  class-weight  [vocabulary]             f32\n"
    "  token-weight  one for each token       f32\n"
    "Over ranks each one holds some rows of weight and bias; every number but the time stays the same.\n"
    "The digest is FNV-1a (64 bits) over the f32 log-probs: equal digests, equal bits. Means are over valid\n"
    "(not ignored) tokens; without any, loss is 0 and means are null. In JSON numbers that are not finite\n"
    "are null; nonfinite_rows counts the tokens whose nll is not finite.\n";

/* Progress moves once a chunk: the library has no callback. */
static ll_status run_chunks(cli_ranks *ranks, const score_options *options, const score_inputs *in,
                            score_results *results) {
    const size_t row_bytes = (size_t)in->n_hidden * ll_dtype_bytes(in->hidden.tensor.dtype);
    const size_t id_bytes = ll_dtype_bytes(in->targets.tensor.dtype);
    const float *token_weight = in->token_weight.tensor.data;
    cli_progress progress = cli_progress_begin("score", in->n_tokens);
    ll_status status = LL_STATUS_OK;
    for (int64_t begin = 0; begin < in->n_tokens && status == LL_STATUS_OK; begin += options->chunk_tokens) {
        const int64_t left = in->n_tokens - begin;
        const int64_t n = left < options->chunk_tokens ? left : options->chunk_tokens;
        const char *rows = (const char *)in->hidden.tensor.data + (size_t)begin * row_bytes;
        const char *ids = (const char *)in->targets.tensor.data + (size_t)begin * id_bytes;
        ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
        args.x = ll_view_matrix(rows, in->hidden.tensor.dtype, n, in->n_hidden, 0);
        args.w =
            ll_view_matrix(in->weight.tensor.data, in->weight.tensor.dtype, in->v_local, in->n_hidden, 0);
        if (in->bias.file) {
            args.bias = ll_view_vector(in->bias.tensor.data, in->bias.tensor.dtype, in->v_local, 0);
        }
        args.target = ll_view_vector(ids, in->targets.tensor.dtype, n, 0);
        args.class_weight = in->class_weight.tensor.data;
        args.token_weight = token_weight ? token_weight + begin : NULL;
        args.loss = results->loss + begin;
        args.nll = results->nll + begin;
        args.lse = results->lse ? results->lse + begin : NULL;
        args.entropy = results->entropy ? results->entropy + begin : NULL;
        args.argmax = results->argmax ? results->argmax + begin : NULL;
        status = cli_ranks_run(ranks, LL_PASS_FORWARD, &args);
        lli_tensor_file_drop(in->hidden.file, rows, (size_t)n * row_bytes);
        cli_progress_update(&progress, begin + n);
    }
    cli_progress_end(&progress);
    return status;
}

static ll_status create_ranks(const score_options *options, const score_inputs *in, cli_ranks **ranks) {
    ll_loss loss = LL_LOSS_INIT;
    loss.ignore_index = options->ignore_index;
    loss.temperature = (float)options->temperature;
    loss.softcap = (float)options->softcap;
    loss.label_smoothing = (float)options->label_smoothing;
    loss.z_loss = (float)options->z_loss;
    loss.smoothing_rule =
        strcmp(options->smoothing_rule, "others") == 0 ? LL_SMOOTHING_OTHERS : LL_SMOOTHING_ALL;
    loss.reduction = LL_REDUCTION_NONE;

    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.op = LL_OP_LINEAR_CE;
    desc.backend = cli_backend(options->backend);
    desc.n_tokens_max = in->n_tokens < options->chunk_tokens ? in->n_tokens : options->chunk_tokens;
    desc.n_hidden = in->n_hidden;
    desc.v_local = in->v_local;
    desc.v_total = in->v_total;
    desc.x_dtype = in->hidden.tensor.dtype;
    desc.w_dtype = in->weight.tensor.dtype;
    desc.bias_dtype = in->bias.file ? in->bias.tensor.dtype : LL_DTYPE_NONE;
    desc.frozen = LL_FROZEN_X | LL_FROZEN_W | LL_FROZEN_BIAS;
    desc.n_threads = (int32_t)options->threads;
    desc.workspace_budget_bytes = (size_t)options->workspace_mb << 20;
    desc.loss = &loss;
    return cli_ranks_create(&desc, &in->cut, CLI_FORWARD, false, ranks);
}

/* An empty hidden file still needs a pointer to tell "given" from "not wanted". */
static void *take(int64_t count, size_t element_bytes, bool *ok) {
    void *memory = calloc(count > 0 ? (size_t)count : 1, element_bytes);
    *ok = *ok && memory;
    return memory;
}

static bool allocate(const score_options *options, const score_inputs *in, score_results *results) {
    bool ok = true;
    results->loss = take(in->n_tokens, sizeof(float), &ok);
    results->nll = take(in->n_tokens, sizeof(float), &ok);
    if (options->entropy || options->out) results->entropy = take(in->n_tokens, sizeof(float), &ok);
    if (options->out) {
        results->lse = take(in->n_tokens, sizeof(float), &ok);
        results->argmax = take(in->n_tokens, sizeof(int64_t), &ok);
    }
    return ok;
}

static int score(const score_options *options, const score_inputs *in) {
    score_results results = {0};
    cli_ranks *ranks = NULL;
    int code;
    ll_status status = create_ranks(options, in, &ranks);
    if (status != LL_STATUS_OK) return cli_fail_status(status);
    if (!allocate(options, in, &results)) {
        code = cli_fail(CLI_EXIT_RUNTIME, "out of memory for %lld tokens", (long long)in->n_tokens);
        goto release;
    }
    double begin_s = cli_seconds();
    status = run_chunks(ranks, options, in, &results);
    results.seconds = cli_seconds() - begin_s;
    code = status == LL_STATUS_OK ? score_report(options, in, &results, ranks) : cli_fail_status(status);
release:
    free(results.argmax);
    free(results.entropy);
    free(results.lse);
    free(results.nll);
    free(results.loss);
    cli_ranks_destroy(ranks);
    return code;
}

int ll_cmd_score(int argc, char **argv) {
    score_options o = {.smoothing_rule = "all",
                       .reduction = "mean",
                       .backend = "auto",
                       .temperature = 1,
                       .ignore_index = -100,
                       .chunk_tokens = 4096,
                       .cut = {.comm = "threads"}};
    const cli_option options[] = {
        {.name = "hidden",
         .type = CLI_STRING,
         .value = &o.hidden,
         .metavar = "FILE[:NAME]",
         .help = "hidden states",
         .required = true},
        {.name = "weight",
         .type = CLI_STRING,
         .value = &o.weight,
         .metavar = "FILE[:NAME]",
         .help = "weight of the head",
         .required = true},
        {.name = "targets",
         .type = CLI_STRING,
         .value = &o.targets,
         .metavar = "FILE[:NAME]",
         .help = "target token ids",
         .required = true},
        {.name = "bias",
         .type = CLI_STRING,
         .value = &o.bias,
         .metavar = "FILE[:NAME]",
         .help = "bias of the head; default none"},
        {.name = "class-weight",
         .type = CLI_STRING,
         .value = &o.class_weight,
         .metavar = "FILE[:NAME]",
         .help = "weights of the classes, PyTorch's rule; default all 1"},
        {.name = "token-weight",
         .type = CLI_STRING,
         .value = &o.token_weight,
         .metavar = "FILE[:NAME]",
         .help = "factors of the tokens' losses; default all 1"},
        {.name = "temperature",
         .type = CLI_DOUBLE,
         .value = &o.temperature,
         .metavar = "T",
         .help = "divides the logits; default 1",
         .max = INFINITY,
         .above_min = true},
        {.name = "softcap",
         .type = CLI_DOUBLE,
         .value = &o.softcap,
         .metavar = "C",
         .help = "logits become C tanh(logit / C); 0: off; default 0",
         .max = INFINITY},
        {.name = "label-smoothing",
         .type = CLI_DOUBLE,
         .value = &o.label_smoothing,
         .metavar = "A",
         .help = "probability mass taken from the target; default 0",
         .max = 1},
        {.name = "smoothing-rule",
         .type = CLI_STRING,
         .value = &o.smoothing_rule,
         .metavar = "all|others",
         .help = "who gets that mass: all classes (PyTorch) or all others (Megatron); default all"},
        {.name = "z-loss",
         .type = CLI_DOUBLE,
         .value = &o.z_loss,
         .metavar = "C",
         .help = "adds C lse^2 to each token's loss; default 0",
         .max = INFINITY},
        {.name = "ignore-index",
         .type = CLI_INT64,
         .value = &o.ignore_index,
         .metavar = "I",
         .help = "target of tokens that do not count; default -100"},
        {.name = "reduction",
         .type = CLI_STRING,
         .value = &o.reduction,
         .metavar = "mean|sum",
         .help = "of the loss; default mean"},
        {.name = "entropy",
         .type = CLI_FLAG,
         .value = &o.entropy,
         .help = "report the mean entropy as well; default off"},
        {.name = "vocab-size",
         .type = CLI_INT64,
         .value = &o.vocab_size,
         .metavar = "V",
         .help = "real entries of a padded weight; default all its rows",
         .min = 1,
         .max = LL_VOCAB_MAX},
        {.name = "backend",
         .type = CLI_STRING,
         .value = &o.backend,
         .metavar = CLI_BACKENDS,
         .help = "ref is the definition in double precision, slow; auto is a CPU's; default auto"},
        {.name = "threads",
         .type = CLI_INT64,
         .value = &o.threads,
         .metavar = "N",
         .help = "of all ranks together; default LL_NUM_THREADS if set, else the CPUs of this process",
         .min = 1,
         .max = 1024},
        CLI_CUT_OPTIONS(o.cut),
        {.name = "chunk-tokens",
         .type = CLI_INT64,
         .value = &o.chunk_tokens,
         .metavar = "N",
         .help = "tokens of one step; no result depends on it; default 4096",
         .min = 1,
         .max = 0x1p31},
        {.name = "workspace-mb",
         .type = CLI_INT64,
         .value = &o.workspace_mb,
         .metavar = "N",
         .help = "bound of each rank's workspace in MiB; default 512, exceeded if it cannot be less",
         .min = 1,
         .max = 0x1p24},
        {.name = "out",
         .type = CLI_STRING,
         .value = &o.out,
         .metavar = "FILE",
         .help = "write nll, lse, entropy and argmax of each token (.safetensors); default none"},
        {.name = "json", .type = CLI_FLAG, .value = &o.json, .help = "print one JSON object; default off"},
        {0},
    };
    const cli_usage usage = {"score --hidden FILE --weight FILE --targets FILE [options]", kAbout, options,
                             NULL};
    int code = cli_options_parse(&usage, argc, argv);
    if (code != CLI_GO_ON) return code;
    score_inputs inputs;
    code = score_inputs_open(&o, &inputs);
    if (code == CLI_EXIT_OK) code = score(&o, &inputs);
    score_inputs_close(&inputs);
    return code;
}
