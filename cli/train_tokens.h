/* Paragraphs to token ids: the held-out split, the vocabulary, the encoding; for `logitless train`. */
#ifndef LL_CLI_TRAIN_TOKENS_H
#define LL_CLI_TRAIN_TOKENS_H

#include "train_text.h"

/* Token ids: the 256 bytes, the end of a paragraph, then the words. A punctuation mark is its byte; a word
 * without an id of its own is spelled: a space, then its bytes. So there is no "unknown" token, and the
 * perplexity accounts for every character of the text. */
enum { kParagraphEnd = 256, kFirstWord = 257 };

typedef struct cli_corpus {
    int32_t *train, *heldout; /* paragraphs one after the other, each closed by kParagraphEnd */
    int64_t n_train, n_heldout;
    int64_t n_vocab;
    char *vocabulary; /* the words of ids kFirstWord, kFirstWord + 1, ..., UTF-8, joined by spaces */
} cli_corpus;

/* Holds every tenth paragraph out and gives ids to the most frequent words of the others, n_vocab_max
 * ids in all at most. INVALID_ARG (text too short), MEMORY; the corpus is to be freed in every case. */
ll_status cli_corpus_encode(const cli_text *text, int64_t n_vocab_max, cli_corpus *corpus);
void cli_corpus_free(cli_corpus *corpus);

#endif
