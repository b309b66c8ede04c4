/* Text files to distinct paragraphs, for `logitless train`. */
#ifndef LL_CLI_TRAIN_TEXT_H
#define LL_CLI_TRAIN_TEXT_H

#include "core/status.h"

#include <stdbool.h>

/* Bytes of a text: a paragraph or a word. */
typedef struct cli_span {
    const char *text;
    int64_t n_bytes;
    int64_t order; /* paragraph: place in the text; word: count, later token id */
    bool repeated; /* paragraph: an equal one stands before it */
} cli_span;

typedef struct cli_spans {
    cli_span *items;
    int64_t n, capacity;
} cli_spans;

/* qsort and bsearch by the bytes. */
int cli_span_compare(const void *left, const void *right);
void cli_spans_sort(cli_spans *spans, int (*compare)(const void *, const void *));
ll_status cli_spans_add(cli_spans *spans, cli_span item);

/* Room for one more element in an array that doubles; `items` is the address of the array's pointer. */
ll_status cli_grow(void *items, int64_t n, int64_t *capacity, size_t element_bytes);

static inline bool cli_is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

typedef struct cli_text {
    char *bytes; /* what the spans point into */
    size_t n_bytes, capacity_bytes;
    cli_spans paragraphs;
    int64_t n_repeated; /* left out */
} cli_text;

/* Reads the files and splits them into paragraphs, each kept once, in the order of the text.
 * INVALID_ARG with a sentence that starts with the path (missing, directory, empty, binary, too large), or
 * MEMORY; the text is to be freed in every case. */
ll_status cli_text_read(const char *const *paths, int64_t n_paths, cli_text *text);
void cli_text_free(cli_text *text);

#endif
