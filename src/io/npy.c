/* The .npy format, versions 1.0 to 3.0:
 *
 *   | \x93NUMPY | major minor | header bytes: u16 (1.0) or u32 | header: Python dict literal, blanks, \n |
 * data |
 *
 * The literal is parsed by hand, because the formats' one legal shape is far smaller than Python: a dict of
 * exactly descr (string), fortran_order (bool) and shape (tuple of ints), in any order. Left out: object
 * arrays (pickles, which can run code), structured types, big-endian data. */
#include "io/tensor_file_internal.h"
#include "io/text.h"

#include <stdlib.h>
#include <string.h>

static const char npy_magic[] = "\x93NUMPY";
enum { kMagicBytes = 6, kDescrBytes = 32 };

static const struct npy_type {
    const char *descr, *type_name;
    ll_dtype dtype;
    int32_t element_bytes;
} npy_types[] = {
    {"<f4", "f32", LL_DTYPE_F32, 4}, {"=f4", "f32", LL_DTYPE_F32, 4}, {"<f2", "f16", LL_DTYPE_F16, 2},
    {"=f2", "f16", LL_DTYPE_F16, 2}, {"<i4", "i32", LL_DTYPE_I32, 4}, {"=i4", "i32", LL_DTYPE_I32, 4},
    {"<i8", "i64", LL_DTYPE_I64, 8}, {"=i8", "i64", LL_DTYPE_I64, 8},
};

/* By the end of descr; the first that fits. */
static const struct {
    const char *tail, *hint;
} npy_hints[] = {
    {"f8", "; convert it with .astype('<f4')"},
    {"V2", "; NumPy has no bf16: save it as .safetensors"},
    {"u2", "; if it holds bf16 bits, save it as .safetensors"},
    {"bfloat16", "; NumPy has no bf16: save it as .safetensors"},
    {"u4", "; convert it with .astype('<i8')"},
    {"u8", "; convert it with .astype('<i8')"},
    {"O", "; object arrays are pickles and are never read"},
};

typedef struct npy_cursor {
    const char *path, *text, *at, *end; /* text: start of the header, for offsets in sentences */
} npy_cursor;

typedef struct npy_header {
    char descr[kDescrBytes];
    bool fortran_order;
    int32_t n_dims;
    int64_t dims[kTensorMaxDims];
} npy_header;

static ll_status refuse(const npy_cursor *c, const char *wanted) {
    char shown[kQuoteBytes];
    size_t left = (size_t)(c->end - c->at);
    return lli_fail(LL_STATUS_INVALID_ARG, "%s: .npy header byte %lld: '%s' found, %s wanted", c->path,
                    (long long)(c->at - c->text), lli_quote(c->at, left < 16 ? left : 16, shown), wanted);
}

static void skip_blanks(npy_cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n')) c->at++;
}

/* Blanks, then `symbol` if it is next. */
static bool take(npy_cursor *c, char symbol) {
    skip_blanks(c);
    if (c->at == c->end || *c->at != symbol) return false;
    c->at++;
    return true;
}

static ll_status take_string(npy_cursor *c, char out[kDescrBytes], const char *wanted) {
    skip_blanks(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) return refuse(c, wanted);
    const char *begin = c->at + 1, *p = begin;
    while (p < c->end && *p != *c->at) {
        if (*p == '\\' || (unsigned char)*p < 0x20 || p - begin + 1 >= kDescrBytes) return refuse(c, wanted);
        p++;
    }
    if (p == c->end) return refuse(c, "a closed string");
    memcpy(out, begin, (size_t)(p - begin));
    out[p - begin] = 0;
    c->at = p + 1;
    return LL_STATUS_OK;
}

static ll_status take_bool(npy_cursor *c, bool *value) {
    skip_blanks(c);
    size_t left = (size_t)(c->end - c->at);
    *value = left >= 4 && memcmp(c->at, "True", 4) == 0;
    if (!*value && (left < 5 || memcmp(c->at, "False", 5) != 0)) return refuse(c, "True or False");
    c->at += *value ? 4 : 5;
    return LL_STATUS_OK;
}

static ll_status take_dim(npy_cursor *c, int64_t *dim) {
    skip_blanks(c);
    const char *begin = c->at, *p = begin;
    int64_t value = 0;
    for (; p < c->end && *p >= '0' && *p <= '9'; p++) {
        if (value > (INT64_MAX - (*p - '0')) / 10) return refuse(c, "a dimension below 2^63");
        value = value * 10 + (*p - '0');
    }
    if (p == begin || (*begin == '0' && p - begin > 1)) return refuse(c, "a dimension, 0 or more");
    c->at = p;
    *dim = value;
    return LL_STATUS_OK;
}

/* "()", "(3,)", "(3, 4)", "(3, 4,)". "(3)" is an int in Python, not a tuple. */
static ll_status take_shape(npy_cursor *c, npy_header *header) {
    if (!take(c, '(')) return refuse(c, "a shape tuple");
    header->n_dims = 0;
    bool comma = true;
    while (!take(c, ')')) {
        if (!comma) return refuse(c, "',' or ')'");
        if (header->n_dims == kTensorMaxDims) return refuse(c, "a shape of at most 8 dimensions");
        LLI_TRY(take_dim(c, &header->dims[header->n_dims]));
        header->n_dims++;
        comma = take(c, ',');
    }
    if (header->n_dims == 1 && !comma) return refuse(c, "a shape tuple, (N,),");
    return LL_STATUS_OK;
}

static ll_status parse_header(npy_cursor *c, npy_header *header) {
    enum { kDescr = 1, kFortranOrder = 2, kShape = 4, kAll = 7 };
    int seen = 0;
    bool comma = true;
    if (!take(c, '{')) return refuse(c, "'{'");
    while (!take(c, '}')) {
        if (!comma) return refuse(c, "',' or '}'");
        static const char keys[] = "one each of 'descr', 'fortran_order' and 'shape'";
        char key[kDescrBytes];
        const npy_cursor before = *c;
        LLI_TRY(take_string(c, key, keys));
        int bit = strcmp(key, "descr") == 0           ? kDescr
                  : strcmp(key, "fortran_order") == 0 ? kFortranOrder
                  : strcmp(key, "shape") == 0         ? kShape
                                                      : 0;
        if (!bit || (seen & bit)) return refuse(&before, keys);
        if (!take(c, ':')) return refuse(c, "':'");
        seen |= bit;
        LLI_TRY(bit == kDescr          ? take_string(c, header->descr, "a plain element type such as '<f4'")
                : bit == kFortranOrder ? take_bool(c, &header->fortran_order)
                                       : take_shape(c, header));
        comma = take(c, ',');
    }
    skip_blanks(c);
    if (c->at != c->end) return refuse(c, "only blanks after '}'");
    LLI_REQUIRE(seen == kAll, LL_STATUS_INVALID_ARG, "%s: .npy header has no %s", c->path,
                !(seen & kDescr)          ? "descr"
                : !(seen & kFortranOrder) ? "fortran_order"
                                          : "shape");
    return LL_STATUS_OK;
}

static ll_status find_type(const char *path, const char *descr, const struct npy_type **type) {
    for (size_t i = 0; i < sizeof npy_types / sizeof *npy_types; i++) {
        *type = &npy_types[i];
        if (strcmp(descr, npy_types[i].descr) == 0) return LL_STATUS_OK;
    }
    const char *hint = descr[0] == '>' ? "; convert it to little-endian with .astype" : "";
    size_t length = strlen(descr);
    for (size_t i = 0; i < sizeof npy_hints / sizeof *npy_hints; i++) {
        size_t tail = strlen(npy_hints[i].tail);
        if (length >= tail && strcmp(descr + length - tail, npy_hints[i].tail) == 0) {
            hint = npy_hints[i].hint;
            break;
        }
    }
    char shown[kQuoteBytes];
    return lli_fail(LL_STATUS_INVALID_ARG, "%s: element type '%s', wanted '<f4', '<f2', '<i4' or '<i8'%s",
                    path, lli_quote(descr, length, shown), hint);
}

bool lli_npy_has_magic(const void *bytes, size_t n_bytes) {
    return n_bytes >= kMagicBytes && memcmp(bytes, npy_magic, kMagicBytes) == 0;
}

/* Finds the header text: [*header_begin, *data_begin) of the file. */
static ll_status find_header(const lli_tensor_file *file, size_t *header_begin, size_t *data_begin) {
    const unsigned char *b = file->bytes;
    LLI_REQUIRE(lli_npy_has_magic(b, file->n_bytes), LL_STATUS_INVALID_ARG, "%s: not a .npy file",
                file->path);
    LLI_REQUIRE(file->n_bytes >= 8, LL_STATUS_INVALID_ARG, "%s: .npy file of %zu bytes, cut in its header",
                file->path, file->n_bytes);
    int major = b[6], minor = b[7];
    LLI_REQUIRE(major >= 1 && major <= 3 && minor == 0, LL_STATUS_INVALID_ARG,
                "%s: .npy version %d.%d, wanted 1.0, 2.0 or 3.0", file->path, major, minor);
    *header_begin = major == 1 ? 10 : 12;
    LLI_REQUIRE(file->n_bytes >= *header_begin, LL_STATUS_INVALID_ARG,
                "%s: .npy file of %zu bytes, cut in its header", file->path, file->n_bytes);
    uint64_t length = b[8] | (uint64_t)b[9] << 8;
    if (major > 1) length |= (uint64_t)b[10] << 16 | (uint64_t)b[11] << 24;
    LLI_REQUIRE(length <= file->n_bytes - *header_begin, LL_STATUS_INVALID_ARG,
                "%s: .npy header of %llu bytes, but the file ends %zu bytes after its start", file->path,
                (unsigned long long)length, file->n_bytes - *header_begin);
    *data_begin = *header_begin + (size_t)length;
    return LL_STATUS_OK;
}

ll_status lli_npy_parse(lli_tensor_file *file) {
    size_t header_begin = 0, data_begin = 0;
    LLI_TRY(find_header(file, &header_begin, &data_begin));
    const char *text = (const char *)file->bytes;
    npy_cursor cursor = {file->path, text + header_begin, text + header_begin, text + data_begin};
    npy_header header = {0};
    LLI_TRY(parse_header(&cursor, &header));
    const struct npy_type *type;
    LLI_TRY(find_type(file->path, header.descr, &type));

    int32_t n_wide = 0;
    for (int32_t i = 0; i < header.n_dims; i++) n_wide += header.dims[i] > 1;
    uint64_t bits, data_bytes = file->n_bytes - data_begin;
    LLI_REQUIRE(lli_shape_bits(header.dims, header.n_dims, type->element_bytes * 8, &bits),
                LL_STATUS_INVALID_ARG, "%s: the product of the .npy shape is beyond 2^63 bits", file->path);
    LLI_REQUIRE(!header.fortran_order || n_wide <= 1 || bits == 0, LL_STATUS_INVALID_ARG,
                "%s: column-major data (fortran_order True), wanted row-major: save it with "
                "numpy.ascontiguousarray",
                file->path);
    LLI_REQUIRE(bits / 8 == data_bytes, LL_STATUS_INVALID_ARG,
                "%s: %llu bytes of data, but the .npy header's shape and type take %llu", file->path,
                (unsigned long long)data_bytes, (unsigned long long)(bits / 8));
    const unsigned char *data = file->bytes + data_begin;
    LLI_REQUIRE(
        bits == 0 || (uintptr_t)data % (uintptr_t)type->element_bytes == 0, LL_STATUS_INVALID_ARG,
        "%s: .npy data start at byte %zu, not a multiple of the %d-byte element, so they cannot be used "
        "in place; save the file again with NumPy",
        file->path, data_begin, (int)type->element_bytes);

    file->entries = calloc(1, sizeof *file->entries);
    file->by_name = calloc(1, sizeof *file->by_name);
    LLI_REQUIRE(file->entries && file->by_name, LL_STATUS_MEMORY, "%s: out of memory", file->path);
    lli_tensor_entry *entry = file->entries;
    entry->tensor = (lli_tensor){.name = "", .dtype = type->dtype, .n_dims = header.n_dims};
    entry->tensor.data = bits ? (const void *)data : file->bytes;
    memcpy(entry->tensor.dims, header.dims, sizeof header.dims);
    entry->type_name = type->type_name;
    entry->end = data_bytes;
    file->by_name[0] = entry;
    file->count = 1;
    return LL_STATUS_OK;
}
