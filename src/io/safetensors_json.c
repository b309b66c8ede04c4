/* Checks the bytes of a header and cuts it into members, so that cJSON only ever parses one small piece: a
 * tree of a whole 132 MB header would take over 1 GB, and a hostile one ([1,1,1,...]) 30 times its size. */
#include "io/safetensors_json.h"
#include "io/text.h"

#include <string.h>

enum { kDepthMax = 3 }; /* { name: { data_offsets: [ */

static bool is_blank(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static ll_status refuse(const char *path, const char *text, size_t n_bytes, size_t at, const char *wanted) {
    char shown[kQuoteBytes];
    size_t left = n_bytes - at;
    return lli_fail(LL_STATUS_INVALID_ARG, "%s: .safetensors header byte %zu: '%s' found, %s wanted", path,
                    at, lli_quote(text + at, left < 16 ? left : 16, shown), wanted);
}

/* Bytes of the escape at s[0] == '\\', 0 if it is none or stands for NUL. */
static size_t escape_bytes(const char *s, size_t n) {
    if (n < 2) return 0;
    if (s[1] != 'u') return s[1] && strchr("\"\\/bfnrt", s[1]) ? 2 : 0;
    if (n < 6 || memcmp(s + 2, "0000", 4) == 0) return 0;
    for (int i = 2; i < 6; i++) {
        if (!s[i] || !strchr("0123456789abcdefABCDEF", s[i])) return 0;
    }
    return 6;
}

/* Index after the string that starts at text[at] == '"'; 0 and a sentence if it is not sound. */
static size_t check_string(const char *path, const char *text, size_t n, size_t at, ll_status *status) {
    for (size_t i = at + 1; i < n;) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"') return i + 1;
        size_t step = c == '\\'  ? escape_bytes(text + i, n - i)
                      : c < 0x20 ? 0
                                 : lli_utf8_bytes(text + i, n - i);
        if (step == 0) {
            *status = refuse(path, text, n, i,
                             c == '\\' ? "a JSON escape other than \\u0000"
                                       : "UTF-8 text without NUL or control characters");
            return 0;
        }
        i += step;
    }
    *status = refuse(path, text, n, at, "a string that ends");
    return 0;
}

ll_status lli_header_check(const char *path, const char *text, size_t n) {
    if (n == 0 || text[0] != '{') return refuse(path, text, n, 0, "a JSON object, {...}");
    char closers[kDepthMax];
    int depth = 0;
    for (size_t i = 0; i < n;) {
        char c = text[i];
        bool blank = is_blank(c);
        if (i > 0 && depth == 0 && !blank) return refuse(path, text, n, i, "only blanks after the object");
        if (c == '"') {
            ll_status status = LL_STATUS_OK;
            i = check_string(path, text, n, i, &status);
            if (i == 0) return status;
            continue;
        }
        if (c == '{' || c == '[') {
            if (depth == kDepthMax) return refuse(path, text, n, i, "at most 3 levels of brackets");
            closers[depth++] = c == '{' ? '}' : ']';
        } else if (c == '}' || c == ']') {
            if (closers[--depth] != c) return refuse(path, text, n, i, "the other closing bracket");
        } else if (c >= '0' && c <= '9') {
            bool first = text[i - 1] < '0' || text[i - 1] > '9';
            if (c == '0' && first && i + 1 < n && text[i + 1] >= '0' && text[i + 1] <= '9')
                return refuse(path, text, n, i, "a number without leading zeros");
        } else if (!blank && c != ',' && c != ':' && c != '-') {
            return refuse(path, text, n, i, "an integer, a string, {} or []");
        }
        i++;
    }
    LLI_REQUIRE(depth == 0, LL_STATUS_INVALID_ARG, "%s: .safetensors header ends inside its JSON object",
                path);
    return LL_STATUS_OK;
}

static void skip_blanks(lli_json_cursor *c) {
    while (c->at < c->end && is_blank(*c->at)) c->at++;
}

/* No end is passed: in a checked text every string ends. */
size_t lli_json_string_bytes(const char *text) {
    size_t n = 1;
    while (text[n] != '"') n += text[n] == '\\' ? 2 : 1;
    return n + 1;
}

static void skip_value(lli_json_cursor *c) {
    int depth = 0;
    while (c->at < c->end) {
        char symbol = *c->at;
        if (depth == 0 && (symbol == ',' || symbol == '}' || symbol == ']')) return;
        if (symbol == '"') {
            c->at += lli_json_string_bytes(c->at);
        } else {
            depth += (symbol == '{' || symbol == '[') - (symbol == '}' || symbol == ']');
            c->at++;
        }
    }
}

lli_json_cursor lli_json_members(const char *text, size_t n_bytes) {
    return (lli_json_cursor){text, text + n_bytes};
}

static lli_json_step at_end(lli_json_cursor *c) {
    c->at++;
    skip_blanks(c);
    return c->at == c->end ? LLI_JSON_END : LLI_JSON_MALFORMED;
}

lli_json_step lli_json_next(lli_json_cursor *c, lli_json_member *member) {
    skip_blanks(c);
    if (c->at == c->end) return LLI_JSON_MALFORMED;
    char before = *c->at; /* '{' before the first member, ',' before every other, '}' at the end */
    if (before == '}') return at_end(c);
    if (before != '{' && before != ',') return LLI_JSON_MALFORMED;
    c->at++;
    skip_blanks(c);
    if (before == '{' && c->at < c->end && *c->at == '}') return at_end(c);
    if (c->at == c->end || *c->at != '"') return LLI_JSON_MALFORMED;
    member->key = c->at;
    member->key_bytes = lli_json_string_bytes(c->at);
    c->at += member->key_bytes;
    skip_blanks(c);
    if (c->at == c->end || *c->at != ':') return LLI_JSON_MALFORMED;
    c->at++;
    skip_blanks(c);
    member->value = c->at;
    skip_value(c);
    const char *last = c->at;
    while (last > member->value && is_blank(last[-1])) last--;
    member->value_bytes = (size_t)(last - member->value);
    return LLI_JSON_MEMBER;
}
