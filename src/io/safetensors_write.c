/* Writing the .safetensors format. Apart from the reader: it trusts its caller's memory but not the disk.
 *
 *   .logitless-PID-N.tmp in the target's directory -> header, data, fsync -> rename to the target
 *
 * A crash at any point leaves the old file or the new one under the final name, never a part. Left out: a
 * process killed half-way leaves its temporary file behind. */
#define _DEFAULT_SOURCE /* fsync, strdup */
#include "io/safetensors_types.h"
#include "io/tensor_file_internal.h"
#include "io/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* write() takes at most 0x7ffff000 bytes at once on Linux; other systems refuse more than INT_MAX. */
static const size_t write_bytes_max = (size_t)1 << 30;

/* A growing text; after a failed realloc `failed` stays set and nothing more is added. */
typedef struct st_text {
    char *bytes;
    size_t used, capacity;
    bool failed;
} st_text;

static void append(st_text *text, const char *bytes, size_t n) {
    if (!text->failed && n > text->capacity - text->used) {
        size_t grown = 2 * text->capacity + n + 256;
        char *moved = realloc(text->bytes, grown);
        if (moved) {
            text->bytes = moved;
            text->capacity = grown;
        } else {
            text->failed = true;
        }
    }
    if (text->failed) return;
    memcpy(text->bytes + text->used, bytes, n);
    text->used += n;
}

static void append_text(st_text *text, const char *string) {
    append(text, string, strlen(string));
}

static void append_number(st_text *text, uint64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
    append_text(text, digits);
}

static void append_quoted(st_text *text, const char *string) {
    append_text(text, "\"");
    for (const char *s = string; *s; s++) {
        char escape[8];
        if (*s == '"' || *s == '\\') {
            snprintf(escape, sizeof escape, "\\%c", *s);
            append_text(text, escape);
        } else if ((unsigned char)*s < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*s);
            append_text(text, escape);
        } else {
            append(text, s, 1);
        }
    }
    append_text(text, "\"");
}

static bool is_utf8(const char *text) {
    for (size_t n = strlen(text), step; n > 0; text += step, n -= step) {
        step = lli_utf8_bytes(text, n);
        if (step == 0) return false;
    }
    return true;
}

static const lli_safetensors_type *find_type(ll_dtype dtype) {
    for (int i = 0; i < kSafetensorsTypes && dtype != LL_DTYPE_NONE; i++) {
        if (lli_safetensors_types[i].dtype == dtype) return &lli_safetensors_types[i];
    }
    return NULL;
}

/* What is written of each tensor, and where. */
typedef struct st_part {
    const lli_tensor *tensor;
    const char *type_name;
    int32_t element_bits;
    uint64_t begin, n_bytes;
} st_part;

static int compare_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The same name or key twice is legal JSON and loses one of the two in every reader. */
static ll_status check_texts(const char *path, const char *what, const char *const *texts, int64_t count,
                             int64_t step) {
    const char **sorted = malloc((size_t)(count + 1) * sizeof *sorted);
    LLI_REQUIRE(sorted, LL_STATUS_MEMORY, "%s: out of memory", path);
    const char *fault = NULL, *culprit = "";
    for (int64_t i = 0; i < count && !fault; i++) {
        sorted[i] = texts[i * step];
        if (!sorted[i] || !is_utf8(sorted[i])) {
            culprit = sorted[i] ? sorted[i] : "";
            fault = sorted[i] ? "is not UTF-8" : "is missing";
        }
    }
    if (!fault) qsort(sorted, (size_t)count, sizeof *sorted, compare_name);
    for (int64_t i = 1; i < count && !fault; i++) {
        if (strcmp(sorted[i - 1], sorted[i]) == 0) {
            culprit = sorted[i];
            fault = "is given twice";
        }
    }
    char shown[kQuoteBytes];
    lli_quote(culprit, strlen(culprit), shown);
    free(sorted);
    LLI_REQUIRE(!fault, LL_STATUS_INVALID_ARG, "%s: %s '%s' %s", path, what, shown, fault);
    return LL_STATUS_OK;
}

static ll_status check_names(const char *path, const lli_tensor *tensors, int64_t count) {
    const char **names = malloc((size_t)(count + 1) * sizeof *names);
    LLI_REQUIRE(names, LL_STATUS_MEMORY, "%s: out of memory", path);
    for (int64_t i = 0; i < count; i++) names[i] = tensors[i].name;
    ll_status status = check_texts(path, "tensor name", names, count, 1);
    free(names);
    return status;
}

static ll_status check_tensor(const char *path, const lli_tensor *tensor, st_part *part) {
    char shown[kQuoteBytes];
    lli_quote(tensor->name, strlen(tensor->name), shown);
    LLI_REQUIRE(strcmp(tensor->name, "__metadata__") != 0, LL_STATUS_INVALID_ARG,
                "%s: the tensor name __metadata__ is reserved by the format", path);
    part->tensor = tensor;
    const lli_safetensors_type *type = find_type(tensor->dtype);
    if (!type) {
        return lli_fail(LL_STATUS_INVALID_ARG, "%s: tensor '%s': dtype %d, wanted f32, bf16, f16, i32 or i64",
                        path, shown, (int)tensor->dtype);
    }
    part->type_name = type->name;
    part->element_bits = type->element_bits;
    LLI_REQUIRE(tensor->n_dims >= 0 && tensor->n_dims <= kTensorMaxDims, LL_STATUS_INVALID_ARG,
                "%s: tensor '%s': %d dims, wanted 0 to %d", path, shown, (int)tensor->n_dims, kTensorMaxDims);
    uint64_t bits;
    LLI_REQUIRE(lli_shape_bits(tensor->dims, tensor->n_dims, part->element_bits, &bits),
                LL_STATUS_INVALID_ARG,
                "%s: tensor '%s': a dim is negative or their product is beyond 2^63 bits", path, shown);
    part->n_bytes = bits / 8;
    LLI_REQUIRE(tensor->data || bits == 0, LL_STATUS_INVALID_ARG, "%s: tensor '%s': data is NULL", path,
                shown);
    return LL_STATUS_OK;
}

/* Widest elements first: the data section starts on a multiple of 8, so every tensor is aligned. */
static void place_parts(st_part *parts, int64_t count) {
    uint64_t reached = 0;
    for (int32_t bits = 64; bits >= 16; bits /= 2) {
        for (int64_t i = 0; i < count; i++) {
            if (parts[i].element_bits != bits) continue;
            parts[i].begin = reached;
            reached += parts[i].n_bytes;
        }
    }
}

/* The 8 length bytes and the header, padded with blanks to a multiple of 8. */
static void build_header(st_text *text, const st_part *parts, int64_t count, const char *const *metadata,
                         int64_t n_metadata) {
    append(text, "\0\0\0\0\0\0\0\0{", 9);
    const char *separator = "";
    if (n_metadata > 0) {
        append_text(text, "\"__metadata__\":");
        for (int64_t i = 0; i < n_metadata; i++) {
            append_text(text, i ? "," : "{");
            append_quoted(text, metadata[2 * i]);
            append_text(text, ":");
            append_quoted(text, metadata[2 * i + 1]);
        }
        append_text(text, "}");
        separator = ",";
    }
    for (int64_t i = 0; i < count; i++) {
        append_text(text, separator);
        append_quoted(text, parts[i].tensor->name);
        append_text(text, ":{\"dtype\":\"");
        append_text(text, parts[i].type_name);
        append_text(text, "\",\"shape\":[");
        for (int32_t d = 0; d < parts[i].tensor->n_dims; d++) {
            if (d) append_text(text, ",");
            append_number(text, (uint64_t)parts[i].tensor->dims[d]);
        }
        append_text(text, "],\"data_offsets\":[");
        append_number(text, parts[i].begin);
        append_text(text, ",");
        append_number(text, parts[i].begin + parts[i].n_bytes);
        append_text(text, "]}");
        separator = ",";
    }
    append_text(text, "}");
    while (!text->failed && text->used % 8) append_text(text, " ");
    uint64_t header_bytes = text->used - 8;
    if (!text->failed) memcpy(text->bytes, &header_bytes, 8);
}

/* 0, or an errno. */
static int write_all(int fd, const void *bytes, uint64_t n_bytes) {
    const char *at = bytes;
    while (n_bytes > 0) {
        ssize_t done = write(fd, at, n_bytes < write_bytes_max ? (size_t)n_bytes : write_bytes_max);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : EIO;
        at += done;
        n_bytes -= (uint64_t)done;
    }
    return 0;
}

static int write_parts(int fd, const st_text *header, const st_part *parts, int64_t count) {
    int error = write_all(fd, header->bytes, header->used);
    for (int32_t bits = 64; bits >= 16; bits /= 2) {
        for (int64_t i = 0; i < count && !error; i++) {
            if (parts[i].element_bits == bits) error = write_all(fd, parts[i].tensor->data, parts[i].n_bytes);
        }
    }
    /* Without it a rename may reach the disk before the data do: a crash would leave an empty final file. */
    if (!error && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) error = errno;
    return error;
}

/* A new file next to `path`, mode 0666 less the umask as for any other output; -1 and errno. */
static int open_temporary(const char *path, char *name, size_t name_bytes) {
    const char *slash = strrchr(path, '/');
    for (int n = 0; n < 1000; n++) {
        snprintf(name, name_bytes, "%.*s.logitless-%ld-%d.tmp", slash ? (int)(slash - path + 1) : 0, path,
                 (long)getpid(), n);
        int fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

/* Makes the rename itself durable; a system that cannot sync a directory is no failure of the write. */
static void sync_directory(const char *path) {
    const char *slash = strrchr(path, '/');
    char *directory = strdup(path);
    if (!directory) return;
    if (slash) directory[slash - path + 1] = 0;
    int fd = open(slash ? directory : ".", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(directory);
}

static ll_status write_file(const char *path, const st_text *header, const st_part *parts, int64_t count) {
    struct stat info;
    /* rename() onto /dev/null or a pipe would replace the device by a file. */
    LLI_REQUIRE(stat(path, &info) != 0 || S_ISREG(info.st_mode), LL_STATUS_IO,
                "%s: cannot write: it exists and is not a regular file", path);
    size_t name_bytes = strlen(path) + 64;
    char *name = malloc(name_bytes);
    LLI_REQUIRE(name, LL_STATUS_MEMORY, "%s: out of memory", path);
    int fd = open_temporary(path, name, name_bytes);
    int error = fd < 0 ? errno : write_parts(fd, header, parts, count);
    if (fd >= 0) {
        /* close can be the first to report a full disk or quota (NFS). */
        if (close(fd) != 0 && !error) error = errno;
        if (!error && rename(name, path) != 0) error = errno;
        if (error) unlink(name);
    }
    free(name);
    LLI_REQUIRE(!error, LL_STATUS_IO, "%s: cannot write: %s", path, strerror(error));
    sync_directory(path);
    return LL_STATUS_OK;
}

ll_status lli_safetensors_write(const char *path, const lli_tensor *tensors, int64_t count,
                                const char *const *metadata, int64_t n_metadata) {
    if (!metadata) n_metadata = 0;
    LLI_TRY(check_names(path, tensors, count));
    LLI_TRY(check_texts(path, "metadata key", metadata, n_metadata, 2));
    for (int64_t i = 0; i < n_metadata; i++) {
        const char *value = metadata[2 * i + 1];
        LLI_REQUIRE(value && is_utf8(value), LL_STATUS_INVALID_ARG, "%s: metadata value %lld is %s", path,
                    (long long)i, value ? "not UTF-8" : "missing");
    }
    st_part *parts = calloc((size_t)count + 1, sizeof *parts);
    LLI_REQUIRE(parts, LL_STATUS_MEMORY, "%s: out of memory", path);
    st_text header = {0};
    ll_status status = LL_STATUS_OK;
    for (int64_t i = 0; i < count && status == LL_STATUS_OK; i++) {
        status = check_tensor(path, &tensors[i], &parts[i]);
    }
    if (status == LL_STATUS_OK) {
        place_parts(parts, count);
        build_header(&header, parts, count, metadata, n_metadata);
        status = header.failed ? lli_fail(LL_STATUS_MEMORY, "%s: out of memory", path)
                               : write_file(path, &header, parts, count);
    }
    free(header.bytes);
    free(parts);
    return status;
}
