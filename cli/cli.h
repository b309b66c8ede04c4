/* What the commands of the program share: exit codes, the one-line error, numbers for JSON, the clock and
 * the progress bar. Options are in options.h; the program uses the public API and src/io only. */
#ifndef LL_CLI_CLI_H
#define LL_CLI_CLI_H

#include <logitless/logitless.h>

#include <stdbool.h>

enum {
    CLI_EXIT_OK = 0,
    CLI_EXIT_CHECK = 1,  /* a check failed */
    CLI_EXIT_USAGE = 2,  /* bad usage or bad input */
    CLI_EXIT_RUNTIME = 3 /* the machine's fault: memory, disk, ... */
};

/* Commands; argv[0] is the command's name, the result is the exit code. */
int ll_cmd_score(int argc, char **argv);
int ll_cmd_train(int argc, char **argv);
int ll_cmd_check(int argc, char **argv);
int ll_cmd_bench(int argc, char **argv);
int ll_cmd_info(int argc, char **argv);

/* Prints "logitless: SENTENCE" on stderr, always exactly one line, and returns exit_code. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int cli_fail(int exit_code, const char *format, ...);

/* INVALID_ARG and UNSUPPORTED are the caller's fault (2), the others the machine's (3). */
int cli_exit_code(ll_status status);

/* As cli_fail, with that code and the sentence of ll_last_error(). */
int cli_fail_status(ll_status status);

/* As cli_fail_status, after reading an input file: one that is missing or unreadable is bad input (2). */
int cli_fail_input(ll_status status);

/* The words of --backend, "auto" where it is none of them. */
#define CLI_BACKENDS "auto|cpu|cuda|ref"
ll_backend cli_backend(const char *word);

/* Seconds of a clock that never goes back. */
double cli_seconds(void);

/* FNV-1a, 64 bits, over the little-endian bytes of the f32 log-probs -nll[0..n). Zeros count as +0 and
 * NaN as 0x7fc00000, so that equal numbers have equal digests on every machine. */
uint64_t cli_digest(const float *nll, int64_t n);

/* printf("%s\n") of a JSON object; takes the object. CLI_EXIT_RUNTIME without memory. */
struct cJSON;
int cli_print_json(struct cJSON *object);

/* Bar on stderr, only if that is a terminal. */
typedef struct cli_progress {
    const char *label;
    int64_t total;
    double begin_s, last_s;
    bool on;
} cli_progress;

cli_progress cli_progress_begin(const char *label, int64_t total);
void cli_progress_update(cli_progress *progress, int64_t done);
void cli_progress_end(cli_progress *progress); /* erases the bar */

#endif
