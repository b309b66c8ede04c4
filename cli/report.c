/* What every command reports with: the one-line error, JSON output, the clock and the digest. */
#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include "core/dtype.h"

#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

int cli_fail(int exit_code, const char *format, ...) {
    char text[4096], line[2 * sizeof text];
    size_t used = 0;
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    /* Names come from files and arguments: a newline or an escape sequence in one must not reach the
     * terminal, nor make two lines of the error. */
    size_t length = strlen(text);
    while (length && text[length - 1] == '\n') text[--length] = 0;
    for (const char *c = text; *c; c++) {
        const bool control = (unsigned char)*c < 0x20 || *c == 0x7f;
        line[used++] = (char)(*c == '\n' ? ';' : control ? '?' : *c);
        if (*c == '\n') line[used++] = ' ';
    }
    line[used] = 0;
    fprintf(stderr, "logitless: %s\n", line);
    return exit_code;
}

int cli_exit_code(ll_status status) {
    bool caller = status == LL_STATUS_INVALID_ARG || status == LL_STATUS_UNSUPPORTED;
    return status == LL_STATUS_OK ? CLI_EXIT_OK : caller ? CLI_EXIT_USAGE : CLI_EXIT_RUNTIME;
}

int cli_fail_status(ll_status status) {
    return cli_fail(cli_exit_code(status), "%s", ll_last_error());
}

int cli_fail_input(ll_status status) {
    if (status != LL_STATUS_IO) return cli_fail_status(status);
    return cli_fail(CLI_EXIT_USAGE, "%s", ll_last_error());
}

ll_backend cli_backend(const char *word) {
    return strcmp(word, "cpu") == 0    ? LL_BACKEND_CPU
           : strcmp(word, "ref") == 0  ? LL_BACKEND_REF
           : strcmp(word, "cuda") == 0 ? LL_BACKEND_CUDA
                                       : LL_BACKEND_AUTO;
}

double cli_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

uint64_t cli_digest(const float *nll, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = nll[i] != nll[i] ? 0x7fc00000u : nll[i] == 0 ? 0 : lli_bits(-nll[i]);
        for (int byte = 0; byte < 4; byte++) {
            hash = (hash ^ (bits >> (8 * byte) & 0xffu)) * 0x100000001b3u;
        }
    }
    return hash;
}

int cli_print_json(cJSON *object) {
    char *text = object ? cJSON_Print(object) : NULL;
    cJSON_Delete(object);
    if (!text) return cli_fail(CLI_EXIT_RUNTIME, "out of memory for the JSON output");
    printf("%s\n", text);
    cJSON_free(text);
    return CLI_EXIT_OK;
}
