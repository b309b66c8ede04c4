/* A first look at the JSON text of a .safetensors header, before cJSON sees any of it. */
#ifndef LLI_IO_SAFETENSORS_JSON_H
#define LLI_IO_SAFETENSORS_JSON_H

#include "core/status.h"

#include <stdbool.h>

/* One linear pass over all bytes; afterwards these hold, and no later step asks again:
 *   - valid UTF-8 and no control characters, so no NUL byte; escapes are well formed and none is \u0000
 *     (a name is a C string: "a\u0000b" would pass for "a")
 *   - outside strings only { } [ ] : , digits, '-' and blanks: an integer cannot be 1.5, 1e9 or 007, and
 *     true, false and null do not occur
 *   - brackets nest at most three deep and close in order, every string ends
 *   - the text is one object with nothing but blanks after it */
ll_status lli_header_check(const char *path, const char *text, size_t n_bytes);

/* Text that may still be read: the members of one object. */
typedef struct lli_json_cursor {
    const char *at, *end;
} lli_json_cursor;

/* One "key": value; key includes its quotes. */
typedef struct lli_json_member {
    const char *key, *value;
    size_t key_bytes, value_bytes;
} lli_json_member;

typedef enum lli_json_step { LLI_JSON_MEMBER, LLI_JSON_END, LLI_JSON_MALFORMED } lli_json_step;

/* Cursor over the members of the object whose '{' is text[0]. */
lli_json_cursor lli_json_members(const char *text, size_t n_bytes);
/* The next member of a checked text. What lies inside the value is not looked at; END only where nothing
 * but blanks follows the object. */
lli_json_step lli_json_next(lli_json_cursor *cursor, lli_json_member *member);
/* Bytes of the string at text[0] == '"' of a checked text, with both quotes. */
size_t lli_json_string_bytes(const char *text);

#endif
