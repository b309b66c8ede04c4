/* What an opened file holds, and the parsers that fill it from bytes (a mapping, a fuzzer's input). */
#ifndef LLI_IO_TENSOR_FILE_INTERNAL_H
#define LLI_IO_TENSOR_FILE_INTERNAL_H

#include "io/tensor_file.h"

#include <stdbool.h>

typedef struct lli_tensor_entry {
    lli_tensor tensor;     /* as lli_tensor_file_at gives it */
    const char *type_name; /* the file's own word for the element type; static */
    uint64_t begin, end;   /* bytes from the start of the data section */
} lli_tensor_entry;

struct lli_tensor_file {
    char *path;
    const unsigned char *bytes;
    size_t n_bytes;
    bool mapped;                      /* close unmaps; otherwise the bytes are the caller's */
    lli_tensor_entry *entries;        /* in the order of the data */
    const lli_tensor_entry **by_name; /* sorted by strcmp */
    int64_t count;
    char *names; /* every name, each with its terminating 0 */
};

bool lli_npy_has_magic(const void *bytes, size_t n_bytes);
/* Each fills entries, by_name, names and count of a file whose path and bytes are set, or fails with a
 * sentence; either way lli_tensor_file_close frees what was made. */
ll_status lli_npy_parse(lli_tensor_file *file);
ll_status lli_safetensors_parse(lli_tensor_file *file);

/* A file over the caller's bytes, which must outlive it; `parse` is one of the two above. `path` only
 * appears in sentences. *file is NULL on failure. */
ll_status lli_tensor_file_parse(const char *path, const void *bytes, size_t n_bytes,
                                ll_status (*parse)(lli_tensor_file *), lli_tensor_file **file);

/* Bits of all elements; false where the product of the non-zero dims times element_bits is beyond
 * 2^63 - 1. Zero dims are left out of that product, so [2^62, 2^62, 0] is refused too: nobody who
 * multiplies some of the dims later can overflow. */
bool lli_shape_bits(const int64_t *dims, int32_t n_dims, int32_t element_bits, uint64_t *bits);

#endif
