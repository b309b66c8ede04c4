/* Opening, looking up and closing a file of tensors. The formats are in npy.c and safetensors.c. */
#define _DEFAULT_SOURCE /* madvise, strdup */
#include "io/tensor_file_internal.h"
#include "io/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "both formats store little-endian elements, and they are used where they lie"
#endif

enum { kNamesListed = 8 };

bool lli_shape_bits(const int64_t *dims, int32_t n_dims, int32_t element_bits, uint64_t *bits) {
    uint64_t product = (uint64_t)element_bits;
    bool empty = false;
    for (int32_t i = 0; i < n_dims; i++) {
        if (dims[i] == 0) {
            empty = true;
        } else if (dims[i] < 0 || product > (uint64_t)INT64_MAX / (uint64_t)dims[i]) {
            return false;
        } else {
            product *= (uint64_t)dims[i];
        }
    }
    *bits = empty ? 0 : product;
    return true;
}

ll_status lli_tensor_file_parse(const char *path, const void *bytes, size_t n_bytes,
                                ll_status (*parse)(lli_tensor_file *), lli_tensor_file **file) {
    *file = NULL;
    lli_tensor_file *made = calloc(1, sizeof *made);
    if (!made || !(made->path = strdup(path))) {
        free(made);
        return lli_fail(LL_STATUS_MEMORY, "%s: out of memory", path);
    }
    made->bytes = bytes;
    made->n_bytes = n_bytes;
    ll_status status = parse(made);
    if (status == LL_STATUS_OK) {
        *file = made;
    } else {
        lli_tensor_file_close(made);
    }
    return status;
}

static ll_status parse_by_content(lli_tensor_file *file) {
    if (lli_npy_has_magic(file->bytes, file->n_bytes)) return lli_npy_parse(file);
    LLI_REQUIRE(file->n_bytes < 4 || memcmp(file->bytes, "PK\3\4", 4) != 0, LL_STATUS_INVALID_ARG,
                "%s: a zip archive (.npz, or a PyTorch checkpoint), wanted .npy or .safetensors", file->path);
    return lli_safetensors_parse(file);
}

ll_status lli_tensor_file_open(const char *path, lli_tensor_file **file) {
    *file = NULL;
    /* O_NONBLOCK: opening a pipe must not wait for its writer; it has no effect on a regular file. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    LLI_REQUIRE(fd >= 0, LL_STATUS_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0) {
        int error = errno;
        close(fd);
        return lli_fail(LL_STATUS_IO, "%s: cannot read: %s", path, strerror(error));
    }
    if (!S_ISREG(info.st_mode) || info.st_size == 0) {
        close(fd);
        return lli_fail(LL_STATUS_INVALID_ARG, "%s: %s, wanted a .npy or .safetensors file", path,
                        S_ISDIR(info.st_mode)   ? "a directory"
                        : S_ISREG(info.st_mode) ? "an empty file"
                                                : "not a regular file");
    }
    size_t n_bytes = (size_t)info.st_size;
    void *bytes = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    int error = errno;
    close(fd);
    LLI_REQUIRE(bytes != MAP_FAILED, LL_STATUS_IO, "%s: cannot map %zu bytes: %s", path, n_bytes,
                strerror(error));
    ll_status status = lli_tensor_file_parse(path, bytes, n_bytes, parse_by_content, file);
    if (*file) {
        (*file)->mapped = true;
    } else {
        munmap(bytes, n_bytes);
    }
    return status;
}

void lli_tensor_file_close(lli_tensor_file *file) {
    if (!file) return;
    if (file->mapped) munmap((void *)(uintptr_t)file->bytes, file->n_bytes);
    free(file->names);
    free(file->by_name);
    free(file->entries);
    free(file->path);
    free(file);
}

static int compare_name(const void *key, const void *element) {
    return strcmp(key, (*(const lli_tensor_entry *const *)element)->tensor.name);
}

/* "'a', 'b', 'c' and 5 more", or "no tensor". */
static const char *list_names(const lli_tensor_file *file, char *text, size_t text_bytes) {
    if (file->count == 0) return "no tensor";
    size_t used = 0;
    int64_t i = 0;
    for (; i < file->count && i < kNamesListed && used + kQuoteBytes + 40 < text_bytes; i++) {
        char shown[kQuoteBytes];
        const char *name = file->entries[i].tensor.name;
        used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s'", i ? ", " : "",
                                 lli_quote(name, strlen(name), shown));
    }
    if (i < file->count) {
        snprintf(text + used, text_bytes - used, " and %lld more", (long long)(file->count - i));
    }
    return text;
}

static ll_status refuse_entry(const lli_tensor_file *file, const lli_tensor_entry *entry) {
    char shown[kQuoteBytes];
    lli_quote(entry->tensor.name, strlen(entry->tensor.name), shown);
    if (entry->tensor.dtype == LL_DTYPE_NONE) {
        const char *type = entry->type_name;
        return lli_fail(LL_STATUS_INVALID_ARG, "%s: tensor '%s' is %s, wanted F32, BF16, F16, I32 or I64%s",
                        file->path, shown, type, strcmp(type, "F64") == 0 ? " (convert it to F32)" : "");
    }
    /* The last tensor ends where the file ends. */
    uint64_t data_begin = file->n_bytes - file->entries[file->count - 1].end;
    return lli_fail(LL_STATUS_INVALID_ARG,
                    "%s: the data of tensor '%s' start at byte %llu of the file, not a multiple of its %s "
                    "element, so they cannot be used in place; write the file again with a current library",
                    file->path, shown, (unsigned long long)(data_begin + entry->begin), entry->type_name);
}

ll_status lli_tensor_file_find(const lli_tensor_file *file, const char *name, lli_tensor *tensor) {
    const lli_tensor_entry *entry = NULL;
    char names[320];
    if (name) {
        const lli_tensor_entry **found =
            bsearch(name, file->by_name, (size_t)file->count, sizeof *file->by_name, compare_name);
        char shown[kQuoteBytes];
        LLI_REQUIRE(found, LL_STATUS_INVALID_ARG, "%s: no tensor '%s'; the file has %s", file->path,
                    lli_quote(name, strlen(name), shown),
                    lli_npy_has_magic(file->bytes, file->n_bytes) ? "one tensor, without a name (.npy)"
                                                                  : list_names(file, names, sizeof names));
        entry = *found;
    } else {
        LLI_REQUIRE(file->count == 1, LL_STATUS_INVALID_ARG, "%s: a tensor must be named, wanted one of %s",
                    file->path, list_names(file, names, sizeof names));
        entry = file->entries;
    }
    if (!entry->tensor.data) return refuse_entry(file, entry);
    *tensor = entry->tensor;
    return LL_STATUS_OK;
}

int64_t lli_tensor_file_count(const lli_tensor_file *file) {
    return file->count;
}

lli_tensor lli_tensor_file_at(const lli_tensor_file *file, int64_t i) {
    return file->entries[i].tensor;
}

void lli_tensor_file_drop(const lli_tensor_file *file, const void *data, size_t bytes) {
    uintptr_t first = (uintptr_t)file->bytes, last = first + file->n_bytes, begin = (uintptr_t)data;
    if (!file->mapped || begin < first || begin > last || bytes > last - begin) return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), end = begin + bytes;
    /* Outward below, so that pages shared by consecutive pieces do not pile up; inward above, because the
     * next piece is about to be read. The pages are clean: a byte read again is only read slower. */
    begin -= begin % page;
    if (end != last) end -= end % page;
    if (end > begin) madvise((void *)begin, end - begin, MADV_DONTNEED);
}
