/* The files of `logitless score`: opened, their shapes, dtypes and values checked against each other, so
 * that a fault is named before the long work starts. Hidden states and weights are not looked at: they may
 * hold anything, also NaN. */
#define _POSIX_C_SOURCE 200809L
#include "score.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { kFloats = 1 << LL_DTYPE_F32 | 1 << LL_DTYPE_BF16 | 1 << LL_DTYPE_F16 };
enum { kF32 = 1 << LL_DTYPE_F32, kIntegers = 1 << LL_DTYPE_I32 | 1 << LL_DTYPE_I64 };

enum { kShapeText = 256 };

/* "f32 [4, 16]" */
static const char *describe(const lli_tensor *tensor, char *text) {
    int used = snprintf(text, kShapeText, "%s [", ll_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->n_dims; i++) {
        used += snprintf(text + used, (size_t)(kShapeText - used), "%s%lld", i ? ", " : "",
                         (long long)tensor->dims[i]);
    }
    snprintf(text + used, (size_t)(kShapeText - used), "]");
    return text;
}

static int wrong_shape(const score_operand *operand, const char *wanted) {
    char text[kShapeText];
    return cli_fail(CLI_EXIT_USAGE, "%s %s: found %s, wanted %s", operand->option, operand->spec,
                    describe(&operand->tensor, text), wanted);
}

/* Product of the first `count` dimensions. A zero is looked for first: beside it the others are not bounded
 * by the size of the file, and their product could overflow. */
static int64_t product(const lli_tensor *tensor, int count) {
    int64_t elements = 1;
    for (int i = 0; i < count; i++) {
        if (tensor->dims[i] == 0) return 0;
    }
    for (int i = 0; i < count; i++) elements *= tensor->dims[i];
    return elements;
}

static int open_operand(score_operand *operand, const char *option, const char *spec, int dtypes,
                        const char *dtype_names) {
    struct stat status;
    ll_status opened;
    *operand = (score_operand){.option = option, .spec = spec};
    if (!spec) return CLI_EXIT_OK;
    /* FILE[:NAME]: a file of that whole name comes first, since names of files may hold colons. */
    const char *colon = strrchr(spec, ':');
    if (!colon || stat(spec, &status) == 0) {
        opened = lli_tensor_file_open(spec, &operand->file);
        colon = NULL;
    } else {
        char *path = strndup(spec, (size_t)(colon - spec));
        if (!path) return cli_fail(CLI_EXIT_RUNTIME, "%s %s: out of memory", option, spec);
        opened = lli_tensor_file_open(path, &operand->file);
        free(path);
    }
    if (opened != LL_STATUS_OK) return cli_fail_input(opened);
    opened = lli_tensor_file_find(operand->file, colon ? colon + 1 : NULL, &operand->tensor);
    if (opened != LL_STATUS_OK) return cli_fail_input(opened);
    if (!(dtypes & 1 << operand->tensor.dtype)) return wrong_shape(operand, dtype_names);
    return CLI_EXIT_OK;
}

static int open_all(const score_options *options, score_inputs *in) {
    static const char floats[] = "f32, bf16 or f16";
    const struct {
        score_operand *operand;
        const char *option, *spec;
        int dtypes;
        const char *dtype_names;
    } table[] = {
        {&in->hidden, "--hidden", options->hidden, kFloats, floats},
        {&in->weight, "--weight", options->weight, kFloats, floats},
        {&in->targets, "--targets", options->targets, kIntegers, "i64 or i32"},
        {&in->bias, "--bias", options->bias, kFloats, floats},
        {&in->class_weight, "--class-weight", options->class_weight, kF32, "f32"},
        {&in->token_weight, "--token-weight", options->token_weight, kF32, "f32"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        int code = open_operand(table[i].operand, table[i].option, table[i].spec, table[i].dtypes,
                                table[i].dtype_names);
        if (code != CLI_EXIT_OK) return code;
    }
    return CLI_EXIT_OK;
}

static int check_vector(const score_operand *operand, int64_t wanted, const char *why) {
    char text[128];
    const lli_tensor *tensor = &operand->tensor;
    if (!operand->file || (tensor->n_dims == 1 && tensor->dims[0] == wanted)) return CLI_EXIT_OK;
    snprintf(text, sizeof text, "[%lld], %s", (long long)wanted, why);
    return wrong_shape(operand, text);
}

static int check_per_token(const score_operand *operand, int64_t n_tokens) {
    char text[128];
    const lli_tensor *tensor = &operand->tensor;
    if (!operand->file || product(tensor, tensor->n_dims) == n_tokens) return CLI_EXIT_OK;
    snprintf(text, sizeof text, "%lld elements, one for each row of --hidden", (long long)n_tokens);
    return wrong_shape(operand, text);
}

static int check_shapes(const score_options *options, score_inputs *in) {
    char text[128];
    int code;
    const lli_tensor *hidden = &in->hidden.tensor, *weight = &in->weight.tensor;
    if (hidden->n_dims < 2 || hidden->dims[hidden->n_dims - 1] < 1) {
        return wrong_shape(&in->hidden, "[tokens, hidden size] with a hidden size of at least 1");
    }
    in->n_tokens = product(hidden, hidden->n_dims - 1);
    in->n_hidden = hidden->dims[hidden->n_dims - 1];
    if (weight->n_dims != 2 || weight->dims[0] < 1 || weight->dims[1] != in->n_hidden) {
        snprintf(text, sizeof text, "[vocabulary, %lld], rows as long as those of --hidden",
                 (long long)in->n_hidden);
        return wrong_shape(&in->weight, text);
    }
    in->v_local = weight->dims[0];
    in->v_total = options->vocab_size ? options->vocab_size : in->v_local;
    if (in->v_total > in->v_local) {
        return cli_fail(CLI_EXIT_USAGE,
                        "--vocab-size: found %lld, wanted at most the %lld rows of --weight %s",
                        (long long)in->v_total, (long long)in->v_local, in->weight.spec);
    }
    if (in->v_total > LL_VOCAB_MAX) {
        return cli_fail(CLI_EXIT_USAGE, "--weight %s: found a vocabulary of %lld, wanted at most %lld",
                        in->weight.spec, (long long)in->v_total, (long long)LL_VOCAB_MAX);
    }
    if ((code = check_per_token(&in->targets, in->n_tokens)) != CLI_EXIT_OK) return code;
    if ((code = check_per_token(&in->token_weight, in->n_tokens)) != CLI_EXIT_OK) return code;
    if ((code = check_vector(&in->bias, in->v_local, "one for each row of --weight")) != CLI_EXIT_OK)
        return code;
    return check_vector(&in->class_weight, in->v_total, "one for each entry of the vocabulary");
}

static int check_targets(const score_options *options, score_inputs *in) {
    for (int64_t i = 0; i < in->n_tokens; i++) {
        int64_t target = score_target(in, i);
        if (target == options->ignore_index) continue;
        if (target < 0 || target >= in->v_total) {
            return cli_fail(CLI_EXIT_USAGE,
                            "--targets %s: row %lld: found %lld, wanted 0 to %lld or the ignored %lld",
                            in->targets.spec, (long long)i, (long long)target, (long long)in->v_total - 1,
                            (long long)options->ignore_index);
        }
        in->n_valid++;
    }
    return CLI_EXIT_OK;
}

static int check_weights(const score_operand *operand, int64_t n, float least, const char *wanted) {
    const float *values = operand->tensor.data;
    for (int64_t i = 0; operand->file && i < n; i++) {
        if (!isfinite(values[i]) || values[i] < least) {
            return cli_fail(CLI_EXIT_USAGE, "%s %s: row %lld: found %g, wanted %s", operand->option,
                            operand->spec, (long long)i, (double)values[i], wanted);
        }
    }
    return CLI_EXIT_OK;
}

/* A folder that does not take the result is named now and not after hours of scoring. */
static int check_out_folder(const char *out) {
    const char *slash = strrchr(out, '/');
    size_t length = !slash || slash == out ? 1 : (size_t)(slash - out);
    char *folder = strndup(slash ? out : ".", length);
    if (!folder) return cli_fail(CLI_EXIT_RUNTIME, "--out %s: out of memory", out);
    int code = CLI_EXIT_OK;
    if (access(folder, W_OK | X_OK) != 0) {
        code = cli_fail(CLI_EXIT_RUNTIME, "--out %s: cannot write into folder %s: %s", out, folder,
                        strerror(errno));
    }
    free(folder);
    return code;
}

/* Renaming the result over an input would destroy what the user cannot compute again. */
static int check_out(const score_options *options, const score_inputs *in) {
    struct stat out, input;
    const score_operand *operands[] = {&in->hidden, &in->weight,       &in->targets,
                                       &in->bias,   &in->class_weight, &in->token_weight};
    if (!options->out) return CLI_EXIT_OK;
    if (stat(options->out, &out) != 0) return check_out_folder(options->out);
    if (S_ISDIR(out.st_mode)) {
        return cli_fail(CLI_EXIT_USAGE, "--out %s: found a directory, wanted a file name", options->out);
    }
    for (size_t i = 0; i < sizeof operands / sizeof operands[0]; i++) {
        const char *spec = operands[i]->file ? operands[i]->spec : NULL;
        const char *colon = spec ? strrchr(spec, ':') : NULL;
        char *path = spec ? strndup(spec, colon ? (size_t)(colon - spec) : strlen(spec)) : NULL;
        bool same = path && (stat(spec, &input) == 0 || stat(path, &input) == 0) &&
                    input.st_dev == out.st_dev && input.st_ino == out.st_ino;
        free(path);
        if (same) {
            return cli_fail(CLI_EXIT_USAGE, "--out %s: found the file of %s %s, wanted another", options->out,
                            operands[i]->option, spec);
        }
    }
    return check_out_folder(options->out);
}

static int make_cut(const score_options *options, score_inputs *in) {
    char rows[256];
    snprintf(rows, sizeof rows, "rows of --weight %s", in->weight.spec);
    return cli_cut_make(&options->cut, in->v_local, rows, &in->cut);
}

int64_t score_target(const score_inputs *in, int64_t i) {
    const void *data = in->targets.tensor.data;
    return in->targets.tensor.dtype == LL_DTYPE_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

int score_inputs_open(const score_options *options, score_inputs *in) {
    int code;
    *in = (score_inputs){0};
    if ((code = open_all(options, in)) != CLI_EXIT_OK) return code;
    if ((code = check_out(options, in)) != CLI_EXIT_OK) return code;
    if ((code = check_shapes(options, in)) != CLI_EXIT_OK) return code;
    if ((code = make_cut(options, in)) != CLI_EXIT_OK) return code;
    if ((code = check_targets(options, in)) != CLI_EXIT_OK) return code;
    code = check_weights(&in->class_weight, in->v_total, 0, "a finite number >= 0");
    if (code != CLI_EXIT_OK) return code;
    return check_weights(&in->token_weight, in->n_tokens, -INFINITY, "a finite number");
}

void score_inputs_close(score_inputs *in) {
    cli_cut_free(&in->cut);
    lli_tensor_file_close(in->hidden.file);
    lli_tensor_file_close(in->weight.file);
    lli_tensor_file_close(in->targets.file);
    lli_tensor_file_close(in->bias.file);
    lli_tensor_file_close(in->class_weight.file);
    lli_tensor_file_close(in->token_weight.file);
}
