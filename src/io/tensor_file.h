/* Tensors in files: .npy and .safetensors, mapped into memory and never copied. A header is data from a
 * stranger: every length, offset, shape and name in it is checked against the file before use, and what
 * is allocated is a small multiple of the header bytes really there, whatever they claim. Part of the
 * program, not of liblogitless. Little-endian machines only, as both formats are used here.
 *
 * Left out: a file that another process cuts shorter while it is mapped ends the program with SIGBUS. */
#ifndef LLI_IO_TENSOR_FILE_H
#define LLI_IO_TENSOR_FILE_H

#include "core/status.h"

enum { kTensorMaxDims = 8 };

/* A tensor in a mapped file, or one to be written. Row-major and contiguous. The product of the non-zero
 * dims times the element's bytes always fits int64. */
typedef struct lli_tensor {
    const char *name; /* owned by the file; "" for .npy */
    const void *data; /* aligned to its element; inside the mapping; NULL: find would refuse it */
    ll_dtype dtype;
    int32_t n_dims;
    int64_t dims[kTensorMaxDims];
} lli_tensor;

typedef struct lli_tensor_file lli_tensor_file;

/* Opens by content (the .npy magic, else .safetensors) and checks the whole header.
 * INVALID_ARG with a sentence "PATH: ..." (what was found, what was wanted); IO if the system refuses. */
ll_status lli_tensor_file_open(const char *path, lli_tensor_file **file);
void lli_tensor_file_close(lli_tensor_file *file); /* NULL is fine */

/* The tensor called `name`; NULL: the only tensor of the file. The sentence of a failure lists the names
 * that exist (the first few and how many more). A tensor of a type that is not used here (F64, U8, ...) or
 * that does not start on a multiple of its element is refused here, not when the file is opened. */
ll_status lli_tensor_file_find(const lli_tensor_file *file, const char *name, lli_tensor *tensor);
int64_t lli_tensor_file_count(const lli_tensor_file *file);
/* Tensor number i in the order of the data, 0 <= i < count. One that find would refuse has data NULL, and
 * dtype NONE where its type is the reason. */
lli_tensor lli_tensor_file_at(const lli_tensor_file *file, int64_t i);

/* Tells the system that bytes [data, data + bytes) of the mapping will not be read again soon, so that a
 * pass over a file larger than memory stays small. */
void lli_tensor_file_drop(const lli_tensor_file *file, const void *data, size_t bytes);

/* Writes `count` tensors to `path` in the .safetensors format, by way of a temporary file in the same
 * directory that is renamed at the end: under its final name a file is whole or absent, or still the old
 * one. The header lists them in the order given; their data go widest elements first, so that each is
 * aligned (the format allows no gaps).
 * metadata: NULL, or `n_metadata` key/value pairs (key0, value0, key1, ...).
 * INVALID_ARG: a name or metadata text that is missing, repeated or not UTF-8; a bad dtype, shape or data
 * pointer. IO (disk full, no permission, ...) with path and reason; the temporary file is removed. */
ll_status lli_safetensors_write(const char *path, const lli_tensor *tensors, int64_t count,
                                const char *const *metadata, int64_t n_metadata);

#endif
