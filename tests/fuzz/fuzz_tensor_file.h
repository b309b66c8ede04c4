/* What both fuzz targets do with a parser: every tensor it lets through must lie inside the input. */
#ifndef LLI_TESTS_FUZZ_TENSOR_FILE_H
#define LLI_TESTS_FUZZ_TENSOR_FILE_H

#include "io/tensor_file_internal.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

static inline void fuzz_require(int condition) {
    if (!condition) abort();
}

/* Element size by hand, not by the tables under test. */
static inline size_t fuzz_element_bytes(ll_dtype dtype) {
    return dtype == LL_DTYPE_I64 ? 8 : dtype == LL_DTYPE_F32 || dtype == LL_DTYPE_I32 ? 4 : 2;
}

static inline void fuzz_tensor(const lli_tensor_file *file, int64_t i, unsigned *sum) {
    lli_tensor tensor = lli_tensor_file_at(file, i), found = {0};
    fuzz_require(tensor.name && tensor.n_dims >= 0 && tensor.n_dims <= kTensorMaxDims);
    ll_status status = lli_tensor_file_find(file, tensor.name, &found);
    fuzz_require((status == LL_STATUS_OK) == (tensor.data != NULL));
    if (!tensor.data) return;
    fuzz_require(found.data == tensor.data && tensor.dtype != LL_DTYPE_NONE);
    size_t n_bytes = fuzz_element_bytes(tensor.dtype);
    for (int32_t d = 0; d < tensor.n_dims; d++) n_bytes *= (size_t)tensor.dims[d];
    fuzz_require(n_bytes == 0 || (uintptr_t)tensor.data % fuzz_element_bytes(tensor.dtype) == 0);
    fuzz_require(n_bytes <= file->n_bytes);
    for (size_t b = 0; b < n_bytes; b++)
        *sum += ((const uint8_t *)tensor.data)[b]; /* the sanitizer watches */
}

static inline void fuzz_parse(const uint8_t *bytes, size_t n_bytes, ll_status (*parse)(lli_tensor_file *)) {
    lli_tensor_file *file;
    uint8_t *exact =
        malloc(n_bytes ? n_bytes : 1); /* aligned like a mapping, with a red zone after its last byte */
    if (!exact) return;
    if (n_bytes) memcpy(exact, bytes, n_bytes);
    ll_status status = lli_tensor_file_parse("input", exact, n_bytes, parse, &file);
    fuzz_require((status == LL_STATUS_OK) == (file != NULL));
    if (file) {
        static volatile unsigned sink;
        unsigned sum = 0;
        lli_tensor tensor;
        for (int64_t i = 0; i < lli_tensor_file_count(file); i++) fuzz_tensor(file, i, &sum);
        fuzz_require((lli_tensor_file_find(file, NULL, &tensor) == LL_STATUS_OK) ==
                     (lli_tensor_file_count(file) == 1 && lli_tensor_file_at(file, 0).data != NULL));
        sink = sum;
        (void)sink;
    } else {
        fuzz_require(strncmp(ll_last_error(), "input: ", 7) == 0 && !strchr(ll_last_error(), '\n'));
    }
    lli_tensor_file_close(file);
    free(exact);
}

#endif
