/* Options of a command as a table: one line an option feeds the parser, its errors and --help.
 * `--name value` and `--name=value` are the same; `--` ends the options; the last of several wins. */
#ifndef LL_CLI_OPTIONS_H
#define LL_CLI_OPTIONS_H

#include "cli.h"

typedef enum cli_type {
    CLI_STRING, /* const char ** */
    CLI_INT64,  /* int64_t * */
    CLI_DOUBLE, /* double *, finite */
    CLI_FLAG,   /* bool *, takes no value */
    CLI_STRINGS /* cli_strings *: this and the following arguments up to the next option; may be repeated */
} cli_type;

/* Borrowed from argv. */
typedef struct cli_strings {
    const char **items; /* freed by the caller, may be NULL */
    int count;
} cli_strings;

typedef struct cli_option {
    const char *name; /* without the dashes; NULL ends a table */
    cli_type type;
    void *value;              /* holds the default before parsing */
    const char *metavar;      /* "N", "FILE[:NAME]"; for CLI_STRING "a|b|c" allows just these words */
    const char *help;         /* one sentence without a full stop, the default included */
    double min, max;          /* numbers: inclusive; both 0: any */
    bool required, above_min; /* above_min: min itself is excluded */
} cli_option;

typedef struct cli_usage {
    const char *synopsis; /* "score --hidden ... [options]" */
    const char *about;    /* paragraphs for --help, each line ended */
    const cli_option *options;
    cli_strings *positional; /* NULL: none taken */
} cli_usage;

enum { CLI_GO_ON = -1 };

/* CLI_GO_ON, or the exit code to leave with: 0 after --help, 2 after a bad argument (reported). */
int cli_options_parse(const cli_usage *usage, int argc, char **argv);

#endif
