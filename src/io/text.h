/* Text from strangers: UTF-8 checks, and quoting for one-line error sentences. */
#ifndef LLI_IO_TEXT_H
#define LLI_IO_TEXT_H

#include <stddef.h>

enum { kQuoteBytes = 64 };

/* Bytes of the character at text[0] (1 .. 4), 0 if the n >= 1 bytes there do not start a valid one
 * (cut, overlong, a surrogate, beyond U+10FFFF). */
size_t lli_utf8_bytes(const void *text, size_t n);

/* Copies text into `out` with control characters and broken UTF-8 as '?', cut with "..." where it is long:
 * a name cannot break the one-line rule or send escape sequences to a terminal. Returns out. */
const char *lli_quote(const char *text, size_t n, char out[kQuoteBytes]);

#endif
