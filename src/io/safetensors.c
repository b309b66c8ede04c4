/* Reading the .safetensors format:
 *
 *   | header bytes: u64 | header: JSON object, blanks | data section: tensors without gaps or overlaps |
 *   {"__metadata__": {string: string, ...}, NAME: {"dtype": "F32", "shape": [..], "data_offsets": [begin,
 * end]}, ...}
 *
 * The steps: safetensors_json.c checks and cuts the text, cJSON parses one entry after the other, then all
 * entries together are compared with the data section and indexed by name. There is no limit on the
 * header but the file's own size. Left out: the metadata's content, which nothing here reads. */
#include "io/safetensors_json.h"
#include "io/safetensors_types.h"
#include "io/tensor_file_internal.h"
#include "io/text.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

/* The longest sound entry (8 dims and 2 offsets of 16 digits) has under 300 bytes; the rest is for blanks. */
enum { kEntryBytesMax = 4096 };

/* For sentences: the file and the tensor in hand. */
typedef struct st_place {
    const char *path;
    char name[kQuoteBytes];
} st_place;

/* cJSON keeps numbers as double: at 2^53 and above it is no longer known which integer the file meant. */
static bool to_integer(const cJSON *item, int64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < 0x1p53)) return false;
    *value = (int64_t)item->valuedouble;
    return true;
}

static ll_status parse_type(const st_place *place, const cJSON *item, lli_tensor_entry *entry,
                            int32_t *bits) {
    LLI_REQUIRE(cJSON_IsString(item), LL_STATUS_INVALID_ARG, "%s: tensor '%s': dtype is not a string",
                place->path, place->name);
    for (int i = 0; i < kSafetensorsTypes; i++) {
        if (strcmp(item->valuestring, lli_safetensors_types[i].name) != 0) continue;
        entry->type_name = lli_safetensors_types[i].name;
        entry->tensor.dtype = lli_safetensors_types[i].dtype;
        *bits = lli_safetensors_types[i].element_bits;
        return LL_STATUS_OK;
    }
    char shown[kQuoteBytes];
    return lli_fail(LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s': dtype '%s' is not one of the format (F32, BF16, ...)", place->path,
                    place->name, lli_quote(item->valuestring, strlen(item->valuestring), shown));
}

static ll_status parse_shape(const st_place *place, const cJSON *array, lli_tensor *tensor) {
    LLI_REQUIRE(cJSON_IsArray(array), LL_STATUS_INVALID_ARG, "%s: tensor '%s': shape is not an array",
                place->path, place->name);
    for (const cJSON *item = array->child; item; item = item->next) {
        LLI_REQUIRE(tensor->n_dims < kTensorMaxDims, LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s' has more than %d dimensions", place->path, place->name, kTensorMaxDims);
        int64_t *dim = &tensor->dims[tensor->n_dims];
        LLI_REQUIRE(to_integer(item, dim), LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s': shape[%d] is %.17g, wanted an integer from 0 to below 2^53",
                    place->path, place->name, (int)tensor->n_dims, item->valuedouble);
        tensor->n_dims++;
    }
    return LL_STATUS_OK;
}

static ll_status parse_offsets(const st_place *place, const cJSON *array, uint64_t data_bytes,
                               lli_tensor_entry *entry) {
    int64_t offsets[2] = {0, 0};
    int n = 0;
    LLI_REQUIRE(cJSON_IsArray(array), LL_STATUS_INVALID_ARG, "%s: tensor '%s': data_offsets is not an array",
                place->path, place->name);
    for (const cJSON *item = array->child; item; item = item->next, n++) {
        LLI_REQUIRE(n < 2 && to_integer(item, &offsets[n]), LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s': data_offsets[%d] is %.17g, wanted two integers from 0 to below 2^53",
                    place->path, place->name, n, item->valuedouble);
    }
    LLI_REQUIRE(n == 2, LL_STATUS_INVALID_ARG, "%s: tensor '%s': data_offsets has %d numbers, wanted 2",
                place->path, place->name, n);
    entry->begin = (uint64_t)offsets[0];
    entry->end = (uint64_t)offsets[1];
    LLI_REQUIRE(entry->begin <= entry->end && entry->end <= data_bytes, LL_STATUS_INVALID_ARG,
                "%s: tensor '%s': data_offsets [%llu, %llu], wanted begin <= end <= the %llu bytes of data",
                place->path, place->name, (unsigned long long)entry->begin, (unsigned long long)entry->end,
                (unsigned long long)data_bytes);
    return LL_STATUS_OK;
}

/* Fills all of the entry but its name and data. */
static ll_status parse_entry(const st_place *place, const cJSON *object, uint64_t data_bytes,
                             lli_tensor_entry *entry) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    const cJSON *found[3] = {NULL};
    for (const cJSON *item = object->child; item; item = item->next) {
        int key = 0;
        while (key < 3 && strcmp(item->string, keys[key]) != 0) key++;
        char shown[kQuoteBytes];
        LLI_REQUIRE(key < 3 && !found[key], LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s': key '%s', wanted one each of dtype, shape and data_offsets",
                    place->path, place->name, lli_quote(item->string, strlen(item->string), shown));
        found[key] = item;
    }
    for (int key = 0; key < 3; key++) {
        LLI_REQUIRE(found[key], LL_STATUS_INVALID_ARG, "%s: tensor '%s' has no %s", place->path, place->name,
                    keys[key]);
    }
    int32_t element_bits = 0;
    uint64_t bits;
    LLI_TRY(parse_type(place, found[0], entry, &element_bits));
    LLI_TRY(parse_shape(place, found[1], &entry->tensor));
    LLI_TRY(parse_offsets(place, found[2], data_bytes, entry));
    LLI_REQUIRE(lli_shape_bits(entry->tensor.dims, entry->tensor.n_dims, element_bits, &bits),
                LL_STATUS_INVALID_ARG, "%s: tensor '%s': the product of its shape is beyond 2^63 bits",
                place->path, place->name);
    uint64_t span = entry->end - entry->begin;
    LLI_REQUIRE(bits % 8 == 0 && bits / 8 == span, LL_STATUS_INVALID_ARG,
                "%s: tensor '%s': data_offsets span %llu bytes, but its shape of %s takes %llu%s",
                place->path, place->name, (unsigned long long)span, entry->type_name,
                (unsigned long long)(bits / 8), bits % 8 ? " and a fraction" : "");
    return LL_STATUS_OK;
}

static ll_status parse_entry_text(const st_place *place, const lli_json_member *member, uint64_t data_bytes,
                                  lli_tensor_entry *entry) {
    LLI_REQUIRE(member->value_bytes <= kEntryBytesMax, LL_STATUS_INVALID_ARG,
                "%s: tensor '%s': its header entry has %zu bytes, wanted at most %d", place->path,
                place->name, member->value_bytes, kEntryBytesMax);
    /* A copy that ends in 0: cJSON up to 1.7.17 reads beyond a text given by its length alone. */
    char text[kEntryBytesMax + 1];
    memcpy(text, member->value, member->value_bytes);
    text[member->value_bytes] = 0;
    cJSON *object = cJSON_ParseWithOpts(text, NULL, 1);
    ll_status status;
    if (object && cJSON_IsObject(object)) {
        status = parse_entry(place, object, data_bytes, entry);
    } else {
        status = lli_fail(LL_STATUS_INVALID_ARG, "%s: tensor '%s': its header entry is not a JSON object",
                          place->path, place->name);
    }
    cJSON_Delete(object);
    return status;
}

static ll_status check_metadata(const char *path, const lli_json_member *metadata, bool *seen) {
    LLI_REQUIRE(!*seen, LL_STATUS_INVALID_ARG, "%s: __metadata__ occurs twice in the header", path);
    *seen = true;
    lli_json_step step = LLI_JSON_MALFORMED;
    if (metadata->value_bytes > 0 && metadata->value[0] == '{') {
        lli_json_cursor cursor = lli_json_members(metadata->value, metadata->value_bytes);
        lli_json_member member;
        while ((step = lli_json_next(&cursor, &member)) == LLI_JSON_MEMBER) {
            /* One string and nothing behind it. */
            if (member.value_bytes == 0 || *member.value != '"' ||
                lli_json_string_bytes(member.value) != member.value_bytes) {
                step = LLI_JSON_MALFORMED;
                break;
            }
        }
    }
    LLI_REQUIRE(step == LLI_JSON_END, LL_STATUS_INVALID_ARG,
                "%s: __metadata__ of the header is not an object of strings", path);
    return LL_STATUS_OK;
}

/* Decodes the quoted key to `out` (never longer than the key's text) with its 0; false if it is not sound. */
static bool decode_name(const lli_json_member *member, char *out) {
    size_t n = member->key_bytes - 2;
    if (!memchr(member->key, '\\', member->key_bytes)) {
        memcpy(out, member->key + 1, n);
        out[n] = 0;
        return true;
    }
    cJSON *item = cJSON_ParseWithLength(member->key, member->key_bytes);
    bool sound = item && cJSON_IsString(item) && strlen(item->valuestring) <= n;
    if (sound) memcpy(out, item->valuestring, strlen(item->valuestring) + 1);
    cJSON_Delete(item);
    return sound;
}

/* Adds the tensor whose decoded name is `name`, which file->names holds. */
static ll_status add_entry(lli_tensor_file *file, const char *name, const lli_json_member *member,
                           uint64_t data_bytes, int64_t *capacity) {
    st_place place = {.path = file->path};
    lli_quote(name, strlen(name), place.name);
    if (file->count == *capacity) {
        int64_t grown = *capacity ? *capacity * 2 : 16;
        lli_tensor_entry *entries = realloc(file->entries, (size_t)grown * sizeof *entries);
        LLI_REQUIRE(entries, LL_STATUS_MEMORY, "%s: out of memory after %lld tensors", file->path,
                    (long long)file->count);
        file->entries = entries;
        *capacity = grown;
    }
    lli_tensor_entry *entry = &file->entries[file->count];
    *entry = (lli_tensor_entry){.tensor.name = name};
    LLI_TRY(parse_entry_text(&place, member, data_bytes, entry));
    file->count++;
    return LL_STATUS_OK;
}

static int compare_data(const void *a, const void *b) {
    const lli_tensor_entry *l = a, *r = b;
    if (l->begin != r->begin) return l->begin < r->begin ? -1 : 1;
    if (l->end != r->end) return l->end < r->end ? -1 : 1; /* empty tensors before the one that has bytes */
    return (l->tensor.name > r->tensor.name) - (l->tensor.name < r->tensor.name); /* header order */
}

static int compare_name(const void *a, const void *b) {
    return strcmp((*(const lli_tensor_entry *const *)a)->tensor.name,
                  (*(const lli_tensor_entry *const *)b)->tensor.name);
}

/* The tensors must tile [0, data_bytes): the format forbids gaps, and an overlap would alias two tensors. */
static ll_status check_tiling(const lli_tensor_file *file, uint64_t data_bytes) {
    uint64_t reached = 0;
    for (int64_t i = 0; i < file->count; i++) {
        const lli_tensor_entry *entry = &file->entries[i];
        char shown[kQuoteBytes];
        LLI_REQUIRE(entry->begin == reached, LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s' begins at data byte %llu, but the tensors before it end at %llu (%s)",
                    file->path, lli_quote(entry->tensor.name, strlen(entry->tensor.name), shown),
                    (unsigned long long)entry->begin, (unsigned long long)reached,
                    entry->begin < reached ? "overlap" : "hole");
        reached = entry->end;
    }
    LLI_REQUIRE(reached == data_bytes, LL_STATUS_INVALID_ARG,
                "%s: %llu bytes of data, but the header's tensors end at %llu", file->path,
                (unsigned long long)data_bytes, (unsigned long long)reached);
    return LL_STATUS_OK;
}

static ll_status index_names(lli_tensor_file *file) {
    size_t n = (size_t)file->count;
    file->by_name = malloc((n ? n : 1) * sizeof *file->by_name);
    LLI_REQUIRE(file->by_name, LL_STATUS_MEMORY, "%s: out of memory for %zu names", file->path, n);
    for (size_t i = 0; i < n; i++) file->by_name[i] = &file->entries[i];
    if (n) qsort(file->by_name, n, sizeof *file->by_name, compare_name);
    for (size_t i = 1; i < n; i++) {
        const char *name = file->by_name[i]->tensor.name;
        char shown[kQuoteBytes];
        LLI_REQUIRE(strcmp(file->by_name[i - 1]->tensor.name, name) != 0, LL_STATUS_INVALID_ARG,
                    "%s: tensor '%s' occurs twice in the header", file->path,
                    lli_quote(name, strlen(name), shown));
    }
    return LL_STATUS_OK;
}

static void point_to_data(lli_tensor_file *file, const unsigned char *data) {
    for (int64_t i = 0; i < file->count; i++) {
        lli_tensor_entry *entry = &file->entries[i];
        size_t element = entry->tensor.dtype == LL_DTYPE_I64                                          ? 8
                         : entry->tensor.dtype == LL_DTYPE_F32 || entry->tensor.dtype == LL_DTYPE_I32 ? 4
                                                                                                      : 2;
        if (entry->tensor.dtype == LL_DTYPE_NONE) continue;
        if (entry->begin == entry->end) {
            entry->tensor.data = file->bytes;
        } else if ((uintptr_t)(data + entry->begin) % element == 0) {
            entry->tensor.data = data + entry->begin;
        }
    }
}

static ll_status parse_members(lli_tensor_file *file, const char *header, size_t header_bytes,
                               uint64_t data_bytes) {
    lli_json_cursor cursor = lli_json_members(header, header_bytes);
    lli_json_member member;
    lli_json_step step;
    int64_t capacity = 0;
    bool metadata = false;
    char *name = file->names;
    while ((step = lli_json_next(&cursor, &member)) == LLI_JSON_MEMBER) {
        char shown[kQuoteBytes];
        LLI_REQUIRE(decode_name(&member, name), LL_STATUS_INVALID_ARG,
                    "%s: tensor name %s of the header is not sound JSON", file->path,
                    lli_quote(member.key, member.key_bytes, shown));
        if (strcmp(name, "__metadata__") == 0) {
            LLI_TRY(check_metadata(file->path, &member, &metadata));
        } else {
            LLI_TRY(add_entry(file, name, &member, data_bytes, &capacity));
            name += strlen(name) + 1;
        }
    }
    LLI_REQUIRE(step == LLI_JSON_END, LL_STATUS_INVALID_ARG,
                "%s: .safetensors header byte %zu: not the JSON of an object's members", file->path,
                (size_t)(cursor.at - header));
    return LL_STATUS_OK;
}

ll_status lli_safetensors_parse(lli_tensor_file *file) {
    LLI_REQUIRE(file->n_bytes >= 8, LL_STATUS_INVALID_ARG,
                "%s: %zu bytes, too short for .safetensors (and not .npy)", file->path, file->n_bytes);
    uint64_t header_bytes;
    memcpy(&header_bytes, file->bytes, 8);
    LLI_REQUIRE(header_bytes > 0 && header_bytes <= file->n_bytes - 8, LL_STATUS_INVALID_ARG,
                "%s: .safetensors header length %llu, but %zu bytes follow it (cut short, or another format)",
                file->path, (unsigned long long)header_bytes, file->n_bytes - 8);
    const char *header = (const char *)file->bytes + 8;
    uint64_t data_bytes = file->n_bytes - 8 - header_bytes;
    LLI_TRY(lli_header_check(file->path, header, (size_t)header_bytes));
    file->names =
        malloc((size_t)header_bytes); /* a decoded name and its 0 are shorter than the quoted text */
    LLI_REQUIRE(file->names, LL_STATUS_MEMORY, "%s: out of memory for a header of %llu bytes", file->path,
                (unsigned long long)header_bytes);
    LLI_TRY(parse_members(file, header, (size_t)header_bytes, data_bytes));
    if (file->count) qsort(file->entries, (size_t)file->count, sizeof *file->entries, compare_data);
    LLI_TRY(check_tiling(file, data_bytes));
    point_to_data(file, file->bytes + 8 + header_bytes);
    return index_names(file);
}
