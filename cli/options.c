/* The option parser: reads argv against a table, names option, value found and value wanted when it
 * refuses, and prints --help from the same table. Abbreviated and one-letter options are left out. */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const cli_option *find_option(const cli_option *options, const char *name, size_t length) {
    for (const cli_option *option = options; option->name; option++) {
        if (strlen(option->name) == length && memcmp(option->name, name, length) == 0) return option;
    }
    return NULL;
}

/* "a number > 0", "an integer from 1 to 1024", ... */
static void describe_wanted(const cli_option *option, char *text, size_t text_bytes) {
    const char *kind = option->type == CLI_INT64 ? "an integer" : "a number";
    if (option->min == 0 && option->max == 0) {
        snprintf(text, text_bytes, "%s", kind);
    } else if (isinf(option->max)) {
        snprintf(text, text_bytes, "%s %s %.15g", kind, option->above_min ? ">" : ">=", option->min);
    } else {
        snprintf(text, text_bytes, "%s %s %.15g and <= %.15g", kind,
                 option->above_min ? ">" : ">=", option->min, option->max);
    }
}

static bool in_range(const cli_option *option, double value) {
    if (option->min == 0 && option->max == 0) return true;
    return (option->above_min ? value > option->min : value >= option->min) && value <= option->max;
}

/* strtod and strtoll skip leading blanks and accept hexadecimal; an option's number is plain decimal. */
static bool is_plain_number(const char *text) {
    return *text && strspn(text, "0123456789+-.eE") == strlen(text);
}

static bool store_number(const cli_option *option, const char *text) {
    char *end;
    if (!is_plain_number(text)) return false;
    errno = 0;
    if (option->type == CLI_INT64) {
        long long value = strtoll(text, &end, 10);
        if (*end || errno || !in_range(option, (double)value)) return false;
        *(int64_t *)option->value = value;
        return true;
    }
    double value = strtod(text, &end);
    /* ERANGE of an underflow is no error here: the range decides about what it became. */
    if (*end || !isfinite(value) || !in_range(option, value)) return false;
    *(double *)option->value = value;
    return true;
}

static bool is_choice(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (const char *word = choices; word;) {
        size_t word_length = strcspn(word, "|");
        if (word_length == length && memcmp(word, text, length) == 0) return true;
        word = word[word_length] ? word + word_length + 1 : NULL;
    }
    return false;
}

static int store_value(const cli_option *option, const char *text) {
    if (option->type == CLI_STRING) {
        if (strchr(option->metavar, '|') && !is_choice(option->metavar, text)) {
            return cli_fail(CLI_EXIT_USAGE, "--%s: found \"%s\", wanted %s", option->name, text,
                            option->metavar);
        }
        if (!*text) return cli_fail(CLI_EXIT_USAGE, "--%s: found an empty value", option->name);
        *(const char **)option->value = text;
    } else if (!store_number(option, text)) {
        char wanted[128];
        describe_wanted(option, wanted, sizeof wanted);
        return cli_fail(CLI_EXIT_USAGE, "--%s: found \"%s\", wanted %s", option->name, text, wanted);
    }
    return CLI_GO_ON;
}

/* argc bounds what any list can ever hold, so that one allocation serves. */
static bool append(cli_strings *strings, const char *item, int argc) {
    if (!strings->items) strings->items = calloc((size_t)argc, sizeof *strings->items);
    if (!strings->items) return false;
    strings->items[strings->count++] = item;
    return true;
}

static void print_help(const cli_usage *usage) {
    printf("usage: logitless %s\n\n%s", usage->synopsis, usage->about);
    printf("\noptions:\n");
    for (const cli_option *option = usage->options; option->name; option++) {
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", option->name, option->type == CLI_FLAG ? "" : " ",
                 option->type == CLI_FLAG ? "" : option->metavar);
        /* A left side too long for its column gets a line of its own. */
        if (strlen(left) > 28) {
            printf("  %s\n  %-28s  %s\n", left, "", option->help);
        } else {
            printf("  %-28s  %s\n", left, option->help);
        }
    }
    printf("  %-28s  %s\n", "--help", "print this text");
}

static int parse_option(const cli_usage *usage, int argc, char **argv, int *index, bool *seen) {
    const char *name = argv[*index] + 2, *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const cli_option *option = find_option(usage->options, name, length);
    if (!option) {
        return cli_fail(CLI_EXIT_USAGE, "%s: unknown option --%.*s; see logitless %s --help", argv[0],
                        (int)length, name, argv[0]);
    }
    seen[option - usage->options] = true;
    if (option->type == CLI_FLAG) {
        if (equals) {
            return cli_fail(CLI_EXIT_USAGE, "--%s: found \"%s\", but this option takes no value",
                            option->name, equals + 1);
        }
        *(bool *)option->value = true;
        return CLI_GO_ON;
    }
    /* A number may start with a dash, an option's name with two. */
    if (!equals && (*index + 1 >= argc || strncmp(argv[*index + 1], "--", 2) == 0)) {
        return cli_fail(CLI_EXIT_USAGE, "--%s: found no value, wanted %s", option->name, option->metavar);
    }
    if (option->type != CLI_STRINGS) return store_value(option, equals ? equals + 1 : argv[++*index]);
    const char *item = equals ? equals + 1 : argv[++*index];
    for (;;) {
        if (!append(option->value, item, argc)) return cli_fail(CLI_EXIT_RUNTIME, "out of memory");
        if (*index + 1 >= argc || strncmp(argv[*index + 1], "--", 2) == 0) return CLI_GO_ON;
        item = argv[++*index];
    }
}

int cli_options_parse(const cli_usage *usage, int argc, char **argv) {
    enum { kOptionsMax = 64 };
    bool seen[kOptionsMax] = {false}, only_positional = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            print_help(usage);
            return CLI_EXIT_OK;
        }
        if (strcmp(argv[i], "--") == 0) break;
    }
    for (int i = 1; i < argc; i++) {
        if (!only_positional && strcmp(argv[i], "--") == 0) {
            only_positional = true;
        } else if (!only_positional && strncmp(argv[i], "--", 2) == 0) {
            int code = parse_option(usage, argc, argv, &i, seen);
            if (code != CLI_GO_ON) return code;
        } else if (!usage->positional) {
            return cli_fail(CLI_EXIT_USAGE, "%s: found \"%s\", wanted an option; see logitless %s --help",
                            argv[0], argv[i], argv[0]);
        } else if (!append(usage->positional, argv[i], argc)) {
            return cli_fail(CLI_EXIT_RUNTIME, "out of memory");
        }
    }
    for (const cli_option *option = usage->options; option->name; option++) {
        if (option->required && !seen[option - usage->options]) {
            return cli_fail(CLI_EXIT_USAGE, "%s: --%s %s is required; see logitless %s --help", argv[0],
                            option->name, option->metavar, argv[0]);
        }
    }
    return CLI_GO_ON;
}
