/* Reading text files and splitting them into distinct paragraphs. Separate from train_tokens.c, which knows
 * words and ids. Left out: encodings (bytes pass as they are) and files too large to be held in memory. */
#define _POSIX_C_SOURCE 200809L
#include "train_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Ends a read of /dev/zero; sorting the words of more text would take minutes. */
static const size_t kTextBytesMax = (size_t)1 << 30;

ll_status cli_grow(void *items, int64_t n, int64_t *capacity, size_t element_bytes) {
    if (n < *capacity) return LL_STATUS_OK;
    int64_t wanted = *capacity ? 2 * *capacity : 1024;
    void *old, *larger;
    memcpy(&old, items, sizeof old);
    larger = realloc(old, (size_t)wanted * element_bytes);
    LLI_REQUIRE(larger, LL_STATUS_MEMORY, "train: no memory for %lld pieces of text", (long long)wanted);
    memcpy(items, &larger, sizeof larger);
    *capacity = wanted;
    return LL_STATUS_OK;
}

ll_status cli_spans_add(cli_spans *spans, cli_span item) {
    LLI_TRY(cli_grow(&spans->items, spans->n, &spans->capacity, sizeof *spans->items));
    spans->items[spans->n++] = item;
    return LL_STATUS_OK;
}

int cli_span_compare(const void *left, const void *right) {
    const cli_span *a = left, *b = right;
    int order = memcmp(a->text, b->text, (size_t)(a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes));
    return order ? order : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

static int by_order(const void *left, const void *right) {
    const cli_span *a = left, *b = right;
    return (a->order > b->order) - (a->order < b->order);
}

/* qsort may swap equal elements; the order decides, so that the first of equal paragraphs is kept. */
static int by_bytes_then_order(const void *left, const void *right) {
    int order = cli_span_compare(left, right);
    return order ? order : by_order(left, right);
}

void cli_spans_sort(cli_spans *spans, int (*compare)(const void *, const void *)) {
    /* qsort must not be given NULL, which an empty list is */
    if (spans->n > 1) qsort(spans->items, (size_t)spans->n, sizeof *spans->items, compare);
}

/* Room for `wanted` more bytes. */
static ll_status reserve(cli_text *text, size_t wanted, const char *path) {
    if (text->capacity_bytes - text->n_bytes >= wanted) return LL_STATUS_OK;
    size_t capacity = 2 * text->capacity_bytes + wanted;
    LLI_REQUIRE(text->n_bytes <= kTextBytesMax, LL_STATUS_INVALID_ARG,
                "%s: more text than the %zu MiB that are read", path, kTextBytesMax >> 20);
    char *larger = realloc(text->bytes, capacity);
    LLI_REQUIRE(larger, LL_STATUS_MEMORY, "%s: no memory for %zu bytes of text", path, capacity);
    text->bytes = larger;
    text->capacity_bytes = capacity;
    return LL_STATUS_OK;
}

/* Reads to the end, pipes too. */
static ll_status read_stream(FILE *file, const char *path, cli_text *text) {
    size_t begin = text->n_bytes, got;
    struct stat about;
    LLI_REQUIRE(fstat(fileno(file), &about) != 0 || !S_ISDIR(about.st_mode), LL_STATUS_INVALID_ARG,
                "%s: is a directory; --text takes files", path);
    do {
        LLI_TRY(reserve(text, 1 << 16, path));
        got = fread(text->bytes + text->n_bytes, 1, text->capacity_bytes - text->n_bytes, file);
        text->n_bytes += got;
    } while (got > 0);
    LLI_REQUIRE(!ferror(file), LL_STATUS_INVALID_ARG, "%s: %s", path, strerror(errno));
    LLI_REQUIRE(text->n_bytes > begin, LL_STATUS_INVALID_ARG, "%s: is empty; --text takes text files", path);
    const char *zero = memchr(text->bytes + begin, 0, text->n_bytes - begin);
    LLI_REQUIRE(!zero, LL_STATUS_INVALID_ARG, "%s: byte %lld is 0; --text takes text files", path,
                (long long)(zero - (text->bytes + begin)));
    /* An empty line: no paragraph reaches over two files. */
    LLI_TRY(reserve(text, 2, path));
    memcpy(text->bytes + text->n_bytes, "\n\n", 2);
    text->n_bytes += 2;
    return LL_STATUS_OK;
}

/* Follows links, as /usr/share/common-licenses/GPL is one. */
static ll_status append_file(const char *path, cli_text *text) {
    FILE *file = fopen(path, "rb");
    LLI_REQUIRE(file, LL_STATUS_INVALID_ARG, "%s: %s", path, strerror(errno));
    ll_status status = read_stream(file, path, text);
    fclose(file);
    return status;
}

/* Paragraphs are separated by lines that are empty or white. White space becomes one space, in place: the
 * same paragraph wrapped or indented otherwise is the same paragraph. */
static ll_status split_paragraphs(cli_text *text) {
    char *out = text->bytes, *begin = out;
    int64_t n_newlines = 0;
    bool white = false;
    for (size_t i = 0; i < text->n_bytes; i++) {
        char c = text->bytes[i];
        if (cli_is_space(c)) {
            white = true;
            n_newlines += c == '\n';
            if (n_newlines > 1 && out > begin) {
                cli_span paragraph = {begin, out - begin, text->paragraphs.n, false};
                LLI_TRY(cli_spans_add(&text->paragraphs, paragraph));
                begin = out;
            }
        } else {
            if (white && out > begin) *out++ = ' ';
            *out++ = c;
            white = false;
            n_newlines = 0;
        }
    }
    return LL_STATUS_OK;
}

/* Licences quote one another: a paragraph that occurs twice must not be both trained on and held out.
 * Nearly equal ones (a version number apart) remain, as they do in most corpora. */
static void drop_repeated(cli_text *text) {
    cli_spans *paragraphs = &text->paragraphs;
    int64_t kept = 0;
    cli_spans_sort(paragraphs, by_bytes_then_order);
    for (int64_t i = 1; i < paragraphs->n; i++) {
        paragraphs->items[i].repeated =
            cli_span_compare(&paragraphs->items[i - 1], &paragraphs->items[i]) == 0;
    }
    cli_spans_sort(paragraphs, by_order);
    for (int64_t i = 0; i < paragraphs->n; i++) {
        if (!paragraphs->items[i].repeated) paragraphs->items[kept++] = paragraphs->items[i];
    }
    text->n_repeated = paragraphs->n - kept;
    paragraphs->n = kept;
}

ll_status cli_text_read(const char *const *paths, int64_t n_paths, cli_text *text) {
    memset(text, 0, sizeof *text);
    for (int64_t i = 0; i < n_paths; i++) LLI_TRY(append_file(paths[i], text));
    LLI_TRY(split_paragraphs(text));
    drop_repeated(text);
    return LL_STATUS_OK;
}

void cli_text_free(cli_text *text) {
    free(text->paragraphs.items);
    free(text->bytes);
    memset(text, 0, sizeof *text);
}
