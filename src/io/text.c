/* UTF-8 checks and quoting, apart from the formats because the reader, the writer and the lookup share them.
 */
#include "io/text.h"

#include <string.h>

size_t lli_utf8_bytes(const void *text, size_t n) {
    const unsigned char *s = text;
    if (s[0] < 0x80) return 1;
    size_t bytes = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || bytes > n) return 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
    }
    if (s[0] == 0xe0 && s[1] < 0xa0) return 0; /* overlong */
    if (s[0] == 0xed && s[1] > 0x9f) return 0; /* surrogate */
    if (s[0] == 0xf0 && s[1] < 0x90) return 0; /* overlong */
    if (s[0] == 0xf4 && s[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return bytes;
}

const char *lli_quote(const char *text, size_t n, char out[kQuoteBytes]) {
    size_t used = 0, i = 0;
    while (i < n) {
        size_t bytes = lli_utf8_bytes(text + i, n - i);
        unsigned char c = (unsigned char)text[i];
        /* U+0080 .. U+009F are control characters too (0x9b starts an escape sequence). */
        int hidden = bytes == 0 || c < 0x20 || c == 0x7f || (c == 0xc2 && (unsigned char)text[i + 1] < 0xa0);
        size_t wanted = hidden ? 1 : bytes;
        if (used + wanted + 4 > kQuoteBytes) {
            memcpy(out + used, "...", 3);
            used += 3;
            break;
        }
        if (hidden) {
            out[used] = '?';
        } else {
            memcpy(out + used, text + i, bytes);
        }
        used += wanted;
        i += bytes ? bytes : 1;
    }
    out[used] = 0;
    return out;
}
