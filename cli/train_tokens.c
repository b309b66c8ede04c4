/* Paragraphs to token ids. Counting and looking up words is sorting and bisection: a megabyte of text takes
 * a fraction of a second. Left out: subword merges, and Unicode beyond "bytes from 0x80 on are letters". */
#include "train_tokens.h"

#include <stdlib.h>
#include <string.h>

enum {
    kHeldoutEvery = 10,
    kMinCount = 2 /* a word seen once is spelled: from those words the model learns to spell */
};

typedef struct token_list {
    int32_t *ids;
    int64_t n, capacity;
} token_list;

static bool is_word(char byte) {
    unsigned char c = (unsigned char)byte;
    return c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

/* The next word, or the next single byte that is in no word, from *offset on. False at the end. */
static bool next_piece(const cli_span *paragraph, int64_t *offset, cli_span *piece) {
    const char *text = paragraph->text;
    int64_t n_bytes = paragraph->n_bytes, begin = *offset, end;
    while (begin < n_bytes && cli_is_space(text[begin])) begin++;
    if (begin >= n_bytes) return false;
    end = begin + 1;
    while (is_word(text[begin]) && end < n_bytes && is_word(text[end])) end++;
    *piece = (cli_span){text + begin, end - begin, 1, false};
    *offset = end;
    return true;
}

/* Words that are not UTF-8 get no id, for the vocabulary is saved as UTF-8 text; they are spelled. */
static bool is_utf8(const cli_span *word) {
    const unsigned char *c = (const unsigned char *)word->text, *end = c + word->n_bytes;
    while (c < end) {
        /* overlong forms, surrogates and codes beyond U+10FFFF show in the first two bytes */
        unsigned first = *c, least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
        unsigned most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
        int n_more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
        if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || end - c <= n_more) return false;
        if (n_more > 0 && (c[1] < least || c[1] > most)) return false;
        for (int i = 2; i <= n_more; i++) {
            if (c[i] < 0x80 || c[i] > 0xbf) return false;
        }
        c += n_more + 1;
    }
    return true;
}

static bool is_heldout(int64_t paragraph) {
    return paragraph % kHeldoutEvery == kHeldoutEvery - 1;
}

static int by_count_then_bytes(const void *left, const void *right) {
    const cli_span *a = left, *b = right;
    if (a->order != b->order) return a->order < b->order ? 1 : -1;
    return cli_span_compare(left, right);
}

/* Sorted words with repeats to distinct words with counts (in `order`); the rare ones are dropped. */
static void count_words(cli_spans *words) {
    int64_t n_distinct = 0, kept = 0;
    cli_spans_sort(words, cli_span_compare);
    for (int64_t i = 0; i < words->n; i++) {
        if (n_distinct && cli_span_compare(&words->items[n_distinct - 1], &words->items[i]) == 0) {
            words->items[n_distinct - 1].order++;
        } else {
            words->items[n_distinct++] = words->items[i];
        }
    }
    for (int64_t i = 0; i < n_distinct; i++) {
        if (words->items[i].order >= kMinCount && is_utf8(&words->items[i])) {
            words->items[kept++] = words->items[i];
        }
    }
    words->n = kept;
}

/* Only from training paragraphs: the vocabulary must not know the held-out text either. On return the
 * words stand in the order of their ids. */
static ll_status choose_words(const cli_spans *paragraphs, int64_t n_words_max, cli_spans *words) {
    cli_span piece;
    for (int64_t p = 0; p < paragraphs->n; p++) {
        if (is_heldout(p)) continue;
        for (int64_t offset = 0; next_piece(&paragraphs->items[p], &offset, &piece);) {
            if (is_word(piece.text[0])) LLI_TRY(cli_spans_add(words, piece));
        }
    }
    count_words(words);
    cli_spans_sort(words, by_count_then_bytes);
    if (words->n > n_words_max) words->n = n_words_max;
    for (int64_t i = 0; i < words->n; i++) words->items[i].order = kFirstWord + i;
    return LL_STATUS_OK;
}

static ll_status join_words(const cli_spans *words, char **joined) {
    size_t n_bytes = 1, used = 0;
    for (int64_t i = 0; i < words->n; i++) n_bytes += (size_t)words->items[i].n_bytes + 1;
    *joined = malloc(n_bytes);
    LLI_REQUIRE(*joined, LL_STATUS_MEMORY, "train: no memory for a vocabulary of %zu bytes", n_bytes);
    for (int64_t i = 0; i < words->n; i++) {
        if (i > 0) (*joined)[used++] = ' ';
        memcpy(*joined + used, words->items[i].text, (size_t)words->items[i].n_bytes);
        used += (size_t)words->items[i].n_bytes;
    }
    (*joined)[used] = 0;
    return LL_STATUS_OK;
}

static ll_status token_add(token_list *tokens, int64_t id) {
    LLI_TRY(cli_grow(&tokens->ids, tokens->n, &tokens->capacity, sizeof *tokens->ids));
    tokens->ids[tokens->n++] = (int32_t)id;
    return LL_STATUS_OK;
}

/* `words` sorted by their bytes. */
static ll_status encode(const cli_span *paragraph, const cli_spans *words, token_list *tokens) {
    cli_span piece, *known;
    for (int64_t offset = 0; next_piece(paragraph, &offset, &piece);) {
        bool word = is_word(piece.text[0]);
        known = NULL;
        if (word && words->n) {
            known = bsearch(&piece, words->items, (size_t)words->n, sizeof piece, cli_span_compare);
        }
        if (known) {
            LLI_TRY(token_add(tokens, known->order));
            continue;
        }
        if (word) LLI_TRY(token_add(tokens, ' '));
        for (int64_t i = 0; i < piece.n_bytes; i++) {
            LLI_TRY(token_add(tokens, (unsigned char)piece.text[i]));
        }
    }
    return token_add(tokens, kParagraphEnd);
}

static ll_status encode_parts(const cli_spans *paragraphs, int64_t n_vocab_max, cli_spans *words,
                              token_list *train, token_list *heldout, cli_corpus *corpus) {
    LLI_REQUIRE(paragraphs->n >= kHeldoutEvery, LL_STATUS_INVALID_ARG,
                "--text: too short: %lld different paragraphs (empty lines part them); at least %d wanted",
                (long long)paragraphs->n, kHeldoutEvery);
    LLI_TRY(choose_words(paragraphs, n_vocab_max - kFirstWord, words));
    LLI_TRY(join_words(words, &corpus->vocabulary));
    corpus->n_vocab = kFirstWord + words->n;
    cli_spans_sort(words, cli_span_compare);
    for (int64_t p = 0; p < paragraphs->n; p++) {
        LLI_TRY(encode(&paragraphs->items[p], words, is_heldout(p) ? heldout : train));
    }
    return LL_STATUS_OK;
}

ll_status cli_corpus_encode(const cli_text *text, int64_t n_vocab_max, cli_corpus *corpus) {
    cli_spans words = {0};
    token_list train = {0}, heldout = {0};
    memset(corpus, 0, sizeof *corpus);
    ll_status status = encode_parts(&text->paragraphs, n_vocab_max, &words, &train, &heldout, corpus);
    corpus->train = train.ids;
    corpus->n_train = train.n;
    corpus->heldout = heldout.ids;
    corpus->n_heldout = heldout.n;
    free(words.items);
    return status;
}

void cli_corpus_free(cli_corpus *corpus) {
    free(corpus->train);
    free(corpus->heldout);
    free(corpus->vocabulary);
    memset(corpus, 0, sizeof *corpus);
}
